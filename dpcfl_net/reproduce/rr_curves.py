"""RR-Cluster's figures 1 and 2: accuracy by round of clustered methods and baselines, at several epsilons."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Cause, Claim, Comparison, NotTested, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.rr_accuracy import FEDAVG, FEDCAM, FESEM, IFCA, MIDDLE, PAPER, Rows, System, axes_of, listed
from dpcfl_net.reproduce.rr_moves import idle, moves_of
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

GUARANTEE = "expected"
CONFIGS = {"laptop": "small_fmnist_balanced", "paper": "paper_fmnist_balanced"}
SEEDS = {"laptop": (0, 1, 2), "paper": tuple(range(5))}
EVERY = 5  # rounds between two evaluations
RR = IFCA[1]
SCALE_NOTES = {
    "laptop": "Laptop scale is a linear model with 15 rounds and 1,000 clients (configs/rr_cluster/small_fmnist_balanced.yaml); "
    "the paper trains a CNN and does not state its rounds.",
    "paper": "A CNN with 100 rounds of 100 of the 1,000 clients (configs/rr_cluster/paper_fmnist_balanced.yaml); the paper states "
    "neither the size of its CNN nor its rounds.",
}
LABELS_HARM = Cause(
    "no label is released here, and noisy labels are what harms DP-IFCA",
    "rr-cluster/table1: with labels-first, DP-IFCA is 6 to 37 points below DP-FedAvg",
)
GUARANTEED = f"Every run has the guarantee {GUARANTEE}."


class Curves(Reproduction):
    """Accuracy by round; subclasses choose systems, epsilons and claims."""

    complete_runs = True
    run_columns = ("system", "epsilon", "seed")
    value_columns = ("epsilon", "round", "accuracy")
    systems: ClassVar[Sequence[System]] = ()
    epsilons: ClassVar[Sequence[float]] = ()

    def compute(self, context: Context) -> ReproductionResult:
        cells = [
            (system, epsilon, seed)
            for epsilon in sorted(self.epsilons, key=lambda epsilon: epsilon != MIDDLE)
            for seed in context.seeds(SEEDS[context.scale])
            for system in self.systems
        ]
        path = packaged(f"rr_cluster/{CONFIGS[context.scale]}")

        def plan(cell: tuple[System, float, int]) -> tuple[Sequence[Any], Grid]:
            system, epsilon, seed = cell
            axes = {**axes_of(system, GUARANTEE, epsilon, [seed]), "output.evaluate_every": [EVERY]}
            return (system.title, epsilon, seed), (path, axes)

        measured = measure(self, context, cells, plan, lambda cell, result: rows_of(cell[0], cell[1], result))
        titles = [system.title for system in self.systems]
        measured.rows.sort(key=lambda row: (titles.index(row["system"]), row["epsilon"], row["seed"], row["round"]))
        outcome = self.judge(measured.rows)
        outcome.notes.insert(0, SCALE_NOTES[context.scale])
        return measured.count(outcome)

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build plots, table and claims from the lines of data.csv; claims about systems without a common seed are left out."""
        figures = [
            lines(
                f"epsilon-{epsilon:g}", f"Accuracy by round, epsilon {epsilon:g}", series(rows, self.systems, epsilon), "round",
                "accuracy, %", caption="Mean over seeds.",
            )
            for epsilon in epsilons_of(rows)
        ]  # fmt: skip
        shown = [
            [system.title, *(_cell(by_seed(rows, system, epsilon)) for epsilon in epsilons_of(rows))] for system in self.systems
        ]
        table = Table("Accuracy after the last round, %", ["system", *(f"epsilon {e:g}" for e in epsilons_of(rows))], shown)
        return ReproductionResult(
            rows, [claim for claim in self.claims(rows) if claim.evidence], figures, [table], [GUARANTEED]
        )

    @abstractmethod
    def claims(self, rows: Rows) -> list[Claim]:
        """Build the claims of the figure.

        Args:
            rows: Lines of data.csv.
        """

    def gaps(self, rows: Rows, upper: System, lower: System, measure: str = "last") -> list[Comparison]:
        """Compare two systems at every epsilon at which they have a common seed.

        Args:
            rows: Lines of data.csv.
            upper: System that the claim puts above.
            lower: The other.
            measure: "last": accuracy after the last round; "mean": mean over the evaluated rounds.
        """
        found = []
        for epsilon in epsilons_of(rows):
            high, low = (by_seed(rows, system, epsilon, measure) for system in (upper, lower))
            if high.keys() & low.keys():
                found.append(paired(high, low, LEAD, name=f"epsilon {epsilon:g}"))
        return found


class Budgets(Curves):
    """Figure 1: three privacy budgets."""

    name = "rr-cluster/fig1"
    paper = PAPER + ", Figure 1"
    title = "Accuracy by round of DP-FedAvg, and of IFCA with and without rebalancing"
    systems = (FEDAVG, *IFCA)
    epsilons = (2, 4, 8)

    def claims(self, rows: Rows) -> list[Claim]:
        gain, lag = self.gaps(rows, RR, IFCA[0]), self.gaps(rows, FEDAVG, IFCA[0])
        return [
            Claim("RR-Cluster is above DP-IFCA at every epsilon", listed(gain), not_acting(rows) or gain, grows=True),
            Claim("DP-IFCA is below DP-FedAvg at some epsilon", listed(lag), lag, LABELS_HARM, every=False, grows=True),
            Claim(
                "RR-Cluster is above DP-FedAvg at every epsilon",
                listed(above := self.gaps(rows, RR, FEDAVG)),
                above,
                grows=True,
            ),
        ]


class Convergence(Curves):
    """Figure 2: strong baselines at epsilon 2 and 4."""

    name = "rr-cluster/fig2"
    paper = PAPER + ", Figure 2"
    title = "Convergence of clustered methods"
    systems = (FEDAVG, IFCA[0], FESEM[0], FEDCAM[0], RR)
    epsilons = (2, 4)

    def claims(self, rows: Rows) -> list[Claim]:
        found = []
        for other in self.systems[:-1]:
            last, mean = (self.gaps(rows, RR, other, measure) for measure in ("last", "mean"))
            idle_ = not_acting(rows) if other is IFCA[0] else None
            found.append(
                Claim(
                    f"RR-Cluster is more accurate than {other.title} after the last round",
                    listed(last),
                    idle_ or last,
                    grows=True,
                )
            )
            text = f"RR-Cluster converges faster than {other.title}: its accuracy is higher on average over the rounds"
            found.append(Claim(text, listed(mean), idle_ or mean, grows=True))
        return found


def epsilons_of(rows: Rows) -> list[float]:
    """List the epsilons of the lines of data.csv, smallest first."""
    return sorted({float(row["epsilon"]) for row in rows})


def rows_of(system: System, epsilon: float, result: Result) -> list[dict[str, Any]]:
    """Return the lines of data.csv of one run: one for each evaluated round."""
    return [
        {"system": system.title, "epsilon": epsilon, "seed": result.seed, "round": at, "accuracy": value, **moves_of(result)}
        for at, value in points_of(result)
    ]


def points_of(result: Result) -> list[tuple[int, float]]:
    """Return evaluated rounds and accuracies in percent; at least the last round."""
    found = [(point.round, 100 * point.accuracy) for point in result.curve]
    return found or [(int(result.settings["rounds"]), 100 * float(result.final["accuracy_mean"]))]


def by_seed(rows: Rows, system: System, epsilon: float, measure: str = "last") -> dict[Any, float]:
    """Collect a measure of a system.

    Args:
        rows: Lines of data.csv.
        system: The system.
        epsilon: Target epsilon.
        measure: "last": accuracy after the last round; "mean": mean over the evaluated rounds.

    Returns:
        Seed to value in percent.
    """
    found: dict[Any, dict[int, float]] = {}
    for row in rows:
        if row["system"] == system.title and float(row["epsilon"]) == epsilon:
            found.setdefault(row["seed"], {})[int(row["round"])] = float(row["accuracy"])
    if measure == "mean":
        return {seed: statistics.fmean(own.values()) for seed, own in found.items()}
    return {seed: own[max(own)] for seed, own in found.items()}


def series(rows: Rows, systems: Sequence[System], epsilon: float) -> dict[str, list[tuple[float, float]]]:
    """Average the accuracy of each evaluated round over seeds, by system."""
    found: dict[str, list[tuple[float, float]]] = {}
    for system in systems:
        own = [row for row in rows if row["system"] == system.title and float(row["epsilon"]) == epsilon]
        rounds = sorted({int(row["round"]) for row in own})
        found[system.title] = [
            (float(t), statistics.fmean(float(row["accuracy"]) for row in own if int(row["round"]) == t)) for t in rounds
        ]
    return {title: points for title, points in found.items() if points}


def not_acting(rows: Rows) -> NotTested | None:
    """Return why rebalancing is not tested, from the last line of each run; None if it acted."""
    runs: dict[tuple[Any, Any], Mapping[str, Any]] = {
        (row["epsilon"], row["seed"]): row for row in rows if row["system"] == RR.title
    }
    return idle(runs.values())


def _cell(values: Mapping[Any, float]) -> str:
    found = list(values.values())
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.1f}{spread} ({len(found)})"
