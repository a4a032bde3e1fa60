"""Cores that a process may use, from its affinity and from quotas of cgroup v2."""

from __future__ import annotations

import os

import pytest

from dpcfl_net.core import cgroups, cores


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),  # in a container: docker --cpus 2
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "210000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 8),
        (
            "0::/job/step\n",
            {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "150000 50000\n"},
            3,
        ),  # the smallest of all counts
        ("0::/job/step\n", {"job/step/cpu.max": "100000 100000\n", "job/cpu.max": "300000 100000\n"}, 1),
        ("12:cpu,cpuacct:/job\n0::/other\n", {"job/cpu.max": "100000 100000\n"}, 8),
        ("12:cpu,cpuacct:/job\n", {}, 8),  # cgroup v1 alone
        ("0::/../outside\n", {"cpu.max": "400000 100000\n"}, 4),  # a group outside the view of a container
        (None, {"cpu.max": "400000 100000\n"}, 4),
    ],
)
def test_a_quota_limits_the_cores(own, files, usable, tmp_path, monkeypatch):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cores.usable_cores() == usable


def test_no_more_than_the_affinity():
    assert 1 <= cores.usable_cores() <= len(os.sched_getaffinity(0))
