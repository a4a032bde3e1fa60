"""Agent: starts and watches workers on their host for a launcher elsewhere, until its standard input ends.

    python -m dpcfl_net.launch.placement.agent --root DIR --run NAME --node NAME

Commands arrive on standard input, reports leave on standard output (`messages`). Keys and ledgers stay in DIR/NAME/NODE.
A resumed client whose ledger is missing is refused: starting again from zero would spend its privacy twice.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net import __version__
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, DpcflError, Refused
from dpcfl_net.core.locks import locked
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Policy
from dpcfl_net.launch.placement.base import ClientRange
from dpcfl_net.launch.placement.local import LocalHandle, LocalLauncher, here, own_slots
from dpcfl_net.launch.placement.messages import (
    FILES,
    LONGEST,
    AgentCommand,
    AgentError,
    AgentHello,
    AgentReport,
    JobAccepted,
    LedgerUpdate,
    PrepareKeys,
    PublicKeys,
    SendSignal,
    SetJob,
    StartWorker,
    WorkerEnded,
    read_command,
)  # fmt: skip
from dpcfl_net.privacy.ledger.ledger import COUNTER, LINES
from dpcfl_net.runtime.worker_spec import Terms, WorkerSpec
from dpcfl_net.training.devices import deal
from dpcfl_net.transport import keys
from dpcfl_net.transport.keys import client_key, make_client_keys

LOCK_S = 10.0
LOG_TAIL = 8192
MIRROR_S = 1.0


class Agent:
    """Serves one launcher.

    Args:
        folder: Folder of this run on this host.
        orders: File descriptor to read commands from.
        reports: File descriptor to write reports to.
    """

    def __init__(self, folder: Path, orders: int, reports: int) -> None:
        self.folder, self._orders, self._reports = folder, orders, reports
        self._files = RunFolder(folder)
        self._unread, self._held = bytearray(), contextlib.ExitStack()
        self._launcher: LocalLauncher | None = None
        self._running: dict[int, tuple[int, LocalHandle]] = {}  # by sentinel: the process's first client, its handle
        self._log_from: dict[Path, int] = {}
        self._ledgers: dict[int, _Mirror] = {}

    def serve(self) -> None:
        """Execute commands until the input ends, which means that the launcher or the connection is gone."""
        node = here()
        self._say(AgentHello(version=__version__, host=node.where, cores=node.cores, memory=node.memory, gpus=list(node.gpus)))
        try:
            while True:
                for source in wait([self._orders, *self._running], timeout=MIRROR_S):
                    if source != self._orders:
                        self._ended(source)
                    elif not self._read():
                        return
                self._mirror()
        finally:
            if self._launcher is not None:
                self._launcher.close()
            self._held.close()

    def _read(self) -> bool:
        """Read available bytes and execute complete lines; False at the end of the input."""
        piece = os.read(self._orders, 1 << 20)
        self._unread += piece
        if len(self._unread) > LONGEST:
            raise Refused("agent-line", f"an order is longer than {LONGEST} bytes")
        while (end := self._unread.find(b"\n")) >= 0:
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]
            self._follow(read_command(line))
        return bool(piece)

    def _follow(self, order: AgentCommand) -> None:
        if isinstance(order, PrepareKeys):
            self._say(PublicKeys(keys=self._prepare_keys(order)))
        elif isinstance(order, SetJob):
            self._launcher = self._set_job(order)
        elif isinstance(order, StartWorker):
            self._start(ClientRange(range(order.first, order.first + order.count), order.group))
        else:
            for handle in [handle for first, handle in self._running.values() if first == order.first]:
                if isinstance(order, SendSignal):
                    handle.signal(order.number)
                elif order.word == "end":
                    handle.finish()
                else:
                    handle.tell(order.word)

    def _prepare_keys(self, order: PrepareKeys) -> dict[int, str]:
        kept = self._files.keys
        strangers = [c for c in order.clients if order.existing and not keys.secret_path(kept, client_key(c)).exists()]
        if strangers:
            raise Refused(
                "stranger",
                f"no keys and ledger of client {strangers[0]} in {self.folder}: it was enrolled elsewhere and is not begun anew",
            )
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._held.enter_context(_alone(self.folder))
        if not order.existing:
            make_client_keys(kept, order.clients)
        return {client: keys.read_public(kept, client_key(client)) for client in order.clients}

    def _set_job(self, order: SetJob) -> LocalLauncher:
        """Store the job for the workers, which check the operator's signature themselves."""
        if set(order.files) != FILES:
            raise Refused("agent-line", f"a job is {', '.join(sorted(FILES))}, got {', '.join(sorted(order.files))}")
        for folder in (self._files.logs, self._files.ledgers):
            folder.mkdir(exist_ok=True, mode=0o700)
        for name, text in order.files.items():
            write_atomically(self.folder / name, text)
        spec = WorkerSpec(
            self.folder, 0, order.connect, order.observer, self._files.keys, order.operator_key, self._files.ledgers,
            Terms(Policy(order.runtime.max_epsilon, order.runtime.max_delta)), order.data_root, own_slots(order.runtime, self.folder.name), order.runtime.orphan_timeout_s,
        )  # fmt: skip
        devices = deal(order.runtime, len(order.firsts))
        self._say(JobAccepted(devices=[device.uuid or "cpu" for device in devices]))
        return LocalLauncher(spec, self._files.logs, dict(zip(order.firsts, devices, strict=True)))

    def _start(self, process: ClientRange) -> None:
        if self._launcher is None:
            raise Refused("agent-line", "start before the job is there")
        log = self._files.logs / process.log
        self._log_from[log] = log.stat().st_size if log.exists() else 0
        handle = self._launcher.start(process)
        self._running[handle.sentinel] = (process.clients[0], handle)
        for client in process.clients:
            self._ledgers.setdefault(client, _Mirror(client, self._files.ledger(client_key(client))))

    def _ended(self, sentinel: Any) -> None:
        first, handle = self._running.pop(sentinel)
        code = handle.wait()
        handle.close()
        assert code is not None
        self._mirror()
        log = handle.log_path.read_bytes()[self._log_from[handle.log_path] :] if handle.log_path.exists() else b""
        self._say(WorkerEnded(first=first, code=code, log=log[-LOG_TAIL:].decode(errors="replace")))

    def _mirror(self) -> None:
        for ledger in self._ledgers.values():
            if (news := ledger.news()) is not None:
                self._say(news)

    def _say(self, report: AgentReport) -> None:
        line = memoryview(report.line())
        while line:
            line = line[os.write(self._reports, line) :]


class _Mirror:
    """Part of a client's ledger that the launcher has not seen: plan entries, neither keys nor releases."""

    def __init__(self, client: int, folder: Path) -> None:
        self._client, self._folder = client, folder
        self._counter, self._sent, self._digest = b"", 0, hashlib.sha256().digest()

    def news(self) -> LedgerUpdate | None:
        """New whole lines, or all lines if a crash made the file be rewritten; None if nothing is new."""
        try:
            counter = (self._folder / COUNTER).read_bytes()  # before the lines: a ledger in use may grow in between
        except FileNotFoundError:
            return None
        if counter == self._counter:
            return None
        content = (self._folder / LINES).read_bytes()
        content = content[: content.rfind(b"\n") + 1]
        same = hashlib.sha256(content[: self._sent]).digest() == self._digest
        start = self._sent if same else 0
        self._counter, self._sent, self._digest = counter, len(content), hashlib.sha256(content).digest()
        return LedgerUpdate(client=self._client, at=start, lines=content[start:].decode(), counter=counter.decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent on standard input and output.

    Args:
        arguments: Command line; `sys.argv` if None.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m dpcfl_net.launch.placement.agent", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="folder for the runs of this host")
    parser.add_argument("--run", required=True)
    parser.add_argument("--node", required=True)
    chosen = parser.parse_args(arguments)
    reports = os.dup(1)
    os.dup2(2, 1)  # whatever else prints must not look like a report
    os.set_inheritable(reports, False)
    try:
        for name in (chosen.run, chosen.node):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
                raise ConfigError(f"{name!r} cannot name a folder: letters, digits, dot, dash and underscore")
        root = chosen.root.expanduser() / chosen.run
        Agent(root / chosen.node, 0, reports).serve()
    except DpcflError as error:
        with contextlib.suppress(OSError):  # the launcher may be gone; the exit code says it too
            os.write(reports, AgentError(reason=str(error), code=error.exit_code).line())
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 4
    return 0


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder, so that two agents never start one client twice. Waits a little for an agent that is leaving."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(RunFolder(folder).lock, timeout_s=LOCK_S))
        except TimeoutError:
            raise ConfigError(f"{folder} is held by another agent") from None
        yield


if __name__ == "__main__":
    sys.exit(main())
