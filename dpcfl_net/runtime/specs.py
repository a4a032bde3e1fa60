"""Arguments of the processes of a run; a launcher imports them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dpcfl_net.core.types import USUAL_POLICY, Policy
from dpcfl_net.federation.virtual_clock import VirtualNetwork
from dpcfl_net.training.devices import CPU, Device
from dpcfl_net.transport.faults import MessageFaults
from dpcfl_net.transport.transcript import Mode


@dataclass(frozen=True)
class CoordinatorSpec:
    """Arguments of the coordinator process; they hold no experiment and no data.

    Attributes:
        protocol: File of the signed protocol.
        operator_key: Public key of the operator.
        bind: Address to listen on.
        observer: Address of the observer; None: no observer.
        keys: Folder of the key pairs.
        folder: Run folder.
        transcript: Content of the transcript; None: headers, or off with aggregators.
        keep_checkpoints: Number of newest checkpoints to keep.
        quorum: Fraction of clients that must answer a round.
        round_timeout_s: Seconds after which a client without an answer is missing.
        join_timeout_s: Seconds for a started client to connect.
        pause_s: Seconds that a call below the quorum waits for clients to return; 0: it fails at once.
        max_live: Most clients connected at once; None: all clients, and none is started on demand.
        commands: Descriptor of a pipe to the launcher, for start and stop commands.
        lost: Descriptor of a pipe from the launcher, for clients that cannot be started again.
        faults: Message faults to inject, for tests; None: no faults.
        durable: Flush checkpoints, and the ledger of a trusted server, to the disk.
        keep_releases: Keep what a trusted server publishes, for an audit of whole clients.
    """

    protocol: Path
    operator_key: str
    bind: str
    observer: str | None
    keys: Path
    folder: Path
    transcript: Mode | None = None
    keep_checkpoints: int = 2
    quorum: float = 1.0
    round_timeout_s: float = 600
    join_timeout_s: float = 120
    max_live: int | None = None
    commands: int | None = None
    lost: int | None = None
    faults: MessageFaults | None = None
    pause_s: float = 0.0
    durable: bool = True
    keep_releases: bool = False


@dataclass(frozen=True)
class AggregatorSpec:
    """Arguments of an aggregator process; they hold no experiment and no data.

    Attributes:
        protocol: File of the signed protocol.
        number: Number of the aggregator in the protocol.
        operator_key: Public key of the operator.
        bind: Address to listen on.
        connect: Address of the coordinator.
        keys: Folder of the key pairs.
        folder: Run folder.
        round_timeout_s: Seconds after which a client without an answer is missing.
        join_timeout_s: Seconds for the clients to connect.
        orphan_timeout_s: Seconds without a coordinator after which the aggregator fails.
        lost: Descriptor of a pipe from the launcher, for clients that cannot be started again.
    """

    protocol: Path
    number: int
    operator_key: str
    bind: str
    connect: str
    keys: Path
    folder: Path
    round_timeout_s: float = 600
    join_timeout_s: float = 120
    orphan_timeout_s: float = 60
    lost: int | None = None


@dataclass(frozen=True)
class ObserverSpec:
    """Arguments of the observer process.

    Attributes:
        job: Folder of the signed job.
        operator_key: Public key of the operator.
        bind: Address to listen on.
        keys: Folder of the key pairs.
        folder: Run folder.
        data_root: Folder of the data sets; None: the usual one.
        evaluate_every: Interval of evaluations in rounds; the last round is always evaluated.
        after_the_end: True if the coordinator has ended: the observer evaluates the newest checkpoint and exits.
    """

    job: Path
    operator_key: str
    bind: str
    keys: Path
    folder: Path
    data_root: str | None = None
    evaluate_every: int = 1
    after_the_end: bool = False


@dataclass(frozen=True)
class WorkerTerms:
    """Terms on which a worker serves.

    Attributes:
        policy: Bounds on epsilon and delta of one job.
        book: Folder of the record book; needed for ledger scope "dataset". With one, jobs of another scope are refused.
        budget: (epsilon, delta) that all runs on a record may spend together; None: no limit.
        durable: Flush the ledger to the disk; False: a crash of the machine, not of a process, may lose charges.
    """

    policy: Policy = USUAL_POLICY
    book: Path | None = None
    budget: tuple[float, float] | None = None
    durable: bool = True


USUAL_TERMS = WorkerTerms()


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments of a worker process: paths and addresses, and no secret.

    Attributes:
        job: Folder of the signed job.
        client: Client id.
        connect: Address of the coordinator.
        observer: Address of the observer; None: no observer.
        keys: Folder of the key pairs.
        operator_key: Public key of the operator.
        ledgers: Folder of the ledgers.
        terms: Terms on which the worker serves.
        data_root: Folder of the data sets; None: the usual one.
        slots: Folder that the workers of a run share, and the number of them that may compute at once; None: no limit besides
            that of the host, which all runs of a user share.
        orphan_timeout_s: Seconds without a coordinator after which the worker fails.
        device: Device to compute on.
        relayed: Address of the client's relay, by client; `connect` for others.
        namespace: Network namespace to enter; None: none.
        goodbye_ends: True if a goodbye of the coordinator means that the run has ended, as where no launcher starts clients on demand.
    """

    job: Path
    client: int
    connect: str
    observer: str | None
    keys: Path
    operator_key: str
    ledgers: Path
    terms: WorkerTerms = USUAL_TERMS
    data_root: str | None = None
    slots: tuple[Path, int] | None = None
    orphan_timeout_s: float = 60
    device: Device = CPU
    relayed: Mapping[int, str] = field(default_factory=dict)
    namespace: str | None = None
    goodbye_ends: bool = False


@dataclass(frozen=True)
class GroupSpec:
    """Arguments of a worker process of several clients.

    Attributes:
        worker: Arguments of each worker; its client id is replaced.
        commands: Descriptor of the pipe from which start and stop commands are read.
    """

    worker: WorkerSpec
    commands: int


@dataclass(frozen=True)
class OneProcessSpec:
    """Arguments of a run in one process.

    Attributes:
        folder: Run folder with the signed job.
        operator_key: Public key of the operator.
        ledgers: Folder of the ledgers.
        terms: Terms on which the clients serve.
        data_root: Folder of the data sets; None: the usual one.
        keep_checkpoints: Number of newest checkpoints to keep.
        quorum: Fraction of clients that must answer a round.
        evaluate_every: Interval of the observer's evaluations in rounds.
        network: Links of the clients for a run in virtual time; None: no virtual time.
    """

    folder: Path
    operator_key: str
    ledgers: Path
    terms: WorkerTerms = USUAL_TERMS
    data_root: str | None = None
    keep_checkpoints: int = 2
    quorum: float = 1.0
    evaluate_every: int = 1
    network: VirtualNetwork | None = None
