"""docs/explanation/reproductions.md names the figures that show a part of their runs, and those that were judged more than once."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

from conftest import ROOT

from dpcfl_net.reproduce.base import Earlier, OutOfTime, registry

PAGE = (ROOT / "docs" / "explanation" / "reproductions.md").read_text()


def test_the_figures_with_claims_about_a_part_of_their_runs_are_named(tmp_path):
    nothing_ran = SimpleNamespace(
        scale="laptop",
        folder=tmp_path,
        say=print,
        asked_seeds=None,
        seeds=lambda usual: usual,
        earlier=Earlier(),
        finished=lambda grids: [[] for _ in grids],
    )
    shown, waiting = set(), set()
    for name, figure in registry().items():
        if figure.run_columns:
            try:
                figure().compute(nothing_ran)
                shown.add(name)
            except OutOfTime:
                waiting.add(name)
    assert waiting
    sentence = PAGE.partition("the same command continues.")[2].partition("have claims about")[0]
    named, paper = set(), ""
    for text in re.findall(r"`([^`]+)`", sentence):
        paper = text.partition("/")[0] if "/" in text else paper
        named.add(f"{paper}/{text.rpartition('/')[2]}")
    assert named == shown


def test_the_figures_that_were_judged_more_than_once_are_named():
    part = PAGE.partition("| looks | figures |\n")[2].partition("\n\n")[0]
    named = {
        name: int(looks) for looks, names in re.findall(r"^\| (\d+) \| (.*) \|$", part, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", names)
    }  # fmt: skip
    found = [json.loads(file.read_text()) for file in (ROOT / "docs" / "measured").glob("*-laptop/claims.json")]
    assert named == {cell["name"]: cell["looks"] for cell in found if (cell.get("looks") or 1) > 1}
