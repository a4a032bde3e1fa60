"""Fuzz targets that read bytes: codec, payloads from chunks, transcripts, signed jobs."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgpack
import numpy as np

from dpcfl_net.adversaries import fuzz_bytes
from dpcfl_net.core import protocol, signing, tensors
from dpcfl_net.core.errors import Refused
from dpcfl_net.transport import messages, observer_link, payload, transcript
from dpcfl_net.transport.messages import Header, WireError

T = TypeVar("T")
SIZES = {"f4": 4, "i8": 8}


class Finding(Exception):
    """Violated property.

    Args:
        what: The property.
        shown: Input that violates it.
    """

    def __init__(self, what: str, shown: object) -> None:
        self.what, self.shown = what, shown
        super().__init__(f"{what}: {shown!r:.2000}")


def require(holds: object, what: str, shown: object) -> None:
    """Check a property.

    Args:
        holds: Whether the property holds.
        what: Message of the finding.
        shown: Input to show.

    Raises:
        Finding: If the property does not hold.
    """
    if not holds:
        raise Finding(what, shown)


def attempt(call: Callable[[], T], tally: Counter[str], shown: object, allowed: type[Exception] = Refused) -> T | None:
    """Call the code under test and count the outcome.

    Args:
        call: The code under test.
        tally: Counts "accepted" or the code of a refusal.
        shown: Input to show in a finding.
        allowed: Exception type of a refusal.

    Returns:
        The call's result; None if it refused.

    Raises:
        Finding: For any other exception.
    """
    try:
        found = call()
    except allowed as error:
        tally[getattr(error, "code", type(error).__name__)] += 1
        return None
    except Exception as error:
        raise Finding(f"an exception of another type came out, {type(error).__name__}", shown) from error
    tally["accepted"] += 1
    return found


class Codec:
    """Decoding of message headers and of notes to the observer."""

    name, share = "codec", 0.5

    def run(self, rng: Random, tally: Counter[str]) -> int:
        """Decode one header."""
        data = fuzz_bytes.header(rng)
        if rng.random() < 0.1:
            attempt(lambda: messages.validate(observer_link.Note, messages.unpack_strict(data)), tally, data, WireError)
            return 1
        found = attempt(lambda: messages.decode(data), tally, data, WireError)
        if found is not None:
            require_faithful(found, data)
            require_consistent(found, data)
        return 1


def require_faithful(header: Header, data: bytes) -> None:
    """Check that a header has exactly the fields of its bytes and survives encoding."""
    pairs = msgpack.unpackb(data, object_pairs_hook=list, strict_map_key=False)
    said = dict(pairs)
    require(len(said) == len(pairs), "a field was said twice and one of them believed", data)
    for name, field in Header.model_fields.items():
        value = getattr(header, name)
        expected = said.pop(name, field.default)
        require(same(value, expected), f"the field {name} is not what was sent", data)
    require(not said, "an unknown field was passed over", data)
    again = messages.decode(messages.encode(header))
    require(again == header and type(again) is type(header), "encoded again the header is another one", data)


def same(value: Any, sent: Any) -> bool:
    """Return whether two values are equal in value and type; lists equal tuples."""
    if isinstance(value, list | tuple) and isinstance(sent, list | tuple):
        return len(value) == len(sent) and all(same(one, two) for one, two in zip(value, sent, strict=True))
    return type(value) is type(sent) and value == sent


def require_consistent(header: Header, data: bytes) -> None:
    """Check that a header's fields are consistent, independently of its validator."""
    size = 0
    for _, dtype, shape, own in header.tensors:
        require(all(side >= 0 for side in shape) and math.prod(shape) * SIZES[dtype] == own, "a shape is not its size", data)
        size += own
    names = [row[0] for row in header.tensors]
    require(size <= messages.MAX_PAYLOAD, "more is announced than may ever be sent", data)
    require(all(one < two for one, two in itertools.pairwise(names)), "tensors' names do not rise", data)
    require(header.chunks == math.ceil(size / messages.CHUNK), "the number of chunks is not that of the size", data)
    require(len(header.sha256) == (64 if size else 0), "a payload without a hash, or a hash without a payload", data)
    require(not names or header.kind in ("TASK", "RESULT"), "tensors where none belong", data)
    require(header.kind != "RESULT" or header.code in messages.STATUSES, "a result without a status", data)
    require(header.kind != "HEARTBEAT" or header.code in messages.PHASES, "a heartbeat without a phase", data)
    require(len(data) <= messages.MAX_HEADER, "more than a header's bytes were read", data)


class Chunks:
    """Payloads of a few chunks, in or out of order, complete or truncated; needs small chunks."""

    name, share = "chunks", 0.08

    def run(self, rng: Random, tally: Counter[str]) -> int:
        """Assemble one payload."""
        sent = arrays(rng)
        made = payload.Payload.of(sent)
        header = Header(version=1, run="ab", job="0" * 64, boot="1" * 32, sequence=1, id="2" * 32, kind="RESULT",
                        code="release", tensors=made.rows, sha256=made.sha256, chunks=len(made.chunks))  # fmt: skip
        assembly = payload.Assembly(header)
        taken: list[bytes] = []
        for index in range(len(made.chunks) + rng.randrange(2)):
            index, chunk = bent(rng, index, [bytes(piece) for piece in made.chunks])
            try:
                assembly.add(index, memoryview(chunk))
            except WireError as error:
                tally[error.code] += 1
                break
            except Exception as error:
                raise Finding(f"an exception of another type came out, {type(error).__name__}", (index, chunk)) from error
            require(index == len(taken), "a chunk was taken out of its order", (index, header))
            taken.append(chunk)
        else:
            found = attempt(assembly.tensors, tally, (header, taken), WireError)
            if found is not None:
                require_announced(found, header, taken)
        return 1


def require_announced(found: dict[str, np.ndarray], header: Header, chunks: list[bytes]) -> None:
    """Check that arrays match their header, the received bytes and the announced hash, and are finite."""
    raw = b"".join(array.tobytes() for array in found.values())
    rows = [
        (name, next(code for code, d in tensors.DTYPES.items() if d == a.dtype), a.shape, a.nbytes) for name, a in found.items()
    ]
    require(tuple(rows) == header.tensors, "other tensors than were announced", header)
    require(raw == b"".join(chunks), "other bytes than came", header)
    require(hashlib.sha256(raw).hexdigest() == header.sha256 or not raw, "bytes of another hash than was announced", header)
    require(all(np.isfinite(array).all() for array in found.values()), "a value that is not finite", header)


def arrays(rng: Random) -> dict[str, np.ndarray]:
    """Return one to three small arrays; one float array in eight has a value that is not finite."""
    found = {}
    for name in sorted({f"t{rng.randrange(9)}" for _ in range(rng.randrange(1, 4))}):
        count = rng.choice((0, 1, 3, 16, 17, 40))
        if rng.random() < 0.3:
            found[name] = np.array([rng.randrange(-9, 9) for _ in range(count)], np.int64)
        else:
            found[name] = np.array([rng.uniform(-3, 3) for _ in range(count)], np.float32)
            if count and rng.random() < 0.125:
                found[name][rng.randrange(count)] = rng.choice((math.nan, math.inf))
    return found


def bent(rng: Random, index: int, chunks: list[bytes]) -> tuple[int, bytes]:
    """Return the index and chunk unchanged or, once in six times, misplaced, truncated, extended or changed."""
    chunk = chunks[index] if index < len(chunks) else b"more"
    if rng.random() < 5 / 6:
        return index, chunk
    pick = rng.randrange(5)
    if pick == 0:
        return rng.choice((index + 1, index - 1 if index else 1 << 34, 0)), chunk
    if pick == 1:
        return index, rng.choice(chunks) if chunks else b""
    if pick == 2:
        return index, chunk + b"\x00"
    return index, chunk[:-1] if pick == 3 or not chunk else fuzz_bytes.flipped(rng, chunk)


class Transcripts:
    """Transcripts changed without the hash chain (any byte), and with a recomputed hash chain."""

    name, share = "transcript", 0.06

    def __init__(self, folder: Path) -> None:
        self._path = folder / "transcript.msgpack"
        self._originals = [self._written(Random(seed)) for seed in range(4)]

    def _written(self, rng: Random) -> tuple[bytes, list[transcript.Record]]:
        """Write a short transcript, full or headers only; return its bytes and records."""
        self._path.unlink(missing_ok=True)
        kept = transcript.Transcript(self._path, rng.choice(("full", "headers")))
        for _ in range(rng.randrange(3, 7)):
            made = payload.Payload.of(arrays(rng))
            head = dict(fuzz_bytes.fields(rng), kind="RESULT", code="release", sha256=made.sha256)
            head |= {"tensors": [list(row) for row in made.rows], "chunks": len(made.chunks)}
            kept.record("up", "client 1", msgpack.packb(head), None)
            for index, chunk in enumerate(made.chunks):
                part = dict(
                    fuzz_bytes.fields(rng),
                    kind="CHUNK",
                    parent=head["id"],
                    index=index,
                    tensors=[],
                    chunks=0,
                    sha256="",
                    code="",
                )
                kept.record("up", "client 1", msgpack.packb(part), chunk)
        kept.close()
        return self._path.read_bytes(), list(transcript.read(self._path))

    def run(self, rng: Random, tally: Counter[str]) -> int:
        """Read one changed transcript."""
        data, records = rng.choice(self._originals)
        forged = rng.random() < 0.5
        changed = (
            rechained(rng, data) if forged else rng.choice((fuzz_bytes.flipped, fuzz_bytes.cut, fuzz_bytes.spliced))(rng, data)
        )
        self._path.write_bytes(changed)
        found: list[transcript.Record] = []
        attempt(lambda: found.extend(transcript.read(self._path)) or found, Counter(), changed)  # type: ignore[func-returns-value]
        require(forged or found == records[: len(found)], "a record that was not written", changed)
        for record in found:
            require(type(record.direction) is str and type(record.peer) is str, "a record of another form", changed)
        put: list[Any] = []
        attempt(lambda: put.extend(transcript.messages(self._path)) or put, tally, changed)  # type: ignore[func-returns-value]
        for _, header, arrived in put:
            if arrived:
                require_announced(arrived, header, [array.tobytes() for array in arrived.values()])
        return 1


def rechained(rng: Random, data: bytes) -> bytes:
    """Change or add records of a transcript, then recompute its numbers and hash chain."""
    bodies = [body for body, _ in msgpack.Unpacker(io.BytesIO(data), max_buffer_size=1 << 24)]
    if rng.random() < 0.2:
        bodies[rng.randrange(len(bodies)) :] = _claims(rng)
    else:
        bodies = [_changed_record(rng, body, number) if rng.random() < 0.3 else body for number, body in enumerate(bodies)]
    out, digest = [], hashlib.sha256(transcript.FORMAT.encode()).digest()
    for number, body in enumerate(bodies):
        body = _numbered(body, number)
        digest = hashlib.sha256(digest + body).digest()
        out.append(msgpack.packb([body, digest]))
    return b"".join(out)


def _claims(rng: Random) -> list[bytes]:
    """Return the records of a message that announces 64 MiB and has all its chunks, almost empty."""
    count, small = 64, rng.choice((None, b"", b"x"))
    rows = [["t", "f4", [count * messages.CHUNK // 4], count * messages.CHUNK]]
    head = dict(fuzz_bytes.fields(rng), kind="RESULT", code="release", tensors=rows, chunks=count, sha256="0" * 64)
    parts = [
        {**head, "kind": "CHUNK", "parent": head["id"], "index": k, "tensors": [], "chunks": 0, "sha256": ""}
        for k in range(count)
    ]
    said = [(head, None), *((part, small) for part in parts)]
    return [msgpack.packb([0, 1.0, "up", "client 1", msgpack.packb(one), chunk]) for one, chunk in said]


def _numbered(body: bytes, number: int) -> bytes:
    """Correct the number of a record, if it still is a record."""
    try:
        parts = msgpack.unpackb(body)
    except Exception:
        return body  # the target under test has to refuse it
    return msgpack.packb([number, *parts[1:]]) if isinstance(parts, list) and len(parts) == 6 else body


def _changed_record(rng: Random, body: bytes, number: int) -> bytes:
    parts, pick = msgpack.unpackb(body), rng.randrange(5)
    if pick == 0:
        return fuzz_bytes.noise(rng, body)
    if pick == 1:
        return fuzz_bytes.flipped(rng, body)
    if pick == 2:
        parts[4] = fuzz_bytes.header(rng)
    elif pick == 3:
        return msgpack.packb([*parts, 0] if number % 2 else parts[:5])
    else:
        parts[rng.randrange(1, 6)] = fuzz_bytes.value(rng)
    return msgpack.packb(parts)


class Jobs:
    """Signed jobs with changed protocol bytes, signature or pinned key."""

    name, share = "job", 0.06

    def __init__(self, folder: Path) -> None:
        self._path = folder / protocol.PROTOCOL
        self._signature = folder / f"{protocol.PROTOCOL}.sig"
        self._key = signing.write_operator_key(folder / "operator")
        self._data = protocol.canonical(protocol.Protocol.model_validate_json(json.dumps(PROTOCOL)))
        self._signed = signing.sign(folder / "operator" / "operator.secret", self._data).encode()

    def run(self, rng: Random, tally: Counter[str]) -> int:
        """Read one changed job."""
        what = rng.randrange(4)
        data = self._data if what == 1 else fuzz_bytes.document(rng, self._data)
        spoil = rng.choice((fuzz_bytes.flipped, fuzz_bytes.cut, fuzz_bytes.noise))
        signature = spoil(rng, self._signed) if what == 1 else self._signed
        key = self._key if what != 2 or rng.random() < 0.9 else fuzz_bytes.word(rng, 64)
        self._path.write_bytes(data)
        self._signature.write_bytes(signature)
        if what == 3:
            found = attempt(lambda: protocol.read_protocol(self._path), tally, data)
        else:
            found = attempt(lambda: protocol.read_signed_protocol(self._path, key), tally, (data, signature))
            require(found is None or data == self._data, "a job that the operator never signed", (data, signature))
        if found is not None:
            again = attempt(lambda: protocol.canonical(found), Counter(), data)
            require(again == data, "a job that says something else than its bytes", data)
            require(protocol.digest(found) == hashlib.sha256(data).hexdigest(), "a job of another hash than its bytes", data)
        return 1


PROTOCOL: dict[str, Any] = {
    "run": "ab" * 16, "name": "fuzz", "algorithm": "r-dpcfl", "options": {"clusters": 4, "selection": {"rounds_fraction": 0.1}},
    "rounds": 20, "local": {"epochs": 1, "batch_size": 32, "lr": 0.5, "clip": 1.0, "momentum": 0.0, "weight_decay": 0.0},
    "privacy": {"epsilon": 5.0, "delta": 1e-4},
    "model": {"name": "digits-cnn", "input_shape": [1, 8, 8], "classes": 10, "layout": [["a", [3, 4]]], "parameters": 12,
              "initial_seed": 7},
    "roster": [{"id": k, "public_key": "k" * 40, "records": 479, "noise_multiplier": 1.25} for k in range(3)],
    "coordinator_key": "c" * 40, "observer_key": "o" * 40, "server_seed": "s" * 32, "ledger_scope": "run", "security": "curve",
    "experiment_hash": "e" * 64,
}  # fmt: skip
