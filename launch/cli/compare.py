"""Prints comparisons of runs and sweeps in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpcfl_net.launch.cli.screen import print_table
from dpcfl_net.report.sweep import write_comparison, write_sweep
from dpcfl_net.results import compare
from dpcfl_net.results.comparison import Comparison


def show(folder: Path) -> None:
    """Print a sweep's table and write its report; if its runs do not compare, print why and how to show them anyway."""
    found = Comparison.of([folder], force=True)
    if found.marked:
        print("\n".join([*compare.refusal(found.marked).problems, f"dpcfl compare {folder} --force"]))
    else:
        _print(found)
    print(f"report {write_sweep(folder)}")


def compare_runs(
    folders: Sequence[Path], *, force: bool = False, csv: Path | None = None, page: Path | None = None, fairness: bool = False
) -> None:
    """Print the table of runs and sweeps, and write their figures as CSV and their plots; arguments as `Comparison.of`."""
    found = Comparison.of(folders, force=force, fairness=fairness)
    _print(found)
    if csv is not None:
        found.to_csv(csv)
        print(f"figures of {len(found)} runs in {csv}")
    if page is not None:
        lead = [f"{len(found)} runs."] if len(folders) > 3 else [f"Runs: {', '.join(map(str, folders))}."]
        print(f"plots {write_comparison(page, 'Comparison', lead, found.results, found.apart)}")


def _print(found: Comparison) -> None:
    print_table(found.table)
    promises, alerts = found.statements
    print(f"Privacy: {'; '.join(promises)}")
    print("".join(f"! {line}\n" for line in alerts), end="")
