"""Processes of a run on this machine: forked from a fork server, watched and ended by the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net.core import open_files, process_log
from dpcfl_net.core.clock import AwakeClock, wait_awake
from dpcfl_net.core.errors import DpcflError, RunFailed
from dpcfl_net.launch.interrupts import blocked_signals
from dpcfl_net.launch.placement.base import LOST, Process, failure
from dpcfl_net.launch.placement.fork_server import Start

_log = logging.getLogger(__name__)

# User, paths and settings of numerical libraries; the rest of the launcher's environment is not passed on.
_PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    process_log.VARIABLE,
)
_PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "NPY_", "GLIBC_", "MALLOC_")
# Several threads would compute other bits and use the cores of other workers.
_SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The launcher's module path, independent of the current folder.
_MAIN = "import sys; sys.path[:] = {path!r}; from dpcfl_net.launch.placement.fork_server import main; main()"
FORK_S = 120.0  # time for a fork server to load its libraries and fork
LOOK_S = 0.1  # between looks at signals while they load
LONGEST_END = 32 << 10  # bytes of an exit code with its message
CODE_S = 5.0  # time for a fork server to report the exit code of a process that has ended


def role_environment(extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of coordinator and observer: the variables above and those named in `extra`."""
    names = {*_PASSED, *extra}
    passed = {name: value for name, value in os.environ.items() if name in names or name.startswith(_PASSED_PREFIXES)}
    # glibc moves these away, and setproctitle looks for the arguments in front of the first variable: processes had no titles.
    last = {name: passed.pop(name) for name in ("GLIBC_TUNABLES",) if name in passed}
    return passed | _SINGLE_THREAD | last


def worker_environment() -> dict[str, str]:
    """Return the environment of workers: the launcher's, with one thread per library."""
    return {**os.environ, **_SINGLE_THREAD, "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2")}


class Child:
    """A running process.

    Args:
        title: Name in process lists and messages.
        log: Its log.
        pid: Process id.
        sentinel: Handle of the process; readable when it has ended.
        channel: Socket on which it or its fork server reports the exit code. The process ends when it is closed.
        resume: Continues its fork server, which may be stopped.

    Attributes:
        reason: Message of its failure, once it has ended; empty if it sent none.
    """

    def __init__(
        self, title: str, log: Path, pid: int, sentinel: int, channel: socket.socket, resume: Callable[[], None]
    ) -> None:
        self.title, self.log, self.pid, self.sentinel, self._channel = title, log, pid, sentinel, channel
        self._resume = resume
        self._code: int | None = None
        self.reason = ""

    def alive(self, patience_s: float = 0) -> bool:
        """Return True if it still runs after `patience_s` seconds."""
        return not wait([self.sentinel], patience_s)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait at most `timeout_s` seconds; return the exit code, `base.LOST` if it is unknown, or None while it runs."""
        if self._code is None and wait([self.sentinel], timeout_s):
            self._code = self._read_code()
        return self._code

    def close(self) -> None:
        """Close its file descriptors; it ends if it runs."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
            self._channel.close()

    def failure(self, code: int | None) -> DpcflError:
        """Build the error of a run that cannot continue without it."""
        return failure(self.title, code, self.log, self.reason)

    def _read_code(self) -> int:
        self._channel.settimeout(CODE_S)
        if not wait([self._channel], 0):  # it was killed, and did not send its code
            self._resume()
        try:
            code, _, text = self._channel.recv(LONGEST_END).partition(b" ")
            self.reason = text.decode(errors="replace")
            return int(code)
        except (OSError, ValueError):  # the fork server has ended before it
            return LOST


class EndedEarly(RunFailed):
    """A process ended while it was forked, as by a kill for lack of memory."""


class ForkServer:
    """A fork server, as the launcher uses it; see `fork_server`.

    Args:
        child: Its process, if a fork server forked it; None: start a new interpreter.
    """

    def __init__(self, child: Child | None = None) -> None:
        self._lock, self._used = threading.Lock(), False
        self._child, self._process = child, None
        if child is not None:
            self._channel = child._channel
            return
        if (allowed := open_files.allow(open_files.OTHERS)) < open_files.OTHERS:
            raise RunFailed(f"this system allows a process {allowed} open files (ulimit -Hn); {open_files.OTHERS} are needed")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, blocked_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(path=_module_path()), str(theirs.fileno())], stdin=subprocess.DEVNULL,
                env=role_environment(), pass_fds=[theirs.fileno()],
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process id."""
        if self._child is not None:
            return self._child.pid
        assert self._process is not None
        return self._process.pid

    def alive(self, patience_s: float = 0) -> bool:
        """Return True if it still runs after `patience_s` seconds."""
        if self._child is not None:
            return self._child.alive(patience_s)
        assert self._process is not None
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def resume(self) -> None:
        """Continue it if it is stopped: it could not answer, or see that its channel ends, and the launcher waits for it."""
        if self._child is not None:
            if self._child.sentinel >= 0:  # not closed
                self._child.signal(signal.SIGCONT)
        elif self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def wait_until_loaded(self, check: Callable[[], None]) -> None:
        """Wait until a new interpreter has loaded its libraries, or has ended; `fork` would wait without a look at signals.

        Args:
            check: Called several times a second; what it raises ends the wait.
        """
        clock = AwakeClock()
        deadline = clock.now() + FORK_S
        while self._process is not None and not wait([self._channel], LOOK_S) and clock.now() < deadline:
            check()

    def fork(self, title: str, start: Start, log: Path, descriptors: Sequence[int] = ()) -> Child:
        """Fork a process.

        Args:
            title: Name in process lists and messages.
            start: What it does.
            log: File for its output.
            descriptors: Descriptors that it gets; the first one is `fork_server.FIRST_FREE` there, and so on.

        Raises:
            EndedEarly: If the process ended before it could do anything.
            RunFailed: If the fork server has ended or cannot fork.
        """
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(FORK_S)
        with self._lock, theirs, log.open("ab") as output, _in_memory(json.dumps(start._asdict()).encode()) as argument:
            try:
                socket.send_fds(self._channel, [title.encode()], [theirs.fileno(), output.fileno(), argument, *descriptors])
            except OSError as error:
                channel.close()
                raise RunFailed(f"{title} was not started: its parent process has ended ({error})") from None
            self._used = True
        self.resume()
        try:
            if not wait_awake(partial(wait, [channel]), FORK_S):
                raise TimeoutError("timed out")
            answer, handles, _, _ = socket.recv_fds(channel, 256, 1)
        except OSError as error:
            answer, handles = str(error).encode(), []
        if not handles:
            channel.close()
            text = answer.decode(errors="replace")
            if re.fullmatch(r"-?\d+", text):  # its parent tells its exit code
                raise EndedEarly(f"{title} was not started: it ended with code {text}")
            raise RunFailed(f"{title} was not started: {text or 'its parent process has ended'}")
        _log.debug("started %s: process %s, log %s", title, answer.decode(), log)
        return Child(title, log, int(answer), handles[0], channel, self.resume)

    def close(self) -> None:
        """End it. Its children end with their channels, not with it."""
        self.resume()
        if self._child is not None:
            self._child.close()
            return
        assert self._process is not None
        self._channel.close()
        if not self._used:  # it may still be loading its libraries
            self._process.kill()
        self._process.wait()


def _plain(value: Any) -> Any:
    """Return the fields of a dataclass; a path as text."""
    return vars(value) if dataclasses.is_dataclass(value) else str(value)


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Put bytes into an unnamed file and yield its descriptor, at its start."""
    descriptor = os.memfd_create("start")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def start_of(main: str, argument: Any, environment: Mapping[str, str], *, watches_launcher: bool = True) -> Start:
    """Describe what a child does.

    Args:
        main: Its main function, "module:function".
        argument: Argument of the function: a dataclass of plain values and paths, or a plain value.
        environment: Its environment variables.
        watches_launcher: False for a fork server.
    """
    return Start(
        main, json.dumps(argument, default=_plain), dict(environment), _current_folder(), _module_path(), watches_launcher
    )


def _current_folder() -> str:
    """Path of the current folder; empty if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _module_path() -> list[str]:
    """Return `sys.path` without what the import system ignores, such as a `Path` that a notebook has added."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def stop(processes: Sequence[Process], patience_s: float) -> None:
    """End processes: SIGTERM, and SIGKILL after `patience_s` seconds."""
    for process in processes:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # a stopped process does not receive SIGTERM
    deadline = time.monotonic() + patience_s
    for process in processes:
        if process.wait(max(0.05, deadline - time.monotonic())) is None:
            process.signal(signal.SIGKILL)
            process.wait()
        process.close()
