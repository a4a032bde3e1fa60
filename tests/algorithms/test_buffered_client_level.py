"""Asynchronous rounds of a trusted server: epsilon of P participations, each charged to its client by the server's ledger."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
from conftest import SMALL
from scipy import stats
from simulate import simulate
from support.journals import cut_debit

import dpcfl_net as dpcfl
from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.algorithms.one_model import PARTICIPATION
from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.core.types import State
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.asynchronous import Outcome
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.central_dp import CENTRAL_SERVER, CentralDPServer
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.slots import slot_of
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.transport.keys import make_keys

CLIENTS, ROUNDS, MOST, CLIP = 6, 8, 5, 0.5
SEEDED = {"noise": "seeded", "noise_seed": "5eed" * 16}
SECRET = {"noise": "os", "noise_seed": None}
TRUSTED = {"epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server"}
BUFFER = {"buffer": 3, "participations": MOST, "durations": [1.0] * 5 + [3.0]}
Z = stats.norm.isf(1e-8)  # false alarms below 1e-7


def job_for(folder, name="dp-fedavg", asynchronous=None, privacy=None, **changes):
    document = {
        **SMALL, "rounds": ROUNDS, "model": {"name": "linear"},
        "data": {"dataset": "digits", "clients": [CLIENTS], "train_per_client": 60, "test_per_client": 20},
        "local": {"batch_size": 20, "lr": 0.2, "clip": CLIP}, "privacy": {**TRUSTED, **SEEDED, **(privacy or {})},
        "algorithm": {"name": name, "asynchronous": asynchronous or BUFFER}, **changes,
    }  # fmt: skip
    keys = folder / f"keys-{len([*folder.glob('keys-*')])}"
    keys.mkdir(parents=True)
    make_keys(keys, CLIENTS)
    return make_job(config.resolve(document), keys)


def published(folder):
    """(version, clients) of each charge of the trusted server."""
    names = {slot_of(PARTICIPATION, client): client for client in range(CLIENTS)}
    lines = read_ledger(folder / "ledgers" / CENTRAL_SERVER)
    return [(line.round, [names[name] for name in line.slots]) for line in lines if line.type == "debit"]


class Scripted(Federation):
    """Clients that answer in the order of a script, with fixed updates; None in place of an update: no answer."""

    def __init__(self, job, order, updates, folder, **more):
        super().__init__(job.protocol, **more)
        self.order, self.updates, self.open, self.submitted = list(order), updates, {}, []
        self.central_server = CentralDPServer.of(job.algorithm, folder / "ledgers", job.experiment.noise, durable=False)

    def _exchange(self, kind, tasks, take, window):
        raise AssertionError("asynchronous rounds make no calls")

    def submit(self, work):
        if work.client not in self.open:
            self.open[work.client] = work
            self.submitted.append((self.round, work.client, work.participation))

    def next_outcome(self, among=None):
        client = next(c for c in self.order if c in self.open and (among is None or c in among))
        self.order.remove(client)
        del self.open[client]
        update = self.updates[client]
        return Outcome(client, None if update is None else {"update": update})


def drive(job, order, updates, folder, *, state=None, rounds=None, first=1, **more):
    """States after each version of a job with scripted clients, and the federation."""
    fed, algorithm = Scripted(job, order, updates, folder, **more), algorithm_of(job.protocol)
    states = [algorithm.start(fed) if state is None else state]
    with closing(fed.central_server):
        for t in range(first, (rounds or job.protocol.rounds) + 1):
            fed.round = t
            states.append(algorithm.round(states[-1], t, fed))
    return states, fed


def updates_of(job, seed=0, size=1.0):
    rng, p = np.random.default_rng(seed), job.protocol.model.parameters
    return {client: (size * rng.standard_normal(p)).astype(np.float32) for client in range(CLIENTS)}


def arrivals(seed=0):
    rng = np.random.default_rng(seed)
    return [int(client) for _ in range(4 * ROUNDS) for client in rng.permutation(CLIENTS)]


# ---- epsilon


def gaussian_delta(epsilon, mu):
    """Exact delta of a mu-GDP mechanism (Balle and Wang 2018; Dong, Roth, Su 2022)."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("zero-out", 1), ("replace-one", 2)])
def test_epsilon_is_that_of_so_many_gaussians_without_amplification(tmp_path, adjacency, sensitivity):
    job = job_for(tmp_path, privacy={"adjacency": adjacency, **SECRET})
    z = job.protocol.curator_noise_multiplier
    mu = sensitivity * math.sqrt(MOST) / z
    assert gaussian_delta(8, mu) <= 1e-2 < gaussian_delta(8, 1.0001 * mu)
    synchronous = {"name": "dp-fedavg", "sampling_rate": 1.0, "sampling": "poisson"}
    whole = job_for(tmp_path, privacy={"adjacency": adjacency}, rounds=MOST, algorithm=synchronous)
    assert whole.protocol.curator_noise_multiplier == z
    sampled = job_for(tmp_path, privacy={"adjacency": adjacency}, algorithm={**synchronous, "sampling_rate": 0.5})
    assert sampled.protocol.curator_noise_multiplier < z  # what a secret sample of half of the clients would save


def test_the_statement_says_how_often_a_client_takes_part_and_what_is_not_hidden(tmp_path):
    said = privacy_statement(job_for(tmp_path, privacy=SECRET).protocol, None)
    assert f"at most {MOST} participations of each client" in said["covered"][0]
    for words in (
        "no secret sample",
        "takes part",
        "order of arrival",
        "trusted and receives the raw update of every participation",
    ):
        assert words in str(said["not_covered"])


def test_a_worker_refuses_a_server_that_adds_too_little_noise(tmp_path):
    job = job_for(tmp_path)
    z = job.protocol.curator_noise_multiplier
    weak = Job(job.protocol.model_copy(update={"curator_noise_multiplier": 0.99 * z}), job.experiment)
    with pytest.raises(Refused, match="claim"):
        make_host(weak, 0, tmp_path / "ledgers", durable=False)
    make_host(job, 0, tmp_path / "ledgers", durable=False).close()


# ---- what a version releases


def test_a_version_is_the_sum_of_clipped_and_weighted_updates_over_the_buffer(tmp_path):
    """Two runs of one noise seed differ by their updates alone."""
    job, order = job_for(tmp_path, asynchronous={**BUFFER, "server_lr": 0.7}), [0, 1, 2, 3, 4, 0, 5, 1, 0]
    updates = updates_of(job)
    silent = dict.fromkeys(range(CLIENTS), np.zeros(job.protocol.model.parameters, np.float32))
    (moving, _), (still, _) = (
        drive(job, order, each, tmp_path / name, rounds=3) for name, each in (("a", updates), ("b", silent))
    )
    clipped = {client: CLIP * update / np.linalg.norm(update) for client, update in updates.items()}
    fresh, once, twice = 1.0, 2**-0.5, 3**-0.5
    expected = [
        clipped[0] + clipped[1] + clipped[2],
        once * clipped[3] + once * clipped[4] + fresh * clipped[0],
        twice * clipped[5] + once * clipped[1] + fresh * clipped[0],
    ]
    for t in range(3):
        with_updates, without = (states[t + 1].models[0] - states[t].models[0] for states in (moving, still))
        np.testing.assert_allclose(with_updates - without, 0.7 / 3 * expected[t], atol=2e-6)
    z = job.protocol.curator_noise_multiplier
    noise = np.concatenate([(after.models - before.models)[0] for before, after in pairwise(still)])
    assert abs(noise.std() / (0.7 * z * CLIP / 3) - 1) < Z / math.sqrt(2 * noise.size)


def test_a_client_changes_only_versions_that_it_is_charged_for_each_by_at_most_the_clip_norm(tmp_path):
    """Worlds with and without the updates of client 2: same schedule, same noise, and the others' updates do not change."""
    job = job_for(tmp_path)
    there = updates_of(job, size=3.0)
    zeroed = {**there, 2: np.zeros_like(there[2])}
    (with_client, one), (without, other) = (
        drive(job, arrivals(), each, tmp_path / name) for name, each in (("a", there), ("b", zeroed))
    )
    assert one.submitted == other.submitted
    assert published(tmp_path / "a") == published(tmp_path / "b")
    changed = []
    for t, clients in published(tmp_path / "a"):
        steps = [states[t].models[0] - states[t - 1].models[0] for states in (with_client, without)]
        distance = float(np.linalg.norm(steps[0] - steps[1]))
        assert distance <= (CLIP / 3 * (1 + 1e-4) if 2 in clients else 1e-5)
        changed += [t] if distance > 1e-3 else []
    assert changed == [t for t, clients in published(tmp_path / "a") if 2 in clients]
    assert 1 <= len(changed) <= MOST


def test_an_answer_that_is_missing_or_too_old_counts_as_zeros(tmp_path):
    """Charges and noise are those of any other answer, so that neither shows that an answer is missing."""
    job = job_for(tmp_path, asynchronous={**BUFFER, "max_staleness": 0})
    updates, order = updates_of(job), [0, 1, 2, 3, 0, 2]
    zeros = dict.fromkeys((1, 3), np.zeros_like(updates[0]))  # client 3 trained from the first model
    (missing, _), (zeroed, _) = (
        drive(job, order, {**updates, **changed}, tmp_path / name, rounds=2, quorum=0.5)
        for name, changed in (("a", {1: None}), ("b", zeros))
    )
    assert missing[-1].models.tobytes() == zeroed[-1].models.tobytes()
    assert published(tmp_path / "a") == published(tmp_path / "b") == [(1, [0, 1, 2]), (2, [0, 2, 3])]


def test_versions_after_the_last_participation_leave_the_model(tmp_path):
    """Only a damaged ledger can use up all participations early."""
    job = job_for(tmp_path)
    with closing(CentralDPServer.of(job.algorithm, tmp_path / "ledgers", job.experiment.noise, durable=False)) as server:
        for t in range(1, MOST + 1):
            release(server, job, t, range(CLIENTS))
    states, fed = drive(job, [], {}, tmp_path, first=MOST + 1)
    assert all(np.array_equal(state.models, states[0].models) for state in states)
    assert fed.submitted == []


def test_a_version_of_the_last_two_clients_is_divided_by_the_buffer_as_always(tmp_path):
    """Two runs of one noise seed differ by the updates of clients 4 and 5, which alone have participations left."""
    job, models = job_for(tmp_path), []
    updates = updates_of(job)
    for name, size in (("a", 1.0), ("b", 0.0)):
        with closing(
            CentralDPServer.of(job.algorithm, tmp_path / name / "ledgers", job.experiment.noise, durable=False)
        ) as server:
            for t in range(1, MOST + 1):
                release(server, job, t, range(4))
        state = State(np.zeros((1, updates[0].size), np.float32), [0] * CLIENTS, {"participations": [MOST] * 4 + [0, 0]})
        each = {client: np.float32(size) * update for client, update in updates.items()}
        states, _ = drive(job, [4, 5], each, tmp_path / name, state=state, first=MOST + 1, rounds=MOST + 1)
        models.append(states[-1].models[0])
        assert published(tmp_path / name)[-1] == (MOST + 1, [4, 5])
    clipped = [CLIP * updates[client] / np.linalg.norm(updates[client]) for client in (4, 5)]
    np.testing.assert_allclose(models[0] - models[1], sum(clipped) / 3, atol=2e-6)


def test_a_version_without_answers_is_noise(tmp_path):
    job = job_for(tmp_path)
    states, _ = drive(job, arrivals(), dict.fromkeys(range(CLIENTS)), tmp_path, rounds=1, quorum=0.0)
    moved = states[1].models - states[0].models
    deviation = job.protocol.curator_noise_multiplier * CLIP / 3
    assert abs(moved.std() / deviation - 1) < Z / math.sqrt(2 * moved.size)
    assert [len(clients) for _, clients in published(tmp_path)] == [3]


# ---- the gate enforces P


def test_the_ledger_and_not_the_checkpoint_decides_how_often_a_client_takes_part(tmp_path):
    """A server that forgets all participations after each version: no client is ever published more than P times."""
    job = job_for(tmp_path, rounds=CLIENTS * MOST // 3)
    fed, algorithm = Scripted(job, [0, 1, 2] * MOST + [3, 4, 5] * MOST, updates_of(job), tmp_path), algorithm_of(job.protocol)
    state = algorithm.start(fed)
    with closing(fed.central_server):
        for t in range(1, job.protocol.rounds + 1):
            fed.round = t
            state = State(algorithm.round(state, t, fed).models, state.assignment, {"participations": [0] * CLIENTS})
            fed.open.clear()
    assert [clients for _, clients in published(tmp_path)] == [[0, 1, 2]] * MOST + [[3, 4, 5]] * MOST


def release(server, job, t, clients, updates=None):
    """The sum of a buffer of fresh updates."""
    fed = InProcessFederation(job.protocol, {})
    fed.round, fed.central_server = t, server
    buffer = {client: {"update": (updates or updates_of(job))[client]} for client in clients}
    step = algorithm_of(job.protocol).noisy_buffer
    return fed.release(step, buffer=buffer, clients=np.array(clients, np.int64), staleness=np.zeros(len(clients), np.int64))


def test_the_gate_refuses_a_participation_beyond_the_plan_also_after_a_restart(tmp_path):
    job = job_for(tmp_path)

    def server():
        return closing(CentralDPServer.of(job.algorithm, tmp_path / "ledgers", job.experiment.noise, durable=False))

    for t in range(1, MOST + 1):
        with server() as opened:
            assert release(opened, job, t, [0, 1]) is not None
    with server() as opened:
        with pytest.raises(RunFailed, match="no participation of client 1 is left"):
            release(opened, job, MOST + 1, [1, 2])
        assert opened.participations_left(PARTICIPATION, before=MOST + 1) == {0: 0, 1: 0, 2: 5, 3: 5, 4: 5, 5: 5}
        assert release(opened, job, MOST + 1, [2, 3]) is not None
        for clients in ([2, 2], []):
            with pytest.raises(RunFailed, match="must list each client"):
                release(opened, job, MOST + 2, clients)
        with pytest.raises(RunFailed, match="no participation of client 9 is left"):
            release(opened, job, MOST + 2, [2, 9], dict.fromkeys(range(10), updates_of(job)[0]))
        with pytest.raises(RunFailed, match="other content"):
            release(opened, job, MOST + 1, [4, 5])  # a version has the clients that were charged for it
        assert opened.participants(PARTICIPATION, MOST + 1) == [2, 3]
        assert opened.participants(PARTICIPATION, MOST + 2) is None


def test_a_sum_with_a_client_that_was_not_charged_is_not_released(tmp_path, monkeypatch):
    job, add = job_for(tmp_path), ClippedSums.add

    def smuggle(self, client, parts, *more, **named):
        add(self, client, parts, *more, **named)
        if client == 0:
            add(self, 3, parts)

    monkeypatch.setattr(ClippedSums, "add", smuggle)
    with pytest.raises(ValueError, match="the participation of client 3 was not charged"):
        drive(job, arrivals(), updates_of(job), tmp_path, rounds=4)


def test_a_weight_above_one_is_an_error():
    with pytest.raises(ValueError, match="weight must lie"):
        ClippedSums((1, 3), 1.0).add(0, [(0, np.ones(3))], weight=1.01)


# ---- crashes


STEPS = {
    "a client computes": (InProcessFederation, "_answer"),
    "before the charge": (CentralDPServer, "release"),
    "after the charge": (Ledger, "debit"),
    "before the noise": (CentralContext, "noisy_buffer"),
    "before the release is stored": (CentralContext, "ran"),
    "after the release is stored": (CentralDPServer, "release"),
    "before the checkpoint": (Checkpoints, "write"),
}


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-fedprox"])
def test_a_crash_between_any_two_steps_changes_no_bit_and_charges_nothing_twice(tmp_path, monkeypatch, name):
    job = job_for(tmp_path, name)
    whole = simulate(job, tmp_path / "whole")
    for number, (step, target) in enumerate(STEPS.items()):
        run, calls, after = getattr(*target), [], step.startswith("after")

        def once(self, *arguments, run=run, calls=calls, after=after, **more):
            calls.append(1)
            result = run(self, *arguments, **more) if after or len(calls) != 5 else None
            if len(calls) == 5:
                raise KeyboardInterrupt
            return result

        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(*target, once)
            with pytest.raises(KeyboardInterrupt):
                simulate(job, folder)
        assert simulate(job, folder).models.tobytes() == whole.models.tobytes(), step
        assert published(folder) == published(tmp_path / "whole"), step
        assert [t for t, _ in published(folder)] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("stored", [False, True])
def test_after_a_crash_a_version_has_the_clients_that_were_charged_whatever_the_order_of_arrival(tmp_path, monkeypatch, stored):
    job = job_for(tmp_path)
    updates, target = updates_of(job), (CentralDPServer, "release") if stored else (CentralContext, "noisy_buffer")
    whole, _ = drive(job, [0, 1, 2, 3, 4, 0], updates, tmp_path / "whole", rounds=2)
    before, _ = drive(job, [0, 1, 2], updates, tmp_path / "crashed", rounds=1)
    run = getattr(*target)

    def crash(self, *arguments, **more):
        if stored:
            run(self, *arguments, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*target, crash)
        with pytest.raises(KeyboardInterrupt):
            drive(job, [3, 4, 0], updates, tmp_path / "crashed", state=before[-1], first=2, rounds=2)
    again, _ = drive(job, [5, 1, 2, 0, 4, 3], updates, tmp_path / "crashed", state=before[-1], first=2, rounds=2)
    assert again[-1].models.tobytes() == whole[-1].models.tobytes()
    assert published(tmp_path / "crashed") == published(tmp_path / "whole") == [(1, [0, 1, 2]), (2, [0, 3, 4])]
    assert set(again[-1].memory["working"]) == {"1", "2", "5"}


def test_a_damaged_checkpoint_is_followed_by_the_same_versions(tmp_path):
    job = job_for(tmp_path)
    whole = simulate(job, tmp_path / "whole")

    def stop(t, state):
        if t == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job, tmp_path / "cut", on_round=stop)
    (tmp_path / "cut/checkpoints/round_00005/state.msgpack").write_bytes(b"")
    assert simulate(job, tmp_path / "cut").models.tobytes() == whole.models.tobytes()
    assert published(tmp_path / "cut") == published(tmp_path / "whole")


def test_a_charge_that_was_cut_short_costs_each_client_one_participation_and_loses_the_version(tmp_path, monkeypatch):
    job = job_for(tmp_path)
    updates, ledger = updates_of(job), tmp_path / "ledgers" / CENTRAL_SERVER
    before, _ = drive(job, arrivals(), updates, tmp_path, rounds=2)

    def crash(self, *arguments):
        raise KeyboardInterrupt

    def debit():
        with monkeypatch.context() as patch:
            patch.setattr(CentralContext, "noisy_buffer", crash)
            with pytest.raises(KeyboardInterrupt):
                drive(job, arrivals(1), updates, tmp_path, state=before[-1], first=3, rounds=3)

    cut_debit(ledger, debit)
    states, _ = drive(job, arrivals(2), updates, tmp_path, state=before[-1], first=3)
    assert np.array_equal(states[0].models, states[1].models)
    assert not np.array_equal(states[1].models, states[2].models)
    lines = [line for line in read_ledger(ledger) if line.slots]
    (closed,) = [line for line in lines if line.type == "closed"]
    assert (closed.round, len(closed.slots)) == (3, CLIENTS)
    assert max(Counter(name for line in lines for name in line.slots).values()) <= MOST


# ---- options, and a whole run


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"sampling_rate": 0.5}, "sampling_rate must be absent with asynchronous: clients are not sampled"),
        ({"server_lr": 0.5}, "the server's learning rate is asynchronous.server_lr"),
        ({"asynchronous": {"buffer": 7}}, "buffer is 7: must be at most the number of clients, 6"),
        ({"asynchronous": {"buffer": 3, "participations": 3}}, "participations is 3: must be 4 to 8"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, algorithm, said):
    with pytest.raises(ConfigError) as refused:
        job_for(tmp_path, algorithm={"name": "dp-fedavg", "asynchronous": BUFFER, **algorithm})
    assert said in str(refused.value)


def test_the_options_of_a_job_hold_no_sample(tmp_path):
    assert set(job_for(tmp_path, "dp-fedprox").protocol.options) == {"asynchronous", "mu"}


def test_files_of_a_run_show_what_each_client_spent(tmp_path):
    job = job_for(tmp_path, privacy=SECRET)
    run = dpcfl.run(
        {
            **SMALL, "rounds": ROUNDS, "model": {"name": "linear"}, "privacy": TRUSTED,
            "data": {"dataset": "digits", "clients": [CLIENTS], "train_per_client": 60, "test_per_client": 20},
            "local": {"batch_size": 20, "lr": 0.2, "clip": CLIP}, "algorithm": {"name": "dp-fedavg", "asynchronous": BUFFER},
        },
        tmp_path / "runs", "in-process", progress=False,
    )  # fmt: skip
    z = job.protocol.curator_noise_multiplier
    counts = Counter(client for _, clients in published(run.path) for client in clients)
    assert 0 < counts[CLIENTS - 1] < max(counts.values()) <= MOST  # the slow client
    for client in range(CLIENTS):
        assert [event.noise_multiplier for event in run.events(client)] == [z] * counts[client]
        assert run.events(client, "zero-out") == run.events(client)
    document = json.loads((run.path / "run.json").read_text())
    most = math.sqrt(max(counts.values())) / z
    assert gaussian_delta(document["privacy"]["epsilon_spent"], most) == pytest.approx(1e-2, rel=1e-4)
    facts = dict(statement(document["privacy"]).facts)
    assert facts["Participations"] == f"at most {MOST} of each client, without amplification by sampling"
    assert facts["Adjacency"].startswith("zero-out: all updates of a client replaced by zeros")
    account = dpcfl.account(run.events(0), delta=1e-2)["epsilon"]
    assert gaussian_delta(account, math.sqrt(counts[0]) / z) == pytest.approx(1e-2, rel=1e-4)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    spent = next(line for line in reversed(lines) if "epsilon_spent_by_client" in line)["epsilon_spent_by_client"]
    assert gaussian_delta(spent[CLIENTS - 1], math.sqrt(counts[CLIENTS - 1]) / z) == pytest.approx(1e-2, rel=1e-4)
    assert [check for check in run.verify() if check.holds is False] == []
