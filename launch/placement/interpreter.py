"""Coordinator and observer as fresh interpreters: nothing of the launcher's memory, environment or open files reaches them."""

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
from dpcfl_net.launch.interrupts import held_back
from dpcfl_net.launch.placement.base import failure

# Who and where one is, and what numerical libraries read: the rest of the launcher's environment is its own.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "NPY_", "GLIBC_", "MALLOC_")

# Several threads would compute other bits, and take the cores that workers compute on.
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Modules are found where the launcher finds them, whatever stands in the folder that it was started in.
_MAIN = "import sys; sys.path[:] = {path!r}; from dpcfl_net.launch.placement.role import main; main()"


def environment(extra: Iterable[str] = ()) -> dict[str, str]:
    """What such a process finds in its environment: the variables above, and those named in `extra`."""
    names = {*_PASSED, *extra}
    passed = {name: value for name, value in os.environ.items() if name in names or name.startswith(_PASSED_PREFIXES)}
    return passed | SINGLE_THREAD


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Set the environment that worker processes start with: libraries compute in one thread. Restores it afterwards.

    A library that is loaded in this process meanwhile would keep that setting: nothing else may be done inside.
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
    """One process that imports its role's modules as soon as it is there, and starts when it is told its specification.

    main: "module:function", called with the specification. pass_fds: descriptors it inherits beside its log and the pipe of
    its standard input, whose end means that the launcher is gone. `sentinel` becomes readable when it has ended.
    """

    def __init__(self, title: str, main: str, log: Path, *, pass_fds: Iterable[int] = (), extra: Iterable[str] = ()) -> None:
        self.title, self.log = title, log
        with log.open("ab") as output, held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(path=sys.path), title, main], stdin=subprocess.PIPE, stdout=output, stderr=output,
                env=environment(extra), pass_fds=tuple(pass_fds),
            )  # fmt: skip
        self.sentinel = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, spec: Any) -> None:
        """Tell it its specification, a dataclass of plain values and paths."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(spec), default=str).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended already: whoever waits for it learns why

    def alive(self) -> bool:
        """Whether it still runs."""
        return not wait([self.sentinel], 0)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.alive():
            self._process.send_signal(number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code once it has ended, or None."""
        if not wait([self.sentinel], timeout_s):
            return None
        return self._process.wait()

    def close(self) -> None:
        """Give the handles of a process that has ended back."""
        if self.sentinel >= 0:
            assert self._process.stdin is not None
            self._process.stdin.close()
            os.close(self.sentinel)
            self.sentinel = -1

    def failure(self, code: int | None) -> DpcflError:
        """What to tell the user when the run cannot go on without it."""
        return failure(self.title, code, self.log)
