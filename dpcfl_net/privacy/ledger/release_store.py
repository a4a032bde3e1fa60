"""Store of recent results and client states, in a few files that are overwritten in place."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.payload_hash import payload_hash
from dpcfl_net.core.tensors import head
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import Entry, broken
from dpcfl_net.privacy.ledger.journal import JOURNAL, read_journal

RELEASES = "releases"  # in the folder of a ledger
KEPT_ROUNDS = 2
MOST_HEADER = 1 << 16  # bytes of a file's first line
MOST_BYTES = 1 << 40  # of a state or release, above those of any model

Status = Literal["release", "lost", "refused"]
Header = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """Final result of a request; a repeated request gets the same bytes.

    Attributes:
        status: "release", "lost" (its randomness is gone) or "refused".
        release: Packed tensors.
        code: Code of a refusal.
        reason: Reason of a refusal.
        payload: Bytes at the end of the release whose hash is known.
        blake3: That hash, hex; "" if none is known.
    """

    status: Status
    release: bytes | memoryview = b""
    code: str = ""
    reason: str = ""
    payload: int = 0
    blake3: str = ""

    def seal(self) -> list[Any]:
        """Return the release's length and hashes; the payload's known hash is not computed again."""
        head = memoryview(self.release)[: len(self.release) - self.payload]
        return [len(self.release), self.payload, hashlib.sha256(head).hexdigest(), self.blake3]

    def digest(self) -> str:
        """Compute the hash of the whole result, hex."""
        return _digest(self.status, self.code, self.reason, self.seal())


class ReleaseStore:
    """Results in releases/<k>.answer: one line of JSON, then the client state after the task, then the release.

    A file whose result is no longer kept is overwritten by the next one, so that no flush of a folder is needed.

    Args:
        folder: Folder of the results.
        disk: Writes the files.
        entries: Entries of the ledger.
        pending: Debits that have no result as far as the journal knows: a crash may have cut theirs.

    Raises:
        LedgerError: "ledger-broken" for a file that belongs to no debit of `entries`, and for more damaged files than crashes can
            have left, one for each debit of `pending`.
    """

    def __init__(self, folder: Path, disk: Disk, entries: Sequence[Entry], pending: Collection[int]) -> None:
        self._folder, self._disk = folder, disk
        self._headers: dict[int, Header] = {}
        self._files: dict[int, Path] = {}  # file of each kept result
        self._free: list[Path] = []
        self._cut: list[Path] = []
        damaged = []
        for path in sorted(folder.glob("*.answer")):
            header = _read_header(path, entries)
            if header is None:
                damaged.append(path)
            if header is None or (header["sequence"] in pending and not _intact(path, header)):
                self._cut.append(path)
            else:
                self._headers[header["sequence"]], self._files[header["sequence"]] = header, path
        cut = sum(sequence not in self._headers for sequence in pending)  # by crashes, at most
        if len(self._cut) > cut:
            names = " and ".join(path.name for path in damaged or self._cut)
            raise broken(
                f"{folder}, {names}: the first line is damaged" + (f"; a crash can have cut {cut}, not all" if cut else "")
            )

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._headers

    def remove_cut(self) -> None:
        """Remove, durably, the files whose write a crash cut short: their debits will not be pending for ever."""
        for path in self._cut:
            path.unlink()
        if self._cut:
            self._disk.sync_folder(self._folder)
        self._cut.clear()

    def put(
        self,
        entry: Entry,
        answer: Stored,
        state: bytes | memoryview | None,
        *,
        atomically: bool = False,
        before_final: Callable[[], None] | None = None,
    ) -> None:
        """Write the result of a debit and the client state after it, durably.

        Args:
            entry: The debit.
            answer: Its result.
            state: The client state; None: unchanged.
            atomically: True if no crash may leave a part of the file, since the debit will not be pending.
            before_final: Called when the file is on the device but for its first line, without which it counts as cut by a crash.
        """
        header = {
            "sequence": entry.sequence,
            "job": entry.job,
            "round": entry.round,
            "id": entry.id,
            "status": answer.status,
            "code": answer.code,
            "reason": answer.reason,
            "state": None if state is None else seal_state(state),
            "release": answer.seal(),
        }
        line = canonical_json({**header, "check": _check(header)}) + b"\n"
        fresh = not self._free
        path = self._new_file() if fresh else self._free.pop()
        content = line, state or b"", answer.release
        if atomically:
            self._disk.replace(path, *content)
        elif before_final is None:
            self._overwrite(path, *content, is_new=fresh)
        else:
            self._overwrite(path, bytes(len(line)), *content[1:], is_new=fresh)
            before_final()
            self._overwrite(path, line)
        self._headers[entry.sequence], self._files[entry.sequence] = header, path

    def _overwrite(self, path: Path, *parts: bytes | memoryview, is_new: bool = False) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            self._disk.write_at(fd, 0, *parts)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        if is_new:
            self._disk.sync_folder(self._folder)

    def get(self, sequence: int) -> Stored | None:
        """Read the result of a debit; None if it has none or it is no longer stored."""
        header = self._headers.get(sequence)
        return None if header is None else _release(self._files[sequence], header)

    def state(self, job: str, before: int | None = None) -> bytes | None:
        """Read the newest client state of `job`; None before the first.

        Args:
            job: Hash of the signed protocol.
            before: Number of a debit: the state before it.
        """
        newest = self._newest_state(job, before)
        return None if newest is None else _state(self._files[newest], self._headers[newest])

    def state_seal(self, job: str) -> list[Any] | None:
        """Return length and hash of the newest client state of `job`, as `seal_state`; None before the first."""
        newest = self._newest_state(job)
        return None if newest is None else list(self._headers[newest]["state"])

    def prune(self, job: str, repeatable: Mapping[int, int]) -> list[int]:
        """Forget all results but those of the last `KEPT_ROUNDS` rounds, and the states that are still needed.

        Args:
            job: Hash of the signed protocol.
            repeatable: Round of each debit whose result can be computed again.

        Returns:
            The debits of `repeatable` that need not be repeated any more.
        """
        mine = {n: header["round"] for n, header in self._headers.items() if header["job"] == job}
        kept = recent_rounds([*mine.values(), *repeatable.values()])
        needed = {self._newest_state(job), *(self._newest_state(job, n) for n, t in repeatable.items() if t in kept)}
        for sequence, answered in mine.items():
            if answered not in kept and sequence not in needed:
                self._free.append(self._files.pop(sequence))
                del self._headers[sequence]
        return [sequence for sequence, answered in repeatable.items() if answered not in kept]

    def _new_file(self) -> Path:
        used = self._files.values()  # all files of the folder, since none is free
        names = (self._folder / f"{number}.answer" for number in itertools.count())
        return next(path for path in names if path not in used)

    def _newest_state(self, job: str, before: int | None = None) -> int | None:
        found = (n for n, header in self._headers.items() if header["job"] == job and header["state"] is not None)
        return max((n for n in found if before is None or n < before), default=None)


def recent_rounds(answered: Iterable[int]) -> list[int]:
    """Return the rounds whose results are kept.

    Args:
        answered: Rounds with a result, in any order.
    """
    return sorted(set(answered))[-KEPT_ROUNDS:]


def answers(folder: Path, entries: Sequence[Entry]) -> dict[int, str]:
    """Read the digests of the results that a ledger keeps, in releases/ or as marks in its journal.

    Args:
        folder: Ledger folder.
        entries: Entries of the ledger; results of later ones are left out.

    Returns:
        `Stored.digest` of each result, by number of its debit.
    """
    own = {entry.sequence: entry.id for entry in entries}
    image = read_journal(folder / JOURNAL)
    found = {n: slot.answered for n, slot in image.slots.items() if slot.answered and n in own} if image is not None else {}
    for path in (folder / RELEASES).glob("*.answer"):
        header = _read_first_line(path)
        if header is not None and own.get(header["sequence"]) == header["id"]:
            found[header["sequence"]] = _digest(header["status"], header["code"], header["reason"], header["release"])
    return found


def stored(folder: Path) -> set[int]:
    """Return the numbers of the debits whose results a folder holds, damaged files left out."""
    headers = (_read_first_line(path) for path in folder.glob("*.answer"))
    return {header["sequence"] for header in headers if header is not None}


def digest_of_release(rows: list[list[Any]], blake3: str) -> str:
    """Compute `Stored.digest` of a release from the header of its message.

    Args:
        rows: Rows of its tensors, as `core.tensors.describe` gives them.
        blake3: Hash of the bytes of all tensors, hex.
    """
    size = sum(row[3] for row in rows)
    before = head(rows, size)
    return _digest("release", "", "", [len(before) + size, size, hashlib.sha256(before).hexdigest(), blake3])


def seal_state(state: bytes | memoryview) -> list[Any]:
    """Return length and hash of a client state."""
    return [len(state), hashlib.sha256(state).hexdigest()]


def _digest(status: str, code: str, reason: str, seal: list[Any]) -> str:
    return hashlib.sha256(canonical_json([status, code, reason, seal])).hexdigest()


def _check(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(header)).hexdigest()


def _read_first_line(path: Path) -> Header | None:
    """Read the first line of a file; None if it is damaged."""
    try:
        with path.open("rb") as file:
            header: Header = json.loads(file.readline(MOST_HEADER))
        return header if header.pop("check") == _check(header) and _well_formed(header) else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def _well_formed(header: Header) -> bool:
    """Return True if the fields have their types: anyone can compute the check of others."""
    state, (size, payload, head, blake3) = header["state"], header["release"]
    numbers = [header["sequence"], header["round"], size, payload, *([] if state is None else state[:1])]
    texts = [header[name] for name in ("job", "id", "status", "code", "reason")] + [head, blake3]
    texts += [] if state is None else state[1:]
    return (
        all(type(number) is int and 0 <= number <= MOST_BYTES for number in numbers)
        and all(type(text) is str for text in texts)
        and payload <= size
        and (state is None or len(state) == 2)
    )


def _read_header(path: Path, entries: Sequence[Entry]) -> Header | None:
    """Read the first line of a file that must belong to a debit; None if it is damaged."""
    header = _read_first_line(path)
    if header is None:
        return None
    entry = entries[header["sequence"]] if header["sequence"] < len(entries) else None
    if entry is None or (entry.type, entry.id, entry.job, entry.round) != (
        "debit",
        header["id"],
        header["job"],
        header["round"],
    ):
        raise broken(f"{path}: belongs to no debit")
    return header


def _read(path: Path, header: Header, section: Literal["state", "release"]) -> bytes:
    with path.open("rb") as file:
        file.readline(MOST_HEADER)
        if section == "release" and header["state"] is not None:
            file.seek(header["state"][0], os.SEEK_CUR)
        size: int = header[section][0]
        return file.read(min(size, os.fstat(file.fileno()).st_size))  # of a longer one no memory is taken


def _state(path: Path, header: Header) -> bytes:
    state = _read(path, header, "state")
    if seal_state(state) != header["state"]:
        raise broken(f"{path}, state")
    return state


def _stored(path: Path, header: Header) -> Stored:
    """Read a result, with the hash of the payload that was read."""
    release, payload = _read(path, header, "release"), header["release"][1]
    known = payload_hash(memoryview(release)[len(release) - payload :]) if header["release"][3] else ""
    return Stored(header["status"], release, header["code"], header["reason"], payload, known)


def _release(path: Path, header: Header) -> Stored:
    stored = _stored(path, header)
    if stored.seal() != header["release"]:
        raise broken(f"{path}, release")
    return stored


def _intact(path: Path, header: Header) -> bool:
    whole = _read(path, header, "state") if header["state"] is not None else None
    return _stored(path, header).seal() == header["release"] and (whole is None or seal_state(whole) == header["state"])
