"""Every algorithm through the same doors: processes and one process agree, crashes change nothing, ledgers hold the plan."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter

import numpy as np
import pytest
from conftest import SMALL, charged_by_round, only_run, write_config
from simulate import simulate

from dpcfl_net.algorithms.base import dpsgd_norm, registry
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment import config, job_files
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import client_slice, read_job
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import declared_steps, update_tensor
from dpcfl_net.launch.cli import run as runs
from dpcfl_net.privacy.slots import SelectionSlot
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime import evaluation
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Evaluator
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.observer_notes import Models

ROUNDS = 4
MATRIX = {
    "dp-ifca": {"clusters": 2},
    "f-cdpfl": {"clusters": 2},
    "f-cdpfl-private": {"name": "f-cdpfl", "clusters": 2, "select": "exponential"},
    "global": {},
    "km-cdpfl": {"clusters": 2},
    "local": {},
    "mr-mtl": {"lam": 0.2},
    "oracle": {},
    "r-dpcfl": {"clusters": 2},
    "rc-dpfl": {"clusters": 2},
    "robust-hdp": {},
}
TRUSTED = {"unit": "client", "trust": "trusted-server", "delta": 1e-2}
REPLACED = {**TRUSTED, "adjacency": "replace-one"}
CLIENT_LEVEL = {  # case: options, privacy; every client is in every round, so that each of them can be made to crash
    "dp-fedavg": ({}, TRUSTED),
    "dp-fedprox": ({"mu": 0.5}, REPLACED),
    "dp-fedper": ({}, TRUSTED),
    "rr-cluster": ({"clusters": 2, "min_cluster_size": 2}, REPLACED),
    "rr-cluster-expected": (
        {"name": "rr-cluster", "base": "fesem", "clusters": 2, "min_cluster_size": 1, "guarantee": "expected"},
        TRUSTED,
    ),
    "rr-cluster-public": (
        {
            "name": "rr-cluster",
            "clusters": 2,
            "min_cluster_size": 2,
            "labels": "randomised-response",
            "labels_every": 2,
            "labels_epsilon": 0.5,
        },
        REPLACED,
    ),
    "rr-cluster-sampled": (
        {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "labels": "randomised-response", "labels_epsilon": 0.5},
        REPLACED,
    ),
    "rr-cluster-paper": (
        {"name": "rr-cluster", "base": "fedcam", "clusters": 2, "min_cluster_size": 2, "guarantee": "paper"},
        {**REPLACED, "accountant": "rdp"},
    ),
}
DRAWN_BY_LOSS = {  # case: options, privacy
    "em-fdro": ({"clients_per_round": 4}, {}),
    "em-fdro-client": (
        {"name": "em-fdro", "clients_per_round": 4},
        {"unit": "client", "adjacency": "replace-one", "delta": 1e-2},
    ),
    "em-fdro-paper": ({"name": "em-fdro", "mode": "paper", "clients_per_round": 4}, {}),
}
RDP = {"accountant": "rdp"}  # calibrates faster
LATER = {"dpmm-cfl": ({"sweeps": 3}, RDP), "feddp-kmeans": ({"clusters": 2, "centres": 3}, RDP)}  # case: options, privacy
MATRIX |= {case: options for case, (options, _) in {**DRAWN_BY_LOSS, **LATER}.items()}
MATRIX |= {case: {"sampling_rate": 1.0, **options} for case, (options, _) in CLIENT_LEVEL.items()}
# Cases whose whole runs are slow tests: each has the client steps of another case, or is compared over the network elsewhere.
SLOW = {
    "f-cdpfl", "rr-cluster-paper", "rr-cluster-public", "rr-cluster-sampled", "em-fdro-client", "em-fdro-paper", "global", "oracle", "km-cdpfl",
    "rc-dpfl", "mr-mtl", "robust-hdp", "dpmm-cfl", "feddp-kmeans", "dp-fedavg", "dp-fedprox", "local", "f-cdpfl-private",
    "rr-cluster-expected",
}  # fmt: skip
TINY = {
    "data": {"dataset": "digits", "clients": [2, 2], "train_per_client": 200, "test_per_client": 40},
    "rounds": ROUNDS,
    "local": {"batch_size": 20, "lr": 0.5},
}


def test_the_matrix_holds_every_algorithm():
    assert {options.get("name", name) for name, options in MATRIX.items()} == set(registry())


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in MATRIX])
def test_a_plan_depends_on_public_facts_and_not_on_the_client(case, tmp_path):
    """Clients with equal facts are planned and calibrated once (`plan_examples.plan_key`)."""
    make_keys(tmp_path, 4)
    job = make_job(config.resolve({**SMALL, **changes_of(case)}), tmp_path)
    entry = job.protocol.roster[0]
    other = entry.model_copy(update={"id": 3, "public_key": job.protocol.roster[3].public_key})
    assert job.algorithm.plan(entry) == job.algorithm.plan(other)


def changes_of(case):
    """What a case changes in SMALL."""
    _, privacy = {**CLIENT_LEVEL, **DRAWN_BY_LOSS, **LATER}.get(case, ({}, {}))
    data = {**TINY["data"], "validation": 0.1} if case in DRAWN_BY_LOSS else TINY["data"]
    rounds = ROUNDS + 1 if case == "feddp-kmeans" else ROUNDS  # its first four rounds are of k-means
    return {
        **TINY,
        "rounds": rounds,
        "data": data,
        "algorithm": {"name": case, **MATRIX[case]},
        "privacy": {**SMALL["privacy"], **privacy},
    }


def job_for(folder, algorithm, **changes):
    document = {**SMALL, **TINY, "algorithm": algorithm, **changes}
    make_keys(folder, 4)
    return make_job(config.resolve(document), folder)


def run(job, folder):
    """Server models and the clients' own models after a whole run in one process."""
    state = simulate(job, folder)
    personal = []
    for entry in job.protocol.roster:
        host = make_host(job, entry.id, folder / "ledgers", durable=False)
        model = host.personal_model()
        personal.append(b"" if model is None else model.tobytes())
        host.close()
    return state, personal


@pytest.fixture(scope="module")
def network_run(tmp_path_factory):
    """A finished run of a case with a process for every client, made once: (its folder, what it printed).

    All of them are started from this process, so that the parent of their workers is loaded once.
    """
    made = {}

    def get(case):
        if case not in made:
            out = tmp_path_factory.mktemp(case)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                code, *_ = runs.new_run(write_config(out / "c", **changes_of(case)), [], out / "runs")
            assert code == 0, said.getvalue()
            made[case] = only_run(out / "runs"), said.getvalue()
        return made[case]

    return get


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in MATRIX])
def test_processes_one_process_and_crashes_give_the_same_bits_and_ledgers_hold_the_plan(
    case, network_run, tmp_path, monkeypatch
):
    folder, _ = network_run(case)
    job = read_job(folder, (folder / "operator.pub").read_text().strip())
    with counted(monkeypatch, Federation, "add_up") as sums:
        state, personal = run(job, tmp_path / "one")
    assert len(sums) == job.algorithm.capabilities.summed_rounds
    found = Checkpoints(folder / "checkpoints").newest()
    assert found is not None
    assert found[1].models.tobytes() == state.models.tobytes()
    assert found[1].assignment == state.assignment
    for client, model in enumerate(personal):
        host = make_host(job, client, folder / "ledgers")
        own = host.personal_model()
        host.close()
        assert model == (b"" if own is None else own.tobytes())

    last = max(
        (line for line in runlog.read(folder / "metrics.jsonl") if "accuracy_mean" in line), key=lambda line: line["round"]
    )
    assert last["accuracy_by_client"] == accuracies(job, state, personal)
    check_ledgers(folder, job)
    checks = verify_run(folder, None)
    assert checks
    assert not [check for check in checks if check.holds is False]

    crashed, crashed_personal = run_with_crashes(job, tmp_path / "crashed", monkeypatch)
    assert (crashed.models.tobytes(), crashed_personal) == (state.models.tobytes(), personal)


@contextlib.contextmanager
def counted(monkeypatch, owner, name):
    """The arguments of each call of a method."""
    calls, whole = [], getattr(owner, name)

    def count(*args, **kwargs):
        calls.append(args)
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, count)
        yield calls


def accuracies(job, state, personal):
    """Test accuracy of the model that each client uses, computed apart from the observer."""
    algorithm, m = job.algorithm, job.protocol.model
    evaluator = Evaluator(models.build(m.name, tuple(m.input_shape), m.classes))
    found = []

    def judged(client, rows, part):
        settings, piece = client_slice(job, client, None)
        base_model = state.models[rows[0]] if len(rows) == 2 else None
        return evaluator.accuracy_and_loss(state.models[rows[-1]], open_client(settings, piece, None, part), base_model)

    for client in range(4):
        cluster = state.assignment[client]
        if algorithm.capabilities.personal:
            settings, piece = client_slice(job, client, None)
            model, data = np.frombuffer(personal[client], np.float32), open_client(settings, piece, None, "test")
            found.append(evaluator.accuracy_and_loss(model, data)[0])
            continue
        if cluster is None and not algorithm.capabilities.model_per_client:
            cluster = min((0, 1), key=lambda name: judged(client, algorithm.capabilities.rows_for(client, name), "train")[1])
        found.append(judged(client, algorithm.capabilities.rows_for(client, cluster), "test")[0])
    return found


def check_ledgers(folder, job):
    """What was charged is the plan: all its training, and no more choices than it holds."""
    privacy, central_plan = job.protocol.privacy, job.algorithm.central_plan()
    for entry in job.protocol.roster:
        charged = Counter(e for _, events in charged_by_round(folder, job, entry.id) for e in events)
        plan, z = (
            (central_plan, job.protocol.curator_noise_multiplier)
            if central_plan
            else (job.algorithm.plan(entry), entry.noise_multiplier)
        )
        planned = Counter(slot.event(z, privacy.adjacency) for slot in plan)
        assert charged <= planned
        assert {e: n for e, n in charged.items() if "Gaussian" in type(e).__name__} == {
            e: n for e, n in planned.items() if "Gaussian" in type(e).__name__
        }


def run_with_crashes(job, folder, monkeypatch):
    from dpcfl_net.federation import client_host

    whole, due = client_host.ClientHost._compute, [(1, 2), (2, 0), (3, 3)]

    def crashing(self, task, charge, state):
        if due and (task.round, self.client) == due[0]:
            due.pop(0)
            raise KeyboardInterrupt
        return whole(self, task, charge, state)

    with monkeypatch.context() as patch:
        patch.setattr(client_host.ClientHost, "_compute", crashing)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                simulate(job, folder)
        return run(job, folder)


# ---- MR-MTL


def personal_of(tmp_path, name, algorithm):
    (tmp_path / name).mkdir()
    state, personal = run(job_for(tmp_path / name, algorithm), tmp_path / name)
    return state, [np.frombuffer(model, np.float32) for model in personal]


def spread(own):
    return float(np.linalg.norm(own - np.mean(own, axis=0)))


def test_mr_mtl_without_pull_is_local_bit_for_bit_and_a_strong_pull_draws_models_together(tmp_path):
    _, local = personal_of(tmp_path, "local", {"name": "local"})
    _, free = personal_of(tmp_path, "free", {"name": "mr-mtl", "lam": 0.0})
    assert [m.tobytes() for m in free] == [m.tobytes() for m in local]
    spreads = [spread(local)]
    for lam in (0.05, 0.3, 1.5):
        state, pulled = personal_of(tmp_path, f"lam{lam}", {"name": "mr-mtl", "lam": lam})
        spreads.append(spread(pulled))
        np.testing.assert_allclose(state.models[0], np.mean(pulled, axis=0), atol=1e-5)  # the server's mean is their mean
    assert spreads == sorted(spreads, reverse=True)
    assert spreads[-1] < 0.5 * spreads[0]


def test_the_servers_mean_is_that_of_all_models_when_clients_are_away_and_have_unequal_records(tmp_path):
    data = {**TINY["data"], "train_per_client": None, "sizes": [40, 80, 120, 200]}
    there = {"clients": {0: [[1, 1]], 1: [[3, 4]], 2: [[1, 2], [4, 4]]}}
    job = job_for(tmp_path, {"name": "mr-mtl", "lam": 0.3}, data=data, availability=there)
    state, personal = run(job, tmp_path)
    own = [np.frombuffer(model, np.float32) for model in personal]
    mean = np.average(own, axis=0, weights=[entry.records for entry in job.protocol.roster])
    np.testing.assert_allclose(state.models[0], mean, atol=1e-5)


def test_an_update_that_the_noise_of_another_client_pulls_far_is_accepted(tmp_path):
    """Client 0 has so little epsilon that its noise moves the mean far beyond what client 1 itself could move in all rounds."""
    job = job_for(
        tmp_path, {"name": "mr-mtl", "lam": 1.0}, rounds=2, data={**TINY["data"], "clients": [2], "train_per_client": 600},
        local={"batch_size": 600, "lr": 1.0}, privacy={**SMALL["privacy"], "epsilon": 8, "epsilon_by_client": {"0": 0.02}},
    )  # fmt: skip
    means = [models.initial_of(job.protocol.model)]
    simulate(job, tmp_path, on_round=lambda t, state: means.append(state.models[0]))
    assert np.linalg.norm(means[1] - means[0]) > 5 * dpsgd_norm(job.algorithm, job.protocol.client(1))
    assert len(means) == 3


def test_a_pull_that_overshoots_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.lam is 4\.0.*below 2"):
        config.resolve({**SMALL, **TINY, "algorithm": {"name": "mr-mtl", "lam": 4.0}})


def test_a_pull_in_the_loss_does_nothing_under_opacus():
    """What published code amounts to: the optimiser replaces the gradient by clipped per-record sums, the pull is not in them."""
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    def trained(lam):
        torch.manual_seed(0)
        module = GradSampleModule(torch.nn.Linear(4, 3))
        optimizer = DPOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.5), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=8
        )
        x, y = torch.randn(8, 4), torch.arange(8) % 3
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(x), y)
            proximal = sum(((p - 10) ** 2).sum() for p in module.parameters()) * lam / 2
            (loss + proximal).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()])

    assert torch.equal(trained(0.0), trained(5.0))


# ---- initial models, choices without protection


def test_clusters_of_dp_ifca_start_from_different_models(tmp_path):
    job = job_for(tmp_path, {"name": "dp-ifca", "clusters": 3})
    from dpcfl_net.federation.in_process import InProcessFederation

    starts = job.algorithm.start(InProcessFederation(job.protocol, {})).models
    assert len({m.tobytes() for m in starts}) == 3


@pytest.mark.parametrize(
    "options", [{"name": "dp-ifca", "clusters": 2}, {"name": "r-dpcfl", "clusters": 2}, {"name": "oracle"}]
)
def test_the_observer_takes_no_cluster_from_training_records_that_noise_protects(options, tmp_path, monkeypatch):
    """A malicious server that named none would find in the report what it may not know: on which of its models a loss is lower."""
    job, parts, opened = job_for(tmp_path, options), [], evaluation.open_rows
    clients = len(job.protocol.roster)
    monkeypatch.setattr(evaluation, "open_rows", lambda *given: (parts.append(given[-1]), opened(*given))[1])
    sent = np.random.default_rng(1).standard_normal((2, job.protocol.model.parameters)).astype(np.float32)
    found, first = (evaluation.TestSetEvaluator(job, None).evaluate(Models(1, [m] * clients, sent)) for m in (None, 0))
    assert found.assignment == [None] * clients
    assert (found.accuracy, found.loss) == (first.accuracy, first.loss)
    assert set(parts) == {"test"}
    assert not any("clusters of clients in figures" in line for line in privacy_statement(job.protocol, None)["not_covered"])


def test_rounds_with_choices_are_a_decimal_fraction_of_the_rounds(tmp_path):
    options = {"name": "dp-ifca", "clusters": 2, "selection": {"rounds_fraction": 0.35, "budget_fraction": 0.001}}
    job = job_for(tmp_path, options, rounds=180)  # in binary, 0.35 * 180 is 62.99999999999999
    assert sum(isinstance(slot, SelectionSlot) for slot in job.algorithm.plan(job.protocol.roster[0])) == 63


@pytest.mark.parametrize("name", ["f-cdpfl", "rc-dpfl"])
def test_a_raw_index_has_no_finite_epsilon_anywhere(name, network_run):
    folder, printed = network_run(name)
    document = json.loads((folder / "run.json").read_text())
    privacy = document["privacy"]
    assert (privacy["epsilon"], privacy["epsilon_spent"], privacy["epsilon_replace_one"]) == (None, None, None)
    assert privacy["covered"] == []
    assert any("argmin" in reason for reason in privacy["not_covered"])
    assert "inf" in printed


@pytest.mark.parametrize(
    ("algorithm", "raw"),
    [
        ({"name": "f-cdpfl", "clusters": 2}, True),
        ({"name": "rc-dpfl", "clusters": 2}, True),
        ({"name": "f-cdpfl", "clusters": 2, "select": "exponential"}, False),
    ],
)
@pytest.mark.parametrize("noise", ["os", "seeded"])
def test_a_statement_says_that_clients_add_noise_only_where_all_releases_have_it(algorithm, raw, noise, tmp_path):
    job = job_for(tmp_path, algorithm, privacy={"epsilon": 5, "delta": 1e-4, "noise": noise})
    trust = dict(statement(privacy_statement(job.protocol, None)).facts)["Trust"]
    assert ("each client adds noise before it sends anything" in trust) == (not raw)
    assert ("releases to which clients add no noise" in trust) == raw


def test_the_private_twin_keeps_its_promise(tmp_path):
    twin = {"name": "f-cdpfl", "clusters": 2, "select": "exponential", "budget_fraction": 0.02}
    job = job_for(tmp_path, twin, privacy={"epsilon": 5, "delta": 1e-4})
    assert job.protocol.unprotected == []
    assert [slot.eta for slot in job.algorithm.plan(job.protocol.roster[0]) if slot.name == "select"] == [0.02 * 5] * ROUNDS
    assert job.algorithm.capabilities.claim_of_paper == "record-level (epsilon, delta) for the updates (section 3)"
    run(job, tmp_path)


def test_a_worker_refuses_unprotected_releases_that_the_job_does_not_own_up_to(tmp_path):
    job = job_for(tmp_path, {"name": "f-cdpfl", "clusters": 2})
    assert job.protocol.unprotected
    silent = job_files.Job(job.protocol.model_copy(update={"unprotected": []}), job.experiment)
    with pytest.raises(Refused, match=r"without a guarantee.*the job declares"):
        make_host(silent, 0, tmp_path / "ledgers")

    def conditions(job, folder):
        job_files.write_job(job, folder, tmp_path)
        (check,) = [check for check in verify_run(folder) if "conditions" in check.what]
        return check

    assert conditions(job, tmp_path / "declared").holds
    check = conditions(silent, tmp_path / "silent")
    assert check.holds is False
    assert check.detail.startswith("without a guarantee: ['")


def test_a_budget_over_runs_takes_no_unprotected_run(tmp_path):
    with pytest.raises(ConfigError, match="no finite epsilon to compose"):
        job_for(
            tmp_path, {"name": "f-cdpfl", "clusters": 2}, ledger={"scope": "dataset", "root": str(tmp_path / "l")},
            privacy={"epsilon": 5, "delta": 1e-4},
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"ledger\.scope is 'dataset': needs privacy\.noise os"):
        config.resolve({**SMALL, **TINY, "algorithm": {"name": "global"}, "ledger": {"scope": "dataset", "root": "l"}})


@pytest.mark.parametrize("name", ["dp-ifca", "f-cdpfl", "km-cdpfl"])
def test_more_clusters_than_clients_are_refused(name):
    with pytest.raises(ConfigError, match=r"algorithm\.clusters is 5: must be at most the number of clients, 4"):
        config.resolve({**SMALL, **TINY, "algorithm": {"name": name, "clusters": 5}})
    with pytest.raises(ConfigError, match=r"algorithm\.clusters is missing"):
        config.resolve({**SMALL, **TINY, "algorithm": {"name": name}})


# ---- KM-CDPFL


def test_km_cdpfl_moves_each_clients_model_by_the_mean_of_its_group(tmp_path):
    job = job_for(tmp_path, {"name": "km-cdpfl", "clusters": 2})
    p = job.protocol.model.parameters
    steps = {0: 1.0, 1: 1.2, 2: -3.0, 3: -3.4}

    class Scripted:
        clients, round = [0, 1, 2, 3], 1

        def call(self, method, each):
            from dpcfl_net.federation.base import Results

            return Results(self.clients, {i: {"update": np.full(p, steps[i], np.float32)} for i in each if i != self.gone})

        def seed(self, purpose):
            return 7

        gone = None

        def initial_model(self, number=0):
            return np.zeros(p, np.float32)

    fed = Scripted()
    first = job.algorithm.round(job.algorithm.start(fed), 1, fed)
    np.testing.assert_allclose(first.models[:, 0], [1.1, 1.1, -3.2, -3.2], rtol=1e-6)
    assert first.assignment[0] == first.assignment[1] != first.assignment[2] == first.assignment[3]
    fed.gone = 3
    second = job.algorithm.round(first, 2, fed)
    np.testing.assert_allclose(second.models[:, 0], [2.2, 2.2, -6.2, -3.2], rtol=1e-6)
    assert second.assignment[3] == first.assignment[3]


@pytest.mark.parametrize("name", sorted(registry()))
def test_attacks_find_the_update_of_every_training_step_by_its_bound(name):
    steps = declared_steps(registry()[name])
    found = {kind: update_tensor(step) for kind, step in steps.items()}
    assert found == {kind: "update" if "update" in step.gives else None for kind, step in steps.items()}
