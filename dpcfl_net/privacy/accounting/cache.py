"""Accountant cache: results in files, since the processes of a host need the same few results, which take seconds each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text
from dpcfl_net.core.shared_result import shared
from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.events.base import Event

# Files that a result depends on, so that a corrected accountant does not reuse the results of a faulty one.
SOURCES = (
    "accounting/accountant.py",
    "accounting/adaptive.py",
    "accounting/allocation.py",
    "accounting/allocation_replaced.py",
    "accounting/composition.py",
    "accounting/document.py",
    "accounting/event_counts.py",
    "accounting/pld.py",
    "accounting/positive_sums.py",
    "accounting/rdp.py",
    "accounting/signed_sums.py",
    "accounting/tuned.py",
    "../core/types.py",
)
EVENTS = "events/*.py"


def cached(folder: Path, question: dict[str, Any], answer: Callable[[], Any]) -> Any:
    """Look up a result in the accountant cache, or compute and store it.

    One process computes; others with the same query wait for it, unless it is stopped. An exception is passed on and not stored.

    Args:
        folder: Folder of the cache, created if missing.
        question: JSON value that identifies the result, together with the accountant's files.
        answer: Computes the result, a JSON value.

    Returns:
        The result.

    Raises:
        ConfigError: If other users can write to the folder: a forged result would stand for an epsilon.
    """
    name = hashlib.sha256(accountant().encode() + b"\n" + canonical_json(question)).hexdigest()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _hold_to_own(folder)
    stored = folder / f"{name}.json"

    def compute() -> str:
        text = json.dumps({"answer": answer()})
        write_atomically(stored, text)
        return text

    return json.loads(shared(folder / f"{name}.lock", lambda: _kept(stored), compute))["answer"]


def _hold_to_own(folder: Path) -> None:
    """Raise ConfigError for a folder to which users other than this one and root can write."""
    state = folder.stat()
    if state.st_uid not in (os.geteuid(), 0) or state.st_mode & 0o022:
        raise ConfigError(
            f"other users can write to {folder}, where verified epsilons are kept: delete it, or set XDG_CACHE_HOME to a folder of your own"
        )


def _kept(stored: Path) -> str | None:
    """Text of a stored result; None if there is none or the file is damaged, as after a crash."""
    try:
        text = read_text(stored)
        found = json.loads(text)
    except (ConfigError, ValueError, RecursionError):
        return None
    return text if isinstance(found, dict) and "answer" in found else None


def cost(
    events: Iterable[Event], delta: float, adjacency: Adjacency, accountant: str, order: float | None = None
) -> dict[str, Any]:
    """Build the query for epsilon of events, a document of `privacy.accounting.document`.

    Args:
        events: Events in any order.
        delta: Target delta, in (0, 1).
        adjacency: "zero-out" or "replace-one".
        accountant: "pld" or "rdp".
        order: The only Renyi order, for adaptively chosen events and "rdp"; None: fixed events.

    Returns:
        A JSON object.
    """
    settings = {"delta": delta, "adjacency": adjacency, "accountant": accountant} | ({} if order is None else {"order": order})
    return {"events": [event.as_json() for event in events], **settings}


def sources() -> list[Path]:
    """List the files of the accountant, on which every result depends.

    Returns:
        `SOURCES` and every file of events, in a fixed order.
    """
    folder = Path(__file__).resolve().parents[1]
    return [*((folder / source).resolve() for source in SOURCES), *sorted(folder.glob(EVENTS))]


@cache
def accountant() -> str:
    """Identify the accountant.

    Returns:
        The library's version and a digest of the content of `sources`.
    """
    own = hashlib.sha256()
    for source in sources():
        own.update(source.read_bytes())
    return f"dp-accounting {version('dp-accounting')} {own.hexdigest()}"
