"""Closed schema of every message, its strict codec, and the comparison of announced tensors with a template."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import msgpack

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.types import TensorSpec
from dpcfl_net.transport.header_rules import MAX_PAYLOAD, RULES, Row

VERSION = 2
MAX_HEADER = 64 << 10  # bytes
MAX_ITEMS = 4096  # of a list in a header
CHUNK = 2 << 20  # bytes of payload in one message
MAX_FRAME = 4 << 20  # bytes; a peer that sends a larger frame is disconnected
WINDOW = 8  # unconfirmed chunks in flight to one peer
CREDIT_CHUNKS = WINDOW // 2  # chunks after which a receiver confirms them

STATUSES = ("release", "lost", "stale", "refused")
PHASES = ("idle", "receiving", "waiting", "computing", "sending")  # waiting: for a core
CODES: dict[str, tuple[str, ...]] = {  # allowed codes by kind
    "RESULT": STATUSES,
    "HEARTBEAT": PHASES,
    "ACK": ("", *PHASES),  # of a task with the client's phase
}


class WireError(Refused):
    """A message that breaks a rule of the protocol, named by `code`."""


@dataclass(frozen=True, slots=True)
class Header:
    """One message without its payload.

    `decode` checks every field; a header that this side creates is not checked. No field can carry a privacy parameter, a loss,
    an accuracy, a count or a label.

    Attributes:
        version: Version of the protocol.
        run: Run id, hex.
        job: Hash of the job, hex.
        boot: Id of the sender's connection, hex.
        sequence: Increases with every message of one boot.
        id: Message id, hex.
        kind: Kind of the message.
        parent: Message that this one answers, or that a CHUNK belongs to.
        round: Round of a task or result.
        task: Name of the task.
        tensors: Rows (name, dtype, shape, bytes) of the payload.
        blake3: Hash of the payload (`core.payload_hash`), hex.
        chunks: Number of chunks of the payload.
        index: CHUNK: its position. CREDIT: number of the parent's chunks that have arrived.
        client: HELLO: claimed client id, believed only without CURVE.
        code: Status, phase or error code.
        reason: Reason of an error, printable.
    """

    version: int
    run: str
    job: str
    boot: str
    sequence: int
    id: str
    kind: str
    parent: str = ""
    round: int = 0
    task: str = ""
    tensors: tuple[Row, ...] = ()
    blake3: str = ""
    chunks: int = 0
    index: int = 0
    client: int = -1
    code: str = ""
    reason: str = ""

    @property
    def size(self) -> int:
        """Bytes of the announced payload."""
        return sum(row[3] for row in self.tensors) if self.tensors else 0


_OPTIONAL = tuple((field.name, field.default) for field in fields(Header) if field.default is not MISSING)
_REQUIRED = frozenset(field.name for field in fields(Header) if field.default is MISSING)


def encode(header: Header) -> bytes:
    """Encode a header; fields with their default value are left out."""
    said = {
        "version": header.version,
        "run": header.run,
        "job": header.job,
        "boot": header.boot,
        "sequence": header.sequence,
        "id": header.id,
        "kind": header.kind,
    }
    for name, default in _OPTIONAL:
        value = getattr(header, name)
        if value != default:
            said[name] = value
    return msgpack.packb(said)


def unpack_strict(data: bytes | memoryview, size: int = MAX_HEADER, items: int = MAX_ITEMS) -> dict[str, Any]:
    """Decode one msgpack map within limits of size, depth and type.

    Args:
        data: Bytes from any peer.
        size: Most bytes.
        items: Most items of a list.

    Raises:
        WireError: "header-too-large" or "not-msgpack".
    """
    if len(data) > size:
        raise WireError("header-too-large", f"{len(data)} bytes, at most {size} allowed")
    try:
        found = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=1024,
            max_bin_len=0,
            max_array_len=items,
            max_map_len=32,
            max_ext_len=0,
            ext_hook=_no_ext,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError("not-msgpack", plain(f"{type(error).__name__}: {error}", 120)) from None
    if not isinstance(found, dict):
        raise WireError("not-msgpack", f"a {type(found).__name__} where a map belongs")
    return found


def decode(data: bytes | memoryview) -> Header:
    """Decode a header, the inverse of `encode`.

    Args:
        data: Bytes from any peer.

    Raises:
        WireError: If they are not a well-formed header; no other exception is raised.
    """
    found = unpack_strict(data)
    for name, value in found.items():
        rule = RULES.get(name)
        if rule is None:
            raise WireError("schema", f"{plain(str(name), 40)}: no field of a header")
        if not rule.fits(value):
            raise WireError("schema", f"{name}: must be {rule.text}")
    if not found.keys() >= _REQUIRED:
        raise WireError("schema", f"{min(_REQUIRED - found.keys())}: missing")
    if "tensors" in found:
        found["tensors"] = tuple((name, dtype, tuple(shape), size) for name, dtype, shape, size in found["tensors"])
    header = Header(**found)
    allowed = CODES.get(header.kind)
    if allowed and header.code not in allowed:
        raise WireError("schema", f"code: {header.kind} allows {', '.join(filter(None, allowed))}")
    _check_payload(header)
    return header


def _check_payload(header: Header) -> None:
    """Check that the announced sizes agree; Python's integers cannot overflow."""
    if not (header.tensors or header.chunks or header.blake3):
        return
    size = header.size
    for name, dtype, shape, part in header.tensors:
        if math.prod(shape) * int(dtype[1]) != part:
            raise WireError("schema", f"tensors: {plain(name, 40)} of shape {list(shape)} is not {part} bytes")
    names = [row[0] for row in header.tensors]
    if names != sorted(set(names)):
        raise WireError("schema", "tensors: names must be distinct and in ascending order")
    if names and header.kind not in ("TASK", "RESULT"):
        raise WireError("schema", f"tensors: a {header.kind} carries none")
    if size > MAX_PAYLOAD:
        raise WireError("schema", f"tensors: {size} bytes in all, at most {MAX_PAYLOAD} allowed")
    if header.chunks != -(-size // CHUNK):
        raise WireError("schema", f"chunks: {header.chunks} announced for {size} bytes")
    if bool(header.blake3) != bool(size):
        raise WireError("schema", "blake3: required with a payload, not allowed without one")


def _no_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Map from pairs; ValueError for a repeated key, since readers would disagree about its value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def plain(text: str, limit: int = 500) -> str:
    """Return `text` without control characters, cut to `limit` characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "?", text)[:limit]


def word(text: str) -> str:
    """Return `text` as an error code."""
    return re.sub(r"[^a-z0-9-]", "-", text.lower())[:64]


Dim = int | tuple[int, int]


@dataclass(frozen=True)
class TensorTemplate:
    """Required dtype and sides of a tensor; a side is a number or an inclusive range (low, high)."""

    dtype: str
    shape: tuple[Dim, ...] = ()


Template = Mapping[str, TensorTemplate]


def resolve(specs: Mapping[str, TensorSpec], dims: Mapping[str, Dim]) -> dict[str, TensorTemplate]:
    """Replace the named sides ("p", "M") of specs by their values.

    Args:
        specs: Specs by tensor name.
        dims: Values of the named sides.

    Raises:
        KeyError: For a side without a value.
    """
    return {
        name: TensorTemplate(spec.dtype, tuple(dims[side] if isinstance(side, str) else side for side in spec.shape))
        for name, spec in specs.items()
    }


def match_template(rows: Iterable[Sequence[Any]], template: Template) -> None:
    """Compare tensors with a template; a header's announced ones before any chunk is accepted.

    Args:
        rows: (name, dtype, shape, bytes) of each tensor.
        template: Required tensors.

    Raises:
        WireError: "template" if they differ.
    """
    found = {row[0]: row for row in rows}
    if found.keys() != template.keys():
        odd = {"missing": template.keys() - found.keys(), "unexpected": found.keys() - template.keys()}
        each = (f"{word}: {', '.join(plain(name, 40) for name in sorted(names)[:4])}" for word, names in odd.items() if names)
        raise WireError("template", f"tensors {'; '.join(each)}")
    for name, pinned in template.items():
        _, dtype, shape, _ = found[name]
        fits = dtype == pinned.dtype and len(shape) == len(pinned.shape)
        if not fits or not all(_side_fits(side, dim) for side, dim in zip(shape, pinned.shape, strict=True)):
            sides = ", ".join(str(dim) if isinstance(dim, int) else f"{dim[0]} to {dim[1]}" for dim in pinned.shape)
            raise WireError("template", f"tensor {name}: {dtype} {list(shape)}, expected {pinned.dtype} [{sides}]")


def _side_fits(side: int, dim: Dim) -> bool:
    return side == dim if isinstance(dim, int) else dim[0] <= side <= dim[1]
