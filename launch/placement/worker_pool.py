"""The worker processes of a run: each starts when a client of its own is started, and again after a crash."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.launch.placement.base import Handle, Launcher, Posting, failure

LEAVE_S = 15.0  # how long a process without wanted clients may take to leave by itself


@dataclass
class WorkerPlace:
    """The place of one worker process, there or not, and which of its clients are wanted."""

    posting: Posting
    handle: Handle | None = None
    restarts: int = 0
    wanted: set[int] = field(default_factory=set)
    lost: bool = False

    @property
    def first(self) -> int:
        """The number it goes by."""
        return self.posting.clients[0]


class WorkerPool:
    """Starts and ends worker processes as clients are started and stopped; at most `most` run at a time.

    size: clients of one process; with more than one, start commands are passed on to it and it stays until `finish`.
    must_all: a worker over its `max_restarts` ends the run; otherwise it is missing from then on. report: is told of both, in words;
    lose: which client nobody need wait for any more.
    """

    def __init__(
        self, launcher: Launcher, clients: int, *, size: int, most: int, max_restarts: int, must_all: bool,
        report: Callable[[str], None], lose: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._launcher, self._clients, self._size, self._report = launcher, clients, size, report
        self._lose = lose
        self._most = most if size == 1 else clients
        self._max_restarts, self._must_all = max_restarts, must_all
        self._berths: dict[int, WorkerPlace] = {}
        self._due: OrderedDict[int, WorkerPlace] = OrderedDict()  # to be started, the longest waiting first
        self._running: dict[int, WorkerPlace] = {}  # by sentinel
        self._ending: dict[int, float] = {}  # first client of a berth -> when it should have left

    @property
    def sentinels(self) -> list[int]:
        """One for each running process, readable when it ends."""
        return list(self._running)

    def hear(self, message: bytes) -> None:
        """Follow one word of the coordinator: "start 12" or "stop 12"; anything else ends the run."""
        word, _, number = message.decode("ascii", "replace").partition(" ")
        if word not in ("start", "stop") or not number.isdecimal() or int(number) >= self._clients:
            raise RunFailed(f"the coordinator asked for {message[:40]!r}")
        (self.start_worker if word == "start" else self.stop_worker)([int(number)])

    def start_worker(self, clients: Iterable[int]) -> None:
        """These are wanted: their processes are started by the next `tend`."""
        for client in clients:
            berth = self._berth(client)
            berth.wanted.add(client)
            self._ending.pop(berth.first, None)
            if berth.handle is not None and berth.posting.group:
                berth.handle.tell(f"start {client}")
            elif not berth.lost:
                self._due[berth.first] = berth

    def stop_worker(self, clients: Iterable[int]) -> None:
        """These have left, or were given up; who does not leave soon is ended."""
        for client in clients:
            berth = self._berth(client)
            berth.wanted.discard(client)
            if not berth.posting.group:
                self._due.pop(client, None)
                self._ending[client] = time.monotonic() + LEAVE_S
            elif berth.handle is not None:
                berth.handle.tell(f"stop {client}")

    def tend(self) -> None:
        """Start what is due while there is room, and end what has overstayed."""
        for first, berth in list(self._due.items()):
            if len(self._running) >= self._most:
                break
            if berth.handle is None:
                del self._due[first]
                self._start(berth)
        now = time.monotonic()
        for first in [first for first, limit in self._ending.items() if limit <= now]:
            del self._ending[first]
            if (handle := self._berths[first].handle) is not None:
                handle.kill()  # it was asked over the wire; its ledger is written for that

    def ended(self, sentinel: Any) -> None:
        """The process has ended; one that crashed with clients wanted is started again, or the run fails."""
        berth = self._running.pop(sentinel)
        assert berth.handle is not None
        code, log = berth.handle.wait(), berth.handle.log_path
        berth.handle.close()
        berth.handle = None
        self._ending.pop(berth.first, None)
        if code == 0 or not berth.wanted:
            return
        why = failure(berth.posting.title, code, log)
        if code not in (2, 3) and berth.restarts < self._max_restarts:
            berth.restarts += 1
            self._due[berth.first] = berth
            self._report(f"{why}; started again, {berth.restarts} of {self._max_restarts} times")
        elif self._must_all:
            why.args = (
                f"{why}; every client must answer (runtime.quorum is 1): with a lower quorum in the run's config.yaml it is missing",
            )
            raise why
        else:
            berth.lost = True  # the quorum decides, in the coordinator, whether the run can go on
            self._report(f"{why}; missing from now on")
            for client in berth.posting.clients:
                self._lose(client)

    def finish(self) -> None:
        """The run is over: nobody is wanted any more, and processes of several clients leave too."""
        self._due.clear()
        for berth in self._berths.values():
            berth.wanted.clear()
            if berth.handle is not None:
                berth.handle.finish()

    def _berth(self, client: int) -> WorkerPlace:
        first = client - client % self._size
        if first not in self._berths:
            clients = range(first, min(first + self._size, self._clients))
            self._berths[first] = WorkerPlace(Posting(clients, group=self._size > 1))
        return self._berths[first]

    def _start(self, berth: WorkerPlace) -> None:
        berth.handle = self._launcher.start(berth.posting)
        if berth.posting.group:
            for client in sorted(berth.wanted):
                berth.handle.tell(f"start {client}")
        self._running[berth.handle.sentinel] = berth
