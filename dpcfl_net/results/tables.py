"""A table as data, for pages, terminals and CSV files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of a page: every row has as many cells as there are columns."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""
