"""Numbers in the tables of docs/explanation/privacy.md are those that the code computes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from conftest import ROOT
from scipy.stats import binom

from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.training.pace import room
from dpcfl_net.training.physical_batches import padded, sizes, slots_for

PAGE = (ROOT / "docs" / "explanation" / "privacy.md").read_text()
ROW = re.compile(r"^\| ([\d,]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|$", re.MULTILINE)
COUNTS = re.compile(r"^\| ([\d,]+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


@pytest.mark.parametrize("row", ROW.findall(PAGE), ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_epsilons_of_random_allocation_are_those_of_the_accountant(row):
    records, batch, z, epsilon, saved, z_of_five = (float(text.replace(",", "")) for text in row)
    batches = math.ceil(records / batch)
    found = accountant.epsilon([AllocatedGaussian(z, batches, 40)], 1e-4)
    assert found == pytest.approx(epsilon, abs=0.0051)  # z is printed with four digits
    assert 100 * (1 - found / 5) == pytest.approx(saved, abs=0.06)
    assert accountant.epsilon([AllocatedGaussian(z_of_five, batches, 40)], 1e-4) == pytest.approx(5, abs=2e-3)


def test_the_table_of_random_allocation_is_found():
    assert len(ROW.findall(PAGE)) == 4


def test_the_batches_of_a_constant_pace_are_those_of_the_trainer():
    most = room(2000, 32 / 2000, 40 * math.ceil(2000 / 32), 5, 0.01 * 1e-4)
    size, pieces = padded(np.arange(32), most)
    slots = slots_for(32)
    assert {len(sizes(drawn, slots)) for drawn in range(15, 65)} == {1, 2}
    assert f"| {len(pieces)} of {size} instead of 1 or 2 of at most {slots} |" in PAGE


@pytest.mark.parametrize("row", COUNTS.findall(PAGE), ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_epsilons_of_exact_counts_are_those_of_samples_of_known_size(row):
    records, batch, steps, *printed = (float(text.replace(",", "")) for text in row)
    z = accountant.calibrate(lambda z: [SampledGaussian(z, batch / records, int(steps))], 5, 1e-4)
    for others, epsilon in zip((0, 1), printed, strict=True):
        assert _epsilon_with_counts(int(records), batch / records, int(steps), z, others) == pytest.approx(epsilon, abs=0.051)


def test_the_table_of_exact_counts_is_found():
    assert len(COUNTS.findall(PAGE)) == 3


def _epsilon_with_counts(records: int, rate: float, steps: int, z: float, others: int) -> float:
    """Epsilon at delta 1e-4 if counts are known, and all other gradients are -others, that of the record is 1 or removed."""
    interval, points = 2e-4, 2**19
    x, count = np.linspace(-9 * z - 1, 9 * z + 3, 4001), np.arange(records + 1)
    chance = binom.pmf(count, records, rate)
    rates, chance = (each[chance > 1e-14, None] for each in (count / records, chance))
    out, present, removed = (np.exp(-((x - mean) ** 2) / (2 * z**2)) for mean in (0, 1 + others, others))
    with_record, without = ((1 - rates) * out + rates * own for own in (present, removed))
    losses = np.rint(np.log(with_record / without) / interval).astype(int)
    masses = np.bincount(losses.ravel() % points, (chance * with_record / out.sum()).ravel(), points)
    composed = np.fft.irfft(np.fft.rfft(masses) ** steps, points)[: points // 2]
    epsilons = interval * np.arange(points // 2)
    # delta(e) is the sum over larger losses l of m (1 - e^(e - l)).
    above, weighed = (np.cumsum(each[::-1])[::-1] for each in (composed, composed * np.exp(-epsilons)))
    return float(epsilons[np.argmax(above - np.exp(epsilons) * weighed <= 1e-4)])
