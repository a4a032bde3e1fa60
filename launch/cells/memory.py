"""Expected memory of cells that run at the same time on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from dpcfl_net.core import host_memory
from dpcfl_net.experiment import host_costs
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.cost_prediction import idle_memory
from dpcfl_net.experiment.host_costs import HostCosts


def note(configs: Sequence[Config], at_once: int, available: int | None = None) -> str:
    """Compare the memory of the largest cells with what this machine has.

    Args:
        configs: Configurations of the cells that will run.
        at_once: Cells at once.
        available: Available memory, bytes; None: what this process may use.

    Returns:
        A sentence, with a warning if the cells may not fit.

    Raises:
        ConfigError: If the file of measured costs is damaged.
    """
    host, _ = host_costs.load()
    needed = [_idle(host, config) for config in configs]
    total = sum(sorted(needed, reverse=True)[:at_once])
    available = host_memory.available() if available is None else available
    text = (
        f"{min(at_once, len(configs))} cells at once take about {total / 2**30:.1f} GiB besides their models and batches; "
        f"{available / 2**30:.1f} GiB are available"
    )
    return f"warning: {text}; use a smaller --jobs" if total > available else text


def _idle(host: HostCosts, config: Config) -> float:
    """Memory of the processes of a cell, without models."""
    clients = config.data.client_count
    workers = config.runtime.worker_processes(clients)
    return idle_memory(host, workers, len(config.runtime.groups(clients)) if workers else 0)
