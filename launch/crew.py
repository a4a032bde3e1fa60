"""The worker processes of a run: each starts when a client of its own is summoned, and again after a crash."""

from __future__ import annotations

import multiprocessing
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dpcfl_net.errors import RunFailed
from dpcfl_net.worker import WorkerSpec, run_worker
from dpcfl_net.worker_group import GroupSpec, run_group
from launch.child import Child

LEAVE_S = 15.0  # how long a process without wanted clients may take to leave by itself


@dataclass
class Berth:
    """The place of one worker process, there or not, and which of its clients are wanted."""

    clients: range
    child: Child
    wanted: set[int] = field(default_factory=set)
    pipe: Connection | None = None  # to a process of several clients: whom to serve
    lost: bool = False


class Crew:
    """Starts and ends worker processes as clients are summoned and dismissed; at most `most` run at a time.

    spec: a worker's, its client to be filled in. size: clients of one process; with more than one, summonses are passed on
    to it and it stays until `finish`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: Path,
        clients: int,
        *,
        size: int,
        most: int,
        max_restarts: int,
        must_all: bool,
        context: Any,
    ) -> None:
        self._spec, self._logs, self._clients, self._size = spec, logs, clients, size
        self._most = most if size == 1 else clients
        self._max_restarts, self._must_all, self._context = max_restarts, must_all, context
        self._berths: dict[int, Berth] = {}
        self._due: OrderedDict[int, Berth] = OrderedDict()  # to be started, the longest waiting first
        self._running: dict[int, Berth] = {}  # by sentinel
        self._ending: dict[int, float] = {}  # first client of a berth -> when it should have left

    @property
    def sentinels(self) -> list[int]:
        """One for each running process, readable when it ends."""
        return list(self._running)

    @property
    def processes(self) -> list[Any]:
        """The running processes."""
        return [berth.child.process for berth in self._running.values()]

    def hear(self, message: bytes) -> None:
        """Follow one word of the coordinator: "summon 12" or "dismiss 12"; anything else ends the run."""
        word, _, number = message.decode("ascii", "replace").partition(" ")
        if word not in ("summon", "dismiss") or not number.isdecimal() or int(number) >= self._clients:
            raise RunFailed(f"the coordinator asked for {message[:40]!r}")
        (self.summon if word == "summon" else self.dismiss)([int(number)])

    def summon(self, clients: Iterable[int]) -> None:
        """These are wanted: their processes are started by the next `tend`."""
        for client in clients:
            berth = self._berth(client)
            berth.wanted.add(client)
            self._ending.pop(berth.clients[0], None)
            if berth.pipe is not None:
                self._pass_on(berth, f"summon {client}")
            elif not berth.lost:
                self._due[berth.clients[0]] = berth

    def dismiss(self, clients: Iterable[int]) -> None:
        """These have left, or were given up; who does not leave soon is ended."""
        for client in clients:
            berth = self._berth(client)
            berth.wanted.discard(client)
            if berth.pipe is not None:
                self._pass_on(berth, f"dismiss {client}")
            elif self._size == 1:
                self._due.pop(client, None)
                self._ending[client] = time.monotonic() + LEAVE_S

    def tend(self) -> None:
        """Start what is due while there is room, and end what has overstayed."""
        for first, berth in list(self._due.items()):
            if len(self._running) >= self._most:
                break
            if berth.child.process is None:
                del self._due[first]
                self._launch(berth)
        now = time.monotonic()
        for first in [first for first, limit in self._ending.items() if limit <= now]:
            del self._ending[first]
            if (process := self._berths[first].child.process) is not None:
                process.kill()  # it was asked over the wire; its ledger is written for that

    def ended(self, sentinel: Any) -> None:
        """The process has ended; one that crashed with clients wanted is started again, or the run fails."""
        berth = self._running.pop(sentinel)
        code = berth.child.take_exit()
        self._ending.pop(berth.clients[0], None)
        if berth.pipe is not None:
            berth.pipe.close()
            berth.pipe = None
        if code == 0 or not berth.wanted:
            return
        if code not in (2, 3) and berth.child.restarts < self._max_restarts:
            berth.child.restarts += 1
            self._due[berth.clients[0]] = berth
        elif self._must_all:
            raise berth.child.failure(code)
        else:
            berth.lost = True  # the quorum decides, in the coordinator, whether the run can go on

    def finish(self) -> None:
        """The run is over: nobody is wanted any more, and processes of several clients leave too."""
        self._due.clear()
        for berth in self._berths.values():
            berth.wanted.clear()
            if berth.pipe is not None:
                berth.pipe.close()
                berth.pipe = None

    def _berth(self, client: int) -> Berth:
        first = client - client % self._size
        if first not in self._berths:
            clients = range(first, min(first + self._size, self._clients))
            title = f"client {first}" if self._size == 1 else f"clients {first} to {clients[-1]}"
            log = self._logs / f"{title.replace(' ', '_')}.log"
            main: Callable[[Any], None] = run_worker if self._size == 1 else run_group
            self._berths[first] = Berth(clients, Child(title, main, replace(self._spec, client=first), log))
        return self._berths[first]

    def _launch(self, berth: Berth) -> None:
        if self._size == 1:
            berth.child.launch(self._context)
        else:
            theirs, berth.pipe = multiprocessing.Pipe(duplex=False)
            berth.child.spec = GroupSpec(replace(self._spec, client=berth.clients[0]), theirs)
            berth.child.launch(self._context)
            theirs.close()
            for client in sorted(berth.wanted):
                self._pass_on(berth, f"summon {client}")
        self._running[berth.child.process.sentinel] = berth

    def _pass_on(self, berth: Berth, word: str) -> None:
        """Tell a process of several clients; one that has just crashed is told when it runs again."""
        assert berth.pipe is not None
        try:
            berth.pipe.send_bytes(word.encode())
        except BrokenPipeError:
            return
