"""Base of reproductions: rows, figures, claims with their verdicts, and the files of a finished cell."""

from __future__ import annotations

import importlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.csv_text import csv_text
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.names import nearest
from dpcfl_net.core.run_folder import REPORT
from dpcfl_net.reproduce.claims import Claim, Decision, Judged, judge
from dpcfl_net.results.statistics import LEVEL

if TYPE_CHECKING:
    from dpcfl_net.report.figures import Figure
    from dpcfl_net.results.result import Result
    from dpcfl_net.results.tables import Table

Row = dict[str, Any]  # a line of data.csv
Scale = Literal["laptop", "paper"]
Grid = tuple[Path, Mapping[str, Sequence[Any]]]  # configuration file; dotted key to its values
SCALES: tuple[Scale, ...] = ("laptop", "paper")
CLAIMS, ROWS = "claims.json", "data.csv"  # claims.json is written last: a folder that has it is complete
FINISHED, PARTIAL = "finished", "partial"  # states of claims.json; partial: some runs of the figure are missing

HOW_JUDGED = (
    "A claim holds, or does not hold, if the 95 % interval of its paired seeds lies on one side of its margin, after Holm's "
    "correction over the claims of the figure; otherwise it is undecided. Exact claims need no seeds."
)

UNCOUNTED_LOOK = (
    "The folder, or that of --earlier, had a result of other runs, whose claims were tested before. That look is not counted: the levels "
    "hold only if the number of seeds was fixed before the first result. --earlier counts looks."
)


class OutOfTime(Exception):
    """The time budget is spent, and a figure that needs all its runs has some missing."""


@dataclass(frozen=True)
class Earlier:
    """An earlier result of a figure.

    Attributes:
        rows: Lines of its data.csv.
        looks: How often its claims were tested, each time with more seeds than before; 0: not yet.
        decided: Text of a claim to the look that decided it.
        uncounted_look: True if its claims were tested in another look, too, which `looks` does not count.
    """

    rows: Sequence[Row] = ()
    looks: int = 0
    decided: Mapping[str, Decision] = field(default_factory=dict)
    uncounted_look: bool = False


@dataclass
class ReproductionResult:
    """Everything that a reproduction computed.

    Attributes:
        rows: Lines of data.csv; each maps a column to its value.
        claims: Claims of the paper.
        figures: Plots of the report.
        tables: Tables of the report.
        notes: Sentences on differences to the paper.
        runs: Number of complete runs behind it; counted only by figures that can be computed from a part of their runs.
        planned_runs: Number of runs of the whole figure, if counted.
        looks: How often the claims were judged, each time with more seeds than before; this time included.
        decided: Text of a claim to the look that decided it.
    """

    rows: list[dict[str, Any]]
    claims: list[Claim]
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: int = 0
    planned_runs: int = 0
    looks: int = 1
    decided: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """True if some runs are missing."""
        return self.runs < self.planned_runs

    def judged(self) -> list[Judged]:
        """Return every claim with its verdict; Holm's correction covers the claims of this figure.

        Every further look has half of the level of the one before: 5 %, 2.5 %, 1.25 % ... So over all looks at its data a figure has a
        wrongly decided claim with probability below 10 %.
        """
        before = {text: decision for text, decision in self.decided.items() if decision.look < self.looks}
        return judge(self.claims, 1 - (1 - LEVEL) / 2 ** (self.looks - 1), before, partial=self.partial)


class Context(Protocol):
    """Environment of a reproduction: its scale, its folder, progress messages, and complete runs."""

    @property
    def scale(self) -> Scale:
        """laptop: sizes for two cores; paper: the paper's settings."""

    @property
    def folder(self) -> Path:
        """Existing folder for data.csv, claims.json and report.html."""

    def say(self, line: str, /) -> None:
        """Print a line of progress."""

    @property
    def asked_seeds(self) -> int | None:
        """Number of seeds that the user asked for."""

    def seeds(self, usual: Sequence[int], /) -> Sequence[int]:
        """Return the seeds to run: 0 to asked_seeds - 1, else the usual ones of the figure."""

    @property
    def earlier(self) -> Earlier:
        """Earlier result of the figure that the user gave; without one it is empty."""

    def finished(self, grids: Sequence[Grid]) -> list[list[Result]]:
        """Run as many combinations of several configurations as there is time for, the first ones first.

        Args:
            grids: Configuration files with their axes.

        Returns:
            For each of them one result per combination that has finished, now or before, in the order of the axes.

        Raises:
            RunFailed: If a combination that ran now has failed.
        """


class Reproduction(ABC):
    """One figure of one paper.

    Attributes:
        name: Registered name, for example r-dpcfl/fig3.
        paper: Citation.
        title: Title of the report.
        complete_runs: True if it needs complete runs, which take hours for a whole figure.
        any_scale: True if it computes the same at every scale, as formulas do.
        run_columns: Columns of data.csv that together name a run; with them earlier lines can stand for runs (`planned.measure`).
        value_columns: Columns of data.csv with a number in every line of a run; earlier lines without it are refused.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    title: ClassVar[str] = ""
    complete_runs: ClassVar[bool] = False
    any_scale: ClassVar[bool] = False
    run_columns: ClassVar[Sequence[str]] = ()
    value_columns: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def compute(self, context: Context) -> ReproductionResult:
        """Compute rows, figures, tables and claims.

        Args:
            context: Scale, folder and access to complete runs.

        Returns:
            The computed result.
        """


@cache
def registry() -> dict[str, type[Reproduction]]:
    """Return every reproduction that a module of this package defines, by name."""
    package = importlib.import_module("dpcfl_net.reproduce")
    found: dict[str, type[Reproduction]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for value in vars(importlib.import_module(f"dpcfl_net.reproduce.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Reproduction) and value.name:
                found[value.name] = value
    return dict(sorted(found.items()))


def find(name: str) -> type[Reproduction]:
    """Return the reproduction of that name.

    Raises:
        ConfigError: If no reproduction has the name; the message names the nearest one, or all.
    """
    if name in registry():
        return registry()[name]
    near = nearest(name, registry())
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(registry())}"
    raise ConfigError(f"unknown figure {shown(name)}: {hint}")


def packaged(name: str) -> Path:
    """Path of a configuration that comes with the package.

    Args:
        name: Folder and name without ending, as in `rr_cluster/regression`.
    """
    from dpcfl_net.experiment.packaged import PACKAGED

    return PACKAGED / f"{name}.yaml"


def folder_name(reproduction: type[Reproduction], scale: Scale) -> str:
    """Return the name of the output folder: <paper>-<figure>-<scale>."""
    return f"{reproduction.name.replace('/', '-')}-{scale}"


def write(reproduction: type[Reproduction], outcome: ReproductionResult, context: Context) -> Path:
    """Write data.csv, report.html and, last, claims.json to the context's folder.

    Args:
        reproduction: The computed reproduction.
        outcome: Its result.
        context: Scale and folder.

    Returns:
        Path of report.html.
    """
    from dpcfl_net.report.pages import write_page
    from dpcfl_net.reproduce.intervals import of_claims

    _write_rows(context.folder / ROWS, outcome.rows)
    judged = outcome.judged()
    page = write_page(
        context.folder / REPORT,
        title=f"{reproduction.name}: {reproduction.title}",
        lead=[
            reproduction.paper,
            f"Scale: {context.scale}.",
            *_missing(outcome),
            HOW_JUDGED,
            *_looked(outcome),
            *outcome.notes,
        ],
        figures=[*of_claims(outcome.claims), *outcome.figures],
        tables=[claims_table(judged), *outcome.tables],
    )
    document = {
        "name": reproduction.name,
        "paper": reproduction.paper,
        "title": reproduction.title,
        "scale": context.scale,
        "state": PARTIAL if outcome.partial else FINISHED,
        **({"runs": [outcome.runs, outcome.planned_runs]} if outcome.partial else {}),
        "asked_seeds": context.asked_seeds,
        "looks": outcome.looks,
        "claims": [one.document() for one in judged],
        "notes": outcome.notes,
    }
    write_atomically(context.folder / CLAIMS, json.dumps(document, indent=1) + "\n")
    return page


def _missing(outcome: ReproductionResult) -> list[str]:
    return [f"Partial: {outcome.runs} of {outcome.planned_runs} runs."] if outcome.partial else []


def _looked(outcome: ReproductionResult) -> list[str]:
    if outcome.looks == 1:
        return []
    level = 1 - (1 - LEVEL) / 2 ** (outcome.looks - 1)
    return [
        f"The claims were judged before, with fewer seeds. This is look {outcome.looks}, with {level:.4g} instead of {LEVEL:.2g} as confidence. "
        "A claim that an earlier look decided, and that has the same seeds as then, keeps its verdict."
    ]


def claims_table(judged: Sequence[Judged]) -> Table:
    """Tabulate claims with their verdicts, and with causes where a claim has one."""
    from dpcfl_net.results.tables import Table

    columns = ["claim", "measured", "verdict", "basis", *(["cause"] if any(one.cause for one in judged) else [])]
    rows = [[one.claim.text, one.claim.measured, one.verdict, one.basis, one.cause][: len(columns)] for one in judged]
    return Table("Claims of the paper and measured values", columns, rows)


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        file.write(csv_text(columns, ([row.get(key) for key in columns] for row in rows)))
