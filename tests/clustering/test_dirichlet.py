"""The sampler of partitions: noise alone is one cluster, clusters beyond it are found, and it samples its posterior."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from dpcfl_net.clustering import dirichlet
from dpcfl_net.clustering.gram import centred_gram

P = 2_000


def vectors(signal, seed, n=12, clusters=4):
    """n vectors of unit noise around centres at a squared distance of `signal` sqrt(p)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, P)) * (signal / (2 * P**0.5)) ** 0.5
    return centres[np.arange(n) % clusters] + rng.normal(size=(n, P))


def found(points, noise=1.0, **how):
    how = {"concentration": 1.0, "sweeps": 20, "rng": np.random.default_rng(1), **how}
    return dirichlet.partition(centred_gram(points), P, np.broadcast_to(np.asarray(noise, float), len(points)), **how)


@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_is_one_cluster_and_true_clusters_are_found(seed):
    assert found(vectors(0.0, seed)).clusters == 1
    for signal in (20.0, 2_000.0):
        result = found(vectors(signal, seed))
        assert result.labels.tolist() == [0, 1, 2, 3] * 3
        assert len(result.counts) == 20


def test_without_known_noise_the_variance_within_clusters_is_estimated():
    assert found(vectors(2_000.0, 0), noise=0.0).labels.tolist() == [0, 1, 2, 3] * 3
    assert found(vectors(0.0, 0), noise=0.0).clusters == 1


def test_unequal_noise_weighs_vectors():
    """A vector of a hundred times the variance says nothing, and does not hide the clusters of the others."""
    points, noise = vectors(40.0, 2), np.ones(12)
    points[11] += 10 * np.random.default_rng(3).normal(size=P)
    noise[11] = 101.0
    assert found(points, noise).labels[:11].tolist() == ([0, 1, 2, 3] * 3)[:11]


def test_the_sampler_visits_partitions_as_often_as_their_posterior_says():
    """Gibbs and split-merge together against the enumeration of all 15 partitions of 4 vectors."""
    gram = centred_gram(vectors(60.0, 6, n=4, clusters=2)[:, :20])
    sampler = dirichlet._Sampler(gram, 20, np.ones(4), 1.0, np.random.default_rng(0))
    every = {tuple(dirichlet._numbered(np.array(labels))) for labels in itertools.product(range(4), repeat=4)}
    scores = {labels: sampler.score(np.array(labels)) for labels in every}
    total = np.logaddexp.reduce([*scores.values()])
    visited, labels, steps = Counter(), np.zeros(4, np.int64), 1_500
    for step in range(steps):
        labels = sampler.gibbs(labels) if step % 2 else sampler.split_or_merge(labels)
        labels = dirichlet._numbered(labels)
        visited[tuple(int(label) for label in labels)] += 1
    assert len(every) == 15
    for partition, score in scores.items():
        assert visited[partition] / steps == pytest.approx(float(np.exp(score - total)), abs=0.06)
    assert max(np.exp(score - total) for score in scores.values()) < 0.9  # the posterior is not a point


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"concentration": 0.0}, "concentration"),
        ({"sweeps": 0}, "sweeps"),
        ({"noise": -1.0}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"start": np.zeros(2, np.int64)}, "start must be"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        found(vectors(0.0, 0), **changes)
