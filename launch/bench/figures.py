"""Measured figures with their targets, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dpcfl_net.launch.bench.timing import Sample, Spread

OURS = "dpcfl"


@dataclass(frozen=True)
class Target:
    """Target of a figure.

    Attributes:
        bound: Smallest quotient (theirs / dpcfl's), or largest value of dpcfl.
        against: Way of the quotient; None: `bound` is the largest value of dpcfl.
    """

    bound: float
    against: str | None = None

    def text(self) -> str:
        """Format the target."""
        return f"at most {self.bound:g}" if self.against is None else f"{self.against} / dpcfl at least {self.bound:g}"


@dataclass(frozen=True)
class Way:
    """One way to do the same.

    Attributes:
        value: In the figure's unit; of times: processor time.
        wall: Elapsed time in the same unit; None for sizes.
        quotient: value / value of dpcfl within a repetition; above 1, dpcfl is better. None for dpcfl.
    """

    value: Spread
    wall: Spread | None = None
    quotient: Spread | None = None


@dataclass(frozen=True)
class Figure:
    """One case of a row.

    Attributes:
        case: What was measured.
        unit: Unit of the values.
        ways: dpcfl, and others by name.
        targets: What dpcfl should reach.
        note: A remark, such as the shares of the processes.
    """

    case: str
    unit: str
    ways: dict[str, Way]
    targets: tuple[Target, ...] = ()
    note: str = ""

    @classmethod
    def of_times(
        cls, case: str, unit: str, samples: Mapping[str, Sequence[Sample]], targets: Sequence[Target] = (), scale: float = 1e3
    ) -> Figure:
        """Build a figure from interleaved samples.

        Args:
            case: What was measured.
            unit: Unit after scaling.
            samples: Samples by way.
            targets: Targets.
            scale: Factor on seconds.
        """
        ways = _ways({name: [sample.cpu * scale for sample in found] for name, found in samples.items()})
        wall = {name: Spread.of([sample.wall * scale for sample in found]) for name, found in samples.items()}
        return cls(case, unit, {name: Way(way.value, wall[name], way.quotient) for name, way in ways.items()}, tuple(targets))

    @classmethod
    def of_values(cls, case: str, unit: str, values: Mapping[str, Sequence[float]], targets: Sequence[Target] = ()) -> Figure:
        """Build a figure from values such as bytes; arguments as for `of_times`."""
        return cls(case, unit, _ways(values), tuple(targets))

    def reached(self, target: Target) -> float | None:
        """Return what is compared with a target; None if its way was not measured."""
        if target.against is None:
            return self.ways[OURS].value.median
        way = self.ways.get(target.against)
        return None if way is None or way.quotient is None else way.quotient.median

    def verdict(self, target: Target) -> str:
        """Return "hit", "miss" or "not measured"."""
        reached = self.reached(target)
        if reached is None:
            return "not measured"
        return "hit" if (reached <= target.bound if target.against is None else reached >= target.bound) else "miss"

    def as_json(self) -> dict[str, Any]:
        """Return the figure as a JSON object."""
        targets = [
            {**asdict(target), "reached": self.reached(target), "verdict": self.verdict(target)} for target in self.targets
        ]
        return {**asdict(self), "targets": targets}


def _ways(values: Mapping[str, Sequence[float]]) -> dict[str, Way]:
    ours = values[OURS]
    quotients = {
        name: Spread.of([theirs / own for theirs, own in zip(found, ours, strict=True)])
        for name, found in values.items()
        if name != OURS and all(own > 0 for own in ours)
    }
    return {name: Way(Spread.of(found), None, quotients.get(name)) for name, found in values.items()}


@dataclass(frozen=True)
class Result:
    """A measured row.

    Attributes:
        row: Name of the row.
        title: What it measures.
        figures: Its cases.
        skipped: Others that were not measured, and why.
    """

    row: str
    title: str
    figures: tuple[Figure, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        figures = [figure.as_json() for figure in self.figures]
        return {"row": self.row, "title": self.title, "figures": figures, "skipped": self.skipped}
