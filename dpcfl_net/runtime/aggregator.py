"""The aggregator process: a part of the untrusted server that adds the answers of one group of clients."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core import open_files
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.job_reader import read_signed_protocol
from dpcfl_net.core.protocol import AggregatorEntry, check_runnable
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.federation.aggregator import AggregatorFederation
from dpcfl_net.federation.call_limits import CallLimits, LauncherLink
from dpcfl_net.federation.group_messages import GroupMessages
from dpcfl_net.federation.release_check import client_endpoint_arguments
from dpcfl_net.runtime.launcher_pipes import LauncherNews, open_pipe
from dpcfl_net.runtime.server_records import ServerRecords
from dpcfl_net.runtime.specs import AggregatorSpec
from dpcfl_net.runtime.task_queue import TaskQueue
from dpcfl_net.runtime.wake_pipe import WakePipe
from dpcfl_net.training import memory
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import ClientEndpoint, ClientEvent, ClientTimes, Link, MessageLog, ServerEndpoint
from dpcfl_net.transport.keys import aggregator_key
from dpcfl_net.transport.message_log import refusal

_log = logging.getLogger(__name__)

IDLE_S = 0.02  # between looks at the coordinator's connection while no task is open


def run_aggregator(spec: AggregatorSpec) -> None:
    """Serve the coordinator with the clients of one group until it says goodbye.

    Args:
        spec: Arguments of the process.

    Raises:
        ConfigError: As `check_runnable`, or if the job has no such aggregator.
        Refused: If the protocol is invalid or not signed by the operator.
        RunFailed: If the coordinator does not answer for `spec.orphan_timeout_s` seconds.
    """
    memory.keep_freed()
    protocol = read_signed_protocol(spec.protocol, spec.operator_key)
    check_runnable(protocol)
    if spec.number >= len(protocol.aggregators):
        raise ConfigError(f"--number is {spec.number}: the job has {len(protocol.aggregators)} aggregators, numbered from 0")
    algorithm, entry = algorithm_of(protocol), protocol.aggregators[spec.number]
    open_files.allow(open_files.files_for(len(entry.clients)))
    pair = keys.read_pair(spec.keys, aggregator_key(spec.number), entry.public_key)
    records = ServerRecords(spec.folder, protocol, algorithm)
    with contextlib.closing(records), _client_endpoint(spec, algorithm, entry, pair, records) as endpoint:
        write_atomically(RunFolder(spec.folder).address(aggregator_key(spec.number)), endpoint.address)
        _log.info("listening at %s", endpoint.address)
        messages = GroupMessages(algorithm)
        # Connects now, so that a wrong address shows before the clients have joined; the coordinator hears of it when they have.
        coordinator = ClientEndpoint(
            spec.connect,
            Link.of(protocol, pair, protocol.coordinator_key),
            client=spec.number,
            task_template=lambda task: messages.task_template(entry.clients, task),
            check=messages.check_task,
            on_failure=lambda failure: _log.warning("%s", refusal(failure)),
            times=ClientTimes(orphan_timeout_s=spec.orphan_timeout_s),
            announces=False,
        )
        limits = CallLimits(0.0, spec.round_timeout_s, spec.join_timeout_s)
        news = LauncherNews(open_pipe(spec.lost))
        with contextlib.closing(Uplink(coordinator)) as uplink:

            def lost() -> Sequence[int]:
                uplink.check()
                return news.lost_clients()

            launcher = LauncherLink(lost=lost)
            fed = AggregatorFederation(algorithm, entry.clients, endpoint, limits, launcher, records.warn)
            fed.join()
            uplink.announce()
            _serve(fed, uplink)
        fed.goodbye()


def _client_endpoint(
    spec: AggregatorSpec, algorithm: Algorithm, entry: AggregatorEntry, pair: tuple[str, str], records: ServerRecords
) -> ServerEndpoint:
    """Listen for the clients of the group, with the coordinator's checks."""
    return ServerEndpoint(
        spec.bind,
        Link.of(algorithm.protocol, pair),
        **client_endpoint_arguments(algorithm, entry.clients),
        log=MessageLog(lambda failure: _log.warning("%s", refusal(failure)), records.messages),
    )


def _serve(fed: AggregatorFederation, uplink: Uplink) -> None:
    """Answer the coordinator's tasks until it says goodbye; clients are heard in between."""
    while (event := uplink.newest()) is not None:
        if isinstance(event, ClientEvent):
            uplink.answer(event.id, fed.answer(event.round, event.task, event.tensors))
        else:
            fed.idle(IDLE_S)


class Uplink:
    """Connection to the coordinator, in a thread, so that it is served while clients are asked.

    Args:
        endpoint: The connection; only the thread uses it.
    """

    def __init__(self, endpoint: ClientEndpoint) -> None:
        self._endpoint = endpoint
        self._tasks = TaskQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = WakePipe()
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._talk, name="uplink", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def announce(self) -> None:
        """Tell the coordinator that the aggregator is there."""
        self._calls.append(self._endpoint.announce)
        self._wake.wake()

    def newest(self) -> ClientEvent | bool | None:
        """Return the newest task, False if there is none, and None after goodbye; raises the errors of the thread."""
        found: ClientEvent | bool | None = False
        while found is not None and self._tasks:
            event = self._tasks.get()
            if isinstance(event, BaseException):
                raise event
            found = event
        return found

    def answer(self, task_id: str, tensors: dict[str, np.ndarray]) -> None:
        """Send the answer to a task.

        Args:
            task_id: Message id of the task.
            tensors: Tensors of the answer.
        """
        self._calls.append(lambda: self._endpoint.send_result(task_id, "release", tensors))
        self._wake.wake()

    def close(self) -> None:
        """End the thread and close the connection."""
        self._stop = True
        self._wake.wake()
        self._thread.join()
        self._wake.close()

    def _talk(self) -> None:
        try:
            with self._endpoint as endpoint:
                endpoint.register(self._wake, self._deliver)
                endpoint.heartbeat("idle")
                while not self._stop and self._converse(endpoint):
                    pass
        except BaseException as error:
            self._error = error
            self._tasks.put(error)
        else:
            self._tasks.put(None)

    def _converse(self, endpoint: ClientEndpoint) -> bool:
        """Pass tasks on; False after goodbye."""
        for event in endpoint.poll(math.inf):
            if event.kind == "task":
                self._tasks.put(event)
            elif event.kind == "bye":
                endpoint.bye()
                return False
            elif event.kind == "error":
                _log.warning("the coordinator says: %s %s", event.code, event.reason)
        return True

    def _deliver(self) -> None:
        self._wake.clear()
        while self._calls:
            self._calls.popleft()()
