"""CSV text that a spreadsheet does not take for formulas."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

# What a spreadsheet executes at the beginning of a cell, and the quote itself, so that removing one quote restores every text.
MARKED = ("=", "+", "-", "@", "\t", "\r", "\n", "'")


def csv_text(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table as CSV.

    Names of clients, runs and plug-ins may come from others, so that a text which begins with one of `MARKED` gets a single quote
    before it, which spreadsheets show as text. Numbers are written as they are, also if they are given as text.

    Args:
        columns: Titles.
        rows: Cells of each line; None is an empty cell.
    """
    lines: list[str] = []
    # With this end of lines the module also puts a lone carriage return into quotes, which ends a line otherwise.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    writer.writerow(map(_cell, columns))
    writer.writerows(map(_cell, row) for row in rows)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def unquoted(cell: str) -> str:
    """Return the text that `csv_text` wrote as this cell."""
    return cell.removeprefix("'")


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return f"'{text}" if text.startswith(MARKED) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
