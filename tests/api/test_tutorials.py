"""The notebooks in docs/tutorials: executed in a real kernel (slow), and checked in form in every run of the tests."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

FOLDER = ROOT / "docs" / "tutorials"
NAMES = ("first_run", "your_own_algorithm", "attack_your_own_server")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MOST_BYTES, MOST_PICTURE = 100_000, 40_000
EARLIER = {"your_own_algorithm": "own-Forgetful-20260101-000000"}  # run folder of an earlier execution


def read(name: str) -> Any:
    import nbformat  # here: each test process would import it at collection, in half a second

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def source_of(cell: Any) -> str:
    """The Python of a cell: that of the file which a %%writefile cell writes."""
    first, _, rest = cell.source.partition("\n")
    return rest if first.startswith("%%writefile ") else cell.source


def text_of(notebook: Any) -> str:
    return "\n".join(str(output) for cell in code_cells(notebook) for output in cell.outputs)


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Execute a notebook in an empty folder, or in one where it was executed before, with its event loop."""
    import nbclient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
    work = folder / "work"
    work.mkdir()
    if name in EARLIER:
        (work / "runs" / EARLIER[name]).mkdir(parents=True)
    notebook = read(name)
    nbclient.NotebookClient(notebook, timeout=240, record_timing=False, resources={"metadata": {"path": str(work)}}).execute()
    notebook.metadata = METADATA
    return notebook


EXPECTED = {  # outputs by which a tutorial shows its point
    "first_run": ("<progress value='10' max='10'>", "finished after 10 of 10 rounds", "[True, True, True, ", "<svg"),
    "your_own_algorithm": (
        "fair_mean:FairMean",
        "must be greater than or equal to 0",
        "the mechanisms that ran are not those that were charged",
    ),
    "attack_your_own_server": ("Images reconstructed", "The claim stands", "data:image/png;base64", "'text/plain': 'True'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    import nbformat

    notebook = execute(name, tmp_path, monkeypatch)
    text = text_of(notebook)
    assert [part for part in EXPECTED[name] if part not in text] == []
    assert "stderr" not in text
    if request.config.getoption("--record-notebooks"):
        (FOLDER / f"{name}.ipynb").write_text(nbformat.writes(notebook, indent=1) + "\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_tutorial_is_whole_and_small(name: str):
    import nbformat

    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA, "no trace of the machine that executed it"
    text = text_of(notebook)
    assert [part for part in EXPECTED[name] if part not in text] == [], "record it: pytest --record-notebooks -m slow"
    assert not re.search(r"/(tmp|home|root|work|Users)/", text), "a path of the machine that executed it"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], "executed once, from the top"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES
    assert all(len(picture) < MOST_PICTURE for picture in re.findall(r"base64,[A-Za-z0-9+/=]+", text))


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_tutorial_imports_what_exists(name: str):
    written = {path for cell in code_cells(read(name)) for path in re.findall(r"^%%writefile (\w+)\.py", cell.source)}
    for cell in code_cells(read(name)):
        tree = ast.parse(source_of(cell))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert all(importlib.import_module(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module not in written:
                module = importlib.import_module(str(node.module))
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert all(importlib.util.find_spec(f"{node.module}.{name}") for name in missing)


def test_every_tutorial_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)
