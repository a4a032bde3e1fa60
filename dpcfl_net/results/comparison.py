"""Comparison table of runs and sweeps; runs with different privacy or data are refused."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import given_path, write_text
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.results import compare, compare_table, table_text
from dpcfl_net.results import leads as paired
from dpcfl_net.results.fairness import add_fairness
from dpcfl_net.results.result import Result, read_document, read_result, read_sweep, swept_terms
from dpcfl_net.results.summary import run_settings
from dpcfl_net.results.tables import Table


@dataclass(frozen=True)
class Comparison:
    """A comparison of finished runs.

    Attributes:
        results: The runs, each once.
        marked: Runs that are not comparable with the others, each with the differences. Runs with different values of a swept
            setting of privacy or data are not compared with each other.
        target: Mean accuracy up to which rounds and seconds are counted; None: one that all runs reached.
    """

    results: tuple[Result, ...]
    marked: dict[Path, str]
    target: float | None = None

    @classmethod
    def of(
        cls, folders: Sequence[Path], *, force: bool = False, fairness: bool = False, target: float | None = None
    ) -> Comparison:
        """Read the folders of runs and sweeps.

        Args:
            folders: Run folders, and folders of sweeps for all their finished runs; a run that several sweeps share counts once.
            force: Keep runs whose privacy or data differ, with a mark.
            fairness: Add F_acc and F_loss; trains models without privacy unless this host has them cached.
            target: Mean accuracy in (0, 1] up to which rounds and seconds are counted; None: one that all runs reached.

        Returns:
            The comparison.

        Raises:
            ConfigError: If the target is out of range, if a folder has no finished run, or if runs are not comparable and `force` is not set.
        """
        if target is not None and not 0 < target <= 1:
            raise ConfigError(f"target is {target:g}: must be an accuracy above 0 and up to 1, such as 0.7")
        results: list[Result] = []
        apart: list[str] = []
        problems: list[str] = []
        for folder in folders:
            try:
                if SweepFolder(folder).sweep.exists():
                    results += read_sweep(folder)
                    apart += swept_terms(read_document(folder))
                else:
                    results.append(read_result(folder))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        results = compare.distinct(results)
        found = cls(tuple(results), compare.unequal(results, apart), target)
        if found.marked and not force:
            raise compare.refusal(found.marked)
        return found._with_fairness() if fairness else found

    def _with_fairness(self) -> Comparison:
        for result in self.results:
            add_fairness(result.folder, run_settings(result.folder)["data"]["root"])
        return replace(self, results=tuple(read_result(result.folder) for result in self.results))

    @property
    def table(self) -> Table:
        """The table as text: settings that differ, then mean and standard deviation of the figures over seeds."""
        return compare_table.table(compare.rows(self.results), self.marked, self.target)

    @property
    def leads(self) -> Table | None:
        """Differences to the first row with the same privacy and data, paired by seed, as text; None without two common seeds."""
        return paired.table(compare.rows(self.results))

    @property
    def rows(self) -> list[dict[str, str]]:
        """The table as a list of dictionaries, column to text."""
        table = self.table
        return [dict(zip(table.columns, row, strict=True)) for row in table.rows]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dictionary for each run: settings that differ by dotted key, unrounded figures (shares in [0, 1]), bytes and seconds."""
        keys = compare.differing(compare.rows(self.results))
        return [
            {"folder": str(one.folder), "algorithm": one.algorithm, "seed": one.seed, "epsilon": one.epsilon}
            | {key: compare.dotted(one.settings).get(key) for key in keys}
            | one.final
            | {key: one.cost.get(key) for key, _, _ in compare_table.COSTS}
            for one in self.results
        ]

    @property
    def statements(self) -> tuple[list[str], list[str]]:
        """Distinct privacy promises of the runs, and alerts."""
        promises, alerts = compare.statements(self.results)
        return promises, [*alerts, *(f"{folder.name}: {text}" for folder, text in self.marked.items())]

    def to_latex(self) -> str:
        """Return the table as LaTeX with booktabs; the privacy promises and alerts are comments above it."""
        promises, alerts = self.statements
        return table_text.latex(self.table.without_empty_columns(), [f"Privacy: {'; '.join(promises)}", *alerts])

    def to_csv(self, path: Path | str | None = None) -> str:
        """Write one line for each run with unrounded figures.

        Args:
            path: File to write; None writes no file.

        Returns:
            The text.

        Raises:
            ConfigError: If the file cannot be written.
            OSError: If the disk is full.
        """
        text = io.StringIO()
        compare_table.write_csv(text, self.results, self.target)
        if path is not None:
            write_text(given_path(path, "path"), text.getvalue())
        return text.getvalue()

    def __len__(self) -> int:
        return len(self.results)

    def __str__(self) -> str:
        promises, alerts = self.statements
        leads = [] if self.leads is None else ["", self.leads.caption, *self.leads.without_empty_columns().lines(), ""]
        table = self.table.without_empty_columns()
        return "\n".join([*table.lines(), *leads, f"Privacy: {'; '.join(promises)}", *(f"! {alert}" for alert in alerts)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        promises, alerts = self.statements
        found = self.leads
        leads = "" if found is None else f"<p>{escape(found.caption)}</p>{table_text.table_html(found.without_empty_columns())}"
        notes = "".join(f"<p><strong>{escape(alert)}</strong></p>" for alert in alerts)
        return f"{table_text.table_html(self.table.without_empty_columns())}{leads}<p>{escape('; '.join(promises))}</p>{notes}"
