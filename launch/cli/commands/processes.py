"""`dpcfl keygen`, `coordinator`, `aggregator`, `worker` and `observer`: start the processes of a run manually."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dpcfl_net.launch.cli.commands.parameters import (
    MOST_AGGREGATORS,
    MOST_CLIENTS,
    MOST_ROUNDS,
    LogLevel,
    above_zero,
    address,
    budget,
    delta,
    epsilon,
    seconds,
)

ProtocolFile = Annotated[Path, typer.Argument(metavar="PROTOCOL", help="protocol.json, the public part of a job")]
JobFolder = Annotated[Path, typer.Argument(metavar="JOB", help="folder with both parts of the job")]
OperatorKey = Annotated[Path, typer.Option(help="the operator's public key file")]
ObserverAddress = Annotated[str | None, typer.Option(callback=address, help="address of the observer")]
DataRoot = Annotated[str | None, typer.Option(help="folder of the data sets (default: DPCFL_DATA, or the cache folder)")]
RoundTimeout = Annotated[float, typer.Option(callback=seconds, help="seconds to wait for the answers of a round")]
JoinTimeout = Annotated[float, typer.Option(callback=seconds, help="seconds to wait for all clients to connect")]
OrphanTimeout = Annotated[float, typer.Option(callback=seconds, help="exit after this many seconds without a coordinator")]


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder for the keys")],
    clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of clients")],
    aggregators: Annotated[
        int, typer.Option(min=0, max=MOST_AGGREGATORS, help="number of aggregators (runtime.aggregators)")
    ] = 0,
    identities: Annotated[
        bool, typer.Option(help="also create the keys with which clients sign (privacy.trust secure-aggregation)")
    ] = False,
) -> None:
    """Create the keys of all parties.

    These are the operator, the coordinator, the observer, the aggregators and the clients.
    """
    from dpcfl_net.transport.identities import make_all_identities
    from dpcfl_net.transport.keys import make_keys

    make_keys(folder, clients, aggregators)
    if identities:
        make_all_identities(folder, clients)
    typer.echo(f"wrote {clients + aggregators + 2} connection keys and the operator's signing key to {folder}")


def coordinator(
    protocol: ProtocolFile,
    bind: Annotated[str, typer.Option(callback=address, help="address to listen on, for example tcp://0.0.0.0:5700")],
    keys: Annotated[Path, typer.Option(help="folder in which coordinator/ has its key pair")],
    operator_key: OperatorKey,
    observer: ObserverAddress = None,
    out: Annotated[Path, typer.Option(help="run folder; resumes from its checkpoints")] = Path("run"),
    transcript: Annotated[
        Literal["off", "headers", "full"] | None,
        typer.Option(help="what to record of each message (default: headers; a job with aggregators allows only off)"),
    ] = None,
    quorum: Annotated[
        float, typer.Option(callback=above_zero, max=1.0, help="fraction of clients that must answer, above 0")
    ] = 1.0,
    round_timeout: RoundTimeout = 600.0,
    join_timeout: JoinTimeout = 120.0,
    pause: Annotated[
        float, typer.Option(min=0.0, max=1e6, help="seconds that a round below the quorum waits for clients to return")
    ] = 300.0,
    keep_releases: Annotated[
        bool, typer.Option("--keep-releases", help="keep what a trusted server publishes, for an audit of whole clients")
    ] = False,
    log_level: LogLevel = None,
) -> None:
    """Start the coordinator of a job on this host."""
    from dpcfl_net.core.locks import run_lock
    from dpcfl_net.core.process_log import log_to_stderr
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.runtime.coordinator import run_coordinator
    from dpcfl_net.runtime.specs import CoordinatorSpec

    key = read_operator_key(operator_key)
    out.mkdir(parents=True, exist_ok=True)
    spec = CoordinatorSpec(
        protocol, key, bind, observer, keys, out, transcript,
        quorum=quorum, round_timeout_s=round_timeout, join_timeout_s=join_timeout, pause_s=pause, keep_releases=keep_releases,
    )  # fmt: skip
    log_to_stderr()
    with run_lock(out):
        run_coordinator(spec)


def aggregator(
    protocol: ProtocolFile,
    number: Annotated[int, typer.Option(min=0, max=MOST_AGGREGATORS - 1, help="number of this aggregator in the job")],
    bind: Annotated[str, typer.Option(callback=address, help="address to listen on, for example tcp://0.0.0.0:5702")],
    connect: Annotated[str, typer.Option(callback=address, help="address of the coordinator")],
    keys: Annotated[Path, typer.Option(help="folder in which aggregator_NNNN/ has its key pair")],
    operator_key: OperatorKey,
    out: Annotated[Path, typer.Option(help="run folder, for messages and warnings")] = Path("run"),
    round_timeout: RoundTimeout = 600.0,
    join_timeout: JoinTimeout = 120.0,
    orphan_timeout: OrphanTimeout = 60.0,
    log_level: LogLevel = None,
) -> None:
    """Start an aggregator of a job on this host.

    The workers of its group connect to it.
    """
    from dpcfl_net.core.process_log import log_to_stderr
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.runtime.aggregator import run_aggregator
    from dpcfl_net.runtime.specs import AggregatorSpec

    key = read_operator_key(operator_key)
    out.mkdir(parents=True, exist_ok=True)
    log_to_stderr()
    run_aggregator(AggregatorSpec(protocol, number, key, bind, connect, keys, out, round_timeout, join_timeout, orphan_timeout))


def worker(
    job: JobFolder,
    client: Annotated[int, typer.Option(min=0, max=MOST_CLIENTS - 1, help="id of this client in the job")],
    connect: Annotated[str, typer.Option(callback=address, help="address of the coordinator, or of this client's aggregator")],
    keys: Annotated[Path, typer.Option(help="folder in which client_NNNN/ has its key pair")],
    operator_key: OperatorKey,
    observer: ObserverAddress = None,
    ledgers: Annotated[Path, typer.Option(help="folder in which client_NNNN/ is this client's ledger")] = Path("ledgers"),
    book: Annotated[
        Path | None, typer.Option(help="folder of the record book; jobs without ledger.scope dataset are then refused")
    ] = None,
    budget_epsilon: Annotated[
        float | None, typer.Option(callback=epsilon, help="largest epsilon of all runs on a record together")
    ] = None,
    budget_delta: Annotated[float | None, typer.Option(callback=delta, help="delta of --budget-epsilon")] = None,
    max_epsilon: Annotated[
        float | None,
        typer.Option(
            callback=epsilon,
            help="refuse jobs above this epsilon (default: 100); if set, also refuse jobs that declare no epsilon",
        ),
    ] = None,
    max_delta: Annotated[
        float | None,
        typer.Option(
            callback=delta,
            help="refuse jobs above this delta (default: 1 / number of this client's records, or of clients if they are the unit)",
        ),
    ] = None,
    protected_only: Annotated[
        bool,
        typer.Option(
            "--protected-only",
            help="refuse jobs whose server receives raw updates (privacy.trust trusted-server) or releases without a guarantee",
        ),
    ] = False,
    data_root: DataRoot = None,
    orphan_timeout: OrphanTimeout = 60.0,
    gpu: Annotated[str | None, typer.Option(help="UUID of the GPU (default: compute on the CPU)")] = None,
    turns: Annotated[
        Path | None, typer.Option(help="folder of a compute slot: workers that share it compute one at a time")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Start the worker of one client on this host."""
    from dpcfl_net.core.process_log import log_to_stderr
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.core.types import Policy
    from dpcfl_net.runtime.specs import WorkerSpec, WorkerTerms
    from dpcfl_net.runtime.worker import run_worker
    from dpcfl_net.training.devices import Device

    terms = WorkerTerms(Policy(max_epsilon, max_delta, protected_only), book, budget(budget_epsilon, budget_delta))
    key = read_operator_key(operator_key)
    log_to_stderr()
    run_worker(
        WorkerSpec(
            job, client, connect, observer, keys, key, ledgers, terms, data_root, (turns, 1) if turns else None,
            orphan_timeout, Device(gpu), goodbye_ends=True,
        )
    )  # fmt: skip


def observer(
    job: JobFolder,
    bind: Annotated[str, typer.Option(callback=address, help="address to listen on, for example tcp://0.0.0.0:5701")],
    keys: Annotated[Path, typer.Option(help="folder in which observer/ has its key pair")],
    operator_key: OperatorKey,
    out: Annotated[Path, typer.Option(help="run folder")] = Path("run"),
    data_root: DataRoot = None,
    evaluate_every: Annotated[int, typer.Option(min=1, max=MOST_ROUNDS, help="evaluate every N rounds and after the last")] = 1,
    log_level: LogLevel = None,
) -> None:
    """Start the observer of a job on this host.

    It measures accuracy outside the protocol.
    """
    from dpcfl_net.core.process_log import log_to_stderr
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.runtime.observer import run_observer
    from dpcfl_net.runtime.specs import ObserverSpec

    key = read_operator_key(operator_key)
    out.mkdir(parents=True, exist_ok=True)
    log_to_stderr()
    run_observer(ObserverSpec(job, key, bind, keys, out, data_root, evaluate_every))
