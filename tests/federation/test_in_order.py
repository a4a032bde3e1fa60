"""Answers are passed on in client order whatever the order of arrival, the window bounds what waits, and sums keep their bits."""

import numpy as np
import pytest

from dpcfl_net.federation.aggregation import BLOCK, HELD, LARGE, ModelMeans, RunningMean, mean
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.in_order import LEAST_WINDOW, InOrder, window


def answer(client):
    return {"update": np.full(3, client, np.float32)}


def test_any_order_of_arrival_gives_client_order():
    for seed in range(50):
        rng, passed = np.random.default_rng(seed), []
        order = InOrder(range(20), lambda client, tensors, passed=passed: passed.append((client, float(tensors["update"][0]))))
        silent = set(rng.permutation(20)[:5].tolist())
        for client in rng.permutation(20).tolist():
            if client in silent:
                order.close(client)
            else:
                order.put(client, answer(client))
        assert passed == [(client, float(client)) for client in range(20) if client not in silent]
        assert (order.count, order.head) == (15, None)


def test_answers_behind_a_silent_client_are_passed_on_at_the_end():
    passed = []
    order = InOrder([4, 2, 9], lambda client, tensors: passed.append(client))
    order.put(9, answer(9))
    order.put(4, answer(4))
    assert (passed, order.head, order.count) == ([], 2, 2)
    order.end()
    assert passed == [4, 9]


def test_the_window_bounds_the_clients_ahead_of_the_first_open_one():
    order = InOrder(range(10), lambda client, tensors: None, window=3)
    assert [client for client in range(10) if order.admits(client)] == [0, 1, 2]
    order.put(1, answer(1))
    assert not order.admits(3)  # client 0 is still open
    order.close(0)
    assert [client for client in range(10) if order.admits(client)] == [0, 1, 2, 3, 4]


def test_a_client_answers_once():
    order = InOrder(range(3), lambda client, tensors: None)
    order.put(0, answer(0))
    order.close(2)
    for client in (0, 2):
        with pytest.raises(ValueError, match="closed, or has answered"):
            order.put(client, answer(client))


def test_a_window_holds_many_small_updates_and_few_large_ones():
    assert window(30_000) > 1000
    assert window(100_000_000) == LEAST_WINDOW


def test_a_running_mean_has_the_bits_of_a_sum_in_client_order():
    rng = np.random.default_rng(1)
    updates = {client: rng.standard_normal(100).astype(np.float32) for client in range(30)}
    weights = {client: float(rng.integers(1, 100)) for client in updates}
    plain, weighted = RunningMean(), RunningMean(weights)
    for client, update in updates.items():
        plain.add([(client, update)])
        weighted.add([(client, update)])
    total = np.zeros(100)
    for update in updates.values():
        total += update
    assert np.array_equal(plain.value(), (total / 30).astype(np.float32))
    assert np.array_equal(plain.value(), mean(dict(reversed(updates.items()))))
    exact = np.average(np.stack([*updates.values()]).astype(np.float64), axis=0, weights=[*weights.values()])
    assert np.allclose(weighted.value(), exact, rtol=1e-6)


def test_a_long_mean_has_the_bits_of_sums_over_whole_updates():
    rng = np.random.default_rng(2)
    updates = rng.standard_normal((3, BLOCK + 1000), dtype=np.float32)
    weights = {0: 0.1, 1: 7.0, 2: 1e-3}
    plain, weighted = RunningMean(), RunningMean(weights)
    for mean_of in (plain, weighted):
        mean_of.add([(0, updates[0])])
        mean_of.add([*enumerate(updates)][1:])
    exact = updates.astype(np.float64)
    assert np.array_equal(plain.sums[1], exact[0] + exact[1] + exact[2])
    assert np.array_equal(weighted.sums[1], weights[0] * exact[0] + weights[1] * exact[1] + weights[2] * exact[2])
    assert np.array_equal(plain.value(), (plain.sums[1] / 3).astype(np.float32))
    assert np.array_equal(plain.value(), mean(dict(enumerate(updates))))


def test_a_model_without_an_update_stays():
    means = ModelMeans(np.ones((2, 3), np.float32))
    means.add(1, 0, np.full(3, 2, np.float32))
    means.add(1, 1, np.full(3, 4, np.float32))
    assert means.moved().tolist() == [[1, 1, 1], [4, 4, 4]]
    assert means.models.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_updates_of_large_models_that_wait_are_added_in_their_order():
    rng = np.random.default_rng(3)
    updates = rng.standard_normal((2 * HELD + 3, LARGE + 8), dtype=np.float32)
    models, rows = np.zeros((2, LARGE + 8), np.float32), rng.integers(0, 2, len(updates))
    weights = {client: 0.1 + client for client in range(len(updates))}
    for given in (None, weights):
        means, one_by_one = ModelMeans(models, given), [RunningMean(given), RunningMean(given)]
        for client, (row, update) in enumerate(zip(rows, updates, strict=True)):
            means.add(int(row), client, update)
            one_by_one[row].add([(client, update)])
        assert np.array_equal(means.sums().totals, [mean_of.sums[1] for mean_of in one_by_one])
        assert means.sums().counts.tolist() == np.bincount(rows).tolist()
        assert np.array_equal(means.moved(), [mean_of.value() for mean_of in one_by_one])


def test_a_client_is_added_to_clipped_sums_once():
    sums = ClippedSums((1, 3), 1.0)
    sums.add(0, [(0, np.full(3, 9, np.float32))])
    with pytest.raises(ValueError, match="client 0 was added before"):
        sums.add(0, [(0, np.zeros(3, np.float32))])
    assert np.linalg.norm(sums.total) <= 1.0
