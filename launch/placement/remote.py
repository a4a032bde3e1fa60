"""Workers on other hosts: one agent on each host; lost hosts are dialled again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dpcfl_net import __version__
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, DpcflError, Refused, RunFailed
from dpcfl_net.launch.placement.base import LOST, ClientRange, Node
from dpcfl_net.launch.placement.connection import HostConnection
from dpcfl_net.launch.placement.messages import (
    AgentError,
    AgentHello,
    GroupCommand,
    JobAccepted,
    LedgerUpdate,
    Message,
    PrepareKeys,
    PublicKeys,
    SendSignal,
    SetJob,
    StartWorker,
    WorkerEnded,
    read_report,
)
from dpcfl_net.privacy.ledger.ledger import COUNTER, LINES
from dpcfl_net.transport.keys import client_key

HELLO_S = 120.0  # for a host to answer at first; importing torch over a slow file system takes its time
AGAIN_S = 30.0  # for a host that was lost to come back before its workers count as ended once more
PAUSE_S = 1.0
LEAVE_S = 10.0

Dial = Callable[[], HostConnection]


@dataclass(frozen=True)
class Host:
    """How to reach a host.

    Attributes:
        name: Unique name of the host in the run.
        dial: Opens a connection to an agent there.
        workers: Share of the worker processes relative to other hosts; None: number of cores.
        data_root: Folder of the data sets there.
        where: The engine's name for the host.
    """

    name: str
    dial: Dial
    workers: int | None = None
    data_root: str | None = None
    where: str | None = None


class RemoteHandle:
    """A worker that an agent started."""

    def __init__(self, agent: HostAgent, process: ClientRange, log: Path) -> None:
        self.log_path, self.process = log, process
        self._agent, self._over = agent, threading.Event()
        self._code: int | None = None
        self._read, self._write = os.pipe()

    @property
    def sentinel(self) -> int:
        """See `base.Handle`."""
        return self._read

    def poll(self) -> int | None:
        """See `base.Handle`."""
        return self._code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See `base.Handle`."""
        self._over.wait(timeout_s)
        return self._code

    def signal(self, number: int) -> None:
        """See `base.Handle`."""
        self._agent.send(SendSignal(first=self.process.clients[0], number=number))

    def kill(self) -> None:
        """See `base.Handle`."""
        self.signal(9)

    def tell(self, word: str) -> None:
        """See `base.Handle`."""
        self._agent.send(GroupCommand(first=self.process.clients[0], word=word))

    def finish(self) -> None:
        """See `base.Handle`."""
        if self.process.group:
            self.tell("end")

    def close(self) -> None:
        """See `base.Handle`."""
        os.close(self._read)

    def ended(self, code: int, log: str) -> None:
        """It has ended with this code, after these words; called once, by the agent's thread."""
        with self.log_path.open("a") as file:
            file.write(log if log.endswith("\n") or not log else log + "\n")
        self._code = code
        self._over.set()
        os.close(self._write)


@dataclass(eq=False)
class HostAgent:
    """Connection to the agent of one host: a thread listens, and dials again when a command comes for a lost host."""

    host: Host
    ledgers: Path | None = None  # folder of the copies of ledgers, once there is a run
    hello: AgentHello | None = None
    keys: dict[int, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    error_text: str = ""

    def __post_init__(self) -> None:
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._line: HostConnection | None = None
        self._answered = False
        self._first: list[Message] = []  # commands that an agent receives first, also after a reconnection
        self._handles: dict[int, RemoteHandle] = {}
        self._due: list[Message] = []
        self._thread: threading.Thread | None = None
        self._closing, self._code = False, LOST

    def open(self, *, again: bool = False) -> None:
        """Start to dial in the background; `wait_for` waits for the result."""
        self._thread = threading.Thread(target=self._attend, args=(again,), name=f"host {self.host.name}", daemon=True)
        self._thread.start()

    def send(self, order: Message) -> None:
        """Send a command, or queue it while the host is being dialled."""
        with self._lock:
            if self._line is not None and self._answered:
                self._line.send(order.line())
            else:
                self._due.append(order)

    def set_job(self, job: SetJob) -> None:
        """Send the job now and after every reconnection, when the clients' keys and ledgers must exist there."""
        self._first = [PrepareKeys(clients=sorted(self.keys), existing=True), job]
        self.send(job)

    def start(self, process: ClientRange, log: Path) -> RemoteHandle:
        """Start a worker there; on a lost host as soon as it answers again."""
        handle = RemoteHandle(self, process, log)
        with self._lock:
            self._handles[process.clients[0]] = handle
            gone = self._thread is None or not self._thread.is_alive()
        self.send(StartWorker(first=process.clients[0], count=len(process.clients), group=process.group))
        if gone:
            self.open(again=True)
        return handle

    def has_answered(self) -> bool:
        """Whether its agent has answered."""
        return self.hello is not None

    def has_keys(self) -> bool:
        """Whether its clients' public keys have arrived."""
        return bool(self.keys)

    def wait_for(self, what: Callable[[], object], seconds: float) -> None:
        """Wait until `what()` is true.

        Raises:
            RunFailed: If the agent failed, or after `seconds`.
        """
        with self._news:
            if not self._news.wait_for(lambda: what() or self.error_text, seconds):
                raise RunFailed(f"host {self.host.name} has not answered within {seconds:g} s")
        if self.error_text and not what():
            raise RunFailed(f"host {self.host.name}: {self.error_text}")

    def hang_up(self) -> None:
        """Close the agent's input: it ends its workers and exits."""
        self._closing = True
        line = self._line
        if line is not None:
            line.hang_up()

    def join(self, seconds: float) -> None:
        """Wait for everything to be gone after `hang_up`, for so long at most: its thread does not keep a process alive."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _attend(self, again: bool) -> None:
        """Thread: dial, listen, and report every worker as lost when the connection ends."""
        deadline = time.monotonic() + (AGAIN_S if again else 0)
        self.error_text, self._code = "", LOST
        try:
            while not self._listen() and time.monotonic() < deadline and not self._closing:
                time.sleep(PAUSE_S)
        except Exception as error:  # of whatever engine the line is made of: the workers there are lost, and it is said why
            self.error_text = f"{type(error).__name__}: {error}"
        with self._lock:
            self._due.clear()
            handles, self._handles = list(self._handles.values()), {}
            self._thread = None
        for handle in handles:
            handle.ended(self._code, f"host {self.host.name}: {self.error_text or 'the agent is gone'}")
        with self._news:
            self.error_text = self.error_text or "the agent is gone"
            self._news.notify_all()

    def _listen(self) -> bool:
        """Serve one connection to its end; False if the agent never answered."""
        answered = False
        try:
            line = self.host.dial()
        except OSError as error:
            self.error_text = str(error)
            return False
        self._line = line
        if self._closing:
            line.hang_up()
        try:
            for data in line.reports():
                report = read_report(data)
                if isinstance(report, AgentHello):
                    self._greeted(report, line)
                    answered = True
                else:
                    self._note(report)
            if not answered or not self.error_text:
                self.error_text = line.failure()
        except DpcflError as error:
            self.error_text = str(error)
        finally:
            with self._lock:
                self._line, self._answered = None, False
            line.close(LEAVE_S)
        return answered

    def _greeted(self, hello: AgentHello, line: HostConnection) -> None:
        if hello.version != __version__:
            raise Refused("version", f"dpcfl_net {hello.version} is installed there, {__version__} here")
        with self._lock:
            for order in [*self._first, *self._due]:
                line.send(order.line())
            self._due.clear()
            self._answered = True
        with self._news:
            self.hello, self.error_text, self._code = hello, "", LOST
            self._news.notify_all()

    def _note(self, report: Message) -> None:
        if isinstance(report, WorkerEnded):
            with self._lock:
                handle = self._handles.pop(report.first, None)
            if handle is not None:
                handle.ended(report.code, report.log)
        elif isinstance(report, JobAccepted):
            self.devices = report.devices
        elif isinstance(report, LedgerUpdate):
            self._copy_ledger(report)
        elif isinstance(report, AgentError):
            self.error_text, self._code = report.reason, report.code
        elif isinstance(report, PublicKeys):
            if self.keys and report.keys != self.keys:
                raise Refused("keys", "the keys there are not those that were enrolled")
            with self._news:
                self.keys = report.keys
                self._news.notify_all()

    def _copy_ledger(self, report: LedgerUpdate) -> None:
        """Store a copy of a client's ledger for the operator; the ledger that counts stays on its host."""
        if self.ledgers is None or report.client not in self.keys:
            raise Refused("agent-line", f"a ledger of client {report.client}, who is not there")
        folder = self.ledgers / client_key(report.client)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LINES
        before = path.read_bytes() if path.exists() else b""
        if report.at > len(before):
            raise Refused("agent-line", f"the ledger of client {report.client} goes on at byte {report.at} of {len(before)}")
        write_atomically(path, (before[: report.at] + report.lines.encode()).decode())
        write_atomically(folder / COUNTER, report.counter)


class RemoteLauncher:
    """Starts workers of one job on other hosts; `where` maps the first client of each process to its host."""

    def __init__(self, where: Mapping[int, HostAgent], logs: Path) -> None:
        self._where, self._logs = where, logs

    def capacity(self) -> list[Node]:
        """See `base.Launcher`."""
        return [node_of(agent) for agent in dict.fromkeys(self._where.values())]

    def start(self, process: ClientRange) -> RemoteHandle:
        """See `base.Launcher`."""
        return self._where[process.clients[0]].start(process, self._logs / process.log)

    def close(self) -> None:
        """See `base.Launcher`."""
        close_all(list(dict.fromkeys(self._where.values())))


def close_all(agents: Sequence[HostAgent]) -> None:
    """Close all connections and wait for them together."""
    for agent in agents:
        agent.hang_up()
    deadline = time.monotonic() + 2 * LEAVE_S
    for agent in agents:
        agent.join(max(0.0, deadline - time.monotonic()))


def node_of(agent: HostAgent) -> Node:
    """Return a host's own description."""
    assert agent.hello is not None
    return Node(
        agent.host.name, agent.host.where or agent.hello.host, agent.hello.cores, agent.hello.memory, tuple(agent.hello.gpus)
    )


def place(processes: int, shares: Sequence[int]) -> list[int]:
    """Assign processes to hosts in proportion to their shares, neighbours apart.

    Args:
        processes: Number of worker processes.
        shares: Share of each host, at least 0.

    Returns:
        Index of the host of each process.

    Raises:
        ConfigError: If no share is positive.
    """
    if not shares or min(shares) < 0 or not sum(shares):
        raise ConfigError("no host takes workers")
    placed, where = [0] * len(shares), []
    for _ in range(processes):
        chosen = min((k for k in range(len(shares)) if shares[k]), key=lambda k: ((placed[k] + 1) / shares[k], k))
        placed[chosen] += 1
        where.append(chosen)
    return where
