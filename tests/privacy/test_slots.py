"""Slots in a plan, and the events that they cost."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dpcfl_net.federation.claim import plan_events, protected, unprotected
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.data_free import DataFree
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.slots import CentralSlot, DPSGDSlot, LabelledCentralSlot, LabelSlot, SecureSlot, SelectionSlot, StageSlot

KEYS, MASKED, UNMASK = StageSlot("secure_keys"), SecureSlot("masked_update", 0.25), StageSlot("secure_unmask")


def test_a_masked_vector_is_one_sampled_release_and_a_stage_none():
    assert MASKED.event(1.5) == SampledGaussian(1.5, 0.25, 1)
    assert KEYS.event(None) == KEYS.event(2.0, "replace-one") == DataFree()
    with pytest.raises(ValueError, match="no noise multiplier"):
        MASKED.event(None)


def test_noise_is_calibrated_for_the_masked_vectors_only_in_the_order_of_the_plan():
    train = DPSGDSlot("train", 0.1, 3)
    plan = [KEYS, MASKED, UNMASK, train, KEYS, MASKED, UNMASK]
    assert protected(plan) == [MASKED, train, MASKED]
    assert plan_events(protected(plan), 2.0, "zero-out") == [SampledGaussian(2.0, 0.25, 2), SampledGaussian(2.0, 0.1, 3)]
    assert plan_events(plan, 2.0, "zero-out").count(DataFree()) == 2
    assert unprotected(plan) == []


@pytest.mark.parametrize(("adjacency", "moves"), [("zero-out", (0, 1)), ("replace-one", (-1, 0, 1))])
def test_a_selection_costs_the_largest_range_of_its_log_probability_ratios(adjacency, moves):
    """A record that is left out or replaced moves the count of each of three models by one of the moves."""
    eta, counts = 0.3, np.array([4, 9, 6])

    def log_probabilities(counts):
        return eta * counts - np.log(np.exp(eta * counts).sum())

    ratios = [log_probabilities(counts + np.array(each)) - log_probabilities(counts) for each in product(moves, repeat=3)]
    assert SelectionSlot("select", eta).event(None, adjacency).epsilon == pytest.approx(max(np.ptp(each) for each in ratios))


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_an_epoch_of_an_allocation_counts_from_its_first_step_on(steps, epochs):
    assert DPSGDSlot("train", 0.25, 8, "allocation").ran(1.5, steps) == AllocatedGaussian(1.5, 4, epochs)


@pytest.mark.parametrize("shares", [(0.5, 0.6), (0.5, 0.4), (1.0, 0.0), (1.5, -0.5)])
def test_parts_of_a_round_share_its_noise_whole(shares):
    parts = tuple(zip(("labels", "sums"), shares, strict=True))
    with pytest.raises(ValueError, match="positive shares that add up to 1"):
        CentralSlot("round", "fixed", 5, 20, parts)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DPSGDSlot("train", 0.1, 5, "fixed"), "sampling must be 'poisson' or 'allocation', got 'fixed'"),
        (lambda: CentralSlot("round", "Poisson", 5, 20), "sampling must be 'poisson' or 'fixed', got 'Poisson'"),
        (
            lambda: LabelledCentralSlot("round", "poisson", 5, 20, label_epsilon=1.0),
            "sampling must be 'fixed' for labels of a sample, got 'poisson'",
        ),
        (
            lambda: LabelSlot("label", "laplace", 1.0, 2),
            "mechanism must be 'randomised-response' or 'exponential', got 'laplace'",
        ),
    ],
)
def test_a_slot_of_a_misspelt_kind_is_refused(make, sentence):
    """It was taken for the default kind: the client sampled, and was charged, in another way than the plan said."""
    with pytest.raises(ValueError, match=sentence):
        make()
