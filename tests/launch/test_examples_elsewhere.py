"""Templates for clouds: as far as they can be checked without one."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from conftest import ROOT

from dpcfl_net.launch.placement.ssh import read_hosts

EXAMPLES = ROOT / "docs" / "examples"
ADDRESSES = ["10.1.0.4", "10.1.0.7", "10.1.0.9"]


def run_on_node(home, rank: int) -> list[str]:
    """Run the `run` section as SkyPilot would on a node, with a `dpcfl` that notes its arguments; return them."""
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    program = home / "dpcfl" / "bin" / "dpcfl"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {home}/words\n')
    program.chmod(0o755)
    environment = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
    }
    subprocess.run(["bash", "-c", task["run"]], env=environment, cwd=home, check=True)
    words = home / "words"
    return words.read_text().splitlines() if words.exists() else []


def test_the_first_machine_of_skypilot_writes_a_hosts_file_and_launches(tmp_path):
    words = run_on_node(tmp_path, 0)
    assert words[: words.index("--address") + 2] == [
        "launch", "quickstart", "--on", "ssh", "--hosts", "hosts.yaml", "--address", ADDRESSES[0],
    ]  # fmt: skip
    file = read_hosts(tmp_path / "hosts.yaml")
    assert [(host.name, host.address) for host in file.hosts] == [(f"node-{k}", ADDRESSES[k]) for k in range(3)]
    assert file.python == f"{tmp_path}/dpcfl/bin/python"
    assert file.hosts[0].options == ["-i", f"{tmp_path}/.ssh/dpcfl_key", "-o", "StrictHostKeyChecking=accept-new"]


def test_the_other_machines_of_skypilot_start_nothing(tmp_path):
    assert run_on_node(tmp_path, 1) == []
    assert not (tmp_path / "hosts.yaml").exists()


def test_git_ignores_the_key_pair_that_the_template_of_skypilot_makes():
    """`git add` in the repository, where the template says to make it, added the secret key."""
    made = re.search(r"ssh-keygen .* -f (\S+)", (EXAMPLES / "skypilot.yaml").read_text())
    assert made is not None
    assert {f"/{made[1]}", f"/{made[1]}.pub"} <= set((ROOT / ".gitignore").read_text().splitlines())


def test_the_kubernetes_template_passes_the_schemas():
    validator = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()):
        validator.validate(document, "1.37", strict=True)


def test_the_loop_of_the_kubernetes_template_writes_a_hosts_file(tmp_path):
    """The commented lines of the template, with a `kubectl` that lists three pods."""
    lines = (EXAMPLES / "kubernetes.yaml").read_text().splitlines()
    commented = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    first, last = (next(k for k, line in enumerate(commented) if mark in line) for mark in ("{ echo 'python", "> hosts.yaml"))
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\nprintf 'pod/dpcfl-workers-%s\\n' 0-abc 1-def 2-ghi\n")
    kubectl.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", "\n".join(commented[first : last + 1])], env=environment, cwd=tmp_path, check=True)
    file = read_hosts(tmp_path / "hosts.yaml")
    assert [host.name for host in file.hosts] == ["dpcfl-workers-0-abc", "dpcfl-workers-1-def", "dpcfl-workers-2-ghi"]
    assert file.hosts[2].through == ["kubectl", "exec", "-i", "dpcfl-workers-2-ghi", "--"]
