"""Memory that a process may use, from the host and from limits of cgroup v2 and v1."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from dpcfl_net.core import cgroups, host_memory
from dpcfl_net.launch.cells import memory as memory_of_cells
from dpcfl_net.launch.cli import doctor
from dpcfl_net.launch.placement.local import local_node

GIB = 1 << 30
HOST = (64 * GIB, 40 * GIB)  # total and available


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Return a function that puts this process into a group, and writes limit, usage and cached files in GiB of groups."""
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=HOST[0], available=HOST[1]))

    def write(own, groups):
        (tmp_path / "own").write_text(f"5:cpu,cpuacct:/\n4:memory:/other\n0::/{own}\n")
        for name, (limit, used, cached) in groups.items():
            folder = tmp_path / "cgroup" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit if limit == 'max' else int(limit * GIB)}\n")
            (folder / "memory.current").write_text(f"{int(used * GIB)}\n")
            (folder / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {int(cached * GIB)}\nactive_file 2\n")

    return write


@pytest.mark.parametrize(
    ("own", "groups", "total", "available"),
    [
        ("", {}, 64, 40),  # the root of a host
        ("", {"": ("max", 3, 1)}, 64, 40),
        ("", {"": (8, 3, 0)}, 8, 5),  # in a container: docker --memory 8g
        ("", {"": (8, 7, 3)}, 8, 4),  # cached files can be given up
        ("", {"": (8, 8.5, 0)}, 8, 0),
        ("", {"": (60, 10, 0)}, 60, 40),  # the host has less than the limit leaves
        ("job/step", {"job/step": ("max", 1, 0), "job": (4, 2, 0)}, 4, 2),
        ("job/step", {"job/step": (4, 1, 0), "job": (6, 5, 0)}, 4, 1),
    ],
)
def test_a_limit_counts(own, groups, total, available, limited):
    limited(own, groups)
    assert (host_memory.total(), host_memory.available()) == (total * GIB, available * GIB)


@pytest.mark.parametrize(
    ("limit", "total", "available"),
    [(8 * GIB, 8, 6), (2**63 - 4096, 64, 40)],  # the second is that of a group without a limit
)
def test_a_limit_of_cgroup_v1_counts(tmp_path, limit, total, available, limited):
    """It was not read: a container of 8 GiB seemed to have all memory of its host."""
    limited("", {})
    (tmp_path / "own").write_text("4:memory:/job/step\n0::/\n")
    group = tmp_path / "cgroup" / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert (host_memory.total(), host_memory.available()) == (total * GIB, available * GIB)


def test_commands_count_the_limit(limited):
    limited("job", {"job": (0.75, 0.5, 0)})
    finding = next(finding for finding in doctor.examine(1000) if finding.subject == "memory")
    assert finding.verdict == "fails"
    assert finding.found.startswith("0.2 of 0.8 GiB available, about ")
    assert memory_of_cells.note([], 4).endswith("; 0.2 GiB are available")
    assert local_node(cpu=True).memory == GIB // 4
