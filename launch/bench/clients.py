"""Row clients: processor time per client and round, by number of clients."""

from __future__ import annotations

from dataclasses import replace

from dpcfl_net.core import host_memory
from dpcfl_net.launch.bench import runs
from dpcfl_net.launch.bench.figures import OURS, Figure
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.sizes import MIB
from dpcfl_net.launch.bench.timing import Sample

COUNTS = {21: 40, 100: 20, 300: 12, 1000: 8}  # clients -> rounds
WORKER_BYTES = 20 << 20
GROUPED = 20  # clients per process where there is no memory for a process each


def measure(options: Options) -> list[Figure]:
    """Measure rounds in which all clients return the model; each has its own process if memory allows."""
    found = []
    for clients, rounds in {3: 15}.items() if options.quick else COUNTS.items():
        fits = clients * WORKER_BYTES < host_memory.available() / 2
        group = 1 if fits else GROUPED
        costs = [runs.noop("cnn", clients, rounds, clients_per_worker=group) for _ in range(min(2, options.times(1)))]
        case = f"{clients} clients" if fits else f"{clients} clients, {group} per process"
        samples = {OURS: [Sample(cost.round.cpu / clients, cost.round.wall / clients) for cost in costs]}
        shares = ", ".join(f"{role} {1e3 * seconds / clients:.2f}" for role, seconds in costs[-1].by_role.items())
        found += [
            replace(Figure.of_times(case, "ms per client and round", samples), note=shares),
            Figure.of_values(
                f"{case}: private memory of a worker", "MiB", {OURS: [cost.private["worker"] / MIB for cost in costs]}
            ),
            Figure.of_values(f"{case}: memory of all processes", "MiB", {OURS: [cost.total / MIB for cost in costs]}),
        ]
    return found
