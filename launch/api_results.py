"""Results of `sweep` and `tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, overload

from dpcfl_net.report.run import Run
from dpcfl_net.report.sweep import write_sweep
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.number_format import counted, percent
from dpcfl_net.results.table_text import table_html
from dpcfl_net.results.tables import Table


class SweepResult(Sequence[Run]):
    """Finished runs of a sweep, in the order of its grid (the last axis fastest).

    Attributes:
        path: Folder of the sweep; `dpcfl compare` and `dpcfl report` accept it.
        values: Values of each run on the axes, by dotted key.
    """

    def __init__(self, path: Path, runs: Sequence[Run], values: Sequence[Mapping[str, Any]]) -> None:
        self.path, self.values = path, [dict(value) for value in values]
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...

    def __getitem__(self, index: int | slice) -> Run | list[Run]:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def compare(self, *, force: bool = False, fairness: bool = False, target: float | None = None) -> Comparison:
        """Compare the runs as `dpcfl.compare` does."""
        return Comparison.of([self.path], force=force, fairness=fairness, target=target)

    def report(self) -> Path:
        """Write report.html of the sweep; return its path."""
        return write_sweep(self.path)

    def __repr__(self) -> str:
        return f"<SweepResult {self.path}: {counted(len(self), 'run')}>"

    def _repr_html_(self) -> str:
        axes = list(dict.fromkeys(key for values in self.values for key in values))
        rows = [
            [
                *(str(values.get(key, "–")) for key in axes),
                percent(one.final.get("accuracy_mean")),
                one.privacy.statement.headline,
                str(one.path),
            ]
            for values, one in zip(self.values, self, strict=True)
        ]
        table = Table(str(self.path), [*axes, "accuracy", "privacy", "folder"], rows)
        return f"<strong>{escape(table.title)}</strong>{table_html(table)}"


@dataclass(frozen=True)
class TuneResult:
    """A finished tuning.

    Attributes:
        path: Its folder; `dpcfl compare` and `dpcfl report` accept it.
        chosen: Chosen settings by dotted key, by algorithm.
        document: Content of tuning.json: all trials with their scores, the choice, and the joint epsilon of all runs of an algorithm.
        finals: Final runs on test records, with the chosen settings.
    """

    path: Path
    chosen: dict[str, dict[str, Any]]
    document: dict[str, Any]
    finals: SweepResult
