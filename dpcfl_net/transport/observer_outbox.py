"""A process's end of its one-way link to the observer: models from the coordinator, metrics and timings from the workers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import msgpack
import numpy as np
import zmq

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import Assignment
from dpcfl_net.transport.channel import new_id
from dpcfl_net.transport.messages import VERSION, plain
from dpcfl_net.transport.observer_notes import COORDINATOR, Note, Period
from dpcfl_net.transport.payload import Payload
from dpcfl_net.transport.sockets import Link, dial, join_curve, new_socket, require_safe, send

_log = logging.getLogger(__name__)

END_LINGER_MS = 30_000
LOOK_S = 0.2  # between two questions for the observer's end


class ObserverOutbox:
    """Sends messages to the observer and never reads, so that nothing flows back.

    While the observer cannot be reached, sending waits; after `patience_s` the message is dropped, and so are later ones that
    cannot be sent at once, until one is sent. An observer never stops a run.

    Args:
        connect: The observer's "tcp://host:port".
        link: Run, job, keys and security.
        sender: "coordinator" or a client id.
        patience_s: Longest wait, seconds; well below the `orphan_timeout_s` of workers, to whom the coordinator is silent meanwhile.
        ended: Returns True once the observer has ended for good; nothing waits for it then.

    Attributes:
        dropped: Number of dropped messages.

    Raises:
        ConfigError: If the address is not allowed or a key is missing.
    """

    def __init__(
        self,
        connect: str,
        link: Link,
        *,
        sender: str | int,
        patience_s: float = 20.0,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        require_safe(connect, link.security)
        if link.security == "curve" and (link.keys is None or link.server_key is None):
            raise ConfigError("a link to the observer with security curve needs a key pair and the observer's public key")
        self.dropped = 0
        self._run, self._job, self._boot, self._sequence = link.run, link.job, new_id(), 0
        self._sender = -1 if sender == COORDINATOR else int(sender)
        self._patience_s, self._gave_up, self._ended = patience_s, False, ended
        self._unreached_since: float | None = None
        self._own_context = link.context is None
        self._context = link.context or zmq.Context()
        self._socket = new_socket(self._context, zmq.PUSH)
        try:
            join_curve(self._socket, link)
            dial(self._socket, connect)
        except BaseException:
            self.close(abort=True)
            raise

    def models(
        self,
        round: int,
        assignment: Assignment,
        models: np.ndarray,
        clients: Sequence[int] | None = None,
        labels: Mapping[str, Sequence[int | None]] = MappingProxyType({}),
    ) -> None:
        """Publish the models after a round.

        Args:
            round: The round.
            assignment: Cluster of each client, by client id.
            models: (M, p) float32, M >= 0; must not change until they are sent.
            clients: As in `Models`.
            labels: As in `Models`.
        """
        payload = Payload.of({"models": np.asarray(models, dtype="<f4")})
        sampled: dict[str, Any] = {"labels": {kind: list(values) for kind, values in labels.items()}}
        sampled["clients"] = None if clients is None else list(clients)
        sent = self._send(
            "MODELS", blake3=payload.blake3, round=round, assignment=list(assignment), models=len(models), **sampled
        )
        for index, chunk in enumerate(payload.chunks):
            sent = sent and self._send("CHUNK", chunk=chunk, index=index)
        self.dropped += not sent

    def personal(self, round: int, accuracy: float | None, loss: float | None) -> None:
        """Report the evaluation of a personal model.

        Args:
            round: The round.
            accuracy: 0 to 1; None without a personal model.
            loss: Mean loss in nats; None without a personal model.
        """
        finite = loss is not None and math.isfinite(loss)
        self.dropped += not self._send(
            "PERSONAL",
            round=round,
            accuracy=0.0 if accuracy is None else float(accuracy),
            has_model=accuracy is not None,
            loss=float(loss) if loss is not None and finite else 0.0,
            has_loss=finite,
        )

    def is_reachable(self, wait: bool = False) -> bool:
        """Return True if a message can be sent at once.

        Args:
            wait: Wait for this, until the observer has been out of reach for `patience_s`.
        """
        now = time.monotonic()
        since = now if self._unreached_since is None else self._unreached_since
        reachable = self._wait(max(0.0, since + self._patience_s - now) if wait else 0.0)
        self._unreached_since = None if reachable else since
        return reachable

    def spans(self, periods: Sequence[tuple[str, int, float, float]]) -> None:
        """Report periods of work in one message.

        Args:
            periods: (kind of work, one of `Work`; round; begin and end in seconds since the epoch); at most `MOST_SPANS`.
        """
        spans = [
            Period(what=what, round=t, start=float(start), end=float(end))  # type: ignore[arg-type]
            for what, t, start, end in periods
        ]
        self.dropped += not self._send("SPANS", spans=spans)

    def end(self, round: int, reason: str = "") -> None:
        """Report the end of the run."""
        self.dropped += not self._send("END", round=round, reason=plain(reason))

    def close(self, abort: bool = False) -> None:
        """Close the socket; queued messages are sent for up to 30 s, unless `abort` or the observer has ended."""
        self._socket.close(linger=0 if abort or self._gave_up or self._ended() else END_LINGER_MS)
        if self._own_context:
            self._context.term()

    def __enter__(self) -> ObserverOutbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(abort=kind is not None)

    def _send(self, kind: str, /, chunk: memoryview | None = None, **fields: Any) -> bool:
        """Send one message; False if the observer did not accept it in time."""
        self._sequence += 1
        note = Note(
            version=VERSION,
            run=self._run,
            job=self._job,
            boot=self._boot,
            sequence=self._sequence,
            kind=kind,  # type: ignore[arg-type]
            sender=self._sender,
            **fields,
        )
        data = msgpack.packb(note.model_dump(exclude_unset=True))  # also defaults: the size must not depend on the values
        had_given_up = self._gave_up
        self._gave_up = not self._wait(0.0 if had_given_up else self._patience_s)
        if self._gave_up:
            if not had_given_up and not self._ended():
                where = self._socket.get_string(zmq.LAST_ENDPOINT)
                _log.warning("the observer at %s cannot be reached: what it should get is dropped until it can", where)
            return False
        try:
            send(self._socket, *([data] if chunk is None else [data, chunk]))
        except zmq.Again:  # the connection has ended since; ZeroMQ drops all frames of the message
            return False
        return True

    def _wait(self, seconds: float) -> bool:
        """Wait until a message can be sent; False after some seconds, or once the observer has ended."""
        clock = AwakeClock()  # a pause of this process does not count as silence of the observer
        deadline = clock.now() + seconds
        while not self._socket.poll(int(1000 * min(LOOK_S, max(0.0, deadline - clock.now()))), zmq.POLLOUT):
            if clock.now() >= deadline or self._ended():
                return False
        return True
