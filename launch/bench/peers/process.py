"""Start of a peer program, and how it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.launch.bench.timing import Sample

LIMIT_S = 300


def run(program: str, *arguments: object) -> Sample:
    """Run a program of this package and return its sample.

    Args:
        program: Name of the module.
        arguments: Its arguments.

    Raises:
        RunFailed: If it fails or takes longer than five minutes.
    """
    command = [sys.executable, "-W", "ignore", "-m", f"dpcfl_net.launch.bench.peers.{program}", *map(str, arguments)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(command)} took longer than {LIMIT_S} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu"')]
    if done.returncode or not lines:
        raise RunFailed(f"{' '.join(command)} failed: {done.stderr[-800:]}")
    found = json.loads(lines[-1])
    return Sample(found["cpu"], found["wall"])


def family_seconds() -> float:
    """Return the processor time of this process and of all its descendants, running or ended."""
    import psutil

    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class Rounds:
    """Times at the starts of rounds; the first `warm` rounds do not count.

    Args:
        warm: Rounds before the measured ones.
    """

    warm: int = 2
    marks: list[tuple[float, float]] = field(default_factory=list)

    def mark(self) -> None:
        """Note the start of a round, or the end of the last one."""
        self.marks.append((time.perf_counter(), family_seconds()))

    def report(self) -> None:
        """Print the means of the measured rounds."""
        marks = self.marks[self.warm :]
        rounds = len(marks) - 1
        cpu, wall = ((marks[-1][index] - marks[0][index]) / rounds for index in (1, 0))
        print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)
