"""Table as data, for pages, terminals and CSV files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Table with as many cells in each row as there are columns.

    Attributes:
        title: Heading.
        columns: Column titles.
        rows: Cells as text.
        caption: Caption; may be empty.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""
