"""What each algorithm does without some clients: stated in its capabilities, and true against scripted clients."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
import secure_runs
from conftest import ROOT, SMALL
from simulate import simulate
from test_algorithms import MATRIX, changes_of
from test_r_dpcfl import Scripted

from dpcfl_net.algorithms import dp_ifca, r_dpcfl
from dpcfl_net.algorithms.base import registry
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.transport.keys import make_keys


@pytest.fixture(scope="module")
def job_of(tmp_path_factory):
    """Builds the job of a case of test_algorithms; its four clients are 0 to 3."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 4)

    def build(case, **changes):
        return make_job(config.resolve({**SMALL, **changes_of(case), **changes}), folder)

    return build


def update(client, p):
    return np.full(p, (client + 1) / 8, np.float32)


def present(*clients, choice=None):
    """Answers of clients that send a constant update, loss 0.5 and the given choice; the others are silent."""

    def answer(client, kind, t, tensors):
        if client not in clients:
            return None
        shape = next(iter(tensors.values())).shape if tensors else (0,)
        found = {"update": update(client, shape[-1])}
        if kind in ("select_and_train", "argmin_and_train"):
            found["choice"] = np.int64(client % 2 if choice is None else choice)
        return found

    return answer


def rounds(job, *answers):
    """States after rounds in which the clients answer by one function each."""
    fed = Scripted(job.protocol, None, quorum=0.0)
    state, states = job.algorithm.start(fed), []
    for t, answer in enumerate(answers, start=1):
        fed.round, fed._answer = t, answer
        state = job.algorithm.round(state, t, fed)
        states.append(state)
    return states


def moved(before, after):
    """The first coordinate of the change of every model, in eighths."""
    return [round(float(x) * 8, 4) for x in (after.models - before.models)[:, 0]]


def test_every_algorithm_states_what_it_does_without_some_clients(job_of):
    said = {case: job_of(case).algorithm.capabilities.without_clients for case in MATRIX}
    assert {options.get("name", case) for case, options in MATRIX.items()} == set(registry())
    table = (ROOT / "docs/how-to/processes.md").read_text()
    for case, text in said.items():
        assert f"| {text} |" in table, case
        assert 20 < len(text) < 400, case
        assert not text.endswith("."), case
    assert max(Counter(said.values()).values()) <= 5  # each family has its own sentence; the client-level ones share theirs


@pytest.mark.parametrize("name", ["global", "oracle", "r-dpcfl", "dp-ifca"])
def test_with_secure_sums_the_sentence_also_says_when_a_sum_is_aborted(tmp_path, name):
    options = {"name": name} | ({"clusters": 2} if name in ("r-dpcfl", "dp-ifca") else {})
    plain, secure = (
        secure_runs.make(
            tmp_path / trust, options, {**secure_runs.SAMPLE, "trust": trust}
        ).algorithm.capabilities.without_clients
        for trust in ("untrusted-server", "secure-aggregation")
    )
    joins = {"r-dpcfl": f"; {r_dpcfl.JOINING}", "dp-ifca": f"; {dp_ifca.JOINING}"}.get(name, "")
    stays = {"r-dpcfl": f"; {r_dpcfl.NOT_JOINING}"}.get(name, "")
    assert plain.endswith(joins)
    always = plain.removesuffix(joins) + stays
    assert secure.startswith(f"{always}; ")
    page = (ROOT / "docs/how-to/processes.md").read_text()
    assert f"| {secure.removeprefix(f'{always}; ')} |" in page
    assert not stays or f"| {stays.removeprefix('; ')} |" in page


@pytest.mark.parametrize(
    ("options", "divided"),
    [({"name": "dp-fedavg"}, True), ({"name": "dp-fedprox"}, True), ({"name": "rr-cluster", "clusters": 1}, True),
     ({"name": "rr-cluster", "clusters": 2, "min_cluster_size": 1}, False)],
)  # fmt: skip
def test_with_secure_sums_of_whole_clients_the_sentence_says_what_the_sum_is_divided_by(tmp_path, options, divided):
    more = {"guarantee": "expected"} if options["name"] == "rr-cluster" else {}
    algorithm = secure_runs.make(tmp_path, {**options, **more, "sampling_rate": 0.5}).algorithm
    said = algorithm.capabilities.without_clients
    assert f"| {said} |" in (ROOT / "docs/how-to/processes.md").read_text()
    assert ("divided by their expected number" in said) == divided
    if options["name"] == "rr-cluster":  # with several clusters it is divided by the counts that the sum holds
        k = options["clusters"]
        released = {"sums": np.ones((k, 3)), "counts": np.full(k, 4.0)}
        small, large = (algorithm.means(released, clients)[0] for clients in (4.0, 8.0))
        assert (not np.array_equal(small, large)) == divided


@pytest.mark.parametrize(
    ("algorithm", "phases"),
    [
        ({"name": "dp-ifca"}, ["window", "frozen", "frozen", "frozen"]),
        pytest.param({"name": "r-dpcfl"}, ["first", "secure", "secure", "secure"], marks=pytest.mark.slow),
        pytest.param({"name": "r-dpcfl", "secure_from": 3}, ["first", "soft", "secure", "secure"], marks=pytest.mark.slow),
    ],
)
def test_with_secure_sums_a_late_client_stays_in_its_cluster_and_plans_no_choice(tmp_path, algorithm, phases):
    availability = {"clients": {3: [[4, 4]]}}
    job = secure_runs.make(
        tmp_path, {**algorithm, "clusters": 2}, secure_runs.SAMPLE, rounds=4, availability=availability, runtime={"quorum": 0.5}
    )
    states = secure_runs.played(job, tmp_path)
    assert [state.diagnostics["phase"] for state in states[1:]] == phases
    first = states[-2].assignment[3] if algorithm.get("secure_from") else 0
    assert states[-1].assignment[3] == first
    assert all(state.diagnostics["secure sums"] == "ok" for state in states[1:] if state.diagnostics["phase"] in phases[2:])
    late = {slot.name for slot in job.algorithm.plan(job.protocol.client(3))}
    assert late == {kind for _, kind in secure_runs.charged(tmp_path, 3)} - {"masked_step"} | {"masked"}


def test_global_averages_those_that_answered_and_stays_without_any(job_of):
    job = job_of("global")
    first, second, third = rounds(job, present(0, 1, 2, 3), present(0, 3), present())
    assert moved(first, second) == [2.5]
    assert moved(second, third) == [0.0]


def test_oracle_averages_within_a_cluster_and_an_empty_one_keeps_its_model(job_of):
    job = job_of("oracle")
    mine = [i for i, cluster in enumerate(job.protocol.oracle) if cluster == 0]
    first, second = rounds(job, present(0, 1, 2, 3), present(mine[1]))
    assert moved(first, second) == [mine[1] + 1, 0.0]


@pytest.mark.parametrize("case", ["f-cdpfl", "f-cdpfl-private"])
def test_f_cdpfl_keeps_the_last_choice_of_a_silent_client(job_of, case):
    first, second = rounds(job_of(case), present(0, 1, 2, 3), present(0, 2, choice=1))
    assert (first.assignment, second.assignment) == ([0, 1, 0, 1], [1, 1, 1, 1])
    assert moved(first, second) == [0.0, 2.0]  # (1 + 3) / 2


def test_dp_ifca_puts_a_client_without_a_choice_in_the_first_cluster(job_of):
    first, second = rounds(job_of("dp-ifca"), present(0, 1, 2), present(0, 1, 2, 3))
    assert (first.assignment, second.assignment) == ([0, 1, 0, None], [0, 1, 0, 0])
    assert moved(first, second) == [round(8 / 3, 4), 2.0]  # (1 + 3 + 4) / 3
    only = rounds(job_of("dp-ifca"), present(0, 1, 2, 3), present(1))
    assert moved(*only) == [0.0, 2.0]


def test_km_cdpfl_moves_only_the_models_of_those_that_answered(job_of):
    first, second, third = rounds(job_of("km-cdpfl"), present(0, 1, 2, 3), present(0, 3), present())
    assert [step == 0 for step in moved(first, second)] == [False, True, True, False]
    assert moved(second, third) == [0.0] * 4
    alone = rounds(job_of("km-cdpfl"), present(0, 1, 2, 3), present(2))  # fewer answers than clusters
    assert moved(*alone) == [0.0, 0.0, 3.0, 0.0]


def test_mr_mtl_weighs_updates_by_records_over_all_clients(job_of):
    job = job_of("mr-mtl")
    first, second, third = rounds(job, present(0, 1, 2, 3), present(1, 2), present())
    records = {entry.id: entry.records for entry in job.protocol.roster}
    expected = (2 * records[1] + 3 * records[2]) / sum(records.values())
    assert moved(first, second) == [round(expected, 4)]
    assert moved(second, third) == [0.0]


def test_mr_mtl_keeps_an_update_that_the_server_never_got_and_none_that_a_crash_cut(job_of, tmp_path, monkeypatch):
    job = job_of("mr-mtl")
    mean = job.algorithm.start(Scripted(job.protocol, None, quorum=0.0)).models[0]

    def task(t):
        return Task(t, "train", {"mean": mean})

    def crash(*_, **__):
        raise KeyboardInterrupt

    with contextlib.closing(make_host(job, 0, tmp_path)) as host:
        kept = host.answer(task(1))  # the server never gets this answer
        sent = unpack(kept.release)["update"]
        model = host.personal_model()
        assert np.allclose(model - mean, sent, atol=1e-6)
        assert sent.any()
        with monkeypatch.context() as patched:
            patched.setattr(type(job.algorithm), "train", crash)
            with pytest.raises(KeyboardInterrupt):
                host.answer(task(2))
        host.answer(task(3))  # round 2 has passed: its task is lost
        assert host.answer(task(2)).status != "release"
        third = unpack(host.answer(task(3)).release)["update"]
        assert np.allclose(host.personal_model() - model, third, atol=1e-6)


def first_round(client, p):
    """Clients 0 and 1 point one way, 2 and 3 the other, each with a little of its own."""
    noise = np.random.default_rng([7, client]).standard_normal(p) * 1e-3
    return ((1 if client < 2 else -1) * np.ones(p) + noise).astype(np.float32)


@pytest.mark.parametrize("case", ["r-dpcfl", "rc-dpfl"])
def test_r_dpcfl_clusters_those_that_answered_first_and_the_others_choose_in_the_window(job_of, case):
    def first(client, kind, t, tensors):
        return {"update": first_round(client, tensors["model"].size)} if client != 3 else None

    job = job_of(case, rounds=8)
    t_soft, *later = rounds(job, first, *[present(0, 1, 2, 3)] * 7)
    assert t_soft.memory["posteriors"][3].tolist() == [0.5, 0.5]  # drawn uniformly
    assert t_soft.assignment[0] == t_soft.assignment[1] != t_soft.assignment[2]
    window = next(state for state in later if state.diagnostics["phase"] == "window")
    assert window.assignment == [0, 1, 0, 1]  # their choices, that of client 3 too
    silent = rounds(job, first, *[present(0, 1, 2)] * 7)
    assert silent[-1].assignment[:3] == [0, 1, 0]
    only_two = rounds(job, first, *[present(0, 1, 2, 3)] * 6, present(0, 2))
    assert moved(*only_two[-2:])[1] == 0.0  # the cluster without an answer keeps its model


@pytest.mark.parametrize("case", ["em-fdro"])
def test_em_fdro_counts_a_client_without_a_loss_as_the_average(job_of, case):
    job = job_of(case)

    def silent(client, kind, t, tensors):
        if client == 3:
            return None
        return {"loss": np.float32(0.2 * (client + 1))} | (
            {"update": update(client, tensors["model"].size)} if kind == "train" else {}
        )

    fed = Scripted(job.protocol, silent)
    fed.round = 1
    start = job.algorithm.start(fed)
    state = job.algorithm.round(start, 1, fed)
    assert state.memory["losses"][3] is None
    records = {entry.id: entry.records for entry in job.protocol.roster}
    expected = sum((i + 1) * records[i] for i in range(3)) / sum(records[i] for i in range(3))
    assert moved(start, state) == [round(expected, 4)]


@pytest.mark.parametrize("case", ["dp-fedavg", "dp-fedper", "rr-cluster", "rr-cluster-expected"])
def test_client_level_rounds_have_the_same_noise_and_divisor_without_some_clients(job_of, case, tmp_path):
    """Client 0 is away in round 2: its clipped update is missing from the sum, and nothing else differs."""
    jobs = {"usual": job_of(case), "away": job_of(case, availability={"clients": {0: [[1, 1], [3, 4]]}})}
    found = {name: {} for name in jobs}
    for name, job in jobs.items():
        simulate(job, tmp_path / name, on_round=lambda t, state, name=name: found[name].update({t: state.models.copy()}))
    usual, away = jobs["usual"], jobs["away"]
    assert away.protocol.curator_noise_multiplier == usual.protocol.curator_noise_multiplier
    assert (found["usual"][1] == found["away"][1]).all()
    difference = float(np.linalg.norm((found["usual"][2] - found["away"][2]).astype(float)))
    assert difference > 0
    if case in ("dp-fedavg", "dp-fedper"):
        assert difference <= usual.protocol.local.clip / len(usual.protocol.roster) * 1.001
    assert np.isfinite(found["away"][4]).all()
