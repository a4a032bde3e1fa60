"""Privacy ledger of one client: durable debits before data is touched, one random draw per charge, across crashes.

Files in the ledger's folder (mode 0700), all with mode 0600: ledger.jsonl, the hash chain of `Entry` lines, one per charge; journal,
a ring of the last 16 lines with the key of each (`journal.Journal`); releases/, the results of the last two rounds
(`release_store.ReleaseStore`).

A task costs two flushes, one before data is touched and one before the answer leaves:

1. `debit` writes line and key into the oldest slot of the journal and flushes it. This is the charge. A crash before the flush has
   ended leaves the slot as it was, cut short (or a mixture of old and new sectors) or whole. As it was: nothing is charged. Cut short:
   no data was touched; the next opening enters the line as "torn", and the gate charges the costliest request for it and closes its
   round, unless the note was cut, too: then nothing is charged. Whole: charged.
2. It appends the line to ledger.jsonl, without a flush. A crash may lose the line or its end, or leave zeros in its place; the next
   opening restores it from the journal. Before a slot is overwritten, ledger.jsonl is flushed up to its line (one flush in 16 debits),
   so that each line is always whole on the device in one of both files.
3. The step computes. A crash leaves a debit with a key: an equal request is computed again from the same key.
4. `store` puts the result into a file of releases/ that holds nothing any more, and flushes it. A crash before the flush has ended
   leaves a file whose hashes do not match, and the key: as in step 3. A result that may not count before a certain time
   (`before_final`) is flushed without the first line of its file, which is written and flushed then.
5. It then overwrites the key; the next flush, of the next debit or of `close`, takes that to the device. A crash in between leaves
   result and key; the next opening erases the key.

A large result that can be computed again is not stored (`store` with `repeatable`): step 4 marks the slot with the hash of the
result and flushes that instead, and the key stays until the result is two rounds old, as long as a stored result would, or until
the end of the run (`erase_answered`, `ledger_folder.erase_kept_keys`). An equal request is computed again from key, request and the
state before it. If the bits differ from the hash, nothing is sent: one draw never leaves with two roundings. A crash before the mark is
whole means that no answer was sent: as in step 3.

Edits and rollbacks: the journal counts the lines, holds the last of them, and notes up to which line ledger.jsonl was flushed, at the
latest by `close`. A shorter or different ledger.jsonl, or a journal that is older than it, does not open. Nor does a ledger without the
result of a debit of the last two rounds whose key is erased, since the result was on the device before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import DRAFT, remove_drafts, write_all
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.files import naming
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.chain import LINES, Chain, read_chain
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, Entry, History, broken, digest
from dpcfl_net.privacy.ledger.journal import JOURNAL, KEY_BYTES, SLOTS, Journal
from dpcfl_net.privacy.ledger.ledger_folder import is_new, lock
from dpcfl_net.privacy.ledger.release_store import RELEASES, ReleaseStore, Stored, recent_rounds, seal_state


@dataclass(frozen=True)
class Charged:
    """A debited request without a stored result.

    Attributes:
        sequence: Number of the debit's line.
        key: Secret of 32 bytes, from which all randomness of the request is derived.
        answered: Hash of the result, as `Stored.digest`, if the request was answered and is to be computed again; "" if it was
            never answered.
    """

    sequence: int
    key: bytes = field(repr=False)
    answered: str = ""


@dataclass(frozen=True)
class Expired:
    """A request whose result is no longer stored."""


class Ledger:
    """The ledger in a folder, locked for this process until `close`.

    Args:
        folder: Folder of the ledger, created if missing.
        owner: Run, job and client; written in the first line and compared at each opening.
        durable: False skips the flushes only.

    Attributes:
        folder: The folder.
        is_new: True if there was no ledger in the folder.

    Raises:
        LedgerError: "ledger-locked", "ledger-rolled-back", "ledger-broken" or "ledger-foreign".
    """

    def __init__(self, folder: Path, *, owner: Mapping[str, Any], durable: bool = True) -> None:
        self.folder, self.is_new = Path(folder), False
        self._disk = Disk(durable)
        self._append_fd = self._lock = -1
        self._journal: Journal | None = None
        self._usable = False
        self._disk.make_folder(self.folder)
        self._disk.make_folder(self.folder / RELEASES)
        self._lock = lock(self.folder)
        try:
            self._open(dict(owner))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Flush the files and release the lock; no other method may be called afterwards."""
        usable, self._usable = self._usable, False
        try:
            with ExitStack() as stack:
                for fd in (self._lock, self._append_fd):
                    if fd >= 0:
                        stack.callback(os.close, fd)
                self._lock = -1
                if self._journal is not None:
                    stack.callback(self._journal.close)
                if usable:
                    with naming(self.folder):
                        self._flush_lines()
        finally:  # closed again after an error, it would close descriptors that others have opened since
            self._append_fd, self._journal = -1, None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, the header first."""
        return tuple(self._entries)

    def charges(self, job: str) -> list[Entry]:
        """List the charges of `job`, in order: debits, and charges for truncated lines."""
        return self._history.charges(job)

    def spent(self, job: str) -> dict[str, int]:
        """Count the spent slots of `job`, by name."""
        return self._history.after(job, ())

    def lookup(self, request: str) -> Stored | Charged | Expired | None:
        """Look up a request.

        Args:
            request: Request id.

        Returns:
            Its stored result; `Charged` if it was debited and its result is not stored; `Expired` if its result can be had no
            more; None if it was never debited.

        Raises:
            LedgerError: "ledger-broken" if its result was changed; "ledger-closed" after `close` or a failed write.
        """
        self._check_usable()  # a charge whose write has failed may be on the device or not
        entry = self._history.debits.get(request)
        if entry is None:
            return None
        stored = self._releases.get(entry.sequence)
        if stored is not None:
            return stored
        found = self._open_journal.key(entry.sequence)
        return Expired() if found is None else Charged(entry.sequence, *found)

    def debit(
        self,
        *,
        job: str,
        request: str,
        round: int,
        kind: str,
        slots: Sequence[str],
        events: Sequence[Event],
        key: bytes | None = None,
    ) -> Charged:
        """Charge all slots of a request, durably. Data may be touched once this returns.

        Args:
            job: Hash of the signed protocol.
            request: Request id.
            round: Round of the request.
            kind: Client step.
            slots: Names of the slots.
            events: Event of each slot.
            key: Secret of 32 bytes, only for seeded runs; None draws it from the operating system.

        Returns:
            The charge, with its key.

        Raises:
            LedgerError: "ledger-closed" after `close` or a failed write.
            ValueError: If the request was charged before, or the key does not have 32 bytes.
        """
        secret = os.urandom(KEY_BYTES) if key is None else key
        if len(secret) != KEY_BYTES:
            raise ValueError(f"key must have {KEY_BYTES} bytes, got {len(secret)}")
        entry = Entry(
            self._next,
            "debit",
            job=job,
            round=round,
            kind=kind,
            id=request,
            slots=tuple(slots),
            events=tuple(events),
            spent=self._history.after(job, slots),
        )
        self._enter(entry, secret)
        return Charged(entry.sequence, secret)

    def store(
        self,
        sequence: int,
        answer: Stored,
        state: bytes | memoryview | None = None,
        *,
        repeatable: bool = False,
        before_final: Callable[[], None] | None = None,
    ) -> Stored:
        """Make the result of a debit final, durably. It may be sent once this returns.

        Args:
            sequence: Number of the debit's line.
            answer: The result.
            state: Client state after the request; None if there is none.
            repeatable: True if the result is to be computed again rather than stored; it is stored all the same if it comes with
                a new state.
            before_final: Called before the result is final: a crash until it returns leaves the debit without a result. None: the
                result is final at once.

        Returns:
            The result.

        Raises:
            LedgerError: "ledger-closed" after `close` or a failed write.
            ValueError: If the line is not a debit, or has a stored result.
        """
        entry = self._entries[sequence]
        if entry.type != "debit" or sequence in self._releases:
            raise ValueError(f"entry {sequence} is not a debit without a result")
        if repeatable and state is not None:
            repeatable = seal_state(state) == self._releases.state_seal(entry.job)
        with self._writing():
            key = self._open_journal.key(sequence)
            if repeatable and key is not None:
                if before_final is not None:
                    before_final()
                self._open_journal.mark(sequence, answer.digest())
            else:
                # With a mark the debit counts as answered: a file that a crash cut short would pass for an edited one.
                marked = key is not None and bool(key[1])
                self._releases.put(entry, answer, state, atomically=marked, before_final=before_final)
                self._open_journal.erase(sequence)
            self._prune(entry.job)
        return answer

    def erase_answered(self, job: str) -> None:
        """Erase the keys of answered requests of `job` whose results are not stored; they are `Expired` then.

        Args:
            job: Hash of the signed protocol.

        Raises:
            LedgerError: "ledger-closed" after `close` or a failed write.
        """
        with self._writing():
            for sequence in self._open_journal.with_key(answered=True):
                if self._entries[sequence].job == job:
                    self._open_journal.erase(sequence)

    def state(self, job: str, before: int | None = None) -> bytes | None:
        """Read the newest client state of `job`, or the newest before the debit with number `before`; None before the first."""
        return self._releases.state(job, before)

    def truncated(self, job: str) -> list[Entry]:
        """List the truncated lines of `job` that have no charge yet."""
        return [entry for entry in self._history.truncated.values() if entry.job == job]

    def charge_truncated(self, truncated: Entry, slots: Sequence[str], events: Sequence[Event]) -> None:
        """Charge a truncated line and close its round.

        Args:
            truncated: An entry of `truncated`.
            slots: Names of the slots to charge.
            events: Event of each slot.

        Raises:
            LedgerError: "ledger-closed" after `close` or a failed write.
            ValueError: If the line is not truncated, or was charged before.
        """
        spent = self._history.after(truncated.job, slots)
        self._enter(
            Entry(
                self._next,
                "closed",
                job=truncated.job,
                round=truncated.round,
                torn=truncated.sequence,
                slots=tuple(slots),
                events=tuple(events),
                spent=spent,
            )
        )

    @property
    def _next(self) -> int:
        return len(self._entries)

    @property
    def _open_journal(self) -> Journal:
        if self._journal is None:
            raise LedgerError("ledger-closed", "the ledger is closed: open it again")
        return self._journal

    def _open(self, owner: dict[str, Any]) -> None:
        header = Entry(0, "header", owner=json.loads(canonical_json(owner)))
        names, results = os.listdir(self.folder), os.listdir(self.folder / RELEASES)
        if any(name.endswith(DRAFT) for name in names):
            remove_drafts(self.folder)
        if any(name.endswith(DRAFT) for name in results):
            remove_drafts(self.folder / RELEASES)
            results = os.listdir(self.folder / RELEASES)
        self.is_new = is_new(names, results)
        if self.is_new:
            chain = self._created(header)
        else:
            chain = read_chain(self.folder)
            if not chain.closed:  # a killed process may have left charges and results that the device does not hold yet
                self._disk.sync_tree(self.folder)
                chain = read_chain(self.folder)  # after a failed flush the system may have gone back to what the device held
        if chain.entries[0].owner != header.owner:
            there, here = (
                ", ".join(f"{key} {value}" for key, value in sorted(each.items()))
                for each in (chain.entries[0].owner, header.owner)
            )
            raise LedgerError("ledger-foreign", f"{self.folder / LINES} belongs to {there}; it must belong to {here}")
        if chain.image is None:
            if chain.copied or results:
                raise broken(f"{self.folder / JOURNAL} is missing")
            chain = replace(chain, image=Journal.create(self.folder / JOURNAL, self._disk, chain.entries[0], chain.last))
        assert chain.image is not None
        if chain.ahead:
            raise broken(f"{self.folder / LINES} continues after the last line that {self.folder / JOURNAL} holds")
        self._journal = Journal(self.folder / JOURNAL, self._disk, chain.image)
        self._entries, self._head, self._history = list(chain.entries), digest(chain.last), History()
        for entry in self._entries:
            self._history.add(entry)
        self._append_fd = os.open(self.folder / LINES, os.O_WRONLY | os.O_APPEND)
        with naming(self.folder):
            os.ftruncate(self._append_fd, chain.kept)
            write_all(self._append_fd, chain.unwritten)
        self._usable = True
        self._recover(chain)

    def _created(self, header: Entry) -> Chain:
        """Write the first line of a new ledger."""
        line = header.line(FIRST_PREV)
        self._disk.replace(self.folder / LINES, line)
        return Chain([header], line, len(line), b"", None, False, False)

    def _recover(self, chain: Chain) -> None:
        """Enter a line that a crash cut short as "torn", and erase keys whose debit has a stored result."""
        journal, begun = self._open_journal, chain.image.begun if chain.image else None
        if begun is not None and begun["type"] in ("debit", "torn"):
            self._enter(Entry(self._next, "torn", **{name: begun[name] for name in ("job", "round", "kind", "id")}))
        self._releases = ReleaseStore(self.folder / RELEASES, self._disk, self._entries, journal.with_key(answered=False))
        self._check_results()
        self._releases.remove_cut()
        for sequence in (*journal.with_key(answered=False), *journal.with_key(answered=True)):
            if sequence in self._releases:
                journal.erase(sequence)
        for job in {entry.job for entry in self._history.debits.values()}:
            self._prune(job)

    def _check_results(self) -> None:
        """Raise LedgerError if a recent result is missing: an older client state would pass for the newest one."""
        slots = self._open_journal.image.slots
        # The key of a stored result may be back after a crash, when the results of older rounds have been overwritten already.
        pending = [n for n in self._open_journal.with_key(answered=False) if n not in self._releases]
        answered = [entry for n, entry in enumerate(self._entries) if n in slots and n not in pending and entry.type == "debit"]
        for job in {entry.job for entry in answered}:
            mine = [entry for entry in answered if entry.job == job]
            kept = recent_rounds(entry.round for entry in mine)
            for entry in mine:
                # With a mark it was answered and is not stored: its key may be erased at the end of the run.
                erased = slots[entry.sequence].key is None and not slots[entry.sequence].answered
                if erased and entry.round in kept and entry.sequence not in self._releases:
                    raise broken(f"{self.folder / RELEASES}: the result of entry {entry.sequence} is missing or damaged")

    def _enter(self, entry: Entry, key: bytes | None = None) -> None:
        """Add an entry: durably to the journal, then to ledger.jsonl."""
        self._check_usable()
        line = entry.line(self._head)
        self._history.add(entry)
        with self._writing():
            if entry.sequence - SLOTS > self._open_journal.image.synced:
                self._flush_lines()
            self._open_journal.put(entry, line, key)
            write_all(self._append_fd, line)
            self._entries.append(entry)
            self._head = digest(line)

    def _flush_lines(self) -> None:
        """Flush ledger.jsonl, and note it in the journal."""
        if self._open_journal.image.synced < self._next - 1:
            self._disk.sync(self._append_fd)
            self._open_journal.set_synced(self._next - 1)

    def _prune(self, job: str) -> None:
        """Forget results that are no longer kept, and erase the keys of results that are no longer to be computed again."""
        rounds = {n: self._entries[n].round for n in self._open_journal.with_key(answered=True) if self._entries[n].job == job}
        for sequence in self._releases.prune(job, rounds):
            self._open_journal.erase(sequence)

    def _check_usable(self) -> None:
        if not self._usable:
            raise LedgerError("ledger-closed", "the ledger is closed, or a write to it failed: open it again")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """After an error inside, the files are ahead of this object: the ledger must be opened again."""
        self._check_usable()
        self._usable = False
        with naming(self.folder):
            yield
        self._usable = True
