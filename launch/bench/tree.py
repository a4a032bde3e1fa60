"""Row tree: a round with aggregators against one without: processor time by role, and the coordinator's bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dpcfl_net.launch.bench import runs
from dpcfl_net.launch.bench.figures import OURS, Figure
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.runs import Cost
from dpcfl_net.launch.bench.sizes import CNN, WIDE
from dpcfl_net.launch.bench.timing import Sample, interleave
from dpcfl_net.results.number_format import counted
from dpcfl_net.transport.keys import AGGREGATOR, COORDINATOR

MB = 1e6
ROLES = {COORDINATOR: "the coordinator", AGGREGATOR: "all aggregators", "worker": "all workers"}


class Case(NamedTuple):
    """One size: model, parameters p, clients, measured rounds, and numbers of aggregators."""

    model: str
    p: int
    clients: int
    rounds: int
    aggregators: tuple[int, ...] = (1, 2, 4)


CASES = (Case("cnn", CNN, 40, 20), Case("wide", WIDE, 12, 6))
QUICK = Case("cnn", CNN, 4, 40, (2,))


def measure(options: Options) -> list[Figure]:
    """Measure rounds in which clients return the model, and the server adds it up: without aggregators, then with 1, 2 and 4."""
    runs.noop("cnn", 2, 100)  # the first run of a launcher also loads the libraries of the parents of all processes
    return [
        figure
        for case in ([QUICK] if options.quick else CASES)
        for figure in figures(case, interleave(ways(case), options.times(1)))
    ]


def ways(case: Case) -> dict[str, Callable[[], Cost]]:
    """List the runs of a case by name; the first is without aggregators.

    Args:
        case: The case.
    """
    names = {OURS: 0, **{counted(count, "aggregator"): count for count in case.aggregators}}
    return {name: partial(runs.noop, case.model, case.clients, case.rounds, aggregators=count) for name, count in names.items()}


def figures(case: Case, costs: dict[str, list[Cost]]) -> list[Figure]:
    """Build the figures of a case.

    Args:
        case: The case.
        costs: Costs of a round by way, one for each repetition.
    """

    def values(title: str, unit: str, of: Callable[[Cost], float]) -> Figure:
        return Figure.of_values(f"{size}: {title}", unit, {name: [of(cost) for cost in found] for name, found in costs.items()})

    def of_role(role: str) -> Callable[[Cost], float]:
        return lambda cost: 1e3 * cost.by_role.get(role, 0.0)

    size = f"{case.clients} clients, p={case.p:,}"
    samples = {name: [Sample(cost.round.cpu, cost.round.wall) for cost in found] for name, found in costs.items()}
    return [
        Figure.of_times(f"{size}: all processes", "ms per round", samples),
        *(values(title, "ms per round", of_role(role)) for role, title in ROLES.items()),
        values("to the coordinator", "MB per round", lambda cost: cost.bytes_up / MB),
        values("from the coordinator", "MB per round", lambda cost: cost.bytes_down / MB),
    ]
