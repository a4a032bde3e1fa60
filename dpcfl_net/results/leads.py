"""Differences between the rows of a comparison, paired by seed: the choice of the clients' records cancels out."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dpcfl_net.results.compare import Row, terms
from dpcfl_net.results.compare_table import identity
from dpcfl_net.results.number_format import number
from dpcfl_net.results.statistics import LEVEL, interval
from dpcfl_net.results.tables import Table

FIGURES = (("accuracy_mean", "mean"), ("accuracy_minority", "minority"), ("accuracy_worst", "worst"))
REFERENCE = "reference"


@dataclass(frozen=True)
class Lead:
    """Difference between a row and its reference.

    Attributes:
        row: The row.
        reference: The first row with the same privacy and data.
        values: Figure of `FIGURES` to seed to difference in points; seeds that both rows have.
    """

    row: Row
    reference: Row
    values: dict[str, dict[int, float]]

    @property
    def seeds(self) -> int:
        """Number of seeds that both rows have."""
        return max(map(len, self.values.values()), default=0)


def leads(shown: Sequence[Row]) -> list[Lead]:
    """Pair each row with the first row that promises the same privacy and uses the same data.

    Args:
        shown: Rows of a comparison.

    Returns:
        One lead per row that has two seeds or more in common with its reference.
    """
    first: dict[str, Row] = {}
    found = []
    for row in shown:
        reference = first.setdefault(json.dumps(terms(row.results[0])), row)
        if reference is not row:
            found.append(Lead(row, reference, {key: _differences(row, reference, key) for key, _ in FIGURES}))
    return [lead for lead in found if lead.seeds > 1]


def table(shown: Sequence[Row]) -> Table | None:
    """Tabulate the leads of rows with means and intervals.

    Args:
        shown: Rows of a comparison.

    Returns:
        The table; None if no row has two seeds in common with its reference.
    """
    found = {id(lead.row): lead for lead in leads(shown)}
    references = {id(lead.reference) for lead in found.values()}
    kept = [row for row in shown if id(row) in found or id(row) in references]
    if not kept:
        return None
    named = identity(kept)
    columns = [*named, ("seeds", [_seeds(found.get(id(row))) for row in kept])]
    columns += [(title, [_words(found.get(id(row)), key) for row in kept]) for key, title in FIGURES]
    lines = [list(row) for row in zip(*(words for _, words in columns), strict=True)]
    caption = (
        "differences paired by seed: points of accuracy above the reference, the first row with this privacy and data; "
        f"{LEVEL:.0%} t-intervals, not corrected for multiple comparisons"
    )
    return Table("Differences, paired by seed", [title for title, _ in columns], lines, caption, len(named))


def _differences(row: Row, reference: Row, key: str) -> dict[int, float]:
    """Difference in points by common seed."""
    own, other = _by_seed(row, key), _by_seed(reference, key)
    return {seed: 100 * (own[seed] - other[seed]) for seed in own if seed in other}


def _by_seed(row: Row, key: str) -> dict[int, float]:
    """Mean of a figure over the runs of each seed."""
    found: dict[int, list[float]] = {}
    for result in row.results:
        if (value := number(result.final.get(key))) is not None:
            found.setdefault(result.seed, []).append(value)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def _seeds(lead: Lead | None) -> str:
    return REFERENCE if lead is None else str(lead.seeds)


def _words(lead: Lead | None, key: str) -> str:
    """Mean and interval of one figure, and of how many seeds if not of all; a dash without values."""
    values = [] if lead is None else list(lead.values[key].values())
    if not values:
        return "–"
    between = interval(values)
    words = "" if between is None else f" ({between[0]:+.1f} to {between[1]:+.1f})"
    part = f" ({len(values)}/{lead.seeds})" if lead is not None and len(values) < lead.seeds else ""
    return f"{statistics.fmean(values):+.1f}{words}{part}"
