"""Measured costs of this host, from which `dpcfl job` predicts time and memory; `dpcfl doctor --measure` measures them."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_json
from dpcfl_net.data import cache

FORMAT = 3
FILE = "host_costs.json"
MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class HostCosts:
    """Costs of runs on one host. Seconds are processor time of all processes if not called wall time.

    Attributes:
        processor: Name of the processor.
        start_s: Start and end of a run, without its workers.
        start_wall_s: Wall time from the command to the first round, and after the last.
        worker_s: Start of one worker.
        round_s: A round, without its tasks.
        round_wall_s: Wall time of a round, without its tasks.
        task_s: A task with its answer, debit and aggregation, for a model without parameters.
        task_wall_s: Wall time that a task adds to a round, with the waits for the disk.
        byte_s: A byte of a model or an update, on its whole way.
        run_bytes: Memory of the processes besides the workers, and of the libraries that all share.
        worker_bytes: Memory of a worker at rest, for a model without parameters.
        worker_parameter_bytes: Memory of a worker that has a task or just had one, per parameter.
        server_parameter_bytes: Memory of coordinator and observer per parameter, without the updates of a round.
        aggregator_s: Start of one aggregator.
        aggregator_round_s: A round of one aggregator: its task and its answer, without their bytes and its clients' tasks.
        aggregator_wall_s: Wall time that aggregators add to a round.
        aggregator_bytes: Memory of an aggregator, for a model without parameters.
        aggregator_parameter_bytes: Memory of an aggregator that sends the sum of one model, per parameter.
        aggregator_update_bytes: Memory of an update that waits in an aggregator for its turn, per parameter.
    """

    processor: str
    start_s: float
    start_wall_s: float
    worker_s: float
    round_s: float
    round_wall_s: float
    task_s: float
    task_wall_s: float
    byte_s: float
    run_bytes: float
    worker_bytes: float
    worker_parameter_bytes: float
    server_parameter_bytes: float
    aggregator_s: float
    aggregator_round_s: float
    aggregator_wall_s: float
    aggregator_bytes: float
    aggregator_parameter_bytes: float
    aggregator_update_bytes: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "processor" and not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise ValueError(f"{field.name} is {value!r}: must be a number of at least 0")


# Measured on two cores; wall times on idle ones.
SHIPPED = HostCosts(
    processor="AMD EPYC (family 26, model 2)",
    start_s=4.0, start_wall_s=4.0, worker_s=0.03, round_s=0.003, round_wall_s=0.004, task_s=0.0035, task_wall_s=0.002, byte_s=4e-9,
    run_bytes=450 << 20, worker_bytes=17 << 20, worker_parameter_bytes=16.0, server_parameter_bytes=25.0,
    aggregator_s=0.05, aggregator_round_s=0.004, aggregator_wall_s=0.01, aggregator_bytes=17 << 20, aggregator_parameter_bytes=28.0,
    aggregator_update_bytes=6.0,
)  # fmt: skip


def processor() -> str:
    """Return the name of the processor, with family and model, since the name alone is often that of a whole series."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    name = facts.get("model name", platform.machine())
    if {"cpu family", "model"} <= facts.keys():
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name


def path() -> Path:
    """Return the file of the measured costs, in the user's cache folder."""
    return cache.folder() / FILE


def store(costs: HostCosts) -> Path:
    """Keep measured costs for later predictions and return their file.

    Raises:
        OSError: If the file cannot be written.
    """
    path().parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path(), json.dumps({"format": FORMAT, **asdict(costs)}, indent=2))
    return path()


def load() -> tuple[HostCosts, str]:
    """Load the costs of this host.

    Returns:
        The measured costs if this processor has been measured, else the shipped ones; and a sentence that says which.

    Raises:
        ConfigError: If the file of measured costs is damaged.
    """
    measure, here = "measure this host with: dpcfl doctor --measure", processor()
    if not path().exists():
        return SHIPPED, f"constants of {SHIPPED.processor}, shipped; {measure}"
    found = read_json(path(), MOST_BYTES)
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        return SHIPPED, f"constants of {SHIPPED.processor}, shipped: {path()} has another format; {measure}"
    if found.get("processor") != here:
        return SHIPPED, f"constants of {SHIPPED.processor}, shipped: {path()} is of another processor; {measure}"
    return _parsed(found), "constants measured on this host"


def _parsed(found: dict[str, Any]) -> HostCosts:
    try:
        return HostCosts(**found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path()} is damaged ({error}): delete it, or measure again with dpcfl doctor --measure") from None
