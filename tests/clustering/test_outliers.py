"""Clients that resemble no other: alone in a cluster, or reported; unequal noise; no outliers where there are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpcfl_net.clustering import mixture, outliers, sampled, separation
from dpcfl_net.clustering.chi_square import chi_square_quantile
from dpcfl_net.clustering.fitting import ENOUGH, Fitter
from dpcfl_net.clustering.gram import centred_gram, coordinates
from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.metrics import recovered

P = 3000
NOISE = KnownNoise(P, 1.0)
LONE = [1, 5, 5, 5]
SWAMPED = [([1, 5, 5, 5], 60, 2), ([1, 5, 5, 5], 100, 0), ([1, 3, 3, 3], 40, 3)]  # sizes, score, seed


def updates(sizes, score, seed, deviations=1.0):
    """Updates whose centres are `score` separation units of noise 1 apart, and the truth."""
    rng = np.random.default_rng([seed, P])
    truth = np.repeat(np.arange(len(sizes)), sizes)
    centres = rng.standard_normal((len(sizes), P)) * (2 * score / math.sqrt(2 * P))
    noise = rng.standard_normal((len(truth), P)) * np.broadcast_to(deviations, len(truth))[:, None]
    return (centres[truth] + noise).astype(np.float32), truth.tolist()


@pytest.mark.parametrize(("sizes", "lone"), [(LONE, [0]), ([1, 1, 7, 7], [0, 1]), ([1, 12], [0])])
def test_lone_clients_get_clusters_of_one(sizes, lone):
    x, truth = updates(sizes, 20, 1)
    found = mixture.fit(x, clusters=None, noise_deviation=1.0)
    assert recovered(truth, found.labels.tolist())
    assert np.flatnonzero(found.outliers).tolist() == lone
    assert found.mss > ENOUGH
    assert np.allclose(found.posteriors.sum(axis=1), 1)
    scores = dict(zip(found.candidates.tolist(), found.scores.tolist(), strict=True))
    assert scores.pop(len(sizes)) == found.mss > max(score for m, score in scores.items() if m >= len(sizes) - len(lone))


def test_without_the_test_the_lone_client_is_in_anothers_cluster_at_a_confident_score():
    x, truth = updates(LONE, 20, 1)
    before = Fitter(x, P, "spectral", 0, NOISE).best(None, 8)
    assert before.clusters == 3
    assert before.mss > mixture.CUT
    assert not recovered(truth, before.labels.tolist())


@pytest.mark.parametrize(("sizes", "score", "seed"), SWAMPED)
def test_members_that_a_lone_client_drags_beyond_reach_stay_in_their_cluster(sizes, score, seed):
    """The lone client moves the centre of the cluster that it is put in, so that some of the members are beyond reach of it."""
    x, truth = updates(sizes, score, seed)
    fitter = Fitter(x, P, "spectral", 0, NOISE)
    before = fitter.best(None, 8)
    marked, reach = outliers.outliers(fitter.points, before.labels, NOISE)
    nearest = outliers.residuals(fitter.points, before.labels, np.ones(len(x))).min(axis=1)
    assert (nearest > reach).sum() > 1
    assert np.flatnonzero(marked).tolist() == [0]
    found = mixture.fit(x, clusters=None, noise_deviation=1.0)
    assert recovered(truth, found.labels.tolist())
    assert np.flatnonzero(found.outliers).tolist() == [0]


def test_two_lone_clients_in_one_cluster_are_set_aside_together():
    x, _ = updates([1, 1, 7, 7], 20, 3)
    points, labels = coordinates(centred_gram(x)), np.repeat([2, 0, 1], [2, 7, 7])
    assert np.flatnonzero(outliers.outliers(points, labels, NOISE)[0]).tolist() == [0, 1]


def test_points_that_are_all_far_from_each_other_are_all_set_aside():
    x, _ = updates([1, 1, 1, 1], 100, 0)
    points, labels = coordinates(centred_gram(x)), np.array([0, 0, 1, 1])
    marked, reach = outliers.outliers(points, labels, NOISE, heterogeneity=False)
    assert marked.all()
    assert np.isfinite(reach).all()


def test_a_given_number_of_clusters_has_room_for_a_lone_client_or_reports_it():
    x, truth = updates(LONE, 20, 1)
    right, few = (mixture.fit(x, clusters=m, noise_deviation=1.0) for m in (4, 3))
    assert recovered(truth, right.labels.tolist())
    assert (few.clusters, np.flatnonzero(few.outliers).tolist()) == (3, [0])
    assert few.mpo == pytest.approx(1 / 16)  # one client of 16 is in a wrong cluster
    assert few.mss == pytest.approx(separation.score_of_overlap(1 / 16))
    assert few.mss < right.mss


def test_without_clusters_of_one_a_lone_client_is_reported_and_lowers_the_score():
    x, _ = updates(LONE, 20, 1)
    found = mixture.fit(x, clusters=None, noise_deviation=1.0, lone=False)
    assert np.bincount(found.labels).min() > 1
    assert found.outliers[0]
    assert found.mss < ENOUGH


def test_a_lone_client_gets_no_cluster_beyond_the_most():
    x, _ = updates([1, 12], 20, 1)
    found = mixture.fit(x, clusters=None, max_clusters=1, noise_deviation=1.0)
    assert (found.clusters, np.flatnonzero(found.outliers).tolist()) == (1, [0])


def test_a_fit_without_outliers_is_what_it_was():
    x, _ = updates([5, 5, 5, 5], 15, 2)
    found, before = (
        mixture.fit(x, clusters=None, noise_deviation=1.0),
        Fitter(x, P, "spectral", 0, NOISE).best(None, 8),
    )
    assert found.clusters == 4
    for name, value in vars(before).items():
        assert np.array_equal(value, getattr(found, name)), name


def test_a_lone_client_that_the_noise_hides_is_said_to_be_hidden():
    deviations = np.ones(16)
    deviations[0] = 12
    x, _ = updates(LONE, 20, 1, deviations)
    found = mixture.fit(x, clusters=None, noise_deviation=deviations)
    assert (found.clusters, found.outliers.any()) == (3, False)
    assert np.flatnonzero(found.unverified).tolist() == [0]
    assert not mixture.fit(x, clusters=1, noise_deviation=deviations).unverified.any()


def test_a_lone_client_as_near_as_the_closest_clusters_is_found_or_said_to_be_hidden():
    """Noise alone leaves such a client unmarked once in 16,000 rounds: four of 150 have a probability below 1e-8."""
    labels, near, truth = np.repeat([0, 1, 2], [5, 5, 6]), math.sqrt(465.0), np.repeat([0, 1, 2, 3], [5, 5, 5, 1])
    centres = np.zeros((4, P))
    centres[1, 0] = near  # five standard deviations of the residual away from cluster 0
    centres[2:, 1] = 5 * near
    centres[3, 2] = near  # its next cluster is far away, but others are close to each other
    hidden = silent = marked = 0
    for seed in range(150):
        x = centres[truth] + np.random.default_rng([seed, 7]).standard_normal((16, P))
        points = coordinates(centred_gram(x))
        found, _ = outliers.outliers(points, labels, NOISE)
        unverified = outliers.unverified(points, labels, NOISE, found)
        assert not (found & unverified).any()
        hidden += not found[15]
        silent += not (found | unverified)[15]
        marked += unverified[:15].sum()
    assert hidden > 10
    assert silent <= 3
    assert marked < 0.5 * 15 * 150


def test_clients_of_clear_clusters_are_verified():
    x, _ = updates([3, 6, 6], 20, 1)
    assert not mixture.fit(x, clusters=3, noise_deviation=1.0).unverified.any()


def test_a_client_with_much_noise_hides_no_clusters_and_is_none():
    deviations = np.ones(15)
    deviations[4] = 12
    x, truth = updates([5, 5, 5], 20, 0, deviations)
    assert mixture.fit(x, clusters=None).clusters == 1  # noise counted as unknown
    found = mixture.fit(x, clusters=None, noise_deviation=deviations)
    assert found.clusters == 3
    sure = np.arange(15) != 4
    assert recovered(np.array(truth)[sure].tolist(), found.labels[sure].tolist())
    assert not found.outliers.any()
    x, _ = updates([15], 0, 0, deviations)
    assert mixture.fit(x, clusters=None, noise_deviation=deviations).clusters == 1


def test_noise_makes_an_outlier_once_in_a_thousand_rounds():
    rng, labels, rows = np.random.default_rng(0), np.repeat([0, 1], [5, 11]), 16
    marked = 0
    for _ in range(1500):
        factor = np.tril(rng.standard_normal((rows, rows)), -1)  # Bartlett: distances of rows of P normals
        factor[np.arange(rows), np.arange(rows)] = np.sqrt(rng.chisquare(P - np.arange(rows)))
        marked += outliers.outliers(factor, labels, NOISE, heterogeneity=False)[0].any()
    assert marked <= 6


def test_heterogeneity_of_clients_makes_no_outliers():
    beyond = 0
    for seed in range(10):
        x, _ = updates([8, 8], 20, seed)
        rng = np.random.default_rng(seed)
        own = rng.standard_normal((16, 6)) @ rng.standard_normal((6, P))  # clients' own data, far beyond the noise
        points, labels = coordinates(centred_gram(x + 3 * own)), np.repeat([0, 1], 8)
        assert not outliers.outliers(points, labels, NOISE)[0].any()
        marked, reach = outliers.outliers(points, labels, NOISE, heterogeneity=False)
        beyond += (outliers.residuals(points, labels, np.ones(16)).min(axis=1) > reach).sum()
        assert marked.sum() >= 15  # the last one has no others to compare it with
    assert beyond == 160  # every client is beyond noise alone


def test_noise_alone_reaches_as_far_as_once_in_a_thousand_rounds():
    """The test is of all clients of a round: with 100 of them each one's quantile is that of 1e-5."""
    from scipy.stats import chi2

    x, _ = updates([50, 50], 20, 6)
    points, labels = coordinates(centred_gram(x)), np.repeat([0, 1], 50)
    _, reach = outliers.outliers(points, labels, NOISE, heterogeneity=False)
    assert reach == pytest.approx(chi2.isf(1e-3 / 100, P), abs=5)


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_noise_is_not_taken_for_heterogeneity_in_few_directions(deviation):
    """With few clients the products of residuals vary: believed as they are, they would let an outlier reach three times as far."""
    labels, noise = np.repeat([0, 1], 8), KnownNoise(P, deviation)
    for seed in range(20):
        x, _ = updates([8, 8], 20, [8, seed])
        points = coordinates(centred_gram(deviation * x))
        _, reach = outliers.outliers(points, labels, noise)
        _, alone = outliers.outliers(points, labels, noise, heterogeneity=False)
        assert (reach - noise.squared_norm).max() < 1.5 * (alone - noise.squared_norm).max()


@pytest.mark.parametrize("directions", [2, 4, 8])
def test_heterogeneity_reaches_as_far_as_its_chi_square_law(directions):
    """Normal heterogeneity of known variance in a few directions: the reach that the formula gives, up to the error of its estimate."""
    labels, deviation, variance, found = np.repeat([0, 1, 2], 30), 3.0, 27_000.0, []
    noise, tail = KnownNoise(P, deviation), 1e-3 / len(labels)
    for seed in range(4):
        x, _ = updates([30, 30, 30], 20, seed)
        x = deviation * x
        rng = np.random.default_rng([directions, seed])
        x[:, :directions] += math.sqrt(variance) * rng.standard_normal((len(x), directions))
        marked, reach = outliers.outliers(coordinates(centred_gram(x)), labels, noise)
        assert not marked.any()
        found.append(reach[0])
    middle, far = (variance * chi_square_quantile(directions, level) for level in (0.5, tail))
    beyond = deviation**2 * (chi_square_quantile(P, tail) - P)
    assert 0.9 < np.mean(found) / (noise.squared_norm + middle + math.hypot(beyond, far - middle)) < 1.25


def test_the_law_of_a_hidden_client_widens_with_its_distance():
    """Far away in few dimensions a residual varies by 2 d s, not by sqrt(2 p) s^2: such clients are never verified by noise."""
    noise, labels, truth = KnownNoise(100, 1.0), np.repeat([0, 1], [10, 11]), np.repeat([0, 1, 2], [10, 10, 1])
    centres = np.zeros((3, 100))
    centres[1:, 0] = centres[2, 1] = math.sqrt(2000.0)  # as far from cluster 1 as cluster 0 is
    for seed in range(40):
        points = centres[truth] + np.random.default_rng([seed, 9]).standard_normal((21, 100))
        assert outliers.unverified(points, labels, noise, np.zeros(21, bool))[20]


def test_a_client_that_is_alone_in_its_cluster_is_never_unverified():
    x, _ = updates([6, 6], 20, 5)
    points, labels = coordinates(centred_gram(x)), np.repeat([0, 1, 2], [6, 5, 1])
    unverified = outliers.unverified(points, labels, NOISE, np.zeros(12, bool))
    assert not unverified[11]


@pytest.mark.parametrize(("degrees", "level"), [(100, 1e-3), (6090, 1e-4), (28_938, 5e-5), (11_000_000, 1e-6)])
def test_quantiles_are_those_of_the_chi_square_law(degrees, level):
    from scipy.stats import chi2

    exact = chi2.isf(level, degrees)
    assert abs(chi_square_quantile(degrees, level) - exact) < 0.02 * math.sqrt(2 * degrees)


def test_a_sample_passes_its_outliers_on():
    x, truth = updates([1, 30, 30], 15, 3)
    found = sampled.fit(x, sample=60, clusters=None, noise_deviation=np.ones(61), seed=1)
    assert recovered(truth, found.labels.tolist())
    assert np.flatnonzero(found.outliers).tolist() == [0]


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[1.0] * 16], [1.0] * 15 + [0.0]])
def test_deviations_that_do_not_fit_the_updates_are_refused(bad):
    with pytest.raises(ValueError, match="noise_deviation"):
        mixture.fit(updates(LONE, 20, 0)[0], clusters=2, noise_deviation=np.array(bad))
