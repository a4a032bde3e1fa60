"""One-way link to the observer: models from the coordinator, personal metrics and timings from the workers."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
import zmq
from pydantic import Field

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import Assignment
from dpcfl_net.transport.channel import new_id, remember
from dpcfl_net.transport.guard import UNREAD_LIMIT
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.messages import (
    CHUNK,
    VERSION,
    Envelope,
    Header,
    Reason,
    Sha256,
    WireError,
    plain,
    unpack_strict,
    validate,
)
from dpcfl_net.transport.payload import Assembly, Payload
from dpcfl_net.transport.sockets import Arrived, Link, Listener, dial, join_curve, new_socket, receive, require_safe

COORDINATOR = "coordinator"
BATCH = 256
END_LINGER_MS = 30_000
LOOK_S = 0.2  # between two questions for the observer's end
AHEAD = 4  # rounds of models that the coordinator may send ahead of the observer
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z -]{0,19}$")]  # of labels: a phrase for the report
Work = Literal["receive", "train", "wait", "send", "aggregate", "cluster", "evaluate"]
Round = Annotated[int, Field(ge=0, le=10**6)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Cluster = Annotated[int, Field(ge=0, le=10**6)]


class Note(Envelope):
    """One message to the observer; fields that its kind does not use keep their defaults."""

    kind: Literal["MODELS", "CHUNK", "PERSONAL", "SPAN", "END"]
    sender: Annotated[int, Field(ge=-1, le=10**6)]
    round: Round = 0
    assignment: Annotated[list[Cluster | None], Field(max_length=10**5)] = []
    models: Annotated[int, Field(ge=0, le=4096)] = 0
    clients: Annotated[list[Cluster], Field(max_length=10**5)] = []
    labels: Annotated[dict[Kind, Annotated[list[Cluster | None], Field(max_length=10**5)]], Field(max_length=8)] = {}
    sha256: Sha256 = ""
    index: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    accuracy: Number = 0.0
    loss: Number | None = 0.0
    what: Work = "wait"
    start: Number = 0.0
    end: Number = 0.0
    reason: Reason = ""


@dataclass(frozen=True)
class Models:
    """Cluster models after a round.

    Attributes:
        round: The round.
        assignment: Cluster of each client, by client id; None: no cluster.
        models: Models, (M, p) float32.
        clients: Trusted server only: clients of the round.
        labels: Trusted server only: for each kind of label (as sent, as released) the cluster of each of `clients`; None: not known.
    """

    round: int
    assignment: Assignment
    models: np.ndarray
    clients: list[int] = field(default_factory=list)
    labels: dict[str, list[int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Personal:
    """Evaluation of a personal model on its client's test data.

    Attributes:
        client: Client id.
        round: The round.
        accuracy: 0 to 1.
        loss: Mean loss in nats; None if not finite.
    """

    client: int
    round: int
    accuracy: float
    loss: float | None


@dataclass(frozen=True)
class Span:
    """A period of work of one process.

    Attributes:
        who: Name of the process.
        what: Kind of work, one of `Work`.
        round: The round.
        start: Begin, seconds since the epoch.
        end: End, seconds since the epoch.
    """

    who: str
    what: str
    round: int
    start: float
    end: float


@dataclass(frozen=True)
class End:
    """End of the run, sent by the coordinator."""

    round: int
    reason: str


@dataclass
class _Sender:
    """State of one sender: -1 for the coordinator, otherwise a client id."""

    boot: str = ""
    sequence: int = 0
    note: Note | None = None
    assembly: Assembly | None = None


class ObserverInbox:
    """Receives messages from all processes and answers none.

    Models and the end are accepted from the coordinator's key only, metrics and spans of client i from its own key (with
    security "none", on loopback, senders are trusted). `parameters` and `max_models` bound the memory. A sender more than AHEAD
    rounds ahead is cut off ("flood") and may connect again.

    Args:
        bind: "tcp://host:port", port * or 0 for a free one.
        link: Run, job, keys and security.
        coordinator_key: The coordinator's public CURVE key.
        client_keys: Public CURVE key by client id.
        parameters: Number of parameters p.
        max_models: Largest number of models M.
        on_failure: Called with {"time", "peer", "code", "reason"} for each broken message.

    Attributes:
        failures: Number of broken messages by code.
        address: Bound address with its real port.

    Raises:
        ConfigError: As `Listener`.
    """

    def __init__(
        self,
        bind: str,
        link: Link,
        *,
        coordinator_key: str,
        client_keys: Mapping[int, str],
        parameters: int,
        max_models: int,
        on_failure: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._message_log = MessageLog(on_failure)
        self.failures = self._message_log.failures
        self._run, self._job, self._parameters, self._max_models = link.run, link.job, parameters, max_models
        self._curve = link.security == "curve"
        self._senders = {-1: _Sender(), **{client: _Sender() for client in client_keys}}
        self._boots: OrderedDict[str, None] = OrderedDict()
        self._by_key = {**{key: client for client, key in client_keys.items()}, coordinator_key: -1} if self._curve else {}
        unread = 4 * UNREAD_LIMIT + AHEAD * 4 * parameters * max_models
        self._listener = Listener(zmq.PULL, bind, link, self._by_key, unread)
        self._socket, self.address = self._listener.socket, self._listener.address

    def poll(self, timeout_s: float) -> list[Models | Personal | Span | End]:
        """Return what has arrived; waits for at most `timeout_s` seconds if there is nothing."""
        found: list[Models | Personal | Span | End] = []
        deadline = time.monotonic() + timeout_s
        while True:
            wait = max(0.0, min(deadline - time.monotonic(), 0.25))
            if self._socket.poll(int(wait * 1000)):
                self._read(found)
            for error in self._listener.news():
                self._message_log.failed("unknown", error)
            if found or time.monotonic() >= deadline:
                return found

    def close(self) -> None:
        """Close the socket."""
        self._listener.close(0)

    def __enter__(self) -> ObserverInbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read(self, found: list[Models | Personal | Span | End]) -> None:
        for _ in range(BATCH):
            arrived = receive(self._socket, self._listener.guard)
            if arrived is None:
                return
            name = "unknown"
            try:
                note, sender = self._checked(arrived)
                name = _name(note.sender)
                heard = self._take(note, sender, arrived.chunk)
            except WireError as error:
                self._message_log.failed(name, error)
                continue
            if heard is not None:
                found.append(heard)

    def _checked(self, arrived: Arrived) -> tuple[Note, _Sender]:
        """The message after the checks of key, schema, run, job and sequence, in this order."""
        owner = self._by_key.get(arrived.user)
        if self._curve and owner is None:
            raise WireError("unknown-key", "a message without an authenticated key of the roster")
        if arrived.malformed:
            raise WireError("multipart", "a message is a header, or a header and one chunk")
        note: Note = validate(Note, unpack_strict(arrived.header))
        for name, expected in (("version", VERSION), ("run", self._run), ("job", self._job)):
            if getattr(note, name) != expected:
                raise WireError(name, f"a message of another {name}")
        if (self._curve and note.sender != owner) or note.sender not in self._senders:
            raise WireError("identity", f"claims to be {_name(note.sender)}")
        sender = self._senders[note.sender]
        if note.boot != sender.boot:
            if note.boot in self._boots:
                raise WireError("stale-boot", "a boot id that was used before")
            remember(self._boots, note.boot, None)
            sender.boot, sender.sequence, sender.assembly = note.boot, 0, None
        if note.sequence <= sender.sequence:
            raise WireError("sequence", f"message {note.sequence} after message {sender.sequence}")
        sender.sequence = note.sequence
        return note, sender

    def _take(self, note: Note, sender: _Sender, chunk: memoryview | None) -> Models | Personal | Span | End | None:
        if (note.kind == "CHUNK") != (chunk is not None):
            raise WireError("multipart", f"a {note.kind} with a wrong number of frames")
        if note.kind == "SPAN":
            return Span(_name(note.sender), note.what, note.round, note.start, note.end)
        if (note.kind == "PERSONAL") != (note.sender >= 0):
            raise WireError("kind", f"{_name(note.sender)} does not send {note.kind}")
        if note.kind == "PERSONAL":
            return Personal(note.sender, note.round, note.accuracy, note.loss)
        if note.kind == "END":
            return End(note.round, note.reason)
        if note.kind == "MODELS":
            return self._begin(note, sender)
        return self._add(note, sender, chunk if chunk is not None else memoryview(b""))

    def _begin(self, note: Note, sender: _Sender) -> Models | None:
        if note.models > self._max_models or bool(note.sha256) != bool(note.models):
            raise WireError("template", f"{note.models} models announced, at most {self._max_models} expected")
        if any(cluster is not None and cluster >= note.models for cluster in note.assignment):
            raise WireError("template", "an assignment to a cluster without a model")
        if any(len(labels) != len(note.clients) for labels in note.labels.values()):
            raise WireError("template", "labels for other clients than those of the round")
        sender.note, sender.assembly = note, Assembly(_as_header(note, self._parameters))
        return None if note.models else self._finish(sender)

    def _add(self, note: Note, sender: _Sender, chunk: memoryview) -> Models | None:
        if sender.assembly is None:
            raise WireError("chunk", "no message expects this chunk")
        try:
            whole = sender.assembly.add(note.index, chunk)
        except WireError:
            sender.assembly = None
            raise
        return self._finish(sender) if whole else None

    def _finish(self, sender: _Sender) -> Models | None:
        note, assembly = sender.note, sender.assembly
        sender.note = sender.assembly = None
        if note is None or assembly is None:
            return None
        models = assembly.tensors()["models"]
        return Models(note.round, note.assignment, models, note.clients, note.labels)


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
        self._own_context = link.context is None
        self._context = link.context or zmq.Context()
        self._socket = new_socket(self._context, zmq.PUSH)
        join_curve(self._socket, link)
        dial(self._socket, connect)

    def models(
        self,
        round: int,
        assignment: Assignment,
        models: np.ndarray,
        clients: Sequence[int] = (),
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
        sampled: dict[str, Any] = {"clients": list(clients), "labels": {kind: list(values) for kind, values in labels.items()}}
        sent = self._send(
            "MODELS", sha256=payload.sha256, round=round, assignment=list(assignment), models=len(models), **sampled
        )
        for index, chunk in enumerate(payload.chunks):
            sent = sent and self._send("CHUNK", chunk=chunk, index=index)
        self.dropped += not sent

    def personal(self, round: int, accuracy: float, loss: float) -> None:
        """Report the evaluation of a personal model.

        Args:
            round: The round.
            accuracy: 0 to 1.
            loss: Mean loss in nats.
        """
        finite = float(loss) if math.isfinite(loss) else None
        self.dropped += not self._send("PERSONAL", round=round, accuracy=float(accuracy), loss=finite)

    def span(self, what: str, round: int, start: float, end: float) -> None:
        """Report a period of work.

        Args:
            what: Kind of work, one of `Work`.
            round: The round.
            start: Begin, seconds since the epoch.
            end: End, seconds since the epoch.
        """
        self.dropped += not self._send("SPAN", what=what, round=round, start=float(start), end=float(end))

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
        data = msgpack.packb(note.model_dump(exclude_defaults=True))
        self._gave_up = not self._wait(0.0 if self._gave_up else self._patience_s)
        if not self._gave_up:
            self._socket.send_multipart([data] if chunk is None else [data, chunk], zmq.DONTWAIT, copy=False)
        return not self._gave_up

    def _wait(self, seconds: float) -> bool:
        """Wait until a message can be sent; False after some seconds, or once the observer has ended."""
        deadline = time.monotonic() + seconds
        while not self._socket.poll(int(1000 * min(LOOK_S, max(0.0, deadline - time.monotonic()))), zmq.POLLOUT):
            if time.monotonic() >= deadline or self._ended():
                return False
        return True


def _as_header(note: Note, parameters: int) -> Header:
    """Header for Assembly with the payload of a MODELS message."""
    size = note.models * parameters * 4
    return Header(
        version=VERSION,
        run=note.run,
        job=note.job,
        boot=note.boot,
        sequence=note.sequence,
        id="0" * 32,
        kind="TASK",
        tensors=(("models", "f4", (note.models, parameters), size),),
        sha256=note.sha256,
        chunks=-(-size // CHUNK),
    )


def _name(sender: int) -> str:
    return COORDINATOR if sender == -1 else f"client {sender}"
