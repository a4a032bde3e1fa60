"""`make test` runs every test in exactly one of its two stages."""

from __future__ import annotations

from pathlib import Path

from conftest import ROOT, deselect_other_stage
from stages import RUNS, UNIT_FOLDERS, UNITS, WHOLE_RUNS, stage_of

TESTS = ROOT / "tests"


def test_the_listed_folders_and_files_exist():
    assert all((TESTS / name).is_dir() for name in UNIT_FOLDERS)
    assert all((TESTS / name).is_file() for name in WHOLE_RUNS)


def test_the_makefile_runs_both_stages_and_each_file_is_in_one():
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert [stage for line in lines for stage in (UNITS, RUNS) if f"--stage {stage}" in line] == [UNITS, RUNS]
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    assert {stage_of(file) for file in files} == {UNITS, RUNS}


def test_each_collected_test_is_selected_in_exactly_one_stage():
    class Item:
        def __init__(self, file: str) -> None:
            self.path = TESTS / file

    items = [Item(str(path.relative_to(TESTS))) for path in sorted(TESTS.rglob("test_*.py"))]
    kept = [[item.path for item in deselect_other_stage(items, stage)[0]] for stage in (UNITS, RUNS)]
    assert sorted(kept[0] + kept[1]) == [item.path for item in items]
    assert not set(kept[0]) & set(kept[1])


def test_an_unknown_file_runs_in_the_second_stage():
    assert stage_of(Path("new_room/test_new.py")) == RUNS
