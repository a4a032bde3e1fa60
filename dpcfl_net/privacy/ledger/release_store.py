"""Private keys of debits without a result, and the store of recent results and client states."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import Entry, broken

KEPT_ROUNDS = 2

Status = Literal["release", "lost", "refused"]


@dataclass(frozen=True)
class Stored:
    """Final result of a request; a repeated request gets the same bytes.

    Attributes:
        status: "release", "lost" (its randomness is gone) or "refused".
        release: Packed tensors.
        code: Code of a refusal.
        reason: Reason of a refusal.
    """

    status: Status
    release: bytes = b""
    code: str = ""
    reason: str = ""


class Keys:
    """Keys of debits and their requests, in keys/<sequence>.key with mode 0600, written before the debit's line."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk

    def put(self, sequence: int, note: dict[str, Any]) -> None:
        """Write a key durably.

        Args:
            sequence: Number of the line of the debit.
            note: job, round, kind, id and key (hex).
        """
        self._disk.replace(self._path(sequence), canonical_json(note))

    def get(self, sequence: int) -> dict[str, Any] | None:
        """Read a key.

        Args:
            sequence: Number of the debit's line.

        Returns:
            The note written by `put`; None if there is none.

        Raises:
            LedgerError: "ledger-broken" if the file is damaged.
        """
        path = self._path(sequence)
        try:
            note = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as problem:
            raise broken(str(path)) from problem
        if not isinstance(note, dict) or set(note) != {"job", "round", "kind", "id", "key"}:
            raise broken(str(path))
        return note

    def erase(self, sequence: int) -> None:
        """Overwrite and remove a key."""
        self._disk.erase(self._path(sequence))

    def erase_all_but(self, sequences: Collection[int]) -> None:
        """Erase all keys but those of `sequences`: a crash may leave keys of debits with a result, or of debits never written."""
        needed = {self._path(sequence).name for sequence in sequences}
        for path in sorted(self._folder.iterdir()):
            if path.name not in needed:
                self._disk.erase(path)

    def _path(self, sequence: int) -> Path:
        return self._folder / f"{sequence:08d}.key"


class ReleaseStore:
    """Results in releases/<sequence>.answer: one line of JSON, then the client state after the task, then the release.

    Args:
        folder: Folder of the results.
        disk: Writes the files.
        entries: Entries of the ledger.

    Raises:
        LedgerError: "ledger-broken" for a file that belongs to no debit of `entries` or whose bytes changed.
    """

    def __init__(self, folder: Path, disk: Disk, entries: Sequence[Entry]) -> None:
        self._folder, self._disk = folder, disk
        self._headers: dict[int, dict[str, Any]] = {}
        for path in sorted(folder.iterdir()):
            if path.suffix == ".answer":
                header = self._read_header(path, entries)
                self._headers[header["sequence"]] = header
            else:
                disk.remove(path)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._headers

    def put(self, entry: Entry, answer: Stored, state: bytes | None) -> None:
        """Write the result of debit `entry` and the client state after it (None: unchanged), atomically."""
        header = {
            "sequence": entry.sequence,
            "job": entry.job,
            "round": entry.round,
            "id": entry.id,
            "status": answer.status,
            "code": answer.code,
            "reason": answer.reason,
            "state": None if state is None else _seal(state),
            "release": _seal(answer.release),
        }
        self._disk.replace(self._path(entry.sequence), canonical_json(header) + b"\n", state or b"", answer.release)
        self._headers[entry.sequence] = header

    def get(self, sequence: int) -> Stored | None:
        """Read the result of a debit; None if it has none or it is no longer stored."""
        header = self._headers.get(sequence)
        if header is None:
            return None
        return Stored(header["status"], self._section(header, "release"), header["code"], header["reason"])

    def state(self, job: str) -> bytes | None:
        """Read the newest client state of `job`; None before the first."""
        newest = self._newest_state(job)
        return None if newest is None else self._section(self._headers[newest], "state")

    def prune(self, job: str) -> None:
        """Remove the results of all but the last `KEPT_ROUNDS` rounds, never the newest state."""
        mine = {n: h["round"] for n, h in self._headers.items() if h["job"] == job}
        kept = sorted(set(mine.values()))[-KEPT_ROUNDS:]
        newest = self._newest_state(job)
        for sequence, answered in mine.items():
            if answered not in kept and sequence != newest:
                self._disk.remove(self._path(sequence))
                del self._headers[sequence]

    def _newest_state(self, job: str) -> int | None:
        return max((n for n, h in self._headers.items() if h["job"] == job and h["state"] is not None), default=None)

    def _path(self, sequence: int) -> Path:
        return self._folder / f"{sequence:08d}.answer"

    def _read_header(self, path: Path, entries: Sequence[Entry]) -> dict[str, Any]:
        try:
            with path.open("rb") as file:
                header: dict[str, Any] = json.loads(file.readline())
            entry = entries[header["sequence"]]
            expected = (self._path(entry.sequence), entry.id, entry.job, entry.round)
            if entry.type != "debit" or (path, header["id"], header["job"], header["round"]) != expected:
                raise ValueError("belongs to no debit")
        except (ValueError, TypeError, KeyError, IndexError) as problem:
            raise broken(f"{path}: {problem}") from problem
        return header

    def _section(self, header: dict[str, Any], section: Literal["state", "release"]) -> bytes:
        path = self._path(header["sequence"])
        with path.open("rb") as file:
            file.readline()
            if section == "release" and header["state"] is not None:
                file.seek(header["state"][0], os.SEEK_CUR)
            data = file.read(header[section][0])
        if _seal(data) != header[section]:
            raise broken(f"{path}, {section}")
        return data


def _seal(data: bytes) -> list[Any]:
    return [len(data), hashlib.sha256(data).hexdigest()]
