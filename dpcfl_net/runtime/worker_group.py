"""The worker process of several clients, which share job, data set and engine; each has a separate identity, gate and ledger."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import Connection

import zmq

from dpcfl_net.core import open_files
from dpcfl_net.core.errors import DpcflError, RunFailed
from dpcfl_net.core.failed_clients import ClientsFailed
from dpcfl_net.core.files import used_up
from dpcfl_net.experiment.job_files import Job, read_job
from dpcfl_net.federation.engine import Engine
from dpcfl_net.privacy.ledger.record_book import RecordBook
from dpcfl_net.runtime.client_hosts import make_host, open_book
from dpcfl_net.runtime.specs import GroupSpec
from dpcfl_net.runtime.worker import Worker, own_keys
from dpcfl_net.runtime.worker_process import prepare_process, turns

_log = logging.getLogger(__name__)

SOCKETS, SPARE = 4, 1024  # sockets of ZeroMQ of a client; more, since those of clients that have left are closed later
SWITCH_S = 0.05  # after which a waiting thread asks for the interpreter; Python's 5 ms wake dozens of threads in vain


def run_group(spec: GroupSpec) -> None:
    """Serve the clients that the launcher starts, until it closes the pipe and all clients have left.

    Args:
        spec: Arguments of the process.

    Raises:
        ClientsFailed: If clients have failed.
        Exception: An error that concerns all clients: the machine has no room, or the coordinator does not answer.
    """
    prepare_process(spec.worker)
    sys.setswitchinterval(SWITCH_S)
    job = read_job(spec.worker.job, spec.worker.operator_key)
    open_files.allow(open_files.files_for(len(job.protocol.roster), open_files.PER_SERVED))
    context = new_context(len(job.protocol.roster))
    Group(spec, job, context).serve()
    context.term()  # not after a failure: threads of other clients still use the context


def new_context(clients: int) -> zmq.Context:
    """Create a ZeroMQ context with sockets for so many clients, as far as ZeroMQ has them; by default it has them for 250."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(context.get(zmq.SOCKET_LIMIT), SPARE + SOCKETS * clients))
    return context


class Group:
    """Several workers in one process: a thread reads start commands, a thread follows them, and each client has two threads.

    After the error of a client the process ends, since its state is unknown; the launcher starts the others again.

    Args:
        spec: Arguments of the process.
        job: The job.
        context: ZeroMQ context of the process.
    """

    def __init__(self, spec: GroupSpec, job: Job, context: zmq.Context) -> None:
        self.spec, self.job, self._context = spec, job, context
        self._news: queue.Queue[tuple[str, int] | BaseException] = queue.Queue()
        self._serving: dict[int, Worker | None] = {}  # None: the client's gate is being opened
        self._failed: dict[int, Exception] = {}
        self._again: set[int] = set()  # to start again: the start command came before the client had left
        self._stopped: set[int] = set()  # the stop command may come while the client's gate is being opened
        self._lock, self._process_turn = threading.Lock(), turns(spec.worker)
        self._book: RecordBook | None = None
        self._opening = threading.Lock()  # one gate after another: threads that all compute at once only hinder each other

    def serve(self) -> None:
        """Follow the launcher's commands until it closes the pipe and all clients have left.

        Raises:
            ClientsFailed: If clients have failed, once no gate is being opened: others may fail for the same reason.
        """
        threading.Thread(target=self._listen, name="start-commands", daemon=True).start()
        open_ended = True
        while open_ended or self._serving:
            news = self._news.get()
            if isinstance(news, BaseException):
                raise news
            word, client = news
            if word == "start":
                self._start_client(client)
            elif word == "stop":
                self._stop_client(client)
            elif word == "left":
                self._left(client)
            elif word == "failed":
                del self._serving[client]
            elif word == "end":
                open_ended = False
            if self._failed and self._news.empty() and None not in self._serving.values():
                raise ClientsFailed(dict(self._failed))  # other clients may fail meanwhile

    @cached_property
    def engine(self) -> Engine:
        """The engine of all clients; built in a computation, and only one client computes at a time."""
        return Engine.of(self.job.protocol)

    def _listen(self) -> None:
        commands = Connection(self.spec.commands, writable=False)
        try:
            while True:
                word, _, client = commands.recv_bytes().decode().partition(" ")
                self._news.put((word, int(client)))
        except EOFError:
            self._news.put(("end", -1))
        except BaseException as error:
            self._news.put(error)

    def _start_client(self, client: int) -> None:
        if client in self._serving:
            self._again.add(client)
            return
        self._stopped.discard(client)
        self._serving[client] = None
        threading.Thread(target=self._serve, args=(client,), name=f"client {client}", daemon=True).start()

    def _stop_client(self, client: int) -> None:
        self._again.discard(client)
        self._stopped.add(client)  # before the look at its worker: `_serve` stores the worker, then looks here
        worker = self._serving.get(client)
        if worker is not None:
            worker.stop()

    def _left(self, client: int) -> None:
        del self._serving[client]
        if client in self._again:
            self._again.discard(client)
            self._start_client(client)

    def _serve(self, client: int) -> None:
        spec = replace(self.spec.worker, client=client)
        try:
            pair = own_keys(spec, self.job)  # before the host makes a ledger, as in `run_worker`
            with self._opening:
                self._book = open_book(spec.terms)
                host = make_host(
                    self.job,
                    client,
                    spec.ledgers,
                    data_root=spec.data_root,
                    terms=spec.terms,
                    engine=lambda: self.engine,
                    key_folder=spec.keys,
                )
            worker = self._serving[client] = Worker(spec, self.job, host, self._context, self._turn, pair)
            if None not in self._serving.values():
                self._book = None  # what it has read is needed only while clients are entered
            self._news.put(("opened", client))
            if client in self._stopped:
                worker.stop()
            worker.serve()
        except Exception as error:
            if isinstance(error, RunFailed) or used_up(error):
                self._news.put(error)
                return
            _log.error("client %d: %s", client, error, exc_info=None if isinstance(error, DpcflError) else error)
            self._failed[client] = error
            self._news.put(("failed", client))
        except BaseException as error:
            self._news.put(error)
        else:
            self._news.put(("left", client))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock, self._process_turn():
            yield
