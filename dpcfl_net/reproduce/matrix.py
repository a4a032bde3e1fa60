"""The matrix of results: every figure and table of the papers by scale, with seeds and verdicts, from finished cells."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.reproduce.base import CLAIMS, FINISHED, HOW_JUDGED, PARTIAL, SCALES, Scale, find, folder_name, registry
from dpcfl_net.reproduce.claims import VERDICTS, Claim, Comparison, Exact
from dpcfl_net.reproduce.inventory import Item, papers

if TYPE_CHECKING:
    from dpcfl_net.results.tables import Table

FAILED = "failed.json"  # of a cell whose last attempt failed
NOT_RUN = "not run"
SAME = "the same"  # at the paper's scale, of a figure that does not depend on it
COLUMNS = ["figure or table", "laptop scale", "seeds", "content", "recomputed by", "paper's scale"]
SEVERAL = {"holds": "hold", "does not hold": "do not hold"}  # of more than one claim
Cells = Mapping[tuple[str, Scale], Mapping[str, Any]]


def read_cells(out: Path) -> dict[tuple[str, Scale], dict[str, Any]]:
    """Read every cell of a folder of results.

    Args:
        out: Parent of the figures' folders.

    Returns:
        Name of the reproduction and scale to its claims.json, or to failed.json if it has no result.

    Raises:
        ConfigError: If a file is no JSON object with a state.
    """
    found = {}
    for name in registry():
        for scale in SCALES:
            folder = out / folder_name(find(name), scale)
            for file in (folder / CLAIMS, folder / FAILED):
                if file.exists():
                    found[name, scale] = read_claims(file)
                    break
    return found


def read_claims(file: Path) -> dict[str, Any]:
    """Read claims.json or failed.json.

    Raises:
        ConfigError: If it is no JSON object with a state.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("state"), str):
        state = document.get("state") if isinstance(document, dict) else document
        raise ConfigError(f"{file}: state is {shown(state)}: must be text; compute the figure again")
    return document


def tables(cells: Cells) -> list[Table]:
    """Tabulate all papers.

    Args:
        cells: As `read_cells` returns them.

    Returns:
        One table per paper with a row for each figure and table, "not run" included. The caption names those without a
        measurement.
    """
    from dpcfl_net.results.tables import Table

    found = []
    for paper in papers():
        rows = [row(item, cells) for item in paper.items if not item.drawing]
        drawings = ", ".join(f"{item.item} ({item.drawing})" for item in paper.items if item.drawing)
        found.append(Table(paper.title, COLUMNS, rows, f"Nothing to measure: {drawings}." if drawings else ""))
    return found


def row(item: Item, cells: Cells) -> list[str]:
    """Return the row of one figure or table."""
    content = f"{item.content} ({item.part})" if item.part else item.content
    if not item.by:
        return [item.item, f"{NOT_RUN}: {item.not_run}", "–", content, "–", NOT_RUN]
    own = [cells[name, "laptop"] for name in item.by if (name, "laptop") in cells]
    laptop, paper = (_joined([_at(scale, name, cells) for name in item.by]) for scale in SCALES)
    return [item.item, laptop, "; ".join(map(seeds, own)) or "–", content, ", ".join(item.by), paper]


def _at(scale: Scale, name: str, cells: Cells) -> str:
    same = scale == "paper" and (name, scale) not in cells and (name, "laptop") in cells and find(name).any_scale
    return SAME if same else status(cells.get((name, scale)))


def _joined(statuses: Sequence[str]) -> str:
    return NOT_RUN if set(statuses) == {NOT_RUN} else "; ".join(statuses)


def status(cell: Mapping[str, Any] | None) -> str:
    """Count the verdicts of a cell, for example "3 hold, 1 undecided", or "2 undecided (4 of 560 runs)"; its state if it has none."""
    if cell is None:
        return NOT_RUN
    if cell["state"] not in (FINISHED, PARTIAL):
        return f"{cell['state']}: {cell['note']}" if cell.get("note") else str(cell["state"])
    counts = Counter(claim["verdict"] for claim in cell["claims"])
    words = {verdict: SEVERAL.get(verdict, verdict) if counts[verdict] > 1 else verdict for verdict in VERDICTS}
    text = ", ".join(f"{counts[verdict]} {words[verdict]}" for verdict in VERDICTS if counts[verdict])
    if cell["state"] == PARTIAL:
        return f"{text or 'no claim yet'} ({cell['runs'][0]} of {cell['runs'][1]} runs)"
    return text


def seeds(cell: Mapping[str, Any]) -> str:
    """Return the numbers of seeds behind a cell's claims, for example "exact, 5"."""
    if cell["state"] not in (FINISHED, PARTIAL):
        return str(cell.get("seeds", "–"))
    numbers = sorted({claim["seeds"] for claim in cell["claims"] if claim["seeds"]})
    exact = ["exact"] if any(claim["exact"] for claim in cell["claims"]) else []
    return ", ".join([*exact, *([_span(numbers)] if numbers else [])]) or "–"


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def markdown(found: Sequence[Table]) -> str:
    """Format tables as Markdown, with the title of each as a heading of level 3."""
    return "\n".join(_markdown(table) for table in found)


def _markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rows = [line(table.columns), "|" + "---|" * len(table.columns), *map(line, table.rows)]
    caption = f"\n{table.caption}\n" if table.caption else ""
    return f"### {table.title}\n\n" + "\n".join(rows) + "\n" + caption


def claims_markdown(cell: Mapping[str, Any]) -> str:
    """Format the claims of a finished cell as a Markdown table."""
    from dpcfl_net.results.tables import Table

    rows = [[claim["text"], claim["measured"], claim["verdict"], claim["basis"], claim["cause"]] for claim in cell["claims"]]
    return _markdown(Table(f"{cell['name']}: {cell['title']}", ["claim", "measured", "verdict", "basis", "cause"], rows))


def comparisons(cell: Mapping[str, Any]) -> list[Claim]:
    """Return the claims of a finished cell with their comparisons, as far as plots need them."""
    found = []
    for claim in cell["claims"]:
        compared = [
            Comparison(one["values"], one["margin"], one["unit"], one["name"], one["test"]) for one in claim["comparisons"]
        ]
        found.append(Claim(claim["text"], claim["measured"], compared or Exact(claim["verdict"] == "holds")))
    return found


def write_matrix(out: Path) -> list[Path]:
    """Write matrix.md, matrix.html, and the intervals of every finished cell as SVG files, to a folder of results.

    Args:
        out: Parent of the figures' folders.

    Returns:
        Paths of matrix.md and matrix.html, then of the SVG files.

    Raises:
        ConfigError: If the folder does not exist, or a cell cannot be read.
    """
    from dpcfl_net.report.pages import write_page
    from dpcfl_net.reproduce.intervals import of_claims, write_svg

    if not out.is_dir():
        raise ConfigError(f"--out is {str(out)!r}: no such folder; `dpcfl reproduce all` fills it")
    cells = read_cells(out)
    found, details, plots = tables(cells), [], []
    for (name, scale), cell in cells.items():
        if cell["state"] not in (FINISHED, PARTIAL):
            continue
        details.append(claims_markdown(cell))
        for figure in of_claims(comparisons(cell)):
            folder = out / folder_name(find(name), scale)
            plots.append(folder / f"{figure.key}.svg")
            write_svg(plots[-1], figure)
            details.append(f"![{figure.title}]({folder.name}/{plots[-1].name})\n")
    text = f"# Results by figure and table\n\n{HOW_JUDGED}\n\n{markdown(found)}\n# Claims\n\n" + "\n".join(details)
    paths = [out / "matrix.md", out / "matrix.html"]
    write_atomically(paths[0], text)
    write_page(paths[1], title="Results by figure and table", lead=[HOW_JUDGED], figures=[], tables=found)
    return [*paths, *plots]
