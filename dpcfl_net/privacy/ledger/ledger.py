"""The privacy ledger of one client: debits before data is touched, one draw for one charge, across crashes."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.files import read_bytes
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, Entry, History, broken, canonical, digest, verify_lines
from dpcfl_net.privacy.ledger.release_store import Keys, ReleaseStore, Stored

LINES, COUNTER = "ledger.jsonl", "counter"
KEY_BYTES = 32


@dataclass(frozen=True)
class Charged:
    """A request that was debited and has no answer yet; `key` is the one source of its randomness."""

    sequence: int
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Expired:
    """A request that was answered so long ago that its bytes are gone."""


class Ledger:
    """The ledger in `folder`, locked for this process until `close`.

    Files: ledger.jsonl (a hash chain of `Entry` lines), counter (the last number and its line's hash), keys/ (one private
    key for each unanswered debit), releases/ (answers of the last two rounds, each with the client state that it left).
    `owner` is written in the first line and must be the same at each opening: run, job and client. `durable=False` skips
    fsync only.

    Raises LedgerError with code ledger-locked, ledger-rolled-back, ledger-broken or ledger-foreign.
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
        """Let go of the lock; the ledger takes no further call."""
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
        """Every entry, the header first."""
        return tuple(self._entries)

    def charges(self, job: str) -> list[Entry]:
        """What `job` was charged, in order: debits, and the charges for lines that a crash cut."""
        return self._history.charges(job)

    def spent(self, job: str) -> Counter[str]:
        """Slots of `job` that are spent, by name."""
        return self._history.after(job, ())

    def lookup(self, request: str) -> Stored | Charged | Expired | None:
        """What became of a request id; None if it was never debited."""
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
        """Charge a request's whole bundle, durably; `key` (32 bytes) only for seeded runs, else from the operating system.

        The key is on disk before the line, the line before the counter: when this returns, data may be touched.
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
        """Keep the answer to debit `sequence` and the client state it left (None: unchanged), atomically; erase its key."""
        entry = self._entries[sequence]
        if entry.type != "debit" or sequence in self._releases:
            raise ValueError(f"entry {sequence} is no debit without an answer")
        with self._writing():
            self._releases.put(entry, answer, state)
            self._keys.erase(sequence)
            self._releases.prune(entry.job)
        return answer

    def state(self, job: str) -> bytes | None:
        """The newest client state of `job`; None before the first."""
        return self._releases.state(job)

    def torn(self, job: str) -> list[Entry]:
        """Cut lines of `job` that are not charged yet."""
        return [entry for entry in self._history.torn.values() if entry.job == job]

    def close_torn(self, torn: Entry, slots: Sequence[str], events: Sequence[Event]) -> None:
        """Charge `slots` for a cut line and close its round."""
        spent = dict(self._history.after(torn.job, slots))
        self._rewrite(
            Entry(
                self._next,
                "closed",
                job=torn.job,
                round=torn.round,
                torn=torn.sequence,
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
        path = self.folder / LINES
        if not path.exists() and not any((self.folder / name).exists() for name in (COUNTER, *_kept(self.folder))):
            self._disk.replace(path, Entry(0, "header", owner=owner).line(FIRST_PREV))
        lines, self._entries, tail = _read(self.folder)
        if self._entries[0].owner != json.loads(canonical(owner)):
            raise LedgerError("ledger-foreign", f"{path} belongs to {dict(self._entries[0].owner)}, not to {owner}")
        self._head = digest(lines[-1])
        self._history = History()
        for entry in self._entries:
            self._history.add(entry)
        self._write_counter()
        self._open_for_append()
        if tail:
            self._mark_torn()
        self._releases = ReleaseStore(self.folder / "releases", self._disk, self._entries)
        self._keys.erase_all_but([e.sequence for e in self._history.debits.values() if e.sequence not in self._releases])

    def _mark_torn(self) -> None:
        """Put a "torn" entry in place of an unterminated last line; only a debit is ever appended, and its key came first."""
        note = self._keys.get(self._next)
        if note is None:
            raise broken(f"{self.folder / LINES}: the last line is cut, and no debit was under way")
        self._rewrite(Entry(self._next, "torn", job=note["job"], round=note["round"], kind=note["kind"], id=note["id"]))

    def _rewrite(self, entry: Entry) -> None:
        """Add an entry that is no debit by replacing the whole file, so that it is never cut."""
        self._check_usable()
        self._history.add(entry)
        path = self.folder / LINES
        complete, _ = _split(path.read_bytes())
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
        """An error inside leaves the files ahead of this object: only opening the ledger again may go on."""
        self._check_usable()
        self._usable = False
        yield
        self._usable = True

    def _advance(self, entry: Entry, line: bytes) -> None:
        self._entries.append(entry)
        self._head = digest(line)
        self._write_counter()

    def _write_counter(self) -> None:
        self._disk.replace(self.folder / COUNTER, f"{len(self._entries) - 1} {self._head}\n".encode())


def read_ledger(folder: Path) -> list[Entry]:
    """The entries of a ledger, read without its lock and without changing a byte; chain and counter are verified.

    An unterminated last line (a debit being written, or cut by a crash) is no entry yet. Raises LedgerError as `Ledger` does.
    """
    _, entries, _ = _read(Path(folder))
    return entries


def _read(folder: Path) -> tuple[list[bytes], list[Entry], bytes]:
    path, told = folder / LINES, folder / COUNTER
    counter = read_bytes(told) if told.exists() else b""  # before the lines: a ledger in use may grow in between
    lines, tail = _split(read_bytes(path) if path.exists() else b"")
    entries = verify_lines(lines, str(path))
    if not counter and len(lines) == 1 and not tail:
        return lines, entries, tail
    match = re.fullmatch(rb"(0|[1-9][0-9]{0,17}) ([0-9a-f]{64})\n", counter)
    if match is None:
        raise broken(f"{folder / COUNTER} is missing or unreadable")
    number = int(match[1])
    if number >= len(lines):
        raise LedgerError("ledger-rolled-back", f"{path} holds {len(lines)} lines, {number + 1} were written before")
    if digest(lines[number]) != match[2].decode():
        raise broken(f"{path}, line {number}: not the line that was written")
    return lines, entries, tail


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Complete lines, each with its newline, and what follows the last newline."""
    *lines, tail = content.split(b"\n")
    return [line + b"\n" for line in lines], tail


def _kept(folder: Path) -> list[str]:
    return [f"{name}/{path.name}" for name in ("keys", "releases") for path in (folder / name).iterdir()]


def _lock(folder: Path) -> int:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as problem:
        os.close(fd)
        raise LedgerError("ledger-locked", f"another process holds the privacy ledger in {folder}") from problem
    return fd
