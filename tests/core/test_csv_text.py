"""CSV files: no cell is a formula, and every text can be restored."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from dpcfl_net.core.csv_text import csv_text

FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
NAMES = ("=HYPERLINK(1)", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'=1", "''", "plain", "a=b", "-")


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_name_is_no_formula_and_comes_back(name):
    for text in (csv_text([name], []), csv_text(["name"], [[name]])):
        cell = [*csv.reader(io.StringIO(text, newline=""))][-1][0]
        assert not cell.startswith(FORMULAS)
        assert (cell[1:] if cell.startswith("'") else cell) == name
    assert csv_text(["folder"], [[Path("-run")]]) == "folder\n'-run\n"


def test_numbers_stay_numbers():
    text = csv_text(["a", "b", "c", "d", "e", "f"], [[-0.5, -3, np.float32(-0.25), "-1e-5", None, "70.0 +- 0.5"]])
    assert text == "a,b,c,d,e,f\n-0.5,-3,-0.25,-1e-5,,70.0 +- 0.5\n"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_csv_button_of_a_figure_writes_no_formula_either(tmp_path):
    source = (ROOT / "dpcfl_net" / "report" / "figures.js").read_text(encoding="utf-8")
    function = source[source.index("function table(figure)") :].split("\n}\n")[0] + "\n}\n"
    figure = {"data": [{"name": name, "x": [-1.5], "y": [None]} for name in NAMES]}
    (tmp_path / "run.js").write_text(f"{function}process.stdout.write(table({json.dumps(figure)}))")
    text = subprocess.run(["node", tmp_path / "run.js"], check=True, capture_output=True).stdout.decode()
    lines = [*csv.reader(io.StringIO(text, newline=""))][1:]
    assert [[name.removeprefix("'"), *others] for name, *others in lines] == [[name, "-1.5", "", ""] for name in NAMES]
    assert not [name for name, *_ in lines if name.startswith(FORMULAS)]
