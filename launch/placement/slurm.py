"""SLURM: starts an agent on each node of an allocation."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement import routes
from dpcfl_net.launch.placement.base import agent_command
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.remote import Host
from dpcfl_net.transport.sockets import is_loopback

CPUS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def allocation() -> list[tuple[str, int]]:
    """Read the allocation that this process runs in.

    Returns:
        Name and number of CPUs of each node.

    Raises:
        ConfigError: Outside of an allocation.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "--on slurm works inside an allocation: salloc -N 2 dpcfl launch ..., or write a batch script with --sbatch FILE"
        )
    missing = [name for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE") if name not in os.environ]
    if missing:
        raise ConfigError(f"{missing[0]} is not set: SLURM sets it inside an allocation")
    nodes = os.environ["SLURM_JOB_NODELIST"]
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ConfigError(f"scontrol does not know the nodes {nodes!r}: {listed.stderr.strip()}")
    names = listed.stdout.split()
    return list(zip(names, cpus_of(os.environ["SLURM_JOB_CPUS_PER_NODE"], len(names)), strict=True))


def cpus_of(text: str, nodes: int) -> list[int]:
    """Parse SLURM's "4(x2),2" to the CPUs of each node.

    Args:
        text: Value of SLURM_JOB_CPUS_PER_NODE.
        nodes: Number of nodes.

    Raises:
        ConfigError: If the text names another number of nodes.
    """
    cpus = [int(count) for count, times in CPUS.findall(text) for _ in range(int(times or 1))]
    if len(cpus) != nodes:
        raise ConfigError(f"SLURM_JOB_CPUS_PER_NODE is {text!r}: names {len(cpus)} nodes, the allocation has {nodes}")
    return cpus


def make_hosts(nodes: Sequence[tuple[str, int]], *, python: str, root: str, run: str, logs: Path, cpu: bool) -> list[Host]:
    """Describe the nodes of an allocation as hosts.

    Hosts are numbered: with a shared file system a run can be resumed on other nodes.

    Args:
        nodes: Name and number of CPUs of each node.
        python: Python interpreter on the nodes.
        root: Folder for keys and ledgers on the nodes.
        run: Name of the run.
        logs: Folder of the logs on this machine.
        cpu: True if no worker may use a GPU.
    """
    hosts = []
    for k, (node, cpus) in enumerate(nodes):
        name = f"node-{k}"
        agent = agent_command(python, root, run, name, cpu=cpu)
        # One task per node: its agent forks the workers, which share loaded libraries and the GPUs. --overlap: the launcher's
        # step runs on the first node too.
        step = ["srun", "--quiet", "--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", f"--nodelist={node}",
                f"--cpus-per-task={cpus}", "--mem=0", "--job-name=dpcfl-agent"]  # fmt: skip
        hosts.append(Host(name, partial(CommandConnection, [*step, *agent], logs / f"host_{name}.log"), cpus, location=node))
    return hosts


def own_address(nodes: Iterable[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which the nodes reach this machine: that of its name, unless the name is of loopback or unknown.

    Args:
        nodes: Names of the nodes.
        environment: Environment variables.

    Raises:
        ConfigError: If neither this machine nor a node has a name that resolves.
    """
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(environment.get("SLURMD_NODENAME") or socket.gethostname())
        if not is_loopback(found):
            return found
    return routes.own_address(nodes)
