"""Fuzz targets that read bytes: the codec, payloads in chunks, transcripts, and signed jobs."""

from __future__ import annotations

import dataclasses
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
from dpcfl_net.core import job_reader, signing, tensors
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.frozen import canonical, digest
from dpcfl_net.core.payload_hash import payload_hash
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder, signature_path
from dpcfl_net.transport import messages, observer_notes, payload, transcript
from dpcfl_net.transport.header_rules import MAX_PAYLOAD
from dpcfl_net.transport.messages import Header, WireError

T = TypeVar("T")
SIZES = {"f4": 4, "i8": 8, "f2": 2, "b2": 2, "i1": 1, "i4": 4, "u1": 1, "u4": 4, "f8": 8}


class Finding(Exception):
    """A violated property, with the input that shows it."""

    def __init__(self, what: str, shown: object) -> None:
        self.what, self.shown = what, shown
        super().__init__(f"{what}: {shown!r:.2000}")


def require(holds: object, what: str, shown: object) -> None:
    """Raise Finding unless `holds`."""
    if not holds:
        raise Finding(what, shown)


def attempt(call: Callable[[], T], counts: Counter[str], shown: object, allowed: type[Exception] = Refused) -> T | None:
    """Call and count: "accepted", or the code of a refusal (then None is returned); raises Finding for any other exception."""
    try:
        found = call()
    except allowed as error:
        counts[getattr(error, "code", type(error).__name__)] += 1
        return None
    except Exception as error:
        raise Finding(f"unexpected exception {type(error).__name__}", shown) from error
    counts["accepted"] += 1
    return found


class Codec:
    """Headers of messages, and messages to the observer, from bytes."""

    name, share = "codec", 0.43

    def run(self, rng: Random, counts: Counter[str]) -> int:
        data = fuzz_bytes.header(rng)
        if rng.random() < 0.1:
            attempt(lambda: observer_notes.decode_note(data), counts, data, WireError)
            return 1
        found = attempt(lambda: messages.decode(data), counts, data, WireError)
        if found is not None:
            require_faithful(found, data)
            require_consistent(found, data)
        return 1


def require_faithful(header: Header, data: bytes) -> None:
    """Require that a header says exactly what the bytes say and survives re-encoding."""
    pairs = msgpack.unpackb(data, object_pairs_hook=list, strict_map_key=False)
    said = dict(pairs)
    require(len(said) == len(pairs), "a repeated field was accepted", data)
    for field in dataclasses.fields(Header):
        name, value = field.name, getattr(header, field.name)
        expected = said.pop(name, field.default)
        require(same(value, expected), f"the field {name} differs from the sent value", data)
    require(not said, "an unknown field was ignored", data)
    again = messages.decode(messages.encode(header))
    require(again == header and type(again) is type(header), "re-encoding changes the header", data)


def same(value: Any, sent: Any) -> bool:
    """Return True if values are equal in value and type; lists equal tuples."""
    if isinstance(value, list | tuple) and isinstance(sent, list | tuple):
        return len(value) == len(sent) and all(same(one, two) for one, two in zip(value, sent, strict=True))
    return type(value) is type(sent) and value == sent


def require_consistent(header: Header, data: bytes) -> None:
    """Require that a header's announcements agree, computed independently from its fields."""
    size = 0
    for _, dtype, shape, own in header.tensors:
        require(
            all(side >= 0 for side in shape) and math.prod(shape) * SIZES[dtype] == own, "shape and size do not agree", data
        )
        size += own
    names = [row[0] for row in header.tensors]
    require(size <= MAX_PAYLOAD, "the announced size exceeds the limit", data)
    require(all(one < two for one, two in itertools.pairwise(names)), "tensor names are not in ascending order", data)
    require(header.chunks == math.ceil(size / messages.CHUNK), "the number of chunks does not match the size", data)
    require(len(header.blake3) == (64 if size else 0), "a payload without a hash, or a hash without a payload", data)
    require(not names or header.kind in ("TASK", "RESULT"), "tensors in a message that has none", data)
    require(header.kind != "RESULT" or header.code in messages.STATUSES, "a result without a status", data)
    require(header.kind != "HEARTBEAT" or header.code in messages.PHASES, "a heartbeat without a phase", data)
    require(len(data) <= messages.MAX_HEADER, "a header above the size limit was read", data)


class Chunks:
    """Payloads of a few chunks, in order or not, complete or not; needs small chunks."""

    name, share = "chunks", 0.08

    def run(self, rng: Random, counts: Counter[str]) -> int:
        sent = arrays(rng)
        made = payload.Payload.of(sent)
        header = Header(version=messages.VERSION, run="ab", job="0" * 64, boot="1" * 32, sequence=1, id="2" * 32, kind="RESULT",
                        code="release", tensors=made.rows, blake3=made.blake3, chunks=len(made.chunks))  # fmt: skip
        assembly = payload.Assembly(header)
        taken: list[bytes] = []
        for index in range(len(made.chunks) + rng.randrange(2)):
            index, chunk = bent(rng, index, [bytes(piece) for piece in made.chunks])
            try:
                assembly.add(index, memoryview(chunk))
            except WireError as error:
                counts[error.code] += 1
                break
            except Exception as error:
                raise Finding(f"unexpected exception {type(error).__name__}", (index, chunk)) from error
            require(index == len(taken), "a chunk was accepted out of order", (index, header))
            taken.append(chunk)
        else:
            found = attempt(assembly.tensors, counts, (header, taken), WireError)
            if found is not None:
                require_announced(found, header, taken)
        return 1


def require_announced(found: dict[str, np.ndarray], header: Header, chunks: list[bytes]) -> None:
    """Require that arrays are finite, have the announced rows, and have the bytes and hash that were sent."""
    raw = b"".join(array.tobytes() for array in found.values())
    rows = [
        (name, next(code for code, d in tensors.DTYPES.items() if d == a.dtype), a.shape, a.nbytes) for name, a in found.items()
    ]
    require(tuple(rows) == header.tensors, "tensors differ from the announced ones", header)
    require(raw == b"".join(chunks), "bytes differ from those received", header)
    require(
        payload_hash(raw) == header.blake3 or not raw,
        "the hash of the bytes differs from the announced one",
        header,
    )
    require(all(np.isfinite(array).all() for array in found.values()), "a value that is not finite", header)


def arrays(rng: Random) -> dict[str, np.ndarray]:
    """Return up to three small arrays; one in eight is not finite."""
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
    """Return a chunk; once in six times misplaced, cut, lengthened or changed."""
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
    """Transcripts with changed bytes, and transcripts with changed records and a rebuilt hash chain."""

    name, share = "transcript", 0.06

    def __init__(self, folder: Path) -> None:
        self._path = RunFolder(folder).transcript
        self._originals = [self._written(Random(seed)) for seed in range(4)]

    def _written(self, rng: Random) -> tuple[bytes, list[transcript.Record]]:
        """A short transcript and its records."""
        self._path.unlink(missing_ok=True)
        kept = transcript.Transcript(self._path, rng.choice(("full", "headers")))
        for _ in range(rng.randrange(3, 7)):
            made = payload.Payload.of(arrays(rng))
            head = dict(fuzz_bytes.fields(rng), kind="RESULT", code="release", blake3=made.blake3)
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
                    blake3="",
                    code="",
                )
                kept.record("up", "client 1", msgpack.packb(part), chunk)
        kept.close()
        return self._path.read_bytes(), list(transcript.read(self._path))

    def run(self, rng: Random, counts: Counter[str]) -> int:
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
            require(type(record.direction) is str and type(record.peer) is str, "a record with fields of a wrong type", changed)
        put: list[Any] = []
        attempt(lambda: put.extend(transcript.messages(self._path)) or put, counts, changed)  # type: ignore[func-returns-value]
        for _, header, arrived in put:
            if arrived:
                require_announced(arrived, header, [array.tobytes() for array in arrived.values()])
        return 1


def rechained(rng: Random, data: bytes) -> bytes:
    """Change or add records of a transcript and rebuild numbers and hashes."""
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
    """Records of a message that announces 64 MiB and has all its chunks, nearly empty."""
    count, small = 64, rng.choice((None, b"", b"x"))
    rows = [["t", "f4", [count * messages.CHUNK // 4], count * messages.CHUNK]]
    head = dict(fuzz_bytes.fields(rng), kind="RESULT", code="release", tensors=rows, chunks=count, blake3="0" * 64)
    parts = [
        {**head, "kind": "CHUNK", "parent": head["id"], "index": k, "tensors": [], "chunks": 0, "blake3": ""}
        for k in range(count)
    ]
    said = [(head, None), *((part, small) for part in parts)]
    return [msgpack.packb([0, 1.0, "up", "client 1", msgpack.packb(one), chunk]) for one, chunk in said]


def _numbered(body: bytes, number: int) -> bytes:
    """The record with the right number, if it still is a record."""
    try:
        parts = msgpack.unpackb(body)
    except Exception:
        return body  # the target must handle malformed msgpack
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
    """Signed jobs with changed bytes, signature or pinned key."""

    name, share = "job", 0.06

    def __init__(self, folder: Path) -> None:
        self._path = RunFolder(folder).protocol
        self._signature = signature_path(self._path)
        self._key = signing.write_operator_key(folder / "operator")
        job, self._roster = Protocol.model_validate_json(json.dumps(PROTOCOL)), RunFolder(folder).roster
        self._data = canonical(job)
        job.roster.write(self._roster)
        self._clients = self._roster.read_bytes()
        self._signed = signing.sign(folder / "operator" / "operator.secret", self._data).encode()

    def run(self, rng: Random, counts: Counter[str]) -> int:
        what = rng.randrange(5)
        if what == 4:
            self._run_roster(rng, counts)
            return 1
        data = self._data if what == 1 else fuzz_bytes.document(rng, self._data)
        spoil = rng.choice((fuzz_bytes.flipped, fuzz_bytes.cut, fuzz_bytes.noise))
        signature = spoil(rng, self._signed) if what == 1 else self._signed
        key = self._key if what != 2 or rng.random() < 0.9 else fuzz_bytes.word(rng, 64)
        self._path.write_bytes(data)
        self._signature.write_bytes(signature)
        if what == 3:
            found = attempt(lambda: job_reader.read_protocol(self._path), counts, data)
        else:
            found = attempt(lambda: job_reader.read_signed_protocol(self._path, key), counts, (data, signature))
            require(found is None or data == self._data, "a job that the operator did not sign", (data, signature))
        if found is not None:
            again = attempt(lambda: canonical(found), Counter(), data)
            require(again == data, "re-encoding changes the job", data)
            require(
                digest(found) == hashlib.sha256(data).hexdigest(),
                "the job hash differs from the hash of its bytes",
                data,
            )
        return 1

    def _run_roster(self, rng: Random, counts: Counter[str]) -> None:
        """Change the roster under a protocol that names the right one."""
        lines = self._clients.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        lines[at] = fuzz_bytes.document(rng, lines[at].rstrip()) + b"\n" * rng.randrange(3)
        clients = b"".join(lines)
        self._path.write_bytes(self._data)
        self._roster.write_bytes(clients)
        try:
            found = attempt(lambda: job_reader.read_protocol(self._path), counts, clients)
            require(found is None or clients == self._clients, "a roster that the protocol does not name", clients)
        finally:
            self._roster.write_bytes(self._clients)


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
