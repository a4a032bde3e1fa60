"""Recovery and accuracy figures against hand-made cases and scikit-learn's index."""

from __future__ import annotations

import numpy as np
import pytest

from dpcfl_net.clustering.metrics import (
    accuracy_summary,
    adjusted_rand_index,
    assignment_accuracy,
    minority,
    minority_recovered,
    recovered,
)

TRUE = [0, 0, 1, 1, 1, 2, 2, 2]


def test_recovered_whatever_the_names():
    assert recovered(TRUE, [7, 7, 0, 0, 0, 3, 3, 3])
    assert not recovered(TRUE, [7, 7, 0, 0, 3, 3, 3, 3])
    assert not recovered(TRUE, [0, 0, 1, 1, 1, 1, 1, 1])
    assert not recovered(TRUE, [0, 0, 1, 1, 1, 2, 2, None])
    assert not recovered([0, 0, 1], [0, 0, None])


def test_minority_recovered_needs_it_alone_and_whole():
    assert minority(TRUE) == 0
    assert minority_recovered(TRUE, [5, 5, 1, 1, 1, 1, 1, 1])
    assert not minority_recovered(TRUE, [5, 5, 5, 1, 1, 2, 2, 2])
    assert not minority_recovered(TRUE, [5, 4, 1, 1, 1, 2, 2, 2])
    assert not minority_recovered(TRUE, [None, None, 1, 1, 1, 2, 2, 2])


def test_clusters_of_equal_size_have_no_minority():
    equal = [4, 4, 2, 2]
    assert minority(equal) is None
    assert minority([1, 1]) is None
    assert minority_recovered(equal, equal) is None
    assert accuracy_summary([0.5, 0.7, 0.9, 0.9], equal)["accuracy_minority"] is None


def test_adjusted_rand_index_is_scikit_learns():
    from sklearn.metrics import adjusted_rand_score

    rng = np.random.default_rng(0)
    for _ in range(50):
        true, found = rng.integers(0, rng.integers(1, 5), 9).tolist(), rng.integers(0, rng.integers(1, 5), 9).tolist()
        assert adjusted_rand_index(true, found) == pytest.approx(adjusted_rand_score(true, found))
    assert adjusted_rand_index(TRUE, TRUE) == 1
    assert adjusted_rand_index([0], [0]) == 1
    assert adjusted_rand_index([0, 0, 1, 1], [3, 3, None, None]) == pytest.approx(
        adjusted_rand_score([0, 0, 1, 1], [3, 3, 4, 5])
    )


def test_assignment_accuracy_takes_the_best_names():
    assert assignment_accuracy(TRUE, [2, 2, 0, 0, 0, 1, 1, 1]) == 1
    assert assignment_accuracy(TRUE, [2, 2, 0, 0, 1, 1, 1, 1]) == 7 / 8
    assert assignment_accuracy(TRUE, [0] * 8) == 3 / 8
    assert assignment_accuracy(TRUE, list(range(8))) == 3 / 8
    assert assignment_accuracy(TRUE, [None, 0, 1, 1, 1, 2, 2, 2]) == 7 / 8
    assert assignment_accuracy(TRUE, [None] * 8) == 0


def test_accuracy_summary():
    values = [0.5, 0.7, 0.9, 0.9, 0.9, 0.8, 0.2, 0.8]
    summary = accuracy_summary(values, TRUE)
    assert summary["accuracy_mean"] == pytest.approx(np.mean(values))
    assert summary["accuracy_minority"] == pytest.approx(0.6)
    assert summary["accuracy_worst"] == 0.2
    assert summary["accuracy_p10"] == pytest.approx(0.41)
    assert summary["accuracy_by_cluster"] == pytest.approx([0.6, 0.9, 0.6])
    assert summary["accuracy_by_client"] == values
