"""The traffic with one peer: what waits to be sent, in order and within the peer's credit, and what is arriving."""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpcfl_net.transport.messages import VERSION, WINDOW, Header, WireError, encode
from dpcfl_net.transport.payload import Assembly, Payload

CONTROLS = 256  # small messages that may wait for a peer that does not read
RECENT_MESSAGES = 256  # ids of messages kept to recognise a repetition

K = TypeVar("K")
V = TypeVar("V")
Send = Callable[[Header, bytes, memoryview | None], bool]


def new_id() -> str:
    return os.urandom(16).hex()


class Stamp:
    """Makes this side's headers: version, run, job, boot id, and a sequence number that only rises."""

    def __init__(self, run: str, job: str) -> None:
        self.run, self.job = run, job
        self.renew()

    def renew(self) -> None:
        """A new boot id; the sequence starts again."""
        self.boot, self._sequence = new_id(), 0

    def header(self, **fields: Any) -> Header:
        self._sequence += 1
        fields.setdefault("id", new_id())
        return Header(version=VERSION, run=self.run, job=self.job, boot=self.boot, sequence=self._sequence, **fields)

    def require_same(self, header: Header) -> None:
        """WireError "version", "run" or "job" for a message that belongs elsewhere."""
        if header.version != VERSION:
            raise WireError("version", f"the peer speaks version {header.version}, this side {VERSION}")
        if header.run != self.run:
            raise WireError("run", f"the peer is in run {header.run}, this side in {self.run}")
        if header.job != self.job:
            raise WireError("job", f"the peer has job {header.job[:16]}..., this side {self.job[:16]}...")


@dataclass
class Stream:
    """A message on its way out: header fields and payload, kept until it is acknowledged and sent again if need be."""

    fields: dict[str, Any]
    payload: Payload
    id: str = field(default_factory=new_id)
    started: bool = False
    sent: int = 0
    credited: int = 0
    handed_over: float = 0.0

    def rewind(self) -> None:
        self.started, self.sent, self.credited = False, 0, 0


class Channel:
    """Both directions of the traffic with one peer."""

    def __init__(self, stamp: Stamp, send: Send) -> None:
        self._stamp, self._send = stamp, send
        self._controls: deque[dict[str, Any]] = deque()
        self._streams: deque[Stream] = deque()
        self._ignored: OrderedDict[str, None] = OrderedDict()
        self.assembly: Assembly | None = None
        self.sequence = 0

    def restart(self) -> None:
        """Forget all that belonged to a connection that is gone."""
        self._controls.clear()
        self._streams.clear()
        self.assembly = None
        self.sequence = 0

    # out

    def say(self, kind: str, **fields: Any) -> None:
        """Queue a message without payload; dropped if the peer has long stopped reading (repetition makes up for it)."""
        if len(self._controls) < CONTROLS:
            self._controls.append({"kind": kind, **fields})

    def push(self, stream: Stream) -> None:
        """Queue a message with payload from its beginning; nothing happens while it is still on its way."""
        if stream not in self._streams:
            stream.rewind()
            self._streams.append(stream)

    def drop(self, message_id: str) -> None:
        """Stop sending the message."""
        self._streams = deque(stream for stream in self._streams if stream.id != message_id)

    def sending(self, message_id: str) -> bool:
        return any(stream.id == message_id for stream in self._streams)

    def credit(self, message_id: str, arrived: int) -> None:
        """The peer has taken `arrived` chunks of the message."""
        for stream in self._streams:
            if stream.id == message_id:
                stream.credited = max(stream.credited, min(arrived, stream.sent))

    def pump(self) -> bool:
        """Send what may be sent now; False if the socket refused, so that this must be tried again soon."""
        while self._controls:
            header = self._stamp.header(**self._controls[0])
            if not self._send(header, encode(header), None):
                return False
            if self._controls:  # sending can find the peer gone and empty the queues
                self._controls.popleft()
        while self._streams:
            stream = self._streams[0]
            if not self._advance(stream):
                return False
            if stream.sent < len(stream.payload.chunks):
                return True
            stream.handed_over = time.monotonic()
            if self._streams:
                self._streams.popleft()
        return True

    def _advance(self, stream: Stream) -> bool:
        """Send the stream on as far as its credit goes; False if the socket refused."""
        chunks = stream.payload.chunks
        if not stream.started:
            payload = stream.payload
            header = self._stamp.header(
                id=stream.id, tensors=payload.rows, sha256=payload.sha256, chunks=len(chunks), **stream.fields
            )
            if not self._send(header, encode(header), None):
                return False
            stream.started = True
        while stream.sent < min(len(chunks), stream.credited + WINDOW):
            header = self._stamp.header(kind="CHUNK", parent=stream.id, index=stream.sent)
            if not self._send(header, encode(header), chunks[stream.sent]):
                return False
            stream.sent += 1
        return True

    # in

    def admit(self, header: Header) -> None:
        """WireError "sequence" unless the message is newer than all before it."""
        if header.sequence <= self.sequence:
            raise WireError("sequence", f"message {header.sequence} after message {self.sequence}")
        self.sequence = header.sequence

    def begin(self, header: Header) -> Assembly | None:
        """Make room for a message whose header has passed every check; returned at once if it has no payload.

        A message that was still arriving gives way, so that one buffer is all a peer can claim.
        """
        assembly = Assembly(header)
        if not header.chunks:
            return assembly
        self._ignored.pop(header.id, None)
        self.assembly = assembly
        return None

    def ignore(self, message_id: str) -> None:
        """Drop the message's chunks without a complaint: they were on their way when it was refused."""
        if self.assembly is not None and self.assembly.header.id == message_id:
            self.assembly = None
        remember(self._ignored, message_id, None)

    def take(self, header: Header, chunk: memoryview) -> Assembly | None:
        """Add a chunk; the assembly if that completes it. WireError "chunk" if it has no place."""
        assembly = self.assembly
        if assembly is None or assembly.header.id != header.parent:
            if header.parent in self._ignored:
                return None
            raise WireError("chunk", "a chunk of no message that is arriving")
        if assembly.add(header.index, chunk):
            self.assembly = None
            return assembly
        if assembly.received % (WINDOW // 2) == 0:
            self.say("CREDIT", parent=header.parent, index=assembly.received)
        return None


def remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    """Put the newest last and let the oldest go beyond REMEMBERED."""
    known[key] = value
    known.move_to_end(key)
    while len(known) > RECENT_MESSAGES:
        known.popitem(last=False)
