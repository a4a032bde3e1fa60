"""Peers of a fuzzed session, which mostly follow the protocol."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgpack
import numpy as np

from dpcfl_net.adversaries import fuzz_bytes
from dpcfl_net.transport import messages, payload
from dpcfl_net.transport.messages import TensorTemplate

RUN, JOB, WIDTH = "ab12", "0" * 64, 40
RESULTS = {
    "train": {"update": TensorTemplate("f4", (WIDTH,))},
    "small": {"choice": TensorTemplate("i8")},
    "masked": {"masked": TensorTemplate("u4", (WIDTH,))},
}
TASKS = {
    "train": {"models": TensorTemplate("f4", ((1, 3), WIDTH))},
    "small": {},
    "masked": {"boxes": TensorTemplate("u1", ((1, 3), 82)), "present": TensorTemplate("u1", ((1, 3),))},
}
KINDS = ("train", "train", "train", "train", "small", "masked")

Said = dict[str, Any]


class Speaker:
    """One connection of a peer: its boot, its sequence numbers, and the chunks it has still to send."""

    def __init__(self, rng: Random, route: bytes = b"", user: str = "", number: int = 0) -> None:
        self.rng, self.route, self.user, self.number = rng, route, user, number
        self.boots: list[str] = []
        self.about = fuzz_bytes.word(rng, 32)  # id of a message to refer to
        self.renew()

    def renew(self) -> None:
        """Start a new boot or, once in five times, an old one."""
        old = self.boots and self.rng.random() < 0.2
        self.boot = self.rng.choice(self.boots) if old else fuzz_bytes.word(self.rng, 32)
        self.boots.append(self.boot)
        self.sequence, self.owed = 0, list[tuple[str, int, bytes]]()

    def say(self, kind: str, **fields: Any) -> Said:
        """Return the fields of the next message."""
        self.sequence += 1
        base = {"version": messages.VERSION, "run": RUN, "job": JOB, "boot": self.boot, "sequence": self.sequence}
        return {**base, "id": fuzz_bytes.word(self.rng, 32), "kind": kind, **fields}

    def announce(self, kind: str, arrays: dict[str, np.ndarray], **fields: Any) -> Said:
        """Return the header of a message with payload; `chunk` returns its chunks."""
        made = payload.Payload.of(arrays)
        rows = [[name, dtype, list(shape), size] for name, dtype, shape, size in made.rows]
        found = self.say(kind, tensors=rows, chunks=len(made.chunks), blake3=made.blake3, **fields)
        self.owed = [(found["id"], index, bytes(piece)) for index, piece in enumerate(made.chunks)]
        return found

    def chunk(self) -> tuple[Said, bytes]:
        """Return the next chunk, rarely with changed bytes; an unexpected one if none is left."""
        parent, index, data = fuzz_bytes.word(self.rng, 32), 0, b"x" * self.rng.choice((0, 1, messages.CHUNK))
        if self.owed:
            parent, index, data = self.owed.pop(0)
        if data and self.rng.random() < 0.08:
            flipped = fuzz_bytes.flipped(self.rng, data)
            data = self.rng.choice((flipped, flipped, data[:-1], data + b"x"))
        return self.say("CHUNK", parent=parent, index=index), data

    def aside(self, kinds: tuple[str, ...], about: str) -> Said:
        """Return a message without payload of one of the kinds, about a known message or an unknown one."""
        kind = self.rng.choice(kinds)
        about = about if self.rng.random() < 0.7 else fuzz_bytes.word(self.rng, 32)
        if kind == "HEARTBEAT":
            return self.say(kind, code=self.rng.choice(messages.PHASES))
        if kind == "ERROR":
            return self.say(
                kind, parent=about, code=self.rng.choice(("template", "norm", "no-hello", "boot")), reason="because"
            )
        return self.say(kind, parent=about, **({"index": self.rng.randrange(9)} if kind == "CREDIT" else {}))


def arrays_for(rng: Random, template: dict[str, TensorTemplate], honest: bool = False) -> dict[str, np.ndarray]:
    """Return arrays that fit a template or, rarely, do not (shape, not finite, norm, extra tensor)."""
    found: dict[str, np.ndarray] = {}
    for name, pinned in template.items():
        shape = tuple(dim if isinstance(dim, int) else rng.randint(*dim) for dim in pinned.shape)
        if not honest and rng.random() < 0.04:
            shape = rng.choice(((), (1,), (*shape, 1), (WIDTH + 1,), (0,)))
        least = 0 if pinned.dtype.startswith("u") else -3
        array = np.array([rng.uniform(least, 3) for _ in range(math.prod(shape))]).reshape(shape).astype(f"<{pinned.dtype}")
        if not honest and pinned.dtype == "f4" and array.size and rng.random() < 0.3:
            array.flat[0] = rng.choice((math.nan, math.inf, 1e6, 1e6))
        found[name] = array
    if not honest and rng.random() < 0.04:
        found["extra"] = np.zeros(2, np.float32)
    return found


def bent(rng: Random, said: Said) -> bytes:
    """Encode a message; once in five times with a changed field or changed bytes."""
    if rng.random() < 0.8:
        return msgpack.packb(said)
    pick = rng.randrange(8)
    if pick == 0:
        return fuzz_bytes.header(rng)
    if pick == 1:
        return rng.choice(fuzz_bytes.CHANGES)(rng, msgpack.packb(said))
    if pick == 2:
        return fuzz_bytes.changed_fields(rng, said)
    name, value = rng.choice((
        ("version", messages.VERSION + 1), ("run", "cd34"), ("job", "1" * 64), ("boot", fuzz_bytes.word(rng, 32)), ("noise_multiplier", 0.0),
        ("sequence", rng.choice((1, said["sequence"] - 1, said["sequence"], 1 << 62))), ("round", rng.randrange(4)),
        ("task", rng.choice(("train", "small", "masked", "other"))), ("parent", fuzz_bytes.word(rng, 32)),
        ("kind", rng.choice(fuzz_bytes.KINDS)), ("blake3", fuzz_bytes.word(rng, 64)), ("index", rng.randrange(4)),
        ("client", rng.randrange(-1, 5)), ("id", fuzz_bytes.word(rng, 32)), ("code", rng.choice(fuzz_bytes.WORDS)),
    ))  # fmt: skip
    return msgpack.packb({**said, name: value})


def framed(rng: Random, said: Said, chunk: bytes | None) -> list[bytes]:
    """Return the frames of a message; once in fifty times too few or too many."""
    frames = [bent(rng, said)] if chunk is None else [bent(rng, said), chunk]
    if rng.random() < 0.02:
        frames = [*frames, *[b"x"] * rng.randrange(4)][rng.randrange(2) :]
    return frames
