"""Prints comparisons of runs and sweeps in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dpcfl_net.core.run_folder import RunFolder, SweepFolder
from dpcfl_net.launch.cli.json_output import print_json
from dpcfl_net.launch.cli.screen import print_table
from dpcfl_net.launch.cli.steps import printable
from dpcfl_net.report.pages import keep
from dpcfl_net.report.sweep import comparison_page, write_sweep
from dpcfl_net.results import compare
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.number_format import counted
from dpcfl_net.results.table_text import table_csv
from dpcfl_net.results.tables import Table


def show(folder: Path) -> None:
    """Print the table of a sweep and write its report.

    If privacy or data of its runs differ, print the differences and the command that compares them anyway.

    Args:
        folder: Folder of the sweep.
    """
    comparison = Comparison.of([folder], force=True)
    if comparison.marked:
        problems = compare.refusal(comparison.marked).problems
        print("\n".join(map(printable, [*problems, f"compare them anyway: dpcfl compare {folder} --force"])))
    else:
        _print(comparison)
    print(f"report: {write_sweep(folder)}")


def compare_runs(
    folders: Sequence[Path],
    *,
    force: bool,
    csv: Path | None,
    page: Path | None,
    fairness: bool,
    target: float | None,
    form: Literal["table", "latex", "csv", "json"],
) -> None:
    """Print the table of runs and sweeps.

    Args:
        folders: Folders of runs or sweeps. Stores of sweeps beside them are left out.
        force: Compare runs whose privacy or data differ.
        csv: File for one line per run.
        page: HTML file for plots and table.
        fairness: Add F_acc and F_loss.
        target: Mean accuracy up to which rounds and seconds are counted; None: one that all runs reached.
        form: How to print the table. With latex, csv and json the table alone goes to standard output, the rest to standard error.

    Raises:
        ConfigError: As `Comparison.of`.
    """
    comparison = Comparison.of(_without_stores(folders), force=force, fairness=fairness, target=target)
    if form == "table":
        _print(comparison)
    elif form == "json":
        print_json(document(comparison))
    else:
        print(comparison.to_latex() if form == "latex" else table_csv(comparison.table.without_empty_columns()), end="")
    said = sys.stdout if form == "table" else sys.stderr
    if csv is not None:
        comparison.to_csv(csv)
        print(f"wrote {counted(len(comparison), 'run')} to {csv}", file=said)
    if page is not None:
        lead = [f"{len(comparison)} runs."] if len(folders) > 3 else [f"Runs: {', '.join(map(str, folders))}."]
        text = comparison_page("Comparison", lead, comparison)
        print(f"plots: {keep(page, text)}", file=said)


def document(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for `--json`.

    Args:
        comparison: The comparison.

    Returns:
        runs (unrounded figures of each run), rows (the cells of the table as text), leads (the same of the differences that are
        paired by seed; empty without two common seeds), privacy, alerts and not_comparable.
    """
    promises, alerts = comparison.statements
    return {
        "runs": comparison.records,
        "rows": _cells(comparison.table),
        "leads": _cells(comparison.leads),
        "privacy": promises,
        "alerts": alerts,
        "not_comparable": {str(folder): why for folder, why in comparison.marked.items()},
    }


def _without_stores(folders: Sequence[Path]) -> list[Path]:
    """Leave out stores of sweeps, which `runs/*` also names, and say so; a store alone is an error."""
    others = [folder for folder in folders if not RunFolder(folder).run.exists() and not SweepFolder(folder).sweep.exists()]
    if not others or len(others) == len(folders):
        return list(folders)
    from dpcfl_net.launch.sweeps import STORE

    stores = [folder for folder in others if folder.name == STORE]
    for folder in stores:
        shown = printable(folder)
        print(f"left out {shown}: it holds the runs of sweeps; to compare them one by one give {shown}/*", file=sys.stderr)
    return [folder for folder in folders if folder not in stores]


def _cells(table: Table | None) -> list[dict[str, str]]:
    """Return the cells of each row by column."""
    shown = Table("", [], []) if table is None else table.without_empty_columns()
    return [dict(zip(shown.columns, row, strict=True)) for row in shown.rows]


def _print(comparison: Comparison) -> None:
    print_table(comparison.table.without_empty_columns())
    if (leads := comparison.leads) is not None:
        print_table(leads.without_empty_columns())
    promises, alerts = comparison.statements
    print(f"Privacy: {printable('; '.join(promises))}")
    print("".join(f"! {printable(line)}\n" for line in alerts), end="")
