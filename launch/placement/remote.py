"""Workers on other hosts: one agent per host, with reconnection to lost hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dpcfl_net.core.clock import wait_awake
from dpcfl_net.core.errors import ConfigError, DpcflError, LedgerError, Refused, RunFailed
from dpcfl_net.core.files import reason
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement.base import LOST, ClientRange, Node
from dpcfl_net.launch.placement.connection import HostConnection
from dpcfl_net.launch.placement.ledger_copies import copied_counter, extend_copy
from dpcfl_net.launch.placement.messages import (
    AgentError,
    AgentHello,
    AggregatorEnded,
    AggregatorListens,
    AggregatorRecords,
    GpusChecked,
    JobAccepted,
    LedgerUpdate,
    Message,
    PrepareKeys,
    PublicKeys,
    SetJob,
    StartAggregator,
    StartWorker,
    WorkerEnded,
    read_first_report,
    read_report,
)
from dpcfl_net.launch.placement.remote_processes import RemoteAggregator, RemoteHandle, RemoteProcess
from dpcfl_net.transport.keys import client_key

HELLO_S = 120.0  # for the first answer of a host; torch loads slowly from a network file system
RECONNECT_S = 30.0  # for a lost host to answer before its workers count as ended again
RETRY_S = 1.0
CLOSE_S = 10.0

Connect = Callable[[], HostConnection]


@dataclass(frozen=True)
class Host:
    """Address and login of a host.

    Attributes:
        name: Unique name of the host in the run.
        connect: Opens a connection to an agent there.
        workers: Share of the worker processes relative to other hosts; None: number of cores.
        data_root: Folder of the data sets there.
        location: The engine's name for the host.
        gpus: UUIDs of the only GPUs to use there; empty: those of the configuration.
    """

    name: str
    connect: Connect
    workers: int | None = None
    data_root: str | None = None
    location: str | None = None
    gpus: tuple[str, ...] = ()

    def runtime(self, common: RuntimeSettings) -> RuntimeSettings:
        """Return the settings of this host.

        Args:
            common: The configuration's `runtime` section.

        Raises:
            ConfigError: If the host has GPUs to use, and the section names another device.
        """
        if self.gpus and common.device not in ("auto", "cuda"):
            raise ConfigError(
                f"gpus of host {self.name} is {list(self.gpus)}: runtime.device must be cuda or auto with it, got {common.device!r}"
            )
        return common.model_copy(update={"gpus": list(self.gpus)}) if self.gpus else common


@dataclass(eq=False)
class HostAgent:
    """Connection to the agent of one host. A thread reads reports; a command for a lost host reconnects.

    Attributes:
        host: The host.
        ledgers: Folder of the copies of ledgers, once there is a run.
        hello: First report of the agent, once it has answered.
        ahead_s: Seconds by which the clock of the host was ahead of this machine's then.
        keys: Public key of each client of the host.
        identities: Public identity of each client of the host; empty without secure sums.
        aggregator: Number of the host's aggregator in the job; None: no aggregator.
        aggregator_key: Its public key, once it has arrived.
        gpus_checked: True if the host has reported that it has the GPUs of the settings (`CheckGpus`).
        devices: Device of each worker process.
        error_text: Why the connection failed or ended.
    """

    host: Host
    ledgers: Path | None = None
    hello: AgentHello | None = None
    ahead_s: float = 0.0
    keys: dict[int, str] = field(default_factory=dict)
    identities: dict[int, str] = field(default_factory=dict)
    aggregator: int | None = None
    aggregator_key: str | None = None
    gpus_checked: bool = False
    devices: list[str] = field(default_factory=list)
    error_text: str = ""

    def __post_init__(self) -> None:
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._connection: HostConnection | None = None
        self._answered = False
        self._known: PrepareKeys | None = None  # with `_job` what an agent receives first, also after a reconnection
        self._asked: PrepareKeys | None = None  # the newest command that an agent answers with public keys
        self._job: SetJob | None = None
        self._handles: dict[int, RemoteHandle] = {}
        self._running_aggregator: RemoteAggregator | None = None
        self._queued: list[Message] = []
        self._thread: threading.Thread | None = None
        self._closing, self._code = False, LOST

    def open(self, *, reconnect: bool = False) -> None:
        """Connect in the background; `wait_for` waits for the result.

        Args:
            reconnect: Retry for RECONNECT_S seconds.
        """
        self._thread = threading.Thread(target=self._serve, args=(reconnect,), name=f"host {self.host.name}", daemon=True)
        self._thread.start()

    def send(self, command: Message) -> None:
        """Send a command; queue it while there is no connection."""
        with self._lock:
            self._send_locked(command)

    def _send_locked(self, command: Message) -> None:
        if self._connection is not None and self._answered:
            self._connection.send(command.line())
        else:
            self._queued.append(command)

    def ask_for_keys(self, command: PrepareKeys) -> None:
        """Ask for the keys of clients; the agent must answer with the keys of these clients and of no others."""
        self._asked = command
        self.send(command)

    def begin(self) -> None:
        """Require after every reconnection that keys and ledgers of the clients exist there."""
        self._known = self._asked = PrepareKeys(
            clients=sorted(self.keys), existing=True, identities=bool(self.identities), aggregator=self.aggregator
        )

    def set_job(self, job: SetJob) -> None:
        """Send the job now and after every reconnection, with the counters of the copied ledgers at that time."""
        self.begin()
        with self._lock:
            self._job = job
            if self._answered:  # else it follows the first report
                self._send_locked(self._with_counters(job))

    def _with_counters(self, job: SetJob) -> SetJob:
        """Name the newest copied line of each client's ledger: the host must hold it before a worker starts."""
        if self.ledgers is None:
            return job
        counters = {client: copied_counter(self.ledgers / client_key(client)) for client in self.keys}
        return job.model_copy(update={"counters": {c: counter for c, counter in counters.items() if counter is not None}})

    def start(self, process: ClientRange, log: Path) -> RemoteHandle:
        """Start a worker on the host; on a lost host after reconnection."""
        command = StartWorker(first=process.clients[0], count=len(process.clients), group=process.group)
        handle = RemoteHandle(self.send, process, log)
        with self._sending_or_reconnecting(command):
            self._handles[process.clients[0]] = handle
        return handle

    def start_aggregator(self, command: StartAggregator, title: str, files: RunFolder) -> RemoteAggregator:
        """Start the host's aggregator; on a lost host after reconnection.

        Args:
            command: The command.
            title: Name of the process.
            files: The run folder.
        """
        handle = RemoteAggregator(self.send, title, files)
        with self._sending_or_reconnecting(command):
            self._running_aggregator = handle
        return handle

    @contextmanager
    def _sending_or_reconnecting(self, command: Message) -> Iterator[None]:
        """Send the command of a process that is noted inside the `with` block.

        Both at once: a process that was noted before the end of a connection, and started after it, would count as ended while it runs.
        """
        with self._lock:
            yield
            is_lost = self._thread is None or not self._thread.is_alive()
            self._send_locked(command)
        if is_lost:
            self.open(reconnect=True)

    def has_answered(self) -> bool:
        """Return whether its agent has answered."""
        return self.hello is not None

    def has_gpus(self) -> bool:
        """Return whether it has reported that it has the GPUs of the settings."""
        return self.gpus_checked

    def has_keys(self) -> bool:
        """Return whether its clients' public keys have arrived."""
        return bool(self.keys)

    def wait_for(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until `condition()` is true.

        Args:
            condition: Checked after each report.
            seconds: Time limit, without time in which this process was stopped.

        Raises:
            RunFailed: If the agent failed, or after `seconds`.
        """
        with self._changed:
            if not wait_awake(partial(self._changed.wait_for, lambda: condition() or self.error_text), seconds):
                raise RunFailed(f"host {self.host.name} did not answer within {seconds:g} s")
        if self.error_text and not condition():
            raise RunFailed(f"host {self.host.name}: {self.error_text}")

    def hang_up(self) -> None:
        """Close the agent's input: it ends its workers and exits."""
        self._closing = True
        connection = self._connection
        if connection is not None:
            connection.hang_up()

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the connection after `hang_up`; return whether it has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def cut(self) -> None:
        """End the connection to an agent that does not react to `hang_up`, as where it is stopped."""
        connection = self._connection
        if connection is not None:
            connection.cut()
        self.join(CLOSE_S)

    def _serve(self, reconnect: bool) -> None:
        """Thread: connect, read reports, and record every worker as lost when the connection ends."""
        deadline = time.monotonic() + (RECONNECT_S if reconnect else 0)
        self.error_text, self._code = "", LOST
        try:
            while not self._read_reports() and time.monotonic() < deadline and not self._closing:
                time.sleep(RETRY_S)
        except Exception as error:  # of any engine: its workers are lost, with this message
            self.error_text = f"{type(error).__name__}: {error}"
        with self._lock:
            self._queued.clear()
            handles: list[RemoteProcess] = list(self._handles.values())
            handles += [self._running_aggregator] if self._running_aggregator is not None else []
            self._handles, self._running_aggregator = {}, None
            self._thread = None
        for handle in handles:
            handle.ended(self._code, f"host {self.host.name}: {self.error_text or 'the agent has ended'}")
        with self._changed:
            self.error_text = self.error_text or "the agent has ended"
            self._changed.notify_all()

    def _read_reports(self) -> bool:
        """Connect once and read reports until the connection ends; False if the agent never answered."""
        answered = False
        try:
            connection = self.host.connect()
        except OSError as error:
            self.error_text = f"cannot run {error.filename}: {reason(error)}" if error.filename else reason(error)
            return False
        self._connection = connection
        try:
            if self._closing:
                connection.hang_up()
            for line in connection.reports():
                report = read_report(line) if answered else read_first_report(line)
                if isinstance(report, AgentHello):
                    self._on_hello(report, connection)
                    answered = True
                else:
                    self._on_report(report)
            if not answered or not self.error_text:
                self.error_text = connection.failure()
        except DpcflError as error:
            self.error_text = str(error)
            if isinstance(error, LedgerError):  # its workers must not start again
                self._code = error.exit_code
        finally:
            with self._lock:
                self._connection, self._answered = None, False
            connection.close(CLOSE_S)
        return answered

    def _on_hello(self, hello: AgentHello, connection: HostConnection) -> None:
        with self._lock:
            first: list[Message] = [] if self._known is None else [self._known]
            first += [] if self._job is None else [self._with_counters(self._job)]
            for command in [*first, *self._queued]:
                connection.send(command.line())
            self._queued.clear()
            self._answered = True
        with self._changed:
            self.hello, self.error_text, self._code = hello, "", LOST
            self.ahead_s = hello.clock - time.time()
            self._changed.notify_all()

    def _on_report(self, report: Message) -> None:
        if isinstance(report, WorkerEnded):
            with self._lock:
                handle = self._handles.pop(report.first, None)
            if handle is not None:
                handle.ended(report.code, report.log)
        elif isinstance(report, AggregatorListens | AggregatorRecords | AggregatorEnded):
            self._on_aggregator(report)
        elif isinstance(report, GpusChecked):
            with self._changed:
                self.gpus_checked = True
                self._changed.notify_all()
        elif isinstance(report, JobAccepted):
            self.devices = report.devices
        elif isinstance(report, LedgerUpdate):
            self._copy_ledger(report)
        elif isinstance(report, AgentError):
            self.error_text, self._code = report.reason, report.code
        elif isinstance(report, PublicKeys):
            self._check_owners(report)
            known = (self.keys, self.identities, self.aggregator_key)
            if self.keys and (report.keys, report.identities, report.aggregator) != known:
                raise Refused("keys", "the keys on the host differ from those in the job")
            with self._changed:
                self.keys, self.identities, self.aggregator_key = report.keys, report.identities, report.aggregator
                self._changed.notify_all()

    def _check_owners(self, report: PublicKeys) -> None:
        """Refuse keys of clients or of an aggregator that do not belong to this host: it could pose as those of another host."""
        asked = self._asked
        clients = [] if asked is None else sorted(asked.clients)
        identities = [] if asked is None or not asked.identities else clients
        has_aggregator = asked is not None and asked.aggregator is not None
        reported = (sorted(report.keys), sorted(report.identities), report.aggregator is not None)
        if reported != (clients, identities, has_aggregator):
            raise Refused("keys", "the host reported keys of other owners than its own clients and aggregator")

    def _on_aggregator(self, report: AggregatorListens | AggregatorRecords | AggregatorEnded) -> None:
        with self._lock:
            handle = self._running_aggregator
            if isinstance(report, AggregatorEnded):
                self._running_aggregator = None
        if handle is None:
            raise Refused("agent-line", "a report of an aggregator that was not started")
        if isinstance(report, AggregatorListens):
            handle.listens(report.address)
        elif isinstance(report, AggregatorRecords):
            handle.record(report.file, report.lines)
        else:
            handle.ended(report.code, report.log)

    def _copy_ledger(self, report: LedgerUpdate) -> None:
        """Extend the operator's copy of a client's ledger; the original stays on its host. A shorter or other one is refused."""
        if self.ledgers is None or report.client not in self.keys:
            raise Refused("agent-line", f"a ledger of client {report.client}, which is not on this host")
        extend_copy(self.ledgers / client_key(report.client), report)


class RemoteLauncher:
    """Starts workers of one job on other hosts (see `base.Launcher`).

    Args:
        agents: Host of each process, by its first client.
        logs: Folder of the logs on this machine.
    """

    def __init__(self, agents: Mapping[int, HostAgent], logs: Path) -> None:
        self._agents, self._logs = agents, logs

    def start(self, process: ClientRange) -> RemoteHandle:
        return self._agents[process.clients[0]].start(process, self._logs / process.log)


def close_all(agents: Sequence[HostAgent]) -> list[str]:
    """Close all connections and wait for them together.

    Returns:
        A sentence for each host whose agent did not end: its last reports are missing.
    """
    patience_s, silent = 2 * CLOSE_S, list[str]()
    deadline = time.monotonic() + patience_s

    def join(agent: HostAgent) -> None:
        if not agent.join(max(0.0, deadline - time.monotonic())):
            agent.cut()
            silent.append(
                f"host {agent.host.name} did not end its workers within {patience_s:g} s: copies of its ledgers may lack their last lines"
            )

    with ExitStack() as stack:  # each also after an error of another
        for agent in agents:
            stack.callback(join, agent)
        for agent in agents:
            stack.callback(agent.hang_up)
    return silent


def node_of(agent: HostAgent) -> Node:
    """Describe the host of an agent that has answered."""
    assert agent.hello is not None
    return Node(
        agent.host.name, agent.host.location or agent.hello.host, agent.hello.cores, agent.hello.memory, tuple(agent.hello.gpus)
    )
