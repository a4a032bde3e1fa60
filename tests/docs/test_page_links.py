"""Links, anchors and named paths of the documentation lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pages import PARTS, ROOT, Link, anchors, links, named_files, pages, unfenced

DOCS = ROOT / "docs"
DOCS_PAGES = [page for page in pages() if DOCS in page.parents]
_PATH = re.compile(r"(?<![\w/.])docs/[\w./-]*\w")
_MADE_UP = tuple((ROOT / "tests" / "docs").glob("*.py"))  # they name broken paths as examples


def _problem(link: Link) -> str | None:
    """Say what is wrong with a link; None if it leads somewhere."""
    if re.match(r"[a-z]+:", link.target):
        return None
    path, _, anchor = link.target.partition("#")
    there = (link.page.parent / path).resolve() if path else link.page
    where = f"{link.page.relative_to(ROOT)}:{link.line}: {link.target}"
    if not there.exists():
        return f"{where}: no such file"
    if there.is_dir() and DOCS in link.page.parents:
        return f"{where}: a folder, which the site does not have; link a page or a file"
    if anchor and there.suffix == ".md" and anchor not in anchors(there):
        return f"{where}: no such heading; the page has {', '.join(sorted(anchors(there)))}"
    return None


def test_every_link_leads_to_a_page_a_file_or_a_heading():
    found = [link for page in pages() for link in links(page)]
    assert len(found) > 100
    assert [problem for link in found if (problem := _problem(link))] == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("privacy.md#time", None),
        ("../how-to/", "a folder"),
        ("lost.md", "no such file"),
        ("privacy.md#lost", "no such heading"),
        ("#lost", "no such heading"),
    ],
)
def test_a_broken_link_is_found(target: str, expected: str | None):
    problem = _problem(Link(DOCS / "explanation" / "privacy.md", 1, target))
    assert problem is None if expected is None else expected in str(problem)


def _texts(file: Path) -> list[str]:
    """Return what people read in a file that names docs: the strings of a module, everything of another file."""
    text = file.read_text()
    if "docs/" not in text or file.suffix != ".py":
        return [text]
    found = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return [text for text in found if isinstance(text, str)]


def test_every_path_of_docs_that_is_named_anywhere_exists():
    files = [*named_files(), *(ROOT / "tests").rglob("*.py")]
    named = {(path, file) for file in files if file not in _MADE_UP for text in _texts(file) for path in _PATH.findall(text)}
    assert len(named) > 50
    assert sorted(f"{file.relative_to(ROOT)}: {path}" for path, file in named if not (ROOT / path).exists()) == []


def test_each_page_is_in_a_part_and_its_part_links_it():
    for page in DOCS_PAGES:
        name = page.relative_to(DOCS)
        assert str(name) == "index.md" or name.parts[0] in PARTS, f"move docs/{name} into one of {', '.join(PARTS)}"
    for part in PARTS:
        parents = [DOCS / part / "index.md", *(DOCS / part).glob("reproductions.md")]
        linked = {(parent.parent / link.target).resolve() for parent in parents for link in links(parent)}
        unlinked = [
            p.name for p in (DOCS / part).rglob("*.*") if p.suffix in (".md", ".ipynb") and p not in {*linked, *parents}
        ]
        assert unlinked == [], f"link them in docs/{part}/index.md: the navigation is made of its links"


def test_each_page_says_first_what_it_is_for():
    for page in DOCS_PAGES:
        paragraphs = page.read_text().split("\n\n")
        assert paragraphs[0].startswith("# ")
        assert paragraphs[1].startswith("After "), f"{page.relative_to(ROOT)}: begin with `After this page you ...`"


def test_code_is_fenced_with_its_language():
    assert [place for page in pages() for place in unfenced(page)] == []
