"""Connections to agents over the standard input and output of a command."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from dpcfl_net.core.clock import wait_awake
from dpcfl_net.launch.placement.base import LOST
from dpcfl_net.launch.placement.messages import LONGEST

STDERR_TAIL = 400  # characters of the standard error of a failed command
SEND_S = 120.0  # for a host that reads nothing, as where its agent is stopped; it is lost then


class HostConnection(Protocol):
    """Connection to an agent: sends commands, receives reports."""

    def send(self, data: bytes) -> None:
        """Send a command; dropped if the agent has ended, which is reported separately."""

    def reports(self) -> Iterator[bytes]:
        """Yield the agent's lines until it ends."""

    def failure(self) -> str:
        """Return why it ended, as far as known."""

    def hang_up(self) -> None:
        """Close the agent's input: it ends its workers and exits."""

    def cut(self) -> None:
        """End the connection from this side, without the agent; `reports` ends then."""

    def close(self, patience_s: float) -> None:
        """Hang up and end the command on this machine, after `patience_s` seconds by SIGKILL."""


def one_line(output: bytes | bytearray) -> str:
    """Join the output of a command to one line for a message."""
    return "; ".join(line.strip() for line in output.decode(errors="replace").splitlines() if line.strip())


def complete_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream without their ends, until one is longer than LONGEST.

    Args:
        parts: The stream in parts of any length. A part is searched once: a host that sends a long line byte by byte costs no more.
    """
    begun = bytearray()
    for part in parts:
        first, *others = part.split(b"\n")
        begun += first
        if others:
            yield bytes(begun)
            yield from others[:-1]
            begun = bytearray(others[-1])
        if len(begun) > LONGEST:
            return


class CommandConnection(HostConnection):
    """Connection over a command such as ssh, srun or kubectl exec.

    Args:
        argv: The command.
        log: File for its standard error.
    """

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self._log, self._lock, self._silent = log, threading.Lock(), ""
        with log.open("ab") as errors:
            self._log_start = errors.tell()
            # New session: Ctrl-C reaches only the launcher, which ends all processes in order.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, bufsize=0
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            room, view = select.poll(), memoryview(data)
            room.register(self._process.stdin, select.POLLOUT)
            while view:
                written = self._process.stdin.write(view)
                view = view[written or 0 :]
                if not written and not wait_awake(lambda seconds: room.poll(1000 * seconds), SEND_S):
                    self._silent = f"it has read no command for {SEND_S:g} s"
                    self._process.kill()
                    return

    def reports(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        stdout = self._process.stdout
        yield from complete_lines(iter(lambda: stdout.read(1 << 20), b""))

    def failure(self) -> str:
        if self._silent:
            return self._silent
        try:
            code: int | str = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = "none"
        message = one_line(self._log.read_bytes()[self._log_start :])
        if code == LOST and not message:
            return "the connection was lost"
        return f"exit code {code}: {message[-STDERR_TAIL:] or 'no message'}"

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        # `send` may hold the lock while the host reads nothing; then `close` ends the command.
        if self._lock.acquire(timeout=1):
            try:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            finally:
                self._lock.release()

    def cut(self) -> None:
        self._process.kill()  # no effect if it has ended

    def close(self, patience_s: float) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            try:
                self.hang_up()
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                self.cut()
                self._process.wait()
                self.hang_up()  # now `send` has given the lock back
