"""Ledgers of a run folder, read from docs/reference/run-folder.md alone; imports nothing of the package."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE_FIELDS = {
    "header": {"format", "owner"},
    "debit": {"job", "round", "kind", "id", "slots", "events", "spent"},
    "torn": {"job", "round", "kind", "id"},
    "closed": {"job", "round", "torn", "slots", "events", "spent"},
}
SLOTS, PAGE = 16, 4096
JsonMap = dict[str, Any]


@dataclass
class Report:
    """What a reader found.

    Attributes:
        problems: One sentence each; empty if the run holds.
        events: (ledger, round, task, event) of each charge of this job.
        releases: Releases received, as (client, round, task).
        records: Number of records of the transcript.
        signatures: Number of valid signatures of secure sums.
        notes: Facts that are no problem, such as a truncated last record.
    """

    problems: list[str] = field(default_factory=list)
    events: list[tuple[str, int, str, JsonMap]] = field(default_factory=list)
    releases: set[tuple[int, int, str]] = field(default_factory=set)
    records: int = 0
    signatures: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Journal:
    """Lines and marks by number, and the last line that ledger.jsonl surely holds."""

    synced: int
    lines: dict[int, bytes]
    marks: dict[int, str]


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_ledger(ledger: Path, job: str, run: str, report: Report) -> list[JsonMap]:
    """Steps 2 to 4: the chain, its end, and its charges; returns the debits of the job."""
    owner = {"run": run, "job": job}
    owner |= {"role": "curator"} if ledger.name == "curator" else {"client": int(ledger.name.removeprefix("client_"))}
    lines, debits = whole_lines(ledger), []
    previous, spent, torn, seen = "0" * 64, Counter[str](), {}, set()
    for number, line in enumerate(lines):
        where, entry = f"line {number}", json.loads(line)
        if canonical(entry) + b"\n" != line:
            raise ValueError(f"{where} is not in canonical form")
        if set(entry) != {"type", "sequence", "prev"} | LINE_FIELDS[entry["type"]]:
            raise ValueError(f"{where} has other fields than a {entry['type']}")
        if entry["prev"] != previous:
            raise ValueError(f"{where} does not follow the line before: its prev is not that line's hash")
        if entry["sequence"] != number or (entry["type"] == "header") != (number == 0):
            raise ValueError(f"{where} is number {entry['sequence']}, a {entry['type']}")
        if entry["type"] == "header" and (entry["owner"], entry["format"]) != (owner, 1):
            raise ValueError(f"{where} names another owner: {entry['owner']}")
        if entry["type"] == "torn":
            torn[number] = (entry["job"], entry["round"])
        if entry["type"] == "closed" and torn.pop(entry["torn"], None) != (entry["job"], entry["round"]):
            raise ValueError(f"{where} closes no torn line")
        if entry["type"] == "debit":
            names = {entry["id"], (entry["job"], entry["round"], entry["kind"])}
            if names & seen:
                raise ValueError(f"{where} charges round {entry['round']} {entry['kind']} a second time")
            seen |= names
            debits.append(entry)
        if "events" in entry:
            spent.update(entry["slots"])
            if len(entry["slots"]) != len(entry["events"]) or entry["spent"] != spent or entry["job"] != job:
                raise ValueError(f"{where}: slots, events and spent do not agree")
            report.events += [(ledger.name, entry["round"], entry.get("kind", "closed"), event) for event in entry["events"]]
        previous = sha256(line)
    return debits


def whole_lines(ledger: Path) -> list[bytes]:
    """Lines of ledger.jsonl, completed from the journal; ValueError if lines are missing at the end."""
    copied, content = not (ledger / "journal").exists(), (ledger / "ledger.jsonl").read_bytes()
    *lines, tail = (content if copied else content.split(b"\0")[0]).split(b"\n")
    lines = [line + b"\n" for line in lines]
    if copied:
        check_copy(ledger, lines)
        return lines
    journal = read_journal((ledger / "journal").read_bytes())
    for number, line in journal.lines.items():
        if number < len(lines) and lines[number] != line:
            raise ValueError(f"line {number} of ledger.jsonl is not the line that the journal holds")
    newest = max(journal.lines)
    if len(lines) <= journal.synced or len(lines) < min(journal.lines):
        raise ValueError(f"ledger.jsonl has {len(lines)} lines, {newest + 1} were written: lines are missing at the end")
    if len(lines) > newest + 1:
        raise ValueError(f"ledger.jsonl has {len(lines)} lines, the journal ends with line {newest}")
    missing = [journal.lines[number] for number in range(len(lines), newest + 1)]
    if tail and not (missing and missing[0].startswith(tail)):
        raise ValueError("the truncated last line of ledger.jsonl is not the beginning of the line that the journal holds")
    return lines + missing


def check_copy(ledger: Path, lines: list[bytes]) -> None:
    if not (ledger / "counter").exists():
        if len(lines) != 1:
            raise ValueError("neither journal nor counter is there")
        return
    number, digest = (ledger / "counter").read_text().split()
    if int(number) >= len(lines) or sha256(lines[int(number)]) != digest:
        raise ValueError(f"line {number} is missing or not the line that counter names: lines are missing at the end")


def read_journal(data: bytes) -> Journal:
    head = re.match(rb"dpcfl-journal-1 ([0-9]+)\n", data)
    if head is None or len(data) != PAGE + SLOTS * int(head[1]):
        raise ValueError("journal: not a journal")
    size, number = int(head[1]), data[64:72]
    journal = Journal(int.from_bytes(number, "little") if data[72:88] == check("synced", 0, number) else 0, {}, {})
    for k in range(SLOTS):
        slot = data[PAGE + k * size : PAGE + (k + 1) * size]
        note, line = sized(slot, 0), sized(slot, 1024)
        if not any(slot) or slot[4 + len(note) :][:16] != check("note", 0, note):
            continue
        n = json.loads(note)["sequence"]
        secret, wanted = (
            slot[512:544],
            hashlib.sha256(f"key{json.loads(note)['id']} {n} ".encode() + slot[512:544]).digest()[:16],
        )
        whole_key = secret[0] == 0 or slot[544:560] == wanted
        if whole_key and slot[1028 + len(line) :][:16] == check("line", n, line) and n % SLOTS == k:
            journal.lines[n] = line
            mark = slot[576:608]
            if slot[608:624] == check("mark", n, mark):
                journal.marks[n] = mark.hex()
    if not journal.lines or sorted(journal.lines) != list(range(min(journal.lines), max(journal.lines) + 1)):
        raise ValueError("journal: a slot is damaged")
    return journal


def sized(slot: bytes, at: int) -> bytes:
    length = int.from_bytes(slot[at : at + 4], "little")
    return slot[at + 4 : at + 4 + length]


def check(part: str, number: int, content: bytes) -> bytes:
    return hashlib.sha256(f"{part} {number} ".encode() + content).digest()[:16]
