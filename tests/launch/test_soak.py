"""A long run under random faults: no process of it grows, and bits and charges are those of its plan.

The figures of docs/how-to/chaos.md: pytest tests/launch/test_soak.py -m slow -rP
"""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import pytest
from chaos_runs import TINY, assert_charged_as_planned, chaos, charges, kinds, run
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, only_run, write_config
from run_results import last_models

from dpcfl_net.core import runlog
from dpcfl_net.launch.chaos import running_processes

ROUNDS = 600
LONG = {
    **TINY,
    "data": {**TINY["data"], "clients": [2, 2]},
    "rounds": ROUNDS,
    "privacy": {**SMALL["privacy"], "accountant": "rdp"},
    "output": {"transcript": "headers"},
}  # fmt: skip
FAULTS = {"drop": 0.002, "duplicate": 0.01, "delay": {"share": 0.05, "seconds": [0.01, 0.1]}}
RELAY = {"how": "relay", "default": {"latency_ms": 1, "resets_per_hour": 300}}
SAMPLE_S = 1.0
LAUNCHER = "launcher"
# Bounds on the growth from the second to the last quarter of the run, which are half of its rounds apart. A page of a fork is counted once
# it is written to, so that the first quarter is left out. The little that is kept of a round, such as ledger entries and its printed line,
# holds about a page, 4 KiB.
MOST_GROWTH = 7 * 1024 * ROUNDS // 2  # bytes
MOST_MORE = 2  # descriptors, sockets, threads: a connection that is being replaced has two


@dataclass
class Sample:
    """One process at one time."""

    uss: int
    descriptors: int
    sockets: int
    threads: int


def sample(process: psutil.Process) -> Sample | None:
    """Measure a process; None if it has ended."""
    try:
        with process.oneshot():
            memory, threads = process.memory_full_info(), process.num_threads()
            return Sample(memory.uss, process.num_fds(), len(process.net_connections("all")), threads)
    except psutil.Error:
        return None


def watch(command: subprocess.Popen, out: Path) -> dict[tuple[str, int], list[Sample]]:
    """Sample all processes of a run while its coordinator runs; by title and process id."""
    found: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    while command.poll() is None:
        folders = [path for path in out.glob("*") if (path / "metrics.jsonl").exists()]
        running = running_processes(folders[0] / "logs") if folders else {}
        watched = {**running, LAUNCHER: [psutil.Process(command.pid)]} if "coordinator" in running else {}
        for title, processes in watched.items():
            for process in processes:
                if (measured := sample(process)) is not None:
                    found[title, process.pid].append(measured)
        time.sleep(SAMPLE_S)
    return found


def grown(samples: list[Sample], of: str) -> tuple[float, float]:
    """Median of a figure in the second and in the last quarter."""
    values = [getattr(one, of) for one in samples]
    quarter = len(values) // 4
    return median(values[quarter : 2 * quarter]), median(values[-quarter:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_process_grows_in_a_long_run_under_faults(tmp_path):
    undisturbed, _ = run(tmp_path / "undisturbed", None, LONG)
    kills = [{"kill": "client 3", "at": {"round": t, "step": "sent"}} for t in range(20, ROUNDS, 40)]
    plan = chaos(tmp_path, messages=[FAULTS], processes=kills)
    config = write_config(tmp_path / "c", **LONG, network=RELAY, runtime={"max_restarts": len(kills)})
    began = time.monotonic()
    command = subprocess.Popen(
        [*DPCFL, "run", str(config), "--out", str(tmp_path / "runs"), "--chaos", str(plan)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    series = watch(command, tmp_path / "runs")
    output, _ = command.communicate()
    assert command.returncode == 0, output
    folder = only_run(tmp_path / "runs")
    assert_nothing_left(folder)
    resets = sum({line["client"]: line["resets"] for line in runlog.read(folder / "links.jsonl")}.values())
    print(f"{ROUNDS} rounds in {time.monotonic() - began:.0f} s; {dict(kinds(folder))}, {resets} resets")
    longest = max(map(len, series.values()))
    whole = {title: samples for (title, _), samples in series.items() if len(samples) > 0.9 * longest}
    assert {LAUNCHER, "coordinator", "observer", "relay", "client 0", "client 1", "client 2"} <= set(whole)
    problems = []
    for title, samples in whole.items():
        columns = []
        for of, most in (("uss", MOST_GROWTH), ("descriptors", MOST_MORE), ("sockets", MOST_MORE), ("threads", 0)):
            before, after = grown(samples, of)
            columns.append(f"{before / 1e6:.2f} {after / 1e6:.2f}" if of == "uss" else f"{before:g} {after:g}")
            if after > before + most:
                problems.append(f"{title}: {of} grew from {before:g} to {after:g}")
        print(f"| {title} | {len(samples)} | {' | '.join(columns)} |")
    assert not problems
    assert last_models(folder) == last_models(undisturbed)
    assert charges(folder) == charges(undisturbed)
    assert_charged_as_planned(folder)
