"""Rules for the fields of a header from any peer: exact types, ranges and patterns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from dpcfl_net.core.tensors import DTYPES

MAX_PAYLOAD = 1 << 34  # bytes; above any model, below any overflow
MAX_TENSORS = 64
MAX_SIDES = 8
KINDS = frozenset(("HELLO", "WELCOME", "TASK", "RESULT", "CHUNK", "CREDIT", "ACK", "HEARTBEAT", "ERROR", "BYE"))

Row = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


class Rule(NamedTuple):
    """Rule for one field.

    Attributes:
        fits: Returns True if a decoded value, of any type, is allowed.
        text: The rule in words.
    """

    fits: Callable[[Any], bool]
    text: str


def _whole(low: int, high: int) -> Rule:
    """Whole numbers in a range; a bool is none."""
    return Rule(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def _text(pattern: str, text: str) -> Rule:
    whole = re.compile(pattern).fullmatch
    return Rule(lambda value: type(value) is str and whole(value) is not None, text)


def _is_table(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_TENSORS and all(map(_is_row, value))


def _is_row(row: Any) -> bool:
    if type(row) is not list or len(row) != 4:
        return False
    name, dtype, shape, size = row
    return (
        _NAME.fits(name)
        and type(dtype) is str
        and dtype in DTYPES
        and type(shape) is list
        and len(shape) <= MAX_SIDES
        and all(map(_SIZE.fits, shape))
        and _SIZE.fits(size)
    )


_SIZE = _whole(0, MAX_PAYLOAD)
_NAME = _text(r"[A-Za-z0-9_.]{1,128}", "a tensor name")
_ID = _text(r"[0-9a-f]{32}", "32 hex digits")

RULES: dict[str, Rule] = {
    "version": _whole(0, 1 << 31),
    "run": _text(r"[0-9a-f]{1,64}", "1 to 64 hex digits"),
    "job": _text(r"[0-9a-f]{64}", "64 hex digits"),
    "boot": _ID,
    "sequence": _whole(1, 1 << 62),
    "id": _ID,
    "kind": Rule(lambda value: type(value) is str and value in KINDS, f"one of {', '.join(sorted(KINDS))}"),
    "parent": _text(r"([0-9a-f]{32})?", "empty or 32 hex digits"),
    "round": _whole(0, 10**6),
    "task": _text(r"[a-z_]{0,64}", "at most 64 letters a to z and underscores"),
    "tensors": Rule(_is_table, f"at most {MAX_TENSORS} rows of name, dtype, shape and bytes"),
    "blake3": _text(r"([0-9a-f]{64})?", "empty or 64 hex digits"),
    "chunks": _SIZE,
    "index": _SIZE,
    "client": _whole(-1, 10**6),
    "code": _text(r"[a-z0-9-]{0,64}", "at most 64 lower-case letters, digits and hyphens"),
    "reason": _text(r"[^\x00-\x1f\x7f-\x9f]{0,500}", "at most 500 printable characters"),
}
