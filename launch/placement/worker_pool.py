"""Worker processes of a run: started on demand, restarted after a crash."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.failed_clients import NO_RESTART, failed_clients, listed_clients
from dpcfl_net.launch.placement.base import ClientRange, Handle, Launcher, failure
from dpcfl_net.launch.restarts import MOST_RESTART_S, delay_s

EXIT_S = 15.0  # time for a process without wanted clients to exit


@dataclass
class PoolLimits:
    """Limits of a pool.

    Attributes:
        clients_per_process: Clients per process. A process of several clients receives start commands and runs until `finish`.
        max_running: Processes that may run at a time, if each serves one client.
        max_restarts: Restarts of a process after crashes, and after failures of each of its clients.
        all_required: True if a process over `max_restarts` ends the run; otherwise the clients that failed are lost.
    """

    clients_per_process: int
    max_running: int
    max_restarts: int
    all_required: bool


@dataclass
class WorkerProcess:
    """A worker process, running or not.

    Attributes:
        process: Its clients.
        handle: The running process; None if it does not run.
        restarts: Restarts so far, by the client that had failed; None: the whole process.
        wanted: Its clients that should run.
        lost: Its clients that do not run again.
        started: Time of its last start, on the monotonic clock.
        short_lives: Crashes in a row, each within MOST_RESTART_S of the start.
        due: Time before which it does not start again, on the monotonic clock.
    """

    process: ClientRange
    handle: Handle | None = None
    restarts: Counter[int | None] = field(default_factory=Counter)
    wanted: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    started: float = 0.0
    short_lives: int = 0
    due: float = 0.0

    @property
    def first(self) -> int:
        """First client, which identifies the process."""
        return self.process.clients[0]

    def crashed(self) -> None:
        """Set when the process may start again: at once, but after a growing delay if it keeps crashing early."""
        now = time.monotonic()
        self.short_lives = self.short_lives + 1 if now < self.started + MOST_RESTART_S else 0
        self.due = now if self.short_lives < 2 else now + delay_s(self.short_lives - 2)


class WorkerPool:
    """Starts and ends worker processes as clients are started and stopped.

    Args:
        launcher: Starts the processes.
        clients: Number of clients of the run.
        limits: Limits of the pool.
        report: Called with a message about each restart, each loss, and each process that is killed.
        on_lost: Called with each client that does not run again.
    """

    def __init__(
        self,
        launcher: Launcher,
        clients: int,
        limits: PoolLimits,
        *,
        report: Callable[[str], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self._launcher, self._clients, self._limits = launcher, clients, limits
        self._report, self._on_lost, self._size = report, on_lost, limits.clients_per_process
        self._max_running = limits.max_running if self._size == 1 else clients
        self._workers: dict[int, WorkerProcess] = {}  # by first client
        self._queued: OrderedDict[int, WorkerProcess] = OrderedDict()  # to start, in this order; by first client
        self._running: dict[int, WorkerProcess] = {}  # by sentinel
        self._exit_deadlines: dict[int, float] = {}  # by first client, on the clock below
        self._awake = AwakeClock()  # a pause of the whole run takes no time from processes that exit

    @property
    def sentinels(self) -> list[int]:
        """One file descriptor per running process; readable when it ends."""
        return list(self._running)

    def lost(self) -> list[int]:
        """Return the clients that do not run again: lost after a crash, or told to leave."""
        return [client for worker in self._workers.values() for client in sorted(worker.lost)]

    def handle_command(self, message: bytes) -> None:
        """Execute a command of the coordinator.

        Args:
            message: "start 12" or "stop 12", in ASCII.

        Raises:
            RunFailed: For any other message.
        """
        word, _, number = message.decode("ascii", "replace").partition(" ")
        if word not in ("start", "stop") or not number.isdecimal() or int(number) >= self._clients:
            raise RunFailed(f"unknown command of the coordinator: {message[:40]!r}")
        (self.start_worker if word == "start" else self.stop_worker)([int(number)])

    def start_worker(self, clients: Iterable[int]) -> None:
        """Mark clients as wanted; the next `update` starts their processes."""
        for client in clients:
            worker = self._worker(client)
            if client in worker.lost:
                continue  # the coordinator may not know it yet
            worker.wanted.add(client)
            self._exit_deadlines.pop(worker.first, None)
            if worker.handle is not None and worker.process.group:
                worker.handle.send_command(f"start {client}")
            else:
                self._queued[worker.first] = worker

    def stop_worker(self, clients: Iterable[int]) -> None:
        """Mark clients as not wanted; `update` kills their processes if they do not exit within EXIT_S."""
        for client in clients:
            worker = self._worker(client)
            worker.wanted.discard(client)
            if not worker.process.group:
                self._queued.pop(client, None)
                self._exit_deadlines[client] = self._awake.now() + EXIT_S
            elif worker.handle is not None:
                worker.handle.send_command(f"stop {client}")

    def update(self) -> None:
        """Start queued processes that are due, up to the limit, and kill those that did not exit in time."""
        now, awake = time.monotonic(), self._awake.now()
        for first, worker in list(self._queued.items()):
            if len(self._running) >= self._max_running:
                break
            if worker.handle is None and worker.due <= now:
                del self._queued[first]
                self._start(worker)
        for first in [first for first, deadline in self._exit_deadlines.items() if deadline <= awake]:
            del self._exit_deadlines[first]
            if (handle := self._workers[first].handle) is not None:
                self._report(f"{self._workers[first].process.title} was stopped and did not exit within {EXIT_S:g} s: killed")
                handle.signal(SIGKILL)  # its ledger stays consistent

    def ended(self, sentinel: Any) -> None:
        """Handle the end of a process: restart it after a crash, lose the clients that failed, or fail the run.

        Args:
            sentinel: Its file descriptor.

        Raises:
            RunFailed: If it cannot be restarted and all clients are required.
        """
        worker = self._running.pop(sentinel)
        assert worker.handle is not None
        code, log, reason = worker.handle.wait(), worker.handle.log_path, worker.handle.reason
        worker.handle.close()
        worker.handle = None
        if code == 0 and worker.wanted and self._max_running >= self._clients:
            self._lose(worker, worker.process.clients)  # it was told to leave: no client makes room for another here
        if code == 0 or not worker.wanted:
            return
        error = failure(worker.process.title, code, log, reason)
        failed: list[int | None] = [*failed_clients(reason, worker.process.clients)] or [None]
        hopeless = [one for one in failed if code in NO_RESTART or worker.restarts[one] >= self._limits.max_restarts]
        worker.restarts.update(failed)
        if not hopeless:
            count = max(worker.restarts[one] for one in failed)
            self._report(f"{error}; restarted ({count} of at most {self._limits.max_restarts} restarts)")
        elif self._limits.all_required:
            error.args = (
                f"{error}; runtime.quorum is 1, so every client must answer: to continue without it, lower the quorum in the run's "
                "config.yaml",
            )
            raise error
        else:
            lost = [client for client in hopeless if client is not None]
            self._lose(worker, lost or worker.process.clients)  # the coordinator checks the quorum
            who = f"{listed_clients(lost)}: " if lost else ""
            others = "; the other clients of this process start again" if worker.wanted else ""
            self._report(f"{error}; {who}lost for the rest of the run{others}")
        if worker.wanted:
            worker.crashed()
            self._queued[worker.first] = worker

    def finish(self) -> None:
        """End the run: no client is wanted, and processes of several clients exit."""
        self._queued.clear()
        for worker in self._workers.values():
            worker.wanted.clear()
            if worker.handle is not None:
                worker.handle.finish()

    def _worker(self, client: int) -> WorkerProcess:
        first = client - client % self._size
        if first not in self._workers:
            clients = range(first, min(first + self._size, self._clients))
            self._workers[first] = WorkerProcess(ClientRange(clients, group=self._size > 1))
        return self._workers[first]

    def _lose(self, worker: WorkerProcess, clients: Iterable[int]) -> None:
        for client in sorted(set(clients) - worker.lost):
            worker.lost.add(client)
            worker.wanted.discard(client)
            self._on_lost(client)

    def _start(self, worker: WorkerProcess) -> None:
        worker.handle, worker.started = self._launcher.start(worker.process), time.monotonic()
        if worker.process.group:
            for client in sorted(worker.wanted):
                worker.handle.send_command(f"start {client}")
        self._running[worker.handle.sentinel] = worker
