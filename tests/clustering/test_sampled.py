"""Clustering of many updates by a sample: it finds the clusters of all, its errors are few, and it is reproducible."""

import math

import numpy as np
import pytest

from dpcfl_net.clustering import mixture, sampled
from dpcfl_net.clustering.metrics import adjusted_rand_index, recovered

P = 800


def updates(sizes, score, seed=0):
    """Updates whose centres are `score` separation units apart, in random order, and their clusters."""
    rng = np.random.default_rng([seed, P])
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = rng.standard_normal((len(sizes), P)) * (2 * score / math.sqrt(2 * P))
    return (centres[truth] + rng.standard_normal((len(truth), P))).astype(np.float32), truth.tolist()


def test_a_sample_finds_the_clusters_of_all_updates_and_their_number():
    x, truth = updates([60, 100, 140], 8)
    found = sampled.fit(x, sample=60, clusters=None, seed=1)
    assert found.clusters == 3
    assert recovered(truth, found.labels.tolist())
    assert found.posteriors.shape == (300, 3)
    assert np.allclose(found.posteriors.sum(axis=1), 1)
    assert found.coordinates.shape == (300, 2)
    means = [found.coordinates[np.array(truth) == k].mean(axis=0) for k in range(3)]
    assert min(np.linalg.norm(means[a] - means[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 4


def test_passes_over_all_updates_repair_the_errors_of_a_sample():
    """At this separation the sample alone is wrong about many updates; with passes it is as good as the fit of all."""
    x, truth = updates([150, 150, 300], 2.8, seed=3)
    whole = mixture.fit(x, clusters=3, seed=1)
    found = sampled.fit(x, sample=150, clusters=3, seed=1)
    assert adjusted_rand_index(truth, found.labels.tolist()) > adjusted_rand_index(truth, whole.labels.tolist()) - 0.05
    assert adjusted_rand_index(truth, found.labels.tolist()) > 0.8


def test_small_clusters_and_errors_of_the_sample_are_repaired():
    """With 15 updates in a cluster, an update's share in its own centre and the error of a small one's are as large as a distance."""
    for seed in range(6):
        x, truth = updates([15, 15, 30], 5, seed)
        assert recovered(truth, sampled.fit(x, sample=30, clusters=3, seed=1).labels.tolist())


def test_responsibilities_are_those_of_unequal_clusters():
    """In few dimensions centres are nearly exact: responsibilities are near those of Bayes with clusters of 500 and 2,500."""
    rng, truth = np.random.default_rng(5), np.repeat([0, 1], [500, 2500])
    centres = np.array([[0.0, 0, 0], [2.5, 0, 0]])
    x = (centres[truth] + rng.standard_normal((3000, 3))).astype(np.float32)
    densities = np.array([1, 5]) * np.exp(-((x[:, None] - centres) ** 2).sum(axis=2) / 2)
    found = sampled.fit(x, sample=300, clusters=2, seed=1).posteriors
    small = int(found.sum(axis=0).argmin())
    assert np.abs(found[:, small] - densities[:, 0] / densities.sum(axis=1)).mean() < 0.05


def test_responsibilities_are_no_more_certain_than_centres_allow():
    """Log-odds of calibrated responsibilities have twice their mean as variance; with centres of 40 updates taken as exact, 3.3 times."""
    ratios = []
    for seed in range(8):
        x, truth = updates([40, 40], 4, seed)
        logs = np.log(sampled.fit(x, sample=40, clusters=2, seed=1).posteriors)
        odds = np.where(np.array(truth) == truth[int(logs[:, 0].argmax())], 1, -1) * (logs[:, 0] - logs[:, 1])
        ratios.append(odds.var() / odds.mean())
    assert 1.6 < np.mean(ratios) < 2.4


def test_more_clusters_than_a_sample_holds_are_fitted_to_all_updates():
    x, truth = updates([3, 3, 3], 20)
    assert recovered(truth, sampled.fit(x, sample=2, clusters=3).labels.tolist())


def test_updates_of_a_sample_have_their_own_noise():
    rng = np.random.default_rng(4)
    truth, deviations = np.repeat([0, 1], 40), rng.permutation(np.repeat([1.0, 5.0], [60, 20]))
    centres = rng.standard_normal((2, P))
    x = (centres[truth] + rng.standard_normal((80, P)) * deviations[:, None]).astype(np.float32)
    found = sampled.fit(x, sample=40, clusters=2, seed=1, noise_deviation=deviations)
    assert not found.outliers.any()


def test_updates_of_much_noise_do_not_hide_the_clusters_of_the_others():
    """Half of the updates have 36 times the variance: with equal weights they moved all centres to one place."""
    x, truth = updates([50, 100, 150], 4, seed=2)
    rng = np.random.default_rng(7)
    deviations = rng.permutation(np.repeat([1.0, 6.0], 150))
    x += (rng.standard_normal(x.shape) * np.sqrt(deviations**2 - 1)[:, None]).astype(np.float32)
    found = sampled.fit(x, sample=100, clusters=3, seed=1, noise_deviation=deviations)
    clear = deviations == 1
    assert adjusted_rand_index(np.array(truth)[clear].tolist(), found.labels[clear].tolist()) > 0.95
    # Calibrated: as many of the others are in their cluster as their responsibilities say.
    names = [np.bincount(np.array(truth)[clear & (found.labels == m)]).argmax() for m in range(3)]
    right = np.array(names)[found.labels[~clear]] == np.array(truth)[~clear]
    assert right.mean() == pytest.approx(found.posteriors[~clear].max(axis=1).mean(), abs=0.1)


def test_few_updates_are_fitted_as_without_a_sample_and_equal_seeds_give_equal_fits():
    x, _ = updates([10, 10], 6)
    whole, same = mixture.fit(x, clusters=2, seed=5), sampled.fit(x, sample=20, clusters=2, seed=5)
    assert np.array_equal(whole.posteriors, same.posteriors)
    first, second = (sampled.fit(x, sample=8, clusters=2, seed=5) for _ in range(2))
    assert np.array_equal(first.posteriors, second.posteriors)


def test_one_cluster_and_values_that_are_not_finite():
    x, _ = updates([40], 0)
    alone = sampled.fit(x, sample=20, clusters=1)
    assert alone.labels.tolist() == [0] * 40
    assert alone.posteriors.tolist() == [[1.0]] * 40
    x[:, 3] = math.nan
    with pytest.raises(ValueError, match="finite"):
        sampled.fit(x, sample=20, clusters=2)
    with pytest.raises(ValueError, match="sample must be at least 2"):
        sampled.fit(x, sample=1, clusters=2)


def test_equal_updates_stay_finite():
    found = sampled.fit(np.ones((30, 5), np.float32), sample=10, clusters=2)
    assert np.isfinite(found.posteriors).all()


def test_clusters_of_equal_updates_beside_another_one_stay_finite():
    """Clients that send zeros: with the only other update set aside, their cluster is split into two of equal centres."""
    x = np.zeros((18, 400), np.float32)
    x[8] = 5 * np.random.default_rng(0).standard_normal(400)
    for seed in range(10):
        found = sampled.fit(x, sample=10, clusters=3, seed=seed, noise_deviation=1.0)
        assert np.isfinite(found.posteriors).all()
