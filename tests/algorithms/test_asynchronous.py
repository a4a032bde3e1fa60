"""Asynchronous rounds: the buffer, the weights, the budget of each client, virtual time, and runs that crash."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from conftest import ROOT, SMALL
from simulate import simulate

import dpcfl_net as dpcfl
from dpcfl_net.algorithms.asynchronous_options import Asynchronous
from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.algorithms.buffered import WITHOUT_ANSWERS
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.asynchronous import Outcome
from dpcfl_net.federation.base import Federation
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.results import summary
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.transport.keys import make_keys

TINY = {
    "data": {"dataset": "digits", "clients": [2, 2], "train_per_client": 200, "test_per_client": 40},
    "model": {"name": "linear"},
    "rounds": 4,
    "local": {"batch_size": 20, "lr": 0.5},
}
SLOW = [1.0, 1.0, 1.0, 10.0]
MORE = {"r-dpcfl": {"clusters": 2}, "dp-ifca": {"clusters": 2}}
PAIRS = {"buffer": 2, "participations": 4}  # one plan in all tests: its noise is solved once
SIX = {"buffer": 2, "participations": 6}  # for algorithms with synchronous rounds


def job_for(folder, name="global", asynchronous=None, **changes):
    keys = folder / f"keys-{name}-{len([*folder.glob('keys-*')])}"
    keys.mkdir(parents=True)
    make_keys(keys, 4)
    algorithm = {"name": name, **MORE.get(name, {})} | ({} if asynchronous is None else {"asynchronous": asynchronous})
    return make_job(config.resolve({**SMALL, **TINY, "algorithm": algorithm, **changes}), keys)


def charged(folder, client):
    """(participation, request id) of each debit of a client."""
    lines = read_ledger(folder / "ledgers" / f"client_{client:04d}")
    return [(line.round, line.id) for line in lines if line.type == "debit"]


class Scripted(Federation):
    """Clients that answer in the order of a script, with an update of their own; None in place of a client's update fails."""

    def __init__(self, protocol, order, updates, **more):
        super().__init__(protocol, **more)
        self.order, self.updates, self.open, self.sent = list(order), updates, {}, []

    def _exchange(self, kind, tasks, take, window):
        raise AssertionError("asynchronous rounds make no calls")

    def submit(self, work):
        if work.client not in self.open:
            self.open[work.client] = work
            self.sent.append((self.round, work))

    def next_outcome(self, among=None):
        client = next(client for client in self.order if client in self.open)
        self.order.remove(client)
        del self.open[client]
        update = self.updates[client]
        return Outcome(client, None if update is None else {"update": update})


def drive(job, order, updates, **more):
    """States and federation after all versions of a job with scripted clients."""
    algorithm, fed = algorithm_of(job.protocol), Scripted(job.protocol, order, updates, **more)
    states = [algorithm.start(fed)]
    for t in range(1, job.protocol.rounds + 1):
        fed.round = t
        states.append(algorithm.round(states[-1], t, fed))
    return states, fed


@pytest.mark.parametrize("name", ["global", "oracle", "r-dpcfl", "dp-ifca"])
def test_a_buffer_of_all_clients_gives_the_bits_of_synchronous_rounds(tmp_path, name):
    synchronous = simulate(job_for(tmp_path, name, rounds=6), tmp_path / "a")
    buffered = simulate(job_for(tmp_path, name, {"buffer": 4}, rounds=6), tmp_path / "b")
    assert buffered.models.tobytes() == synchronous.models.tobytes()
    assert buffered.diagnostics["staleness (largest)"] == 0


def test_a_job_without_the_option_is_unchanged_and_the_plan_is_the_participations(tmp_path):
    plain, asynchronous = job_for(tmp_path), job_for(tmp_path, asynchronous=PAIRS, rounds=6)
    assert plain.protocol.options == {}
    for entry, other in zip(plain.protocol.roster, asynchronous.protocol.roster, strict=True):
        assert plain.algorithm.plan(entry) == asynchronous.algorithm.plan(other)
        assert entry.noise_multiplier == other.noise_multiplier


@pytest.mark.parametrize(("clients", "buffer", "rounds", "synchronous"), [(4, 2, 6, 0), (8, 3, 10, 2)])
def test_participations_are_as_few_as_fill_all_buffers_without_the_slowest_clients(clients, buffer, rounds, synchronous):
    planned = Asynchronous(buffer=buffer).planned(clients, rounds, synchronous) - synchronous
    fast, needed = clients - (buffer - 1), buffer * (rounds - synchronous)
    assert (planned - 1) * fast < needed <= planned * fast


def test_updates_are_weighted_by_their_staleness_and_divided_by_the_buffer(tmp_path):
    job = job_for(tmp_path, asynchronous={**PAIRS, "server_lr": 0.5}, rounds=4)
    p = job.protocol.model.parameters
    updates = {client: np.full(p, 10.0**client, np.float32) for client in range(4)}
    states, fed = drive(job, [0, 1, 0, 2, 2, 3, 0, 1], updates)
    moves = [float((after.models - before.models)[0, 0]) for before, after in pairwise(states[:4])]
    fresh, once, twice = 1.0, 2**-0.5, 3**-0.5
    expected = [fresh + 10 * fresh, fresh + 100 * once, 100 * fresh + 1000 * twice]
    assert moves == pytest.approx([0.5 * value / 2 for value in expected], rel=1e-4)
    assert [(work.client, work.participation) for t, work in fed.sent if t == 2] == [(0, 2), (1, 2)]
    base = next(work.tensors["model"] for t, work in fed.sent if t == 3 and work.client == 2)
    assert base.tobytes() == states[2].models[0].tobytes()  # a free client trains from the newest version
    for state in states[1:]:  # a checkpoint keeps no version that no open task needs
        assert {*state.memory["bases"]} == {str(base) for _, base, _ in state.memory["working"].values()}


def test_too_stale_updates_are_not_used(tmp_path):
    job = job_for(tmp_path, asynchronous={**PAIRS, "max_staleness": 0})
    updates = {client: np.full(job.protocol.model.parameters, 1.0 + client, np.float32) for client in range(4)}
    states, _ = drive(job, [0, 1, 2, 0, 0, 1, 0, 1], updates)
    assert float((states[2].models - states[1].models)[0, 0]) == pytest.approx(0.5, rel=1e-5)


def test_the_oracles_clusters_move_by_their_own_updates_over_their_public_share(tmp_path):
    job = job_for(tmp_path, "oracle", PAIRS)
    first, other = (job.protocol.oracle.index(m) for m in (0, 1))
    updates = {client: np.full(job.protocol.model.parameters, 1.0, np.float32) for client in range(4)}
    friend = next(i for i, m in enumerate(job.protocol.oracle) if m == 0 and i != first)
    states, _ = drive(job, [first, friend, first, other, first, friend, first, friend], updates)
    moves = [(after.models - before.models)[:, 0].tolist() for before, after in pairwise(states)]
    assert moves[0] == pytest.approx([2.0, 0.0], abs=1e-5)  # a full buffer holds one update of each cluster on average
    assert moves[1] == pytest.approx([1.0, 2**-0.5], abs=1e-5)


@pytest.mark.parametrize("name", ["global", "oracle", "r-dpcfl", "dp-ifca"])
def test_a_participation_without_an_answer_counts_as_zeros_and_the_job_says_so(tmp_path, name):
    job = job_for(
        tmp_path, name, PAIRS if name in ("global", "oracle") else SIX, rounds=4 if name in ("global", "oracle") else 6
    )
    said, page = job.algorithm.capabilities.without_clients, (ROOT / "docs/how-to/processes.md").read_text()
    before, sentence = said.removesuffix(WITHOUT_ANSWERS), f"| {WITHOUT_ANSWERS} |"
    assert said.endswith(WITHOUT_ANSWERS)
    assert sentence in page
    if name in ("r-dpcfl", "dp-ifca"):  # whose first rounds are synchronous
        assert before == f"{job_for(tmp_path, name).algorithm.capabilities.without_clients}; in asynchronous rounds "
        return
    assert before == ""
    p = job.protocol.model.parameters
    states, _ = drive(job, [0, 1, 2, 3] * 2, {0: np.ones(p, np.float32), 1: None, 2: None, 3: None}, quorum=0.0)
    move = states[1].models - states[0].models
    assert move.max() == pytest.approx(0.5 if name == "global" else 1.0)  # over 2 places, or 1 place for each of 2 clusters


def test_at_most_so_many_clients_work_at_once(tmp_path):
    job = job_for(tmp_path, asynchronous={**PAIRS, "concurrency": 3})
    updates = dict.fromkeys(range(4), np.zeros(job.protocol.model.parameters, np.float32))
    _, fed = drive(job, [*range(4)] * 6, updates)
    assert len([work for t, work in fed.sent if t == 1]) == 3
    assert [len([work for t, work in fed.sent if t == at]) for at in (2, 3, 4)] == [2, 2, 2]
    taken = Counter(work.client for _, work in fed.sent)
    assert max(taken.values()) - min(taken.values()) <= 1


def test_a_failed_participation_is_missing_and_the_quorum_decides(tmp_path):
    job = job_for(tmp_path, asynchronous=PAIRS)
    zeros = np.zeros(job.protocol.model.parameters, np.float32)
    updates = {0: zeros, 1: zeros + 1, 2: None, 3: zeros}
    states, fed = drive(job, [1, 2, 0, 3, 0, 1, 0, 1], updates, quorum=0.5)
    assert float((states[1].models - states[0].models)[0, 0]) == pytest.approx(0.5, rel=1e-5)
    assert fed.missing == []
    with pytest.raises(RunFailed, match=r"round 1: 1 of 2 buffered participations .*runtime.quorum"):
        drive(job, [1, 2, 0, 3], updates)


def test_a_slow_client_delays_no_version_and_takes_part_less_often(tmp_path):
    fast = job_for(tmp_path, asynchronous={**PAIRS, "durations": SLOW})
    waiting = job_for(tmp_path, asynchronous={"buffer": 4, "durations": SLOW})
    one, all_ = simulate(fast, tmp_path / "fast"), simulate(waiting, tmp_path / "waiting")
    assert one.diagnostics["virtual time (s)"] < all_.diagnostics["virtual time (s)"] / 5
    counts = [len(charged(tmp_path / "fast", client)) for client in range(4)]
    assert counts[3] < min(counts[:3])
    for client in range(4):
        assert [number for number, _ in charged(tmp_path / "fast", client)] == list(range(1, counts[client] + 1))


def test_when_all_participations_are_used_the_last_versions_wait_for_the_slow_client(tmp_path):
    job = job_for(tmp_path, asynchronous={**PAIRS, "durations": SLOW}, rounds=8)
    state = simulate(job, tmp_path / "run")
    assert state.diagnostics["participations"][:3] == [4, 4, 4]
    assert state.diagnostics["virtual time (s)"] > 15
    assert all(len(charged(tmp_path / "run", client)) <= 4 for client in range(4))


def test_the_gate_refuses_a_participation_beyond_the_plan_and_a_second_one_of_a_number(tmp_path):
    job = job_for(tmp_path, asynchronous=PAIRS, rounds=6)
    host = make_host(job, 0, tmp_path / "ledgers", durable=False)
    theta = np.zeros(job.protocol.model.parameters, np.float32)
    answers = [host.answer(Task(number, "train", {"model": theta + number})) for number in (1, 2, 3, 4, 5, 6)]
    assert [(answer.status, answer.code) for answer in answers[3:]] == [
        ("release", ""),
        ("refused", "quota"),
        ("refused", "quota"),
    ]
    again = host.answer(Task(4, "train", {"model": theta}))
    assert (again.status, again.code) == ("refused", "other-content")
    assert host.answer(Task(4, "train", {"model": theta + 4})).release == answers[3].release
    assert len(charged(tmp_path, 0)) == 4
    host.close()


def test_the_statement_names_the_order_of_arrival_unless_a_deadline_hides_it(tmp_path):
    timed = {**TINY["local"], "pace": "constant", "deadline_s": 2.0}
    jobs = job_for(tmp_path, asynchronous=PAIRS), job_for(tmp_path), job_for(tmp_path, asynchronous=PAIRS, local=timed)
    named = ["order of arrival" in str(privacy_statement(job.protocol, None)["not_covered"]) for job in jobs]
    assert named == [True, False, False]


@pytest.mark.parametrize("name", ["r-dpcfl", "dp-ifca"])
def test_synchronous_rounds_count_and_the_ledger_of_a_client_that_took_part_fully_is_its_plan(tmp_path, name):
    job = job_for(tmp_path, name, {**SIX, "durations": SLOW}, rounds=7)
    states = {}
    simulate(job, tmp_path / "run", on_round=states.__setitem__)
    phases = [states[t].diagnostics["phase"] for t in range(1, 8)]
    synchronous = phases.index("frozen")
    assert synchronous == {"r-dpcfl": 4, "dp-ifca": 1}[name]  # the most that each may have
    assert [state.assignment for t, state in states.items() if t >= synchronous] == [states[7].assignment] * (8 - synchronous)
    assert all("participations" not in states[t].diagnostics for t in range(1, synchronous + 1))
    assert states[synchronous + 1].diagnostics["virtual time (s)"] > 8 * synchronous  # they waited for the slow client
    full = 0
    for entry in job.protocol.roster:
        debits = [line for line in read_ledger(tmp_path / f"run/ledgers/client_{entry.id:04d}") if line.type == "debit"]
        assert [line.round for line in debits] == [*range(1, len(debits) + 1)]
        spent, plan = (
            Counter(name for line in debits for name in line.slots),
            Counter(s.name for s in job.algorithm.plan(entry)),
        )
        assert spent <= plan
        full += spent == plan
        assert (spent == plan) == (len(debits) == SIX["participations"])
    assert full == {"r-dpcfl": 3, "dp-ifca": 1}[name]


@pytest.mark.parametrize("name", ["global", "oracle", "r-dpcfl", "dp-ifca"])
def test_a_run_that_crashes_gives_the_same_bits_and_charges_nothing_twice(tmp_path, monkeypatch, name):
    from dpcfl_net.federation import client_host

    job = job_for(tmp_path, name, {**(SIX if name in MORE else PAIRS), "durations": SLOW}, rounds=7)
    whole = simulate(job, tmp_path / "whole")
    compute, due = client_host.ClientHost._compute, [(1, 2), (2, 1), (1, 3), (4, 2)]
    if name == "r-dpcfl":
        due += [(5, 1), (6, 2)]  # participations after its synchronous rounds
    crashes = len(due)

    def crashing(self, task, charge, state):
        if (task.round, self.client) in due:
            due.remove((task.round, self.client))
            raise KeyboardInterrupt
        return compute(self, task, charge, state)

    stops = 0
    with monkeypatch.context() as patch:
        patch.setattr(client_host.ClientHost, "_compute", crashing)
        while True:
            try:
                state = simulate(job, tmp_path / "crashed")
                break
            except KeyboardInterrupt:
                stops += 1
    assert (stops, due) == (crashes, [])
    assert state.models.tobytes() == whole.models.tobytes()
    for client in range(4):
        assert charged(tmp_path / "crashed", client) == charged(tmp_path / "whole", client)


def test_a_damaged_checkpoint_costs_nothing_since_open_tasks_are_sent_again(tmp_path):
    job = job_for(tmp_path, asynchronous={**PAIRS, "durations": SLOW}, rounds=7)

    class Stop(Exception):
        pass

    def stop(t, state):
        if t == 5:
            raise Stop

    whole = simulate(job, tmp_path / "whole")
    with pytest.raises(Stop):
        simulate(job, tmp_path / "cut", on_round=stop)
    (tmp_path / "cut/checkpoints/round_00005/state.msgpack").write_bytes(b"")
    assert Checkpoints(tmp_path / "cut/checkpoints").newest()[0] == 4
    assert simulate(job, tmp_path / "cut").models.tobytes() == whole.models.tobytes()
    assert all(charged(tmp_path / "cut", client) == charged(tmp_path / "whole", client) for client in range(4))


def test_a_run_without_asynchronous_rounds_is_the_synchronous_one():
    """r-dpcfl's E_c is at least 2, so that a run of two rounds has no frozen clusters."""
    options = {"name": "r-dpcfl", "clusters": 2, "asynchronous": {"buffer": 2}}
    resolved = config.resolve({**SMALL, **TINY, "algorithm": options, "rounds": 2})
    assert resolved.capabilities.expected_releases == 2 * 4


TRUSTED = {**SMALL["privacy"], "unit": "client", "trust": "trusted-server", "delta": 1e-2}


@pytest.mark.parametrize(
    ("algorithm", "privacy", "said"),
    [
        ({"name": "global", "asynchronous": {"buffer": 5}}, {}, "buffer is 5: must be at most the number of clients, 4"),
        ({"name": "global", "asynchronous": {"buffer": 2, "participations": 1}}, {}, "participations is 1: must be 2 to 4"),
        ({"name": "global", "asynchronous": {"buffer": 2, "participations": 5}}, {}, "participations is 5: must be 2 to 4"),
        ({"name": "oracle", "asynchronous": {"buffer": 2, "concurrency": 1}}, {}, "concurrency is 1: must be from the buffer, 2"),
        ({"name": "global", "asynchronous": {"buffer": 2, "durations": [1.0]}}, {}, "durations is [1.0]: must be 4 numbers"),
        ({"name": "global", "asynchronous": {"bufer": 2}}, {}, "did you mean 'algorithm.asynchronous.buffer'"),
        ({"name": "r-dpcfl", "asynchronous": {"buffer": 2, "participations": 3}}, {}, "must be 4, since up to 3 rounds are synchronous and the other 1 round takes 2"),
        ({"name": "rc-dpfl", "asynchronous": {"buffer": 2}}, {}, "have it, whose clusters do not change after the first rounds"),
        ({"name": "em-fdro", "asynchronous": {"buffer": 2}}, {}, "have it, whose clusters do not change after the first rounds"),
        ({"name": "dp-fedper", "asynchronous": {"buffer": 2}}, TRUSTED, "a participation is no round"),
        ({"name": "rr-cluster", "clusters": 2, "asynchronous": {"buffer": 2}}, TRUSTED, "a fresh secret sample"),
    ],
)  # fmt: skip
def test_what_cannot_run_asynchronously_is_refused_with_the_reason(algorithm, privacy, said):
    document = {**SMALL, **TINY, "algorithm": algorithm, **({"privacy": privacy} if privacy else {})}
    with pytest.raises(ConfigError) as refused:
        config.resolve(document)
    assert said in str(refused.value)


@pytest.mark.slow
def test_with_a_slow_client_the_accuracy_of_synchronous_rounds_is_there_ten_times_sooner_at_equal_epsilon(tmp_path):
    """Three seeds of eight clients, one of them ten times slower; every client may take part 20 times in both runs."""

    def measured(buffer, rounds, seed):
        settings = {
            **SMALL, **TINY, "seed": seed, "rounds": rounds,
            "data": {"dataset": "digits", "clients": [8]}, "local": {"batch_size": 32, "lr": 0.5},
            "algorithm": {
                "name": "global", "asynchronous": {"buffer": buffer, "participations": 20, "durations": [1.0] * 7 + [10.0]}
            },
            "output": {"evaluate_every": 100},
        }  # fmt: skip
        run = dpcfl.run(settings, tmp_path / f"{buffer}-{seed}", "in-process", progress=False)
        final = json.loads((run.path / "run.json").read_text())["final"]
        z = {entry.noise_multiplier for entry in summary.read_run_job(run.path).protocol.roster}
        return final["accuracy_mean"], final["diagnostics"]["virtual time (s)"], z

    synchronous = [measured(8, 20, seed) for seed in range(3)]
    asynchronous = [measured(4, 25, seed) for seed in range(3)]
    for seed, (waits, goes) in enumerate(zip(synchronous, asynchronous, strict=True)):
        print(f"seed {seed}: {waits[0]:.3f} after {waits[1]:.1f} s, asynchronous {goes[0]:.3f} after {goes[1]:.1f} s")
        assert goes[1] < waits[1] / 5
        assert goes[2] == waits[2]
    assert np.mean([a for a, _, _ in asynchronous]) > np.mean([a for a, _, _ in synchronous]) - 0.1
