"""Independent check of accepted messages: a second implementation of the wire's rules, over the fed messages."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpcfl_net.adversaries.fuzz_readers import require
from dpcfl_net.adversaries.fuzz_speakers import JOB, RUN, WIDTH
from dpcfl_net.core.errors import Refused
from dpcfl_net.transport.messages import VERSION, Header, TensorTemplate, WireError, decode

NORM = 100.0
HELD = 300  # entries; above the limit of every list, queue and table of an endpoint
BUFFER = 12 * WIDTH  # bytes of the largest payload that the templates allow


def bounded(tensors: dict[str, np.ndarray]) -> None:
    """Check the norms of tensors, as an endpoint's owner does.

    Args:
        tensors: Arrays by name.

    Raises:
        Refused: With code "norm" if a float array is longer than NORM.
    """
    for array in tensors.values():
        if array.dtype.kind == "f" and np.linalg.norm(array.astype(np.float64)) > NORM:
            raise Refused("norm", "above the norm bound")


@dataclass
class Offer:
    """A message with payload, and its chunks in order."""

    header: Header
    chunks: list[bytes] = field(default_factory=list)


@dataclass
class Heard:
    """One message of this run and job.

    Attributes:
        header: Decoded header.
        chunk: Second frame, None if there is none.
        whole: Whether the number of frames fits the kind.
    """

    header: Header
    chunk: bytes | None
    whole: bool


def heard(frames: list[bytes]) -> Heard | None:
    """Decode fed frames.

    Args:
        frames: Frames of one message.

    Returns:
        The message; None if it cannot be decoded or belongs to another run or job.
    """
    if len(frames) not in (1, 2):
        return None
    try:
        header = decode(frames[0])
    except WireError:
        return None
    if (header.version, header.run, header.job) != (VERSION, RUN, JOB):
        return None
    return Heard(header, frames[1] if len(frames) == 2 else None, (header.kind == "CHUNK") == (len(frames) == 2))


@dataclass
class Connection:
    """An accepted connection.

    Attributes:
        route: Route of the peer.
        boot: Boot id of the peer.
        sequence: Highest sequence number.
        offers: Offered messages by id.
    """

    route: bytes
    boot: str
    sequence: int
    offers: dict[str, Offer] = field(default_factory=dict)

    def hear(self, message: Heard) -> None:
        """Record an offer or chunk; messages of another boot, and messages that are not new, are ignored."""
        header = message.header
        if header.boot != self.boot or header.sequence <= self.sequence:
            return
        self.sequence = header.sequence
        offer = self.offers.get(header.parent)
        if not message.whole:
            return
        if header.kind in ("RESULT", "TASK"):
            self.offers[header.id] = Offer(header)
        elif message.chunk is not None and offer is not None and header.index == len(offer.chunks):
            offer.chunks.append(message.chunk)


def require_offered(offers: list[Offer], template: dict[str, TensorTemplate], found: dict[str, np.ndarray]) -> None:
    """Check that delivered tensors equal an offer bit for bit, match hash and template, and are finite and bounded.

    Args:
        offers: Offers that may have been delivered.
        template: Template of the tensors.
        found: Delivered tensors.

    Raises:
        Finding: If a property does not hold.
    """
    raw = b"".join(found[name].tobytes() for name in sorted(found))
    digest = hashlib.sha256(raw).hexdigest() if raw else ""
    shown = [(offer.header, len(offer.chunks)) for offer in offers]
    require(
        any(b"".join(offer.chunks) == raw and offer.header.sha256 == digest for offer in offers),
        "something was delivered that its sender did not offer", shown,
    )  # fmt: skip
    require(found.keys() == template.keys(), "other tensors were delivered than the template's", shown)
    for name, pinned in template.items():
        sides = found[name].shape
        require(found[name].dtype == np.dtype(f"<{pinned.dtype}") and len(sides) == len(pinned.shape), "another type", shown)
        for side, dim in zip(sides, pinned.shape, strict=True):
            low, high = (dim, dim) if isinstance(dim, int) else dim
            require(low <= side <= high, "a tensor of another shape than the template's", shown)
        require(np.isfinite(found[name]).all(), "a value that is not finite", shown)
        require(found[name].dtype.kind != "f" or np.linalg.norm(found[name].astype(np.float64)) <= NORM, "too long", shown)


def require_small(end: Any) -> None:
    """Check that no container inside the endpoint has more than HELD entries, and no buffer more than BUFFER bytes."""
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
