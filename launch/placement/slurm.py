"""SLURM: an agent on each node of an allocation by srun, and the batch script that asks for the allocation."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.remote import Host

CPUS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def allocation(environment: Mapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """(node, CPUs) of the allocation that this process runs in; ConfigError outside of one."""
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError(
            "--on slurm works inside an allocation: salloc -N 2 dpcfl launch ..., or sbatch the script of --sbatch"
        )
    missing = [name for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE") if name not in environment]
    if missing:
        raise ConfigError(f"{missing[0]} is not set, as SLURM sets it inside an allocation")
    nodes = environment["SLURM_JOB_NODELIST"]
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ConfigError(f"scontrol does not know the nodes {nodes!r}: {listed.stderr.strip()}")
    names = listed.stdout.split()
    return list(zip(names, cpus_of(environment["SLURM_JOB_CPUS_PER_NODE"], len(names)), strict=True))


def cpus_of(text: str, nodes: int) -> list[int]:
    """CPUs of each node from SLURM's "4(x2),2"; ConfigError if they are not of so many nodes."""
    found = [int(count) for count, times in CPUS.findall(text) for _ in range(int(times or 1))]
    if len(found) != nodes:
        raise ConfigError(f"SLURM_JOB_CPUS_PER_NODE is {text!r}: names {len(found)} nodes, the allocation has {nodes}")
    return found


def dialled(nodes: Sequence[tuple[str, int]], *, python: str, root: str, run: str, logs: Path) -> list[Host]:
    """The nodes of an allocation with the commands that reach them. They are numbered, since a shared file system
    lets a run go on on other nodes than it began on."""
    hosts = []
    for k, (node, cpus) in enumerate(nodes):
        name = f"node-{k}"
        agent = [python, "-m", "dpcfl_net.launch.placement.agent", "--root", root, "--run", run, "--node", name]
        # One task a node, whose agent forks the workers: they share what is loaded, and a GPU by leases. `overlap`: the launcher's own step runs on the first node.
        step = ["srun", "--quiet", "--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", f"--nodelist={node}",
                f"--cpus-per-task={cpus}", "--mem=0", "--job-name=dpcfl-agent"]  # fmt: skip
        hosts.append(Host(name, partial(CommandConnection, [*step, *agent], logs / f"host_{name}.log"), cpus, where=node))
    return hosts


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address that other nodes reach this one by: what its SLURM name resolves to."""
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"{name} does not resolve ({error}): give --address, this machine's as workers reach it") from None


def script(command: Sequence[str], *, name: str, nodes: int, cpus: int, gpus: int, time: str) -> str:
    """The batch script of a run: `command` is `dpcfl launch ... --on slurm` with its arguments."""
    if not re.fullmatch(r"(\d{1,4}-)?\d{1,6}(:\d{1,2}){0,2}", time):
        raise ConfigError(f"--time is {time!r}: must be as SLURM writes it, for example 2:00:00")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9._-]', '_', name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={cpus}",
        *([f"#SBATCH --gres=gpu:{gpus}"] if gpus else []),
        f"#SBATCH --time={time}",
        "#SBATCH --output=dpcfl-%j.log",
        "#SBATCH --signal=B:TERM@60",  # the launcher has a minute to stop its workers; the run can be resumed
        "",
        "set -eu",
        f"exec {shlex.join(command)}",
        "",
    ]
    return "\n".join(lines)
