"""The worker process of one client: one thread handles messages, the other runs client steps behind the privacy gate."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import zmq

from dpcfl_net.core.clock import since_epoch
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Answer, Task
from dpcfl_net.experiment.job_files import Job, evaluated_records, read_job
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.secure.stages import STAGES, answer_interval_s
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.kept_figures import KeptFigures
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.runtime.task_queue import TaskQueue
from dpcfl_net.runtime.wake_pipe import WakePipe
from dpcfl_net.runtime.worker_process import Turns, prepare_process, turns
from dpcfl_net.training import memory
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import ClientEndpoint, ClientEvent, ClientTimes, Link, Payload
from dpcfl_net.transport.keys import client_key
from dpcfl_net.transport.message_log import refusal
from dpcfl_net.transport.observer_notes import MOST_SPANS
from dpcfl_net.transport.observer_outbox import ObserverOutbox

_log = logging.getLogger(__name__)

LEAST_WAIT_S = 0.001  # a shorter wait for a core is not reported
MOST_KEPT_PERIODS = 16 * MOST_SPANS  # while the observer is out of reach
STORES_FROM = 0.75  # of the deadline of a task: its result is written in the rest
REPORT_S = 0.5  # between reports to the observer, unless the worker is idle
LOOK_S = 0.25  # after its arrival the coordinator hears that a task is computed, or when that begins later
Period = tuple[str, int, float, float]  # kind of work, round, begin, end


def run_worker(spec: WorkerSpec) -> None:
    """Serve one client until the coordinator says goodbye.

    Args:
        spec: Arguments of the process.

    Raises:
        ConfigError: If the job has no such client, or `spec.keys` not its keys.
        Refused: If the job or the server fails a check.
        RunFailed: If the coordinator does not answer for `spec.orphan_timeout_s` seconds.
    """
    prepare_process(spec)
    job = read_job(spec.job, spec.operator_key)
    if spec.client not in job.algorithm.clients:
        raise ConfigError(f"--client is {spec.client}: the roster of the job has clients 0 to {len(job.protocol.roster) - 1}")
    # Before the host makes a ledger: a worker without keys belongs on another host, which has the ledger.
    pair = own_keys(spec, job)
    host = make_host(job, spec.client, spec.ledgers, data_root=spec.data_root, terms=spec.terms, key_folder=spec.keys)
    with zmq.Context() as context:
        Worker(spec, job, host, context, turns(spec), pair).serve()


def own_keys(spec: WorkerSpec, job: Job) -> tuple[str, str]:
    """Read the client's CURVE pair; errors as of `keys.read_pair`."""
    return keys.read_pair(spec.keys, client_key(spec.client), job.protocol.client(spec.client).public_key)


class Worker:
    """Two threads around one client runtime: `_talk` owns the socket, and `serve` computes while it holds a slot.

    Args:
        spec: Arguments of the process.
        job: The job.
        host: The client runtime.
        context: ZeroMQ context of the process.
        turn: Makes the context in which this process may compute; see `turns`.
        pair: The client's CURVE pair (public, secret), as `own_keys` reads it.
    """

    def __init__(
        self, spec: WorkerSpec, job: Job, host: ClientHost, context: zmq.Context, turn: Turns, pair: tuple[str, str]
    ) -> None:
        self.spec, self.job, self.host, self._context, self._turn, self._pair = spec, job, host, context, turn, pair
        self._tasks = TaskQueue()
        self._answers: deque[tuple[str, Answer]] = deque()
        self._wake = WakePipe()
        self._stop = self._dismissed = False
        self._outbox: ObserverOutbox | None = None
        self._span: tuple[float, float] | None = None
        self._sent: deque[ClientEvent] = deque()  # results that have arrived, to be reported with the next task
        self._periods: list[Period] = []  # of work, to be reported
        self._next_report = 0.0
        self._idle = False
        self._left = -math.inf  # when the newest answer with a deadline leaves
        self._at_work = False  # computes now; the coordinator counts the timeout from the heartbeat that says so
        self._arrived = 0.0  # the newest task
        self._keeps_turn = False  # the turn to compute the task is kept to evaluate the personal model after it
        self._kept_turn: contextlib.ExitStack | None = None
        self._hidden: ClientEvent | None = None  # the task that is answered, if a deadline hides how long it is computed
        self._early: tuple[float | None, float | None] | None = None  # figures of its personal model
        host.turn, host.before_storing = self._computing, self._before_storing

    def serve(self) -> None:
        """Answer tasks until the coordinator says goodbye or `stop` is called.

        Raises:
            Exception: The first error of either thread.
        """
        talker = threading.Thread(target=self._talk, name="wire", daemon=True)
        talker.start()
        try:
            self._report_personal_again()
            while (event := self._newest()) is not None:
                if isinstance(event, BaseException):
                    raise event
                if event.kind == "task":
                    self._work(event)
                else:
                    self._report(now=True)
            if self._dismissed and self.spec.goodbye_ends:
                self.host.gate.end()
        finally:
            self.stop()
            talker.join()
            self._report(now=True, wait=True)
            if self._outbox is not None:
                self._outbox.close()
            self._wake.close()
            self.host.close()

    def _newest(self) -> ClientEvent | BaseException | None:
        """Wait for the next event; an idle worker gives its memory back."""
        try:
            return self._tasks.get(memory.IDLE_S)
        except queue.Empty:
            self._idle = True
            self._report(now=True)
            memory.give_back_all()  # many idle workers share one machine
            event = self._tasks.get()
            self._idle = False
            return event

    def stop(self) -> None:
        """End `serve` soon, or when the task that it works on is over; any thread may call this."""
        self._stop = True
        self._wake.wake()

    def _work(self, event: ClientEvent) -> None:
        outbox = self._link()  # connects in parallel with the computation
        # With a deadline the phase must not tell when a core became free: the client before on this core may have hidden its time.
        has_deadline = answer_interval_s(self.job.protocol, event.task) is not None
        self._at_work, self._arrived = event.task not in STAGES and has_deadline, event.arrived
        # A client that is told to leave while it waits for another turn would be ended before it has reported its figures.
        self._keeps_turn = outbox is not None and self.host.algorithm.capabilities.personal and not has_deadline
        try:
            self._answer(event, outbox)
        finally:
            if self._kept_turn is not None:
                self._kept_turn.close()
            self._span = self._kept_turn = None
        memory.give_back_freed()

    def _answer(self, event: ClientEvent, outbox: ObserverOutbox | None) -> None:
        """Answer a task, then report to the observer."""
        _log.debug("client %d, round %d: %s begins", self.spec.client, event.round, event.task)
        has_deadline = answer_interval_s(self.job.protocol, event.task) is not None
        self._hidden, self._early = event if has_deadline and event.task not in STAGES else None, None

        @functools.cache
        def wait() -> None:
            self._wait_for_the_deadline(event)

        # If a result counted before its answer leaves, a server that ends the process or the run would learn from the answers after
        # the restart what the deadline hides.
        self.host.before_final = wait if has_deadline else None
        answer = self.host.answer(Task(event.round, event.task, event.tensors, event.blake3))
        _log.debug(
            "client %d, round %d: %s ends: %s %s", self.spec.client, event.round, event.task, answer.status, answer.reason
        )
        event.tensors.clear()  # the event lives until the next one; a model need not wait with it
        # Stages of secure sums leave the personal model as it was in the round before.
        evaluates = outbox is not None and self.host.algorithm.capabilities.personal and event.task not in STAGES
        # Before the deadline: a client that waited for a core after it would answer the next stage of the sum late, and so tell
        # whether the client that has the core computes.
        figures = self._early if answer.status == "release" else None
        if figures is not None:
            # Not before the model is stored, since a crash in between loses it.
            self._figures.add(event.round, *figures)
        elif evaluates and has_deadline:
            figures = self._evaluated(event.round)
        wait()
        self._at_work = False
        self._answers.append((event.id, answer))
        self._wake.wake()
        if outbox is not None:
            spans = [_transfer("receive", event)]
            if self._span is not None:
                arrived, started, ended = since_epoch(event.arrived, *self._span)
                # The network sees the size of the report: with a deadline it must not tell whether the client before had computed.
                if has_deadline or started - arrived > LEAST_WAIT_S:
                    spans.append(("wait", event.round, arrived, started))
                spans.append(("train", event.round, started, ended))
            self._report(spans)
            if evaluates:
                outbox.personal(event.round, *(figures or self._evaluated(event.round, self._kept_turn)))

    def _report(self, spans: Sequence[Period] = (), now: bool = False, wait: bool = False) -> None:
        """Report periods of work to the observer, with the results that have arrived meanwhile; those of short tasks share a message.

        Tasks do not wait for an observer that starts again or is lost: the periods are kept for the next report.
        """
        self._periods += [_transfer("send", self._sent.popleft()) for _ in range(len(self._sent))]
        self._periods += spans
        if not (now or time.monotonic() >= self._next_report or len(self._periods) >= MOST_SPANS // 2):
            return
        if (outbox := self._link() if self._periods else None) is not None:
            if not outbox.is_reachable(wait):
                del self._periods[:-MOST_KEPT_PERIODS]
                return
            self._next_report = time.monotonic() + REPORT_S
            for first in range(0, len(self._periods), MOST_SPANS):
                outbox.spans(self._periods[first : first + MOST_SPANS])
        self._periods = []

    def _before_storing(self, state: Mapping[str, Any]) -> None:
        """Wait until the last quarter of the deadline, in which the result is written, though it counts from the deadline only.

        The next start removes what was written of it: earlier in a deadline this would only happen to a client that had not trained.
        """
        if self._hidden is None:
            return
        interval = answer_interval_s(self.job.protocol, self._hidden.task)
        assert interval is not None
        if self._outbox is not None and self.host.algorithm.capabilities.personal:
            self._early = self._evaluated(self._hidden.round, state=state)
        _sleep_until(_start_of(self._hidden, self._left) + STORES_FROM * interval)

    def _wait_for_the_deadline(self, event: ClientEvent) -> None:
        """Wait for the next multiple of the task's interval, so that the time of the answer does not reveal the computing time."""
        interval = answer_interval_s(self.job.protocol, event.task)
        if interval is None:
            return
        start = _start_of(event, self._left)
        taken = time.monotonic() - start
        until = self._left = start + interval * math.ceil(taken / interval)
        if taken > interval:
            _log.warning(
                "%s took longer than its deadline, %g s; its answer is sent at the next multiple", event.task, interval
            )
        # Also after `stop`: a server may have it called, and a client that then leaves and comes back would show its computing time.
        _sleep_until(until)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        kept, self._kept_turn = self._kept_turn, None  # by the check of the model before its first step
        with kept or contextlib.ExitStack() as turn:
            if kept is None:
                turn.enter_context(self._turn())
            self._at_work = True
            started = time.monotonic()
            if started > self._arrived + LOOK_S:
                self._wake.wake()
            yield
            self._span = started, time.monotonic()
            if self._keeps_turn:
                self._kept_turn = turn.pop_all()

    def _link(self) -> ObserverOutbox | None:
        """Connect to the observer at the first task; None without an observer."""
        if self._outbox is None and self.spec.observer:
            self._outbox = ObserverOutbox(
                self.spec.observer,
                Link.of(self.job.protocol, self._pair, self.job.protocol.observer_key, self._context),
                sender=self.spec.client,
            )
        return self._outbox

    def _evaluated(
        self,
        t: int,
        turn: contextlib.AbstractContextManager[Any] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> tuple[float | None, float | None]:
        """Evaluate the personal model on the client's evaluated records; the observer gets the figures, not the model.

        A client without one evaluates the initial model and has no figures: its next answer in a secure sum must not come earlier
        than that of a client that a secret coin has drawn.

        Args:
            t: Round.
            turn: The kept turn to compute, which ends with the evaluation; None: wait for one.
            state: A state that holds the model and is not stored yet; None: the stored one.

        Returns:
            Accuracy, and loss if it is finite; those of a stored model are kept for the next start.
        """
        model = self.host.personal_model(state)
        records = evaluated_records(self.job, self.spec.client, self.spec.data_root)
        with self._turn() if turn is None else turn:
            engine = self.host.engine
            initial = engine.initial_model
            accuracy, loss = engine.evaluator.accuracy_and_loss(initial if model is None else model, records)
        shown = (None, None) if model is None else (float(accuracy), float(loss) if math.isfinite(loss) else None)
        if state is None:
            self._figures.add(t, *shown)
        return shown

    def _report_personal_again(self) -> None:
        """Report the personal model and its kept figures at the start: a crash may have lost the reports of the process before.

        With a deadline the figures of a round were kept before its answer left, and no client waits for a core here: see `_answer`.
        """
        t = self.host.gate.answered_round() if self.host.algorithm.capabilities.personal else 0
        if t and (outbox := self._link()) is not None:
            has_deadline = self.job.protocol.local.deadline_s is not None
            for figure in self._figures.before(t + 1 if has_deadline else t):
                outbox.personal(*figure)
            if not has_deadline:
                outbox.personal(t, *self._evaluated(t))

    @functools.cached_property
    def _figures(self) -> KeptFigures:
        return KeptFigures(self.host.folder)

    def _talk(self) -> None:
        """Run the message thread; `serve` raises its errors."""
        try:
            self._converse()
        except Refused as refusal:
            if refusal.code == "job":
                refusal = Refused("job", f"{refusal.reason}; compare: dpcfl diff {RunFolder(self.spec.job).protocol} THEIRS")
            self._tasks.put(refusal)
        except BaseException as error:
            self._tasks.put(error)
        else:
            self._tasks.put(None)

    def _converse(self) -> None:
        protocol, algorithm = self.job.protocol, self.host.algorithm
        encoding = MessageEncoding(algorithm)
        endpoint = ClientEndpoint(
            self.spec.relayed.get(self.spec.client, self.spec.connect),
            Link.of(protocol, self._pair, protocol.server_key(self.spec.client), self._context),
            client=self.spec.client,
            task_template={task: encoding.task_template(step) for task, step in client_steps(algorithm).items()}.get,
            on_failure=lambda failure: _log.warning("%s", refusal(failure)),
            times=ClientTimes(orphan_timeout_s=self.spec.orphan_timeout_s),
        )
        abort = True
        try:
            endpoint.register(self._wake, lambda: self._deliver(endpoint))
            endpoint.heartbeat("idle")
            look = math.inf
            while not self._stop:
                for event in endpoint.poll(max(0.0, look - time.monotonic())):  # other threads wake it
                    if event.kind == "task":
                        look = event.arrived + LOOK_S
                        self._tasks.put(event)
                    elif event.kind == "sent":
                        self._sent.append(event)
                        if self._idle:  # otherwise the report of the next task takes it along
                            self._tasks.put(event)
                    elif event.kind == "bye":
                        self._dismissed = True
                        endpoint.bye()
                        abort = False
                        return
                    elif event.kind == "error":
                        _log.warning("the coordinator says: %s %s", event.code, event.reason)
                if time.monotonic() >= look:
                    look = math.inf
                if self._at_work:
                    endpoint.heartbeat("computing")
        finally:
            endpoint.close(abort=abort)

    def _deliver(self, endpoint: ClientEndpoint) -> None:
        self._wake.clear()
        while self._answers:
            task_id, answer = self._answers.popleft()
            reason = f"{answer.code}: {answer.reason}" if answer.code else answer.reason
            endpoint.send_result(task_id, answer.status, Payload.from_packed(answer.release, answer.blake3), reason)


def _start_of(event: ClientEvent, left: float) -> float:
    """Time from which the deadline of a task counts: its arrival, or when the answer before left if the task has waited for that one.

    A server that chooses how long a task waits would else choose how little time is left until its deadline.
    """
    return max(event.arrived, left)


def _sleep_until(moment: float) -> None:
    """Sleep until a time of the monotonic clock."""
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def _transfer(what: str, event: ClientEvent) -> Period:
    begun, arrived = since_epoch(event.begun, event.arrived)
    return what, event.round, begun, arrived
