"""Bytes of messages on the wire, computed from their tensors without sending them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from dpcfl_net.transport.messages import CHUNK, VERSION, Header, encode

Security = Literal["curve", "none"]
# A frame of ZMTP 3.1 has 2 bytes before a body of up to 255 bytes and 9 before a longer one. CURVE encrypts each frame: the body
# grows by the command name (8), a nonce (8), a MAC (16) and flags (1).
SHORT_BODY, SHORT_FRAME, LONG_FRAME, CURVE_FRAME = 255, 2, 9, 33
_SEQUENCE = 100  # a typical sequence number; it takes 1 to 5 bytes


@dataclass(frozen=True)
class MessageBytes:
    """Size of a message with its chunks.

    Attributes:
        counted: Headers and payload, as `bytes_up` and `bytes_down` of metrics.jsonl count them.
        logged: Header and payload without the headers of chunks, as messages.jsonl states it.
        parts: Bytes in the stream of TCP, with framing and encryption: of the header, then of each chunk.
    """

    counted: int
    logged: int
    parts: tuple[int, ...]


def frame_bytes(size: int, curve: bool) -> int:
    """Compute the bytes of one frame in the stream of TCP.

    Args:
        size: Bytes of its content.
        curve: True if the connection is encrypted.
    """
    body = size + CURVE_FRAME if curve else size
    return body + (SHORT_FRAME if body <= SHORT_BODY else LONG_FRAME)


def message_bytes(
    kind: Literal["TASK", "RESULT"],
    rows: Sequence[Sequence[Any]],
    *,
    run: str,
    round: int = 1,
    task: str = "",
    reason: str = "",
    status: str = "release",
    security: Security = "curve",
) -> MessageBytes:
    """Compute the size of a task or a result.

    Args:
        kind: Kind of the message.
        rows: Rows (name, dtype, shape, bytes) of its tensors, as `tensors.describe` makes them.
        run: Run id, hex.
        round: The round.
        task: Name of the task.
        reason: Reason of a result without tensors.
        status: Status of a result.
        security: Security of the transport.

    Returns:
        The size, exact up to the few bytes by which sequence numbers differ.
    """
    size = sum(row[3] for row in rows)
    chunks = -(-size // CHUNK)
    tensors = tuple((name, dtype, tuple(shape), part) for name, dtype, shape, part in rows)
    fields: dict[str, Any] = {"round": round, "task": task, "tensors": tensors, "chunks": chunks}
    if size:
        fields["blake3"] = "0" * 64
    if kind == "RESULT":
        fields |= {"parent": "0" * 32, "code": status, "reason": reason}
    header = control_bytes(kind, run, **fields)
    curve = security == "curve"
    parts, headers = [frame_bytes(header, curve)], header
    for index in range(chunks):
        chunk_header = control_bytes("CHUNK", run, parent="0" * 32, index=index)
        headers += chunk_header
        parts.append(frame_bytes(chunk_header, curve) + frame_bytes(min(CHUNK, size - index * CHUNK), curve))
    return MessageBytes(headers + size, header + size, tuple(parts))


@lru_cache(maxsize=4096)
def control_bytes(kind: str, run: str, **fields: Any) -> int:
    """Compute the bytes of a header.

    Args:
        kind: Kind of the message.
        run: Run id, hex.
        fields: Further fields of the header, hashable.
    """
    envelope = {"version": VERSION, "run": run, "job": "0" * 64, "boot": "0" * 32, "sequence": _SEQUENCE, "id": "0" * 32}
    return len(encode(Header(**{**envelope, "kind": kind, **fields})))
