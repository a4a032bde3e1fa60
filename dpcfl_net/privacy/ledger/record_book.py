"""What each record was promised over all runs: one book for every client and run that share a folder.

A guarantee is about a record, so that is what is counted: which jobs a record took part in, whatever slice, order or look it
had there. A record's jobs are composed jointly, event by event, and converted to epsilon once: n equal runs cost about
sqrt(n) times one, and no change of a slice starts from nothing while it shares a record. What one job promises is that of a
single client's slice; a record that several clients of one job hold counts once in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import LedgerError, Refused
from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.events.base import Event, merge, read_event
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, canonical, digest

BOOK, COUNTER, RECORDS = "book.jsonl", "counter", "records"
ROUNDING = 1e-9
MOST_HISTORIES = 16  # that are accounted one by one; of more, one that is at least as costly as each

Events = tuple[Event, ...]
Compose = Callable[[Sequence[Event], float, Adjacency], float]  # events, delta, adjacency -> epsilon


@dataclass(frozen=True)
class Budget:
    """The most that all runs together may promise about one record (or client): epsilon at delta."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Promise:
    """The whole plan of one client in one job. records: sha256 of the digests of its records, sorted."""

    job: str
    client: int
    unit: str
    adjacency: Adjacency
    events: Events
    records: str = ""


class RecordBook:
    """The book in `folder`; every call locks it against other processes.

    Files: book.jsonl (a hash chain of promises), counter (the last line's number and hash), records/ (sets of record digests).
    `durable=False` skips fsync only. Raises LedgerError with code book-broken or book-rolled-back.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder
        self._disk = Disk(durable)

    def enrol(self, promise: Promise, records: np.ndarray, budget: Budget | None, compose: Compose) -> None:
        """Enter a client's promise before anything is computed on its records; the same again changes nothing.

        Args:
            promise: The whole plan; it is charged whole and never refunded.
            records: (N,) uint64, digests of the client's records.
            budget: What all runs may promise together, None for no bound.
            compose: The accountant.

        Raises:
            Refused: "budget" if a record would be promised more; "unit" if an earlier run on one of the records has another
                unit or adjacency, with which nothing can be composed; "claim" if the job promised otherwise before.
        """
        own = np.unique(records).astype("<u8")
        promise = replace(promise, records=hashlib.sha256(own.tobytes()).hexdigest())
        with self._locked():
            lines, promises = self._read()
            same = [p for p in promises if (p.job, p.client) == (promise.job, promise.client)]
            if same and same != [promise]:
                raise Refused("claim", f"job {promise.job[:12]} promised client {promise.client} something else before")
            others = [p for p in promises if p.job != promise.job]
            histories = self._histories(promise, own, others)
            if budget is not None:
                self._hold(promise, histories, budget, compose)
            if not same:
                self._append(lines, promise, own)

    def spent(self, job: str, client: int, delta: float, compose: Compose) -> tuple[float, int]:
        """Epsilon at `delta` of the costliest record of a client over all runs so far, and how many runs that were.

        (0, 0) for a client that did not enrol in this job.
        """
        with self._locked():
            _, promises = self._read()
        for promise in promises:
            if (promise.job, promise.client) == (job, client):
                histories = self._histories(promise, self._records(promise), [p for p in promises if p.job != job])
                return max((compose(events, delta, promise.adjacency), jobs) for events, jobs in histories)
        return 0.0, 0

    def promises(self) -> list[Promise]:
        """Every promise, in order."""
        with self._locked():
            return self._read()[1]

    def _hold(self, promise: Promise, histories: list[tuple[Events, int]], budget: Budget, compose: Compose) -> None:
        for events, jobs in histories:
            epsilon = compose(events, budget.delta, promise.adjacency)
            if not epsilon <= budget.epsilon * (1 + ROUNDING):
                raise Refused(
                    "budget",
                    f"{jobs} runs together would promise a {_whose(promise)} epsilon {epsilon:.4g} at delta {budget.delta:g}; "
                    f"the budget is {budget.epsilon:g}",
                )

    def _histories(self, promise: Promise, own: np.ndarray, others: Sequence[Promise]) -> list[tuple[Events, int]]:
        """What the costliest of the client's records went through with this job: (events, jobs) of each that none exceeds.

        Jobs with the same plan are one kind, and a record's history is how many jobs of each kind it was in. A whole client is
        in every job that one of its records was in.
        """
        kinds: dict[Events, int] = {}
        counted: dict[tuple[str, Events], np.ndarray] = {}
        sets: dict[str, np.ndarray] = {}
        for other in others:
            if other.records not in sets:
                sets[other.records] = np.isin(own, self._records(other), assume_unique=True)
            shared = sets[other.records]
            if not shared.any():
                continue
            if (other.unit, other.adjacency) != (promise.unit, promise.adjacency):
                raise Refused(
                    "unit",
                    f"job {other.job[:12]} protects a {other.unit} under {other.adjacency} on some of these records, this one "
                    f"a {promise.unit} under {promise.adjacency}: what both promise together is not known; use another book",
                )
            shared = np.full(len(own), True) if promise.unit == "client" else shared
            kinds.setdefault(other.events, len(kinds))
            key = (other.job, other.events)
            counted[key] = counted[key] | shared if key in counted else shared
        table = np.zeros((len(own), len(kinds)), np.int64)
        for (_, events), shared in counted.items():
            table[shared, kinds[events]] += 1
        return [
            (repeated([(promise.events, 1), *zip(kinds, row.tolist(), strict=True)]), 1 + int(row.sum()))
            for row in _largest(table)
        ]

    def _records(self, promise: Promise) -> np.ndarray:
        path = self.folder / RECORDS / f"{promise.records}.u8"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _broken(f"{path}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != promise.records:
            raise _broken(f"{path} is not what was written")
        return np.frombuffer(content, "<u8")

    def _append(self, lines: list[bytes], promise: Promise, own: np.ndarray) -> None:
        path = self.folder / RECORDS / f"{promise.records}.u8"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            self._disk.replace(path, own.tobytes())
        line = _line(promise, len(lines), digest(lines[-1]) if lines else FIRST_PREV)
        self._disk.replace(self.folder / BOOK, *lines, line)
        self._disk.replace(self.folder / COUNTER, f"{len(lines)} {digest(line)}\n".encode())

    def _read(self) -> tuple[list[bytes], list[Promise]]:
        path = self.folder / BOOK
        content = path.read_bytes() if path.exists() else b""
        *lines, tail = content.split(b"\n")
        if tail:
            raise _broken(f"{path} ends in a torn line")  # it is replaced whole, never appended to
        lines = [line + b"\n" for line in lines]
        promises, prev = [], FIRST_PREV
        for number, line in enumerate(lines):
            try:
                promise = _promise(json.loads(line))
                whole = _line(promise, number, prev) == line
            except (ValueError, TypeError, KeyError, RecursionError) as problem:
                raise _broken(f"{path}, line {number}: {problem}") from None
            if not whole:
                raise _broken(f"{path}, line {number}: not the line that was written after the one before")
            promises.append(promise)
            prev = digest(line)
        self._check_counter(lines)
        return lines, promises

    def _check_counter(self, lines: list[bytes]) -> None:
        path = self.folder / COUNTER
        if not path.exists() and len(lines) <= 1:
            return
        match = re.fullmatch(rb"(0|[1-9][0-9]{0,17}) ([0-9a-f]{64})\n", path.read_bytes() if path.exists() else b"")
        if match is None:
            raise _broken(f"{path} is missing or unreadable")
        if int(match[1]) >= len(lines):
            raise LedgerError(
                "book-rolled-back", f"{self.folder / BOOK} holds {len(lines)} promises, {int(match[1]) + 1} were made"
            )
        if digest(lines[int(match[1])]) != match[2].decode():
            raise _broken(f"{self.folder / BOOK}, line {int(match[1])}: not the line that was written")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def repeated(kinds: Sequence[tuple[Events, int]]) -> Events:
    """Merge the events of plans that are run several times.

    Args:
        kinds: Events of a plan, and how often it is run.

    Returns:
        All events, equal mechanisms merged into one, in order of first appearance.
    """
    counted: Counter[Event] = Counter()
    for events, count in kinds:
        for event in events:
            counted[event] += count
    return tuple(merge(counted))


def _largest(table: np.ndarray) -> np.ndarray:
    """The rows that no other row exceeds in every column; of many, one row that exceeds them all."""
    rows = np.unique(table, axis=0)
    if len(rows) > 1:
        rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
        kept: list[np.ndarray] = []
        for row in rows:
            if not any((row <= other).all() for other in kept):
                kept.append(row)
            if len(kept) > MOST_HISTORIES:
                return rows.max(axis=0, keepdims=True)
        rows = np.stack(kept)
    return rows


def _line(promise: Promise, number: int, prev: str) -> bytes:
    return canonical({
        "sequence": number, "prev": prev, "job": promise.job, "client": promise.client, "unit": promise.unit,
        "adjacency": promise.adjacency, "events": [event.as_json() for event in promise.events], "records": promise.records,
    }) + b"\n"  # fmt: skip


def _promise(fields: dict[str, Any]) -> Promise:
    events = tuple(read_event(event) for event in fields["events"])
    return Promise(fields["job"], fields["client"], fields["unit"], fields["adjacency"], events, fields["records"])


def _whose(promise: Promise) -> str:
    return f"record of client {promise.client}" if promise.unit == "sample" else f"client ({promise.client})"


def _broken(where: str) -> LedgerError:
    return LedgerError("book-broken", f"{where}; the record book was edited or damaged, and no run may go on from it")
