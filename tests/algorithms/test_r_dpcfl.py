"""R-DPCFL's server against scripted clients: phases, assignments, aggregation, missing and hostile answers."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.clustering import sampled
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.base import Federation
from dpcfl_net.transport.keys import make_keys


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 8)
    document = {**copy.deepcopy(SMALL), "rounds": 20}
    return make_job(config.resolve(document), folder).protocol


class Scripted(Federation):
    """Answers calls from a function (client, kind, round, tensors) -> release or None, and remembers them."""

    def __init__(self, protocol, answer, quorum=0.1):
        super().__init__(protocol, quorum=quorum)
        self._answer = answer
        self.calls = []

    def _exchange(self, kind, tasks, take, window):
        self.calls.append((self.round, kind, {client: {k: np.array(v) for k, v in t.items()} for client, t in tasks.items()}))
        answers = {client: self._answer(client, kind, self.round, tensors) for client, tensors in tasks.items()}
        for client in sorted(answers):
            if answers[client] is not None:
                take(client, answers[client])


def clustered(client, kind, t, tensors):
    """Clients 2k and 2k+1 belong together; what they send points their cluster's way, with a little of their own."""
    p = tensors["models"].shape[1] if "models" in tensors else len(tensors["model"])
    rng = np.random.default_rng([client // 2])
    own = np.random.default_rng([99, client])
    update = (rng.standard_normal(p) + 0.02 * own.standard_normal(p)).astype(np.float32)
    return {"update": update} | ({"choice": np.int64(client // 2)} if kind == "select_and_train" else {})


def run(protocol, answer, rounds, **changes):
    algorithm = algorithm_of(protocol.model_copy(update=changes))
    fed = Scripted(algorithm.protocol, answer)
    state = algorithm.start(fed)
    states = []
    for t in range(1, rounds + 1):
        fed.round = t
        state = algorithm.round(state, t, fed)
        states.append(state)
    return fed, states


def test_phases_follow_the_plan(protocol):
    fed, states = run(protocol, clustered, 20)
    assert [s.diagnostics["phase"] for s in states] == ["first"] + ["soft"] * 9 + ["window"] * 2 + [
        "frozen"
    ] * 8  # E_c = E / 2 at MPO 0
    kinds = [kind for _, kind, _ in fed.calls]
    assert kinds == ["first_round_update"] + ["train"] * 9 + ["select_and_train"] * 2 + ["train"] * 8
    quota = {slot.name: 0 for slot in algorithm_of(protocol).plan(protocol.roster[0])}
    for slot in algorithm_of(protocol).plan(protocol.roster[0]):
        quota[slot.name] += 1
    assert quota == {"first": 1, "train": 19, "select": 2}


def test_the_soft_rounds_are_the_whole_part_of_half_of_the_rounds(protocol):
    _, states = run(protocol.model_copy(update={"rounds": 7}), clustered, 7)
    assert states[0].diagnostics["MPO"] < 1e-6
    assert [state.diagnostics["phase"] for state in states] == ["first", "soft", "soft", "window", "frozen", "frozen", "frozen"]
    assert ["first_round" in state.diagnostics for state in states] == [True] + [False] * 6  # no checkpoint repeats its arrays


@pytest.mark.parametrize(("overlap", "last_soft"), [(0.29, 7), (0.4, 6), (0.95, 2)])
def test_more_overlap_ends_the_soft_rounds_earlier(protocol, monkeypatch, overlap, last_soft):
    """E_c is the whole part of (1 - MPO) E / 2, here with E = 20."""
    fit = sampled.fit
    monkeypatch.setattr(sampled, "fit", lambda *given, **how: replace(fit(*given, **how), mpo=overlap))
    _, states = run(protocol, clustered, last_soft + 1)
    assert [state.diagnostics["phase"] for state in states] == ["first"] + ["soft"] * (last_soft - 1) + ["window"]


def test_soft_rounds_draw_the_cluster_of_each_client_anew_from_its_posterior(protocol):
    def still(client, kind, t, tensors):
        return {"update": np.zeros_like(tensors["model"])}

    fed, (state,) = run(protocol, clustered, 1)
    posteriors = np.tile([0.6, 0.3, 0.1, 0.0], (8, 1))
    posteriors[0] = [0.0, 0.0, 0.0, 1.0]
    state = replace(state, memory={"posteriors": posteriors, "soft_until": 10**6})
    algorithm, fed._answer, drawn = algorithm_of(protocol), still, []
    for fed.round in range(2, 302):
        drawn.append(algorithm.round(state, fed.round, fed).assignment)
    drawn = np.array(drawn)
    assert (drawn[:, 0] == 3).all()
    shares = np.bincount(drawn[:, 1:].ravel(), minlength=4) / drawn[:, 1:].size
    np.testing.assert_allclose(shares, posteriors[1], atol=0.06)  # 5.6 standard errors of 2,100 draws
    assert len({tuple(row) for row in drawn.tolist()}) > 100


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_a_choice_costs_its_fraction_of_epsilon_under_both_adjacencies(protocol, adjacency):
    privacy = protocol.privacy.model_copy(update={"adjacency": adjacency})
    plan = algorithm_of(protocol.model_copy(update={"privacy": privacy})).plan(protocol.roster[0])
    (event,) = {slot.event(None, adjacency) for slot in plan if slot.name == "select"}
    assert event.epsilon == pytest.approx(0.03 * protocol.privacy.epsilon)


def test_clients_choose_among_models_that_differ(protocol):
    """Updates without clusters: E_c is 2, or 1 after a warm start, since models that are still equal give no choice."""

    def alone(client, kind, t, tensors):
        return clustered(2 * client, kind, t, tensors) | ({"choice": np.int64(0)} if kind == "select_and_train" else {})

    phases = {}
    for warm in (False, True):
        fed, states = run(protocol, alone, 4, options={**protocol.options, "warm_start": warm})
        assert states[0].diagnostics["MPO"] > 0.9
        phases[warm] = [state.diagnostics["phase"] for state in states]
        (chosen,) = [tensors for t, kind, tensors in fed.calls if kind == "select_and_train"][:1]
        assert len(np.unique(chosen[0]["models"], axis=0)) > 1
    assert phases == {False: ["first", "soft", "window", "window"], True: ["first", "window", "window", "frozen"]}


def test_three_rounds_keep_the_clusters_of_the_first_until_models_differ(protocol):
    fed, states = run(protocol.model_copy(update={"rounds": 3}), clustered, 3)
    assert [state.diagnostics["phase"] for state in states] == ["first", "soft", "window"]
    assert states[1].assignment == states[0].assignment
    (chosen,) = [tensors for t, kind, tensors in fed.calls if kind == "select_and_train"]
    assert len(np.unique(chosen[0]["models"], axis=0)) > 1


@pytest.mark.parametrize("name", ["r-dpcfl", "rc-dpfl"])
def test_two_rounds_leave_no_round_to_choose_in_and_plan_none(protocol, name):
    """Models are equal until they are trained in round 2, and a choice would be a coin toss."""
    options = {"clusters": 4} if name == "rc-dpfl" else protocol.options
    short = protocol.model_copy(update={"algorithm": name, "options": options, "rounds": 2})
    fed, states = run(short, clustered, 2)
    assert [state.diagnostics["phase"] for state in states] == ["first", "soft"]
    assert states[1].assignment == states[0].assignment
    assert [kind for _, kind, _ in fed.calls] == ["first_round_update", "train"]
    assert [slot.name for slot in algorithm_of(short).plan(short.roster[0])] == ["first", "train"]


def test_every_planned_choice_of_rc_dpfl_can_be_made(protocol):
    """E_c is 2 at full overlap; then clients choose in every round after it."""
    rc = protocol.model_copy(update={"algorithm": "rc-dpfl", "options": {"clusters": 4}, "rounds": 6})

    def alone(client, kind, t, tensors):
        return clustered(2 * client, kind, t, tensors) | ({"choice": np.int64(0)} if kind == "argmin_and_train" else {})

    fed, states = run(rc, alone, 6)
    assert states[0].diagnostics["MPO"] > 0.9
    choices = [kind for _, kind, _ in fed.calls].count("argmin_and_train")
    assert choices == [slot.name for slot in algorithm_of(rc).plan(rc.roster[0])].count("argmin") == 4


def test_first_round_clusters_and_starts_every_model_at_theta_init(protocol):
    fed, (state,) = run(protocol, clustered, 1)
    groups = {frozenset(i for i in range(8) if state.assignment[i] == m) for m in range(4)}
    assert groups == {frozenset({2 * k, 2 * k + 1}) for k in range(4)}
    assert (state.models == fed.initial_model()).all()
    assert state.diagnostics["MSS"] > 3
    np.testing.assert_allclose(state.memory["posteriors"].sum(axis=1), 1)


def test_warm_start_adds_the_posterior_weighted_mean_update(protocol):
    options = {**protocol.options, "warm_start": True}
    fed, (state,) = run(protocol, clustered, 1, options=options)
    theta = fed.initial_model()
    for client in range(8):
        pair = [
            clustered(c, "first_round_update", 1, {"model": theta})["update"] for c in (client // 2 * 2, client // 2 * 2 + 1)
        ]
        np.testing.assert_allclose(state.models[state.assignment[client]], theta + np.mean(pair, axis=0), rtol=1e-4, atol=1e-5)


def test_a_warm_start_weighs_updates_by_their_noise_if_means_do(protocol):
    """An update of nine times the variance had the same weight in the models that all rounds start from."""
    noise = [protocol.roster[0].noise_multiplier * (3 if entry.id % 2 else 1) for entry in protocol.roster]
    roster = [entry.model_copy(update={"noise_multiplier": noise[entry.id]}) for entry in protocol.roster]
    options = {**protocol.options, "warm_start": True, "weights": "noise"}
    fed, (state,) = run(protocol.model_copy(update={"roster": roster}), clustered, 1, options=options)
    theta = fed.initial_model()
    for pair in range(4):
        deltas = [clustered(2 * pair + k, "first_round_update", 1, {"model": theta})["update"] for k in range(2)]
        moved = state.models[state.assignment[2 * pair]] - theta
        np.testing.assert_allclose(moved, np.average(deltas, axis=0, weights=[9, 1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["r-dpcfl", "rc-dpfl"])
def test_a_cluster_moves_by_the_mean_of_its_members_deltas(protocol, name):
    """Algorithm 1 of R-DPCFL weighs them alike, that of RC-DPFL by records."""
    records = [200 + 100 * entry.id for entry in protocol.roster]
    roster = [entry.model_copy(update={"records": records[entry.id]}) for entry in protocol.roster]
    changed = protocol.model_copy(update={"roster": roster})
    _, states = run(changed, clustered, 2, algorithm=name, options={"clusters": 4})
    before, after = states
    for m in range(4):
        members = [i for i in range(8) if after.assignment[i] == m]
        if not members:
            assert (after.models[m] == before.models[m]).all()
            continue
        deltas = [clustered(i, "train", 2, {"model": before.models[m]})["update"] for i in members]
        weights = [records[i] if name == "rc-dpfl" else 1 for i in members]
        moved = np.average(deltas, axis=0, weights=weights)
        np.testing.assert_allclose(after.models[m] - before.models[m], moved, rtol=1e-4, atol=1e-5)
    assert max(after.assignment.count(m) for m in range(4)) > 1


def test_each_client_gets_the_model_of_its_own_draw(protocol):
    fed, states = run(protocol, clustered, 3)
    _, _, tasks = fed.calls[2]
    for client, tensors in tasks.items():
        assert (tensors["model"] == states[1].models[states[2].assignment[client]]).all()


@pytest.mark.parametrize(("step", "mechanism"), [("select_and_train", "select"), ("argmin_and_train", "lowest_loss")])
def test_a_client_trains_the_model_that_it_chose(protocol, step, mechanism):
    models = np.repeat(np.arange(4, dtype=np.float32)[:, None], protocol.model.parameters, axis=1)
    me = SimpleNamespace(**{mechanism: lambda slot, models: 2}, dpsgd=lambda slot, model: 3 * model + 1)
    release = getattr(algorithm_of(protocol), step)(me, models).tensors
    assert (int(release["choice"]), {*release["update"].tolist()}) == (2, {5.0})  # from 2 to 7


@pytest.mark.parametrize("choice", [-1, 4, 2**62, -(2**63)])
def test_a_choice_of_no_cluster_leaves_its_client_out_of_the_round(protocol, choice):
    def hostile(client, kind, t, tensors):
        answer = clustered(client, kind, t, tensors)
        if client == 5 and "choice" in answer:
            answer |= {"choice": np.int64(choice), "update": np.full_like(answer["update"], 1e3)}
        return answer

    _, states = run(protocol, hostile, 14)
    assert states[10].assignment[5] == states[9].assignment[5]
    assert np.abs(states[-1].models).max() < 100


def test_missing_clients_do_not_stop_a_round(protocol):
    _, states = run(protocol, lambda c, k, t, x: None if c == (t % 8) and t > 1 else clustered(c, k, t, x), 20)
    assert states[-1].diagnostics["phase"] == "frozen"


def test_a_client_missing_from_the_first_round_draws_uniformly(protocol):
    _, states = run(protocol, lambda c, k, t, x: None if c == 6 and t == 1 else clustered(c, k, t, x), 1)
    np.testing.assert_allclose(states[0].memory["posteriors"][6], 0.25)
    shown = states[0].diagnostics["first_round"]
    assert shown["clients"].tolist() == [0, 1, 2, 3, 4, 5, 7]  # rows are those of the answers
    assert len(shown["labels"]) == 7


def test_fewer_answers_than_clusters_fail_the_run(protocol):
    with pytest.raises(RunFailed, match="3 clients answered the first round, too few for 4 clusters"):
        run(protocol, lambda c, k, t, x: clustered(c, k, t, x) if c < 3 else None, 1)


def test_after_answers_that_crashes_cost_for_good_there_are_fewer_clusters(protocol):
    algorithm = algorithm_of(protocol)
    fed = Scripted(protocol, lambda c, k, t, x: clustered(c, k, t, x) if c < 3 else None)
    fed.lost = [3, 4, 5, 6, 7]
    fed.round = 1
    state = algorithm.round(algorithm.start(fed), 1, fed)
    assert 1 <= len(state.models) <= 3
    fed.lost = [3]  # the others may answer in another attempt
    with pytest.raises(RunFailed, match="too few for 4 clusters"):
        algorithm.round(algorithm.start(fed), 1, fed)


def test_unknown_m_is_found_and_one_cluster_has_no_window(protocol):
    options = {**protocol.options, "clusters": "auto"}
    _, states = run(protocol, clustered, 1, options=options)
    assert len(states[0].models) == 4

    def same(client, kind, t, tensors):
        p = len(tensors["model"])
        return {"update": np.random.default_rng([7, client, t]).standard_normal(p).astype(np.float32)}

    fed, states = run(protocol, same, 20, options=options)
    assert len(states[-1].models) == 1
    assert {kind for _, kind, _ in fed.calls} == {"first_round_update", "train"}
    assert states[-1].diagnostics["phase"] == "single"


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_noise_of_a_first_update_is_what_the_server_reckons_with(tmp_path, epochs):
    """Two draws on the same records differ by noise alone (K = 1) or nearly (K = 2: later gradients feel the first noise)."""
    from dpcfl_net.data.partition import open_client
    from dpcfl_net.experiment.job_files import client_slice
    from dpcfl_net.federation.engine import Engine
    from dpcfl_net.privacy.slots import DPSGDSlot

    make_keys(tmp_path, 8)
    job = make_job(config.resolve({**copy.deepcopy(SMALL), "local": {"batch_size": 32, "lr": 0.5, "epochs": epochs}}), tmp_path)
    settings, piece = client_slice(job, 0, None)
    data, engine, z = open_client(settings, piece), Engine.of(job.protocol), job.protocol.roster[0].noise_multiplier
    theta = np.zeros(job.protocol.model.parameters, np.float32)
    first, second = (engine.trainer.train(theta, data, DPSGDSlot("first", 1.0, epochs), z, bytes([k] * 32))[0] for k in (1, 2))
    (expected,) = algorithm_of(job.protocol).noise_deviations([0])
    assert float((first - second).std() / 2**0.5) == pytest.approx(expected, rel=0.07)  # 6,090 draws: 0.9 % a deviation


def test_the_server_knows_the_noise_of_each_client(protocol):
    roster = [entry.model_copy(update={"records": 600 * (1 + entry.id)}) for entry in protocol.roster]
    unequal = algorithm_of(protocol.model_copy(update={"roster": roster}))
    np.testing.assert_allclose(unequal.noise_deviations([0, 2, 5]) * [1, 3, 6], unequal.noise_deviations([0])[0])
    assert unequal.noise_deviations([]) is None


def apart(client, kind, t, tensors):
    """Clients 1 to 7 belong together, client 0 to no one; noise as the job states it."""
    answer = clustered(client, kind, t, tensors)
    rng = np.random.default_rng([client > 0, t])
    own = np.random.default_rng([98, client]).standard_normal(answer["update"].size) * apart.deviation
    answer["update"] = (100 * apart.deviation * rng.standard_normal(own.size) + own).astype(np.float32)
    return answer | ({"choice": np.int64(0)} if "choice" in answer else {})


def test_a_client_that_resembles_no_other_is_alone_and_the_run_says_so(protocol):
    options = {**protocol.options, "clusters": "auto"}
    apart.deviation = float(algorithm_of(protocol).noise_deviations([0])[0])
    _, states = run(protocol, apart, 2, options=options)
    assert len(states[0].models) == 2
    assert states[0].assignment.count(states[0].assignment[0]) == 1
    for state in states:
        assert state.diagnostics["alone"] == [0]
        assert "outliers" not in state.diagnostics
    assert states[0].diagnostics["first_round"]["outliers"].tolist() == [True] + [False] * 7
    _, (one,) = run(protocol, apart, 1, options={**protocol.options, "clusters": 1})
    assert one.diagnostics["outliers"] == [0]
    assert "alone" not in one.diagnostics
