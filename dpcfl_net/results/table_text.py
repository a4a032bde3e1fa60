"""Tables as LaTeX, CSV and HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from dpcfl_net.core.csv_text import csv_text
from dpcfl_net.results.tables import Table

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
}  # fmt: skip


def latex(table: Table, comments: Sequence[str] = ()) -> str:
    """Format a table as a LaTeX tabular with the rules of booktabs.

    Args:
        table: The table; its first column is aligned to the left, the others to the right.
        comments: Lines above it.

    Returns:
        LaTeX.
    """
    lines = [f"% {' '.join(comment.split())}" for comment in comments]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule", _row(table.columns), r"\midrule"]
    lines += [*map(_row, table.rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def table_csv(table: Table) -> str:
    """Format a table as CSV with the cells' text."""
    return csv_text(table.columns, table.rows)


def table_html(table: Table) -> str:
    """Format a table as HTML, for notebooks."""
    head = "".join(f"<th>{escape(title)}</th>" for title in table.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(_cell, cells)) + r" \\"


def _cell(text: str) -> str:
    escaped = re.sub(r"[\\&%$#_{}~^–]", lambda found: SPECIAL[found[0]], text)
    return escaped.replace("+-", r"$\pm$").replace("inf", r"$\infty$") if text == "inf" or "+-" in text else escaped
