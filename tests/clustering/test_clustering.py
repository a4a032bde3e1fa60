"""The mixture, its confidence and the choice of M: recovery, calibration without clusters, invariance, scikit-learn."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from dpcfl_net.clustering import em, noise_spectrum, separation
from dpcfl_net.clustering.gram import centred_gram, coordinates
from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.metrics import adjusted_rand_index, recovered
from dpcfl_net.clustering.mixture import CUT, SPACES, choose, fit

P = 4000


def updates(sizes, score, seed, p=P, scale=1.0):
    """Updates of clients in clusters `sizes` whose centres are `score` separation units apart (R's SS), and the truth."""
    rng = np.random.default_rng([seed, p])
    truth = np.repeat(np.arange(len(sizes)), sizes)
    centres = rng.standard_normal((len(sizes), p)) * (2 * score / math.sqrt(2 * p))
    return ((centres[truth] + rng.standard_normal((len(truth), p))) * scale).astype(np.float32), truth.tolist()


def test_gram_matrix_gives_the_distances_whatever_the_blocks():
    x, _ = updates([3, 4], 5, 0)
    x += 1000  # a large common offset must not cost accuracy
    direct = x.astype(np.float64) - x.astype(np.float64).mean(axis=0)
    for chunk in (None, 1, 7, P, 10 * P):
        assert np.allclose(centred_gram(x, chunk), direct @ direct.T, rtol=1e-9, atol=1e-6)
    z = coordinates(centred_gram(x))
    assert z.shape == (7, 6)
    assert (z[np.abs(z).argmax(axis=0), np.arange(6)] > 0).all()
    far = np.linalg.norm(z[:, None] - z[None], axis=2)
    assert np.allclose(far, np.linalg.norm(direct[:, None] - direct[None], axis=2), rtol=1e-9)
    assert np.allclose(centred_gram(list(x)), centred_gram(x))


def test_gram_matrix_takes_little_memory():
    x = np.ones((21, 1 << 20), np.float32)
    tracemalloc.start()
    centred_gram(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20 < x.nbytes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    x, _ = updates([3, 3], 20, 0)
    x[4, 17] = bad
    for space in SPACES:
        with pytest.raises(ValueError, match="finite"):
            fit(x, clusters=2, space=space)


def test_bad_arguments_are_refused():
    x, _ = updates([3, 3], 20, 0)
    for arguments in (
        {"clusters": 0},
        {"clusters": 7},
        {"clusters": 2, "space": "pca3"},
        {"clusters": None, "max_clusters": 0},
    ):
        with pytest.raises(ValueError):
            fit(x, **arguments)
    with pytest.raises(ValueError, match="one length"):
        fit([np.zeros(3), np.zeros(4)], clusters=1)
    with pytest.raises(ValueError, match="updates must hold at least one row"):
        fit([], clusters=None)


@pytest.mark.parametrize("sizes", [[3, 6, 6, 6], [2, 2, 2, 2], [7, 7, 7]])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_spectral_recovers_clusters_and_their_number(sizes, scale):
    x, truth = updates(sizes, 20, 3, scale=scale)
    known, chosen = (fit(x, clusters=clusters, seed=5) for clusters in (len(sizes), None))
    assert recovered(truth, known.labels.tolist())
    assert chosen.clusters == len(sizes)
    assert np.array_equal(chosen.labels, known.labels)
    assert known.mss > CUT
    assert known.mpo < 0.01
    assert chosen.candidates.tolist() == list(range(2, min(8, len(x) // 2) + 1))
    assert chosen.scores[len(sizes) - 2] == known.mss


def test_without_clusters_none_is_found_and_nothing_is_claimed():
    # the paper's own score is far above its threshold of 3 here, on pure noise
    for seed in range(5):
        x, _ = updates([21], 0, seed)
        found = fit(x, clusters=None, seed=seed)
        assert (found.clusters, found.mss, found.mpo) == (1, 0.0, 1.0)
        assert found.labels.tolist() == [0] * 21
        forced = fit(x, clusters=4, seed=seed)
        assert forced.clusters == 4
        assert forced.mss < CUT
        assert fit(x, clusters=4, space="full", seed=seed).mss_plain > 10


def test_one_direction_of_large_variance_is_not_two_clusters():
    """What clients' own data add to the noise lies in few directions; it must not pass for clusters."""
    for seed in range(5):
        x, _ = updates([21], 0, seed)
        rng = np.random.default_rng(seed)
        direction = rng.standard_normal(P) / math.sqrt(P)
        x = x + np.outer(rng.standard_normal(21) * 100, direction).astype(np.float32)
        found = fit(x, clusters=2, seed=seed)
        assert found.mss < 2
        client_steps = [x[found.labels == m].mean(axis=0) for m in (0, 1)]
        assert np.linalg.norm(client_steps[0] - client_steps[1]) / 2 > 30  # what the spherical deviation, 1, would say


def test_clusters_in_fewer_directions_than_components_are_found():
    """Four centres in a plane: the third component is noise, and the likelihood there prefers tight pairs of points."""
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), [3, 6, 6, 6])
    plane = rng.standard_normal((2, P)) / math.sqrt(P)
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * 28
    for seed in range(5):
        x = corners[truth] @ plane + np.random.default_rng([1, seed]).standard_normal((21, P))
        assert recovered(truth.tolist(), fit(x, clusters=4, seed=seed).labels.tolist())


def test_effective_separation_equals_the_papers_when_there_is_much_data():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal((3000, 3)), rng.standard_normal((3000, 3)) + np.array([6, 0, 0])])
    labels = np.repeat([0, 1], 3000)
    assert separation.effective(x, labels, 2, 3) == pytest.approx(3, rel=0.05)
    assert separation.plain(np.array([[0.0, 0, 0], [6, 0, 0]]), np.array([1.0, 0.25])) == 3


def test_effective_separation_with_weights_is_that_of_clients_of_weight_1():
    """Clusters of weights (4, 1) and (1, 1), residuals (1, 4) and (1, 1) across the line: p s^2 of 20 and 2, typical noise of 8 and 2."""
    points = np.array([[0, 1.0, 0], [0, -4, 0], [10, 0, 1], [10, 0, -1]])
    found = separation.effective(points, np.array([0, 0, 1, 1]), 2, 50, weights=np.array([4.0, 1, 1, 1]))
    assert found == pytest.approx((100 - 20 / 5 - 2 / 2) / (2 * math.sqrt(8 / 50) * 10))


def test_deviations_along_all_lines_are_the_prior_where_they_refute_spherical_noise():
    """Three clusters of two on a line, residuals of 1 along and across it: 12 along three lines with 6 degrees, where noise has 0.24."""
    points = np.array([[centre + side, side] for centre in (0.0, 10, 20) for side in (-1, 1)])
    found = separation.effective(points, np.repeat([0, 1, 2], 2), 3, 100)
    pooled = (4 + separation.PRIOR * 12 / 6) / (2 + separation.PRIOR)
    assert found == pytest.approx((100 - 4 / 2 - 4 / 2) / (2 * math.sqrt(pooled) * 10))


def test_a_largest_number_too_small_for_all_clusters_splits_no_pair_of_them_alone():
    """Two pairs of clusters, with three at most: the score at four shows that splitting one pair is no better than none."""
    rng = np.random.default_rng(2)
    unit = rng.standard_normal((3, P)) / math.sqrt(P)
    centres = np.array([[60, 24, 0], [60, -24, 0], [-60, 0, 24], [-60, 0, -24]]) @ unit
    x = (np.repeat(centres, 6, axis=0) + rng.standard_normal((24, P))).astype(np.float32)
    assert [fit(x, clusters=None, max_clusters=most).clusters for most in (3, 4)] == [2, 4]


def test_residuals_lose_a_row_of_noise_for_each_centre():
    """Four points in two clusters have two free rows: a direction between the edges of two and of four rows is not noise."""
    between = sum(noise_spectrum.noise_spectrum_edge(rows, 1000) for rows in (2, 4)) / 2
    side = math.sqrt(between / 2)
    points = np.array([[0, side], [0, -side], [90, 0], [90, 0]])
    assert not noise_spectrum.explained(points, np.array([0, 0, 1, 1]), KnownNoise(1000, 1.0))


def test_a_deviation_along_the_line_that_noise_does_not_explain_is_not_averaged_with_it():
    points = np.array([[0.0], [1], [2], [9], [10], [11]])
    labels = np.repeat([0, 1], 3)
    # Deviation 1 along the line, of 4 degrees of freedom; spread 1 / p per coordinate elsewhere.
    assert separation.effective(points, labels, 2, 1000) == pytest.approx((81 - 2 / 3) / (2 * 9))


def test_few_clients_whose_own_records_differ_are_no_clusters():
    """Seven clients of one distribution: their records differ in few directions and by more than the noise."""
    split = 0
    for seed in range(20):
        rng = np.random.default_rng([7, seed])
        own = rng.standard_normal((7, 16)) * 100
        x = rng.standard_normal((7, P))
        x[:, :16] += own
        split += fit(x, clusters=None, seed=seed, noise_deviation=1.0).clusters > 1
    assert split <= 3  # 9 with a spherical prior for the deviation along the line


def test_separation_without_any_deviation_is_finite():
    assert CUT < separation.effective(np.array([[0.0], [0], [1], [1]]), np.array([0, 0, 1, 1]), 2, 5) < math.inf
    assert separation.effective(np.zeros((4, 1)), np.array([0, 0, 1, 1]), 2, 5) == 0
    assert CUT < separation.plain(np.array([[0.0], [1]]), np.zeros(2)) < math.inf


def test_equal_weights_do_not_favour_the_larger_component():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.standard_normal((60, 1)), rng.standard_normal((6, 1)) + 3])
    start = np.eye(2)[[0] * 60 + [1] * 6]
    free, equal = (em.run(points, start, dimension=1, floor=1e-6, equal_weights=even) for even in (False, True))
    assert equal.posteriors[:, 1].sum() > free.posteriors[:, 1].sum() + 1


def test_pca2_is_the_published_recipe():
    x, _ = updates([3, 6, 6], 4, 1)
    found = fit(x, clusters=3, space="pca2", seed=4)
    scaled = (found.coordinates - found.coordinates.min(axis=0)) / np.ptp(found.coordinates, axis=0)
    same, free = (em.spherical(scaled, 3, dimension=2, floor=1e-6, seed=4, equal_weights=even) for even in (True, False))
    assert np.array_equal(found.posteriors, same.posteriors)
    assert not np.array_equal(found.posteriors, free.posteriors)
    assert found.mpo == separation.maximum_pairwise_overlap(found.mss_plain)


def test_overlap_follows_the_papers_formula():
    assert separation.maximum_pairwise_overlap(0) == 1
    assert separation.maximum_pairwise_overlap(-7) == 1
    assert separation.maximum_pairwise_overlap(2) == pytest.approx(0.0455002639)
    assert separation.maximum_pairwise_overlap(1e9) == 0


def test_choice_of_the_number_of_clusters():
    assert choose({2: 30, 3: 20, 4: 15, 5: 2, 6: 3}, [2, 3, 4, 5]) == 4
    assert choose({2: 30, 3: 20, 4: 15, 5: 2, 6: 3}, [2, 3, 4, 5], published=True) == 2
    assert choose({2: 2.4, 3: 2.4}, [2]) == 1
    assert choose({2: 3.0, 3: 9.0, 4: 0.0}, [2, 3]) == 3  # no valid fit of 4
    assert choose({2: 3.0, 3: -8.0}, [2]) == 2
    assert choose({2: 8.9, 3: 4.4, 4: 2.3, 5: 1.4}, [2, 3, 4]) == 2
    assert choose({2: 8.9, 3: 4.4, 4: 2.3, 5: 1.4}, [2, 3, 4], explained=4) == 4
    assert choose({2: 8.9, 3: 4.4, 4: 1.9, 5: 1.4}, [2, 3, 4], explained=4) == 3  # explained, but not told apart
    assert choose({2: 30, 3: 20}, [2, 3], explained=1) == 1
    assert choose({2: 27.6, 3: 2.4, 4: 1.1}, [2, 3], explained=3) == 2  # a real cluster cut in two, next to two far apart
    assert choose({2: 2.1, 3: 20, 4: 1.0}, [2, 3], explained=2) == 2  # fewer clusters need no quarter of the score
    assert choose({}, []) == 1
    x, _ = updates([3, 3], 30, 1)
    assert fit(x[:3], clusters=None).clusters == 1  # too few clients for two clusters of two
    assert fit(x[:1], clusters=None, noise_deviation=1.0).clusters == 1
    assert fit(x, clusters=None, max_clusters=1).clusters == 1


def test_noise_reaches_its_edge_once_in_a_thousand():
    rng = np.random.default_rng(0)
    for rows, p in ((20, 28_938), (7, 6_090)):
        # the triangular factor of a Wishart matrix (Bartlett) has the singular values of the whole matrix of normals
        factors = np.tril(rng.standard_normal((3000, rows, rows)), -1)
        factors[:, np.arange(rows), np.arange(rows)] = np.sqrt(rng.chisquare(p - np.arange(rows), (3000, rows)))
        largest = np.linalg.svd(factors, compute_uv=False)[:, 0] ** 2
        assert (largest > noise_spectrum.noise_spectrum_edge(rows, p)).sum() <= 9
        assert np.quantile(largest, 0.99) < noise_spectrum.noise_spectrum_edge(rows, p) < np.quantile(largest, 0.99) * 1.015


def test_known_noise_finds_the_number_where_clusters_hardly_stand_out():
    fall = known = 0
    for seed in range(8):
        x, _ = updates([7, 7, 7], 7.5, seed, scale=0.01)
        fall += fit(x, clusters=None, seed=seed).clusters == 3
        known += fit(x, clusters=None, seed=seed, noise_deviation=0.01).clusters == 3
    assert known >= 7 > 5 >= fall


def test_known_noise_makes_no_clusters_where_there_are_none():
    for seed in range(5):
        x, _ = updates([21], 0, seed)
        assert fit(x, clusters=None, seed=seed, noise_deviation=1.0).clusters == 1
        rng = np.random.default_rng(seed)
        own = rng.standard_normal((21, 6)) @ rng.standard_normal((6, P))  # clients' own data, far beyond the noise
        assert fit(own * 3 + x, clusters=None, seed=seed, noise_deviation=1.0).clusters == 1


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_deviation_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="noise_deviation"):
        fit(updates([3, 3], 20, 0)[0], clusters=None, noise_deviation=bad)


@pytest.mark.parametrize("space", SPACES)
def test_permutation_and_sign_change_nothing(space):
    x, _ = updates([3, 5, 4], 25, 2)
    order = np.random.default_rng(1).permutation(len(x))
    clusters = 3
    for changed, back in ((x[order], np.argsort(order)), (-x, np.arange(len(x)))):
        one, other = fit(x, clusters=clusters, space=space, seed=9), fit(changed, clusters=clusters, space=space, seed=9)
        assert adjusted_rand_index(one.labels.tolist(), other.labels[back].tolist()) == 1
        assert other.mss == pytest.approx(one.mss, rel=1e-6)


@pytest.mark.parametrize("space", SPACES)
def test_same_seed_same_fit(space):
    x, _ = updates([3, 5, 4], 12, 2)
    one, other = (fit(x, clusters=None, max_clusters=4, space=space, seed=2**40 + 7) for _ in range(2))
    for name, value in vars(one).items():
        assert np.array_equal(value, getattr(other, name)), name


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("clusters", [1, 3, None])
def test_identical_or_few_distinct_updates_give_numbers(space, clusters):
    same = np.full((6, 50), 0.25, np.float32)
    two = np.concatenate([same[:3], same[3:] + 1])
    for x in (same, two):
        found = fit(x, clusters=clusters, space=space)
        for name in ("posteriors", "mss", "mss_plain", "mpo", "coordinates", "centres", "deviations", "scores"):
            assert np.isfinite(getattr(found, name)).all(), name
        assert np.allclose(found.posteriors.sum(axis=1), 1)
        assert 0 <= found.mpo <= 1
    if clusters is None and space != "pca2":
        assert fit(same, clusters=None, space=space).clusters == 1
        assert fit(two, clusters=None, space=space).labels.tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize(("score", "p"), [(0.7, 8), (1.5, 8), (3, 60), (10, 3000)])
@pytest.mark.parametrize("clusters", [2, 3, 5])
def test_one_run_in_full_space_is_scikit_learns(score, p, clusters):
    """From the same start, in coordinates of the Gram matrix alone: the same steps and the same mixture, overlapping or not."""
    from sklearn.mixture import GaussianMixture

    for seed in range(4):
        x = updates([6, 8, 7], score, seed, p=p)[0].astype(np.float64)
        start = em.kmeans_plusplus(coordinates(centred_gram(x)), clusters, np.random.RandomState(seed))
        posteriors = np.zeros((21, clusters))
        posteriors[start, np.arange(clusters)] = 1
        ours = em.run(coordinates(centred_gram(x)), posteriors, dimension=p, floor=1e-6)
        model = GaussianMixture(clusters, covariance_type="spherical", init_params="k-means++", random_state=seed)
        theirs = model.fit(x).predict_proba(x)
        assert np.abs(ours.posteriors - theirs).max() < 1e-6
        assert np.allclose(ours.variances, model.covariances_, rtol=1e-8)
        assert ours.iterations == model.n_iter_
        assert ours.log_likelihood == pytest.approx(model.lower_bound_, rel=1e-8)
        assert separation.plain(ours.means, ours.variances) == pytest.approx(
            separation.plain(model.means_, model.covariances_), rel=1e-6
        )


def test_the_best_of_twenty_runs_is_scikit_learns():
    for seed in range(4):
        x, _ = updates([6, 8, 7], 10, seed, p=30)
        ours, theirs = (fit(x, clusters=3, space=space, seed=seed) for space in ("full", "sklearn"))
        assert theirs.mss > 0  # else it kept a component with one client, which ours avoids
        assert np.allclose(ours.posteriors @ ours.posteriors.T, theirs.posteriors @ theirs.posteriors.T, atol=1e-5)
        assert ours.mss == pytest.approx(theirs.mss)
        assert ours.mss_plain == pytest.approx(theirs.mss_plain, rel=1e-5)


def test_starts_are_those_of_scikit_learn():
    from sklearn.cluster import kmeans_plusplus

    x, _ = updates([6, 8, 7], 3, 0, p=100)
    points = coordinates(centred_gram(x))
    for seed in range(10):
        theirs = kmeans_plusplus(x.astype(np.float64), 4, random_state=np.random.RandomState(seed))[1]
        assert em.kmeans_plusplus(points, 4, np.random.RandomState(seed)) == theirs.tolist()


def test_a_run_with_a_lonely_component_is_not_kept():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.standard_normal((10, 2)), rng.standard_normal((10, 2)) + np.array([7, 0])])
    mixture = em.spherical(points, 3, dimension=2, floor=1e-6, seed=0)
    assert em.smallest_component(mixture) >= 2


def test_a_fit_describes_itself_in_two_coordinates():
    x, _ = updates([3, 6, 6, 6], 40, 0)
    found = fit(x, clusters=4)
    assert found.coordinates.shape == (21, 2)
    assert (found.centres.shape, found.deviations.shape) == ((4, 2), (4,))
    for m in range(4):
        assert np.allclose(found.centres[m], found.coordinates[found.labels == m].mean(axis=0), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "score", "least"), [([3, 6, 6, 6], 20, 19), ([7, 7, 7], 20, 18), ([2, 2, 2, 2], 20, 14), ([21], 0, 20)]
)
def test_recovery_over_twenty_seeds_at_the_papers_size(sizes, score, least):
    right = exact = 0
    for seed in range(20):
        x, truth = updates(sizes, score, seed, p=28_938)
        right += fit(x, clusters=None, seed=seed).clusters == len(sizes)
        exact += recovered(truth, fit(x, clusters=len(sizes), seed=seed).labels.tolist())
    print(sizes, score, "M right", right, "recovered with M known", exact)
    assert right >= least
    assert exact >= 19
