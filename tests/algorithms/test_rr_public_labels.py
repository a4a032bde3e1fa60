"""RR-Cluster's other labels: of all clients, public until the next release; of each sample; and the true clusters."""

from __future__ import annotations

import math
from decimal import Decimal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL
from scipy import stats
from simulate import simulate

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.algorithms.rr_cluster import RRCluster
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.central_dp import CENTRAL_SERVER
from dpcfl_net.federation.claim import unmet_condition
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.gate import Charge
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.mechanisms import exponential_mechanism, lowest_by_exponential_mechanism, randomised_response
from dpcfl_net.privacy.slots import LabelledCentralSlot, LabelSlot, RawSlot
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.transport.endpoint import Link
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.observer_outbox import ObserverOutbox

REPLACED = {"epsilon": 20, "delta": 1e-2, "unit": "client", "trust": "trusted-server", "adjacency": "replace-one", "noise": "seeded", "noise_seed": "5eed" * 16}  # fmt: skip
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 0.5}
SELDOM = {**RR, "labels": "randomised-response", "labels_every": 3, "labels_epsilon": 3.0}
RARE = {**SELDOM, "guarantee": "expected", "sampling": "poisson", "labels_every": 2}
EACH_SAMPLE = {**RR, "labels": "randomised-response", "labels_epsilon": 1.5}
ORACLE = {**RR, "base": "oracle", "min_cluster_size": 0, "guarantee": "expected"}


def job_for(folder, algorithm, **privacy):
    data = {"dataset": "digits", "clients": [6, 6], "train_per_client": 60, "test_per_client": 20}
    local = {"batch_size": 20, "lr": 0.2, "clip": 0.5}
    document = {**SMALL, "data": data, "rounds": 4, "local": local, "privacy": {**REPLACED, **privacy}, "algorithm": algorithm}
    make_keys(folder / "keys", 12)
    return make_job(config.resolve(document), folder / "keys")


# ---- accounting


def divergence(one, other, threshold):
    """Hockey-stick divergence of two distributions on labels."""
    return sum(max(0.0, p - threshold * q) for p, q in zip(one, other, strict=True))


@pytest.mark.parametrize(("budget", "k"), [(1.0, 4), (3.0, 4), (0.5, 2)])
def test_one_randomised_response_costs_exactly_its_divergence(budget, k):
    kept = math.exp(budget) / (math.exp(budget) + k - 1)
    rows = [[kept if j == label else (1 - kept) / (k - 1) for j in range(k)] for label in range(k)]
    for delta in (0.01, 0.1):
        spent = epsilon([RandomisedResponse(budget, k, 1)], delta, "replace-one")
        assert divergence(rows[0], rows[1], math.exp(spent)) == pytest.approx(delta, abs=2e-4)
        assert divergence(rows[0], [1 / k] * k, math.exp(spent)) <= delta  # a client that does not answer
    assert epsilon([RandomisedResponse(budget, k, 1)], 1e-9, "replace-one") == pytest.approx(budget, rel=1e-3)


def test_several_responses_compose_to_their_exact_distribution():
    """Three releases: the composed losses are a multinomial of E, 0 and -E, here summed up directly."""
    event, k = RandomisedResponse(1.2, 4, 3), 4
    kept = event.kept
    chances = {1.2: kept, 0.0: (k - 2) * (1 - kept) / (k - 1), -1.2: (1 - kept) / (k - 1)}
    total = {0.0: 1.0}
    for _ in range(3):
        total_next: dict = {}
        for loss, mass in total.items():
            for step, chance in chances.items():
                total_next[round(loss + step, 9)] = total_next.get(round(loss + step, 9), 0.0) + mass * chance
        total = total_next
    spent = epsilon([event], 0.05, "replace-one")
    assert sum(mass * max(0.0, 1 - math.exp(spent - loss)) for loss, mass in total.items()) == pytest.approx(0.05, abs=5e-4)
    renyi = epsilon([event], 0.05, "replace-one", "rdp")
    assert spent < renyi < 3 * 1.2
    assert spent < epsilon([BoundedRangeSelection(2.4, 3)], 0.05, "replace-one")  # the range of log-ratios is 2 E


@pytest.mark.parametrize(
    "values", [{"epsilon": -1.0}, {"epsilon": math.nan}, {"epsilon": 501.0}, {"categories": 1}, {"count": -1}]
)
def test_a_response_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        RandomisedResponse(**{"epsilon": 1.0, "categories": 4, "count": 1} | values)


# ---- mechanisms


def test_responses_have_the_probabilities_that_are_charged():
    rng, n = np.random.default_rng(0), 20_000
    found = np.bincount(randomised_response([1] * n, 1.5, 4, rng), minlength=4)
    kept = RandomisedResponse(1.5, 4, 1).kept
    assert stats.chisquare(found, n * np.array([(1 - kept) / 3, kept, (1 - kept) / 3, (1 - kept) / 3])).pvalue > 1e-6
    for label in (None, 7, -1):
        uniform = np.bincount(randomised_response([label] * n, 1.5, 4, rng), minlength=4)
        assert stats.chisquare(uniform).pvalue > 1e-6


def test_choices_have_log_ratios_within_the_charged_range():
    rng, n, losses = np.random.default_rng(0), 4000, np.array([0.3, 0.1, 0.9, 5.0])
    weights = np.exp(-2.0 / 2 * np.minimum(losses - 0.1, 0.5) / 0.5)
    found = np.bincount([lowest_by_exponential_mechanism(losses, 2.0, 4, 0.5, rng) for _ in range(n)], minlength=4)
    assert stats.chisquare(found, n * weights / weights.sum()).pvalue > 1e-6
    worst = np.array([[0.0, 9, 9, 9], [9.0, 0, 0, 0]])  # scores 0 and -1 exchanged
    scores = -np.minimum(worst, 1.0)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    assert np.ptp(logs[0] - logs[1]) == pytest.approx(2.0)  # epsilon / 2 = 1 gives a range of 2
    bad = [lowest_by_exponential_mechanism(np.array([np.nan, 0, 0, 0]), 50.0, 4, 0.5, rng) for _ in range(n)]
    assert stats.chisquare(np.bincount(bad, minlength=4)).pvalue > 1e-6


class Extreme:
    """A generator whose draws are the largest ones for the first label asked for, and the smallest ones for the others."""

    def random(self, n):
        return np.array([1 - 2.0**-53] + [0.0] * (n - 1))

    def integers(self, low, high, n):
        return np.full(n, low)


@pytest.mark.parametrize("most", [20.0, 37.0, 100.0])
def test_at_every_epsilon_each_label_and_model_can_be_released(most):
    """Draws have 53 bits: at epsilon 37 a label would be released as it is in every run, which has no finite epsilon."""
    assert 1 / (1 + math.exp(-37)) == 1.0
    assert randomised_response([1], most, 3, Extreme()).tolist() == [2]
    assert lowest_by_exponential_mechanism(np.array([9.0, 0.0, 0.0]), most, 3, 0.5, Extreme()) == 0
    assert exponential_mechanism([6, 7, 7], most, Extreme()) == 0


class LastDraws:
    """The largest numbers that a generator draws, so that all draws by which a label is replaced are among them."""

    def random(self, count):
        return (2**53 - np.arange(1.0, count + 1)) / 2**53

    def integers(self, low, high, count):
        return np.full(count, low)


@pytest.mark.parametrize("epsilon", [25.0, 27.0, 29.0, 29.5, 30.0])
@pytest.mark.parametrize("categories", [2, 3, 4, 8])
def test_no_label_is_kept_more_often_than_its_epsilon_allows(epsilon, categories):
    """Counted over all draws: at epsilon 30 the nearest number of them has 103 times the delta of 1e-5 that is charged."""
    exact = (categories - 1) * Decimal(-epsilon).exp()
    least = exact / (1 + exact) * 2**53
    found = randomised_response([1] * (int(least) + 10), epsilon, categories, LastDraws())
    assert least <= int((found != 1).sum()) <= least + 2


# ---- runs


@pytest.mark.parametrize(
    ("algorithm", "event", "rounds"),
    [
        (SELDOM, RandomisedResponse(3.0, 2, 1), (1, 4)),
        pytest.param(
            {**SELDOM, "labels": "exponential", "base": "fedcam"}, BoundedRangeSelection(3.0, 1), (1, 4), marks=pytest.mark.slow
        ),
        pytest.param(RARE, RandomisedResponse(3.0, 2, 1), (3,), marks=pytest.mark.slow),
        pytest.param({**RARE, "base": "fesem"}, RandomisedResponse(3.0, 2, 1), (3,), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_labels_of_all_clients_are_charged_when_they_are_released(tmp_path, algorithm, event, rounds):
    job = job_for(tmp_path, algorithm)
    simulate(job, tmp_path / "run")
    lines = [entry for entry in read_ledger(tmp_path / "run" / "ledgers" / CENTRAL_SERVER) if entry.events]
    assert [entry.round for entry in lines if entry.kind == "all_labels"] == [*rounds]
    assert [entry.round for entry in lines if entry.kind != "all_labels"] == [1, 2, 3, 4]
    assert [entry.round for entry in lines if entry.kind == "placed"] == [*range(rounds[0], 5)]
    assert [entry.events for entry in lines if entry.kind == "all_labels"] == [(event,)] * len(rounds)
    assert epsilon([event for entry in lines for event in entry.events], 1e-2, "replace-one") <= 20
    _, state = Checkpoints(RunFolder(tmp_path / "run").checkpoints).newest()
    assert np.bincount(state.memory["public labels"], minlength=2).min() >= 4  # B = 2 of 6 sampled: 4 of 12


@pytest.mark.parametrize(("base", "label"), [("ifca", 0), ("fesem", 1)])
def test_the_base_method_decides_which_cluster_a_client_names(tmp_path, base, label):
    """The first model has the lower loss, the second is nearest to the client's own."""
    job = job_for(tmp_path, {**RARE, "base": base}, adjacency="zero-out")
    models = np.repeat(np.float32([[0], [1]]), job.protocol.model.parameters, axis=1)
    engine = SimpleNamespace(sgd=SimpleNamespace(mean_losses=lambda models, data, base_model: np.array([0.5, 2.0])))
    charge = Charge(bytes(32), {"label": RawSlot("label")}, None, "zero-out")
    me = Client(job.protocol, {"model": models[1] * np.float32(0.9)}, engine, None, lambda: None, charge)
    losses = job.algorithm.name_cluster(me, models).tensors["losses"]
    assert int(losses.argmin()) == label
    assert me.ran == [RawSlot("label").event(None, "zero-out")]


def test_labels_of_each_sample_are_charged_together_with_its_sums(tmp_path):
    job = job_for(tmp_path, EACH_SAMPLE)
    state = simulate(job, tmp_path / "run")
    z = job.protocol.curator_noise_multiplier
    charged = LabelledFixedSizeGaussian(z, 1.5, 2, 6, 12, 1)
    lines = [entry for entry in read_ledger(tmp_path / "run" / "ledgers" / CENTRAL_SERVER) if entry.events]
    assert [(entry.round, entry.kind, entry.events) for entry in lines] == [
        (t, "labels_then_sums", (charged,)) for t in range(1, 5)
    ]
    assert 19.9 < epsilon([charged] * 4, 1e-2, "replace-one") <= 20
    assert state.diagnostics["sizes"][0] + state.diagnostics["sizes"][1] == 6
    assert min(state.diagnostics["sizes"]) >= 2  # B
    without = RRCluster.Options(clusters=2).model_dump()  # a job without the options has no new key, and its earlier hash
    assert {"labels", "labels_epsilon"} <= {*job.protocol.options} - {*without}


SAMPLED = LabelledCentralSlot("round", "fixed", 5, 20, label_epsilon=1.2, categories=4)


def central(key, slot=SAMPLED):
    """A central server's context over clients that are never called."""
    fed = InProcessFederation.__new__(InProcessFederation)
    fed.clients, fed.round = list(range(20)), 1
    return CentralContext(fed, Charge(key.to_bytes(32, "big"), {"round": slot}, 1.0, "replace-one"), {})


def test_labels_of_a_sample_have_the_probabilities_that_are_charged():
    found = np.zeros(4, int)
    for key in range(1, 401):
        me = central(key)
        me.sample("round")
        found += np.bincount(me.sampled_labels("round", [2] * 5), minlength=4)
    kept = RandomisedResponse(1.2, 4, 1).kept
    assert stats.chisquare(found, 2000 * np.array([(1 - kept) / 3, (1 - kept) / 3, kept, (1 - kept) / 3])).pvalue > 1e-6


def test_the_observer_can_be_shown_labels_as_a_mechanism_returns_them():
    """They are an array; notes of a server to the observer hold Python's whole numbers alone."""
    me = central(1)
    sample = me.sample("round")
    named = me.sampled_labels("round", [2] * 5)
    me.show_observer(clients=np.array(sample), labels={"as released": named, "as sent": [None, *named[1:]]})
    link = Link("ab12", "0" * 64, security="none")
    with ObserverOutbox("tcp://127.0.0.1:9", link, sender="coordinator", patience_s=0.0) as outbox:
        outbox.models(1, [0], np.zeros((1, 2), np.float32), **me._shown)
    labels = named.tolist()
    assert me._shown == {"clients": sample, "labels": {"as released": labels, "as sent": [None, *labels[1:]]}}


def test_a_round_without_exactly_one_release_of_labels_is_not_what_was_charged():
    me = central(1)
    with pytest.raises(ValueError, match="one for each sampled client, 0, got 5"):
        me.sampled_labels("round", [0] * 5)  # before the sample
    me.sample("round")
    me.noisy_total("round", "sums", ClippedSums((1, 4), 1.0))
    assert me.ran() == []
    with pytest.raises(ValueError, match="one for each sampled client, 5, got 6"):
        me.sampled_labels("round", [0] * 6)
    me.sampled_labels("round", [0, 1, None, 3, 9])
    assert me.ran() == [LabelledFixedSizeGaussian(1.0, 1.2, 4, 5, 20, 1)]
    me.sampled_labels("round", [0] * 5)
    assert me.ran() == []
    with pytest.raises(ValueError, match="sampling must be 'fixed'"):
        LabelledCentralSlot("round", "poisson", 5, 20, label_epsilon=1.2, categories=4)


@pytest.mark.parametrize("mechanism", ["randomised-response", "exponential"])
def test_a_slot_pays_for_one_label_of_each_client(mechanism):
    """The step of an algorithm of one's own released two labels of each client for the charge of one."""
    me = central(1, LabelSlot("round", mechanism, 1.2, 4))
    release = me.randomised_labels if mechanism == "randomised-response" else partial(me.chosen_labels, span=1.0)
    with pytest.raises(ValueError, match="one for each client, 20, got 40"):
        release("round", [None] * 40)
    assert me.ran() == []
    assert len(release("round", [None] * 20)) == 20
    assert me.ran() == [LabelSlot("round", mechanism, 1.2, 4).event(None)]


def test_a_mechanism_without_its_slot_names_those_of_the_central_step():
    """The words of an error; before, an AssertionError without any, and nothing under `python -O`."""
    labels = LabelSlot("round", "exponential", 1.2, 4)
    with pytest.raises(ValueError, match="slot 'round' pays for exponential labels, not for randomised-response"):
        central(1, labels).randomised_labels("round", [0] * 20)
    words = "slot is 'round': this central step must charge a slot of this name and of type {}; it charges 'round'"
    with pytest.raises(ValueError, match=words.format("LabelSlot")):
        central(1).randomised_labels("round", [0] * 20)
    with pytest.raises(ValueError, match=words.format("CentralSlot")):
        central(1, labels).sample("round")
    with pytest.raises(ValueError, match="slot is 'rounds': this central step"):
        central(1).sample("rounds")


def test_the_oracle_trains_the_true_clusters_with_client_level_noise(tmp_path):
    job = job_for(tmp_path, ORACLE, adjacency="zero-out")
    assert sorted(job.protocol.oracle) == [0] * 6 + [1] * 6
    state = simulate(job, tmp_path / "run")
    assert state.assignment == [*job.protocol.oracle]
    assert state.models.shape[0] == 2
    plain = job_for(tmp_path / "plain", {**RR, "guarantee": "expected"}, adjacency="zero-out")
    assert job.protocol.curator_noise_multiplier == plain.protocol.curator_noise_multiplier  # no label is paid for
    assert plain.protocol.oracle is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels_every": 2}, "algorithm.labels_every is 2: must be 0 with labels gaussian"),
        ({"labels": "exponential"}, "needs labels_every of 1 or more"),
        ({"clusters": 13, "min_cluster_size": 0}, "algorithm.clusters is 13: must be at most the number of clients, 12"),
        (
            {"labels_epsilon": 0.5},
            r"labels_epsilon is 0\.5: must be 1\.0 \(the default\) with labels gaussian, where it has no effect",
        ),
        ({**SELDOM, "labels_loss_range": 2.0}, r"labels_loss_range is 2\.0: must be 1\.0 .* with labels randomised-response"),
        (
            {**EACH_SAMPLE, "labels_share": 0.5},
            r"labels_share is 0\.5: must be 0\.3 .* with labels randomised-response, where it has",
        ),
        (
            {**SELDOM, "label_clip": 0.5},
            r"label_clip is 0\.5: must be 0\.1 .* with labels randomised-response, where it has no effect",
        ),
        (
            {**ORACLE, "guarantee": "labels-first", "labels_share": 0.5},
            r"labels_share is 0\.5: must be 0\.3 .* with base oracle",
        ),
        (
            {"guarantee": "expected", "sampling": "poisson", "labels_share": 0.5, "label_clip": 0.5},
            r"(?s)labels_share is 0\.5: must be 0\.3 .* with guarantee expected.*label_clip is 0\.5: must be 0\.1 .* guarantee expected",
        ),
        ({"label_clip": 1e-200}, r"algorithm\.label_clip is 1e-200: must be greater than or equal to"),
        ({**SELDOM, "guarantee": "paper"}, "must be labels-first or expected with labels_every"),
        ({**SELDOM, "guarantee": "expected", "sampling": "poisson", "labels_every": 4}, "must be below rounds 4"),
        ({**SELDOM, "base": "fesem"}, "needs Poisson sampling"),
        ({"base": "oracle"}, "algorithm.min_cluster_size is 2: must be 0 with base oracle"),
        ({**ORACLE, "guarantee": "labels-first", "clusters": 3}, "algorithm.clusters is 3: must be 2 with base oracle"),
        (
            {**EACH_SAMPLE, "guarantee": "expected", "sampling": "poisson"},
            "guarantee is 'expected': must be labels-first with labels",
        ),
        ({**EACH_SAMPLE, "guarantee": "paper"}, "guarantee is 'paper': must be labels-first with labels"),
        ({**EACH_SAMPLE, "base": "oracle", "min_cluster_size": 0}, "must be gaussian with base oracle"),
        ({**EACH_SAMPLE, "clusters": 1}, "clusters is 1: must be 2 or more"),
        ({**SELDOM, "clusters": 1}, "clusters is 1: must be 2 or more"),
        ({**EACH_SAMPLE, "labels_epsilon": 90.0}, "privacy.epsilon is 20.*selections and labels alone spend"),
        (
            {**ORACLE, "guarantee": "labels-first", "labels": "exponential", "labels_every": 1},
            "must be 0 with base oracle, whose labels",
        ),
    ],
)
def test_options_that_contradict_each_other_are_named(tmp_path, options, words):
    with pytest.raises((ConfigError, Refused), match=words):
        job_for(tmp_path, {**RR, **options})


def test_the_size_of_clusters_is_refused_once_where_clients_are_not_moved(tmp_path):
    """With base oracle a second sentence said that "1 clusters of that size need 8 clients a round"."""
    with pytest.raises(ConfigError) as refused:
        job_for(tmp_path, {**RR, **ORACLE, "clusters": 1, "min_cluster_size": 8})
    said = [problem for problem in refused.value.problems if "min_cluster_size" in problem]
    assert said == ["algorithm.min_cluster_size is 8: must be 0 with base oracle, which moves no client"]


def test_an_option_without_effect_in_a_signed_job_does_not_change_what_holds(tmp_path):
    """A configuration with it is refused; a run of an earlier version may have it, and its releases are those of the default."""
    protocol = job_for(tmp_path, {**RR, "guarantee": "expected"}, adjacency="zero-out").protocol
    earlier = protocol.model_copy(update={"options": {**protocol.options, "labels_share": 0.05}})
    plan = algorithm_of(earlier).central_plan()
    assert plan == algorithm_of(protocol).central_plan()
    assert unmet_condition(algorithm_of(earlier)) is None
    wrong = protocol.model_copy(update={"options": {**protocol.options, "labels_share": 0.05, "clusters": 13}})
    assert unmet_condition(algorithm_of(wrong)).startswith(
        "algorithm.clusters is 13: must be at most the number of clients, 12"
    )


def test_the_renyi_accountant_has_no_bound_for_labels_of_a_sample(tmp_path):
    with pytest.raises(ConfigError, match=r"privacy\.accountant is 'rdp': must be pld with labels randomised-response"):
        job_for(tmp_path, EACH_SAMPLE, accountant="rdp")
