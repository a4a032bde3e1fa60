"""Independent model of the protocol's rules, which checks what an endpoint accepts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpcfl_net.adversaries.fuzz_readers import require
from dpcfl_net.adversaries.fuzz_speakers import JOB, RUN, WIDTH
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.payload_hash import payload_hash
from dpcfl_net.transport.messages import VERSION, Header, TensorTemplate, WireError, decode

NORM = 100.0
HELD = 300  # entries; above the limit of every list, queue and table of an endpoint
BUFFER = 12 * WIDTH  # bytes of the largest payload that the templates allow


def bounded(tensors: dict[str, np.ndarray]) -> None:
    """Check the norm as the owner of an endpoint does; raises Refused "norm"."""
    for array in tensors.values():
        if array.dtype.kind == "f" and np.linalg.norm(array.astype(np.float64)) > NORM:
            raise Refused("norm", "above the norm bound")


@dataclass
class Announcement:
    """A message with payload, and the chunks that followed in order."""

    header: Header
    chunks: list[bytes] = field(default_factory=list)


@dataclass
class Received:
    """A message of this run and job; `whole` if it has the right number of frames."""

    header: Header
    chunk: bytes | None
    whole: bool


def received(frames: list[bytes]) -> Received | None:
    """Decode fed frames; None if they are no message of this run and job."""
    if len(frames) not in (1, 2):
        return None
    try:
        header = decode(frames[0])
    except WireError:
        return None
    if (header.version, header.run, header.job) != (VERSION, RUN, JOB):
        return None
    return Received(header, frames[1] if len(frames) == 2 else None, (header.kind == "CHUNK") == (len(frames) == 2))


@dataclass
class Connection:
    """An accepted connection: route, boot, highest sequence number, and all announcements."""

    route: bytes
    boot: str
    sequence: int
    announcements: dict[str, Announcement] = field(default_factory=dict)

    def hear(self, message: Received) -> None:
        """Record an announcement or a chunk; messages of another boot or with an old sequence number are ignored."""
        header = message.header
        if header.boot != self.boot or header.sequence <= self.sequence:
            return
        self.sequence = header.sequence
        announcement = self.announcements.get(header.parent)
        if not message.whole:
            return
        if header.kind in ("RESULT", "TASK"):
            self.announcements[header.id] = Announcement(header)
        elif message.chunk is not None and announcement is not None and header.index == len(announcement.chunks):
            announcement.chunks.append(message.chunk)


def require_delivered(
    announcements: list[Announcement], template: dict[str, TensorTemplate], found: dict[str, np.ndarray]
) -> None:
    """Require that delivered tensors equal an announcement bit for bit, fit the template, and are finite and bounded."""
    raw = b"".join(found[name].tobytes() for name in sorted(found))
    digest = payload_hash(raw) if raw else ""
    shown = [(one.header, len(one.chunks)) for one in announcements]
    require(
        any(b"".join(one.chunks) == raw and one.header.blake3 == digest for one in announcements),
        "delivered tensors that the sender did not announce", shown,
    )  # fmt: skip
    require(found.keys() == template.keys(), "delivered tensors differ from the template", shown)
    for name, pinned in template.items():
        sides = found[name].shape
        require(found[name].dtype == np.dtype(f"<{pinned.dtype}") and len(sides) == len(pinned.shape), "another type", shown)
        for side, dim in zip(sides, pinned.shape, strict=True):
            low, high = (dim, dim) if isinstance(dim, int) else dim
            require(low <= side <= high, "a tensor's shape differs from the template", shown)
        require(np.isfinite(found[name]).all(), "a value that is not finite", shown)
        require(found[name].dtype.kind != "f" or np.linalg.norm(found[name].astype(np.float64)) <= NORM, "too long", shown)


def require_small(end: Any) -> None:
    """Require that no list, queue or table of the endpoint exceeds HELD entries and no buffer BUFFER bytes."""
    for what, size in _sizes(end, type(end).__name__, set()):
        most = BUFFER if what.endswith("_buffer") else HELD
        require(size <= most, "a list, queue, table or buffer grows with what peers send", (what, size))


def _sizes(found: Any, name: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, dict | list | set | deque | bytearray):
        yield name, len(found)
        for part in found.values() if isinstance(found, dict) else found if not isinstance(found, bytearray) else ():
            yield from _sizes(part, f"{name}[]", seen)
    elif type(found).__module__.startswith("dpcfl_net.transport") and hasattr(found, "__dict__"):
        for key, part in vars(found).items():
            yield from _sizes(part, f"{name}.{key}", seen)
