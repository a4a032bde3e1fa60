"""Reads the hash chain of a ledger: ledger.jsonl, completed from the journal and compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.files import read_bytes
from dpcfl_net.privacy.ledger.entries import (
    Entry,
    broken,
    counter_line,
    digest,
    read_counter,
    split_lines,
    verify_lines,
)
from dpcfl_net.privacy.ledger.journal import JOURNAL, Image, read_journal, without_newest
from dpcfl_net.privacy.ledger.release_store import RELEASES, stored

LINES, COUNTER = "ledger.jsonl", "counter"


@dataclass(frozen=True)
class Chain:
    """The verified lines of a ledger.

    Attributes:
        entries: One per line; an entry that a crash cut short is left out.
        last: The last line.
        kept: Bytes of ledger.jsonl that are to stay: all, or those before zeros that a crash left at its end.
        unwritten: What it then lacks of the lines, from the journal.
        image: The journal; None without one: a copy for the operator, or a ledger whose creation was interrupted.
        copied: True if a counter stands in for the journal.
        ahead: True if ledger.jsonl holds more than the journal, which is then an older one, or is read while it is written.
    """

    entries: list[Entry]
    last: bytes
    kept: int
    unwritten: bytes
    image: Image | None
    copied: bool
    ahead: bool

    @property
    def closed(self) -> bool:
        """True if the process that wrote last has closed the ledger, so that the device holds all of it.

        With a key in the journal, a later process may have written a result without a new line, and may have been killed then.
        """
        image = self.image
        return image is not None and 0 < image.newest == image.synced and not any(slot.key for slot in image.slots.values())


def read_ledger(folder: Path) -> list[Entry]:
    """Read and verify a ledger, or the operator's copy of one, without its lock and without changing it.

    Args:
        folder: Folder of the ledger.

    Returns:
        Its entries. A line that is being written, or that a crash truncated before it counted, is left out.

    Raises:
        LedgerError: "ledger-rolled-back" or "ledger-broken".
    """
    return read_chain(Path(folder)).entries


def read_chain(folder: Path) -> Chain:
    """Read and verify the chain of a ledger; args and errors as `read_ledger`."""
    path, counter_path = folder / LINES, folder / COUNTER
    # What counts the lines is read before the lines: a ledger in use may grow in between.
    image = read_journal(folder / JOURNAL)
    content = read_bytes(counter_path) if image is None and counter_path.exists() else b""
    written = read_bytes(path) if path.exists() else b""
    if image is not None:
        # A crash of the machine may leave the length of a file without its last bytes, which then read as zeros.
        written = written.partition(b"\0")[0]
    lines, tail = split_lines(written)
    if image is not None and _lacks_its_key(image, len(lines)) and image.newest not in stored(folder / RELEASES):
        image = without_newest(image)
    missing = [] if image is None else _missing(lines, tail, image, str(path))
    entries = verify_lines([*lines, *missing], str(path))
    if image is None:
        _check_counter(content, lines, tail, folder)
    return Chain(
        entries, (lines + missing)[-1], len(written), b"".join(missing)[len(tail) :], image, bool(content),
        image is not None and (len(lines) > image.newest + 1 or bool(tail and not missing)),
    )  # fmt: skip


def holds(folder: Path, counter: bytes) -> bool:
    """Return whether a ledger holds the line that a counter names, and so all lines before it.

    Args:
        folder: Folder of the ledger.
        counter: Content of a counter file.

    Raises:
        LedgerError: As `read_ledger`, and "ledger-broken" if `counter` is not the content of a counter file.
    """
    named = read_counter(counter)
    if named is None:
        raise broken(f"{counter[:80].decode(errors='replace')!r} is not the content of a counter file")
    path = Path(folder) / LINES
    if not path.exists():
        return False
    chain = read_chain(Path(folder))
    lines, _ = split_lines(read_bytes(path)[: chain.kept] + chain.unwritten)
    number, written = named
    return number < len(lines) and digest(lines[number]) == written


def last_counted(folder: Path) -> bytes | None:
    """Return number and hash of the newest line of a ledger, as the content of a counter file; None before the first line.

    Args:
        folder: Folder of the ledger.
    """
    image = read_journal(Path(folder) / JOURNAL)
    return None if image is None else counter_line(image.newest, digest(image.slots[image.newest].line))


def _lacks_its_key(image: Image, lines: int) -> bool:
    """Return True if the newest slot is a debit without its key, and ledger.jsonl lacks its line.

    A device may write the sectors of a page in any order: in a crash all of a slot but its key, in whose place are the zeros of an erased
    key. The key of a debit that counted is erased after its line was written and its answer stored.
    """
    slot = image.slots[image.newest]
    return slot.note["type"] == "debit" and slot.key is None and not slot.answered and lines <= image.newest


def _missing(lines: Sequence[bytes], tail: bytes, image: Image, where: str) -> list[bytes]:
    """Return the lines that the journal holds and the file lacks."""
    for number, slot in image.slots.items():
        if number < len(lines) and lines[number] != slot.line:
            raise broken(f"{where}, line {number}: not the line that was written")
    if len(lines) <= image.synced or len(lines) < min(image.slots):
        raise LedgerError("ledger-rolled-back", f"{where} holds {len(lines)} lines, {image.newest + 1} were written before")
    missing = [image.slots[number].line for number in range(len(lines), image.newest + 1)]
    if missing and not missing[0].startswith(tail):
        raise broken(f"{where}: the last line is truncated, and is not the beginning of the line that was written")
    return missing


def _check_counter(content: bytes, lines: Sequence[bytes], tail: bytes, folder: Path) -> None:
    """Compare a copied ledger with its counter."""
    if not content and len(lines) == 1 and not tail:
        return
    counter = read_counter(content)
    if counter is None:
        raise broken(f"{folder / JOURNAL} is missing, and {folder / COUNTER} is missing or unreadable")
    number, written = counter
    if number >= len(lines):
        raise LedgerError("ledger-rolled-back", f"{folder / LINES} holds {len(lines)} lines, {number + 1} were written before")
    if digest(lines[number]) != written:
        raise broken(f"{folder / LINES}, line {number}: not the line that was written")
