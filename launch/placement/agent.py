"""Agent: starts and watches workers on its host for a launcher on another host, until its standard input ends.

    python -P -m dpcfl_net.launch.placement.agent --root DIR --run NAME --node NAME [--cpu]

It reads commands from standard input and writes reports to standard output (see `messages`). Keys and ledgers stay in
DIR/NAME/NODE. A resumed client is refused without its keys, or without a line of its ledger that the launcher has copied: a new
ledger would allow to spend its privacy budget twice.
With an aggregator on the host, its workers start when it listens, and connect to it alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from dpcfl_net import __version__
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, DpcflError, Refused, RunFailed
from dpcfl_net.core.files import EXHAUSTED, in_home, reason
from dpcfl_net.core.locks import locked
from dpcfl_net.core.process_log import log_to_stderr
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Policy
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.placement.base import ClientRange
from dpcfl_net.launch.placement.host_aggregator import FOLDER, LOOK_S, HostAggregator, end_of_log
from dpcfl_net.launch.placement.ledger_copies import LedgerTail, check_counter
from dpcfl_net.launch.placement.local import LocalHandle, LocalLauncher, local_node
from dpcfl_net.launch.placement.messages import (
    FILES,
    LOG_TAIL,
    LONGEST,
    AgentCommand,
    AgentError,
    AgentHello,
    CheckGpus,
    GpusChecked,
    GroupCommand,
    JobAccepted,
    LoseClient,
    Message,
    PrepareKeys,
    PublicKeys,
    SendSignal,
    SetJob,
    SignalAggregator,
    StartAggregator,
    StartWorker,
    WorkerEnded,
    read_command,
)  # fmt: skip
from dpcfl_net.launch.placement.slot_folder import SlotFolder
from dpcfl_net.runtime.specs import WorkerSpec, WorkerTerms
from dpcfl_net.training.compute_semaphore import host_folder
from dpcfl_net.training.devices import deal
from dpcfl_net.transport import keys
from dpcfl_net.transport.identities import make_identities, read_public_identity
from dpcfl_net.transport.keys import client_key, make_client_keys

LOCK_S = 10.0
LEDGER_S = 1.0
ForWorker = StartWorker | GroupCommand | SendSignal


class Agent:
    """Serves one launcher.

    Args:
        folder: Folder of this run on this host.
        commands: File descriptor to read commands from.
        reports: File descriptor to write reports to.
        cpu: True if no worker may use a GPU.
    """

    def __init__(self, folder: Path, commands: int, reports: int, *, cpu: bool = False) -> None:
        self.folder, self._commands, self._reports, self._cpu = folder, commands, reports, cpu
        self._files = RunFolder(folder)
        self._unread, self._lock = bytearray(), contextlib.ExitStack()
        self._launcher: LocalLauncher | None = None
        self._slots: SlotFolder | None = None
        self._running: dict[int, tuple[int, LocalHandle]] = {}  # by sentinel: first client of the process, its handle
        self._log_from: dict[Path, int] = {}
        self._ledgers: dict[int, LedgerTail] = {}
        self._aggregator: HostAggregator | None = None
        self._waiting: list[ForWorker] = []  # workers that start when the aggregator listens, and commands for them

    def serve(self) -> None:
        """Execute commands until the input ends: the launcher or the connection has ended.

        Raises:
            RunFailed: After a signal, as from SLURM, which signals all processes of a job that it ends. The last lines of the ledgers
                are sent first.
        """
        with Interrupts() as interrupts, interrupts.raising_again():
            self._serve(interrupts)

    def _serve(self, interrupts: Interrupts) -> None:
        node = local_node(cpu=self._cpu)
        self._send(
            AgentHello(version=__version__, host=node.location, cores=node.cores, memory=node.memory, gpus=list(node.gpus))
        )
        try:
            while True:
                ready = wait([interrupts.fileno(), *self._sources()], timeout=self._patience())
                if interrupts.fileno() in ready:  # before its workers, which the signal may have ended too, count as crashed
                    raise RunFailed("the agent was ended by a signal")
                self._send_ledgers()  # the lines of a worker arrive before the message that it has ended
                for source in ready:
                    if source in self._running:
                        self._ended(source)
                    elif source != self._commands:
                        self._aggregator_ended()
                    elif not self._read():
                        return
                self._send_aggregator_news()
        finally:
            self._waiting.clear()  # no worker starts any more
            with self._lock:  # from the last to the first, each also if another one raises
                if self._slots is not None:
                    self._lock.callback(self._slots.close)
                # What was charged and recorded since the last look:
                self._lock.callback(self._send_aggregator_news)
                self._lock.callback(self._send_ledgers)
                for one in (self._launcher, self._aggregator):
                    if one is not None:
                        self._lock.callback(one.close)

    def _read(self) -> bool:
        """Read available bytes and execute complete lines; False at the end of the input."""
        received = os.read(self._commands, 1 << 20)
        self._unread += received
        if len(self._unread) > LONGEST:
            raise Refused("agent-line", f"a command is longer than {LONGEST} bytes")
        while (end := self._unread.find(b"\n")) >= 0:
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]
            self._execute(read_command(line))
        return bool(received)

    def _execute(self, command: AgentCommand) -> None:
        if isinstance(command, PrepareKeys):
            self._send(self._prepare_keys(command))
        elif isinstance(command, CheckGpus):
            deal(command.runtime, 1)
            self._send(GpusChecked())
        elif isinstance(command, SetJob):
            self._launcher = self._set_job(command)
        elif isinstance(command, StartAggregator | LoseClient | SignalAggregator):
            self._execute_for_aggregator(command)
        elif self._must_wait(command):
            self._keep(command)
        elif isinstance(command, StartWorker):
            self._start(ClientRange(range(command.first, command.first + command.count), command.group))
        else:
            for handle in [handle for first, handle in self._running.values() if first == command.first]:
                if isinstance(command, SendSignal):
                    handle.signal(command.number)
                elif command.word == "end":
                    handle.finish()
                else:
                    handle.send_command(command.word)

    def _execute_for_aggregator(self, command: StartAggregator | LoseClient | SignalAggregator) -> None:
        if self._aggregator is None:
            raise Refused("agent-line", "a command for an aggregator, which this host does not have")
        if isinstance(command, StartAggregator):
            self._aggregator.start(command)
        elif isinstance(command, LoseClient):
            self._aggregator.lose(command.client)
        else:
            self._aggregator.signal(command.number)

    def _must_wait(self, command: ForWorker) -> bool:
        """True for a worker that could not connect to the aggregator yet, and for commands to it."""
        if isinstance(command, StartWorker):
            return self._aggregator is not None and not self._aggregator.listens
        return any(command.first == other.first for other in self._waiting)

    def _keep(self, command: ForWorker) -> None:
        """Keep a command until the aggregator listens; a worker that is ended before it starts does not start."""
        if isinstance(command, SendSignal) and command.number in (SIGTERM, SIGKILL):
            self._waiting = [other for other in self._waiting if other.first != command.first]
            self._send(WorkerEnded(first=command.first, code=-command.number, log=""))
        else:
            self._waiting.append(command)

    def _send_aggregator_news(self) -> None:
        """Report what the aggregator has done, and start the workers that wait for it."""
        if self._aggregator is None:
            return
        for report in self._aggregator.news():
            self._send(report)
        if self._aggregator.listens:
            waiting, self._waiting = self._waiting, []
            for command in waiting:
                self._execute(command)

    def _aggregator_ended(self) -> None:
        assert self._aggregator is not None
        for report in self._aggregator.ended():
            self._send(report)

    def _sources(self) -> list[Any]:
        return [self._commands, *self._running, *(self._aggregator.sentinels if self._aggregator is not None else ())]

    def _patience(self) -> float:
        """Seconds between looks at ledgers, and at the address of an aggregator that starts."""
        return LOOK_S if self._aggregator is not None and self._aggregator.starting else LEDGER_S

    def _prepare_keys(self, command: PrepareKeys) -> PublicKeys:
        if command.runtime is not None:
            deal(command.runtime, 1)
        host_folder()  # without it each worker would fail, after the job with the new keys is signed
        folder = self._files.keys
        missing = [c for c in command.clients if command.existing and not keys.secret_path(folder, client_key(c)).exists()]
        if missing:
            raise Refused(
                "stranger",
                f"no keys and ledger of client {missing[0]} in {self.folder}: it ran on another host and cannot restart without its ledger",
            )
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock.enter_context(_locked_folder(self.folder))
        if not command.existing:
            make_client_keys(folder, command.clients)
            make_identities(folder, command.clients if command.identities else [])
        if command.aggregator is not None:
            self._aggregator = HostAggregator(self.folder / FOLDER, command.aggregator)
        return PublicKeys(
            aggregator=None if self._aggregator is None else self._aggregator.prepare_key(existing=command.existing),
            keys={client: keys.read_public(folder, client_key(client)) for client in command.clients},
            identities={client: read_public_identity(folder, client) for client in command.clients if command.identities},
        )

    def _set_job(self, command: SetJob) -> LocalLauncher:
        """Store the job for the workers; each worker verifies the operator's signature.

        Raises:
            LedgerError: If a ledger lacks lines that the operator has copied.
        """
        if set(command.files) != FILES:
            raise Refused("agent-line", f"a job must hold {', '.join(sorted(FILES))}, got {', '.join(sorted(command.files))}")
        for client, counter in command.counters.items():
            check_counter(client, self._files.ledger(client_key(client)), counter)
        for folder in (self._files.logs, self._files.ledgers):
            folder.mkdir(exist_ok=True, mode=0o700)
        for name, text in command.files.items():
            write_atomically(self.folder / name, text)
        self._slots = SlotFolder.of(command.runtime)
        runtime = command.runtime
        spec = WorkerSpec(
            self.folder, 0, command.connect, command.observer, self._files.keys, command.operator_key, self._files.ledgers,
            WorkerTerms(Policy(runtime.max_epsilon, runtime.max_delta), durable=runtime.durable), command.data_root,
            self._slots.spec if self._slots else None, runtime.orphan_timeout_s, relayed=command.relayed,
        )  # fmt: skip
        devices = deal(runtime, len(command.firsts))
        self._send(JobAccepted(devices=[device.uuid or "cpu" for device in devices]))
        return LocalLauncher(spec, self._files.logs, dict(zip(command.firsts, devices, strict=True)))

    def _start(self, process: ClientRange) -> None:
        if self._launcher is None:
            raise Refused("agent-line", "a worker was started before the job was set")
        log = self._files.logs / process.log
        self._log_from[log] = log.stat().st_size if log.exists() else 0
        if self._aggregator is not None and self._aggregator.address is not None:
            self._launcher.connect_to(self._aggregator.address)
        handle = self._launcher.start(process)
        self._running[handle.sentinel] = (process.clients[0], handle)
        for client in process.clients:
            self._ledgers.setdefault(client, LedgerTail(client, self._files.ledger(client_key(client))))

    def _ended(self, sentinel: Any) -> None:
        first, handle = self._running.pop(sentinel)
        code = handle.wait()
        handle.close()
        assert code is not None
        log = end_of_log(handle.log_path, self._log_from[handle.log_path], handle.reason)
        self._send(WorkerEnded(first=first, code=code, log=log))

    def _send_ledgers(self) -> None:
        for ledger in self._ledgers.values():
            if (update := ledger.new_lines()) is not None:
                self._send(update)

    def _send(self, report: Message) -> None:
        line = memoryview(report.line())
        while line:
            line = line[os.write(self._reports, line) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an agent on standard input and output.

    Args:
        arguments: Command line; `sys.argv` if None.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dpcfl_net.launch.placement.agent", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--root", type=Path, required=True, help="folder for the runs on this host")
    parser.add_argument("--run", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--cpu", action="store_true", help="no worker may use a GPU: do not look for GPUs")
    chosen = parser.parse_args(arguments)
    reports = os.dup(1)
    os.dup2(2, 1)  # other output must not mix with reports
    os.set_inheritable(reports, False)
    try:
        for name in (chosen.run, chosen.node):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
                raise ConfigError(f"{name!r} is not a valid name: use letters, digits, dot, dash and underscore")
        log_to_stderr()
        root = in_home(chosen.root, "root") / chosen.run
        Agent(root / chosen.node, 0, reports, cpu=chosen.cpu).serve()
    except BrokenPipeError:
        return 4
    except (DpcflError, OSError) as error:
        problem = _problem(error)
        with contextlib.suppress(OSError):  # the launcher may have ended; the exit code remains
            os.write(reports, AgentError(reason=str(problem)[:LOG_TAIL], code=problem.exit_code).line())
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


def _problem(error: DpcflError | OSError) -> DpcflError:
    """Describe a file that this host does not give, or a full disk, in a line for the launcher; other errors are bugs."""
    if isinstance(error, DpcflError):
        return error
    if error.filename is None and error.errno not in EXHAUSTED:
        raise error
    kind = RunFailed if error.errno in EXHAUSTED else ConfigError
    return kind(f"{error.filename or 'output'}: {reason(error)}")


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that two agents never run the same client.

    Waits up to LOCK_S for an agent that is ending. One whose connection is lost may see it only later: restarts of the workers try again.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(RunFolder(folder).lock, timeout_s=LOCK_S))
        except TimeoutError:
            raise RunFailed(f"{folder} is in use by another agent") from None
        yield


if __name__ == "__main__":
    sys.exit(main())
