"""Site of the documentation: `make docs` builds it with Sphinx; the pages are Markdown that also reads well in the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

project = "dpcfl_net"
author = "the authors of dpcfl_net"
extensions = ["myst_nb"]
exclude_patterns = ["reference_pages", "measured", "_site", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = "dpcfl_net"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
highlight_language = "text"
myst_heading_anchors = 4  # anchors of headings as in the repository's web page
nb_execution_mode = "off"  # a test runs the notebooks

# Pages whose links to other pages are also the navigation below them, in that order.
PARENTS = ("index", "tutorials/index", "how-to/index", "reference/index", "explanation/index", "explanation/reproductions")
_LINK = re.compile(r"\]\(([^)#:\s]+)\.(?:md|ipynb)\)")


def children(parent: str, source: str) -> list[str]:
    """List the pages below a parent page: those that it links, in order, except pages of other parts.

    Args:
        parent: Name of the parent, such as "how-to/index".
        source: Its Markdown.
    """
    folder = posixpath.dirname(parent)
    pages = [posixpath.normpath(posixpath.join(folder, link)) for link in _LINK.findall(source)]
    if parent == "index":
        return [page for page in dict.fromkeys(pages) if page in PARENTS]
    below = folder if parent.endswith("/index") else parent  # "reproductions" is a page of its folder's index
    return [page for page in dict.fromkeys(pages) if page.startswith((f"{below}/", "examples/")) and page != parent]


def _add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Append the navigation to a parent page. It is not in the file, where the repository's web page would show it as code."""
    if name in PARENTS:
        listed = "\n".join(f"/{page}" for page in children(name, source[0]))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:titlesonly:\n{listed}\n```\n"


def setup(app: Any) -> None:
    """Connect the navigation."""
    app.connect("source-read", _add_navigation)
