"""Colours of the light theme, for figures outside a page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from dpcfl_net.report.svg.draw import by_theme


@cache
def light() -> dict[str, str]:
    """Return the colours by name, from the style sheet of the pages, their only definition."""
    style = (Path(__file__).parent / "base.html.j2").read_text(encoding="utf-8")
    own = style[style.index(":root {") : style.index("@media")]
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", own))


def in_light(value: Any) -> str:
    """Return a colour for a file: names such as `@c0` become those of the light theme; errors as `by_theme`."""
    found = by_theme(value)
    return light()[value[1:]] if found.startswith("var(") else found
