"""Common parts of all pages: one HTML file without network access, light and dark theme, narrow and wide windows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.files import writing
from dpcfl_net.report.figures import Figure
from dpcfl_net.report.served import Served
from dpcfl_net.report.svg.draw import draw
from dpcfl_net.report.terms import explained
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.tables import Table

if TYPE_CHECKING:
    from markupsafe import Markup

DIGITS = 7  # of a number in a figure
CELLS = 4000  # of a heat map that says its value under the pointer
# Cell of a numeric column: 78.1 %, +- 0.4, 3/5, 1e-4, -0.9 (-5.4 to +3.5), 6.0 (1/2), yes, inf, or a dash for a missing value.
FIGURE = re.compile(r"[-+−±–\d\s.,:/%e]*(\([-+\d.]+ to [-+\d.]+\))?( ?\(\d+/\d+\))?|yes|no|inf|never|not stated|reference")


def write_page(
    path: Path,
    *,
    title: str,
    lead: list[str],
    figures: Sequence[Figure],
    tables: Sequence[Table] = (),
    alerts: Sequence[str] = (),
) -> Path:
    """Write a page: alerts, paragraphs, figures, tables.

    Args:
        path: The page.
        title, lead, figures, tables, alerts: As in `study`.

    Returns:
        The page.

    Raises:
        ConfigError: If the page cannot be written.
        OSError: If the disk is full.
    """
    return keep(path, study(title=title, lead=lead, figures=figures, tables=tables, alerts=alerts))


def keep(path: Path, page: str) -> Path:
    """Write the HTML of a page; return its path, errors as `write_page`."""
    with writing(path):
        write_atomically(path, page)
    return path


def study(
    *,
    title: str,
    lead: Sequence[str],
    figures: Sequence[Figure] = (),
    tables: Sequence[Table] = (),
    alerts: Sequence[str] = (),
    served: Served | None = None,
) -> str:
    """Render a page: alerts, paragraphs, figures, tables.

    Args:
        title: Heading.
        lead: Paragraphs.
        figures: Figures with distinct keys; those without a `spec` are listed at the end with `why`.
        tables: Tables.
        alerts: Warnings.
        served: Parts for a page that `dpcfl serve` shows; None: a file.

    Returns:
        HTML.
    """
    numeric = [(table, numeric_columns(table)) for table in tables]
    return html("study.html.j2", figures, served=served, title=title, lead=lead, alerts=alerts, tables=numeric)


def html(
    template: str, figures: Sequence[Figure], *, apart: Sequence[Figure] = (), served: Served | None = None, **more: Any
) -> str:
    """Render a template of this package.

    Args:
        template: File name.
        figures: Figures in the order of the page.
        apart: Figures that the template places itself.
        served: Parts for a page that `dpcfl serve` shows; None: a file.
        more: Further variables of the template.

    Returns:
        HTML; it includes the script of the figures if one has data or may get data while the page is shown.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("dpcfl_net.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["explained"] = explained
    specs = {figure.key: _light(_finite(figure.spec)) for figure in [*figures, *apart] if figure.spec is not None}
    names = [*(["figures.js"] if specs or (served and served.drawn) else []), *(served.scripts if served else ())]
    scripts = [Markup((Path(__file__).parent / name).read_text(encoding="utf-8")) for name in names]
    page = environment.get_template(template)
    return page.render(figures=figures, specs=specs, scripts=scripts, served=served, drawings=_drawings, **more)


def _drawings(figure: Figure, widths: Sequence[int]) -> Markup:
    """The figure at several widths; the style sheet shows the one that fits."""
    from markupsafe import Markup

    spec = _finite(figure.spec)
    return Markup("".join(draw(spec, width, name=f"{figure.key}-{width}", title=figure.title) for width in widths))


def numeric_columns(table: Table | AttackResult) -> list[bool]:
    """Return True for each column that holds only figures; these are right-aligned."""
    return [
        bool(table.rows) and all(FIGURE.fullmatch(row[index]) is not None for row in table.rows)
        for index in range(len(table.columns))
    ]


def _light(spec: dict[str, Any]) -> dict[str, Any]:
    """Drop the words of the cells of a large heat map: they would take most of the page."""
    data = [{key: value for key, value in trace.items() if key != "text" or _cells(trace) <= CELLS} for trace in spec["data"]]
    return {**spec, "data": data}


def _cells(trace: dict[str, Any]) -> int:
    return sum(map(len, trace["z"])) if trace["type"] == "heatmap" else 0


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by null, which is drawn as a gap, and cut numbers to the digits that a figure needs."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
