"""Numbers in the tables of docs/explanation/privacy.md are those that the code computes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from conftest import ROOT

from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.training.pace import room
from dpcfl_net.training.physical_batches import padded, sizes, slots_for

PAGE = (ROOT / "docs" / "explanation" / "privacy.md").read_text()
ROW = re.compile(r"^\| ([\d,]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|$", re.MULTILINE)


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
