"""The worker processes of a run: a process starts when one of its clients starts, and again after a crash."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.launch.placement.base import ClientRange, Handle, Launcher, failure

LEAVE_S = 15.0  # seconds that a process without wanted clients may take to exit


@dataclass
class WorkerPlace:
    """One worker process, running or not, and its clients that should run."""

    process: ClientRange
    handle: Handle | None = None
    restarts: int = 0
    wanted: set[int] = field(default_factory=set)
    lost: bool = False

    @property
    def first(self) -> int:
        """First client, by which the process is identified."""
        return self.process.clients[0]


class WorkerPool:
    """Starts and ends worker processes as clients are started and stopped; at most `most` run at a time.

    Args:
        launcher: Starts the processes.
        clients: Number of clients of the run.
        size: Clients per process; a process of several receives start commands and stays until `finish`.
        most: Processes that may run at a time, if each serves one client.
        max_restarts: Restarts after crashes, per process.
        must_all: True if a process over `max_restarts` ends the run; otherwise its clients are missing from then on.
        report: Receives a sentence about each restart and each loss.
        lose: Receives each client that is lost for the rest of the run.
    """

    def __init__(
        self, launcher: Launcher, clients: int, *, size: int, most: int, max_restarts: int, must_all: bool,
        report: Callable[[str], None], lose: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._launcher, self._clients, self._size, self._report = launcher, clients, size, report
        self._lose = lose
        self._most = most if size == 1 else clients
        self._max_restarts, self._must_all = max_restarts, must_all
        self._places: dict[int, WorkerPlace] = {}
        self._due: OrderedDict[int, WorkerPlace] = OrderedDict()  # to be started, the longest waiting first
        self._running: dict[int, WorkerPlace] = {}  # by sentinel
        self._ending: dict[int, float] = {}  # first client of a place -> when it should have left

    @property
    def sentinels(self) -> list[int]:
        """One file descriptor per running process, readable when it ends."""
        return list(self._running)

    def hear(self, message: bytes) -> None:
        """Execute a command of the coordinator, "start 12" or "stop 12".

        Raises:
            RunFailed: For any other message.
        """
        word, _, number = message.decode("ascii", "replace").partition(" ")
        if word not in ("start", "stop") or not number.isdecimal() or int(number) >= self._clients:
            raise RunFailed(f"the coordinator asked for {message[:40]!r}")
        (self.start_worker if word == "start" else self.stop_worker)([int(number)])

    def start_worker(self, clients: Iterable[int]) -> None:
        """Mark clients as wanted; the next `tend` starts their processes."""
        for client in clients:
            place = self._place(client)
            place.wanted.add(client)
            self._ending.pop(place.first, None)
            if place.handle is not None and place.process.group:
                place.handle.tell(f"start {client}")
            elif not place.lost:
                self._due[place.first] = place

    def stop_worker(self, clients: Iterable[int]) -> None:
        """Mark clients as no longer wanted; their processes are ended if they do not exit soon."""
        for client in clients:
            place = self._place(client)
            place.wanted.discard(client)
            if not place.process.group:
                self._due.pop(client, None)
                self._ending[client] = time.monotonic() + LEAVE_S
            elif place.handle is not None:
                place.handle.tell(f"stop {client}")

    def tend(self) -> None:
        """Start processes that are due while there is room, and end those that did not exit in time."""
        for first, place in list(self._due.items()):
            if len(self._running) >= self._most:
                break
            if place.handle is None:
                del self._due[first]
                self._start(place)
        now = time.monotonic()
        for first in [first for first, limit in self._ending.items() if limit <= now]:
            del self._ending[first]
            if (handle := self._places[first].handle) is not None:
                handle.kill()  # it was asked over the wire; its ledger is written for that

    def ended(self, sentinel: Any) -> None:
        """Handle the end of a process: restart it if it crashed with wanted clients, or fail the run."""
        place = self._running.pop(sentinel)
        assert place.handle is not None
        code, log = place.handle.wait(), place.handle.log_path
        place.handle.close()
        place.handle = None
        self._ending.pop(place.first, None)
        if code == 0 or not place.wanted:
            return
        why = failure(place.process.title, code, log)
        if code not in (2, 3) and place.restarts < self._max_restarts:
            place.restarts += 1
            self._due[place.first] = place
            self._report(f"{why}; started again, {place.restarts} of {self._max_restarts} times")
        elif self._must_all:
            why.args = (
                f"{why}; every client must answer (runtime.quorum is 1): with a lower quorum in the run's config.yaml it is missing",
            )
            raise why
        else:
            place.lost = True  # the quorum decides, in the coordinator, whether the run can go on
            self._report(f"{why}; missing from now on")
            for client in place.process.clients:
                self._lose(client)

    def finish(self) -> None:
        """End the run: no client is wanted, and processes of several clients exit too."""
        self._due.clear()
        for place in self._places.values():
            place.wanted.clear()
            if place.handle is not None:
                place.handle.finish()

    def _place(self, client: int) -> WorkerPlace:
        first = client - client % self._size
        if first not in self._places:
            clients = range(first, min(first + self._size, self._clients))
            self._places[first] = WorkerPlace(ClientRange(clients, group=self._size > 1))
        return self._places[first]

    def _start(self, place: WorkerPlace) -> None:
        place.handle = self._launcher.start(place.process)
        if place.process.group:
            for client in sorted(place.wanted):
                place.handle.tell(f"start {client}")
        self._running[place.handle.sentinel] = place
