"""Pages of the documentation as data: their links, anchors and code blocks."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
TEXTS = (".py", ".toml", ".yaml", ".yml", ".cff", ".md", ".ipynb", ".j2")
TOPS = ("dpcfl_net", "launch", "docs", "configs")
PARTS = ("tutorials", "how-to", "reference", "explanation")
MARK = re.compile(r"<!-- (not run|needs|file|fails): (.+?) -->")


@dataclass(frozen=True)
class Link:
    """A link or an image of a page."""

    page: Path
    line: int
    target: str


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: The page.
        line: Line of its fence, from 1.
        language: Language after the fence.
        text: The code.
        marks: Comments directly above it: `<!-- not run: reason -->`, `<!-- needs: module or program -->`, `<!-- file: name -->`,
            `<!-- fails: exit code 2 -->`.
    """

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages() -> tuple[Path, ...]:
    """Every Markdown page of the repository that people read; not a page that a command has written beside its data."""
    docs, measured = ROOT / "docs", ROOT / "docs" / "measured"
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    return (*top, *sorted(page for page in docs.rglob("*.md") if measured not in page.parents))


@cache
def tokens(page: Path) -> tuple[Token, ...]:
    """Parse a page."""
    return tuple(MarkdownIt("commonmark").enable("table").parse(page.read_text()))


def links(page: Path) -> Iterator[Link]:
    """Yield the links and images of a page."""
    for token in tokens(page):
        for part in token.children or ():
            target = part.attrs.get("href" if part.type == "link_open" else "src")
            if part.type in ("link_open", "image"):
                yield Link(page, (token.map or [0])[0] + 1, str(target))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, by the rule of GitHub and MyST."""
    found, seen = set(), Counter[str]()
    parsed = tokens(page)
    for opened, inline in pairwise(parsed):
        if opened.type != "heading_open":
            continue
        text = "".join(part.content for part in inline.children or () if part.type in ("text", "code_inline"))
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order, with the comments above them."""
    marks: dict[str, str] = {}
    for token in tokens(page):
        if token.type == "fence":
            yield Block(page, (token.map or [0])[0] + 1, token.info.strip(), token.content, marks)
        marks = dict(MARK.findall(token.content)) if token.type == "html_block" else {}


@cache
def named_files() -> tuple[Path, ...]:
    """Every text file of the checkout that is not a test; without git, every one that a checkout would have."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for top in TOPS for path in (ROOT / top).rglob("*")]
    files = [ROOT / name for name in names if name.endswith(TEXTS) or name == "Makefile"]
    return tuple(file for file in files if file.is_file() and ROOT / "tests" not in file.parents)


def unfenced(page: Path) -> Iterator[str]:
    """Yield the places of code that is indented instead of fenced."""
    return (f"{page.relative_to(ROOT)}:{(token.map or [0])[0] + 1}" for token in tokens(page) if token.type == "code_block")
