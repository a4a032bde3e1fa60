"""Lines of a privacy ledger: fields, canonical form, and verification of the hash chain."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.events.base import Event, read_event

EntryType = Literal["header", "debit", "torn", "closed"]
FIRST_PREV = "0" * 64
FORMAT = 1
FIELDS: dict[str, tuple[str, ...]] = {
    "header": ("owner", "format"),
    "debit": ("job", "round", "kind", "id", "slots", "events", "spent"),
    "torn": ("job", "round", "kind", "id"),
    "closed": ("job", "round", "torn", "slots", "events", "spent"),
}


@dataclass(frozen=True)
class Entry:
    """One line of a ledger. The names of its fields and types are the recorded format.

    Attributes:
        sequence: Number of the line, from 0.
        type: "header", the owner; "debit", the charges of one request; "torn", a line that a crash truncated; "closed", the
            charge for a truncated line, whose round accepts no more requests.
        job: Hash of the signed protocol.
        round: Round of the request.
        kind: Client step of the request.
        id: Request id.
        slots: Names of the charged slots.
        events: Event of each charged slot.
        spent: Number of charged slots of `job` up to this line, by name.
        torn: Of a "closed" line, the number of the truncated line.
        owner: Of a header, the run, job and client.
        format: Version of the format.
    """

    sequence: int
    type: EntryType
    job: str = ""
    round: int = 0
    kind: str = ""
    id: str = ""
    slots: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    spent: Mapping[str, int] = field(default_factory=dict)
    torn: int = 0
    owner: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def line(self, prev: str) -> bytes:
        """Encode the entry.

        Args:
            prev: sha256 of the line before, in hex.

        Returns:
            The canonical line, with its newline.
        """
        fields = {name: getattr(self, name) for name in FIELDS[self.type]}
        if self.events:
            fields["events"] = [event.as_json() for event in self.events]
        return canonical_json({"sequence": self.sequence, "type": self.type, "prev": prev, **fields}) + b"\n"


def digest(line: bytes) -> str:
    """Compute the sha256 of a line with its newline, in hex."""
    return hashlib.sha256(line).hexdigest()


def split_lines(content: bytes) -> tuple[list[bytes], bytes]:
    """Split a file into complete lines, each with its newline, and the bytes after the last newline."""
    *lines, tail = content.split(b"\n")
    return [line + b"\n" for line in lines], tail


def counter_line(number: int, written: str) -> bytes:
    """Encode the content of a counter file: number and digest of the last line."""
    return f"{number} {written}\n".encode()


def read_counter(content: bytes) -> tuple[int, str] | None:
    """Decode `counter_line`; None for other content."""
    match = re.fullmatch(rb"(0|[1-9][0-9]{0,17}) ([0-9a-f]{64})\n", content)
    return None if match is None else (int(match[1]), match[2].decode())


def broken(where: str) -> LedgerError:
    """Error "ledger-broken" for a ledger whose content was changed."""
    return LedgerError("ledger-broken", f"{where}; the privacy ledger was edited or damaged, and no run can continue from it")


def verify_lines(lines: Sequence[bytes], where: str) -> list[Entry]:
    """Decode and verify the lines of a ledger.

    Checks canonical form, numbers from 0, the hash chain, one header, that no request id and no (job, round, kind) is charged
    twice, that `spent` adds up, and that a truncated line is closed at most once.

    Args:
        lines: Complete lines, each with its newline.
        where: Name of the file, for the error.

    Returns:
        One entry per line.

    Raises:
        LedgerError: "ledger-broken", naming the first wrong line.
    """
    entries: list[Entry] = []
    prev = FIRST_PREV
    seen = History()
    for number, line in enumerate(lines):
        try:
            entry = _parse(line, prev)
            if entry.sequence != number or (entry.type == "header") != (number == 0):
                raise ValueError(f"sequence {entry.sequence}, type {entry.type}")
            seen.add(entry)
        except (ValueError, TypeError, KeyError, RecursionError) as problem:
            raise broken(f"{where}, line {number}: {problem}") from problem
        entries.append(entry)
        prev = digest(line)
    return entries


class History:
    """State of a ledger after its entries so far; decides which entry may follow.

    Attributes:
        spent: Charged slots of each job, by name.
        debits: Debits by request id.
        truncated: Truncated lines without a charge, by number.
    """

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, int]] = {}
        self.debits: dict[str, Entry] = {}
        self.truncated: dict[int, Entry] = {}
        self._requests: set[tuple[str, int, str]] = set()
        self._charges: dict[str, list[Entry]] = {}

    def after(self, job: str, slots: Iterable[str]) -> dict[str, int]:
        """Count the slots of `job` that are spent after `slots` are charged too."""
        total = dict(self.spent.get(job, {}))
        for name in slots:
            total[name] = total.get(name, 0) + 1
        return total

    def add(self, entry: Entry) -> None:
        """Add the next entry.

        Args:
            entry: The entry.

        Raises:
            ValueError: If it cannot follow the entries so far.
        """
        if entry.type == "debit":
            request = (entry.job, entry.round, entry.kind)
            if entry.id in self.debits or request in self._requests:
                raise ValueError(f"round {entry.round} {entry.kind} is charged a second time")
            self._charge(entry)
            self.debits[entry.id] = entry
            self._requests.add(request)
        elif entry.type == "closed":
            truncated = self.truncated.get(entry.torn)
            if truncated is None or (truncated.job, truncated.round) != (entry.job, entry.round):
                raise ValueError(f"line {entry.torn} is not a truncated line without a charge")
            self._charge(entry)
            del self.truncated[entry.torn]
        elif entry.type == "torn":
            self.truncated[entry.sequence] = entry

    def _charge(self, entry: Entry) -> None:
        total = self.after(entry.job, entry.slots)
        if len(entry.slots) != len(entry.events) or total != entry.spent:
            raise ValueError("slots, events and spent do not agree")
        self.spent[entry.job] = total
        self._charges.setdefault(entry.job, []).append(entry)

    def charges(self, job: str) -> list[Entry]:
        """List the debits of `job` and the charges for its truncated lines, in order; the list grows with the ledger."""
        return self._charges.get(job, [])


def _parse(line: bytes, prev: str) -> Entry:
    document = json.loads(line)
    if not isinstance(document, dict) or document.get("type") not in FIELDS:
        raise ValueError("not an entry")
    fields = FIELDS[document["type"]]
    if set(document) != {"sequence", "type", "prev", *fields}:
        raise ValueError("wrong fields")
    values = {name: _rich(name, document[name]) for name in fields}
    entry = Entry(sequence=document["sequence"], type=document["type"], **values)
    if entry.format != FORMAT or entry.line(prev) != line:
        raise ValueError("not in canonical form, or its hash is not that of the line before")
    return entry


def _rich(name: str, value: Any) -> Any:
    if name == "events":
        return tuple(read_event(item) for item in value)
    if name == "slots":
        return tuple(value)
    return value
