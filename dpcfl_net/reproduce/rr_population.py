"""RR-Cluster's table 4 with 64 clients: its entries are multiples of 1/64."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import Claim, Exact, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.rr_accuracy import GUARANTEES, PAPER, Rows
from dpcfl_net.reproduce.rr_collapse import INFINITE, budget, said
from dpcfl_net.reproduce.rr_curves import CONFIGS, GUARANTEED, SCALE_NOTES
from dpcfl_net.reproduce.rr_labels import labels_of, rebalanced
from dpcfl_net.reproduce.rr_moves import idle, moves_of
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

CLIENTS = 64
# The paper's table, in percent: DP-IFCA and RR-Cluster (IFCA) with B = 4, 6, 8.
PRINTED: Mapping[int, Mapping[float, float]] = {
    0: {0.5: 34.37, 2: 42.18, 4: 39.06, 8: 40.62, 16: 42.18, INFINITE: 75.00},
    4: {0.5: 40.62, 2: 45.31, 4: 43.75, 8: 59.37, 16: 87.50, INFINITE: 98.44},
    6: {0.5: 40.62, 2: 53.12, 4: 62.50, 8: 87.50, 16: 100.00, INFINITE: 84.37},
    8: {0.5: 40.62, 2: 59.37, 4: 87.50, 8: 98.44, 16: 100.00, INFINITE: 100.00},
}
EPSILONS = {"laptop": (2.0, INFINITE), "paper": (0.5, 2.0, 4.0, 8.0, 16.0, INFINITE)}
SIZES = {"laptop": (0, 8), "paper": (0, 4, 6, 8)}
SEEDS = {"laptop": tuple(range(5)), "paper": tuple(range(5))}
GUARANTEE = "expected"
OWN = f"This table has {CLIENTS} of these clients, all of which take part in every round."
MARGIN = 1.0


class SixtyFour(Reproduction):
    """All 64 clients take part in every round; guarantee `expected`, which releases no label."""

    name = "rr-cluster/table4-64"
    paper = PAPER + ", Table 4"
    title = "Correctly clustered clients of 64"
    complete_runs = True
    run_columns = ("epsilon", "min_cluster_size", "seed")
    value_columns = ("epsilon", "min_cluster_size", "accuracy")

    def compute(self, context: Context) -> ReproductionResult:
        cells = list(itertools.product(EPSILONS[context.scale], SIZES[context.scale], context.seeds(SEEDS[context.scale])))

        def plan(cell: tuple[float, int, int]) -> tuple[Sequence[Any], Grid]:
            epsilon, size, seed = cell
            axes: dict[str, Sequence[Any]] = {
                "data.clients": [[CLIENTS // 4] * 4],
                "algorithm": [{**rebalanced(size).options, "guarantee": GUARANTEE, "sampling_rate": 1.0}],
                **{key: [value] for key, value in GUARANTEES[GUARANTEE].items()},
                **budget(epsilon),
                "seed": [seed],
            }
            return cell, (packaged(f"rr_cluster/{CONFIGS[context.scale]}"), axes)

        measured = measure(self, context, cells, plan, lambda cell, result: [row_of(cell[0], cell[1], result)], whole=True)
        outcome = self.judge(measured.rows)
        outcome.notes.insert(0, SCALE_NOTES[context.scale])
        return measured.count(outcome)

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build table and claims from the lines of data.csv."""
        shown, found = [], list(dict.fromkeys(float(row["epsilon"]) for row in rows))
        for epsilon in found:
            for size in dict.fromkeys(int(row["min_cluster_size"]) for row in rows):
                own = [by_seed(rows, epsilon, size, key) for key in ("sent", "settled", "accuracy")]
                shown.append([said(epsilon), str(size), f"{PRINTED[size][epsilon]:.1f}", *(_mean(values) for values in own)])
        columns = ["epsilon", "B", "paper", "labels sent right", "clients settled right", "accuracy"]
        table = Table("Balanced clusters, %", columns, shown)
        return ReproductionResult(
            rows, [multiples(), *(claim(rows, epsilon) for epsilon in found)], [], [table], [GUARANTEED, OWN]
        )


def row_of(epsilon: float, size: int, result: Result) -> dict[str, Any]:
    """Return a line of data.csv.

    Args:
        epsilon: Target epsilon.
        size: B.
        result: A finished run.
    """
    return {
        "epsilon": epsilon, "min_cluster_size": size, "seed": result.seed,
        "accuracy": 100 * float(result.final["accuracy_mean"]), **labels_of(result), **moves_of(result),
    }  # fmt: skip


def multiples() -> Claim:
    """Claim that the entries of the table are shares of 64 clients, to the digits printed."""
    entries = [value for by_epsilon in PRINTED.values() for value in by_epsilon.values()]
    # 22 / 64 = 34.375 is printed as 34.37: truncated or rounded.
    fit = [min(abs(value - 100 * k / CLIENTS) for k in range(CLIENTS + 1)) <= 0.0076 for value in entries]
    return Claim(
        "(ours) the entries of Table 4 for IFCA are multiples of 1/64, while the experiments have 1,000 clients, 100 a round",
        f"{sum(fit)} of {len(fit)} entries", Exact(all(fit)),
    )  # fmt: skip


def claim(rows: Rows, epsilon: float) -> Claim:
    """Claim that the largest B clusters more clients correctly than DP-IFCA.

    Args:
        rows: Lines of data.csv.
        epsilon: Target epsilon.
    """
    largest = max(int(row["min_cluster_size"]) for row in rows)
    high, low = (by_seed(rows, epsilon, size, "settled") for size in (largest, 0))
    acting = idle(row for row in rows if float(row["epsilon"]) == epsilon and int(row["min_cluster_size"]) == largest)
    printed = f"paper: {PRINTED[largest][epsilon]:.0f} against {PRINTED[0][epsilon]:.0f}"
    return Claim(
        f"epsilon {said(epsilon)}: B = {largest} clusters more clients correctly than DP-IFCA ({printed})",
        f"{_mean(high)} against {_mean(low)} %",
        acting or [paired(high, low, MARGIN)],
    )


def by_seed(rows: Rows, epsilon: float, size: int, key: str) -> dict[Any, float]:
    """Collect a measure by seed; runs without it are left out.

    Args:
        rows: Lines of data.csv.
        epsilon: Target epsilon.
        size: B.
        key: The measure.
    """
    return {
        row["seed"]: float(row[key])
        for row in rows
        if (float(row["epsilon"]), int(row["min_cluster_size"])) == (epsilon, size) and row.get(key) not in (None, "")
    }


def _mean(values: Mapping[Any, float]) -> str:
    return f"{statistics.fmean(values.values()):.1f}" if values else "–"
