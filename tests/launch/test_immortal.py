"""Immortal objects: a child that uses the objects of its parent copies no page of them, and other objects are freed as before."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FILE = ROOT / "launch" / "placement" / "immortal.py"
VERSIONS = ((3, 12), (3, 13))  # in which the count alone makes an object immortal
OTHERS = ((3, 11), (3, 14), (3, 15))
USED = """
import gc, json, os, runpy, sys, weakref
keep = runpy.run_path(sys.argv[1])["keep_for_ever"]
made = [type(f"T{n}", (), {}) for n in range(5_000)]
file, late = open(sys.argv[1]), []
def private():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty")) << 10
def used_by_a_child():
    # Private bytes of a forked process after it has referred to each class.
    gc.collect()
    gc.freeze()
    near, far = os.pipe()
    if not os.fork():
        before = private()
        held = made * 2
        os.write(far, str(private() - before - 8 * len(held)).encode())
        os._exit(0)
    os.wait()
    gc.unfreeze()
    return int(os.read(near, 99))
found = {"before": used_by_a_child(), "objects": keep(), "after": used_by_a_child(), "again": keep()}
counts = sys.getrefcount(made[0]), sys.getrefcount(file)
more = [made[0], file]
found["changes"] = sys.getrefcount(made[0]) - counts[0], sys.getrefcount(file) - counts[1]
class Late: pass
late = Late()
seen = weakref.ref(late)
del late
gc.collect()
found["freed"] = seen() is None
print(json.dumps(found))
"""


@functools.cache
def interpreters() -> dict[tuple[int, int], str]:
    """Each version of Python on this machine: on the path, or beside the one that runs."""
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 16)]
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3")
    answering: dict[tuple[int, int], str] = {}
    for path in filter(None, (sys.executable, *named, *map(str, beside))):
        version = [path, "-S", "-c", "import sys; print(*sys.version_info[:2])"]  # without the packages of its site
        done = subprocess.run(version, capture_output=True, text=True, check=False)
        if not done.returncode:
            answering.setdefault(tuple(map(int, done.stdout.split())), path)
    return answering


@pytest.fixture
def interpreter(version: tuple[int, int]) -> str:
    """Asked only by the test process that runs this file: all of them collect it."""
    if version not in interpreters():
        pytest.skip(f"needs CPython {version[0]}.{version[1]}")
    return interpreters()[version]


def measured(interpreter: str) -> dict:
    done = subprocess.run([interpreter, "-c", USED, FILE], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_child_copies_no_page_of_what_it_uses(interpreter):
    found = measured(interpreter)
    assert found["before"] > 5_000_000
    assert found["after"] < 1_000_000
    assert found["objects"] > 5_000
    assert found["again"] < 1_000
    assert found["changes"] == [0, 1]  # a file counts on
    assert found["freed"]


@pytest.mark.parametrize("version", OTHERS)
def test_another_version_changes_nothing(interpreter):
    """In CPython 3.14 workers crashed whose parent had changed the counts."""
    found = measured(interpreter)
    assert (found["objects"], found["again"], found["freed"]) == (0, 0, True)
