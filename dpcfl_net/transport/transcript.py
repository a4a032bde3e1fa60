"""Transcript of all messages as the coordinator saw them: append-only, chained by hashes."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import msgpack
import numpy as np

from dpcfl_net.core.clock import MOST_SECONDS
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import naming, opened
from dpcfl_net.transport.messages import MAX_FRAME, MAX_HEADER, VERSION, Header, WireError, decode
from dpcfl_net.transport.payload import Assembly

Mode = Literal["off", "headers", "full"]
FORMAT = "dpcfl-transcript-1"
FLUSH_S = 1.0
_START = hashlib.sha256(FORMAT.encode()).digest()
_MAX_BODY = MAX_FRAME + 2 * MAX_HEADER  # bytes of one record, also of one whose chunk was refused as too long
_CLIENT = re.compile(r"client ([0-9]{1,7})")
_BLOCK = 1 << 16
_FRAME = 5 + 2 + 32  # bytes of msgpack around a body: the pair, the two byte strings' heads, the digest


@dataclass(frozen=True)
class Record:
    """One message of a transcript.

    Attributes:
        number: Position in the transcript, from 0.
        time: Seconds since the epoch.
        direction: "up" to the coordinator or "down" from it.
        peer: Name of the peer.
        header: Bytes of the header.
        payload: The message's chunk, in mode "full" only.
    """

    number: int
    time: float
    direction: str
    peer: str
    header: bytes
    payload: bytes | None

    @property
    def client(self) -> int | None:
        """Client id of the peer; None if it is not known: without CURVE, before the HELLO of a connection."""
        found = _CLIENT.fullmatch(self.peer)
        return None if found is None else int(found[1])


class Transcript:
    """Appends records to a file, each with sha256(previous digest + its bytes).

    An existing file is verified and continued; a record that a crash truncated is removed, also where zeros follow it.

    Args:
        path: The file.
        mode: "off" writes nothing, "headers" omits payloads, "full" keeps them.

    Raises:
        ConfigError: If the file cannot be written.
        Refused: "transcript-broken" if the existing file was changed.
    """

    def __init__(self, path: str | Path, mode: Mode = "headers") -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"transcript must be off, headers or full, got {mode!r}")
        self.path, self.mode = Path(path), mode
        self.records, self._digest = 0, _START
        self._file = None
        self._flushed = time.monotonic()
        if mode == "off":
            return
        try:
            if self.path.exists():
                self._continue()
            self._file = open(self.path, "ab")  # noqa: SIM115 - open until close
        except OSError as error:
            raise ConfigError(f"cannot write the transcript {path}: {error.strerror}") from None

    def _continue(self) -> None:
        reader = read(self.path)
        for _ in reader:
            pass
        self.records, self._digest = reader.records, reader.digest
        os.truncate(self.path, reader.good)

    @property
    def head(self) -> str:
        """Digest of the last record, hex, which reveals truncation and rewriting."""
        return self._digest.hex()

    def record(self, direction: str, peer: str, header: bytes, payload: bytes | memoryview | None = None) -> None:
        """Append one message.

        Args:
            direction: "up" to the coordinator or "down" from it.
            peer: Name of the peer.
            header: Bytes of the header.
            payload: The message's chunk.
        """
        if self._file is None:
            return
        kept = payload if self.mode == "full" else None
        body = msgpack.packb([self.records, time.time(), direction, peer, header, kept])
        self._digest = hashlib.sha256(self._digest + body).digest()
        with naming(self.path):
            self._file.write(msgpack.packb([body, self._digest]))
        self.records += 1
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write the buffer if a second has passed since the last time."""
        if time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the buffer."""
        if self._file is not None:
            with naming(self.path):
                self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with naming(self.path):
                file.close()


def read(path: str | Path) -> Reader:
    """Return a reader of a transcript's records."""
    return Reader(Path(path))


class Reader:
    """Iterates over the records of a transcript and verifies the chain.

    Iteration raises Refused "transcript-broken" with the first record that was changed.

    Args:
        path: The file.

    Attributes:
        cut: True if an incomplete record or zeros follow the last one, after a crash: of the machine, it may leave the length of a
            file without its last bytes, which then read as zeros.
        records: Number of complete records.
        digest: Digest of the last record.
        good: Bytes of the complete records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = False
        self.records, self.digest, self.good = 0, _START, 0

    def __iter__(self) -> Iterator[Record]:
        self.cut, self.records, self.digest, self.good = False, 0, _START, 0
        with opened(self.path) as file:
            unpacker = _unpacker(file)
            while True:
                try:
                    record = self._verify(unpacker.unpack())
                except msgpack.OutOfData:
                    self.cut = self.good < os.fstat(file.fileno()).st_size
                    return
                except (Refused, ValueError, TypeError, msgpack.UnpackException) as error:
                    if self._zeros_follow(file):
                        return
                    raise self._broken() from error
                self.good = unpacker.tell()
                yield record

    def _zeros_follow(self, file: BinaryIO) -> bool:
        """Return whether the good records are followed by at most the beginning of one, and then by zeros alone; set `cut` if so."""
        end = _end_without_zeros(file, self.good)
        size = os.fstat(file.fileno()).st_size
        if end == size or end - self.good > _MAX_BODY + _FRAME:
            return False
        file.seek(self.good)
        try:
            _unpacker(io.BytesIO(file.read(end - self.good))).unpack()
        except msgpack.OutOfData:
            self.cut = True
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        return self.cut

    def _verify(self, found: Any) -> Record:
        if not (isinstance(found, list) and len(found) == 2 and all(isinstance(part, bytes) for part in found)):
            raise self._broken()
        body, digest = found
        if hashlib.sha256(self.digest + body).digest() != digest:
            raise self._broken()
        try:
            record = Record(*msgpack.unpackb(body))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise self._broken() from error
        if not _well_formed(record) or record.number != self.records:
            raise self._broken()
        self.records, self.digest = self.records + 1, digest
        return record

    def _broken(self) -> Refused:
        return Refused("transcript-broken", f"{self.path}: record {self.records} was changed")


def _unpacker(file: BinaryIO) -> msgpack.Unpacker:
    return msgpack.Unpacker(
        file, read_size=1 << 16, max_buffer_size=_MAX_BODY + _FRAME, max_array_len=2, max_bin_len=_MAX_BODY, max_ext_len=0
    )


def _end_without_zeros(file: BinaryIO, start: int) -> int:
    """Return where the zeros at the end of a file begin, but not before `start`."""
    end = os.fstat(file.fileno()).st_size
    while end > start:
        begin = max(start, end - _BLOCK)
        file.seek(begin)
        kept = len(file.read(end - begin).rstrip(b"\0"))
        if kept:
            return begin + kept
        end = begin
    return start


def _well_formed(record: Record) -> bool:
    """True if the fields have their types and the time is one: anyone can rebuild the chain with arbitrary content."""
    return (
        type(record.number) is int
        and type(record.time) is float
        and 0 <= record.time <= MOST_SECONDS
        and type(record.direction) is type(record.peer) is str
        and type(record.header) is bytes
        and type(record.payload) in (bytes, type(None))
    )


def header_of(record: Record) -> Header:
    """Decode the header of a record.

    Args:
        record: The record.

    Raises:
        ConfigError: If the server spoke another version of the wire protocol. A client may send any number.
        WireError: As `messages.decode`.
    """
    header = decode(record.header)
    if record.direction == "down" and header.version != VERSION:
        raise ConfigError(
            f"the transcript holds messages of wire protocol {header.version}, and this version of dpcfl_net reads {VERSION}, whose "
            "payload hashes differ: read them with the version that recorded them"
        )
    return header


def messages(path: str | Path) -> Iterator[tuple[Record, Header, dict[str, np.ndarray] | None]]:
    """Yield every complete message, chunks merged, in order of completion.

    Args:
        path: The file.

    Yields:
        First record, header and tensors. Tensors are None where payloads were not kept or do not fit their header (the
        coordinator refused them).

    Raises:
        ConfigError: As `header_of`.
    """
    for record, header, chunks in merged((record, header_of(record)) for record in read(path)):
        yield record, header, tensors_of(header, chunks)


def merged(records: Iterable[tuple[Record, Header]]) -> Iterator[tuple[Record, Header, list[bytes | None]]]:
    """Merge the chunks of messages.

    Args:
        records: Records with their decoded headers.

    Yields:
        First record, header and chunks of every complete message, in order of completion. A chunk is None if it was not kept.
    """
    arriving: dict[tuple[str, str], tuple[Record, Header, list[bytes | None]]] = {}
    for record, header in records:
        channel = (record.direction, record.peer)
        if header.kind != "CHUNK":
            if header.chunks:
                arriving[channel] = (record, header, [])
            else:
                yield record, header, []
            continue
        first, whole, chunks = arriving.get(channel, (record, header, []))
        if whole.id != header.parent or header.index != len(chunks):
            continue
        chunks.append(record.payload)
        if len(chunks) == whole.chunks:
            del arriving[channel]
            yield first, whole, chunks


def tensors_of(header: Header, chunks: Sequence[bytes | None]) -> dict[str, np.ndarray] | None:
    """Read the tensors of a complete message.

    Args:
        header: Its header.
        chunks: Its chunks, as `merged` yields them.

    Returns:
        Name to tensor; None where chunks were not kept or do not fit the header.
    """
    whole = [chunk for chunk in chunks if chunk is not None]
    if len(whole) < len(chunks) or sum(map(len, whole)) != header.size:  # allocate nothing for missing bytes
        return None
    try:
        assembly = Assembly(header)
        for index, chunk in enumerate(whole):
            assembly.add(index, memoryview(chunk))
        return assembly.tensors()
    except WireError:
        return None
