"""Workers on other hosts: one agent for each, over whatever line reaches it; hosts that are lost are tried again."""

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
from dpcfl_net.launch.placement.base import LOST, Node, Posting
from dpcfl_net.launch.placement.connection import HostConnection
from dpcfl_net.launch.placement.messages import (
    Brief,
    Briefed,
    Ended,
    Enrol,
    Hello,
    Keys,
    LedgerLines,
    Message,
    Signal,
    Start,
    Tell,
    Trouble,
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
    """How to reach a host. workers: its share of them, beside the other hosts'. data_root: of the data sets there.
    where: what the engine that placed it calls it."""

    name: str
    dial: Dial
    workers: int | None = None
    data_root: str | None = None
    where: str | None = None


class RemoteHandle:
    """A worker that an agent started."""

    def __init__(self, post: Post, posting: Posting, log: Path) -> None:
        self.log_path, self.posting = log, posting
        self._post, self._over = post, threading.Event()
        self._code: int | None = None
        self._read, self._write = os.pipe()

    @property
    def sentinel(self) -> int:
        """See `launcher.Handle`."""
        return self._read

    def poll(self) -> int | None:
        """See `launcher.Handle`."""
        return self._code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See `launcher.Handle`."""
        self._over.wait(timeout_s)
        return self._code

    def signal(self, number: int) -> None:
        """See `launcher.Handle`."""
        self._post.send(Signal(first=self.posting.clients[0], number=number))

    def kill(self) -> None:
        """See `launcher.Handle`."""
        self.signal(9)

    def tell(self, word: str) -> None:
        """See `launcher.Handle`."""
        self._post.send(Tell(first=self.posting.clients[0], word=word))

    def finish(self) -> None:
        """See `launcher.Handle`."""
        if self.posting.group:
            self.tell("end")

    def close(self) -> None:
        """See `launcher.Handle`."""
        os.close(self._read)

    def ended(self, code: int, log: str) -> None:
        """It has ended with this code, after these words; called once, by the post's thread."""
        with self.log_path.open("a") as file:
            file.write(log if log.endswith("\n") or not log else log + "\n")
        self._code = code
        self._over.set()
        os.close(self._write)


@dataclass(eq=False)
class Post:
    """A host with its agent: a thread listens to it, and dials again when orders come for one that was lost."""

    host: Host
    books: Path | None = None  # the folder of ledgers here, once there is a run
    hello: Hello | None = None
    keys: dict[int, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    trouble: str = ""

    def __post_init__(self) -> None:
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._line: HostConnection | None = None
        self._answered = False
        self._brief: list[Message] = []  # what an agent must hear first, again after a loss
        self._handles: dict[int, RemoteHandle] = {}
        self._due: list[Message] = []
        self._thread: threading.Thread | None = None
        self._closing, self._code = False, LOST

    def open(self, *, again: bool = False) -> None:
        """Begin to dial, in the background; `wait_for` says what came of it."""
        self._thread = threading.Thread(target=self._attend, args=(again,), name=f"host {self.host.name}", daemon=True)
        self._thread.start()

    def send(self, order: Message) -> None:
        """Pass an order on; to a host that is being dialled, when it answers."""
        with self._lock:
            if self._line is not None and self._answered:
                self._line.send(order.line())
            else:
                self._due.append(order)

    def brief(self, brief: Brief) -> None:
        """The job, now and whenever the host is dialled again: then its clients must be found there, with their ledgers."""
        self._brief = [Enrol(clients=sorted(self.keys), known=True), brief]
        self.send(brief)

    def start(self, posting: Posting, log: Path) -> RemoteHandle:
        """Start a worker there, on a host that was lost once it answers again."""
        handle = RemoteHandle(self, posting, log)
        with self._lock:
            self._handles[posting.clients[0]] = handle
            gone = self._thread is None or not self._thread.is_alive()
        self.send(Start(first=posting.clients[0], count=len(posting.clients), group=posting.group))
        if gone:
            self.open(again=True)
        return handle

    def greeted(self) -> bool:
        """Whether its agent has answered."""
        return self.hello is not None

    def enrolled(self) -> bool:
        """Whether its clients' public keys have come."""
        return bool(self.keys)

    def wait_for(self, what: Callable[[], object], seconds: float) -> None:
        """Wait until `what` is true; RunFailed with the host's trouble, or when it takes too long."""
        with self._news:
            if not self._news.wait_for(lambda: what() or self.trouble, seconds):
                raise RunFailed(f"host {self.host.name} has not answered within {seconds:g} s")
        if self.trouble and not what():
            raise RunFailed(f"host {self.host.name}: {self.trouble}")

    def hang_up(self) -> None:
        """Have the agent end its workers and leave."""
        self._closing = True
        line = self._line
        if line is not None:
            line.hang_up()

    def join(self, seconds: float) -> None:
        """Wait for everything to be gone after `hang_up`, for so long at most: no thread of a post keeps a process alive."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _attend(self, again: bool) -> None:
        """The thread: dial, listen, and report every worker as lost when the line ends."""
        deadline = time.monotonic() + (AGAIN_S if again else 0)
        self.trouble, self._code = "", LOST
        try:
            while not self._listen() and time.monotonic() < deadline and not self._closing:
                time.sleep(PAUSE_S)
        except Exception as error:  # of whatever engine the line is made of: the workers there are lost, and it is said why
            self.trouble = f"{type(error).__name__}: {error}"
        with self._lock:
            self._due.clear()
            handles, self._handles = list(self._handles.values()), {}
            self._thread = None
        for handle in handles:
            handle.ended(self._code, f"host {self.host.name}: {self.trouble or 'the agent is gone'}")
        with self._news:
            self.trouble = self.trouble or "the agent is gone"
            self._news.notify_all()

    def _listen(self) -> bool:
        """One connection to its end; False if the agent never answered."""
        answered = False
        try:
            line = self.host.dial()
        except OSError as error:
            self.trouble = str(error)
            return False
        self._line = line
        if self._closing:
            line.hang_up()
        try:
            for data in line.reports():
                report = read_report(data)
                if isinstance(report, Hello):
                    self._greeted(report, line)
                    answered = True
                else:
                    self._note(report)
            if not answered or not self.trouble:
                self.trouble = line.failure()
        except DpcflError as error:
            self.trouble = str(error)
        finally:
            with self._lock:
                self._line, self._answered = None, False
            line.close(LEAVE_S)
        return answered

    def _greeted(self, hello: Hello, line: HostConnection) -> None:
        if hello.version != __version__:
            raise Refused("version", f"dpcfl_net {hello.version} is installed there, {__version__} here")
        with self._lock:
            for order in [*self._brief, *self._due]:
                line.send(order.line())
            self._due.clear()
            self._answered = True
        with self._news:
            self.hello, self.trouble, self._code = hello, "", LOST
            self._news.notify_all()

    def _note(self, report: Message) -> None:
        if isinstance(report, Ended):
            with self._lock:
                handle = self._handles.pop(report.first, None)
            if handle is not None:
                handle.ended(report.code, report.log)
        elif isinstance(report, Briefed):
            self.devices = report.devices
        elif isinstance(report, LedgerLines):
            self._book(report)
        elif isinstance(report, Trouble):
            self.trouble, self._code = report.reason, report.code
        elif isinstance(report, Keys):
            if self.keys and report.keys != self.keys:
                raise Refused("keys", "the keys there are not those that were enrolled")
            with self._news:
                self.keys = report.keys
                self._news.notify_all()

    def _book(self, report: LedgerLines) -> None:
        """Keep a copy of a client's ledger for the operator's books; what it is charged is decided and kept there."""
        if self.books is None or report.client not in self.keys:
            raise Refused("agent-line", f"a ledger of client {report.client}, who is not there")
        folder = self.books / client_key(report.client)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LINES
        before = path.read_bytes() if path.exists() else b""
        if report.at > len(before):
            raise Refused("agent-line", f"the ledger of client {report.client} goes on at byte {report.at} of {len(before)}")
        write_atomically(path, (before[: report.at] + report.lines.encode()).decode())
        write_atomically(folder / COUNTER, report.counter)


class RemoteLauncher:
    """Starts workers of one job on hosts. where: by a posting's first client."""

    def __init__(self, where: Mapping[int, Post], logs: Path) -> None:
        self._where, self._logs = where, logs

    def capacity(self) -> list[Node]:
        """See `placement.base.Launcher`."""
        return [node_of(post) for post in dict.fromkeys(self._where.values())]

    def start(self, posting: Posting) -> RemoteHandle:
        """See `placement.base.Launcher`."""
        return self._where[posting.clients[0]].start(posting, self._logs / posting.log)

    def close(self) -> None:
        """See `placement.base.Launcher`."""
        close_all(list(dict.fromkeys(self._where.values())))


def close_all(posts: Sequence[Post]) -> None:
    """Hang up on all, then wait for all of them together."""
    for post in posts:
        post.hang_up()
    deadline = time.monotonic() + 2 * LEAVE_S
    for post in posts:
        post.join(max(0.0, deadline - time.monotonic()))


def node_of(post: Post) -> Node:
    """A host as it described itself."""
    assert post.hello is not None
    return Node(post.host.name, post.host.where or post.hello.host, post.hello.cores, post.hello.memory, tuple(post.hello.gpus))


def place(postings: int, shares: Sequence[int]) -> list[int]:
    """The host of each posting, in proportion to the shares, neighbours apart: the one furthest below its share is next."""
    if not shares or min(shares) < 0 or not sum(shares):
        raise ConfigError("no host takes workers")
    placed, where = [0] * len(shares), []
    for _ in range(postings):
        chosen = min((k for k in range(len(shares)) if shares[k]), key=lambda k: ((placed[k] + 1) / shares[k], k))
        placed[chosen] += 1
        where.append(chosen)
    return where
