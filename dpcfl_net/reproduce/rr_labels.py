"""RR-Cluster's table 4 and figure 3: correct labels and accuracy over the minimum cluster size B."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Cause, Claim, Comparison, NotTested, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.rr_accuracy import MIDDLE, PAPER, Rows, System, axes_of
from dpcfl_net.reproduce.rr_moves import idle, moves_of, untested
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

LAST = 10  # number of last rounds over which labels are averaged
PAPER_LABELS = {0: 39.06, 4: 43.75, 8: 87.50}  # Table 4 at epsilon 4; 0 is DP-IFCA
CHANCE = 25.0
LARGEST = 24  # B of figure 3
Cell = tuple[str, int, int]  # guarantee, B and seed of a run
RUN_COLUMNS = ("guarantee", "min_cluster_size", "seed")
NEAR = 5.0  # points: a share of correct labels this close to the paper's agrees with it


def rebalanced(min_size: int) -> System:
    """Return IFCA with a minimum cluster size."""
    return System(f"B={min_size}", {"name": "rr-cluster", "base": "ifca", "min_cluster_size": min_size}, {})


def labels_of(result: Result) -> dict[str, float | None]:
    """Read the share of correct labels of a run, in percent.

    Args:
        result: A finished run.

    Returns:
        "sent" and "released": mean over the last rounds, before and after noise. "settled": clients whose model of smallest loss
        is correct at the end. None where the run has no such labels.
    """
    lines_ = [line for line in runlog.read(RunFolder(result.folder).clusters) if line.get("view") == "observer"]
    judged = [line for line in lines_ if "label_accuracy" in line][-LAST:]
    settled = [line["assignment_accuracy"] for line in lines_ if "assignment_accuracy" in line]

    def share(kind: str) -> float | None:
        values = [line["label_accuracy"][kind] for line in judged if kind in line["label_accuracy"]]
        return 100 * statistics.fmean(values) if values else None

    return {
        "sent": share("as sent"),
        "released": share("as released"),
        "settled": 100 * settled[-1] if settled else None,
    }


class Labels(Reproduction):
    """Table 4: the paper counts correctly clustered clients; this table separates labels before and after noise."""

    name = "rr-cluster/table4"
    paper = PAPER + ", Table 4"
    title = "Correct labels of a round's clients, before and after the guarantee's noise"
    complete_runs = True
    min_sizes: Mapping[str, Sequence[int]] = {"laptop": (0, 4, 8, 12), "paper": (0, 4, 6, 8, 12)}
    guarantees = ("labels-first", "expected", "paper")
    run_columns = RUN_COLUMNS
    value_columns = ("min_cluster_size", "accuracy")

    def compute(self, context: Context) -> ReproductionResult:
        cells = list(itertools.product(self.guarantees, self.min_sizes[context.scale], context.seeds((0,))))
        measured = measure(self, context, cells, _plan(context, MIDDLE), lambda cell, result: [
            {**_row(cell[0], cell[1], result), **labels_of(result)}
        ], whole=True)  # fmt: skip
        return measured.count(self.judge(measured.rows))

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build table and claims from the lines of data.csv; without `moved_labels` the moves are unknown."""
        shown = [
            [
                str(row["guarantee"]),
                str(row["min_cluster_size"]),
                str(row["seed"]),
                *(_percent(row.get(key)) for key in ("sent", "released", "settled", "accuracy")),
                "–" if row.get("moved_labels") is None else f"{row['moved_labels']:.0f}",
            ]
            for row in rows
        ]
        columns = [
            "guarantee",
            "B",
            "seed",
            "labels sent right",
            "labels released right",
            "clients settled right",
            "accuracy",
            "labels moved",
        ]
        table = Table(f"Balanced clusters, epsilon {MIDDLE}, %", columns, shown)
        return ReproductionResult(rows, self.claims(rows), [], [table])

    def claims(self, rows: Rows) -> list[Claim]:
        """Check the paper's share of correct labels, and the effect of rebalancing on labels before noise.

        Args:
            rows: Lines of data.csv.

        Returns:
            The claims.
        """
        released = [
            Comparison(own, max(PAPER_LABELS.values()) - NEAR, "%", f"{guarantee}, B = {size}")
            for guarantee in ("labels-first", "paper")
            for size, own in _by_size(rows, guarantee, "released").items()
            if size > 0
        ]
        shares = [value for one in released for value in one.values.values()]
        return [
            Claim(
                "87.5 % of the labels are right at B = 8, epsilon 4 (39.1 % at B = 0); here at some B > 0, within 5 points",
                f"released labels {min(shares):.0f} to {max(shares):.0f} % right over B (chance: {CHANCE:.0f} %)",
                released,
                Cause(
                    "noise for this epsilon leaves released labels near chance",
                    f"the same labels before noise: {_range(rows, 'sent')} %, released: {_range(rows, 'released')} %",
                ),
                every=False,
            ),
            self.more_often(rows, "paper", "labels before noise are right more often with rebalancing than without (paper's guarantee)"),
            self.more_often(
                rows, "expected", "(ours) without released labels, labels as sent are right more often with rebalancing than without"
            ),
        ]  # fmt: skip

    def more_often(self, rows: Rows, guarantee: str, text: str) -> Claim:
        """Claim that labels before noise are right more often at some B > 0 than at B = 0, by at least a point."""
        sent = _by_size(rows, guarantee, "sent")
        measured = ", ".join(f"B = {size}: {statistics.fmean(own.values()):.0f} %" for size, own in sent.items())
        acting, why_not = _acting(rows, guarantee)
        compared = [paired(sent[size], sent[0], 1.0, name=f"B = {size}") for size in acting]
        return Claim(text, measured, why_not or compared, every=False)


class SmallestCluster(Reproduction):
    """Figure 3: accuracy over B at epsilon 2; the paper shows an inverted U above DP-IFCA's 62.68 %."""

    name = "rr-cluster/fig3"
    paper = PAPER + ", Figure 3"
    title = "Accuracy over the minimum cluster size"
    complete_runs = True
    run_columns = RUN_COLUMNS
    value_columns = ("min_cluster_size", "accuracy")
    guarantees = ("labels-first", "expected")
    min_sizes: Mapping[str, Sequence[int]] = {
        "laptop": (0, 4, 8, 12, 16, 20, LARGEST), "paper": (0, 2, 4, 6, 8, 10, 12, 16, 20, LARGEST),
    }  # fmt: skip
    seeds = (0, 1, 2)

    def compute(self, context: Context) -> ReproductionResult:
        cells = list(itertools.product(self.guarantees, self.min_sizes[context.scale], context.seeds(self.seeds)))
        cells.sort(key=lambda cell: cell[2])  # the first seed of every point comes first: a part of the runs has whole curves
        measured = measure(self, context, cells, _plan(context, 2), lambda cell, result: [_row(cell[0], cell[1], result)])
        rows = measured.rows
        rows.sort(key=lambda row: (self.guarantees.index(row["guarantee"]), row["min_cluster_size"], row["seed"]))
        return measured.count(self.judge(rows))

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build plot and claims from the lines of data.csv; claims about runs without a common seed are left out."""
        series, claims = {}, []
        for guarantee in self.guarantees:
            by_size = _by_size(rows, guarantee, "accuracy")
            series[guarantee] = [(float(size), statistics.fmean(own.values())) for size, own in by_size.items()]
            claims += self.claims(rows, guarantee)
        figure = lines("rr-fig3", "Accuracy over B, epsilon 2", series, "B, minimum updates per cluster", "accuracy, %")
        return ReproductionResult(rows, [claim for claim in claims if claim.evidence], [figure])

    def claims(self, rows: Rows, guarantee: str) -> list[Claim]:
        """Check both sides of an inverted U: some B > 0 is above B = 0, and some B in between is above the largest.

        Args:
            rows: Lines of data.csv.
            guarantee: Key of GUARANTEES.

        Returns:
            The claims.
        """
        by_size = _by_size(rows, guarantee, "accuracy")
        listed = ", ".join(f"{statistics.fmean(own.values()):.1f} % at B = {size}" for size, own in by_size.items())
        acting, why_not = _acting(rows, guarantee)
        texts = {
            0: f"{guarantee}: some B > 0 is above B = 0",
            LARGEST: f"{guarantee}: a large B is too large: some smaller B > 0 is above B = {LARGEST}",
        }
        compared = {0: acting, LARGEST: [size for size in by_size if 0 < size < LARGEST]}
        return [
            Claim(text, listed, why_not or _above(by_size, compared[other], other), every=False, grows=True)
            for other, text in texts.items()
            if other in by_size
        ]


def _plan(context: Context, epsilon: float) -> Callable[[Cell], tuple[Sequence[Any], Grid]]:
    path = packaged(f"rr_cluster/{context.scale}_fmnist_balanced")

    def plan(cell: Cell) -> tuple[Sequence[Any], Grid]:
        guarantee, min_size, seed = cell
        return cell, (path, axes_of(rebalanced(min_size), guarantee, epsilon, [seed]))

    return plan


def _row(guarantee: str, min_size: int, result: Result) -> dict[str, Any]:
    return {
        "guarantee": guarantee, "min_cluster_size": min_size, "seed": result.seed,
        "accuracy": 100 * float(result.final["accuracy_mean"]),
        "noise_multiplier": result.privacy["noise_multiplier"]["max"], **moves_of(result),
    }  # fmt: skip


def _by_size(rows: Rows, guarantee: str, measure: str) -> dict[int, dict[Any, float]]:
    """Return a measure by minimum size B and seed; runs without the measure are left out."""
    found: dict[int, dict[Any, float]] = {}
    for row in rows:
        if row["guarantee"] == guarantee and row.get(measure) not in (None, ""):
            found.setdefault(int(row["min_cluster_size"]), {})[row["seed"]] = float(row[measure])
    return found


def _above(by_size: Mapping[int, Mapping[Any, float]], sizes: Sequence[int], other: int) -> list[Comparison]:
    """Compare minimum sizes B with another one, where they have a common seed."""
    return [
        paired(by_size[size], by_size[other], LEAD, name=f"B = {size}")
        for size in sizes
        if by_size[size].keys() & by_size[other].keys()
    ]


def _acting(rows: Rows, guarantee: str) -> tuple[list[int], NotTested | None]:
    """Return the B > 0 at which rebalancing acted or may have acted, and the reason to test nothing if there is none."""
    own = [row for row in rows if row["guarantee"] == guarantee and int(row["min_cluster_size"]) > 0]
    sizes = list(dict.fromkeys(int(row["min_cluster_size"]) for row in own))
    why = {size: untested([row for row in own if int(row["min_cluster_size"]) == size], guarantee, size) for size in sizes}
    acting = [size for size in sizes if why[size] is None]
    return acting, None if acting else idle(own) or next(iter(why.values()), None)


def _range(rows: Rows, measure: str) -> str:
    values = [float(row[measure]) for row in rows if row["guarantee"] != "expected" and row.get(measure) not in (None, "")]
    return f"{min(values):.0f} to {max(values):.0f}"


def _percent(value: object) -> str:
    return "–" if value in (None, "") else f"{float(str(value)):.1f}"
