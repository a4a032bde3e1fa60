"""Rounds with secure sums: the sum is what a trusted server would have added, with drop-outs at each stage, or is aborted."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import secure_runs as runs
from scipy import stats
from secure_runs import SAMPLE, STAGES, charge_key, charged, key_of, make, noise, opened, played, records, trainer

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.clustering.rebalance import rebalanced_in_expectation
from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.federation.claim import verify_claim, without_guarantee
from dpcfl_net.federation.engine import Engine
from dpcfl_net.privacy.client_level import COUNT_SCALE
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.training.batches import poisson_rows

Z = stats.norm.isf(1e-8)  # false alarms below 1e-7
ALL = range(8)
COINS = {"name": "dp-fedavg", "sampling_rate": 0.5}
BLOCKS = {"name": "rr-cluster", "guarantee": "expected", "clusters": 2, "min_cluster_size": 0, "sampling_rate": 0.5}


def order_of(job: Any, client: int, t: int, kind: str, number: int = 1) -> np.random.Generator:
    """The order in which a client with seeded noise goes through its records, in the task's training of that number."""
    return stream(derive(charge_key(job, client, t, kind), "slot", "masked", number), "batches")


def is_in(job: Any, client: int, t: int, kind: str, rate: float) -> bool:
    """The secret coin of a client with seeded noise."""
    return bool(stream(key_of(job, client, t, kind), "coin").random() < rate)


def clipped(vector: np.ndarray, clip: float) -> np.ndarray:
    return vector.astype(np.float64) * min(1.0, clip * (1 - 1e-9) / float(np.linalg.norm(vector.astype(np.float64))))


def trusted(job: Any, contributions: dict[int, np.ndarray], t: int, kind: str) -> np.ndarray:
    """What a trusted server adds that sees all contributions and the shares of the noise of those clients."""
    code = job.algorithm.secure_code(8)
    shares = noise(job, code, contributions, t, kind)
    whole = sum((code.encode(vector).astype(np.int64) for vector in contributions.values()), shares)
    total = whole.astype(np.uint32).view(np.int32) * (code.clip / code.scale)
    exact = sum(contributions.values()) + shares * (code.clip / code.scale)
    assert np.abs(total - exact).max() <= len(contributions) * code.clip / code.scale  # one unit for each client
    return total


def updates(job: Any, model: np.ndarray, survivors: Any, t: int) -> dict[int, np.ndarray]:
    """Clipped updates of the survivors whose coin says in, and zeros of the others."""
    found = {}
    for client in survivors:
        trained = trainer(job).train(model, records(job, client), order_of(job, client, t, "masked_update"))
        there = is_in(job, client, t, "masked_update", job.algorithm.coin)
        found[client] = clipped(trained - model, 1.0) if there else np.zeros(model.size)
    return found


@pytest.mark.parametrize("gone", [{}, {"secure_keys": [1], "masked_update": [6]}], ids=["all", "two are gone"])
def test_the_model_moves_by_the_clipped_updates_of_the_clients_that_are_in_and_their_noise(tmp_path, gone):
    job = make(tmp_path, COINS)
    states = played(job, tmp_path, quorum=0.5, unheard={(2, kind): clients for kind, clients in gone.items()})
    for t in (1, 2, 3):
        survivors = [
            client for client in ALL if t != 2 or client not in [*gone.get("secure_keys", []), *gone.get("masked_update", [])]
        ]
        model = states[t - 1].models[0]
        total = trusted(job, updates(job, model, survivors, t), t, "masked_update")
        expected = model + (total / (0.5 * len(survivors))).astype(np.float32)
        assert np.array_equal(states[t].models[0], expected)
        assert states[t].diagnostics == {"secure sum": "ok", "survivors": len(survivors)}


def test_a_public_schedule_takes_each_client_once_in_a_cycle(tmp_path):
    job = make(tmp_path, {**COINS, "sampling": "visible"}, rounds=4)
    played(job, tmp_path)
    groups = [job.algorithm.secure_group(t) for t in (1, 2, 3, 4)]
    assert [len(group) for group in groups] == [4] * 4
    for cycle in (groups[:2], groups[2:]):
        assert sorted(sum(cycle, ())) == list(ALL)
    for client in ALL:
        taken = [t for t, group in enumerate(groups, 1) if client in group]
        assert charged(tmp_path, client) == [(t, kind) for t in taken for kind in STAGES]


@pytest.mark.parametrize(
    "algorithm", [COINS, BLOCKS, {"name": "dp-ifca", "clusters": 2}], ids=lambda algorithm: algorithm["name"]
)
def test_without_secure_aggregation_no_sum_has_a_code(tmp_path, algorithm):
    """It was an AssertionError."""
    central = {"epsilon": 10, "delta": 0.1, "unit": "client", "trust": "trusted-server"}
    privacy = {"epsilon": 10, "delta": 1e-3} if algorithm["name"] == "dp-ifca" else central
    job = make(tmp_path, algorithm, privacy, local=runs.DP_SGD)
    assert [job.algorithm.secure_code(n) for n in (4, 8)] == [None, None]


def test_clusters_of_rr_cluster_are_added_in_blocks_with_counts(tmp_path):
    options = {"name": "rr-cluster", "guarantee": "expected", "sampling_rate": 0.5, "clusters": 2, "min_cluster_size": 2}
    job = make(tmp_path, options)
    states = played(job, tmp_path)
    p = job.protocol.model.parameters
    for t in (1, 2, 3):
        models, parts = states[t - 1].models, {}
        for client in ALL:
            block = np.zeros((2, p + 1))
            if is_in(job, client, t, "masked_blocks", 0.5):
                label = int(trainer(job).mean_losses(models, records(job, client)).argmin())
                trained = trainer(job).train(models[label], records(job, client), order_of(job, client, t, "masked_blocks"))
                block[label] = [*clipped(trained - models[label], 1.0), COUNT_SCALE]
            parts[client] = block.reshape(-1)
        total = trusted(job, parts, t, "masked_blocks").reshape(2, p + 1)
        sums, counts = total.astype(np.float32).astype(np.float64)[:, :p], (total[:, p] / COUNT_SCALE).astype(np.float32)
        moves = rebalanced_in_expectation(sums, counts.astype(np.float64), 2)
        assert np.array_equal(states[t].models, models + moves.astype(np.float32))
        assert states[t].diagnostics["sizes"] == [float(count) for count in counts]


def test_the_shared_model_of_fedcam_moves_by_the_mean_of_the_survivors_that_are_in(tmp_path):
    options = {"name": "rr-cluster", "guarantee": "expected", "sampling_rate": 0.5, "clusters": 2, "min_cluster_size": 2}
    job, gone = make(tmp_path, {**options, "base": "fedcam"}, rounds=2), {(2, "secure_keys"): [1], (2, "masked_blocks"): [6]}
    states = played(job, tmp_path, quorum=0.5, unheard=gone)
    p, sgd = job.protocol.model.parameters, trainer(job)
    for t in (1, 2):
        models, parts = states[t - 1].models, {}
        for client in [client for client in ALL if t == 1 or client not in (1, 6)]:
            block, data = np.zeros((3, p + 1)), records(job, client)
            if is_in(job, client, t, "masked_blocks", 0.5):
                label = int(sgd.mean_losses(models[1:], data, base_model=models[0]).argmin())
                first, second = (order_of(job, client, t, "masked_blocks", number) for number in (1, 2))
                common = sgd.train(models[0], data, first, base_model=models[1 + label])
                own = sgd.train(models[1 + label], data, second, base_model=common)
                whole = clipped(np.concatenate([common - models[0], own - models[1 + label]]), 1.0)
                block[0, :p], block[1 + label] = whole[:p], [*whole[p:], COUNT_SCALE]
            parts[client] = block.reshape(-1)
        total = trusted(job, parts, t, "masked_blocks").reshape(3, p + 1)
        sums, counts = total.astype(np.float32).astype(np.float64)[:, :p], (total[1:, p] / COUNT_SCALE).astype(np.float32)
        moves = [sums[0] / (0.5 * len(parts)), *rebalanced_in_expectation(sums[1:], counts.astype(np.float64), 2)]
        assert np.array_equal(states[t].models, models + np.array(moves).astype(np.float32))
        assert states[t].diagnostics["survivors"] == (8 if t == 1 else 6)
        assert states[t].diagnostics["sizes"] == [float(count) for count in counts]


# ---- sample level


def gradient(model: np.ndarray, data: Any, rows: np.ndarray) -> np.ndarray:
    """Sum of the gradients of the linear model, each clipped to norm 1, in float64."""
    x, y = data.batch(rows, max(1, len(rows)))
    x = x.numpy().reshape(len(x), -1)[: len(rows)].astype(np.float64)
    weights, bias = model[:-10].reshape(10, -1).astype(np.float64), model[-10:].astype(np.float64)
    outputs = x @ weights.T + bias
    errors = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(x)), y.numpy()[: len(rows)]] -= 1
    norms = np.sqrt((errors**2).sum(axis=1) * ((x**2).sum(axis=1) + 1))
    errors /= np.maximum(1, norms)[:, None]
    return np.concatenate([(errors.T @ x).reshape(-1), errors.sum(axis=0)])


def test_a_round_is_one_step_of_dp_sgd_on_the_records_of_the_whole_cluster(tmp_path):
    """With seeded batches and noise: of all clients in one round, of those that are left in another."""
    job = make(tmp_path, {"name": "global"}, SAMPLE)
    gone = {2: [3, 5]}
    states = played(job, tmp_path, quorum=0.5, unasked={(t, "masked_step"): clients for t, clients in gone.items()})
    code, engine = job.algorithm.secure_code(8), Engine.of(job.protocol)
    for t in (1, 2, 3):
        survivors = [client for client in ALL if client not in gone.get(t, [])]
        model, parts, by_hand = states[t - 1].models[0], {}, np.zeros(code.d)
        for client in survivors:
            data = records(job, client)
            rows = poisson_rows(len(data), 16 / 50, stream(key_of(job, client, t, "masked_step"), "batches"))
            parts[client] = engine.trainer.clipped_sum(model, data, rows)
            by_hand += gradient(model, data, rows)
        assert np.abs(sum(parts.values()) - by_hand).max() < 1e-4 * np.linalg.norm(by_hand)
        total = trusted(job, parts, t, "masked_step")
        expected = model - (0.1 / (16 * len(survivors)) * total).astype(np.float32)
        assert np.array_equal(states[t].models[0], expected)


@pytest.mark.parametrize("survivors", [8, 6])
def test_the_noise_of_a_step_is_that_of_one_dp_sgd_step_if_as_many_answer_as_needed(tmp_path, survivors):
    """Batches hold all records, so that only the noise is random. Six of eight must answer, and two more add noise."""
    local = {"epochs": 1, "batch_size": 50, "lr": 1.0, "clip": 1.0}
    job = make(tmp_path, {"name": "global"}, SAMPLE, local=local, rounds=10)
    gone = {(t, "masked_step"): range(survivors, 8) for t in range(1, 11)}
    states = played(job, tmp_path, quorum=0.5, unasked=gone)
    found = []
    for before, after in pairwise(states):
        clean = sum(gradient(before.models[0], records(job, client), np.arange(50)) for client in range(survivors))
        found.append(50 * survivors * (before.models[0] - after.models[0]).astype(np.float64) - clean)
    noise_of_step = np.concatenate(found)
    z = job.protocol.roster[0].noise_multiplier
    deviation = z * math.sqrt(survivors / 6)  # sqrt(d) units more for rounding, of hundreds of thousands
    assert abs(noise_of_step.std() / deviation - 1) < Z / math.sqrt(2 * noise_of_step.size) + 1e-3
    assert abs(noise_of_step.mean()) < Z * deviation / math.sqrt(noise_of_step.size)
    assert stats.kstest(noise_of_step / deviation, "norm").pvalue > 1e-7


def test_clusters_are_added_apart_and_an_aborted_one_keeps_its_model(tmp_path):
    """Of four clients three must answer."""
    job = make(tmp_path, {"name": "oracle"}, SAMPLE)
    ours, theirs = ([client for client in ALL if job.protocol.oracle[client] == m] for m in (0, 1))
    states = played(job, tmp_path, quorum=0.5, unasked={(2, "masked_step"): ours[:2], (3, "secure_keys"): theirs[:1]})
    assert [state.diagnostics["secure sums"] for state in states[1:]] == [
        "ok", "0: 2 of 4 clients sent masked vectors, needs 3", "ok",
    ]  # fmt: skip
    moved = [[bool((after.models[m] != before.models[m]).any()) for m in (0, 1)] for before, after in pairwise(states)]
    assert moved == [[True, True], [False, True], [True, True]]
    assert charged(tmp_path, theirs[1]) == [(t, kind) for t in (1, 2, 3) for kind in sample_stages()]
    aborted = {(2, "secure_survivors"), (2, "secure_unmask")}
    assert charged(tmp_path, ours[2]) == [(t, kind) for t in (1, 2, 3) for kind in sample_stages() if (t, kind) not in aborted]


def sample_stages() -> tuple[str, ...]:
    return tuple("masked_step" if kind == "masked_update" else kind for kind in STAGES)


@pytest.mark.parametrize(
    ("algorithm", "first"),
    [
        ({"name": "dp-ifca", "clusters": 2, "selection": {"rounds_fraction": 0.4}}, 3),
        ({"name": "r-dpcfl", "clusters": 2}, 2),
        ({"name": "r-dpcfl", "clusters": 2, "secure_from": 4}, 4),
    ],
)
def test_sums_begin_when_clusters_are_frozen(tmp_path, algorithm, first):
    job = make(tmp_path, algorithm, SAMPLE, rounds=5)
    states = played(job, tmp_path)
    frozen = states[first - 1].assignment
    assert all(state.assignment == frozen for state in states[first:])
    for client in ALL:
        secure = [(t, kind) for t, kind in charged(tmp_path, client) if kind in sample_stages()]
        assert secure == [(t, kind) for t in range(first, 6) for kind in sample_stages()]
        plan = Counter(slot.name for slot in job.algorithm.plan(job.protocol.client(client)))
        assert plan["masked"] == 6 - first
        assert {t for t, kind in charged(tmp_path, client) if kind not in sample_stages()} == set(range(1, first))


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ({}, ["first", "soft", "secure", "secure", "secure"]),
        ({"warm_start": True}, ["first", "window", "secure", "secure", "secure"]),
        ({"secure_from": 4, "selection": {"rounds_fraction": 0.5}}, ["first", "soft", "window", "secure", "secure"]),
    ],
)
def test_before_secure_sums_clients_choose_among_models_that_differ(tmp_path, changes, phases):
    job = make(tmp_path, {"name": "r-dpcfl", "clusters": 2, "secure_from": 3, **changes}, SAMPLE, rounds=5)
    states = played(job, tmp_path)
    assert [state.diagnostics["phase"] for state in states[1:]] == phases
    chosen_from = [before for before, after in pairwise(states) if after.diagnostics["phase"] == "window"]
    assert all(len(np.unique(state.models, axis=0)) == 2 for state in chosen_from)
    plan = Counter(slot.name for slot in job.algorithm.plan(job.protocol.roster[0]))
    assert plan["select"] == phases.count("window")


# ---- drop-outs


NEEDED = {"secure_keys": 6, "secure_shares": 6, "masked_update": 6, "secure_survivors": 5, "secure_unmask": 5}
WHY = {
    "secure_keys": "5 of 8 clients sent keys, needs 6",
    "secure_shares": "5 of 8 clients sent boxes, needs 6",
    "masked_update": "5 of 8 clients sent masked vectors, needs 6",
    "secure_survivors": "4 witnesses signed the survivors, needs 5",
    "secure_unmask": "too few valid shares of the self mask of client 0",
}


@pytest.mark.parametrize("charged_too", [False, True], ids=["before the charge", "after the charge"])
@pytest.mark.parametrize("stage", STAGES)
def test_as_many_as_are_needed_are_enough_and_one_fewer_aborts_the_round(tmp_path, stage, charged_too):
    """Round 1 loses as many answers as it may, round 2 one more; round 3 is undisturbed."""
    job = make(tmp_path, COINS)
    left = NEEDED[stage]
    gone = {(1, stage): range(left, 8), (2, stage): range(left - 1, 8)}
    states = played(job, tmp_path, quorum=0.25, **{"unheard" if charged_too else "unasked": gone})
    survivors = range(left) if stage in STAGES[:3] else ALL
    model = states[0].models[0]
    total = trusted(job, updates(job, model, survivors, 1), 1, "masked_update")
    assert np.array_equal(states[1].models[0], model + (total / (0.5 * len(survivors))).astype(np.float32))
    assert states[2].diagnostics["secure sum"] == WHY[stage]
    assert np.array_equal(states[2].models, states[1].models)
    assert states[3].diagnostics["secure sum"] == "ok"
    assert (states[3].models != states[2].models).any()
    until = STAGES.index(stage)
    for client in ALL:
        first = STAGES if client < left or stage in STAGES[3:] else STAGES[: until + 1]
        second = STAGES[: until + 1]
        missed = [] if charged_too else [(1, stage)] * (client >= left) + [(2, stage)] * (client >= left - 1)
        expected = [(1, kind) for kind in first] + [(2, kind) for kind in second] + [(3, kind) for kind in STAGES]
        assert charged(tmp_path, client) == [line for line in expected if line not in missed]


def test_fewer_than_the_quorum_end_the_run(tmp_path):
    job = make(tmp_path, COINS)
    with pytest.raises(RunFailed, match="round 2: 7 of 8 clients answered, the quorum is 8"):
        played(job, tmp_path, unasked={(2, "secure_shares"): [4]})


def test_a_restarted_server_with_another_list_of_survivors_is_refused_and_aborts_the_round(tmp_path):
    """Client 2 was too late for the sum, and its repeated answer is in time after the restart; nobody pays twice."""
    job = make(tmp_path, COINS)
    with opened(job, tmp_path, quorum=0.5, unheard={(1, "masked_update"): [2]}) as fed:
        fed.round = 1
        state = job.algorithm.round(job.algorithm.start(fed), 1, fed)
        assert state.diagnostics["survivors"] == 7
    with opened(job, tmp_path, quorum=0.5) as fed:
        fed.round = 1
        state = job.algorithm.start(fed)
        after = job.algorithm.round(state, 1, fed)
        assert after.diagnostics == {"secure sum": "1 witnesses signed the survivors, needs 5", "survivors": 0}
        assert np.array_equal(after.models, state.models)
        fed.round = 2
        assert job.algorithm.round(after, 2, fed).diagnostics == {"secure sum": "ok", "survivors": 8}
    for client in ALL:
        first = STAGES[:4] if client == 2 else STAGES
        assert charged(tmp_path, client) == [(1, kind) for kind in first] + [(2, kind) for kind in STAGES]


# ---- cost


@pytest.mark.parametrize(
    ("algorithm", "privacy"),
    [
        (COINS, None),
        ({**COINS, "sampling": "visible"}, None),
        ({"name": "rr-cluster", "guarantee": "expected", "sampling_rate": 0.5, "clusters": 2, "min_cluster_size": 2}, None),
        ({"name": "oracle"}, SAMPLE),
        ({"name": "global"}, SAMPLE),
    ],
)
def test_the_estimate_counts_the_tasks_and_bytes_of_all_stages(tmp_path, algorithm, privacy):
    job = make(tmp_path, algorithm, privacy)
    with opened(job, tmp_path) as fed:
        state = job.algorithm.start(fed)
        for t in (1, 2, 3):
            fed.round = t
            state = job.algorithm.round(state, t, fed)
        found = estimate(job.protocol)
        assert fed.carried == (found["tasks"], found["bytes_up"], found["bytes_down"])
    batches = 4 if privacy is None else 1  # of 16 of 50 records
    assert found["steps"] == batches * (12 if privacy is None else 24)
    assert found["records"] == (600 if privacy is None else 24 * 16)


# ---- refusals


@pytest.mark.parametrize(
    ("algorithm", "changes", "said"),
    [
        ({"name": "dp-fedper", "sampling_rate": 0.5}, {}, "model.name is 'linear': dp-fedper needs a model with two layers or more"),
        (COINS, {"local": {**runs.DP_SGD}}, "local.deadline_s is null: must be set"),
        (COINS, {"privacy": {**runs.CLIENT, "adjacency": "replace-one"}}, "privacy.adjacency must be 'zero-out', got 'replace-one'"),
        (COINS, {"runtime": {"aggregators": 2}}, "runtime.aggregators must be 0, got 2"),
        (COINS, {"communication": {"up": "int8"}}, "communication.up must be float32, got 'int8'"),
        (
            COINS,
            {"privacy": {**runs.CLIENT, "secure_aggregation": {"colluders": 6}}},
            "privacy.secure_aggregation.colluders is 6: of 8 clients 6 must answer, one of them honest; must be from 0 to 5",
        ),
        (
            {"name": "oracle"},
            {"privacy": {**SAMPLE, "secure_aggregation": {"colluders": 6}}},
            "privacy.secure_aggregation.colluders is 6",
        ),
        ({"name": "global"}, {"privacy": SAMPLE, "local": {**runs.DP_SGD, "epochs": 2}}, "local.epochs is 2: must be 1"),
        (
            {"name": "dp-ifca", "clusters": 2, "asynchronous": {"buffer": 2}},
            {"privacy": SAMPLE},
            "algorithm.asynchronous: must be null with privacy.trust secure-aggregation",
        ),
        (
            {"name": "dp-fedavg", "asynchronous": {"buffer": 2}}, {},
            "algorithm.asynchronous: must be null with privacy.trust secure-aggregation, whose sums need a round",
        ),
        (
            {"name": "r-dpcfl", "secure_from": 3, "selection": {"budget_fraction": 0.1}}, {"privacy": SAMPLE},
            "selection.budget_fraction is 0.1: must be 0.03 (the default) with secure sums from round 3, where it has no effect",
        ),
        ({"name": "r-dpcfl", "secure_from": 4}, {"privacy": SAMPLE}, "algorithm.secure_from is 4: must be at most rounds, 3"),
        ({"name": "rr-cluster", "clusters": 2, "min_cluster_size": 0, "sampling_rate": 0.5}, {}, "rr-cluster"),
        (
            {**BLOCKS, "labels": "randomised-response", "labels_every": 2}, {},
            "algorithm.labels_every is 2: must be 0 with privacy.trust secure-aggregation, since clients would send their losses",
        ),
        ({"name": "fedavg"}, {}, "fedavg"),
    ],
)  # fmt: skip
def test_settings_without_secure_sums_are_refused_in_sentences(tmp_path, algorithm, changes, said):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, algorithm, **changes)
    assert said in str(caught.value)


def test_a_worker_refuses_a_signed_plan_with_raw_losses_for_the_server(tmp_path, monkeypatch):
    """The same job by an operator that does not check: its plan has no finite epsilon, and its options are refused."""
    job = make(tmp_path, BLOCKS, {**runs.CLIENT, "noise": "os", "noise_seed": None})
    options = {**job.protocol.options, "labels": "randomised-response", "labels_every": 2}
    forged = algorithm_of(job.protocol.model_copy(update={"options": options}))
    assert without_guarantee(job.algorithm) == []
    assert without_guarantee(forged) == ["raw to a trusted server: it sees this release as it is"]
    with pytest.raises(Refused, match=r"claim: algorithm\.labels_every is 2"):
        verify_claim(forged, 0, tmp_path)
    monkeypatch.setattr(type(forged), "problems", staticmethod(lambda options, setting: []))
    with pytest.raises(Refused, match=r"without a guarantee: .*raw to a trusted server"):
        verify_claim(forged, 0, tmp_path)
