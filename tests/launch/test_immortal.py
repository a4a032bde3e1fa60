"""Immortal objects: a child that uses the objects of its parent copies no page of them, and other objects are freed as before."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FILE = ROOT / "launch" / "placement" / "immortal.py"
FIRST = (3, 11)  # version that the project runs on
VERSIONS = ((3, 12), (3, 13))  # in which the count alone makes an object immortal
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


def interpreters(immortal: bool) -> list[str]:
    """Versions of Python on this machine with such objects, or without: on the path, or beside the one that runs."""
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 16)]
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3")
    answering = {}
    for path in filter(None, (sys.executable, *named, *map(str, beside))):
        done = subprocess.run(
            [path, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
        if not done.returncode:
            answering.setdefault(tuple(map(int, done.stdout.split())), path)
    return [path for version, path in sorted(answering.items()) if version >= FIRST and (version in VERSIONS) == immortal]


def measured(interpreter: str) -> dict:
    done = subprocess.run([interpreter, "-c", USED, FILE], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "interpreter", interpreters(True) or [pytest.param("", marks=pytest.mark.skip("needs CPython 3.12 or 3.13"))]
)
def test_a_child_copies_no_page_of_what_it_uses(interpreter):
    found = measured(interpreter)
    assert found["before"] > 5_000_000
    assert found["after"] < 1_000_000
    assert found["objects"] > 5_000
    assert found["again"] < 1_000
    assert found["changes"] == [0, 1]  # a file counts on
    assert found["freed"]


@pytest.mark.parametrize(
    "interpreter", interpreters(False) or [pytest.param("", marks=pytest.mark.skip("needs another version of CPython"))]
)
def test_another_version_changes_nothing(interpreter):
    """In CPython 3.14 workers crashed whose parent had changed the counts."""
    found = measured(interpreter)
    assert (found["objects"], found["again"], found["freed"]) == (0, 0, True)
