"""Journal of a ledger: a ring of slots, overwritten in place, so that one flush makes an entry durable.

Each slot is one page of the file, or more for a long line: the note (number and request of the entry), the key, the mark (hash of the
answer) and the line. Every part ends with a checksum, so that a part that a crash cut short is recognised.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.files import naming, read_bytes
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import Entry, broken

JOURNAL = "journal"
SLOTS = 16
PAGE = 4096  # bytes before the first slot, and of a slot unless a line is longer
KEY_BYTES = 32
_MAGIC = b"dpcfl-journal-1 %d\n"
KEY_AT, LINE_AT = 512, 1024  # bytes of a slot before its key, and before its line
_SYNCED_AT, _MARK_AT = 64, 576
_CHECK = 16
_SECRET = KEY_BYTES + _CHECK  # bytes of a key, and of a mark, with the checksum


@dataclass(frozen=True)
class Slot:
    """One entry in the journal.

    Attributes:
        note: type, sequence, job, round, kind and id of the entry.
        line: The entry's line.
        key: Key of a debit; None once it is erased.
        answered: sha256 of the answer that a debit with a key got, in hex; "" if it got none.
    """

    note: Mapping[str, Any]
    line: bytes
    key: bytes | None = field(repr=False)
    answered: str


@dataclass
class Image:
    """Content of a journal.

    Attributes:
        slot_bytes: Bytes of a slot.
        synced: Number of the last line that ledger.jsonl surely holds on the device.
        slots: Slots by number of their line: the last `SLOTS` lines, or all.
        begun: Note of the next entry, if a crash interrupted the write of its slot; its line was never acted upon.
        half_erased: Numbers of the lines whose key a crash left half erased.
    """

    slot_bytes: int
    synced: int
    slots: dict[int, Slot]
    begun: Mapping[str, Any] | None = None
    half_erased: list[int] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """Number of the newest line."""
        return max(self.slots)


def read_journal(path: Path) -> Image | None:
    """Read a journal; None if there is none.

    Raises:
        LedgerError: "ledger-broken" if it is damaged otherwise than by a crash.
    """
    if not path.exists():
        return None
    content = read_bytes(path)
    while (again := read_bytes(path)) != content:  # its owner may be writing
        content = again
    return _parse(content, str(path))


def may_hold_keys(path: Path) -> bool:
    """Look, without a check of its content, whether a journal may hold keys; False if there is none."""
    if not path.exists():
        return False
    content = read_bytes(path)
    size = (len(content) - PAGE) // SLOTS
    places = range(PAGE + KEY_AT, len(content), max(size, PAGE))
    return any(any(content[place : place + KEY_BYTES]) for place in places)


def without_newest(image: Image) -> Image:
    """Return the image of a journal whose newest slot was cut in a crash."""
    newest = image.newest
    slots = {number: slot for number, slot in image.slots.items() if number != newest}
    return replace(image, slots=slots, begun=image.slots[newest].note)


class Journal:
    """The journal of an open ledger.

    Args:
        path: The file.
        disk: Writes it.
        image: Its content.
    """

    def __init__(self, path: Path, disk: Disk, image: Image) -> None:
        self._path, self._disk, self.image = path, disk, image
        self._fd = os.open(path, os.O_RDWR)
        self._dirty = False
        try:
            for sequence in image.half_erased:
                self._overwrite_key(sequence)
        except OSError:
            os.close(self._fd)
            raise

    @classmethod
    def create(cls, path: Path, disk: Disk, entry: Entry, line: bytes) -> Image:
        """Create a journal that holds the first entry; returns its content."""
        size, note = _slot_bytes(line), _note(entry)
        first = _slot(note, line, None).ljust(size, b"\0")
        disk.replace(path, _head(size), bytes(PAGE - len(_head(size))), first, zeros=(SLOTS - 1) * size)
        return Image(size, 0, {entry.sequence: Slot(note, line, None, "")})

    def put(self, entry: Entry, line: bytes, key: bytes | None) -> None:
        """Write an entry durably, over the slot that is `SLOTS` entries older."""
        if _slot_bytes(line) > self.image.slot_bytes:
            self._grow(_slot_bytes(line))
        slot = Slot(_note(entry), line, key, "")
        self._disk.write_at(self._fd, self._at(entry.sequence), _slot(slot.note, line, key))
        self._flush()
        self.image.slots.pop(entry.sequence - SLOTS, None)
        self.image.slots[entry.sequence] = slot

    def set_synced(self, number: int) -> None:
        """Note, with the next flush, that ledger.jsonl holds all lines up to `number` on the device."""
        self._disk.write_at(self._fd, _SYNCED_AT, _synced(number))
        self.image.synced, self._dirty = number, True

    def key(self, sequence: int) -> tuple[bytes, str] | None:
        """Return the key of a debit, and the hash of the answer that it got ("": none); None without a key."""
        slot = self.image.slots.get(sequence)
        return None if slot is None or slot.key is None else (slot.key, slot.answered)

    def with_key(self, answered: bool) -> list[int]:
        """List the debits that have a key, and an answer or none."""
        return [n for n, slot in self.image.slots.items() if slot.key is not None and bool(slot.answered) == answered]

    def mark(self, sequence: int, answered: str) -> None:
        """Write durably that a debit with a key was answered."""
        content = bytes.fromhex(answered)
        self._disk.write_at(self._fd, self._at(sequence) + _MARK_AT, content + _check(b"mark", sequence, content))
        self._flush()
        self.image.slots[sequence] = replace(self.image.slots[sequence], answered=answered)

    def erase(self, sequence: int) -> None:
        """Overwrite a key in place; the device has it with the next flush."""
        slot = self.image.slots.get(sequence)
        if slot is not None and slot.key is not None:
            self._overwrite_key(sequence)
            self.image.slots[sequence] = Slot(slot.note, slot.line, None, slot.answered)

    def close(self) -> None:
        """Flush what is not flushed, and close the file."""
        try:
            if self._dirty:
                self._flush()
        except OSError:
            # A later process would not write a ledger again that looks closed.
            self.set_synced(max(0, self.image.synced - 1))
            raise
        finally:
            os.close(self._fd)

    def _overwrite_key(self, sequence: int) -> None:
        with naming(self._path):
            self._disk.write_at(self._fd, self._at(sequence) + KEY_AT, bytes(_SECRET))
        self._dirty = True

    def _flush(self) -> None:
        with naming(self._path):
            self._disk.sync(self._fd)
        self._dirty = False

    def _at(self, sequence: int) -> int:
        return PAGE + sequence % SLOTS * self.image.slot_bytes

    def _grow(self, size: int) -> None:
        """Replace the file by one with larger slots."""
        old, slots = self.image, [b""] * SLOTS
        for number, slot in old.slots.items():
            slots[number % SLOTS] = _slot(slot.note, slot.line, slot.key, slot.answered)
        old.synced = max(0, old.synced - 1)  # noted lines equal to written ones mean a closed ledger
        head = _head(size).ljust(_SYNCED_AT, b"\0") + _synced(old.synced)
        self._disk.replace(self._path, head.ljust(PAGE, b"\0"), *(slot.ljust(size, b"\0") for slot in slots))
        grown = os.open(self._path, os.O_RDWR)  # first: after an error, `close` still closes the old one
        os.close(self._fd)
        self._fd, self.image.slot_bytes = grown, size


def _head(size: int) -> bytes:
    return _MAGIC % size


def _synced(number: int) -> bytes:
    content = struct.pack("<Q", number)
    return content + _check(b"synced", 0, content)


def _note(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("type", "sequence", "job", "round", "kind", "id")}


def _slot_bytes(line: bytes) -> int:
    return -(-(LINE_AT + 4 + len(line) + _CHECK) // PAGE) * PAGE


def _slot(note: Mapping[str, Any], line: bytes, key: bytes | None, answered: str = "") -> bytes:
    sequence, text = note["sequence"], canonical_json(note)
    noted = struct.pack("<I", len(text)) + text + _check(b"note", 0, text)
    if len(noted) > KEY_AT:
        raise ValueError(f"kind has {len(note['kind'])} characters: job, kind and id do not fit a slot of the journal")
    secret = b"" if key is None else key + _check(b"key" + note["id"].encode(), sequence, key)
    mark = bytes.fromhex(answered) and bytes.fromhex(answered) + _check(b"mark", sequence, bytes.fromhex(answered))
    head = noted.ljust(KEY_AT, b"\0") + secret.ljust(_MARK_AT - KEY_AT, b"\0") + mark
    return head.ljust(LINE_AT, b"\0") + struct.pack("<I", len(line)) + line + _check(b"line", sequence, line)


def _check(part: bytes, sequence: int, content: bytes) -> bytes:
    return hashlib.sha256(b"%s %d " % (part, sequence) + content).digest()[:_CHECK]


def _parse(content: bytes, where: str) -> Image:
    head, _, _ = content.partition(b"\n")
    size = int(head[16:]) if head[16:].isdigit() and len(head) < 32 else 0
    if not content.startswith(_head(size)) or size < PAGE or size % PAGE or len(content) != PAGE + SLOTS * size:
        raise broken(f"{where}: not a journal")
    synced = content[_SYNCED_AT : _SYNCED_AT + 8 + _CHECK]
    number = struct.unpack("<Q", synced[:8])[0]
    image = Image(size, number if synced == _synced(number) else 0, {})
    damaged: dict[int, Mapping[str, Any] | None] = {}
    for position in range(SLOTS):
        raw = content[PAGE + position * size : PAGE + (position + 1) * size]
        if raw.count(0) == size:
            continue
        note = _read_note(raw)
        line = None if note is None else _read_line(raw, note["sequence"])
        key = None if note is None else _read_key(raw, note)
        # A crash may have written the slot's sectors in any order: the key may be that of the entry before.
        foreign_key = key is None and raw[KEY_AT] != 0
        if note is None or line is None or foreign_key or note["sequence"] % SLOTS != position:
            damaged[position] = note
        else:
            image.slots[note["sequence"]] = Slot(note, line, key, _read_mark(raw, note["sequence"]))
            if key is None and any(raw[KEY_AT : KEY_AT + _SECRET]):
                image.half_erased.append(note["sequence"])
    _check_ring(image, damaged, where)
    return image


def _check_ring(image: Image, damaged: Mapping[int, Mapping[str, Any] | None], where: str) -> None:
    """Only the slot of the next entry may be damaged, and no other may be missing."""
    following = image.newest + 1 if image.slots else 0
    oldest = max(0, following - SLOTS + (1 if damaged else 0))
    if set(damaged) - {following % SLOTS} or sorted(image.slots) != list(range(oldest, following)) or not image.slots:
        raise broken(f"{where}: a slot is damaged")
    note = damaged.get(following % SLOTS)
    if note is not None and note["sequence"] == following:
        image.begun = note


def _read_note(raw: bytes) -> dict[str, Any] | None:
    length = struct.unpack_from("<I", raw)[0]
    text, check = raw[4 : 4 + length], raw[4 + length : 4 + length + _CHECK]
    if check != _check(b"note", 0, text):
        return None
    note: dict[str, Any] = json.loads(text)
    return note


def _read_line(raw: bytes, sequence: int) -> bytes | None:
    start = LINE_AT + 4
    length = struct.unpack_from("<I", raw, LINE_AT)[0]
    line, check = raw[start : start + length], raw[start + length : start + length + _CHECK]
    return line if length and check == _check(b"line", sequence, line) else None


def _read_key(raw: bytes, note: Mapping[str, Any]) -> bytes | None:
    key, check = raw[KEY_AT : KEY_AT + KEY_BYTES], raw[KEY_AT + KEY_BYTES : KEY_AT + _SECRET]
    return key if check == _check(b"key" + note["id"].encode(), note["sequence"], key) else None


def _read_mark(raw: bytes, sequence: int) -> str:
    mark, check = raw[_MARK_AT : _MARK_AT + KEY_BYTES], raw[_MARK_AT + KEY_BYTES : _MARK_AT + _SECRET]
    return mark.hex() if check == _check(b"mark", sequence, mark) else ""
