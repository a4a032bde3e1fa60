"""Labels under `expected`: separated clusters with and without rebalancing, beside the true clusters (ours)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Claim, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import bars
from dpcfl_net.reproduce.rr_accuracy import FEDAVG, GUARANTEES, IFCA, PAPER, Rows, System
from dpcfl_net.reproduce.rr_curves import CONFIGS, EVERY, GUARANTEE, GUARANTEED, SCALE_NOTES, epsilons_of
from dpcfl_net.reproduce.rr_labels import labels_of
from dpcfl_net.reproduce.rr_moves import idle, moves_of
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

SEEDS = {"laptop": tuple(range(5)), "paper": tuple(range(5))}
INFINITE = 30_000.0  # with so large an epsilon the noise is negligible
EPSILONS = {"laptop": (2.0,), "paper": (2.0, INFINITE)}
POINT = 1.0
ORACLE = System("Oracle, client level", {"name": "rr-cluster", "base": "oracle", "min_cluster_size": 0}, {})
SYSTEMS = (FEDAVG, *IFCA, ORACLE)


class Collapse(Reproduction):
    """Balanced clusters at epsilon 2 and without noise: labels as sent, accuracy, and the true clusters as an upper bound."""

    name = "rr-cluster/collapse"
    paper = PAPER + ", Sections 3.4 and 5.3"
    title = "Separated clusters with and without rebalancing, and the true clusters with the same noise"
    complete_runs = True
    run_columns = ("system", "epsilon", "seed")
    value_columns = ("epsilon", "accuracy")

    def compute(self, context: Context) -> ReproductionResult:
        cells = list(itertools.product(EPSILONS[context.scale], SYSTEMS, context.seeds(SEEDS[context.scale])))

        def plan(cell: tuple[float, System, int]) -> tuple[Sequence[Any], Grid]:
            epsilon, system, seed = cell
            axes: dict[str, Sequence[Any]] = {
                "algorithm": [system.under(GUARANTEE)],
                **{key: [value] for key, value in GUARANTEES[GUARANTEE].items()},
                **budget(epsilon),
                "output.evaluate_every": [EVERY],
                "seed": [seed],
            }
            return (system.title, epsilon, seed), (packaged(f"rr_cluster/{CONFIGS[context.scale]}"), axes)

        measured = measure(
            self, context, cells, plan, lambda cell, result: [row_of(cell[1].title, cell[0], result)], whole=True
        )
        outcome = self.judge(measured.rows)
        outcome.notes.insert(0, SCALE_NOTES[context.scale])
        return measured.count(outcome)

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build plots, table and claims from the lines of data.csv."""
        shown = [
            [said(epsilon), system.title, *(_cell(by_seed(rows, system.title, epsilon, key)) for key in ("sent", "accuracy"))]
            for epsilon in epsilons_of(rows)
            for system in SYSTEMS
        ]
        table = Table("Labels as sent and accuracy, %", ["epsilon", "system", "labels right", "accuracy"], shown)
        figures = [
            self._plot(rows, epsilon, key, what)
            for epsilon in epsilons_of(rows)
            for key, what in (("sent", "labels as sent right"), ("accuracy", "accuracy"))
        ]
        note = f"Epsilon infinity is epsilon {INFINITE:g}. The oracle's labels are public, so that it needs no counts and no noise on labels."
        return ReproductionResult(rows, claims(rows), figures, [table], [GUARANTEED, note])

    def _plot(self, rows: Rows, epsilon: float, key: str, what: str) -> Any:
        heights = {
            system.title: {f"seed {seed}": value for seed, value in found.items()}
            for system in SYSTEMS
            if (found := by_seed(rows, system.title, epsilon, key))
        }
        return bars(f"{key}-{epsilon:g}", f"{what.capitalize()}, epsilon {said(epsilon)}", heights, "%")


def claims(rows: Rows) -> list[Claim]:
    """Compare runs with and without rebalancing, and with the true clusters.

    Args:
        rows: Lines of data.csv.

    Returns:
        The claims.
    """
    base, with_ = (system.title for system in IFCA)
    found = []
    for epsilon in epsilons_of(rows):
        at = f"epsilon {said(epsilon)}"
        acting = idle(row for row in rows if row["system"] == with_ and float(row["epsilon"]) == epsilon)
        for key, text, margin in (
            ("sent", "labels as sent are right more often with rebalancing than without", POINT),
            ("accuracy", "rebalancing raises the accuracy of DP-IFCA", LEAD),
        ):
            one = paired(by_seed(rows, with_, epsilon, key), by_seed(rows, base, epsilon, key), margin)
            found.append(Claim(f"(ours) {at}: {text}", _measured(rows, key, epsilon, (base, with_)), acting or [one]))
        gap = paired(by_seed(rows, ORACLE.title, epsilon, "accuracy"), by_seed(rows, with_, epsilon, "accuracy"), LEAD)
        text = f"(ours) {at}: true clusters with client-level noise are above RR-Cluster"
        found.append(Claim(text, _measured(rows, "accuracy", epsilon, (with_, ORACLE.title)), [gap]))
    return found


def budget(epsilon: float) -> dict[str, Sequence[Any]]:
    """Return the axes of an epsilon; workers must be told to accept an infinite one.

    Args:
        epsilon: Target epsilon.
    """
    own: dict[str, Sequence[Any]] = {"privacy.epsilon": [epsilon]}
    return own | ({"runtime.max_epsilon": [INFINITE]} if epsilon == INFINITE else {})


def said(epsilon: float) -> str:
    """Return epsilon as text."""
    return "infinity" if epsilon == INFINITE else f"{epsilon:g}"


def row_of(title: str, epsilon: float, result: Result) -> dict[str, Any]:
    """Return a line of data.csv.

    Args:
        title: Name of the system.
        epsilon: Target epsilon.
        result: A finished run.
    """
    clustered = title not in (FEDAVG.title, ORACLE.title)
    labels = labels_of(result) if clustered else dict.fromkeys(("sent", "released", "settled"))
    return {
        "system": title, "epsilon": epsilon, "seed": result.seed, "accuracy": 100 * float(result.final["accuracy_mean"]),
        "noise_multiplier": result.privacy["noise_multiplier"]["max"], **labels, **moves_of(result),
    }  # fmt: skip


def by_seed(rows: Rows, title: str, epsilon: float, key: str) -> dict[Any, float]:
    """Collect a measure by seed; runs without it are left out.

    Args:
        rows: Lines of data.csv.
        title: Name of the system.
        epsilon: Target epsilon.
        key: The measure.
    """
    return {
        row["seed"]: float(row[key])
        for row in rows
        if row["system"] == title and float(row["epsilon"]) == epsilon and row.get(key) not in (None, "")
    }


def _measured(rows: Rows, key: str, epsilon: float, titles: Sequence[str]) -> str:
    means = {title: by_seed(rows, title, epsilon, key) for title in titles}
    return ", ".join(f"{title} {statistics.fmean(own.values()):.1f} %" for title, own in means.items())


def _cell(values: Mapping[Any, float]) -> str:
    if not values:
        return "–"
    found = list(values.values())
    spread = f" ({min(found):.0f} to {max(found):.0f})" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.1f}{spread}"
