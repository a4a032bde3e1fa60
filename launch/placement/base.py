"""Interfaces of worker processes and their launchers."""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import dpcfl_net
from dpcfl_net.core.errors import DpcflError, RunFailed
from dpcfl_net.core.failed_clients import shortened

# Before the name of a module of this package that an interpreter runs. With -m alone the current folder comes before installed
# packages: a file torch.py there, which another user of a shared folder may have written, would be executed.
RUN_MODULE = ("-P", "-m")
_FRAME = re.compile(r' *File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
LOST = 255  # exit code of a process whose host is lost; ssh uses the same


def agent_command(python: str, root: str, run: str, name: str, *, cpu: bool) -> list[str]:
    """Return the command that runs an agent.

    Args:
        python: Interpreter on the agent's host.
        root: Folder of the agents there.
        run: Id of the run.
        name: Name of the host.
        cpu: True if no worker may use a GPU: the agent then does not look for GPUs.
    """
    command = [python, *RUN_MODULE, "dpcfl_net.launch.placement.agent", "--root", root, "--run", run, "--node", name]
    return [*command, *(["--cpu"] if cpu else [])]


@dataclass(frozen=True)
class Node:
    """A host, or a share of one, that takes worker processes.

    Attributes:
        name: Name in the hosts file or of the engine's allocation.
        location: Host name, or the engine's name for the host.
        cores: Cores that workers may use at once.
        memory: Available memory, bytes.
        gpus: Name and UUID of each GPU; empty if no worker may use one.
    """

    name: str
    location: str
    cores: int
    memory: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClientRange:
    """Clients that one worker process serves.

    Attributes:
        clients: Client ids.
        group: True if the process serves several clients, each from its start command on; False if it serves one client.
    """

    clients: range
    group: bool = False

    @property
    def title(self) -> str:
        """Name in process lists, logs and messages."""
        return f"clients {self.clients[0]} to {self.clients[-1]}" if self.group else f"client {self.clients[0]}"

    @property
    def log(self) -> str:
        """Name of the log file."""
        return f"{self.title.replace(' ', '_')}.log"


@dataclass(frozen=True)
class Addresses:
    """Addresses for the workers of a run.

    Attributes:
        coordinator: Address of the coordinator.
        observer: Address of the observer.
        relayed: Address of the relay of a client's link, by client; clients without one connect to the coordinator.
        namespaces: Network namespace of each client; empty: none.
    """

    coordinator: str
    observer: str
    relayed: Mapping[int, str] = field(default_factory=dict)
    namespaces: Mapping[int, str] = field(default_factory=dict)


class Process(Protocol):
    """A started process, on this or another host."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait at most `timeout_s` seconds (None: no limit); return the exit code, `LOST` if unknown, or None while it runs."""

    def close(self) -> None:
        """Release its file descriptors."""


class Handle(Process, Protocol):
    """A worker process."""

    log_path: Path

    @property
    def reason(self) -> str:
        """Message of its failure, once it has ended; empty if only its log has one."""

    def send_command(self, command: str) -> None:
        """Send "start 3" or "stop 3" to a group; dropped if the process has ended."""

    def finish(self) -> None:
        """Announce to a group that no more clients will start."""


class Role(Process, Protocol):
    """A coordinator, observer, relay or aggregator; only an aggregator may run on another host."""

    title: str

    def failure(self, code: int | None) -> DpcflError:
        """Build the error of a run that cannot continue without it."""


class Launcher(Protocol):
    """Starts workers of one job, which connect to a running coordinator."""

    def start(self, process: ClientRange) -> Handle:
        """Start a worker process. A client that ran before continues with its ledger; without its ledger it is refused."""


def _line_of(last: str, log: list[str]) -> str:
    """File and line of the user's own code that raised an error, from the traceback before it in a log; empty without any."""
    if last not in log:
        return ""
    end = len(log) - 1 - log[::-1].index(last)
    start = next((number for number in range(end, -1, -1) if log[number].startswith("Traceback (")), end)
    frames = [frame for line in log[start:end] if (frame := _FRAME.match(line)) and _is_own(frame["file"])]
    return f" ({Path(frames[-1]['file']).name}, line {frames[-1]['line']})" if frames else ""


def _is_own(file: str) -> bool:
    """True for a file that belongs neither to this package nor to Python or its installed packages."""
    others = (Path(dpcfl_net.__file__).parent, *map(Path, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))))
    path = Path(file)
    return path.is_absolute() and "site-packages" not in path.parts and not any(map(path.is_relative_to, others))


def end_of_process(code: int | str | None) -> str:
    """Say with which exit code a process ended, and what usually sends SIGKILL."""
    killed = " (killed, for example because the machine had no memory left)" if code == -signal.SIGKILL else ""
    return f"ended with code {code}{killed}"


def failure(title: str, code: int | None, log: Path, reason: str = "") -> DpcflError:
    """Build the error of a run that cannot continue without a process.

    Args:
        title: Name of the process.
        code: Its exit code; None if unknown.
        log: Its log.
        reason: Message of its failure, whose last line becomes part of this one; empty: the last line of the log does.
    """
    written = log.read_text(errors="replace") if log.is_file() else ""
    lines = (reason or written).strip().splitlines()
    last = lines[-1] if lines else "no message"
    line = _line_of(last, (written or reason).splitlines())
    error = RunFailed(f"{title} {end_of_process(code)}: {shortened(last)}{line} (log: {log})")
    if code in (2, 3):
        error.exit_code = code
    return error
