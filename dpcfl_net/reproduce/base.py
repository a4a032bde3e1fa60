"""What a reproduction is: rows, figures, and claims of a paper held against what was measured here."""

from __future__ import annotations

import csv
import importlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.names import nearest
from dpcfl_net.core.run_folder import REPORT

if TYPE_CHECKING:
    from dpcfl_net.report.figures import Figure
    from dpcfl_net.results.compare import Result
    from dpcfl_net.results.tables import Table

Scale = Literal["laptop", "paper"]
SCALES: tuple[Scale, ...] = ("laptop", "paper")


@dataclass(frozen=True)
class Claim:
    """What a paper says (`text`), what was found here (`measured`), whether they agree, and if not why, as far as is known."""

    text: str
    measured: str
    holds: bool
    cause: str = ""

    def line(self) -> str:
        """The claim as it is printed."""
        cause = f"; likely cause: {self.cause}" if self.cause and not self.holds else ""
        return f"claim: {self.text}; measured: {self.measured}; holds: {'yes' if self.holds else 'no'}{cause}"


@dataclass
class ReproductionResult:
    """rows: lines of data.csv, a mapping of column to value each; notes: sentences on what was done otherwise than in the paper."""

    rows: list[dict[str, Any]]
    claims: list[Claim]
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Context(Protocol):
    """What a reproduction is given: how large to compute, a folder of its own, a way to speak, and whole federations."""

    @property
    def scale(self) -> Scale:
        """laptop: sizes that two cores manage; paper: the paper's own settings."""

    @property
    def folder(self) -> Path:
        """Where data.csv, claims.json and report.html go; exists."""

    def say(self, line: str, /) -> None:
        """Tell the person who waits how far it is."""

    def results(self, config: Path, axes: Mapping[str, Sequence[Any]]) -> list[Result]:
        """One finished run for every combination of `axes` (dotted key to values) over a configuration, in that order.

        Runs that are already there are not run again. RunFailed names the combinations without a result.
        """


class Reproduction:
    """One figure of one paper. Subclasses are found by their `name`, such as r-dpcfl/fig3."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    title: ClassVar[str] = ""

    def compute(self, context: Context) -> ReproductionResult:
        """All there is to the figure; says nothing but what was computed."""
        raise NotImplementedError


@cache
def registry() -> dict[str, type[Reproduction]]:
    """Every reproduction by name: whatever file in this package defines one."""
    package = importlib.import_module("dpcfl_net.reproduce")
    found: dict[str, type[Reproduction]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"dpcfl_net.reproduce.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Reproduction) and value.name:
                found[value.name] = value
    return dict(sorted(found.items()))


def find(name: str) -> type[Reproduction]:
    """The reproduction of that name; ConfigError with the nearest one, or all of them."""
    if name in registry():
        return registry()[name]
    near = nearest(name, registry())
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(registry())}"
    raise ConfigError(f"unknown figure {shown(name)}: {hint}")


def folder_name(reproduction: type[Reproduction], scale: Scale) -> str:
    """<paper>-<figure>-<scale>."""
    return f"{reproduction.name.replace('/', '-')}-{scale}"


def write(reproduction: type[Reproduction], outcome: ReproductionResult, context: Context) -> Path:
    """data.csv, claims.json and report.html in the context's folder; returns the page."""
    from dpcfl_net.report.pages import write_page
    from dpcfl_net.results.tables import Table

    _write_rows(context.folder / "data.csv", outcome.rows)
    document = {
        "name": reproduction.name,
        "paper": reproduction.paper,
        "title": reproduction.title,
        "scale": context.scale,
        "claims": [{**asdict(claim), "holds": bool(claim.holds)} for claim in outcome.claims],
        "notes": outcome.notes,
    }
    (context.folder / "claims.json").write_text(json.dumps(document, indent=2) + "\n")
    held = [
        [claim.text, claim.measured, "yes" if claim.holds else "no", "" if claim.holds else claim.cause]
        for claim in outcome.claims
    ]
    claims = Table("What the paper says and what was measured", ["claim", "measured", "holds", "likely cause"], held)
    return write_page(
        context.folder / REPORT,
        title=f"{reproduction.name}: {reproduction.title}",
        lead=[reproduction.paper, f"Scale: {context.scale}.", *outcome.notes],
        figures=outcome.figures,
        tables=[claims, *outcome.tables],
    )


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
