"""`make docs` builds the site without a warning, with every page in its navigation."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from pages import ROOT, pages

pytestmark = pytest.mark.slow


@pytest.mark.skipif(importlib.util.find_spec("myst_nb") is None, reason="needs the extra docs: pip install -e '.[docs]'")
def test_the_site_builds_strictly_and_its_navigation_has_every_page(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", tmp_path]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "index.html").read_text()
    for page in [*(page for page in pages() if ROOT / "docs" in page.parents), *(ROOT / "docs" / "tutorials").glob("*.ipynb")]:
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (tmp_path / name).is_file()
        assert str(name) == "index.html" or f'href="{name}"' in front, f"{name} is not in the navigation"
