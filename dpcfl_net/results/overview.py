"""Key figures of a run for a line of a table, read incrementally from its growing files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpcfl_net.core.files import opened
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.runlog import parse
from dpcfl_net.results.compare import dotted, word
from dpcfl_net.results.number_format import number
from dpcfl_net.results.run_files import JsonLine, JsonlTail, actual_state, mapping, numbers, read_mapping, whole
from dpcfl_net.results.run_view import largest

RUNNING, FINISHED = "running", "finished"
FIRST_LINE = 1 << 20  # bytes of metrics.jsonl that are read for its first line
Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Overview:
    """Key figures of a run, or of all runs of a sweep.

    Attributes:
        name: Name of the configuration.
        algorithm: Algorithm, or the algorithms of a sweep.
        state: running, finished, failed, interrupted or unknown; of a sweep also waiting.
        done: Finished rounds, or finished runs of a sweep.
        total: Rounds, or runs of a sweep; None if unknown.
        epsilon: Promised epsilon; None if it is infinite or not stated.
        stated: True if the run states an epsilon, finite or not.
        insecure: True if the stated epsilon does not hold.
        spent: Largest epsilon that a client has spent so far; None if not written yet, or not finite.
        spent_round: Last round whose charges `spent` is sure to count; None: all of them, or not written yet.
        mean: Mean accuracy after the last evaluated round, 0 to 1.
        worst: Accuracy of the worst client.
        minority: Accuracy of the minority cluster.
        started: Start in seconds since the Unix epoch; None if unknown.
    """

    name: str
    algorithm: str
    state: str
    done: int = 0
    total: int | None = None
    epsilon: float | None = None
    stated: bool = False
    insecure: bool = False
    spent: float | None = None
    spent_round: int | None = None
    mean: float | None = None
    worst: float | None = None
    minority: float | None = None
    started: float | None = None


def fingerprint(folder: Path) -> Fingerprint:
    """Return name, inode, size and time of change of the files that a page of a run is made of.

    Args:
        folder: Run folder; of its subfolders only the attacks are read for a page.

    Raises:
        OSError: If it cannot be read.
    """
    files = RunFolder(folder)
    own = [files.report.name, files.lock.name]  # not read for a page
    found: list[tuple[str, int, int, int]] = []
    for place in (folder, files.attacks) if files.attacks.is_dir() else (folder,):
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name not in own and not entry.name.startswith(".") and entry.is_file():
                    status = entry.stat()
                    found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


class RunTail:
    """Follows the key figures of one run folder.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, RunFolder(folder)
        self._metrics = JsonlTail(self._files.metrics)
        self._served: JsonLine = {}
        self._observed: JsonLine = {}
        self._spent: JsonLine = {}
        self._first: JsonLine | None = None
        self._config: JsonLine = {}

    def read(self) -> Overview:
        """Read new lines and return the key figures so far; missing and damaged files leave gaps.

        Raises:
            ConfigError: If a file cannot be read.
            OSError: If the folder has no locks.
        """
        run, protocol = read_mapping(self._files.run, []), read_mapping(self._files.protocol, [])
        config = {} if run and protocol else self._read_config()
        final, privacy = mapping(run, "final"), mapping(run, "privacy")
        # A folder with a lock and without run.json is being prepared, or was when its launcher ended.
        prepared = {"state": RUNNING} if self._files.lock.is_file() else {}
        state = actual_state(self._folder, run or prepared)
        if state != FINISHED or not final:
            self._read_metrics()
        spent, spent_round = self._spent_so_far(run, state)
        earlier = {} if state == FINISHED and final else self._observed
        said = {**earlier, **{key: value for key, value in final.items() if value is not None}}
        return Overview(
            name=str(run.get("name") or protocol.get("name") or config.get("name") or self._folder.name),
            algorithm=str(run.get("algorithm") or protocol.get("algorithm") or mapping(config, "algorithm").get("name") or "–"),
            state=state,
            done=max(whole(run.get("rounds_done")) or 0, whole(self._served.get("round")) or 0),
            total=whole(protocol.get("rounds")) or whole(config.get("rounds")),
            epsilon=number(privacy.get("epsilon")),
            stated="epsilon" in privacy,
            insecure=bool(privacy.get("insecure")),
            spent=spent,
            spent_round=spent_round,
            mean=number(said.get("accuracy_mean")),
            worst=number(said.get("accuracy_worst")),
            minority=number(said.get("accuracy_minority")),
            started=self._start(),
        )

    def settings(self) -> dict[str, str]:
        """Return the settings of the experiment by dotted key, with the seed and without secrets; empty if the file is missing."""
        config = self._read_config()
        found = {**dotted(config), "seed": config.get("seed")}
        return {key: word(value) for key, value in found.items() if value is not None}

    def _spent_so_far(self, run: JsonLine, state: str) -> tuple[float | None, int | None]:
        """Largest epsilon spent, and the last round that it counts: lines of epsilon are rarer than rounds."""
        counted = largest(numbers(self._spent, "epsilon_spent_by_client"))
        stated = number(mapping(run, "privacy").get("epsilon_spent"))
        if counted is not None and (stated is None or counted > stated):
            return counted, whole(self._spent.get("round"))
        return stated, whole(run.get("rounds_done")) if state == RUNNING and stated is not None else None

    def _read_config(self) -> JsonLine:
        """Read config.yaml, once: it is written before a run starts, and YAML takes milliseconds."""
        self._config = self._config or read_mapping(self._files.config, [])
        return self._config

    def _read_metrics(self) -> None:
        """Keep the newest line of each kind."""
        before = self._metrics.offset
        lines = self._metrics.new()
        if self._metrics.offset < before:  # another file has taken its place
            self._served, self._observed, self._spent = {}, {}, {}
        for line in lines:
            if line.get("view") == "observer":
                self._observed = _newer(self._observed, line)
            elif "epsilon_spent_by_client" in line:
                self._spent = _newer(self._spent, line)
            else:
                self._served = _newer(self._served, line)

    def _start(self) -> float | None:
        """Start of round 1; before its end, and in virtual time, the time at which the job was written."""
        first = self._first_line()
        end, took = number(first.get("time")), number(first.get("seconds"))
        if first.get("clock") != "virtual" and end is not None:
            return end - (took or 0.0)
        written = self._files.protocol if self._files.protocol.is_file() else self._files.config
        return written.stat().st_mtime if written.is_file() else None

    def _first_line(self) -> JsonLine:
        if self._first is None and self._files.metrics.is_file():
            with opened(self._files.metrics) as file:
                raw = file.readline(FIRST_LINE)
            if raw.endswith(b"\n"):
                self._first = parse(raw, self._files.metrics.name) or {}
        return self._first or {}


def of_sweep(name: str, cells: int, runs: Sequence[Overview]) -> Overview:
    """Summarise the runs of a sweep: states and counts; figures of several runs have no one value.

    Args:
        name: Name of the sweep.
        cells: Number of its runs, started or not.
        runs: Those that have started.
    """
    done = sum(run.state == FINISHED for run in runs)
    states = {run.state for run in runs}
    if RUNNING in states:
        state = RUNNING
    elif done == cells:
        state = FINISHED
    else:
        state = next((one for one in ("failed", "interrupted") if one in states), "waiting")
    starts = [run.started for run in runs if run.started is not None]
    algorithms = dict.fromkeys(run.algorithm for run in runs)
    return Overview(name, ", ".join(algorithms) or "–", state, done, cells, started=max(starts, default=None))


def _newer(old: JsonLine, new: JsonLine) -> JsonLine:
    """The line of the later round; a line of the same round adds to the old one."""
    at, before = whole(new.get("round")) or 0, whole(old.get("round")) or 0
    return new if at > before or not old else {**old, **new} if at == before else old
