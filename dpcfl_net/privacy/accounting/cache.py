"""Answers of the accountant, kept in files: the processes of a host ask the same few questions, which take seconds each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text
from dpcfl_net.core.locks import locked
from dpcfl_net.core.types import Adjacency, Event

# Part of the name of an answer, so that a corrected accountant does not use the answers of an earlier one.
SOURCES = (
    "accountant.py",
    "composition.py",
    "event_counts.py",
    "fixed_size.py",
    "gaussian.py",
    "pld.py",
    "rdp.py",
    "selection.py",
    "../../core/types.py",
)


def cached(folder: Path, question: dict[str, Any], answer: Callable[[], Any]) -> Any:
    """Return a kept answer, or compute and keep it.

    One process computes; others with the same question wait for it. An exception is passed on and not kept.

    Args:
        folder: Folder of the kept answers, created with mode 0700.
        question: JSON data that determines the answer, apart from the accountant's version.
        answer: Computes the answer, JSON data.

    Returns:
        The answer.
    """
    name = hashlib.sha256(accountant().encode() + b"\n" + canonical_json(question)).hexdigest()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stored = folder / f"{name}.json"
    with locked(folder / f"{name}.lock"):
        found = _kept(stored)
        if found is None:
            found = json.dumps({"answer": answer()})
            write_atomically(stored, found)
        return json.loads(found)["answer"]


def _kept(stored: Path) -> str | None:
    """Text of a kept answer; None if there is none or the file is damaged."""
    try:
        text = read_text(stored)
        found = json.loads(text)
    except (ConfigError, ValueError, RecursionError):
        return None
    return text if isinstance(found, dict) and "answer" in found else None


def cost(events: Iterable[Event], delta: float, adjacency: Adjacency, accountant: str) -> dict[str, Any]:
    """Return the epsilon of some events as a question, in the form that `accountant.py` reads from standard input."""
    listed = [{"type": type(event).__name__, **asdict(event)} for event in events]
    return {"events": listed, "delta": delta, "adjacency": adjacency, "accountant": accountant}


@cache
def accountant() -> str:
    """Identify the accountant: version of dp-accounting and hash of its source files."""
    own = hashlib.sha256()
    for source in SOURCES:
        own.update((Path(__file__).parent / source).read_bytes())
    return f"dp-accounting {version('dp-accounting')} {own.hexdigest()}"
