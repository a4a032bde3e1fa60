"""Table as data, for pages, terminals and CSV files."""

from __future__ import annotations

from dataclasses import dataclass

GAP = 2  # characters between the columns in a terminal


@dataclass(frozen=True)
class Table:
    """Table with as many cells in each row as there are columns.

    Attributes:
        title: Heading.
        columns: Column titles.
        rows: Cells as text.
        caption: Caption; may be empty.
        keys: Number of the first columns that tell rows apart.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""
    keys: int = 1

    def without_empty_columns(self) -> Table:
        """Return the table without the columns that have a dash in every row."""
        kept = [index for index in range(len(self.columns)) if not self.rows or any(row[index] != "–" for row in self.rows)]
        return self._columns(kept)

    def holds_words(self, index: int) -> bool:
        """Return True if a column has a cell of words, which begins with a letter; `inf` is a number."""
        return any(row[index][:1].isalpha() and row[index] != "inf" for row in self.rows)

    def folded(self, width: int) -> list[Table]:
        """Divide the columns into tables that are not wider than a terminal, each with the columns that tell rows apart.

        Args:
            width: Width of the terminal in characters.

        Returns:
            The tables; one with all columns if they fit, or if one of them does not fit beside those that tell rows apart.
        """
        widths = [each + GAP for each in self._widths()]
        fixed = sum(widths[: self.keys])
        if sum(widths) - GAP <= width or fixed + max(widths[self.keys :], default=0) - GAP > width:
            return [self]
        groups: list[list[int]] = [[]]
        for index in range(self.keys, len(widths)):
            if groups[-1] and fixed + sum(widths[other] for other in groups[-1]) + widths[index] - GAP > width:
                groups.append([])
            groups[-1].append(index)
        return [self._columns([*range(self.keys), *group]) for group in groups]

    def lines(self, width: int | None = None) -> list[str]:
        """Return the table as text, in columns of equal width.

        Args:
            width: Width of the terminal in characters, for which the table is folded; None: any width.
        """
        parts = [self] if width is None else self.folded(width)
        return "\n\n".join("\n".join(part._aligned()) for part in parts).split("\n")

    def _aligned(self) -> list[str]:
        widths, gap = self._widths(), " " * GAP
        return [
            gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (self.columns, *self.rows)
        ]

    def _widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]

    def _columns(self, kept: list[int]) -> Table:
        """The table with some of its columns."""
        rows = [[row[index] for index in kept] for row in self.rows]
        keys = sum(index < self.keys for index in kept)
        return Table(self.title, [self.columns[index] for index in kept], rows, self.caption, keys)
