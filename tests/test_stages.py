"""`make test` runs every test in exactly one of its two stages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, is_of_other_stage
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


def test_each_file_is_left_out_of_exactly_one_stage():
    for path in TESTS.rglob("test_*.py"):
        assert is_of_other_stage(path, UNITS) != is_of_other_stage(path, RUNS)
    assert not is_of_other_stage(TESTS / "conftest.py", UNITS)


def test_a_stage_runs_its_own_files_alone():
    files = ("tests/core/test_buffers.py", "tests/launch/test_logs.py")
    for stage, file in zip((UNITS, RUNS), files, strict=True):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--stage", stage, "--collect-only", "-p", "no:cacheprovider", *files],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert set(re.findall(r"^tests/\S+\.py", done.stdout, re.MULTILINE)) == {file}, done.stdout + done.stderr


def test_an_unknown_file_runs_in_the_second_stage():
    assert stage_of(Path("new_room/test_new.py")) == RUNS
