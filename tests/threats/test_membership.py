"""Membership inference across rounds (FedMIA): its statistics, the attack with and without noise, and on recorded runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SMALL, assert_nothing_left, dpcfl, only_run
from scipy.stats import binom
from simulate import simulate
from typer.testing import CliRunner

from dpcfl_net.attacks import membership, membership_page
from dpcfl_net.attacks.membership_scores import (
    ALARM,
    REFERENCES,
    Scored,
    above_limit,
    at_rate,
    auc,
    curve,
    least_clients,
    log_tail,
    most_true_positives,
)
from dpcfl_net.attacks.updates import Update
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.partition import DataSettings, open_client, open_set, plan_slices
from dpcfl_net.experiment import config, statement
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.client import Client
from dpcfl_net.launch.cli.commands import app
from dpcfl_net.results.attack_results import read_result
from dpcfl_net.training import dpsgd_steps
from dpcfl_net.transport.keys import make_keys

EPSILON, DELTA, CLIENTS = 1.0, 1e-4, 8
FEW = {
    "data": {"dataset": "digits", "clients": [CLIENTS], "shift": "none", "train_per_client": 10, "test_per_client": 10},
    "model": {"name": "digits-cnn"},
    "rounds": 4,
    "local": {"epochs": 2, "batch_size": 10, "lr": 0.5, "clip": 0.1},
    "privacy": {"accountant": "rdp", "epsilon": EPSILON, "delta": DELTA, "noise": "seeded", "noise_seed": "5eed" * 16},
    "algorithm": {"name": "global"},
}


def test_the_tail_is_that_of_the_other_clients_gaussian():
    others = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    tail = log_tail(np.array([2.0, 5.0]), others)
    assert tail[0] == pytest.approx(math.log(0.5))  # at the mean
    assert tail[1] == pytest.approx(0, abs=1e-12)  # all others equal, the target above
    assert log_tail(np.array([1.0]), others[:, :1])[0] == pytest.approx(math.log(0.158655), abs=1e-5)  # one deviation below
    with pytest.raises(ValueError, match=f"2 other clients: must be at least {REFERENCES}"):
        log_tail(np.zeros(2), others[:2])


def test_rates_and_areas_count_pairs():
    members, others = np.array([3.0, 1.0, 2.0]), np.array([0.0, 2.0, -1.0, 1.5])
    pairs = [(m > o) + (m == o) / 2 for m in members for o in others]
    assert auc(members, others) == pytest.approx(np.mean(pairs))
    assert at_rate(members, others, 0.25) == (0.25, 2 / 3)
    assert at_rate(members, others, 0.1) == (0.0, 1 / 3)  # the tied record is not above the threshold


def test_intervals_resample_clients():
    """Each client's scores are equal: the interval is as wide as if there were one record per client."""
    rng = np.random.default_rng(0)
    few = [Scored(k, np.array([rng.normal()]), np.array([rng.normal()])) for k in range(10)]
    many = [Scored(one.client, np.repeat(one.members, 50), np.repeat(one.others, 50)) for one in few]
    narrow, wide = curve(few), curve(many)
    assert (wide.low, wide.high) == pytest.approx((narrow.low, narrow.high))
    assert wide.high - wide.low > 0.2
    assert [rate.asked for rate in wide.rates] == [0.1, 0.01]  # 500 non-members cannot show a rate of 0.001


def test_intervals_of_few_clients_are_wider_than_the_percentiles_of_resamples():
    """With four clients the expanded interval ends at resamples of one client four times, 8 of 2000; 2.5 % are 50 of them."""
    rng = np.random.default_rng(1)
    scored = [Scored(k, rng.normal(k / 3, 1, 20), rng.normal(0, 1, 20)) for k in range(4)]
    each, found = [auc(one.members, one.others) for one in scored], curve(scored)
    assert (found.low, found.high) == (pytest.approx(min(each)), pytest.approx(max(each)))
    alone = curve(scored[:1])
    assert (alone.low, alone.high) == (0, 1)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_the_limit_is_that_of_randomised_response(epsilon):
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert most_true_positives(1 - right, epsilon, 0.0) == pytest.approx(right)
    assert most_true_positives(0.0, epsilon, DELTA) == pytest.approx(DELTA)
    assert most_true_positives(0.3, math.inf, 0.0) == 1
    assert (most_true_positives(0.3, 1e4, 0.0), most_true_positives(0.0, 1e4, DELTA)) == (
        1,
        DELTA,
    )  # a baseline with little noise


@pytest.mark.parametrize("noise", ["record", "side", "client"])
def test_an_attack_at_the_limit_is_rarely_above_it_and_one_with_more_is(noise):
    """The best test of randomised response, drawn for each record, for all members or non-members of a client, or once a client."""
    rng, claimed, runs = np.random.default_rng(0), 1.0, 100

    def scores(clients: int, epsilon: float) -> list[Scored]:
        wrong = rng.random((clients, 2, 25 if noise == "record" else 1)) > 1 / (1 + math.exp(-epsilon))
        if noise == "client":
            wrong[:, 1] = wrong[:, 0]
        drawn = (wrong ^ np.array([[True], [False]])) + rng.random((clients, 2, 25))
        return [Scored(k, *each) for k, each in enumerate(drawn)]

    def alarms(clients: int, epsilon: float) -> int:
        return sum(bool(above_limit(scores(clients, epsilon), claimed, 0.0)) for _ in range(runs))

    assert max(alarms(8, claimed), alarms(21, claimed)) <= binom.ppf(1 - 1e-6, runs, ALARM)
    assert alarms(30, 7.0) >= 0.9 * runs


@pytest.mark.parametrize("clients", [4, 8])
def test_above_the_limit_is_said_if_there_are_enough_clients(tmp_path, clients):
    """Records that share all noise of a client are as many as clients: four of them look like a broken claim by chance."""
    make_keys(tmp_path, CLIENTS)
    protocol = make_job(config.resolve({**SMALL, **FEW}), tmp_path).protocol
    scored = [Scored(k, np.linspace(1, 2, 50), np.linspace(0, 0.9, 50)) for k in range(clients)]
    said = " ".join(membership_page.page(protocol, curve(scored), scored, 4, 0.1, "loss").sentences)
    assert least_clients(scored, 0.1, 0.0) == 7
    assert ("ABOVE THE LIMIT at false positive rates 0.01, which" in said) is (clients == 8)
    assert ("No result of 4 clients is reported as above the limit" in said) is (clients == 4)
    last = membership_page.page(protocol, curve(scored), scored, 4, 1e4, "loss").sentences[-1]
    assert last.startswith(
        f"No result of {clients} clients is reported as above the limit: it would be chance too often, since"
    )
    assert last.endswith("share all of its noise. At this epsilon more than 1,000,000 clients would be needed.")


def test_updates_from_one_model_are_compared_whatever_their_rounds(tmp_path):
    """Rounds of an asynchronous run count a client's participations; a client may start from one version twice."""
    make_keys(tmp_path, CLIENTS)
    job = make_job(config.resolve({**SMALL, **FEW, "model": {"name": "linear"}}), tmp_path)
    rng, clients = np.random.default_rng(0), [*range(REFERENCES + 1)]
    start = np.zeros(job.protocol.model.parameters, np.float32)
    first = {i: Update(i, i + 1, start, rng.normal(size=len(start)).astype(np.float32), 1, noisy=True) for i in clients}
    candidates = membership.candidates_of(job, clients, 10, None)
    once, rounds = membership.totals(job.protocol, {i: [own] for i, own in first.items()}, candidates, "cosine")
    assert (sorted(once), rounds) == (clients, len(clients))
    again = {i: [own, Update(i, 9, start, own.change, 1, noisy=True)] for i, own in first.items() if i < REFERENCES}
    twice, _ = membership.totals(job.protocol, {**again, REFERENCES: [first[REFERENCES]]}, candidates, "cosine")
    for client in clients:
        np.testing.assert_array_equal(twice[client], once[client])  # the second updates have too few references


def updates_of(job, folder: Path, monkeypatch, *, noise: bool) -> dict[int, list[Update]]:
    """Updates of a run in this process, with the line that adds noise or without it."""
    with monkeypatch.context() as patch:
        seen, original = [], Client.dpsgd

        def recorded(self, slot, model, proximal=None):
            trained = original(self, slot, model, proximal)
            seen.append((np.array(model), trained - model))
            return trained

        patch.setattr(Client, "dpsgd", recorded)
        if not noise:
            patch.setattr(dpsgd_steps, "gaussian_on_grid", lambda values, *_: values)
        simulate(job, folder)
    return {i: [Update(i, t + 1, *seen[t * CLIENTS + i], 2, noisy=noise) for t in range(4)] for i in range(CLIENTS)}


@pytest.mark.scenario(42)
def test_membership_is_inferred_without_noise_and_stays_below_epsilon_with_it(evidence, tmp_path, monkeypatch):
    make_keys(tmp_path, CLIENTS)
    job, found = make_job(config.resolve({**SMALL, **FEW}), tmp_path), {}
    candidates = membership.candidates_of(job, [*range(CLIENTS)], 10, None)
    for noise in (True, False):
        updates = updates_of(job, tmp_path / str(noise), monkeypatch, noise=noise)
        totals, rounds = membership.totals(job.protocol, updates, candidates, "loss")
        assert (sorted(totals), rounds) == ([*range(CLIENTS)], 4)
        found[noise] = curve(membership.split(totals, candidates))
    replaced = membership.replace_one_epsilon(job, [*range(CLIENTS)])
    assert EPSILON < replaced < 3
    for rate in found[True].rates:
        assert rate.low <= most_true_positives(rate.false, replaced, DELTA)
    assert found[True].auc < found[False].low
    assert found[False].auc > 0.7
    evidence.got(f"epsilon {EPSILON:g}: AUC {found[True].auc:.2f}, true positive rate {found[True].rates[0].true:.2f} at 0.1")
    evidence.control(f"DP-SGD without noise: AUC {found[False].auc:.2f}, {found[False].rates[0].true:.2f} at 0.1")


def test_the_limit_leaves_out_the_part_of_delta_that_pays_for_cut_batches(tmp_path):
    make_keys(tmp_path, CLIENTS)
    paced = {
        "local": {**FEW["local"], "pace": "constant"},
        "privacy": {"accountant": "rdp", "epsilon": EPSILON, "delta": DELTA},
    }
    job = make_job(config.resolve({**SMALL, **FEW, **paced}), tmp_path)
    assert membership.replace_one_epsilon(job, [*range(CLIENTS)]) == statement.replace_one_epsilon(job.protocol)


@pytest.mark.parametrize("measure", ["cosine", "loss"])
def test_labels_alone_are_not_taken_for_membership(tmp_path, measure):
    """Under label skew, an attack whose candidates were not trained on must score like chance."""
    clients = 16
    make_keys(tmp_path, clients)
    skewed = {"dataset": "digits", "clients": [clients], "shift": "none", "partition": "dirichlet", "alpha": 0.1}
    skewed |= {"validation": 0.5, "test_per_client": 18}
    job = make_job(config.resolve({**SMALL, **FEW, "data": skewed, "model": {"name": "linear"}}), tmp_path)
    settings = DataSettings.model_validate(job.experiment.data)
    slices = plan_slices(settings, open_set(settings), job.experiment.partition_seed)
    start, updates = np.zeros(job.protocol.model.parameters, np.float32), {}
    for client in range(clients):
        elsewhere = open_client(settings, slices[job.experiment.slices[client]], part="validation")
        x, y = elsewhere.batch(np.arange(len(elsewhere)), len(elsewhere))
        change = -0.1 * membership._gradients(job.protocol.model, start)(x, y).mean(0).astype(np.float32)
        updates[client] = [Update(client, 1, start, change, 1, noisy=False)]
    candidates = membership.candidates_of(job, [*range(clients)], 18, None)
    totals, _ = membership.totals(job.protocol, updates, candidates, measure)
    found = curve(membership.split(totals, candidates))
    assert found.low < 0.5 < found.high
    assert found.auc == pytest.approx(0.5, abs=0.03)


def test_the_command_attacks_a_recorded_run(finished_run, tmp_path):
    import json
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    done = CliRunner().invoke(app, ["attack", "membership", str(folder), "--records", "1"])
    assert done.exit_code == 0, done.output
    result = read_result(folder / "attacks" / "membership.json")
    assert result.headline in done.output
    assert (result.facts["members"], result.facts["others"], len(result.facts["clients"])) == (8, 8, 8)
    # The limit is that of replace-one; the run is seeded, so its statement has epsilon under zero-out of the same plan.
    assert result.facts["epsilon"] > json.loads((folder / "run.json").read_text())["privacy"]["epsilon_with_secret_noise"]
    assert not result.facts["above_limit"]
    assert not any("too narrow" in sentence for sentence in result.sentences)
    assert "Membership: which records a client trained on" in (folder / "report.html").read_text(encoding="utf-8")


def test_too_few_clients_from_one_model_are_refused(finished_run, tmp_path, monkeypatch):
    read = membership.read_updates
    monkeypatch.setattr(membership, "read_updates", lambda *asked: dict([*read(*asked).items()][:REFERENCES]))
    why = "no round has updates of enough clients: must be at least 4 that started from one model"
    with pytest.raises(ConfigError, match=why):
        membership.attack(finished_run)
    with pytest.raises(ConfigError, match="is not a run folder"):
        membership.attack(tmp_path)


@pytest.mark.slow
def test_the_configurations_as_shipped(tmp_path):
    """The figures of docs/how-to/attacks.md."""
    found = {}
    for name in ("raw", "dp"):
        done = dpcfl("run", ROOT / "configs" / "threats" / f"membership_{name}.yaml", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr + done.stdout
        folder = only_run(tmp_path / name)
        assert_nothing_left(folder)
        found[name] = membership.attack(folder).facts
    assert found["raw"]["epsilon"] is None
    assert found["raw"]["auc_low"] > 0.6
    assert 2 < found["dp"]["epsilon"] < 2.5  # replace-one
    assert not found["dp"]["above_limit"]
