"""A sweep for `--json`: its cells, before and after it, and the jobs that run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.launch.cli import compare
from dpcfl_net.results import summary
from dpcfl_net.results.comparison import Comparison

if TYPE_CHECKING:
    from dpcfl_net.launch.cells.outcome import CellOutcome
    from dpcfl_net.launch.sweeps import Sweep


def planned(plan: Sweep, done: Sequence[bool]) -> dict[str, Any]:
    """Return the cells of a sweep that is not started.

    Args:
        plan: The sweep.
        done: True for each cell whose run has finished.

    Returns:
        folder, and cells (values, cached).
    """
    cells = [{"values": cell.values, "cached": cached} for cell, cached in zip(plan.cells, done, strict=True)]
    return {"folder": str(plan.folder), "cells": cells}


def submitted(plan: Sweep, done: Sequence[bool], scripts: Iterable[Path], jobs: Sequence[str]) -> dict[str, Any]:
    """Return the cells of a sweep that SLURM runs, and the job arrays.

    Args:
        plan: The sweep.
        done: True for each cell whose run had finished before.
        scripts: Batch scripts of the arrays.
        jobs: Ids of the arrays; empty if nothing was submitted.

    Returns:
        As `planned`, with scripts and jobs.
    """
    return {**planned(plan, done), "scripts": [str(path) for path in scripts], "jobs": list(jobs)}


def ended(plan: Sweep, outcomes: Sequence[CellOutcome]) -> dict[str, Any]:
    """Return the outcome of a sweep.

    Args:
        plan: The sweep.
        outcomes: Outcome of each cell.

    Returns:
        folder, cells (values, state, cached, seconds, folder, error, final) and comparison, as `compare.document`; None if no run
        has finished.
    """
    cells = [
        {
            "values": cell.values, "state": outcome.state, "cached": outcome.cached, "seconds": outcome.seconds,
            "folder": str(outcome.folder), "error": outcome.error or None,
            "final": summary.read_document(outcome.folder).get("final"),
        }
        for cell, outcome in zip(plan.cells, outcomes, strict=True)
    ]  # fmt: skip
    finished = any(outcome.state == "finished" for outcome in outcomes)
    comparison = compare.document(Comparison.of([plan.folder], force=True)) if finished else None
    return {"folder": str(plan.folder), "cells": cells, "comparison": comparison}
