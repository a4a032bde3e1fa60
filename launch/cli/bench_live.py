"""Benchmark of a run with many clients: seconds per round, processes, memory, processor time by role."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.bench import family
from dpcfl_net.launch.bench.runs import rounds_of
from dpcfl_net.launch.running import Quiet

DIGITS = 1437  # training records of digits
QUIET_ROUNDS = 2  # at the end; memory is measured in them, which slows them down


def live(clients: int = 1000, sampled: int = 100, rounds: int = 8, group: int | None = None) -> dict[str, Any]:
    """Run DP-FedAvg with one record of 64 pixels per client, and print the results.

    The records are digits, or random pixels if there are more clients than digits.

    The clients compute almost nothing, so a round consists of start, connection, task and exit. Memory is the sum of the
    proportional set sizes (PSS) of all processes of the run, with the launcher and the parents.

    Args:
        clients: Number of clients.
        sampled: Clients per round.
        rounds: Number of rounds.
        group: Clients per worker process; None: as `runtime.clients_per_worker` if unset.

    Returns:
        The results.

    Raises:
        DpcflError: If the run fails.
        KeyboardInterrupt: If it is interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="dpcfl-live-") as folder:
        watcher = _Watcher(rounds)
        settings = configured(clients, sampled, rounds, group)
        lines = rounds_of(Path(folder), settings, watcher)
    found = watcher.figures(lines, sampled)
    print(f"{clients} clients, {sampled} sampled per round, {settings.runtime.clients_per_worker} per process; {rounds} rounds")
    print(
        f"seconds per round: {found['seconds']:.2f} (first round {found['first_seconds']:.2f}); {found['started']:.0f} clients started"
    )
    if not found["cpu_ms_by_role"]:
        print("processor time: not measured, since rounds ended between two looks at the processes; use more clients")
    else:
        print(f"milliseconds of processor time per {found['cpu_per']}: {found['cpu_ms']:.1f}, by role")
    for who, spent in found["cpu_ms_by_role"].items():
        print(f"  {who:<12}{spent:7.1f}")
    if found["pss_processes"]:
        print(
            f"memory (PSS): {found['pss_gib']:.2f} GiB in {found['pss_processes']} processes; {found['worker_mib']:.1f} MiB per worker"
        )
    else:
        print("memory (PSS): not measured, since processes ended during every look at them; use more clients")
    print(
        f"worker processes: at most {found['most_workers']}; in each second: {' '.join(map(str, found['workers_by_second']))}"
    )
    return found


def configured(clients: int, sampled: int, rounds: int, group: int | None) -> Config:
    """Build the configuration of the run; arguments as for `live`."""
    dataset = "digits" if clients <= DIGITS else "dpcfl_net.launch.bench.synthetic:small"
    grouped = {} if group is None else {"clients_per_worker": group}
    return configuration.resolve({
        "name": "live",
        "data": {"dataset": dataset, "clients": [clients], "shift": "none", "train_per_client": 1, "test_per_client": 1},
        "model": {"name": "linear"},
        "rounds": rounds,
        "local": {"batch_size": 1},
        "privacy": {
            "epsilon": 5.0, "delta": min(1e-4, 0.1 / clients), "unit": "client", "trust": "trusted-server",
            "adjacency": "replace-one",
        },
        "algorithm": {"name": "dp-fedavg", "sampling_rate": sampled / clients},
        "runtime": {"max_live_workers": sampled, **grouped},
        "output": {"transcript": "off"},
    })  # fmt: skip


@dataclass
class _Watcher(Quiet):
    """Progress display that samples the processes of a run."""

    rounds: int
    started: float = field(default_factory=time.monotonic)
    counts: list[tuple[float, int]] = field(default_factory=list)
    memory: dict[str, family.Memory] = field(default_factory=dict)
    spent: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # round, and processor seconds by role so far

    def update(self, view: Any) -> None:
        members = list(family.members())
        self.counts.append((time.monotonic() - self.started, sum(role == "worker" for role, _ in members)))
        if 0 < view.round < self.rounds and view.round > (self.spent[-1][0] if self.spent else 0):
            self.spent.append((view.round, family.processor_seconds(members)))
        if self.rounds - QUIET_ROUNDS <= view.round < self.rounds:
            found = family.memory(members)
            # Shares of a process that ends meanwhile fall to those that are read after it, and would count twice.
            left = {process.pid for _, process in family.members()}
            if _total(found) > _total(self.memory) and all(process.pid in left for _, process in members):
                self.memory = found

    def figures(self, lines: list[dict[str, Any]], sampled: int) -> dict[str, Any]:
        quiet = [line for line in lines if 1 < line["round"] <= self.rounds - QUIET_ROUNDS] or lines
        by_role, started = {}, 0
        if len(self.spent) > 1:
            (begin, before), (end, after) = self.spent[0], self.spent[-1]
            started = sum(line["started"] for line in lines if begin < line["round"] <= end)
            parts = started or sampled * (end - begin)  # if all clients stay alive, none starts
            by_role = {role: 1e3 * (after[role] - before.get(role, 0.0)) / parts for role in sorted(after)}
        by_second = {int(at): count for at, count in self.counts}
        return {
            "seconds": statistics.median(line["seconds"] for line in quiet),
            "first_seconds": lines[0]["seconds"],
            "started": statistics.median(line["started"] for line in quiet),
            "cpu_ms": sum(by_role.values()),
            "cpu_per": "started client" if started else "client and round",
            "cpu_ms_by_role": by_role,
            "pss_gib": _total(self.memory) / 2**30,
            "pss_processes": sum(each.processes for each in self.memory.values()),
            "worker_mib": (self.memory["worker"].proportional if "worker" in self.memory else 0.0) / 2**20,
            "most_workers": max(count for _, count in self.counts),
            "workers_by_second": list(by_second.values()),
        }


def _total(memory: dict[str, family.Memory]) -> float:
    return sum(each.all_proportional for each in memory.values())
