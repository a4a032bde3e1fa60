"""Coordinator and observer as fresh interpreters, without the launcher's memory, environment and open files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import DpcflError
from dpcfl_net.launch.interrupts import blocked_signals
from dpcfl_net.launch.placement.base import failure

# User, paths and settings of numerical libraries; the rest of the launcher's environment is not passed on.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "NPY_", "GLIBC_", "MALLOC_")

# Several threads would compute other bits and use the cores of other workers.
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The launcher's module path, independent of the current folder.
_MAIN = "import sys; sys.path[:] = {path!r}; from dpcfl_net.launch.placement.role import main; main()"


def environment(extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of such a process: the variables above and those named in `extra`."""
    names = {*_PASSED, *extra}
    passed = {name: value for name, value in os.environ.items() if name in names or name.startswith(_PASSED_PREFIXES)}
    return passed | SINGLE_THREAD


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Set the environment of worker processes, with one thread per library; restore it afterwards.

    Load no library inside: it would keep the setting.
    """
    settings = SINGLE_THREAD | {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2")}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Interpreter:
    """A process that imports its modules at once and starts when it receives its specification.

    It exits when its standard input ends: the launcher has ended.

    Args:
        title: Name in process lists and messages.
        main: "module:function", called with the specification.
        log: File for its output.
        pass_fds: File descriptors that it inherits.
        extra: Names of further environment variables to pass on.

    Attributes:
        sentinel: File descriptor that becomes readable when it has ended.
    """

    def __init__(self, title: str, main: str, log: Path, *, pass_fds: Iterable[int] = (), extra: Iterable[str] = ()) -> None:
        self.title, self.log = title, log
        with log.open("ab") as output, blocked_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(path=sys.path), title, main], stdin=subprocess.PIPE, stdout=output, stderr=output,
                env=environment(extra), pass_fds=tuple(pass_fds),
            )  # fmt: skip
        self.sentinel = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def start(self, spec: Any) -> None:
        """Send it its specification, a dataclass of plain values and paths."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(spec), default=str).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended already; `wait` returns why

    def alive(self) -> bool:
        """Return whether it runs."""
        return not wait([self.sentinel], 0)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.alive():
            self._process.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait at most `timeout_s` seconds; return the exit code, or None while it runs."""
        if not wait([self.sentinel], timeout_s):
            return None
        return self._process.wait()

    def close(self) -> None:
        """Close the file descriptors of a process that has ended."""
        if self.sentinel >= 0:
            assert self._process.stdin is not None
            self._process.stdin.close()
            os.close(self.sentinel)
            self.sentinel = -1

    def failure(self, code: int | None) -> DpcflError:
        """Build the error of a run that cannot continue without it."""
        return failure(self.title, code, self.log)
