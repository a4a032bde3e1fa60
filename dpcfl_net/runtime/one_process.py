"""A run in one process and one thread, with the run folder, gates, ledgers and bits of a run with many processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path

from dpcfl_net.core import open_files, runlog
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import State
from dpcfl_net.experiment.job_files import Job, evaluated_records, read_job
from dpcfl_net.federation.central_dp import CentralDPServer
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.engine import Engine
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.federation.release_check import release_check
from dpcfl_net.federation.virtual import VirtualFederation
from dpcfl_net.federation.virtual_clock import VirtualClock
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.client_hosts import make_host, open_book
from dpcfl_net.runtime.coordinator import drive
from dpcfl_net.runtime.observer import Observer
from dpcfl_net.runtime.server_records import ServerRecords
from dpcfl_net.runtime.specs import USUAL_TERMS, ObserverSpec, OneProcessSpec, WorkerTerms
from dpcfl_net.training import memory
from dpcfl_net.transport.observer_notes import Models, Personal

MOST_OPEN = 4096  # clients with an open ledger and loaded records; those of a round beyond it are opened again in each round
OPEN_FILES = 3  # of an open ledger
OTHER_FILES = 256  # of the process, at most


class Hosts(Mapping[int, ClientHost]):
    """Clients of a job, each behind its privacy gate, opened on first use; before the first round where each has a ledger of its own.

    At most `most_open` are open at once. A client that is closed and opened again continues from its ledger. Ledgers are written
    without fsync, unless a record book composes the run with others.

    Args:
        job: The job.
        ledgers: Folder of the ledgers.
        data_root: Folder of the data sets; None: the usual one.
        terms: Terms on which the clients serve.
        before_step: Called before a client is used; an exception from it prevents the client step.
        key_folder: As for `make_host`.
    """

    def __init__(
        self,
        job: Job,
        ledgers: Path,
        data_root: str | None = None,
        terms: WorkerTerms = USUAL_TERMS,
        before_step: Callable[[], None] = lambda: None,
        key_folder: Path | None = None,
    ) -> None:
        self._before_step = before_step
        engine = cache(lambda: Engine.of(job.protocol))  # clients compute in turn
        durable = job.protocol.ledger_scope == "dataset"
        self._book = open_book(terms, durable)
        self._make: Callable[[int], ClientHost] = lambda client: make_host(
            job, client, ledgers, data_root=data_root, terms=terms, durable=durable, engine=engine, key_folder=key_folder
        )
        self._clients = job.protocol.clients
        self._open: OrderedDict[int, ClientHost] = OrderedDict()  # least recently used first
        self._most_open = most_open(len(job.protocol.roster))
        # A record book's guarantee also covers clients that are never drawn, and without a trusted server each client's ledger says that it
        # spent nothing.
        if job.protocol.ledger_scope == "dataset" or not job.protocol.privacy.central:
            with ExitStack() as stack:
                stack.callback(self.close)  # if a client is refused, the ledgers of those before it would stay locked
                for client in self._clients:
                    self[client]
                stack.pop_all()

    def __getitem__(self, client: int) -> ClientHost:
        self._before_step()
        if client not in self._open:
            self._open[client] = self._make(client)
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(client)
        return self._open[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        """Close all ledgers, also after an error of one."""
        with ExitStack() as stack:
            for host in self._open.values():
                stack.callback(host.close)
            self._open.clear()


def most_open(clients: int) -> int:
    """Return how many of so many clients may be open at once, by the limit on open files (`ulimit -n`)."""
    files = open_files.allow(OTHER_FILES + OPEN_FILES * min(MOST_OPEN, clients))
    return min(MOST_OPEN, max(1, (files - OTHER_FILES) // OPEN_FILES))


@contextmanager
def federation(
    job: Job,
    ledgers: Path,
    *,
    data_root: str | None = None,
    terms: WorkerTerms = USUAL_TERMS,
    quorum: float = 1.0,
    before_step: Callable[[], None] = lambda: None,
    clock: VirtualClock | None = None,
    key_folder: Path | None = None,
) -> Iterator[InProcessFederation]:
    """Open a federation in this process and one thread; its clients and its trusted server are closed at the end.

    Args:
        job: The job.
        ledgers: Folder of all ledgers.
        data_root: Folder of the data sets; None: the usual one.
        terms: Terms on which the clients serve.
        quorum: Fraction of the asked clients that must answer.
        before_step: See `Hosts`.
        clock: Clock of a run in virtual time; None: no virtual time.
        key_folder: As for `make_host`.

    Yields:
        The federation; a `VirtualFederation` with a clock.

    Raises:
        Refused: If a client refuses the job.
        LedgerError: If a ledger is damaged.
    """
    import torch

    torch.set_num_threads(1)
    memory.keep_freed()
    with ExitStack() as stack:
        hosts = stack.enter_context(closing(Hosts(job, ledgers, data_root, terms, before_step, key_folder)))
        check = release_check(job.algorithm)
        if clock is None:
            fed = InProcessFederation(job.protocol, hosts, quorum=quorum, check=check)
        else:
            fed = VirtualFederation(job.protocol, hosts, clock, quorum=quorum, check=check)
        durable = job.protocol.ledger_scope == "dataset"
        central_server = CentralDPServer.of(
            job.algorithm, ledgers, job.experiment.noise, durable=durable, keep=job.experiment.audit is not None
        )
        if central_server is not None:
            stack.enter_context(closing(central_server))
        fed.central_server = central_server
        yield fed


def run_in_one_process(spec: OneProcessSpec, attend: Callable[[bool], None] = lambda round_done: None) -> None:
    """Run coordinator, clients and observer in turn, round by round, from the newest checkpoint on.

    Args:
        spec: Folder, keys and terms of the run.
        attend: Called before each client step (False) and after each round (True). An exception from it stops the run there:
            the last checkpoint and all ledgers are whole, so that the run can be resumed.
    """
    job = read_job(spec.folder, spec.operator_key)
    algorithm, files = job.algorithm, RunFolder(spec.folder)
    observer_spec = ObserverSpec(
        spec.folder, spec.operator_key, "", files.keys, spec.folder, spec.data_root, spec.evaluate_every
    )
    clock = None if spec.network is None else VirtualClock(spec.network, _elapsed_s(files.metrics))
    opened = federation(
        job, spec.ledgers, data_root=spec.data_root, terms=spec.terms, quorum=spec.quorum, before_step=lambda: attend(False),
        clock=clock, key_folder=files.keys,
    )  # fmt: skip
    with (
        closing(ServerRecords(spec.folder, job.protocol, algorithm, None if clock is None else clock.time)) as records,
        closing(Observer(observer_spec, job, writes_spans=clock is None)) as observer,
        opened as fed,
    ):
        if isinstance(fed, VirtualFederation):
            fed.on_span, fed.on_late = records.span, records.warn
            fed.on_message = lambda line: records.messages([line])

        def on_round(t: int, state: State, *, resumed: bool = False) -> None:
            records.round(t, state, fed, resumed=resumed)
            with clock.paused() if clock is not None else nullcontext():
                publish(t, state)

        def publish(t: int, state: State) -> None:
            shown = fed.central_server.shown if fed.central_server is not None else {}
            if algorithm.capabilities.personal:
                shown = {"clients": [i for i in fed.clients if i not in fed.counts.away], **shown}
                for client in shown["clients"]:
                    observer.take(_personal(job, fed.hosts[client], client, t, spec.data_root))
            observer.take(Models(t, state.assignment, state.models, **shown))
            attend(True)

        if clock is not None:
            clock.start()
        checkpoints = Checkpoints(files.checkpoints, spec.keep_checkpoints, records.warn)
        records.joined(max(checkpoints.rounds(), default=0) + 1)
        drive(algorithm, fed, checkpoints, on_round, partial(on_round, resumed=True))
        observer.evaluate_last_round()


def _elapsed_s(metrics: Path) -> float:
    """Seconds of the rounds before the run was resumed."""
    return sum(line["seconds"] for line in runlog.each(metrics) if "seconds" in line)


def _personal(job: Job, host: ClientHost, client: int, t: int, root: str | None) -> Personal:
    """Evaluate a client's personal model as its worker would."""
    model = host.personal_model()
    if model is None:
        return Personal(client, t, None, None)
    accuracy, loss = host.engine.evaluator.accuracy_and_loss(model, evaluated_records(job, client, root))
    return Personal(client, t, accuracy, loss)
