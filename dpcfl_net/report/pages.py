"""Common parts of all pages: one HTML file without network access, light and dark theme, narrow and wide windows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report.figures import Figure
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.tables import Table

# Cell of a numeric column: 78.1 %, +- 0.4, 3/5, 1e-4, yes, inf, or a dash for a missing value.
FIGURE = re.compile(r"[-+−±–\d\s.,:/%e]*|yes|no|inf|not stated")


def write_page(
    path: Path,
    *,
    title: str,
    lead: list[str],
    figures: Sequence[Figure],
    tables: Sequence[Table] = (),
    alerts: Sequence[str] = (),
) -> Path:
    """Write a page: paragraphs, alerts, figures, tables.

    Args:
        path: The page.
        title: Heading.
        lead: Paragraphs.
        figures: Figures with distinct keys; those without a `spec` are listed at the end with `why`.
        tables: Tables.
        alerts: Warnings.

    Returns:
        The page.
    """
    numeric = [(table, numeric_columns(table)) for table in tables]
    write_atomically(path, html("study.html.j2", figures, title=title, lead=lead, alerts=alerts, tables=numeric))
    return path


def html(template: str, figures: Sequence[Figure], *, apart: Sequence[Figure] = (), **more: Any) -> str:
    """Render a template of this package.

    Args:
        template: File name.
        figures: Figures in the order of the page.
        apart: Figures that the template places itself.
        more: Further variables of the template.

    Returns:
        HTML; it includes plotly's script if a figure has data.
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
    specs = {figure.key: _finite(figure.spec) for figure in [*figures, *apart] if figure.spec is not None}
    script = Markup(_plotly_script()) if specs else ""
    return environment.get_template(template).render(figures=figures, specs=specs, plotly=script, **more)


def _plotly_script() -> str:
    """The script of the installed plotly, nothing from a run."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ConfigError("plots need plotly: pip install 'plotly>=6.0'") from None
    return str(get_plotlyjs())


def numeric_columns(table: Table | AttackResult) -> list[bool]:
    """Return True for each column that holds only figures; these are right-aligned."""
    return [
        bool(table.rows) and all(FIGURE.fullmatch(row[index]) is not None for row in table.rows)
        for index in range(len(table.columns))
    ]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by null, which plotly draws as a gap."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
