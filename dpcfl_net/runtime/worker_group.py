"""The worker process of several clients: each with its own identity, gate and ledger; job, data set and engine are shared."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import zmq

from dpcfl_net.experiment.job_files import Job, read_job
from dpcfl_net.federation.client import Engine
from dpcfl_net.runtime.worker import Worker, make_host, settle, turns
from dpcfl_net.runtime.worker_spec import GroupSpec

SOCKETS = 4096  # a client has four; ZeroMQ's own limit would do for 250 clients


def run_group(spec: GroupSpec) -> None:
    """Serve whoever is started until the launcher closes the pipe and all have left; fails as the first client that fails."""
    settle(spec.worker.device)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS)
    Group(spec, read_job(spec.worker.job, spec.worker.operator_key), context).serve()
    context.term()  # not after a failure: other clients' threads use it to the end of the process


class Group:
    """One thread that listens, one that follows the launcher, and a worker's two for each connected client."""

    def __init__(self, spec: GroupSpec, job: Job, context: zmq.Context) -> None:
        self.spec, self.job, self._context = spec, job, context
        self._news: queue.Queue[tuple[str, int] | BaseException] = queue.Queue()
        self._serving: dict[int, Worker | None] = {}  # None: a client whose gate is being opened
        self._again: set[int] = set()  # started while they were still leaving
        self._lock, self._process_turn = threading.Lock(), turns(spec.worker)

    def serve(self) -> None:
        """Follow the launcher's words to the end."""
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
            else:
                open_ended = False

    @cached_property
    def engine(self) -> Engine:
        """One for all clients; first asked for in a computation, of which there is one at a time."""
        return Engine.of(self.job.protocol)

    def _listen(self) -> None:
        try:
            while True:
                word, _, client = self.spec.commands.recv_bytes().decode().partition(" ")
                self._news.put((word, int(client)))
        except EOFError:
            self._news.put(("end", -1))
        except BaseException as error:
            self._news.put(error)

    def _start_client(self, client: int) -> None:
        if client in self._serving:
            self._again.add(client)
            return
        self._serving[client] = None
        threading.Thread(target=self._serve, args=(client,), name=f"client {client}", daemon=True).start()

    def _stop_client(self, client: int) -> None:
        self._again.discard(client)
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
            host = make_host(
                self.job,
                client,
                spec.ledgers,
                data_root=spec.data_root,
                terms=spec.terms,
                engine=lambda: self.engine,
            )
            worker = self._serving[client] = Worker(spec, self.job, host, self._context, self._turn)
            worker.serve()
        except BaseException as error:
            self._news.put(error)
        else:
            self._news.put(("left", client))

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock, self._process_turn():
            yield
