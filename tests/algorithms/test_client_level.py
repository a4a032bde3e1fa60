"""A trusted server: what it samples, clips, hides and pays for; RR-Cluster, its bases and its baselines."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import SMALL, dpcfl, only_run, write_config
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from simulate import simulate

from dpcfl_net.algorithms.dp_fedper import DPFedPer
from dpcfl_net.clustering import metrics
from dpcfl_net.clustering.rebalance import rebalance, rebalanced_in_expectation
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Task
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment import config, job_files
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.statement import observer_assigns, privacy_statement, replace_one_epsilon
from dpcfl_net.federation import central_context
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.central_dp import CENTRAL_SERVER
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.gate import Charge
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.slots import RAW, CentralSlot
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.training.models import NAMES, build, initial, layout, skeleton
from dpcfl_net.training.sgd import PlainSGD
from dpcfl_net.transport.identities import make_identities
from dpcfl_net.transport.keys import make_keys

CLIENTS = 12
TRUSTED = {
    "epsilon": 8,
    "delta": 1e-2,
    "unit": "client",
    "trust": "trusted-server",
    "noise": "seeded",
    "noise_seed": "5eed" * 16,
}
REPLACED = {**TRUSTED, "adjacency": "replace-one"}
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 0.5}
Z = stats.norm.isf(1e-8)  # false alarms below 1e-7


def document(algorithm, privacy, **changes):
    data = {"dataset": "digits", "clients": [6, 6], "train_per_client": 60, "test_per_client": 20}
    local = {"batch_size": 20, "lr": 0.2, "clip": 0.5}
    return {**SMALL, "data": data, "rounds": 4, "local": local, "privacy": privacy, "algorithm": algorithm, **changes}


def job_for(folder, algorithm, privacy, **changes):
    resolved = config.resolve(document(algorithm, privacy, **changes))
    make_keys(folder / "keys", CLIENTS)
    if resolved.privacy.secure:
        make_identities(folder / "keys", range(CLIENTS))
    return make_job(resolved, folder / "keys")


def context(slot, key, noise=1.0, clients=20):
    """A central server's context over clients that are never called."""
    fed = InProcessFederation.__new__(InProcessFederation)
    fed.clients, fed.round = list(range(clients)), 1
    adjacency = "replace-one" if slot.sampling == "fixed" else "zero-out"
    return CentralContext(fed, Charge(key, {"round": slot}, noise, adjacency), {})


def keys(count):
    return [k.to_bytes(32, "big") for k in range(1, count + 1)]


FIXED = CentralSlot("round", "fixed", 5, 20, (("labels", 0.25), ("sums", 0.75)))
POISSON = CentralSlot("round", "poisson", 5, 20)


# ---- the sample


def test_a_fixed_sample_has_its_size_and_a_uniformly_random_order():
    draws = [context(FIXED, key).sample("round") for key in keys(4000)]
    assert {len(set(draw)) for draw in draws} == {5}
    for position in range(5):  # each client equally often at each place
        counts = np.bincount([draw[position] for draw in draws], minlength=20)
        assert stats.chisquare(counts).pvalue > 1e-7
    assert context(FIXED, keys(1)[0]).sample("round") == draws[0]


def test_a_poisson_sample_tosses_a_coin_for_each_client():
    draws = [context(POISSON, key).sample("round") for key in keys(4000)]
    assert stats.chisquare(np.bincount(np.concatenate(draws).astype(int), minlength=20)).pvalue > 1e-7
    sizes = np.array([len(draw) for draw in draws])
    assert abs(sizes.mean() - 5) < Z * math.sqrt(20 * 0.25 * 0.75 / 4000)
    assert abs(sizes.var() - 3.75) < 0.8  # of a binomial; a fixed size has none


# ---- the mechanisms


@pytest.mark.parametrize(("slot", "deviation"), [(FIXED, 2 * 3.0 * 1.7 / math.sqrt(0.75)), (POISSON, 3.0 * 1.7)])
def test_noise_on_sums_covers_a_clipped_update(slot, deviation):
    """Of C = 3 at noise multiplier 1.7: twice as much where a client is replaced, and more where the round releases labels too."""
    me = context(slot, keys(1)[0], noise=1.7)
    me.sample("round")
    sums, counts = me.noisy_total("round", "sums", ClippedSums((2, 20_000), 3.0))
    assert counts is None
    assert abs(sums.std() / deviation - 1) < Z / math.sqrt(2 * sums.size)
    assert abs(sums.mean()) < Z * deviation / math.sqrt(sums.size)


def test_updates_are_clipped_as_a_whole_and_what_is_not_finite_counts_for_nothing():
    me = context(CentralSlot("round", "poisson", 20, 20), keys(1)[0], noise=1e-7)
    me.sample("round")
    long, bad = np.full(50, 4.0, np.float32), np.full(50, np.nan, np.float32)
    short = np.full(50, 1e-3, np.float32)
    parts = {0: [(0, long), (1, long)], 1: [(1, short)], 2: [(0, bad)], 3: [(1, np.full(50, np.inf, np.float32))]}
    clipped = ClippedSums((2, 50), 3.0, counted=True)
    for client, block in {0: 1, 1: 1, 2: 0, 3: 1}.items():
        clipped.add(client, parts[client], block)
    sums, counts = me.noisy_total("round", "sums", clipped)
    each = 3.0 / math.sqrt(100)  # one vector of norm 3 over both blocks
    assert np.allclose(sums[0], each, atol=1e-4)
    assert np.allclose(sums[1], each + 1e-3, atol=1e-4)
    assert np.allclose(counts, [1, 3], atol=1e-4)


@pytest.mark.parametrize("block", [1, -1])
def test_two_parts_of_an_update_in_one_block_are_refused(block):
    """Both are clipped together to C, but their sum in one block could have sqrt(2) C."""
    clipped = ClippedSums((2, 50), 3.0)
    part = np.full(50, 4.0, np.float32)
    with pytest.raises(ValueError, match="two parts are in one block"):
        clipped.add(0, [(1, part), (block, part)])
    clipped.add(0, [(0, part), (1, part)])
    assert np.linalg.norm(clipped.total) == pytest.approx(3.0)


@pytest.mark.parametrize("part", [np.full(1, 4.0, np.float32), np.full((1, 50), 4.0, np.float32)])
def test_a_part_of_another_shape_than_its_block_is_refused(part):
    """One number of size C was added to every coordinate of its block, a vector of norm sqrt(p) C."""
    clipped = ClippedSums((1, 50), 3.0)
    with pytest.raises(ValueError, match=r"each part must have the shape \(50,\), got"):
        clipped.add(0, [(0, part)])
    assert not clipped.total.any()


@pytest.mark.parametrize("block", [None, 2, -1, [0, 1]])
def test_a_client_is_counted_in_one_block(block):
    """None ended in an AssertionError without words, and a list counted a client in several blocks, which the noise does not cover."""
    clipped = ClippedSums((2, 50), 3.0, counted=True)
    with pytest.raises(ValueError, match="counted_in must be a block, 0 to 1, since clients are counted, got"):
        clipped.add(0, [(0, np.ones(50, np.float32))], block)
    assert not clipped.total.any()
    assert not clipped.clients


def test_a_step_may_change_the_list_of_its_sample():
    """A list from which a step took the clients one by one was the sample itself, and the sums had clients outside of it."""
    me = context(FIXED, keys(1)[0])
    sample, clipped = me.sample("round"), ClippedSums((1, 4), 1.0)
    first = sample.pop()
    clipped.add(first, [(0, np.ones(4, np.float32))])
    sample.append(next(client for client in range(20) if client not in [first, *sample]))
    me.noisy_total("round", "sums", clipped)
    clipped.add(sample[-1], [(0, np.ones(4, np.float32))])
    with pytest.raises(ValueError, match="is not in the sample"):
        me.noisy_total("round", "sums", clipped)


def test_a_step_cannot_change_sums_past_their_clipping():
    clipped = ClippedSums((1, 50), 3.0)
    with pytest.raises(ValueError, match="read-only"):
        clipped.total[:] = 9.0
    with pytest.raises(AttributeError):
        clipped.unit = 0.1
    with pytest.raises(AttributeError):
        clipped.clients.discard(0)


@pytest.mark.parametrize("bound", [math.inf, math.nan, 0.0, 1e-170])
def test_a_clip_norm_or_length_that_no_noise_hides_is_refused(bound):
    """With infinite ones a count, or the place of a label, was NaN where a client was, and infinite elsewhere."""
    with pytest.raises(ValueError, match=r"clip is .*: must be 1e-100 to 1e\+100"):
        ClippedSums((2, 50), bound, counted=True)
    me = context(FIXED, keys(1)[0])
    me.sample("round")
    with pytest.raises(ValueError, match=r"length is .*: must be 1e-100 to 1e\+100"):
        me.noisy_labels("round", "labels", [0] * 5, 2, bound, 0.2)
    with pytest.raises(ValueError, match=r"sensitivity is inf: must be 1e-100 to 1e\+100"):
        me.noisy_labels("round", "labels", [0] * 5, 2, 0.1, math.inf)


@pytest.mark.parametrize("purpose", ["sample", "labels"])
def test_a_step_gets_no_generator_whose_numbers_a_mechanism_draws(purpose):
    """With "sample" its first numbers were those that decide who is in the secret sample."""
    me = context(POISSON, keys(1)[0])
    with pytest.raises(ValueError, match=f"purpose is '{purpose}': must not be 'sample' or 'labels'"):
        me.rng("round", purpose)
    drawn = me.rng("round", "rebalancing").random(20)
    assert me.sample("round") != np.flatnonzero(drawn < 0.25).tolist()


def test_counts_make_the_noise_three_percent_larger():
    me = context(POISSON, keys(1)[0], noise=2.0)
    me.sample("round")
    sums, counts = me.noisy_total("round", "sums", ClippedSums((2, 20_000), 3.0, counted=True))
    assert counts is not None
    assert abs(sums.std() / (2.0 * 3.0 * math.hypot(1, 0.25)) - 1) < Z / math.sqrt(2 * sums.size)


def right_label(noise_ratio, clusters):
    """Chance that the true coordinate is the largest; noise_ratio: deviation of the noise over the length of a label."""
    return integrate.quad(
        lambda x: stats.norm.pdf(x) * stats.norm.cdf(x + 1 / noise_ratio) ** (clusters - 1), -12, 12, limit=200
    )[0]


def test_released_labels_are_right_as_often_as_their_noise_allows():
    right, rounds, z = 0, 300, 0.9
    for key in keys(rounds):
        me = context(FIXED, key, noise=z)
        me.sample("round")
        noisy = me.noisy_labels("round", "labels", [0, 1, 2, 3, 3], 4, 0.1, math.sqrt(2) * 0.1)
        right += int((noisy.argmax(axis=1) == [0, 1, 2, 3, 3]).sum())
    expected = right_label(z / math.sqrt(0.25) * math.sqrt(2), 4)
    assert 0.3 < expected < 0.6
    assert abs(right / (5 * rounds) - expected) < Z * math.sqrt(expected * (1 - expected) / (5 * rounds))


def test_honest_labels_are_nearly_random():
    """1000 clients, q = .1, 50 rounds, k = 4 (chance: 25 %): what labels can be at epsilon 2, 4, 8, with half of 1 / z^2 and with all."""
    for epsilon, half, whole in ((2, 0.349, 0.394), (4, 0.400, 0.468), (8, 0.463, 0.559)):
        z = accountant.calibrate(lambda z: [FixedSizeGaussian(z, 100, 1000, 50)], epsilon, 1e-3, adjacency="replace-one")
        assert right_label(z / math.sqrt(0.5) * math.sqrt(2), 4) == pytest.approx(half, abs=0.002)
        assert right_label(z * math.sqrt(2), 4) == pytest.approx(whole, abs=0.002)


def test_a_part_that_did_not_run_is_not_what_was_charged():
    me = context(FIXED, keys(1)[0])
    me.sample("round")
    me.noisy_total("round", "sums", ClippedSums((1, 4), 1.0))
    assert me.ran() == []
    me.noisy_labels("round", "labels", [0] * 5, 2, 0.1, 0.2)
    assert me.ran() == [FixedSizeGaussian(1.0, 5, 20, 1)]
    me.noisy_labels("round", "labels", [0] * 5, 2, 0.1, 0.2)
    assert me.ran() == []


def test_noisy_labels_are_of_a_sample_of_fixed_size_and_their_noise_covers_one_of_each_client():
    """The step of an algorithm of one's own released two labels of a client, or a number of labels, for the charge of one label."""
    me = context(FIXED, keys(1)[0])
    me.sample("round")
    for labels, sensitivity, words in (
        ([0] * 10, 0.2, "one for each sampled client, 5, got 10"),
        ([0] * 5, 0.1, r"at least sqrt\(2\) \* length, 0.141421, got 0.1"),
    ):
        with pytest.raises(ValueError, match=words):
            me.noisy_labels("round", "labels", labels, 2, 0.1, sensitivity)
    me = context(POISSON, keys(1)[0])
    with pytest.raises(ValueError, match="slot 'round' has sampling 'poisson': must be 'fixed' for labels"):
        me.noisy_labels("round", "sums", [0] * len(me.sample("round")), 2, 0.1, 0.2)


def test_no_rounding_makes_a_label_move_by_more_than_its_noise_covers(monkeypatch):
    """sqrt(2) * length in float64 was below its value for 1 of 14 lengths."""
    seen = []
    monkeypatch.setattr(
        central_context, "gaussian_on_grid", lambda rows, deviation, noise: seen.append((rows, deviation)) or rows
    )
    for length in np.random.default_rng(0).random(40):
        me = context(FIXED, keys(1)[0], noise=0.5)  # of a quarter of 1 / z^2: the deviation is the sensitivity
        me.sample("round")
        me.noisy_labels("round", "labels", [0, 1, 0, 0, 0], 2, float(length), math.sqrt(2) * float(length))
        rows, deviation = seen.pop()
        moved = sum(Fraction(float(a) - float(b)) ** 2 for a, b in zip(rows[0], rows[1], strict=True))
        assert moved <= Fraction(deviation) ** 2


def test_no_rounding_of_a_sum_makes_a_client_move_it_by_more_than_its_noise_covers(monkeypatch):
    """Sums from 4096 on were rounded up by half a unit in each addition, those below, without one client, were exact."""
    deviations = []
    monkeypatch.setattr(
        central_context, "gaussian_on_grid", lambda rows, deviation, noise: deviations.append(deviation) or rows
    )
    me = context(CentralSlot("round", "poisson", 10_000, 10_000), keys(1)[0], clients=10_000)
    vectors = [np.array([1.0])] * 4097 + [np.array([1.5 * 2.0**-40])] * 5903
    totals = []
    for absent in (None, 0):
        sums = ClippedSums((1, 1), 1.0)
        for client in set(me.sample("round")) - {absent}:
            sums.add(client, [(0, vectors[client])])
        me.noisy_total("round", "sums", sums)
        totals.append(float(sums.total[0, 0]))
    assert 1.0 < totals[0] - totals[1] <= deviations[0]


# ---- rebalancing


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=40), st.integers(0, 8), st.integers(0, 2**32))
@settings(max_examples=200)
def test_rebalancing_fills_small_clusters_from_the_surplus_of_large_ones(labels, least, seed):
    before = np.array(labels)
    after = rebalance(before, 4, least, np.random.default_rng(seed))
    old, new = (np.bincount(x[x >= 0], minlength=4) for x in (before, after))
    moved = before != after
    assert not moved[before == -1].any()
    assert (new >= np.minimum(old, least)).all()  # no cluster falls below B, or below what it had
    assert all(old[label] > least for label in before[moved])
    assert all(old[label] < least and new[label] <= least for label in after[moved])
    if old.sum() >= 4 * least:
        assert (new >= least).all()


def test_donors_are_uniform_and_as_printed_may_drain_a_cluster():
    labels = np.repeat([0, 1, 2], [10, 6, 0])
    rng, moved = np.random.default_rng(5), Counter()
    for _ in range(4000):
        moved.update(np.flatnonzero(rebalance(labels, 3, 4, rng) == 2).tolist())
    first, second = [moved[i] for i in range(10)], [moved[i] for i in range(10, 16)]
    assert stats.chisquare(first).pvalue > 1e-7
    assert stats.chisquare(second).pvalue > 1e-7
    assert sum(first) == pytest.approx(3 * sum(second), rel=0.1)  # surplus 6 against 2
    labels = np.repeat([0, 1], [4, 0])
    assert (np.bincount(rebalance(labels, 2, 4, rng, "any"), minlength=2) == [0, 4]).all()
    assert (rebalance(labels, 2, 4, rng) == labels).all()


def test_rebalancing_on_average_is_what_the_noisy_sums_give():
    """Without noise: the mean over random rebalancings of each cluster's mean update is the formula's."""
    rng = np.random.default_rng(11)
    sizes, least = [9, 7, 1, 0], 3
    labels = np.repeat(range(4), sizes)
    updates = rng.normal(size=(len(labels), 3))
    sums = np.stack([updates[labels == k].sum(axis=0) for k in range(4)])
    means = []
    for _ in range(6000):
        placed = rebalance(labels, 4, least, rng)
        means.append(np.stack([updates[placed == k].mean(axis=0) for k in (2, 3)]))
    error = np.std(means, axis=0) / math.sqrt(len(means))
    formula = rebalanced_in_expectation(sums, np.array(sizes, float), least)
    assert (np.abs(np.mean(means, axis=0) - formula[2:]) < Z * error).all()
    assert np.allclose(formula[0], sums[0] / 9)  # a large cluster keeps the mean of its own
    by_surplus = (6 * sums[0] / 9 + 4 * sums[1] / 7) / 10  # not by size
    assert np.allclose(formula[3], by_surplus)


def test_without_rebalancing_it_is_the_base_and_an_empty_population_moves_nothing():
    labels = np.array([0, 0, 1, 3])
    assert (rebalance(labels, 4, 0, np.random.default_rng(0)) == labels).all()
    sums = np.arange(8.0).reshape(4, 2)
    assert np.allclose(rebalanced_in_expectation(sums, np.array([2.0, 1, 0, 1]), 0), sums / [[2], [1], [1], [1]])
    assert np.isfinite(rebalanced_in_expectation(np.ones((2, 2)), np.array([-3.0, -1.0]), 4)).all()


# ---- the whole round


@pytest.mark.parametrize("crash", ["after the debit", "after the clients answered", "before the release is stored"])
def test_a_crash_of_the_server_repeats_sample_and_noise_and_pays_once(tmp_path, monkeypatch, crash):
    job = job_for(tmp_path / "job", RR, REPLACED)
    whole = simulate(job, tmp_path / "whole")
    target = {
        "after the debit": (CentralContext, "sample"),
        "after the clients answered": (CentralContext, "noisy_labels"),
        "before the release is stored": (CentralContext, "ran"),
    }[crash]
    run, calls = getattr(*target), []

    def once(self, *arguments, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(*target, once)
        with pytest.raises(KeyboardInterrupt):
            simulate(job, tmp_path / "crashed")
    again = simulate(job, tmp_path / "crashed")
    assert again.models.tobytes() == whole.models.tobytes()
    charges = [
        [e for e in read_ledger(tmp_path / name / "ledgers" / CENTRAL_SERVER) if e.events] for name in ("whole", "crashed")
    ]
    assert [(e.round, e.events) for e in charges[0]] == [(e.round, e.events) for e in charges[1]]
    assert len(charges[0]) == 4


def test_runs_with_noise_from_the_operating_system_differ(tmp_path):
    job = job_for(tmp_path / "job", {"name": "dp-fedavg", "sampling_rate": 0.5}, {**TRUSTED, "noise": "os", "noise_seed": None})
    assert job.experiment.noise_seed is None
    first, second = (simulate(job, tmp_path / name).models for name in ("a", "b"))
    assert not np.array_equal(first, second)


def test_a_worker_refuses_a_server_that_adds_too_little_noise(tmp_path):
    job = job_for(tmp_path / "job", RR, REPLACED)
    z = job.protocol.curator_noise_multiplier
    weak = job_files.Job(job.protocol.model_copy(update={"curator_noise_multiplier": 0.9 * z}), job.experiment)
    with pytest.raises(Refused, match="claim"):
        make_host(weak, 0, tmp_path / "ledgers", durable=False)
    make_host(job, 0, tmp_path / "ledgers", durable=False).close()


@pytest.mark.parametrize(
    ("algorithm", "privacy", "trust"),
    [(RR, REPLACED, "untrusted-server"), ({"name": "global"}, SMALL["privacy"], "trusted-server")],
)
def test_a_worker_refuses_a_trust_that_the_algorithm_does_not_have(tmp_path, algorithm, privacy, trust):
    """Otherwise the plan that is checked, which is empty or raw, would not be the one that is run."""
    job = job_for(tmp_path / "job", algorithm, privacy)
    other = job.protocol.privacy.model_copy(update={"trust": trust})
    wrong = job_files.Job(job.protocol.model_copy(update={"privacy": other}), job.experiment)
    with pytest.raises(Refused, match="does not protect a"):
        make_host(wrong, 0, tmp_path / "ledgers", durable=False)


def test_a_clients_own_ledger_says_that_its_releases_are_raw(tmp_path):
    job = job_for(tmp_path / "job", RR, REPLACED)
    simulate(job, tmp_path / "run")
    drawn = Counter()
    for ledger in (tmp_path / "run" / "ledgers").glob("client_*"):  # who was never drawn has none
        charges = [e for e in read_ledger(ledger) if e.events]
        assert {event.reason for e in charges for event in e.events} <= {RAW}
        drawn.update(e.round for e in charges)
    assert drawn == dict.fromkeys(range(1, 5), 6)


@pytest.mark.parametrize(
    ("algorithm", "privacy", "said"),
    [
        ({**RR, "min_cluster_size": 4}, REPLACED, "algorithm.min_cluster_size is 4: 2 clusters of that size need 8 clients a round"),
        (RR, TRUSTED, "algorithm.guarantee is 'labels-first': needs privacy.adjacency replace-one"),
        ({**RR, "guarantee": "expected"}, REPLACED, "algorithm.guarantee is 'expected': needs Poisson sampling"),
        ({**RR, "guarantee": "paper"}, REPLACED, "algorithm.guarantee is 'paper': needs privacy.accountant rdp"),
        ({**RR, "base": "fesem"}, REPLACED, "clients that keep a state reveal earlier samples"),
        ({"name": "dp-fedper", "sampling_rate": 0.5}, REPLACED, "clients that keep a state reveal earlier samples"),
        ({"name": "dp-fedavg", "sampling_rate": 0.3}, REPLACED, "algorithm.sampling_rate is 0.3: 3.6 of 12 clients is not a whole number"),
        ({"name": "dp-fedavg", "sampling_rate": 0.08}, TRUSTED, "algorithm.sampling_rate is 0.08: samples less than one of 12 clients, must be at least 1/12"),
        ({"name": "dp-fedavg", "sampling_rate": 0.5, "sampling": "fixed"}, TRUSTED, "needs privacy.adjacency replace-one"),
        ({"name": "dp-fedavg"}, SMALL["privacy"], "privacy.unit is 'sample', privacy.trust 'untrusted-server': dp-fedavg works with"),
        ({"name": "global"}, TRUSTED, "privacy.unit is 'client', privacy.trust 'trusted-server': global works with"),
    ],
)  # fmt: skip
def test_impossible_pairs_say_why(algorithm, privacy, said):
    with pytest.raises(ConfigError) as refused:
        config.resolve(document(algorithm, privacy))
    assert any(said in problem for problem in refused.value.problems), refused.value.problems


def test_momentum_belongs_to_plain_sgd():
    local = {"batch_size": 20, "lr": 0.2, "momentum": 0.9}
    with pytest.raises(ConfigError, match=r"local\.momentum is 0\.9: must be 0"):
        config.resolve(document({"name": "global"}, SMALL["privacy"], local=local))
    config.resolve(document({"name": "dp-fedavg", "sampling_rate": 0.5}, TRUSTED, local=local))


def printed_epsilon(z, q, rounds, delta):
    """RR-Cluster's Theorem 4.2 with the conversion of its Theorem A.6, for Gaussian releases of epsilon(alpha) = alpha / (2 z^2)."""

    def at(order):
        second = min(4 * math.expm1(1 / z**2), 2 * math.exp(1 / z**2))
        terms = [q**j * math.comb(order, j) * 2 * math.exp((j - 1) * j / (2 * z**2)) for j in range(3, order + 1)]
        total = 1 + q**2 * math.comb(order, 2) * second + sum(terms)
        return (rounds * math.log(total) + math.log(1 / delta)) / (order - 1)

    return min(at(order) for order in range(2, 20))


def test_what_is_published_is_said_to_be_without_a_guarantee_and_what_it_costs_is_printed_beside(tmp_path):
    seeded = {**REPLACED, "accountant": "rdp", "epsilon": 4}
    privacy = {**seeded, "noise": "os", "noise_seed": None}
    job = job_for(tmp_path / "job", {**RR, "guarantee": "paper", "labels_share": 0.4}, privacy)
    z = job.protocol.curator_noise_multiplier
    claimed = accountant.epsilon([FixedSizeGaussian(z, 6, 12, 4)], 1e-2, adjacency="replace-one", accountant="rdp")
    assert claimed == pytest.approx(4, abs=0.01)
    sound = replace_one_epsilon(job.protocol)
    worse = (0.6 / z**2 + 2 * 0.4 / z**2) ** -0.5  # sqrt(2) C_s instead of C_s
    assert sound == pytest.approx(accountant.epsilon([FixedSizeGaussian(worse, 6, 12, 4)], 1e-2, adjacency="replace-one"))
    statement = privacy_statement(job.protocol, sound)
    assert statement["epsilon"] is None
    assert "epsilon 4, by Theorem 27 of" in statement["claim_of_paper"]
    assert printed_epsilon(z, 0.5, 4, 1e-2) > 4.2  # the bound that the paper prints is not the one that z was solved with
    assert "does not hold" in statement["not_covered"][0]
    assert not any(line.startswith("the other releases") for line in statement["not_covered"])  # there are none
    without_secret = job_for(tmp_path / "seeded", {**RR, "guarantee": "paper", "labels_share": 0.4}, seeded)
    assert replace_one_epsilon(without_secret.protocol) is None


@pytest.mark.parametrize(
    ("sampling_rate", "privacy", "others"),
    [(0.5, TRUSTED, False), (0.5, REPLACED, True), (1.0, TRUSTED, None)],
    ids=["poisson", "fixed", "all"],
)
def test_the_statement_says_who_can_know_a_sample(tmp_path, sampling_rate, privacy, others):
    job = job_for(tmp_path, {"name": "dp-fedavg", "sampling_rate": sampling_rate}, privacy)
    lines = privacy_statement(job.protocol, None)["not_covered"]
    said = [line for line in lines if line.startswith("who is in the sample of a round")]
    assert len(said) == (others is not None)
    # One client alone knows its own turns: clients need not act together.
    assert all("the traffic of the network" in line and ("for each other client" in line) == others for line in said)
    assert any("output.transcript full it holds what clients sent" in line for line in lines)
    # Who publishes a report publishes its timeline.
    assert any(line.startswith("the run folder and its report") for line in lines) == (others is not None)


@pytest.mark.parametrize("privacy", [TRUSTED, REPLACED], ids=["zero-out", "replace-one"])
def test_the_statement_does_not_say_that_a_client_of_the_job_is_hidden(tmp_path, privacy):
    """Every worker has the roster, and the promise is also against the other clients."""
    job = job_for(tmp_path, {"name": "dp-fedavg", "sampling_rate": 0.5}, privacy)
    assert len({entry.public_key for entry in job.protocol.roster}) == len(job.protocol.roster)
    adjacency = dict(statement(privacy_statement(job.protocol, None)).facts)["Adjacency"]
    assert adjacency.endswith("which clients the job has is public, since it lists them")


@pytest.mark.parametrize(
    ("algorithm", "privacy", "named"),
    [
        (RR, REPLACED, True),
        ({**RR, "guarantee": "expected"}, TRUSTED, True),
        ({**RR, "base": "oracle", "min_cluster_size": 0}, REPLACED, False),
        ({"name": "dp-fedavg", "sampling_rate": 0.5}, TRUSTED, False),
    ],
    ids=["labels", "expected", "oracle", "one model"],
)
def test_the_statement_names_clusters_that_the_observer_takes_from_training_records(tmp_path, algorithm, privacy, named):
    """If the server names no clusters, the observer assigns each client to the cluster with the least training loss."""
    job = job_for(tmp_path, algorithm, privacy)
    lines = privacy_statement(job.protocol, None)["not_covered"]
    assert any(line.startswith("clusters of clients in figures and files of the observer") for line in lines) == named
    assert observer_assigns(job.algorithm) == named


@pytest.mark.parametrize("trust", ["trusted-server", "secure-aggregation"])
@pytest.mark.parametrize(("algorithm", "named"), [("dp-fedper", True), ("dp-fedavg", False)])
def test_the_statement_names_figures_of_personal_models_that_no_noise_protects(tmp_path, algorithm, named, trust):
    """A head never leaves its client, but its accuracy does, and shows in which rounds the client was drawn."""
    privacy, changes = {**TRUSTED, "trust": trust}, {"model": {"name": "digits-cnn"}}
    if trust == "secure-aggregation":
        changes["local"] = {"batch_size": 20, "lr": 0.2, "clip": 0.5, "deadline_s": 1.0}
    job = job_for(tmp_path, {"name": algorithm, "sampling_rate": 0.5}, privacy, **changes)
    lines = privacy_statement(job.protocol, None)["not_covered"]
    assert any(line.startswith("figures of personal models in files of the observer") for line in lines) == named


def test_models_of_records_that_noise_protects_have_figures_that_it_covers(tmp_path):
    """A personal model that DP-SGD trained on charged steps is a function of them."""
    lines = privacy_statement(job_for(tmp_path, {"name": "local"}, SMALL["privacy"]).protocol, None)["not_covered"]
    assert not any(line.startswith("figures of personal models") for line in lines)


def test_a_sample_of_fixed_size_costs_more_against_clients_that_know_their_turns():
    """Of 12 clients 6 are sampled: who knows that 2 were not has 6 of the other 10."""
    z = accountant.calibrate(lambda z: [FixedSizeGaussian(z, 6, 12, 20)], 4, 1e-3, adjacency="replace-one")
    known = accountant.epsilon([FixedSizeGaussian(z, 6, 10, 20)], 1e-3, adjacency="replace-one")
    assert known > 4.5


def test_what_each_guarantee_charges(tmp_path):
    labels = job_for(tmp_path / "labels", RR, REPLACED)
    assert {s.event(1.0) for s in labels.algorithm.central_plan()} == {FixedSizeGaussian(1.0, 6, 12, 1)}
    expected = job_for(tmp_path / "expected", {**RR, "guarantee": "expected"}, TRUSTED)
    assert {s.event(1.0) for s in expected.algorithm.central_plan()} == {SampledGaussian(1.0, 0.5, 1)}
    for job in (labels, expected):
        z, privacy = job.protocol.curator_noise_multiplier, job.protocol.privacy
        events = [slot.event(z) for slot in job.algorithm.central_plan()]
        assert 7.9 < accountant.epsilon(events, 1e-2, adjacency=privacy.adjacency) <= 8


@pytest.mark.parametrize(
    ("algorithm", "privacy", "kind", "models"),
    [
        ({"name": "dp-fedavg", "sampling_rate": 0.5}, TRUSTED, "train", 0),
        ({"name": "dp-fedper", "sampling_rate": 0.5}, TRUSTED, "train", 0),
        ({**RR, "base": "fedcam"}, REPLACED, "assign_and_train", 3),
        ({**RR, "labels": "exponential", "labels_every": 1, "labels_epsilon": 1.0}, REPLACED, "name_cluster", 2),
    ],
    ids=["dp-fedavg", "dp-fedper", "fedcam", "labels"],
)
def test_records_on_which_training_diverges_do_not_make_a_client_miss_its_round(tmp_path, algorithm, privacy, kind, models):
    """The server refuses what is not finite, and below the quorum the run ends: everyone would see what one client's records do."""
    job = job_for(tmp_path, algorithm, privacy, local={"batch_size": 20, "lr": 1e6, "clip": 0.5})
    p = job.protocol.model.parameters
    sent = {"models": np.full((models, p), 1e38, "<f4")} if models else {"model": np.full(p, 1e38, "<f4")}
    if models == 2:
        sent["models"][1] = 0
    host = make_host(job, 0, tmp_path / "ledgers")
    answer = host.answer(Task(1, kind, sent))
    host.close()
    assert answer.status == "release"
    released = unpack(answer.release)
    assert all(np.isfinite(array).all() for array in released.values())
    if kind == "name_cluster":
        assert np.argmin(released["losses"]) == 1
    else:
        assert not released["update"].any()


FEDPER = {"name": "dp-fedper", "sampling_rate": 0.5}
RUNS = {
    "rr-cluster": document(RR, REPLACED, output={"transcript": "off", "evaluate_every": 3}, runtime={"max_live_workers": 4}),
    "dp-fedper": document(FEDPER, TRUSTED, output={"transcript": "full", "evaluate_every": 3}),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of `RUNS`, with a process for every client that was drawn, made once."""
    made = {}

    def get(name):
        if name not in made:
            out = tmp_path_factory.mktemp(name)
            done = dpcfl("run", write_config(out / "c", **RUNS[name]), "--out", out / "runs")
            assert done.returncode == 0, done.stderr + done.stdout
            made[name] = only_run(out / "runs")
        return made[name]

    return get


@pytest.mark.slow
def test_a_head_never_leaves_its_client(finished):
    folder = finished("dp-fedper")
    shown = dpcfl("inspect", folder, "--limit", "10000").stdout
    assert "The server is trusted: it sees these messages without noise" in shown
    body = 6090 - (32 * 2 * 2 * 10 + 10)  # without the last layer
    updates = [line for line in shown.splitlines() if " RESULT " in line]
    assert updates
    assert all(f"update f4[{body}]" in line for line in updates)
    document_ = json.loads((folder / "run.json").read_text())
    assert "the server: it is trusted" in " ".join(document_["privacy"]["not_covered"])
    assert document_["privacy"]["epsilon_with_secret_noise"] == 8
    assert "holds" in dpcfl("verify", folder).stdout
    line = max((x for x in runlog.read(folder / "metrics.jsonl") if "accuracy_mean" in x), key=lambda x: x["round"])
    assert len(line["accuracy_by_client"]) == CLIENTS


def test_a_model_without_a_body_is_refused(tmp_path):
    """Nothing would be shared, and the statement would name an epsilon of clients that train alone."""
    with pytest.raises(ConfigError, match=r"model\.name is 'linear': dp-fedper needs a model with two layers or more"):
        job_for(tmp_path, FEDPER, TRUSTED, model={"name": "linear"})


def test_a_head_without_bias_is_the_last_layer_alone(tmp_path):
    job = job_for(tmp_path, FEDPER, TRUSTED)
    template = job.protocol.model
    assert DPFedPer.update_size(template) == 6090 - (32 * 2 * 2 * 10 + 10)
    bare = [["0.weight", [16, 64]], ["0.bias", [16]], ["2.weight", [10, 16]]]
    assert DPFedPer.update_size(template.model_copy(update={"parameters": 1200, "layout": bare})) == 16 * 64 + 16


def test_all_parameters_of_the_last_layer_are_the_head(tmp_path):
    """Of a layer with more than weight and bias all but the last two were shared."""
    template = job_for(tmp_path, FEDPER, TRUSTED).protocol.model
    scaled = [["body.weight", [16, 64]], ["head.weight", [10, 16]], ["head.bias", [10]], ["head.scale", [1]]]
    assert DPFedPer.update_size(template.model_copy(update={"parameters": 1195, "layout": scaled})) == 16 * 64


@pytest.mark.parametrize(
    ("layout", "layer"),
    [
        ([["head.weight", [10, 16]], ["body.weight", [16, 64]], ["body.bias", [16]]], "body"),
        ([["0.weight", [10, 64]], ["1.weight", [10]], ["1.bias", [10]]], "1"),
        ([["embedding.weight", [10, 8]], ["lstm.weight_ih_l0", [32, 8]], ["lstm.weight_hh_l0", [32, 8]]], "lstm"),
    ],
    ids=["head first", "norm last", "tied head"],
)
def test_a_model_whose_last_layer_is_not_its_head_is_refused(tmp_path, layout, layer):
    """The layer that was defined last stayed with each client, and the output layer was shared, without a word."""
    protocol = job_for(tmp_path, FEDPER, TRUSTED).protocol
    size = sum(int(np.prod(shape)) for _, shape in layout)
    other = protocol.model.model_copy(update={"layout": layout, "parameters": size})
    words = rf"'{layer}' has no weight with a row for each of the 10 outputs: define the output layer last$"
    with pytest.raises(ConfigError, match=words):
        DPFedPer(protocol.model_copy(update={"model": other}))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "linear"])
def test_the_last_layer_of_each_model_is_its_head(tmp_path, name):
    protocol = job_for(tmp_path, FEDPER, TRUSTED).protocol
    shape, classes = ([20], 80) if name.startswith("char") else ([3, 32, 32], 10)
    found = [[key, sides] for key, sides in layout(skeleton(name, tuple(shape), classes))]
    size = sum(int(np.prod(sides)) for _, sides in found)
    changed = {"name": name, "input_shape": shape, "classes": classes, "layout": found, "parameters": size}
    template = protocol.model.model_copy(update=changed)
    DPFedPer(protocol.model_copy(update={"model": template}))
    head = sum(int(np.prod(sides)) for _, sides in found[-2:])
    assert DPFedPer.update_size(template) == size - head


def test_labels_are_judged_as_sent_and_as_released(finished):
    folder = finished("rr-cluster")
    lines = runlog.read(folder / "clusters.jsonl")
    judged = [line for line in lines if "label_accuracy" in line]
    released = [line["diagnostics"]["sizes"] for line in lines if line["view"] == "server"]
    assert [line["round"] for line in judged] == [1, 2, 3, 4]
    assert all(0 <= line["label_accuracy"][kind] <= 1 for line in judged for kind in ("as sent", "as released", "as placed"))
    assert all(0 <= line["moved"] <= 6 for line in judged)
    still = [line["label_accuracy"] for line in judged if not line["moved"]]
    assert all(kinds["as placed"] == kinds["as released"] for kinds in still)
    assert [line["round"] for line in lines if "recovered" in line] == [3, 4]
    assert all(sum(sizes) == 6 and min(sizes) >= 2 for sizes in released)
    assert dpcfl("verify", folder).returncode == 0


@pytest.mark.slow
def test_clusters_that_nobody_knows_are_not_judged(tmp_path):
    data = {
        "dataset": "digits",
        "clients": [12],
        "shift": "none",
        "partition": "dirichlet",
        "alpha": 0.5,
        "train_per_client": 60,
    }
    changes = document(RR, REPLACED, data=data, runtime={"federation": "in-process"}, output={"transcript": "off"})
    done = dpcfl("run", write_config(tmp_path / "c", **changes), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "runs")
    lines = [line for line in runlog.read(folder / "clusters.jsonl") if line["view"] == "observer"]
    assert {key for line in lines for key in line} == {"view", "round", "assigned", "labelled", "moved"}
    final = json.loads((folder / "run.json").read_text())["final"]
    assert [final[key] for key in ("clusters_recovered", "minority_recovered", "ari")] == [None] * 3


# ---- the plain local step


def digits(tmp_path):
    job = job_for(tmp_path / "job", RR, REPLACED)
    settings_, piece = job_files.client_slice(job, 0, None)
    return open_client(settings_, piece, None, "train")


def test_plain_sgd_is_torchs(tmp_path):
    data = digits(tmp_path)
    theta = initial("digits-cnn", (1, 8, 8), 10, 3)
    how = {"epochs": 3, "batch_size": 60, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    found = PlainSGD(build("digits-cnn", (1, 8, 8), 10), **how).train(theta, data, np.random.default_rng(1))
    module = build("digits-cnn", (1, 8, 8), 10)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):  # one batch an epoch: its order changes nothing
        x, y = data.batch(np.arange(60), 60)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    theirs = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    assert np.abs(found - theirs).max() < 1e-4 * np.abs(theirs - theta).max()


def test_a_second_model_beside_is_added_and_left_alone(tmp_path):
    data, zero = digits(tmp_path), np.zeros(6090, np.float32)
    trainer = PlainSGD(build("digits-cnn", (1, 8, 8), 10), epochs=1, batch_size=20, lr=0.1)
    theta, other = (initial("digits-cnn", (1, 8, 8), 10, seed) for seed in (3, 4))
    alone = trainer.train(theta, data, np.random.default_rng(1))
    assert np.array_equal(trainer.train(theta, data, np.random.default_rng(1), base_model=zero), alone)
    assert not np.allclose(trainer.train(theta, data, np.random.default_rng(1), base_model=other), alone)


def test_a_task_has_the_same_bits_whatever_the_thread_has_computed_before(tmp_path):
    """An evaluation makes its thread round denormal numbers to zero; weights can be so small that training meets nothing else."""
    data, theta = digits(tmp_path), initial("digits-cnn", (1, 8, 8), 10, 3)
    theta[160:] *= np.float32(1e-38)  # all layers but the first
    trainer = PlainSGD(build("digits-cnn", (1, 8, 8), 10), epochs=1, batch_size=20, lr=0.1)
    found = []
    for evaluated in (False, True):
        torch.set_flush_denormal(evaluated)
        found.append(trainer.train(theta, data, np.random.default_rng(1)))
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize(
    ("name", "shape"), [("digits-cnn", (1, 8, 8)), ("cifar-cnn", (3, 8, 8)), ("linear", (1, 8, 8)), ("char-lstm", (5,))]
)
def test_losses_of_several_models_at_once_are_those_of_each(name, shape):
    x, y = torch.rand(70, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(70) % 10
    data = Fixed(x, y)
    models_ = np.stack([initial(name, shape, 10, seed) for seed in range(3)])
    found = PlainSGD(build(name, shape, 10), epochs=1, batch_size=20, lr=0.1).mean_losses(models_, data)
    for theta, loss in zip(models_, found, strict=True):
        module = build(name, shape, 10)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), module.parameters())
        with torch.no_grad():
            assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(module(x), y)), rel=1e-5)


class Fixed:
    """Records as tensors."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def batch(self, rows, size):
        return self.x[torch.from_numpy(rows)], self.y[torch.from_numpy(rows)]


def test_the_proximal_pull_holds_back(tmp_path):
    data = digits(tmp_path)
    trainer = PlainSGD(build("digits-cnn", (1, 8, 8), 10), epochs=5, batch_size=20, lr=0.1)
    theta = initial("digits-cnn", (1, 8, 8), 10, 3)
    moved = [
        np.linalg.norm(trainer.train(theta, data, np.random.default_rng(1), proximal=(mu, theta)) - theta)
        for mu in (0.0, 1.0, 5.0)
    ]
    assert moved[0] > moved[1] > moved[2]
    assert np.array_equal(
        trainer.train(theta, data, np.random.default_rng(1)),
        trainer.train(theta, data, np.random.default_rng(1), proximal=(0.0, theta)),
    )


def test_names_of_found_clusters_are_the_best_ones():
    assert metrics.best_names([0, 0, 1, 1], [5, 5, 3, 5]) == {5: 0, 3: 1}
    assert metrics.best_names([0, 1], [None, None]) == {}


# ---- all clients in one process


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "rr-cluster" else pytest.mark.slow) for name in RUNS])
def test_one_process_leaves_the_run_folder_that_many_leave(tmp_path, name, finished):
    alone = {**RUNS[name], "runtime": {"federation": "in-process"}, "output": {"transcript": "off", "evaluate_every": 3}}
    done = dpcfl("run", write_config(tmp_path / "c", **alone), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr + done.stdout
    kept = [finished(name), only_run(tmp_path / "runs")]
    models = [Checkpoints(folder / "checkpoints").newest()[1].models.tobytes() for folder in kept]
    assert models[0] == models[1]
    lines = [
        [(x["round"], x["accuracy_by_client"]) for x in runlog.read(folder / "metrics.jsonl") if "accuracy_by_client" in x]
        for folder in kept
    ]
    assert lines[0] == lines[1]
    assert [t for t, _ in lines[1]] == [3, 4]
    assert json.loads((kept[1] / "run.json").read_text())["processes"] == 1
    assert dpcfl("verify", kept[1]).returncode == 0


def test_one_process_has_no_transcript_to_keep():
    with pytest.raises(ConfigError, match=r"output\.transcript must be off where runtime\.federation is 'in-process'"):
        config.resolve(document(RR, REPLACED, runtime={"federation": "in-process"}))
