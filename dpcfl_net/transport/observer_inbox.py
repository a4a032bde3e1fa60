"""The observer's end of its one-way links: receives messages from all processes and answers none."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import zmq

from dpcfl_net.transport.channel import remember
from dpcfl_net.transport.guard import UNREAD_LIMIT
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.messages import CHUNK, VERSION, Header, WireError
from dpcfl_net.transport.observer_notes import End, Models, Note, Personal, Span, decode_note, sender_name
from dpcfl_net.transport.payload import Assembly
from dpcfl_net.transport.sockets import BATCH, Arrived, Link, Listener

NOTES_UNREAD = 4 * UNREAD_LIMIT  # bytes that a sender may send ahead of complete notes, besides models
AHEAD = 4  # rounds of models that the coordinator may send ahead of the observer
KEPT_BOOTS = 4  # of a sender: what it sent before a crash may arrive after the first message of its next process


@dataclass
class _Sender:
    """State of one boot of a sender."""

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
        # By sender, -1 for the coordinator and otherwise a client id, and by boot.
        self._senders: dict[int, OrderedDict[str, _Sender]] = {sender: OrderedDict() for sender in (-1, *client_keys)}
        self._boots: OrderedDict[str, None] = OrderedDict()
        self._by_key = {**{key: client for client, key in client_keys.items()}, coordinator_key: -1} if self._curve else {}
        unread = NOTES_UNREAD + AHEAD * 4 * parameters * max_models
        self._listener = Listener(zmq.PULL, bind, link, self._by_key, unread)
        self._socket, self.address = self._listener.socket, self._listener.address

    def poll(self, timeout_s: float) -> list[Models | Personal | Span | End]:
        """Return what has arrived; waits for at most `timeout_s` seconds if there is nothing."""
        found: list[Models | Personal | Span | End] = []
        deadline = time.monotonic() + timeout_s
        while True:
            wait = max(0.0, min(deadline - time.monotonic(), 0.25))
            self._socket.poll(int(wait * 1000))
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
            arrived = self._listener.receive()
            if arrived is None:
                return
            name = "unknown"
            try:
                note, sender = self._checked(arrived)
                name = sender_name(note.sender)
                arrived.require_frames_of(note.kind)
                heard = self._take(note, sender, arrived.chunk)
            except WireError as error:
                self._message_log.failed(name, error)
                continue
            if isinstance(heard, list):
                found += heard
            elif heard is not None:
                found.append(heard)

    def _checked(self, arrived: Arrived) -> tuple[Note, _Sender]:
        """The message after the checks of key, schema, run, job and sequence, in this order."""
        owner = self._by_key.get(arrived.user)
        if self._curve and owner is None:
            raise WireError("unknown-key", "a message without an authenticated key of the roster")
        arrived.require_frames()
        note = decode_note(arrived.header, lists_clients=owner == -1 or not self._curve)
        for name, expected in (("version", VERSION), ("run", self._run), ("job", self._job)):
            if getattr(note, name) != expected:
                raise WireError(name, f"a message of another {name}")
        if (self._curve and note.sender != owner) or note.sender not in self._senders:
            raise WireError("identity", f"claims to be {sender_name(note.sender)}")
        boots = self._senders[note.sender]
        if note.boot not in boots:
            if note.boot in self._boots:
                raise WireError("stale-boot", "a boot id that was used before")
            remember(self._boots, note.boot, None)
            boots[note.boot] = _Sender()
            if len(boots) > KEPT_BOOTS:
                boots.popitem(last=False)
        sender = boots[note.boot]
        if note.sequence <= sender.sequence:
            raise WireError("sequence", f"message {note.sequence} after message {sender.sequence}")
        sender.sequence = note.sequence
        return note, sender

    def _take(self, note: Note, sender: _Sender, chunk: memoryview | None) -> Models | Personal | list[Span] | End | None:
        if note.kind == "SPANS":
            return [Span(sender_name(note.sender), one.what, one.round, one.start, one.end) for one in note.spans]
        if (note.kind == "PERSONAL") != (note.sender >= 0):
            raise WireError("kind", f"{sender_name(note.sender)} does not send {note.kind}")
        if note.kind == "PERSONAL":
            accuracy, loss = note.accuracy if note.has_model else None, note.loss if note.has_loss else None
            return Personal(note.sender, note.round, accuracy, loss)
        if note.kind == "END":
            return End(note.round, note.reason)
        if note.kind == "MODELS":
            return self._begin(note, sender)
        return self._add(note, sender, chunk if chunk is not None else memoryview(b""))

    def _begin(self, note: Note, sender: _Sender) -> Models | None:
        if note.models > self._max_models or bool(note.blake3) != bool(note.models):
            raise WireError("template", f"{note.models} models announced, at most {self._max_models} expected")
        if any(cluster is not None and cluster >= note.models for cluster in note.assignment):
            raise WireError("template", "an assignment to a cluster without a model")
        if any(len(labels) != len(note.clients or ()) for labels in note.labels.values()):
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
        blake3=note.blake3,
        chunks=-(-size // CHUNK),
    )
