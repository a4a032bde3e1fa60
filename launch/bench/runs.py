"""Runs of a configuration for benchmarks: processor time and wall time per round, memory by role."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch import running
from dpcfl_net.launch.bench import family, noop_algorithm
from dpcfl_net.launch.bench.timing import Sample

MODELS = {"wide": "dpcfl_net.launch.bench.host:wide"}  # those that the package does not name
DATA = {
    "wide": "dpcfl_net.launch.bench.synthetic:gray",
    "cnn": "dpcfl_net.launch.bench.synthetic:gray",
    "resnet18": "dpcfl_net.launch.bench.synthetic:color",
}
LOOK_S = 0.02
MEMORY_LOOKS = 3  # the largest counts
WARM = 2  # rounds before the measured ones: workers load torch and build the model in them


@dataclass(frozen=True)
class Cost:
    """Cost of one round of a run.

    Attributes:
        round: Seconds per round: processor time of coordinator, observer, workers and their parents.
        by_role: Processor seconds per round, by role.
        private: Memory of a process that no other process shares, in bytes: the median by role.
        started: Processor seconds of the same processes before the first round.
        total: Private memory of all processes of the run but the launcher, and shared pages once, in bytes.
        launcher: Private memory of the launcher, which is the measuring process, in bytes.
        bytes_up: Bytes that the coordinator receives in a round.
        bytes_down: Bytes that the coordinator sends in a round.
    """

    round: Sample
    by_role: dict[str, float]
    private: dict[str, float]
    started: float
    total: float
    launcher: float
    bytes_up: float
    bytes_down: float


def config(model: str, clients: int, rounds: int, algorithm: dict[str, Any], **sections: Any) -> Config:
    """Build the configuration of a benchmark.

    Args:
        model: A key of `DATA`.
        clients: Number of clients, all connected.
        rounds: Measured rounds; `WARM` rounds and a last one come on top.
        algorithm: The `algorithm` section.
        sections: Further sections.
    """
    return configuration.resolve({
        "name": "bench",
        "data": {"dataset": DATA[model], "clients": [clients], "shift": "none", "train_per_client": 1, "test_per_client": 1},
        "model": {"name": MODELS.get(model, model)},
        "rounds": rounds + WARM + 1,
        "local": {"batch_size": 1},
        "privacy": {"epsilon": 5.0, "delta": 1e-5},
        "algorithm": algorithm,
        "output": {"transcript": "off", "evaluate_every": 100_000},
        **sections,
        "runtime": {"max_live_workers": clients, **sections.get("runtime", {})},
    })  # fmt: skip


def noop(model: str, clients: int, rounds: int, **runtime: Any) -> Cost:
    """Run rounds in which clients return the model.

    Args:
        model: As for `config`.
        clients: As for `config`.
        rounds: As for `config`.
        runtime: Keys of the `runtime` section.
    """
    return run(config(model, clients, rounds, {"name": noop_algorithm.NAME}, runtime=runtime))


def run(config: Config) -> Cost:
    """Run a configuration in a temporary folder.

    Args:
        config: The configuration.

    Returns:
        The cost of a round, without the first rounds and the last.

    Raises:
        DpcflError: If the run fails.
        KeyboardInterrupt: If it is interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="dpcfl-bench-") as name:
        folder = Path(name)
        watcher = _Watcher(folder, config.rounds)
        watcher.start()
        try:
            lines = rounds_of(folder, config, running.Quiet())
        finally:
            watcher.end()
    wall, up, down = (
        statistics.median(line[key] for line in lines if line["round"] > WARM) for key in ("seconds", "bytes_up", "bytes_down")
    )
    by_role = watcher.per_round()
    return Cost(
        Sample(sum(by_role.values()), wall), by_role, watcher.private, watcher.started(by_role), watcher.total, watcher.launcher,
        up, down,
    )  # fmt: skip


def rounds_of(folder: Path, config: Config, display: running.ProgressDisplay) -> list[dict[str, Any]]:
    """Run a configuration in a folder, and return the server's line of each round; errors as `run`."""
    document, failure = running.run_in(folder, config, display)
    if failure is not None:
        raise failure
    if document["state"] != "finished":
        raise KeyboardInterrupt
    return [line for line in runlog.each(RunFolder(folder).metrics) if "started" in line]


def rounds_done(metrics: Path) -> int:
    """Count the rounds that metrics.jsonl has, without reading its JSON: this is called again and again while a run is measured.

    In a run of more than half a minute a round has a second line of the server, with the epsilon that it has spent.
    """
    try:
        return metrics.read_bytes().count(b'"bytes_up":')
    except FileNotFoundError:
        return 0


class _Watcher(threading.Thread):
    """Reads the processor time of the run's processes after the first rounds and again until the last one."""

    def __init__(self, folder: Path, rounds: int) -> None:
        super().__init__(daemon=True)
        self._metrics, self._rounds, self._ended = RunFolder(folder).metrics, rounds, threading.Event()
        self._marks: list[tuple[int, dict[str, float]]] = []
        self._earlier = family.processor_seconds(family.members())  # of earlier runs of this launcher
        self.private: dict[str, float] = {}
        self.total = self.launcher = 0.0

    def run(self) -> None:
        pause = LOOK_S
        while not self._ended.wait(pause):
            done = rounds_done(self._metrics)
            if not WARM <= done < self._rounds or (self._marks and done == self._marks[-1][0]):
                continue
            begin, members = time.monotonic(), list(family.members())
            spent = family.processor_seconds(members)
            pause = max(LOOK_S, 5 * (time.monotonic() - begin))  # a look at many processes is slow
            if rounds_done(self._metrics) == self._rounds:
                return  # workers may have ended before they were looked at
            self._marks.append((done, spent))
            if 2 <= len(self._marks) < 2 + MEMORY_LOOKS:
                self._measure_memory(members)

    def end(self) -> None:
        """Stop reading."""
        self._ended.set()
        self.join()

    def per_round(self) -> dict[str, float]:
        """Processor seconds per round, by role, without the launcher, which measures."""
        if len(self._marks) < 2:
            raise RunFailed(f"the run of {self._rounds} rounds ended before it could be measured: use more rounds")
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        return {role: (after[role] - before.get(role, 0.0)) / (last - first) for role in sorted(after) if role != "launcher"}

    def started(self, per_round: dict[str, float]) -> float:
        """Processor seconds before the first round, given those per round."""
        done, spent = self._marks[0]
        before = sum(spent[role] - self._earlier.get(role, 0.0) for role in per_round if role in spent)
        return max(0.0, before - done * sum(per_round.values()))

    def _measure_memory(self, members: list[family.Member]) -> None:
        """Read private memory of the workers, and of all processes with the shared pages of the one that shares most.

        Proportional sizes (PSS) would depend on other programs that map the same libraries.
        """
        found = family.memory(members)
        self.launcher = max(self.launcher, found.pop("launcher").private)
        total = sum(each.all_private for each in found.values()) + max(each.shared for each in found.values())
        self.total = max(self.total, total)
        for role, each in found.items():
            self.private[role] = max(self.private.get(role, 0.0), each.private)
