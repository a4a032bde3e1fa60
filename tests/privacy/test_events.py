"""Privacy events: recorded format, merging, ranks, and that an event type alone is enough for the accountant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.accounting.accountant import calibrate, epsilon
from dpcfl_net.privacy.accounting.composition import symmetric
from dpcfl_net.privacy.accounting.document import account
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.base import LossSpread, Mechanism, event_types, merge, read_event
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.data_free import DataFree
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.events.unprotected import Unprotected

EVENTS = [
    SampledGaussian(1.5, 0.1, 7),
    FixedSizeGaussian(1.5, 10, 100, 7),
    BoundedRangeSelection(0.5, 7),
    AllocatedGaussian(1.5, 10, 7),
    RandomisedResponse(0.5, 4, 7),
    LabelledFixedSizeGaussian(1.5, 0.5, 4, 10, 100, 7),
    DataFree(),
    Unprotected("raw"),
]


def test_every_type_is_found_in_the_order_in_which_its_numbers_are_added():
    assert list(event_types().values()) == [type(event) for event in EVENTS]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_read_as_it_was_written(event):
    assert event.as_json()["type"] == type(event).__name__
    assert read_event(event.as_json()) == event
    with pytest.raises((KeyError, TypeError)):
        read_event(event.as_json() | {"unknown": 1})


def test_equal_mechanisms_are_merged_and_others_are_not():
    plan = dict.fromkeys(EVENTS, 3) | {SampledGaussian(1.5, 0.1, 2): 2, SampledGaussian(1.5, 0.2, 0): 4}
    merged = [SampledGaussian(1.5, 0.1, 25), *(event.with_runs(3 * event.runs) for event in EVENTS[1:])]
    assert merge(plan) == merged
    assert EVENTS[-1].with_runs(3) == EVENTS[-1]


def test_messages_without_data_cost_nothing():
    noisy = [SampledGaussian(1.5, 0.1, 7)]
    for accountant in ("pld", "rdp"):
        assert epsilon([DataFree()] * 4, 1e-5, accountant=accountant) == 0
        assert epsilon([DataFree(), *noisy], 1e-5, accountant=accountant) == epsilon(noisy, 1e-5, accountant=accountant)
    assert epsilon([DataFree(), BoundedRangeSelection(0.1, 1)], 1e-5, "replace-one") > 0
    assert DataFree().counted() is None
    assert DataFree().weight == 0 < SampledGaussian(1e6, 1e-6, 1).weight
    document = {"events": [{"type": "DataFree"}, {"type": "SampledGaussian", "sampling_rate": 0.1, "steps": 7}], "delta": 1e-5}
    answer = account(document | {"target_epsilon": 1.0})
    alone = account(document | {"events": document["events"][1:], "target_epsilon": 1.0})
    assert answer == alone
    with pytest.raises(ConfigError, match="noise_multiplier: unknown key"):
        account({"events": [{"type": "DataFree", "noise_multiplier": 1.0}], "delta": 1e-5})


def test_weights_rank_events_by_their_cost():
    assert SampledGaussian(1.5, 0.1, 7).weight < SampledGaussian(1.5, 0.1, 8).weight < SampledGaussian(1.5, 1.0, 8).weight
    assert FixedSizeGaussian(1.5, 10, 100, 7).weight == SampledGaussian(1.5, 0.1, 7).weight
    assert BoundedRangeSelection(2.0, 3).weight == 3
    labelled = [LabelledFixedSizeGaussian(1.5, label_epsilon, 4, 10, 100, 7).weight for label_epsilon in (0.0, 0.5, 2.0)]
    assert labelled == sorted(labelled)
    assert labelled[0] == pytest.approx(FixedSizeGaussian(1.5, 10, 100, 7).weight)
    assert SampledGaussian(1e-3, 0.1, 1).weight == Unprotected("raw").weight == math.inf


def test_next_to_no_noise_on_all_records_is_no_guarantee_and_no_error():
    assert epsilon([SampledGaussian(1e-200, 1.0, 5)], 1e-5) == math.inf


@dataclass(frozen=True)
class RandomisedResponse(Mechanism):
    """Answers of pure epsilon 1 / noise_multiplier each: a mechanism that the package does not know."""

    noise_multiplier: float
    count: int
    runs_field: ClassVar[str | None] = "count"

    @property
    def weight(self):
        return self.count * self.noise_multiplier**-2 / 4

    def losses(self, adjacency, interval):
        top, pure = math.ceil(1 / (self.noise_multiplier * interval)), 1 / self.noise_multiplier
        profile = np.maximum(-np.expm1(interval * np.arange(top + 1) - pure), 0) / (1 + math.exp(-pure))
        return [((symmetric(profile, interval),), self.count)]

    def renyi(self, orders):
        pure = 1 / self.noise_multiplier
        heads, tails = orders * pure - np.logaddexp(0, pure), (1 - orders) * pure - np.logaddexp(0, pure)
        return self.count * np.logaddexp(heads, tails) / (orders - 1)

    def total_variation(self, adjacency):
        return self.count * math.tanh(0.5 / self.noise_multiplier)

    def spread(self, adjacency):
        return LossSpread(self.count * self.noise_multiplier**-2, self.count, 2 / self.noise_multiplier)


def test_a_new_mechanism_needs_nothing_but_its_own_class():
    assert epsilon([RandomisedResponse(2.0, 1)], 1e-9) == pytest.approx(0.5, rel=1e-3)
    k, delta, pure = 30, 1e-5, 0.2
    # Randomised response, exactly: heads of k coins of bias e^E / (1 + e^E).
    bias, y = math.exp(pure) / (1 + math.exp(pure)), epsilon([RandomisedResponse(1 / pure, k)], delta)
    exact = sum(
        math.comb(k, i) * max(0.0, bias**i * (1 - bias) ** (k - i) - math.exp(y) * (1 - bias) ** i * bias ** (k - i))
        for i in range(k + 1)
    )
    assert exact == pytest.approx(delta, rel=5e-3)
    together = [RandomisedResponse(1 / pure, k), SampledGaussian(2.0, 1.0, 1), BoundedRangeSelection(0.1, 3)]
    assert y < epsilon(together, delta) < y + epsilon(together[1:], delta)
    noise = calibrate(lambda z: [RandomisedResponse(z, k), SampledGaussian(3 * z, 0.1, 4)], 2.0, delta)
    assert 1.99 < epsilon([RandomisedResponse(noise, k), SampledGaussian(3 * noise, 0.1, 4)], delta) <= 2
