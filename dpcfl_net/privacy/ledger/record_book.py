"""Record book: privacy budget claims on each record, over all clients and runs that share a folder.

A guarantee is about a record, so the book holds the jobs in which a record took part, in any slice, order or form. The jobs of a
record are composed jointly, event by event, and converted to epsilon once: n equal runs cost about sqrt(n) times one, and a
changed slice that shares a record with an earlier one still pays for it. One job's claim covers the slice of a single client; a
record that several clients of one job hold counts once in that job. A whole client as the unit must be one client of each job: if
its records are divided among several, each of them pays in that job, and the run is refused.

With a budget, several equal plans are composed jointly at (1 - s) of its delta, s = `ADAPTIVE_SHARE`, and different ones go through a
Renyi filter at s of its delta, since a later plan may be chosen after earlier releases were seen (proof: `accounting/adaptive.py`). The
proof needs one budget, fixed before the first job, so all claims on a record must be entered under the same one. Without a budget nothing is
refused, and what is stated is joint composition, for plans that were fixed before the first job.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from dpcfl_net.core.atomic import remove_drafts
from dpcfl_net.core.errors import LedgerError, Refused
from dpcfl_net.core.locks import locked
from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.adaptive import order_for
from dpcfl_net.privacy.accounting.event_counts import EventCounts
from dpcfl_net.privacy.events.base import Event, merge
from dpcfl_net.privacy.ledger.book_claims import Budget, Events, PrivacyBudgetClaim, claim_line, read_claim
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, counter_line, digest, read_counter, split_lines

BOOK, COUNTER, RECORDS = "book.jsonl", "counter", "records"
ROUNDING = 1e-9
MOST_HISTORIES = 16  # more histories than this are replaced by one that is at least as costly as each

ADAPTIVE_SHARE = 0.1  # of a budget's delta, for records with different plans


class Compose(Protocol):
    """The accountant: epsilon of events at delta; with an order, of adaptively chosen ones by this Renyi order."""

    def __call__(self, events: Sequence[Event], delta: float, adjacency: Adjacency, order: float | None = None) -> float: ...


class RecordHistory(NamedTuple):
    """Jobs of a record.

    Attributes:
        events: Events of all plans, merged.
        jobs: Number of jobs.
        equal: True if all plans are equal.
    """

    events: Events
    jobs: int
    equal: bool


class RecordBook:
    """The record book in a folder; every call locks it against other processes.

    Files: book.jsonl (a hash chain of claims), counter (the last line's number and hash), records/ (sets of record digests).
    A call of this object does not verify again the lines that an earlier one has verified, nor sets without a record in common with the
    client: with one object for all clients of a process, the time of an entry hardly depends on the number of claims.

    Args:
        folder: Folder of the book, created if missing.
        durable: False skips fsync only.

    Raises:
        LedgerError: "book-broken" or "book-rolled-back", by every call.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder
        self._disk = Disk(durable)
        self._known: list[tuple[bytes, PrivacyBudgetClaim]] = []  # verified lines
        # Index of verified sets: their names, all their digests in order, and the number of each digest's set.
        self._names: dict[str, None] = {}
        self._digests, self._numbers = np.zeros(0, "<u8"), np.zeros(0, np.int64)

    def enrol(
        self, claim: PrivacyBudgetClaim, records: np.ndarray, budget: Budget | None, compose: Compose, *, again: bool = True
    ) -> None:
        """Enter a client's claim before any computation on its records. Entering the same claim again changes nothing.

        Args:
            claim: The whole plan, which is charged whole and never refunded.
            records: Digests of the client's records, (N,) uint64.
            budget: Joint bound on all runs; None for no bound.
            compose: The accountant.
            again: False refuses a claim that was entered before.

        Raises:
            Refused: "book" if the claim was entered before and `again` is False; "budget" if a record would exceed it, or was
                entered before under another one; "unit" if an earlier run on one of the records has another unit or adjacency, or
                divides the records among whole clients in another way, so that it cannot be composed; "claim" if the job made
                another claim for this client before.
        """
        own = np.unique(records).astype("<u8")
        claim = replace(claim, records=hashlib.sha256(own.tobytes()).hexdigest(), budget=budget)
        with self._locked():
            lines, claims = self._read()
            same = [p for p in claims if (p.job, p.client) == (claim.job, claim.client)]
            if same and [replace(p, budget=budget) for p in same] != [claim]:
                raise Refused("claim", f"job {claim.job[:12]} made another claim for client {claim.client} before")
            if same and not again:
                raise _without_ledger(claim.job, claim.client)
            if not self._is_counted(lines):  # a crash may have come before that, or before the last line was durable
                self._disk.sync_folder(self.folder)
                self._count(lines)
            others = [p for p in claims if p.job != claim.job]
            histories = self._histories(claim, own, others)
            if budget is not None:
                self._hold_to_one_budget(budget, own, claims)
                self._hold(claim, histories, budget, compose)
            if not same:
                for whole in self._wholes(claim, own, claims):
                    if budget is not None and not np.isin(whole, own).all():
                        self._hold(claim, self._histories(claim, whole, others), budget, compose)
                self._append(lines, claim, own)

    def refuse_entered(self, job: str, client: int) -> None:
        """Check that a client without a ledger was never entered; to be called before a ledger is made for it.

        Args:
            job: Hash of the signed protocol.
            client: Client id.

        Raises:
            Refused: "book" if the client was entered for this job: it has lost its ledger.
        """
        if any((claim.job, claim.client) == (job, client) for claim in self.claims()):
            raise _without_ledger(job, client)

    def spent(self, job: str, client: int, delta: float, compose: Compose, budget: Budget | None = None) -> tuple[float, int]:
        """Compute epsilon of the costliest record of a client over all runs so far.

        Args:
            job: Hash of the signed protocol.
            client: Client id.
            delta: Target delta, in (0, 1), without a budget; then the plans must have been fixed before the first run.
            compose: The accountant.
            budget: As for `enrol`; epsilon is at its delta.

        Returns:
            Epsilon, and the number of runs; inf if one of them was entered under another budget, or if several clients of one hold
            parts of this client as the unit; (0, 0) for a client without a claim in this job.
        """
        with self._locked():
            _, claims = self._read()
        for claim in claims:
            if (claim.job, claim.client) == (job, client):
                own = self._set(claim.records)
                histories = self._histories(claim, own, [p for p in claims if p.job != job])
                divided = claim.unit == "client" and any(
                    _is_divided(own, parts) for other, parts in self._sharing_clients(own, claims).items() if other != job
                )
                if divided or (budget is not None and self._under_another_budget(budget, own, claims) is not None):
                    return math.inf, max(each.jobs for each in histories)
                return max((_epsilon(each, budget or delta, claim.adjacency, compose), each.jobs) for each in histories)
        return 0.0, 0

    def claims(self) -> list[PrivacyBudgetClaim]:
        """All claims, in order."""
        with self._locked():
            return self._read()[1]

    def _hold(self, claim: PrivacyBudgetClaim, histories: list[RecordHistory], budget: Budget, compose: Compose) -> None:
        holder = f"record of client {claim.client}" if claim.unit == "sample" else f"client ({claim.client})"
        for history in histories:
            if not history.equal and (unbounded := _without_renyi_bound(history.events, claim.adjacency)):
                raise Refused(
                    "budget",
                    f"{history.jobs} runs with different plans on a {holder} are added up by a Renyi bound, and {unbounded} has none under "
                    f"{claim.adjacency}: runs with equal plans, or another book, are needed",
                )
            epsilon = _epsilon(history, budget, claim.adjacency, compose)
            if not epsilon <= budget.epsilon * (1 + ROUNDING):
                raise Refused(
                    "budget",
                    f"{history.jobs} runs together would promise a {holder} epsilon {epsilon:.4g} at delta {budget.delta:g}"
                    f"{'' if history.equal else ', by the bound for plans that differ'}; "
                    f"the budget is {budget.epsilon:g}",
                )

    def _hold_to_one_budget(self, budget: Budget, own: np.ndarray, earlier: Sequence[PrivacyBudgetClaim]) -> None:
        other = self._under_another_budget(budget, own, earlier)
        if other is not None:
            was = "no budget" if other.budget is None else f"epsilon {other.budget.epsilon:g} at delta {other.budget.delta:g}"
            raise Refused(
                "budget",
                f"job {other.job[:12]} was entered under {was} on some of these records, this one under epsilon {budget.epsilon:g} at "
                f"delta {budget.delta:g}: a budget must be fixed before the first run on a record",
            )

    def _wholes(
        self, claim: PrivacyBudgetClaim, own: np.ndarray, earlier: Sequence[PrivacyBudgetClaim]
    ) -> Iterator[np.ndarray]:
        """Yield the clients of other jobs to which a whole client belongs, since each takes part in this job, too.

        Refused for one that is several clients of another job, or one of several that are one: each would pay for itself.
        """
        if claim.unit != "client" or all(entered.job == claim.job for entered in earlier):
            return
        for job, sharing in self._sharing_clients(own, earlier).items():
            if job == claim.job:
                continue
            # Other clients of this job may hold copies of a part of `whole`, whose own client is not entered yet.
            wholes = [each for each in sharing if _belongs(own, each, sharing)]
            mine = [[*self._sharing_clients(whole, earlier).get(claim.job, []), own] for whole in wholes]
            parts = [
                [each for each in candidates if _belongs(each, whole, self._sharing_clients(each, earlier)[job])]
                for whole, candidates in zip(wholes, mine, strict=True)
            ]
            if _is_divided(own, sharing) or any(map(_is_divided, wholes, parts)):
                raise Refused(
                    "unit",
                    f"job {job[:12]} divides the records of client {claim.client} among its clients in another way than this one: a client of one "
                    "of the jobs is several clients of the other, each with its own cost, and the two cannot be composed; use the same "
                    "partition of the data, or another book",
                )
            yield from wholes

    def _sharing_clients(self, records: np.ndarray, claims: Sequence[PrivacyBudgetClaim]) -> dict[str, list[np.ndarray]]:
        """Records of those clients of each job that hold one of some records."""
        found: dict[str, list[np.ndarray]] = {}
        for claim in self._sharing(records, claims):
            found.setdefault(claim.job, []).append(self._set(claim.records))
        return found

    def _sharing(self, records: np.ndarray, claims: Sequence[PrivacyBudgetClaim]) -> list[PrivacyBudgetClaim]:
        """Those claims, in order, whose clients hold one of some records."""
        new = {claim.records: self._set(claim.records) for claim in claims if claim.records not in self._names}
        if new:
            numbers = np.repeat(len(self._names) + np.arange(len(new)), [len(each) for each in new.values()])
            digests = np.concatenate([self._digests, *new.values()])
            order = np.argsort(digests, kind="stable")
            self._digests, self._numbers = digests[order], np.concatenate([self._numbers, numbers])[order]
            self._names |= dict.fromkeys(new)
        names, found = list(self._names), set[str]()
        at, end = (np.searchsorted(self._digests, records, side) for side in ("left", "right"))
        while len(at):  # a digest is here once for each set that holds it
            at, end = at[at < end], end[at < end]
            found.update(names[number] for number in np.unique(self._numbers[at]))
            at = at + 1
        return [claim for claim in claims if claim.records in found]

    def _under_another_budget(
        self, budget: Budget, own: np.ndarray, claims: Sequence[PrivacyBudgetClaim]
    ) -> PrivacyBudgetClaim | None:
        """The first claim on one of these records under another budget, or none."""
        return next(iter(self._sharing(own, [claim for claim in claims if claim.budget != budget])), None)

    def _histories(
        self, claim: PrivacyBudgetClaim, own: np.ndarray, others: Sequence[PrivacyBudgetClaim]
    ) -> list[RecordHistory]:
        """Histories of the client's costliest records, this job included: each that no other exceeds.

        Jobs with the same plan are one kind, and the history of a record is the number of jobs of each kind that used it. A
        client as the unit took part in every job that used one of its records.
        """
        kinds: dict[Events, int] = {}
        counted: dict[tuple[str, Events], np.ndarray] = {}
        sets: dict[str, np.ndarray] = {}
        for other in self._sharing(own, others):
            if other.records not in sets:
                sets[other.records] = np.isin(own, self._set(other.records), assume_unique=True)
            shared = sets[other.records]
            if (other.unit, other.adjacency) != (claim.unit, claim.adjacency):
                raise Refused(
                    "unit",
                    f"job {other.job[:12]} protects a {other.unit} under {other.adjacency} on some of these records, this one "
                    f"a {claim.unit} under {claim.adjacency}: the two cannot be composed; use another book",
                )
            shared = np.full(len(own), True) if claim.unit == "client" else shared
            kinds.setdefault(other.events, len(kinds))
            key = (other.job, other.events)
            counted[key] = counted[key] | shared if key in counted else shared
        table = np.zeros((len(own), len(kinds)), np.int64)
        for (_, events), shared in counted.items():
            table[shared, kinds[events]] += 1
        differs = np.array([events != claim.events for events in kinds], bool)
        return [
            RecordHistory(
                repeated([(claim.events, 1), *zip(kinds, row.tolist(), strict=True)]),
                1 + int(row.sum()),
                not row[differs].any(),
            )
            for row in _largest(table)
        ]

    def _set(self, name: str) -> np.ndarray:
        """Record digests of a client, sorted, by their hash."""
        path = self.folder / RECORDS / f"{name}.u8"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _broken(f"{path}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != name:
            raise _broken(f"{path} was changed")
        return np.frombuffer(content, "<u8")

    def _append(self, lines: list[bytes], claim: PrivacyBudgetClaim, own: np.ndarray) -> None:
        path = self.folder / RECORDS / f"{claim.records}.u8"
        self._disk.make_folder(path.parent)
        if path.exists():
            self._disk.sync_folder(path.parent)  # a crash may have come before the flush of its name
        else:
            self._disk.replace(path, own.tobytes())
        if not lines:  # another process may have created records/, and been killed before it flushed the name
            self._disk.sync_folder(self.folder)
        line = claim_line(claim, len(lines), digest(lines[-1]) if lines else FIRST_PREV)
        self._disk.replace(self.folder / BOOK, b"".join([*lines, line]))
        self._count([*lines, line])

    def _count(self, lines: list[bytes]) -> None:
        """Bring the counter up to the last line, which must be durable: a counter that a power failure leaves alone refuses the book."""
        self._disk.replace(self.folder / COUNTER, _counter(lines))

    def _is_counted(self, lines: list[bytes]) -> bool:
        """Return True if the counter is that of the last line, or there is no line."""
        path = self.folder / COUNTER
        return not lines or (path.exists() and path.read_bytes() == _counter(lines))

    def _read(self) -> tuple[list[bytes], list[PrivacyBudgetClaim]]:
        path = self.folder / BOOK
        content = path.read_bytes() if path.exists() else b""
        lines, tail = split_lines(content)
        if tail:
            raise _broken(f"{path} ends in a truncated line")  # it is replaced whole, never appended to
        same = takewhile(lambda pair: pair[0][0] == pair[1], zip(self._known, lines, strict=False))
        known = self._known = [one for one, _ in same]
        prev = digest(known[-1][0]) if known else FIRST_PREV
        for number, line in enumerate(lines[len(known) :], len(known)):
            try:
                claim = read_claim(json.loads(line))
                whole = claim_line(claim, number, prev) == line
            except (ValueError, TypeError, KeyError, RecursionError) as problem:
                raise _broken(f"{path}, line {number}: {problem}") from None
            if not whole:
                raise _broken(f"{path}, line {number}: not the line that was written after the one before")
            known.append((line, claim))
            prev = digest(line)
        self._check_counter(lines)
        return lines, [claim for _, claim in known]

    def _check_counter(self, lines: list[bytes]) -> None:
        path = self.folder / COUNTER
        if not path.exists() and len(lines) <= 1:
            return
        counter = read_counter(path.read_bytes() if path.exists() else b"")
        if counter is None:
            raise _broken(f"{path} is missing or unreadable")
        number, written = counter
        if number >= len(lines):
            raise LedgerError("book-rolled-back", f"{self.folder / BOOK} holds {len(lines)} claims, {number + 1} were entered")
        if digest(lines[number]) != written:
            raise _broken(f"{self.folder / BOOK}, line {number}: not the line that was written")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._disk.make_folder(self.folder)
        with locked(self.folder / "lock"):
            for folder in (self.folder, self.folder / RECORDS):
                remove_drafts(folder)
            yield


def _epsilon(history: RecordHistory, budget: Budget | float, adjacency: Adjacency, compose: Compose) -> float:
    """Epsilon of a history at the delta of a budget, or at a delta without a budget; see the head of this file."""
    if not isinstance(budget, Budget):
        return compose(history.events, budget, adjacency)
    if history.equal:
        share = 1 - ADAPTIVE_SHARE if history.jobs > 1 else 1.0
        return compose(history.events, share * budget.delta, adjacency)
    delta = ADAPTIVE_SHARE * budget.delta
    return compose(history.events, delta, adjacency, order_for(budget.epsilon, delta))


def _without_renyi_bound(events: Events, adjacency: Adjacency) -> str:
    """Name the first event that a Renyi filter has no bound for; empty if there is none."""
    for event in events:
        try:
            EventCounts().add([event]).checked(adjacency, "rdp")
        except ValueError:
            return type(event).__name__
    return ""


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


def _share(some: np.ndarray, others: np.ndarray) -> bool:
    """Return True if a record is in both sets, which are sorted: several times as fast as np.isin, which sorts."""
    at = np.searchsorted(some, others)
    return bool((some[np.minimum(at, len(some) - 1)] == others).any()) if len(some) else False


def _belongs(records: np.ndarray, client: np.ndarray, clients: Sequence[np.ndarray]) -> bool:
    """Return True if a client of a job holds all of those records that the job's clients hold, at least one."""
    if not _share(records, client):
        return False
    return bool(np.isin(records[np.isin(records, np.concatenate(clients))], client).all())


def _is_divided(records: np.ndarray, clients: Sequence[np.ndarray]) -> bool:
    """Return True if clients of a job hold some of these records, and none to which they belong: beside it, others hold copies."""
    return any(_share(records, each) for each in clients) and not any(_belongs(records, each, clients) for each in clients)


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


def _counter(lines: list[bytes]) -> bytes:
    return counter_line(len(lines) - 1, digest(lines[-1]))


def _without_ledger(job: str, client: int) -> Refused:
    return Refused(
        "book",
        f"job {job[:12]} was entered for client {client} before, and its ledger is not where this worker looks: with an "
        "empty one it would spend its plan a second time; give the folder of its ledger, or make a new job",
    )


def _broken(where: str) -> LedgerError:
    return LedgerError("book-broken", f"{where}; the record book was edited or damaged, and no run can continue from it")
