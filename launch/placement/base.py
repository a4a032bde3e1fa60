"""What every way of starting worker processes has in common: a posting goes in, a handle comes out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dpcfl_net.core.errors import DpcflError, RunFailed

LOST = 255  # the exit code of a process whose host is gone; ssh uses the same


@dataclass(frozen=True)
class Node:
    """A host, or a share of one, that takes worker processes. where: its own name for itself, or the engine's for it.
    cores: that may compute at once. memory: bytes available."""

    name: str
    where: str
    cores: int
    memory: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Posting:
    """One worker process: the clients that it serves, as a `group` (whoever is started) or, if it is one, for good."""

    clients: range
    group: bool = False

    @property
    def title(self) -> str:
        """Its name in process lists, logs and messages."""
        return f"clients {self.clients[0]} to {self.clients[-1]}" if self.group else f"client {self.clients[0]}"

    @property
    def log(self) -> str:
        """The name of its log file."""
        return f"{self.title.replace(' ', '_')}.log"


class Handle(Protocol):
    """A worker process that was started, here or elsewhere."""

    log_path: Path

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""

    def poll(self) -> int | None:
        """Its exit code, `LOST` if its host is gone; None while it runs."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """As `poll`, after waiting for its end for so long; None: for ever."""

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""

    def kill(self) -> None:
        """End it at once; its ledger is written for that."""

    def tell(self, word: str) -> None:
        """To a group: "start 3" or "stop 3"; one that has just ended is told nothing."""

    def finish(self) -> None:
        """To a group: nobody will be wanted any more."""

    def close(self) -> None:
        """Give its descriptors back."""


class Launcher(Protocol):
    """Starts workers of one job; they connect to a coordinator that is there already."""

    def capacity(self) -> list[Node]:
        """Where workers can run."""

    def start(self, posting: Posting) -> Handle:
        """Start one. Where a client was before, it starts again with the same ledger, or the handle ends with a refusal."""

    def close(self) -> None:
        """End whatever still runs."""


def failure(title: str, code: int | None, log: Path) -> DpcflError:
    """What to tell the user when the run cannot go on without a process."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    last = lines[-1] if lines else "no message"
    error = RunFailed(f"{title} ended with code {code}: {last} (log: {log})")
    if code in (2, 3):
        error.exit_code = code
    return error
