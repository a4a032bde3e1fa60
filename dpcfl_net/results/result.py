"""Finished runs and sweeps, read from their folders."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import check_fields
from dpcfl_net.core.run_folder import RunFolder, SweepFolder
from dpcfl_net.results.number_format import counted, number
from dpcfl_net.results.round_tables import RoundTables
from dpcfl_net.results.round_times import Point, accuracy_curve, elapsed_by_round
from dpcfl_net.results.run_files import (
    JsonLine,
    JsonlTail,
    actual_state,
    completed_rounds,
    mapping,
    read_mapping,
    resume_command,
    whole,
)
from dpcfl_net.results.run_view import is_run

# Required fields.
RUN_FIELDS = {"name": (str,), "algorithm": (str,), "seed": (int,)}
SWEEP_FIELDS = {"cells": (list,), "axes": (dict,)}
# Figures of the observer's last lines that run.json may lack.
OBSERVED = ("accuracy_p10", "accuracy_disparity", "f_acc", "f_loss", "assignment_accuracy")


@dataclass(frozen=True)
class Result:
    """One finished run.

    Attributes:
        folder: Run folder.
        name: Name of the run.
        algorithm: Algorithm.
        seed: Seed.
        settings: Content of config.yaml.
        privacy: Privacy section of run.json.
        final: Final figures of run.json and of the observer's last lines; shares in [0, 1].
        curve: Mean accuracy by round and seconds; virtual seconds if the run had a virtual clock.
        cost: `bytes_up`, `bytes_down` and `seconds` of the whole run, as far as run.json has them; no bytes of a run in one process.
    """

    folder: Path
    name: str
    algorithm: str
    seed: int
    settings: dict[str, Any]
    privacy: dict[str, Any]
    final: dict[str, Any]
    curve: tuple[Point, ...] = ()
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        """Claimed epsilon; inf for an unprotected run."""
        found = number(self.privacy.get("epsilon"))
        return math.inf if found is None else found


def read_result(folder: Path) -> Result:
    """Read a finished run.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: If the folder is not a run folder, is damaged, or the run has not finished.
    """
    notes: list[str] = []
    files = RunFolder(folder)
    run, settings = read_mapping(files.run, notes), read_mapping(files.config, notes)
    if notes:
        raise ConfigError([f"{folder}: {note.removesuffix(' and was left out')}" for note in notes])
    if not run or not settings:
        within = folder.is_dir() and any(is_run(each) for each in folder.iterdir())
        hint = f"; for the runs in it give {folder}/*" if within else ""
        raise ConfigError(f"{folder} is not a run folder: it needs {files.run.name} and {files.config.name}{hint}")
    if run.get("state") != "finished":
        state, rounds = actual_state(folder, run), completed_rounds(folder, run)
        done = f"{state} after {counted(rounds, 'round')}"
        command = f"dpcfl watch {shlex.quote(str(folder))}" if state == "running" else resume_command(folder)
        raise ConfigError(f"{folder} is {done}; only finished runs can be compared: {command}")
    check_fields({**dict.fromkeys(RUN_FIELDS), **run}, str(files.run), RUN_FIELDS)
    privacy, path = {"epsilon": None, **mapping(settings, "privacy")}, f"{files.config}, privacy"
    check_fields(privacy, path, {"epsilon": (float,)})
    final = mapping(run, "final")
    metrics = JsonlTail(files.metrics).new()
    seen = _observed([*metrics, *JsonlTail(files.clusters).new()])
    measured = final.get("accuracy_mean") is not None  # otherwise the last lines are those of an earlier round
    added = {key: seen[key] for key in OBSERVED if measured and key in seen and final.get(key) is None}
    return Result(
        folder, run["name"], run["algorithm"], run["seed"], settings, mapping(run, "privacy"),
        {**final, **added}, _curve(metrics), _cost(run),
    )  # fmt: skip


def read_sweep(folder: Path) -> list[Result]:
    """Read the finished runs of a sweep, in the order of its cells.

    Args:
        folder: Sweep folder.

    Raises:
        ConfigError: If the folder is not a sweep folder or no run has finished.
    """
    cells = read_document(folder)["cells"]
    folders = dict.fromkeys((folder / cell["folder"]).resolve() for cell in cells)
    done = [path for path in folders if read_mapping(RunFolder(path).run, []).get("state") == "finished"]
    if not done:
        raise ConfigError(f"{folder}: none of the sweep's {len(cells)} runs has finished")
    return [read_result(path) for path in done]


def read_document(folder: Path) -> JsonLine:
    """Read sweep.json.

    Args:
        folder: Sweep folder.

    Returns:
        {config, axes, cells: [{values, folder, state}]}.

    Raises:
        ConfigError: If the folder is not a sweep folder or the file is damaged.
    """
    file = SweepFolder(folder).sweep
    document, path = read_mapping(file, []), str(file)
    if not document:
        raise ConfigError(f"{folder} is not a sweep: it holds no readable {file.name}")
    check_fields({**dict.fromkeys(SWEEP_FIELDS), **document}, path, SWEEP_FIELDS)
    for cell in document["cells"]:
        check_fields({"cell": cell}, path, {"cell": (dict,)})
        check_fields({"folder": None, **cell}, f"{path}, cells", {"folder": (str,)})
    check_fields(document["axes"], f"{path}, axes", dict.fromkeys(document["axes"], (list,)))
    return document


def swept_terms(document: Mapping[str, Any]) -> list[str]:
    """Return the axes of a sweep over privacy and data; runs with different values on them are not compared."""
    return [key for key, values in document["axes"].items() if len(values) > 1 and key.startswith(("privacy.", "data."))]


def _curve(metrics: list[JsonLine]) -> tuple[Point, ...]:
    tables = RoundTables()
    tables.add_metrics(metrics)
    return tuple(accuracy_curve(elapsed_by_round(metrics), tables.observed))


def _cost(run: JsonLine) -> dict[str, float]:
    seconds = run.get("virtual_s", run.get("wall_s"))
    found = {"bytes_up": run.get("bytes_up"), "bytes_down": run.get("bytes_down"), "seconds": seconds}
    if not found["bytes_up"] and not found["bytes_down"]:  # all clients were in one process
        found = {"seconds": seconds}
    return {key: value for key, given in found.items() if (value := number(given)) is not None}


def _observed(lines: list[JsonLine]) -> JsonLine:
    """Newest value of each field in the observer's lines."""
    seen = [line for line in lines if line.get("view") == "observer" and whole(line.get("round")) is not None]
    return {key: value for line in sorted(seen, key=lambda line: line["round"]) for key, value in line.items()}
