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

    def without_empty_columns(self) -> Table:
        """Return the table without the columns that have a dash in every row."""
        kept = [index for index in range(len(self.columns)) if not self.rows or any(row[index] != "–" for row in self.rows)]
        rows = [[row[index] for index in kept] for row in self.rows]
        return Table(self.title, [self.columns[index] for index in kept], rows, self.caption)
