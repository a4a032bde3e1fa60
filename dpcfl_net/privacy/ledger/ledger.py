"""Privacy ledger of one client: durable debits before data is touched, one random draw per charge, across crashes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import remove_drafts
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.files import read_bytes
from dpcfl_net.core.locks import try_lock
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import (
    FIRST_PREV,
    Entry,
    History,
    broken,
    counter_line,
    digest,
    read_counter,
    split_lines,
    verify_lines,
)
from dpcfl_net.privacy.ledger.release_store import Keys, ReleaseStore, Stored

LINES, COUNTER = "ledger.jsonl", "counter"
KEY_BYTES = 32


@dataclass(frozen=True)
class Charged:
    """A request that was debited and has no result yet.

    Attributes:
        sequence: Number of the debit's line.
        key: Secret of 32 bytes, from which all randomness of the request is derived.
    """

    sequence: int
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Expired:
    """A request whose result is no longer stored."""


class Ledger:
    """The ledger in a folder, locked for this process until `close`.

    Files: ledger.jsonl (a hash chain of `Entry` lines), counter (the last number and its line's hash), keys/ (one private
    key for each debit without a result), releases/ (results of the last two rounds, each with the client state after it).

    Args:
        folder: Folder of the ledger, created if missing.
        owner: Run, job and client; written in the first line and compared at each opening.
        durable: False skips fsync only.

    Raises:
        LedgerError: "ledger-locked", "ledger-rolled-back", "ledger-broken" or "ledger-foreign".
    """

    def __init__(self, folder: Path, *, owner: Mapping[str, Any], durable: bool = True) -> None:
        self.folder = Path(folder)
        self._disk = Disk(durable)
        self._keys = Keys(self.folder / "keys", self._disk)
        self._make_folders()
        self._lock = _lock(self.folder)
        self._append_fd = -1
        self._usable = True
        try:
            self._open(dict(owner))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock; no other method may be called afterwards."""
        for fd in (self._append_fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._append_fd = self._lock = -1

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

    def spent(self, job: str) -> Counter[str]:
        """Count the spent slots of `job`, by name."""
        return self._history.after(job, ())

    def lookup(self, request: str) -> Stored | Charged | Expired | None:
        """Look up a request.

        Args:
            request: Request id.

        Returns:
            Its stored result; `Charged` if it was debited and has no result; `Expired` if its result is no longer stored; None
            if it was never debited.

        Raises:
            LedgerError: "ledger-broken" if its key or result was changed.
        """
        entry = self._history.debits.get(request)
        if entry is None:
            return None
        answer = self._releases.get(entry.sequence)
        if answer is not None:
            return answer
        note = self._keys.get(entry.sequence)
        if note is None:
            return Expired()
        if (note["job"], note["round"], note["kind"], note["id"]) != (entry.job, entry.round, entry.kind, request):
            raise broken(f"the key of entry {entry.sequence}")
        return Charged(entry.sequence, bytes.fromhex(note["key"]))

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

        The key is on disk before the line, and the line before the counter.

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
        self._check_usable()
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
            spent=dict(self._history.after(job, slots)),
        )
        line = entry.line(self._head)
        self._history.add(entry)
        note = {"job": job, "round": round, "kind": kind, "id": request, "key": secret.hex()}
        with self._writing():
            self._keys.put(entry.sequence, note)
            self._disk.append(self._append_fd, line)
            self._disk.sync_folder(self.folder)
            self._advance(entry, line)
        return Charged(entry.sequence, secret)

    def store(self, sequence: int, answer: Stored, state: bytes | None = None) -> Stored:
        """Store the result of a debit atomically and erase its key.

        Args:
            sequence: Number of the debit's line.
            answer: The result.
            state: Client state after the request; None if it is unchanged.

        Returns:
            The result.

        Raises:
            LedgerError: "ledger-closed" after `close` or a failed write.
            ValueError: If the line is not a debit, or has a result.
        """
        entry = self._entries[sequence]
        if entry.type != "debit" or sequence in self._releases:
            raise ValueError(f"entry {sequence} is not a debit without a result")
        with self._writing():
            self._releases.put(entry, answer, state)
            self._keys.erase(sequence)
            self._releases.prune(entry.job)
        return answer

    def state(self, job: str) -> bytes | None:
        """Read the newest client state of `job`; None before the first."""
        return self._releases.state(job)

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
        spent = dict(self._history.after(truncated.job, slots))
        self._rewrite(
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

    def _check_usable(self) -> None:
        if self._lock < 0 or not self._usable:
            raise LedgerError("ledger-closed", "the ledger is closed, or a write to it failed: open it again")

    def _make_folders(self) -> None:
        for folder in (self.folder, self.folder / "keys", self.folder / "releases"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._disk.sync_folder(self.folder)
        self._disk.sync_folder(self.folder.parent)

    def _open(self, owner: dict[str, Any]) -> None:
        remove_drafts(self.folder)
        path = self.folder / LINES
        if not path.exists() and not any((self.folder / name).exists() for name in (COUNTER, *_kept(self.folder))):
            self._disk.replace(path, Entry(0, "header", owner=owner).line(FIRST_PREV))
        lines, self._entries, tail = _read(self.folder)
        if self._entries[0].owner != json.loads(canonical_json(owner)):
            raise LedgerError("ledger-foreign", f"{path} belongs to {dict(self._entries[0].owner)}, not to {owner}")
        self._head = digest(lines[-1])
        self._history = History()
        for entry in self._entries:
            self._history.add(entry)
        self._write_counter()
        self._open_for_append()
        if tail:
            self._mark_truncated()
        self._releases = ReleaseStore(self.folder / "releases", self._disk, self._entries)
        self._keys.erase_all_but([e.sequence for e in self._history.debits.values() if e.sequence not in self._releases])

    def _mark_truncated(self) -> None:
        """Replace an unterminated last line by a "torn" entry; only debits are appended, and their keys are written first."""
        note = self._keys.get(self._next)
        if note is None:
            raise broken(f"{self.folder / LINES}: the last line is truncated, and no debit was in progress")
        self._rewrite(Entry(self._next, "torn", job=note["job"], round=note["round"], kind=note["kind"], id=note["id"]))

    def _rewrite(self, entry: Entry) -> None:
        """Add an entry other than a debit by replacing the whole file, so that it is never truncated."""
        self._check_usable()
        self._history.add(entry)
        path = self.folder / LINES
        complete, _ = split_lines(path.read_bytes())
        line = entry.line(self._head)
        with self._writing():
            self._disk.replace(path, *complete, line)
            self._open_for_append()
            self._advance(entry, line)

    def _open_for_append(self) -> None:
        if self._append_fd >= 0:
            os.close(self._append_fd)
        self._append_fd = os.open(self.folder / LINES, os.O_WRONLY | os.O_APPEND)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """After an error inside, the files are ahead of this object: the ledger must be opened again."""
        self._check_usable()
        self._usable = False
        yield
        self._usable = True

    def _advance(self, entry: Entry, line: bytes) -> None:
        self._entries.append(entry)
        self._head = digest(line)
        self._write_counter()

    def _write_counter(self) -> None:
        self._disk.replace(self.folder / COUNTER, counter_line(self._next - 1, self._head))


def read_ledger(folder: Path) -> list[Entry]:
    """Read and verify a ledger without its lock and without changing it.

    Args:
        folder: Folder of the ledger.

    Returns:
        Its entries. An unterminated last line (a debit being written, or truncated by a crash) is left out.

    Raises:
        LedgerError: "ledger-rolled-back" or "ledger-broken".
    """
    _, entries, _ = _read(Path(folder))
    return entries


def _read(folder: Path) -> tuple[list[bytes], list[Entry], bytes]:
    path, counter_path = folder / LINES, folder / COUNTER
    # The counter before the lines: a ledger in use may grow in between.
    content = read_bytes(counter_path) if counter_path.exists() else b""
    lines, tail = split_lines(read_bytes(path) if path.exists() else b"")
    entries = verify_lines(lines, str(path))
    if not content and len(lines) == 1 and not tail:
        return lines, entries, tail
    counter = read_counter(content)
    if counter is None:
        raise broken(f"{counter_path} is missing or unreadable")
    number, written = counter
    if number >= len(lines):
        raise LedgerError("ledger-rolled-back", f"{path} holds {len(lines)} lines, {number + 1} were written before")
    if digest(lines[number]) != written:
        raise broken(f"{path}, line {number}: not the line that was written")
    return lines, entries, tail


def _kept(folder: Path) -> list[str]:
    return [f"{name}/{path.name}" for name in ("keys", "releases") for path in (folder / name).iterdir()]


def _lock(folder: Path) -> int:
    handle = try_lock(folder / "lock")
    if handle is None:
        raise LedgerError("ledger-locked", f"another process holds the privacy ledger in {folder}")
    return handle
