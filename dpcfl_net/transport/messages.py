"""Closed schema of every message, its strict codec, and the comparison of announced tensors with a template."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.types import TensorSpec

VERSION = 1
MAX_HEADER = 64 << 10  # bytes
CHUNK = 1 << 20  # bytes of payload in one message
WINDOW = 16  # unconfirmed chunks in flight to one peer
MAX_PAYLOAD = 1 << 34  # bytes; above any model, below any overflow

M = TypeVar("M", bound=BaseModel)
Kind = Literal["HELLO", "WELCOME", "TASK", "RESULT", "CHUNK", "CREDIT", "ACK", "HEARTBEAT", "ERROR", "BYE"]
STATUSES = ("release", "lost", "stale", "refused")
PHASES = ("idle", "receiving", "waiting", "computing", "sending")  # waiting: for a core
CODES: dict[str, tuple[str, ...]] = {"RESULT": STATUSES, "HEARTBEAT": PHASES}  # allowed codes by kind

Whole = Annotated[int, Field(ge=0, le=MAX_PAYLOAD)]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Sha256 = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Reason = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{0,500}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,128}$")]
Shape = Annotated[tuple[Whole, ...], Field(strict=False, max_length=8)]
Row = Annotated[tuple[Name, Literal["f4", "i8", "f2", "b2", "i1", "i4"], Shape, Whole], Field(strict=False)]


class WireError(Refused):
    """A message that breaks a rule of the protocol, named by `code`."""


class Envelope(BaseModel):
    """First fields of every message, also of those to the observer.

    Attributes:
        version: Version of the protocol.
        run: Run id, hex.
        job: Hash of the job, hex.
        boot: Id of the sender's connection, hex.
        sequence: Increases with every message of one boot.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=0, le=1 << 31)]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    job: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    boot: Id
    sequence: Annotated[int, Field(ge=1, le=1 << 62)]


class Header(Envelope):
    """One message without its payload.

    No field can carry a privacy parameter, a loss, an accuracy, a count or a label.

    Attributes:
        id: Message id, hex.
        kind: Kind of the message.
        parent: Message that this one answers, or that a CHUNK belongs to.
        round: Round of a task or result.
        task: Name of the task.
        tensors: Rows (name, dtype, shape, bytes) of the payload.
        sha256: Hash of the payload, hex.
        chunks: Number of chunks of the payload.
        index: CHUNK: its position. CREDIT: number of the parent's chunks that have arrived.
        client: HELLO: claimed client id, believed only without CURVE.
        code: Status, phase or error code.
        reason: Reason of an error, printable.
    """

    id: Id
    kind: Kind
    parent: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    round: Annotated[int, Field(ge=0, le=10**6)] = 0
    task: Annotated[str, Field(pattern=r"^[a-z_]{0,64}$")] = ""
    tensors: Annotated[tuple[Row, ...], Field(strict=False, max_length=64)] = ()
    sha256: Sha256 = ""
    chunks: Whole = 0
    index: Whole = 0
    client: Annotated[int, Field(ge=-1, le=10**6)] = -1
    code: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,64}$")] = ""
    reason: Reason = ""

    @property
    def size(self) -> int:
        """Bytes of the announced payload."""
        return sum(row[3] for row in self.tensors)


def encode(header: Header) -> bytes:
    """Encode a header; fields with their default value are left out."""
    return msgpack.packb(header.model_dump(exclude_defaults=True))


def unpack_strict(data: bytes | memoryview) -> dict[str, Any]:
    """Decode one msgpack map within fixed limits of size, depth and type.

    Args:
        data: Bytes from any peer.

    Raises:
        WireError: "header-too-large" or "not-msgpack".
    """
    if len(data) > MAX_HEADER:
        raise WireError("header-too-large", f"{len(data)} bytes, at most {MAX_HEADER} allowed")
    try:
        found = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=1024,
            max_bin_len=0,
            max_array_len=4096,
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
    header = validate(Header, unpack_strict(data))
    allowed = CODES.get(header.kind)
    if allowed and header.code not in allowed:
        raise WireError("schema", f"code: {header.kind} allows {', '.join(allowed)}")
    _check_payload(header)
    return header


def validate(schema: type[M], found: dict[str, Any]) -> M:
    """Validate a map against a schema.

    Args:
        schema: pydantic model.
        found: The map.

    Raises:
        WireError: "schema", with the first field that is unknown or mistyped.
    """
    try:
        return schema.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(plain(str(part), 40) for part in first["loc"][:4])
        raise WireError("schema", plain(f"{where}: {first['msg']}", 200)) from None


def _check_payload(header: Header) -> None:
    """Check that the announced sizes agree; Python's integers cannot overflow."""
    for name, dtype, shape, size in header.tensors:
        if math.prod(shape) * int(dtype[1]) != size:
            raise WireError("schema", f"tensors: {plain(name, 40)} of shape {list(shape)} is not {size} bytes")
    names = [row[0] for row in header.tensors]
    if names != sorted(set(names)):
        raise WireError("schema", "tensors: names must be distinct and in ascending order")
    if names and header.kind not in ("TASK", "RESULT"):
        raise WireError("schema", f"tensors: a {header.kind} carries none")
    if header.size > MAX_PAYLOAD:
        raise WireError("schema", f"tensors: {header.size} bytes in all, at most {MAX_PAYLOAD} allowed")
    if header.chunks != -(-header.size // CHUNK):
        raise WireError("schema", f"chunks: {header.chunks} announced for {header.size} bytes")
    if bool(header.sha256) != bool(header.size):
        raise WireError("schema", "sha256: required with a payload, not allowed without one")


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
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "?", text)[:limit]


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
        odd = sorted(found.keys() ^ template.keys())
        raise WireError("template", f"tensors {', '.join(plain(name, 40) for name in odd[:4])} are missing or not expected")
    for name, pinned in template.items():
        _, dtype, shape, _ = found[name]
        fits = dtype == pinned.dtype and len(shape) == len(pinned.shape)
        if not fits or not all(_side_fits(side, dim) for side, dim in zip(shape, pinned.shape, strict=True)):
            raise WireError("template", f"tensor {name}: {dtype} {list(shape)}, expected {pinned.dtype} {list(pinned.shape)}")


def _side_fits(side: int, dim: Dim) -> bool:
    return side == dim if isinstance(dim, int) else dim[0] <= side <= dim[1]
