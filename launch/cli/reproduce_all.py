"""`dpcfl reproduce all` and `dpcfl reproduce matrix`: fill the matrix of results cell by cell, and render it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, DpcflError, RunFailed
from dpcfl_net.core.files import shown
from dpcfl_net.launch.cli.reproduce import STORE, RunContext, compute, deadline, out_of_time, scale_of
from dpcfl_net.reproduce.base import CLAIMS, OutOfTime, Reproduction, Scale, folder_name, registry
from dpcfl_net.reproduce.matrix import FAILED, write_matrix


def reproduce_all(
    scale: str, out: Path, only: str | None, budget: str | None, seeds: int | None, jobs: int = 1
) -> dict[str, Any]:
    """Compute every figure that has no result yet; a failed one does not end the others.

    Args:
        scale: "laptop" or "paper".
        out: Parent of the figures' folders; finished cells and finished runs in it are reused.
        only: Paper, as the part of a figure's name before the slash; None: all.
        budget: Time after which no figure and no run starts, for example 2h; None: no limit. A figure that can be computed from a
            part of its runs is partial then, and is continued by the next call.
        seeds: Seeds per figure; None: the usual ones.
        jobs: Runs of a figure at once.

    Returns:
        figures (as `reproduce`) that were computed, and, if there are results, those of `matrix`.

    Raises:
        ConfigError: If an argument is wrong.
        RunFailed: At the end, with every figure that failed.
    """
    size = scale_of(scale)
    until = deadline(budget)
    todo = [chosen for chosen in chosen_figures(only) if not done(chosen, size, out, seeds)]
    print(f"{len(todo)} figures to compute at {size} scale; results in {out}")
    failed, computed = list[str](), list[dict[str, Any]]()
    for number, chosen in enumerate(todo, 1):
        if until is not None and time.monotonic() > until:
            print(f"time budget spent: {len(todo) - number + 1} figures left; repeat the command to continue")
            break
        print(f"\n[{number}/{len(todo)}] {chosen.name}: {chosen.title}", flush=True)
        folder = out / folder_name(chosen, size)
        try:
            computed.append(compute(chosen, RunContext(size, folder, out / STORE, seeds, until, jobs)))
            (folder / FAILED).unlink(missing_ok=True)
        except OutOfTime:
            print(out_of_time(chosen))
            break
        except DpcflError as error:
            failed.append(f"{chosen.name}: {error}")
            print(f"failed: {error}")
            document = {"name": chosen.name, "scale": size, "state": "failed", "note": " ".join(str(error).split())}
            write_atomically(folder / FAILED, json.dumps(document, indent=1) + "\n")
    rendered = matrix(out) if out.is_dir() else {}
    if failed:
        raise RunFailed("figures failed: " + "; ".join(failed))
    return {"figures": computed, **rendered}


def matrix(out: Path) -> dict[str, Any]:
    """Render the matrix of a folder of results as Markdown and HTML, and print the paths.

    Returns:
        matrix, page and plots: paths of what was written.

    Raises:
        ConfigError: If the folder does not exist, or a cell cannot be read.
    """
    text, page, *plots = write_matrix(out)
    print(f"Matrix: {text}\nPage: {page}\nPlots: {len(plots)} SVG files in the folders of the figures")
    return {"matrix": str(text), "page": str(page), "plots": [str(plot) for plot in plots]}


def chosen_figures(only: str | None) -> list[type[Reproduction]]:
    """Return the figures of a paper, or all; those without complete runs, which take minutes, first.

    Raises:
        ConfigError: If no figure belongs to that paper.
    """
    papers = sorted({name.partition("/")[0] for name in registry()})
    if only is not None and only not in papers:
        raise ConfigError(f"--only is {shown(only)}: must be one of {', '.join(papers)}")
    figures = [found for name, found in registry().items() if only in (None, name.partition("/")[0])]
    return sorted(figures, key=lambda figure: figure.complete_runs)


def done(chosen: type[Reproduction], scale: Scale, out: Path, seeds: int | None) -> bool:
    """Return True if the figure has a finished result with that number of seeds."""
    file = out / folder_name(chosen, scale) / CLAIMS
    if not file.exists():
        return False
    document = json.loads(file.read_text(encoding="utf-8"))
    return document.get("state") == "finished" and document.get("asked_seeds") == seeds
