"""Reads journals of privacy ledgers, and leaves those that crashes leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpcfl_net.privacy.ledger.chain import LINES
from dpcfl_net.privacy.ledger.journal import JOURNAL, PAGE, SLOTS, read_journal

MOST_CUT = 1200  # bytes of a slot that end inside its line


def keys_in(folder: Path) -> list[int]:
    """Numbers of the debits whose key is in the journal."""
    image = read_journal(folder / JOURNAL)
    return [] if image is None else [number for number, slot in image.slots.items() if slot.key is not None]


def slot_start(number: int) -> int:
    """Byte of the journal at which the slot of line `number` begins."""
    return PAGE + number % SLOTS * PAGE


def cut_debit(folder: Path, debit: Callable[[], object], size: int = MOST_CUT) -> None:
    """Leave what a crash leaves after the first `size` bytes of the slot of a debit. `debit` opens, charges and closes."""
    journal, lines = (folder / JOURNAL).read_bytes(), (folder / LINES).read_bytes()
    debit()
    image, after = read_journal(folder / JOURNAL), (folder / JOURNAL).read_bytes()
    assert image is not None
    start = slot_start(image.newest)
    (folder / JOURNAL).write_bytes(journal[:start] + after[start : start + size] + journal[start + size :])
    (folder / LINES).write_bytes(lines)
