"""Base of reproductions: rows, figures, and a paper's claims compared with measurements."""

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

if TYPE_CHECKING:
    from dpcfl_net.report.figures import Figure
    from dpcfl_net.results.compare import Result
    from dpcfl_net.results.tables import Table

Scale = Literal["laptop", "paper"]
SCALES: tuple[Scale, ...] = ("laptop", "paper")


@dataclass(frozen=True)
class Claim:
    """A claim of a paper compared with a measurement.

    Attributes:
        text: The claim.
        measured: The measurement.
        holds: Whether they agree.
        cause: Likely cause of a disagreement; empty if unknown.
    """

    text: str
    measured: str
    holds: bool
    cause: str = ""

    def line(self) -> str:
        """Format the claim as one line."""
        cause = f"; likely cause: {self.cause}" if self.cause and not self.holds else ""
        return f"claim: {self.text}; measured: {self.measured}; holds: {'yes' if self.holds else 'no'}{cause}"


@dataclass
class ReproductionResult:
    """Result of a reproduction.

    Attributes:
        rows: Rows of data.csv, values by column.
        claims: Claims of the paper.
        figures: Figures of the report.
        tables: Tables of the report.
        notes: Sentences on differences from the paper.
    """

    rows: list[dict[str, Any]]
    claims: list[Claim]
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Context(Protocol):
    """Environment of a reproduction."""

    @property
    def scale(self) -> Scale:
        """ "laptop": sizes for two cores; "paper": the paper's settings."""

    @property
    def folder(self) -> Path:
        """Existing folder for data.csv, claims.json and report.html."""

    def say(self, line: str, /) -> None:
        """Print a progress line."""

    def results(self, config: Path, axes: Mapping[str, Sequence[Any]]) -> list[Result]:
        """Run a configuration for every combination of `axes` and return the results in that order.

        Finished runs are reused.

        Args:
            config: The configuration file.
            axes: Values by dotted key.

        Raises:
            RunFailed: With the combinations that have no result.
        """


class Reproduction:
    """One figure of one paper; subclasses are found by their `name`, such as r-dpcfl/fig3."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    title: ClassVar[str] = ""

    def compute(self, context: Context) -> ReproductionResult:
        """Compute rows, figures, tables and claims.

        Args:
            context: Scale, folder and federations.

        Raises:
            RunFailed: If a federation has no result.
        """
        raise NotImplementedError


@cache
def registry() -> dict[str, type[Reproduction]]:
    """Return every reproduction of this package by name."""
    package = importlib.import_module("dpcfl_net.reproduce")
    found: dict[str, type[Reproduction]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"dpcfl_net.reproduce.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Reproduction) and value.name:
                found[value.name] = value
    return dict(sorted(found.items()))


def find(name: str) -> type[Reproduction]:
    """Return a reproduction by its name.

    Raises:
        ConfigError: With the nearest name, or all names.
    """
    if name in registry():
        return registry()[name]
    near = nearest(name, registry())
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(registry())}"
    raise ConfigError(f"unknown figure {shown(name)}: {hint}")


def folder_name(reproduction: type[Reproduction], scale: Scale) -> str:
    """Return the folder name <paper>-<figure>-<scale>."""
    return f"{reproduction.name.replace('/', '-')}-{scale}"


def write(reproduction: type[Reproduction], outcome: ReproductionResult, context: Context) -> Path:
    """Write data.csv, claims.json and report.html.

    Args:
        reproduction: The reproduction.
        outcome: Its result.
        context: Its scale and folder.

    Returns:
        Path of the report.
    """
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
        context.folder / "report.html",
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
