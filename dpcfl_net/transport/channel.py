"""Traffic with one peer: outgoing messages in order and within the peer's credit, and the incoming message."""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpcfl_net.transport.messages import CHUNK, CREDIT_CHUNKS, VERSION, WINDOW, Header, WireError, encode
from dpcfl_net.transport.payload import Assembly, Payload

CONTROLS = 256  # small messages that may wait for a peer that does not read
RECENT_MESSAGES = 256  # ids of messages kept to recognise a repetition
DAMAGED = ("chunk", "hash")  # errors of a payload that arrived incomplete or changed: it is sent again
PASSING = ("no-hello", "boot", "sequence", "stale-boot")  # errors of a message that came too late: nothing in it was read
REPEATS = 64  # repetitions of one damaged message that a peer may ask for
DOUBLINGS = 3  # of the time between repetitions
CREDIT_S = 1.0  # at most, between the credits for a message whose chunks keep arriving
SLOW = 1 << 20  # bytes per second; on a faster link nothing is sent again that is on its way

K = TypeVar("K")
V = TypeVar("V")
Send = Callable[[Header, bytes, memoryview | None], bool]


def new_id() -> str:
    """Return 16 random bytes in hex."""
    return os.urandom(16).hex()


class Stamp:
    """Headers of this side: version, run, job, boot id, and an increasing sequence number."""

    def __init__(self, run: str, job: str) -> None:
        self.run, self.job = run, job
        self.renew()

    def renew(self) -> None:
        """Draw a new boot id and restart the sequence."""
        self.boot, self._sequence = new_id(), 0

    def header(self, **fields: Any) -> Header:
        """Return a header with the next sequence number and the given fields."""
        self._sequence += 1
        if "id" not in fields:
            fields["id"] = new_id()
        return Header(version=VERSION, run=self.run, job=self.job, boot=self.boot, sequence=self._sequence, **fields)

    def require_same(self, header: Header) -> None:
        """Raise WireError "version", "run" or "job" for a header of another run."""
        if header.version != VERSION:
            raise WireError("version", f"the peer speaks version {header.version}, this side {VERSION}")
        if header.run != self.run:
            raise WireError("run", f"the peer is in run {header.run}, this side in {self.run}")
        if header.job != self.job:
            raise WireError("job", f"the peer has job {header.job[:16]}..., this side {self.job[:16]}...")


@dataclass
class Stream:
    """An outgoing message with payload, kept for repetition until it is acknowledged.

    Attributes:
        fields: Header fields.
        payload: The tensors.
        id: Message id.
        started: True if the header was sent.
        sent: Chunks sent.
        credited: Chunks that the peer has confirmed.
        moved: Time of the last progress, monotonic clock, seconds.
        repeats: Repetitions without an answer so far.
        heard: Messages of the peer that had been heard at the last progress.
        created: Time when the message was ready, monotonic clock, seconds.
    """

    fields: dict[str, Any]
    payload: Payload
    id: str = field(default_factory=new_id)
    started: bool = False
    sent: int = 0
    credited: int = 0
    moved: float = 0.0
    repeats: int = 0
    heard: int = 0
    created: float = field(default_factory=time.monotonic)

    def rewind(self) -> None:
        self.started, self.sent, self.credited, self.moved = False, 0, 0, time.monotonic()

    def due(self, resend_s: float) -> float:
        """Time by which the peer should have acknowledged the message; the wait doubles with each repetition."""
        on_its_way = min(self.payload.size, WINDOW * CHUNK) / SLOW
        return self.moved + resend_s * 2 ** min(self.repeats, DOUBLINGS) + on_its_way


class Channel:
    """Both directions of the traffic with one peer.

    Args:
        stamp: Makes the headers of this side.
        send: Sends one message; returns False if the socket refuses it.
        wake: Called when there may be something to send.
    """

    def __init__(self, stamp: Stamp, send: Send, wake: Callable[[], None] = lambda: None) -> None:
        self._stamp, self._send, self._wake = stamp, send, wake
        self._controls: deque[dict[str, Any]] = deque()
        self._streams: deque[Stream] = deque()
        self._on_their_way: dict[str, Stream] = {}  # all chunks are sent, and the peer has not acknowledged the message
        self._credit_due = 0.0
        self._ignored: OrderedDict[str, int] = OrderedDict()  # refused message to its last chunk that arrived, -1: none
        self.assembly: Assembly | None = None
        self.sequence = 0
        self._heard = 0  # messages of the peer on this connection

    def restart(self) -> None:
        """Discard all state of a connection that has ended."""
        self._controls.clear()
        self._streams.clear()
        self._on_their_way.clear()
        self.assembly = None
        self.sequence = self._heard = 0

    def say(self, kind: str, **fields: Any) -> None:
        """Queue a message without payload; it is dropped if too many wait for the peer, and a repetition replaces it."""
        if len(self._controls) < CONTROLS:
            self._controls.append({"kind": kind, **fields})
            self._wake()

    def push(self, stream: Stream) -> None:
        """Queue a message with payload from its beginning, unless it is being sent already."""
        if stream not in self._streams:
            self._on_their_way.pop(stream.id, None)
            stream.rewind()
            stream.heard = self._heard
            self._streams.append(stream)
            self._wake()

    def repeat(self, stream: Stream) -> None:
        """Send a message again from its beginning, also while it is being sent."""
        self.drop(stream.id)
        self.push(stream)

    def repeat_overdue(self, stream: Stream) -> None:
        """Send a message again because its peer is silent; the next repetition waits longer."""
        stream.repeats += 1
        self.repeat(stream)

    def drop(self, message_id: str) -> None:
        """Stop sending a message."""
        self._on_their_way.pop(message_id, None)
        self._streams = deque(stream for stream in self._streams if stream.id != message_id)

    def credit(self, message_id: str, arrived: int) -> None:
        """Record that the peer has taken `arrived` chunks of a message, also after the last one was sent."""
        if message_id in self._on_their_way:
            self._on_their_way[message_id].moved = time.monotonic()
        for stream in self._streams:
            if stream.id == message_id:
                stream.credited = max(stream.credited, min(arrived, stream.sent))
                stream.moved = time.monotonic()
                self._wake()

    def _announce(self) -> bool:
        """Send the waiting controls and the header of the next message; False if the socket refused one."""
        while self._controls:
            header = self._stamp.header(**self._controls[0])
            if not self._send(header, encode(header), None):
                return False
            if self._controls:  # `_send` empties the queues if the peer has left
                self._controls.popleft()
        stream = self._streams[0] if self._streams else None
        if stream is not None and not stream.started:
            payload = stream.payload
            header = self._stamp.header(
                id=stream.id, tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks), **stream.fields
            )
            if not self._send(header, encode(header), None):
                return False
            stream.started, stream.moved = True, time.monotonic()
        return True

    def pump(self) -> bool:
        """Send as much as credit allows; returns False if the socket refused a message, which must be retried soon."""
        while True:
            if not self._announce():
                return False
            if not self._streams:
                return True
            stream = self._streams[0]
            if not self._advance(stream):
                return False
            if stream.sent < len(stream.payload.chunks):
                return True
            if self._streams:
                self._streams.popleft()
                self._on_their_way[stream.id] = stream

    def _advance(self, stream: Stream) -> bool:
        """Send the chunks of a message as far as its credit allows; False if the socket refused one."""
        chunks = stream.payload.chunks
        while stream.sent < min(len(chunks), stream.credited + WINDOW):
            header = self._stamp.header(kind="CHUNK", parent=stream.id, index=stream.sent)
            if not self._send(header, encode(header), chunks[stream.sent]):
                return False
            stream.sent, stream.moved, stream.heard = stream.sent + 1, time.monotonic(), self._heard
        return True

    def admit(self, header: Header) -> None:
        """Raise WireError "sequence" unless the header is newer than all before it."""
        if header.sequence <= self.sequence:
            raise WireError("sequence", f"message {header.sequence} after message {self.sequence}")
        self.sequence = header.sequence
        self._heard += 1

    def was_read(self, stream: Stream) -> bool:
        """Return True if the peer must have read a message that arrived: it has since sent two messages, and reads in between.

        A peer that is silent is busy, or its connection has ended: the same message again would only wait behind the first one.
        """
        return self._heard >= stream.heard + 2

    def begin(self, header: Header) -> Assembly | None:
        """Start to receive a message whose header has passed every check.

        A message that is still arriving is discarded, so that a peer can claim only one buffer.

        Args:
            header: The message's header.

        Returns:
            The complete message if it has no payload, else None.
        """
        assembly = Assembly(header)
        if not header.chunks:
            return assembly
        self._ignored.pop(header.id, None)
        self.assembly, self._credit_due = assembly, time.monotonic() + CREDIT_S
        return None

    def ignore(self, message_id: str, seen: int = -1) -> None:
        """Discard the chunks of a refused message that are still on their way, after chunk `seen`."""
        if self.assembly is not None and self.assembly.header.id == message_id:
            self.assembly = None
        remember(self._ignored, message_id, seen)

    def take(self, header: Header, chunk: memoryview) -> Assembly | None:
        """Add a chunk to the arriving message.

        Args:
            header: The chunk's header.
            chunk: Its bytes.

        Returns:
            The message if the chunk completes it, else None.

        Raises:
            WireError: "chunk" if no arriving message expects it.
        """
        assembly = self.assembly
        if assembly is None or assembly.header.id != header.parent:
            known = self._ignored.get(header.parent)
            remember(self._ignored, header.parent, header.index)
            if known is not None and header.index > known:
                return None
            # The first one, or a chunk that was here before: the message was sent again, and its header did not arrive.
            raise WireError("chunk", "no message expects this chunk")
        if assembly.add(header.index, chunk):
            self.assembly = None
            return assembly
        now = time.monotonic()
        if assembly.received % CREDIT_CHUNKS == 0 or now >= self._credit_due:
            self._credit_due = now + CREDIT_S
            self.say("CREDIT", parent=header.parent, index=assembly.received)
        return None


def remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    """Store an entry as the newest of at most `RECENT_MESSAGES`; the oldest are dropped."""
    known[key] = value
    known.move_to_end(key)
    while len(known) > RECENT_MESSAGES:
        known.popitem(last=False)
