"""Process faults of `dpcfl run --chaos FILE`: signals, and refused writes, when the run's records reach a round and step."""

from __future__ import annotations

import hashlib
import math
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dpcfl_net.core import runlog
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.clock import since_epoch
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.runlog import Lines
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.chaos_file import ChaosFile, DiskFault, Moment, ProcessFault, read_chaos
from dpcfl_net.launch.placement import parents
from dpcfl_net.results.run_files import JsonLine, JsonlTail
from dpcfl_net.transport.faults import MessageFaults
from dpcfl_net.transport.keys import client_key

PARENT = "parent of all workers"
FRESH_S = 0.1  # for which a list of all processes is good
INTERVAL_S = 0.02  # between two looks at the records; a step can be shorter


@dataclass
class _Planned:
    """A process fault that has yet to happen, or lasts.

    Attributes:
        name: Identity in spans.jsonl; equal in every replay.
        title: Title of its process, as in process lists.
        who: Title of the client whose step counts; "" for the first client that reaches it.
        moment: When it happens.
        action: "kill", "stop" or "full".
        seconds: How long a stop or a full disk lasts.
        hit: Processes that it has hit, and the file-size limit that a full disk replaced.
        began: Begin, on the monotonic clock; 0 before.
        until: End, on the same clock.
    """

    name: str
    title: str
    who: str
    moment: Moment
    action: str
    seconds: float
    hit: dict[psutil.Process, tuple[int, int]] = field(default_factory=dict)
    began: float = 0.0
    until: float = 0.0


class Chaos:
    """Applies a chaos file to one run on this machine.

    Args:
        folder: Run folder.
        plan: The chaos file.
        clients: Number of clients.
    """

    def __init__(self, folder: Path, plan: ChaosFile, clients: int) -> None:
        self.message_faults: MessageFaults | None = plan.message_faults()
        self._files = RunFolder(folder)
        self._spans = Lines(self._files.spans)
        done = {span.get("fault") for span in runlog.read(self._files.spans)}  # by the run before it was resumed
        self._left = [fault for fault in planned(plan, clients) if fault.name not in done]
        self._active: list[_Planned] = []
        self._running: dict[str, list[psutil.Process]] = {}
        self._looked = -math.inf
        self._missed: list[_Planned] = []  # their processes did not run then
        self._progress = RunProgress(self._files, clients, {fault.moment for fault in self._left})

    @property
    def interval_s(self) -> float:
        """Longest time between two calls of `tick`, seconds."""
        return INTERVAL_S if self._left or self._active else 1.0

    def tick(self) -> None:
        """Start the faults that are due and end those that have lasted."""
        if self._left:
            self._progress.update()
        for fault in [fault for fault in self._left if self._progress.reached(fault.moment, fault.who)]:
            self._left.remove(fault)
            if not self._begin(fault):
                self._missed.append(fault)
        for fault in list(self._active):
            if time.monotonic() >= fault.until:
                self._end(fault)
            elif fault.action == "full":
                self._hit(fault)  # processes that were started meanwhile

    def close(self) -> None:
        """End all lasting faults, and record those that never happened as warnings."""
        for fault in list(self._active):
            self._end(fault)
        for fault in [*self._missed, *self._left]:
            text = f"fault {fault.name} did not happen in this run"
            runlog.append(self._files.warnings, {"view": "launcher", "time": time.time(), "text": text})
        self._spans.close()

    def _begin(self, fault: _Planned) -> bool:
        """Apply a fault; False if its process does not run."""
        if not self._hit(fault):
            return False
        fault.began = time.monotonic()
        fault.until = fault.began + fault.seconds
        if fault.action == "kill":
            self._record(fault)
        else:
            self._active.append(fault)
        return True

    def _hit(self, fault: _Planned) -> bool:
        """Apply a fault to its processes; False if none runs. A list without them may be older than their start."""
        if time.monotonic() - self._looked > FRESH_S or not self._apply_to_running(fault):
            self._running, self._looked = running_processes(self._files.logs), time.monotonic()
            self._apply_to_running(fault)
        return bool(fault.hit)

    def _apply_to_running(self, fault: _Planned) -> bool:
        for process in self._running.get(fault.title, []):
            if process in fault.hit:
                continue
            try:
                fault.hit[process] = _apply(fault.action, process)
            except psutil.NoSuchProcess:
                continue
        return bool(fault.hit)

    def _end(self, fault: _Planned) -> None:
        for process, limit in fault.hit.items():
            try:
                if fault.action == "stop":
                    process.resume()
                else:
                    process.rlimit(resource.RLIMIT_FSIZE, limit)
            except psutil.NoSuchProcess:
                continue
        self._active.remove(fault)
        self._record(fault)

    def _record(self, fault: _Planned) -> None:
        start, end = since_epoch(fault.began, time.monotonic())
        self._spans.write({
            "who": fault.title, "what": f"fault {fault.action}", "round": fault.moment.round, "start": start, "end": end,
            "fault": fault.name,
        })  # fmt: skip


def open_chaos(folder: Path, config: Config, path: Path) -> Chaos:
    """Read a chaos file for a run, and keep a copy of it in the run folder.

    Args:
        folder: Run folder.
        config: The configuration of the run.
        path: The chaos file.

    Raises:
        ConfigError: If the file is invalid, or the run has no processes or has aggregators.
    """
    if config.runtime.federation != "network":
        raise ConfigError(f"--chaos needs processes: runtime.federation must be 'network', got {config.runtime.federation!r}")
    if config.runtime.aggregators:
        raise ConfigError(
            f"--chaos injects faults at the coordinator: runtime.aggregators must be 0, got {config.runtime.aggregators}"
        )
    clients = config.data.client_count
    plan = read_chaos(path, clients, config.rounds)
    write_atomically(RunFolder(folder).chaos, read_text(path))
    return Chaos(folder, plan, clients)


def summary(folder: Path) -> str:
    """Count the faults of a run.

    Args:
        folder: Run folder.

    Returns:
        One line, as "2 drop, 1 kill".
    """
    spans = runlog.read(RunFolder(folder).spans)
    counts = Counter(str(span["what"]).removeprefix("fault ") for span in spans if str(span.get("what")).startswith("fault "))
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


def planned(plan: ChaosFile, clients: int) -> Iterator[_Planned]:
    """Yield the process and disk faults of a chaos file, one per process; random clients are drawn from its seed.

    Args:
        plan: The chaos file.
        clients: Number of clients.
    """
    faults: list[ProcessFault | DiskFault] = [*plan.processes, *plan.disk]
    for index, fault in enumerate(faults):
        digest = hashlib.sha256(repr((plan.seed, "process", index)).encode()).digest()
        for title in _titles(fault, clients, random.Random(int.from_bytes(digest))):
            name = f"{index + 1}. {fault.action} {title} at {fault.at}"
            who = title if title.startswith("client ") and fault.target != "all" else ""
            yield _Planned(name, title, who, fault.at, fault.action, fault.seconds or 0.0)


def _titles(fault: ProcessFault | DiskFault, clients: int, generator: random.Random) -> list[str]:
    """Return the titles of a fault's processes."""
    match fault.target.split():
        case ["all"]:
            return ["coordinator", "observer", *(f"client {client}" for client in range(clients))]
        case ["random", count, _]:
            return [f"client {client}" for client in sorted(generator.sample(range(clients), min(int(count), clients)))]
        case ["parent"]:
            return [PARENT]
        case _:
            return [fault.target]


def _apply(action: str, process: psutil.Process) -> tuple[int, int]:
    """Apply an action to a process; return the file-size limit that it had."""
    limit: tuple[int, int] = process.rlimit(resource.RLIMIT_FSIZE)
    if action == "full":
        process.rlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    else:
        process.send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    return limit


def running_processes(logs: Path) -> dict[str, list[psutil.Process]]:
    """Find the processes of a run by title, without "dpcfl "; a process of several clients has the titles of all of them.

    Args:
        logs: Folder of the run's logs, into one of which each process but the parent of all workers writes.
    """
    mine, fork_servers = psutil.Process().children(recursive=True), parents.pids()
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            _, dpcfl, title = " ".join(process.cmdline()).partition("dpcfl ")
            if dpcfl and (process in mine or process.pid in fork_servers or _writes_in(process, logs)):
                for name in _names(title):
                    found.setdefault(name, []).append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _names(title: str) -> Iterator[str]:
    words = title.split()
    if len(words) == 4 and words[0] == "clients" and words[1].isdecimal() and words[3].isdecimal():
        yield from (f"client {client}" for client in range(int(words[1]), int(words[3]) + 1))
    else:
        yield title.strip()


def _writes_in(process: psutil.Process, logs: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{process.pid}/fd/1")).parent == logs.resolve()
    except OSError:
        return False


class RunProgress:
    """Rounds and steps that a run has reached, from the files that its processes write.

    Args:
        files: The run folder.
        clients: Number of clients.
        moments: Steps and rounds that matter; ledgers are read for "charged" alone.
    """

    def __init__(self, files: RunFolder, clients: int, moments: set[Moment]) -> None:
        self._moments = moments
        self._reached: set[tuple[Moment, str]] = set()  # with the client's title; "" for any
        self._tails = [(JsonlTail(files.messages), self._message), (JsonlTail(files.metrics), self._metric)]
        if any(moment.step == "charged" for moment in moments):
            for client in range(clients):
                self._tails.append((JsonlTail(files.ledger(client_key(client)) / "ledger.jsonl"), partial(self._debit, client)))
        for tail, _ in self._tails:
            tail.new()  # a resumed run: what happened before it

    def update(self) -> None:
        """Read new lines."""
        for tail, take in self._tails:
            for line in tail.new():
                take(line)

    def reached(self, moment: Moment, who: str) -> bool:
        """Return whether a client has reached a moment.

        Args:
            moment: The moment.
            who: Title of the client; "" for any.
        """
        return (moment, "" if moment.step == "done" else who) in self._reached

    def _note(self, step: str, title: str, round: Any, task: Any = None) -> None:
        for moment in self._moments:
            if (moment.step, moment.round) == (step, round) and moment.task in (None, task):
                self._reached |= {(moment, title), (moment, "")}

    def _message(self, line: JsonLine) -> None:
        step = {"TASK": "sent", "RESULT": "answered"}.get(str(line.get("kind")))
        if step is not None:
            self._note(step, str(line.get("peer")), line.get("round"), line.get("task"))

    def _metric(self, line: JsonLine) -> None:
        if "answered" in line:  # the coordinator's line; the launcher writes others later
            self._note("done", "", line.get("round"))

    def _debit(self, client: int, line: JsonLine) -> None:
        if line.get("type") == "debit":
            self._note("charged", f"client {client}", line.get("round"), line.get("kind"))
