"""Hostile bytes: valid headers of every kind, and mutations that know msgpack's structure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from dpcfl_net.transport import messages
from dpcfl_net.transport.header_rules import RULES

KINDS = ("HELLO", "WELCOME", "TASK", "RESULT", "CHUNK", "CREDIT", "ACK", "HEARTBEAT", "ERROR", "BYE")
WORDS = (
    "",
    "train",
    "small",
    "update",
    "choice",
    "release",
    "refused",
    "idle",
    "computing",
    "schema",
    "\x00",
    "ü" * 40,
    "a" * 65,
)
UNKNOWN = ("noise_multiplier", "clip", "batch_size", "epsilon", "loss", "count", "label", "seed", "__class__", "")
WHOLE = (0, 1, -1, 2, 63, 64, 127, 128, 255, 256, 65535, 65536, 10**6, 10**6 + 1, 1 << 31, (1 << 31) + 1, 1 << 32, 1 << 34,
         (1 << 34) + 1, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))  # fmt: skip
HEADS = (0xC1, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xD4, 0xD8, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0x80, 0x8F, 0x90, 0x9F)
HUGE_NUMBER = "a number of more digits than Python prints"
LENGTHS = (0, 1, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


def word(rng: Random, size: int) -> str:
    """Return `size` hex digits."""
    return f"{rng.getrandbits(4 * size):0{size}x}"


def tensors(rng: Random) -> list[list[Any]]:
    """Return up to four consistent rows (name, dtype, shape, bytes)."""
    names = sorted({f"t{rng.randrange(20)}" for _ in range(rng.randrange(5))})
    rows = []
    for name in names:
        dtype, shape = (
            rng.choice(("f4", "i8", "f2", "b2", "i1", "i4", "u1", "u4")),
            [rng.choice((0, 1, 2, 3, 7, 300, 4096)) for _ in range(rng.randrange(4))],
        )
        rows.append([name, dtype, shape, math.prod(shape) * int(dtype[1])])
    return rows


def fields(rng: Random) -> dict[str, Any]:
    """Return the fields of a valid header of any kind."""
    kind = rng.choice(KINDS)
    found: dict[str, Any] = {
        "version": messages.VERSION, "run": word(rng, 32), "job": word(rng, 64), "boot": word(rng, 32), "sequence": rng.randrange(1, 1 << 40),
        "id": word(rng, 32), "kind": kind,
    }  # fmt: skip
    if kind in ("TASK", "RESULT"):
        rows = tensors(rng)
        size = sum(row[3] for row in rows)
        found |= {"round": rng.randrange(1, 1000), "task": rng.choice(("train", "small")), "tensors": rows}
        found |= {"chunks": -(-size // messages.CHUNK), "blake3": word(rng, 64) if size else ""}
    if kind not in ("HELLO", "TASK", "HEARTBEAT", "BYE"):
        found["parent"] = word(rng, 32)
    if kind in messages.CODES:
        found["code"] = rng.choice(messages.CODES[kind])
    if kind in ("CHUNK", "CREDIT"):
        found["index"] = rng.randrange(1 << 14)
    if kind == "HELLO":
        found["client"] = rng.randrange(-1, 50)
    if kind in ("ERROR", "RESULT") and rng.random() < 0.5:
        found |= {"reason": "a reason: é, 3 > 2"} | ({"code": "template"} if kind == "ERROR" else {})
    return found


def value(rng: Random, depth: int = 0) -> Any:
    """Return a random value that msgpack can encode, including extensions, time stamps and 64-bit integers."""
    pick = rng.randrange(11 if depth < 4 else 8)
    if pick == 0:
        return rng.choice((None, True, False))
    if pick in (1, 2):
        return rng.choice(WHOLE)
    if pick == 3:
        return rng.choice((0.0, -0.0, 1.0, 1e308, math.inf, -math.inf, math.nan))
    if pick in (4, 5):
        return rng.choice((*WORDS, word(rng, 32), word(rng, 64), *KINDS))
    if pick == 6:
        return rng.randbytes(rng.choice((0, 1, 16, 300)))
    if pick == 7:
        return msgpack.ExtType(rng.randrange(128), rng.randbytes(rng.choice((0, 1, 4, 8)))) if depth else rng.choice(WHOLE)
    if pick == 8:
        return {rng.choice((*WORDS, *UNKNOWN)): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [value(rng, depth + 1) for _ in range(rng.randrange(5))]


def changed_fields(rng: Random, found: dict[str, Any]) -> bytes:
    """Encode a header with one to three fields replaced, removed, added or repeated."""
    found, rows = dict(found), found.get("tensors")
    twice: list[tuple[str, Any]] = []
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(RULES))
        pick = rng.randrange(8)
        if pick == 0:
            found.pop(name, None)
        elif pick == 1:
            found[rng.choice(UNKNOWN)] = value(rng)
        elif pick == 2:
            twice.append((name, found.get(name, value(rng))))
        elif pick == 3 and rows:
            found["tensors"] = _changed_rows(rng, rows)
        elif pick == 4:
            found[name] = rng.choice(WHOLE)
        elif pick == 5:
            found["kind"] = rng.choice(KINDS)
        else:
            found[name] = value(rng)
    return _map([*found.items(), *twice])


def _changed_rows(rng: Random, rows: list[list[Any]]) -> list[Any]:
    rows = [list(row) for row in rows]
    row, place = rng.choice(rows), rng.randrange(4)
    if place == 2:
        row[2] = [*row[2], rng.choice(WHOLE)] if rng.random() < 0.5 else [rng.choice(WHOLE) for _ in row[2]]
    else:
        row[place] = rng.choice((*WHOLE, *WORDS, "O", "f8", value(rng)))
    return rows if rng.random() < 0.7 else [*rows, rng.choice(rows)]


def _map(pairs: list[tuple[str, Any]]) -> bytes:
    """A map encoded pair by pair, so that keys may repeat."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(pairs))
    for name, what in pairs:
        packer.pack(name)
        packer.pack(what)
    return packer.bytes()


def flipped(rng: Random, data: bytes) -> bytes:
    """Flip one to eight bits."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 9)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng: Random, data: bytes) -> bytes:
    """Remove the end, the beginning, or a piece in the middle."""
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice((data[:end], data[begin:], data[:begin] + data[end:]))


def spliced(rng: Random, data: bytes) -> bytes:
    """Join the beginning of one message with the end of another, or repeat a piece."""
    other = msgpack.packb(fields(rng)) if rng.random() < 0.7 else data
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def lied(rng: Random, data: bytes) -> bytes:
    """Insert a type byte that announces another type or length than the bytes after it."""
    at, head = rng.randrange(len(data)), rng.choice(HEADS)
    width = {0xC5: 2, 0xC8: 2, 0xDA: 2, 0xDC: 2, 0xDE: 2, 0xC6: 4, 0xC9: 4, 0xDB: 4, 0xDD: 4, 0xDF: 4}.get(head, 1)
    length = (rng.choice(LENGTHS) & ((1 << 8 * width) - 1)).to_bytes(width, "big")
    return data[:at] + bytes([head]) + length + data[at + rng.choice((0, 1, 1 + width)) :]


def nested(rng: Random, data: bytes) -> bytes:
    """Return deeply nested arrays or maps, up to slightly more than the size that is read."""
    piece = rng.choice((b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01", b"\x9f"))
    return piece * rng.choice((10, 100, 600, 2000, messages.MAX_HEADER // len(piece) + 1))


def noise(rng: Random, data: bytes) -> bytes:
    """Return random bytes, or one encoded random value."""
    return rng.randbytes(rng.randrange(300)) if rng.random() < 0.5 else msgpack.packb(value(rng))


Change = Callable[[Random, bytes], bytes]
CHANGES: tuple[Change, ...] = (flipped, flipped, cut, spliced, lied, lied, noise)


def header(rng: Random) -> bytes:
    """Return a header: valid in one case of ten, else with broken fields or bytes."""
    pick = rng.random()
    found = fields(rng)
    if pick < 0.1:
        return msgpack.packb(found)
    if pick < 0.5:
        return changed_fields(rng, found)
    if pick < 0.505:
        return nested(rng, b"")
    return rng.choice(CHANGES)(rng, msgpack.packb(found))


def document(rng: Random, text: bytes) -> bytes:
    """Return a JSON document with a changed value, name or some changed bytes."""
    if rng.random() < 0.4:
        return rng.choice((flipped, cut, noise))(rng, text)
    found = json.loads(text)
    place: Any = found
    keys: list[Any] = []
    while isinstance(place, dict | list) and place and (not keys or rng.random() < 0.6):
        keys.append(rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place)))
        outer, place = place, place[keys[-1]]
    pick, last = rng.randrange(4), keys[-1]
    if pick == 0:
        outer[last] = rng.choice(
            (math.nan, math.inf, 10**400, HUGE_NUMBER, 1 << 70, -1, 0, 0.1, "", "\ud800", None, True, [], {})
        )
    elif pick == 1 and isinstance(outer, dict):
        outer[rng.choice(UNKNOWN)] = outer.pop(last)
    elif pick == 2:
        outer[last] = _deep(rng.choice((3, 100, 300)))
    else:
        outer[last] = rng.choice((place, str(place), [place], rng.choice(WHOLE)))
    made = json.dumps(found, sort_keys=rng.random() < 0.8, separators=(",", ":"))
    return made.replace(f'"{HUGE_NUMBER}"', "9" * 5000).encode("utf-8", "surrogatepass")


def _deep(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made
