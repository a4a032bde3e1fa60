"""The notebook in docs/examples runs in a real kernel, with its event loop and its signal handlers."""

from __future__ import annotations

import nbclient
import nbformat
import pytest
from conftest import ROOT

PATH = ROOT / "docs" / "examples" / "quickstart.ipynb"
QUICK = 'rounds=2, privacy={"epsilon": 5}'


@pytest.mark.slow
def test_the_quickstart_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(PATH, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('privacy={"epsilon": 5}', QUICK)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    text = "\n".join(str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "<progress value='2' max='2'>" in text, "the bar is drawn in place, without widgets"
    assert "finished after 2 of 2 rounds" in text
    assert "handlers restored: True" in text
    assert "stderr" not in text


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
