"""The way to an agent: a command whose standard input and output reach it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from dpcfl_net.launch.placement.base import LOST
from dpcfl_net.launch.placement.messages import LONGEST

STDERR_TAIL = 400  # characters of what the command said when it failed


class HostConnection(Protocol):
    """Orders go in, reports come out, until one side ends."""

    def send(self, data: bytes) -> None:
        """Pass an order on; one to an agent that is gone is dropped, since its end is reported anyway."""

    def reports(self) -> Iterator[bytes]:
        """Lines of the agent as they come, to its end."""

    def failure(self) -> str:
        """Why it ended, as far as is known."""

    def hang_up(self) -> None:
        """End the agent's input: it ends its workers and leaves."""

    def close(self, patience_s: float) -> None:
        """Hang up, and see that nothing is left here."""


def one_line(said: bytes | bytearray) -> str:
    """What a command said, for a message: of a log its reader takes the last line, which must have all of it."""
    return "; ".join(line.strip() for line in said.decode(errors="replace").splitlines() if line.strip())


class CommandConnection:
    """Over a command such as ssh, srun or kubectl exec. log: where its standard error goes."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self._log, self._lock = log, threading.Lock()
        with log.open("ab") as errors:
            self._from = errors.tell()
            # A session of its own: Ctrl-C is for the launcher, which ends everybody in order.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, bufsize=0
            )

    def send(self, data: bytes) -> None:
        """See `HostConnection`."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) or 0 :]

    def reports(self) -> Iterator[bytes]:
        """See `HostConnection`."""
        assert self._process.stdout is not None
        rest = b""
        while piece := self._process.stdout.read(1 << 20):
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
            if len(rest) > LONGEST:
                return

    def failure(self) -> str:
        """See `HostConnection`."""
        try:
            code: int | str = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = "none"
        said = one_line(self._log.read_bytes()[self._from :])
        return f"exit code {code}: {said[-STDERR_TAIL:] or 'no message'}" if code != LOST or said else "the connection was lost"

    def hang_up(self) -> None:
        """See `HostConnection`."""
        assert self._process.stdin is not None
        # Whoever holds the lock waits for a host that takes nothing in; `close` ends the command then.
        if self._lock.acquire(timeout=1):
            try:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            finally:
                self._lock.release()

    def close(self, patience_s: float) -> None:
        """See `HostConnection`."""
        self.hang_up()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
