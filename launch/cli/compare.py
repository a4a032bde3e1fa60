"""Runs and sweeps side by side in the terminal; refused where their privacy or their data differ."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import write_text
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.launch.cli.screen import print_table
from dpcfl_net.report.sweep import write_comparison, write_sweep
from dpcfl_net.results import compare


def show(folder: Path) -> None:
    """A sweep's table and report; where its runs do not compare, why, and how to see them all the same."""
    results = compare.read_sweep(folder)
    marked = compare.unequal(results, compare.swept_terms(compare.read_document(folder)))
    if marked:
        print("\n".join([*compare.refusal(marked).problems, f"dpcfl compare {folder} --force"]))
    else:
        _print(results, marked)
    print(f"report {write_sweep(folder)}")


def compare_runs(
    folders: Sequence[Path], *, force: bool = False, csv: Path | None = None, page: Path | None = None, fairness: bool = False
) -> None:
    """The table of runs and sweeps, their figures as CSV, their plots; ConfigError if their privacy or data differ, unless forced.

    fairness: F_acc and F_loss first, for which models without privacy are trained where this host has none yet.
    """
    results: list[compare.Result] = []
    apart: list[str] = []
    problems: list[str] = []
    for folder in folders:
        try:
            if SweepFolder(folder).sweep.exists():
                results += compare.read_sweep(folder)
                apart += compare.swept_terms(compare.read_document(folder))
            else:
                results.append(compare.read_result(folder))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    marked = compare.unequal(results, apart)
    if marked and not force:
        raise compare.refusal(marked)
    if fairness:
        results = [_with_fairness(result) for result in results]
    _print(results, marked)
    if csv is not None:
        text = io.StringIO()
        compare.write_csv(text, results)
        write_text(csv, text.getvalue())
        print(f"figures of {len(results)} runs in {csv}")
    if page is not None:
        lead = [f"{len(results)} runs."] if len(folders) > 3 else [f"Runs: {', '.join(map(str, folders))}."]
        print(f"plots {write_comparison(page, 'Comparison', lead, results, apart)}")


def _with_fairness(result: compare.Result) -> compare.Result:
    from dpcfl_net.results.fairness import add_fairness
    from dpcfl_net.results.summary import run_settings

    add_fairness(result.folder, run_settings(result.folder)["data"]["root"])
    return compare.read_result(result.folder)


def _print(results: Sequence[compare.Result], marked: Mapping[Path, str]) -> None:
    print_table(compare.table(compare.rows(results), marked))
    promises, alerts = compare.statements(results)
    print(f"Privacy: {'; '.join(promises)}")
    print("".join(f"! {line}\n" for line in [*alerts, *(f"{folder.name}: {text}" for folder, text in marked.items())]), end="")
