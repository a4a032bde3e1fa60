"""Memory of processes: kept while computing, returned when idle, and no gaps that spread over shared pages."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dpcfl_net.training import memory

linux = pytest.mark.skipif(memory.freed_bytes() == float("inf"), reason="glibc before 2.33 or another allocator")
BEGIN = """
import ctypes, psutil
from dpcfl_net.training import memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use(size):  # writes to every byte and frees
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
def resident():
    return psutil.Process().memory_info().rss
"""


def run(code: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@linux
def test_freed_memory_is_kept_up_to_a_bound_and_returned_when_idle():
    before, kept, large, idle = run(
        "memory.keep_freed(); print(resident()); use(30 << 20); memory.give_back_freed(); print(resident())\n"
        "first, second, third = (libc.malloc(30 << 20) for _ in range(3))\n"
        "for block in (first, second, third): ctypes.memset(block, 1, 30 << 20)\n"
        "for block in (first, second, third): libc.free(block)\n"
        "memory._may_look_at = 0.0\n"  # however long the first look took
        "memory.give_back_freed(); print(resident()); use(30 << 20); memory.give_back_all(); print(resident())"
    )
    assert kept > before + (29 << 20)
    assert large < before + (10 << 20)
    assert idle < before + (10 << 20)


def test_a_process_that_looks_slowly_through_its_free_memory_looks_rarely(monkeypatch):
    now, looks = [100.0], []

    def slow() -> float:
        looks.append(now[0])
        now[0] += 0.02
        return 0.0

    monkeypatch.setattr(memory, "freed_bytes", slow)
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(memory, "_may_look_at", 0.0)
    while now[0] < 103.0:
        memory.give_back_freed()
        now[0] += 0.3
    assert looks == pytest.approx([100.0, 101.22, 102.44])  # the first call more than a second after the end of the last look


@linux
def test_after_the_gaps_are_filled_small_blocks_come_from_one_place():
    code = (
        "held = [libc.malloc(size) for size in (200, 1000, 3000) for _ in range(2000)]\n"
        "for block in held[::2]: libc.free(block)\n"
        "{fill}\n"
        "new = [libc.malloc(size) for size in (200, 1000, 3000) for _ in range(300)]\n"
        "print(len({{block >> 12 for block in new}} & {{block >> 12 for block in held}}))"
    )
    (scattered,) = run(code.format(fill=""))
    (shared,) = run(code.format(fill="memory.fill_gaps()"))
    assert scattered > 100
    assert shared < 20
