"""Thresholds, holders, witnesses and the certificate of the graph."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dpcfl_net.federation.secure.graph import cannot_split, eigenvalue, regular_graph
from dpcfl_net.federation.secure.terms import WITNESSES, Settings, Terms, neighbours_of, problems, survivors_needed

GRAPH_100 = [1, 3, 4, 5, 7, 8, 9, 11]


def terms(n, **settings):
    return Terms.of("ab" * 32, tuple(range(5, 5 + 2 * n, 2)), Settings(**settings))


@given(st.integers(1, 400), st.integers(0, 30), st.sampled_from([2 / 3, 0.7, 0.9, 1.0]))
@hypothesis_settings(max_examples=60)
def test_thresholds_exclude_two_answers(n, colluders, threshold):
    if problems(n, Settings(threshold, colluders)):
        return
    one = terms(n, threshold=threshold, colluders=colluders)
    assert 3 * one.survivors_needed > 2 * n
    assert one.survivors_needed >= threshold * n - 1e-3
    assert one.survivors_needed <= n
    assert one.honest >= 1
    assert one.holder_count >= one.share_threshold > (one.holder_count + colluders) / 2
    assert len(one.witnesses) >= one.witnesses_needed > (len(one.witnesses) + colluders) / 2


def test_numbers_that_the_documentation_states():
    assert [survivors_needed(n, Settings()) for n in (1, 2, 3, 6, 20, 100)] == [1, 2, 3, 5, 14, 67]
    assert survivors_needed(10, Settings(threshold=0.7)) == 7
    assert survivors_needed(10, Settings(threshold=1.0)) == 10
    assert [neighbours_of(n, Settings()) for n in (1, 20, 64, 65, 100, 1000)] == [0, 19, 63, 64, 64, 132]


@pytest.mark.parametrize("n", [1, 6, 64, 100, 1000])
def test_holders_and_witnesses(n):
    one = terms(n)
    for client in one.group[:7]:
        holders = one.holders(client)
        assert client in holders
        assert list(holders) == sorted(holders)
        assert len(holders) == one.holder_count
        assert set(one.neighbours(client)) == set(holders) - {client}
        assert all(client in one.holders(other) for other in holders)
        assert [one.holders(other)[row] for other, row in zip(holders, one.rows_at_holders(client), strict=True)] == [
            client
        ] * len(holders)
    assert set(one.witnesses) <= set(one.group)
    assert len(one.witnesses) == min(n, WITNESSES)


def test_terms_of_equal_arguments_are_one_object():
    assert terms(100) is terms(100)
    with pytest.raises(ValueError):
        Terms("ab", (1, 1), Settings())


@pytest.mark.parametrize(
    ("n", "settings", "sentence"),
    [
        (6, Settings(colluders=5), "colluders is 5: of 6 clients 5 must answer, one of them honest; must be from 0 to 4"),
        (6, Settings(colluders=-1), "colluders is -1"),
        (6, Settings(threshold=1.5), "threshold is 1.5, must be above 0 and at most 1"),
        (100, Settings(neighbours=63), "neighbours is 63, must be even and at least 64"),
        (1000, Settings(neighbours=64, colluders=20), "neighbours is 64: with 20 colluders and 1000 clients the server could"),
    ],
)
def test_problems(n, settings, sentence):
    assert sentence in problems(n, settings)[0]


@pytest.mark.parametrize("n", [65, 66, 100, 1000, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("neighbours", "colluders"), [(None, 0), (None, 5), (64, 0), (64, 10), (128, 0), (128, 30)])
def test_random_graphs_have_a_certificate(n, neighbours, colluders):
    assert problems(n, Settings(neighbours=neighbours, colluders=colluders)) == ()


@pytest.mark.parametrize(("n", "degree"), [(66, 64), (100, 64), (301, 128), (12, 5), (13, 4), (9, 0), (8, 7)])
def test_graphs_are_regular_and_symmetric(n, degree):
    graph = regular_graph(n, degree)
    joined = np.zeros((n, n), int)
    joined[np.arange(n)[:, None], graph] = 1
    assert graph.shape == (n, degree)
    assert (joined.sum(axis=1) == degree).all()  # no neighbour twice
    assert np.array_equal(joined, joined.T)
    assert not joined.diagonal().any()


def test_graph_is_the_same_on_every_machine():
    assert regular_graph(100, 64)[0, :8].tolist() == GRAPH_100


def test_eigenvalue_is_that_of_the_dense_matrix():
    for n, degree in ((100, 64), (300, 70)):
        graph = regular_graph(n, degree)
        joined = np.zeros((n, n))
        joined[np.arange(n)[:, None], graph] = 1
        assert eigenvalue(graph) == pytest.approx(np.sort(np.abs(np.linalg.eigvalsh(joined)))[-2], rel=1e-6)


def ring_of_cliques(cliques: int, size: int) -> np.ndarray:
    """Cliques without edges between them: regular, and split from the start."""
    rows = np.arange(cliques * size).reshape(cliques, size)
    return np.array([[other for other in rows[at // size] if other != at] for at in range(cliques * size)])


def test_bad_graphs_have_no_certificate():
    cliques = ring_of_cliques(2, 65)
    assert not cannot_split(130, 64, eigenvalue(cliques), 32)
    circle = np.sort((np.arange(400)[:, None] + np.r_[-32:0, 1:33]) % 400, axis=1)  # neighbours on a circle
    assert not cannot_split(400, 64, eigenvalue(circle), 32)
    assert cannot_split(400, 64, eigenvalue(regular_graph(400, 64)), 32)


def splits(graph: np.ndarray, honest: int) -> bool:
    """Brute force: True if two disjoint sets without an edge between them exist, each vertex with `honest` neighbours in its set."""
    n = len(graph)
    near = [sum(1 << other for other in row) for row in graph.tolist()]
    sets = [mask for mask in range(1, 1 << n) if all((near[v] & mask).bit_count() >= honest for v in range(n) if mask >> v & 1)]
    reached = {mask: mask | _union(near[v] for v in range(n) if mask >> v & 1) for mask in sets}
    return any(not reached[one] & other for one, other in itertools.combinations(sets, 2))


def _union(masks) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


@pytest.mark.parametrize(("n", "degree"), [(8, 2), (8, 3), (9, 4), (10, 3), (10, 5), (11, 4), (11, 6), (12, 7)])
def test_certificate_against_brute_force(n, degree):
    graph = regular_graph(n, degree)
    eigen = eigenvalue(graph) if degree < n - 1 else 1.0
    certified = [honest for honest in range(1, degree + 1) if cannot_split(n, degree, eigen, honest)]
    assert not [honest for honest in certified if splits(graph, honest)]


def test_brute_force_finds_splits_and_certificates_exist():
    assert splits(ring_of_cliques(2, 5), 4)
    assert not cannot_split(10, 4, eigenvalue(ring_of_cliques(2, 5)), 4)
    graph = regular_graph(12, 7)
    assert cannot_split(12, 7, eigenvalue(graph), 5)
