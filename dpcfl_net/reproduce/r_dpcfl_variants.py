"""Complete runs of R-DPCFL's variants: warm start, scikit-learn's mixture, and choices by loss in every round."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import Claim
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import bars
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, RECOVERED, SLACK, ordering, recovery, row_of
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

if TYPE_CHECKING:
    from dpcfl_net.report.figures import Figure

EPSILON = 5.0
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}
DEFAULT, WARM, SKLEARN = "r-dpcfl", "r-dpcfl, warm start", "r-dpcfl, scikit-learn"
ARGMIN, PRIVATE = "f-cdpfl, argmin", "f-cdpfl, exponential"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {"algorithm.name": "r-dpcfl"},
    WARM: {"algorithm.name": "r-dpcfl", "algorithm.warm_start": True},
    SKLEARN: {"algorithm.name": "r-dpcfl", "algorithm.clustering.space": "sklearn"},
    ARGMIN: {"algorithm.name": "f-cdpfl", "algorithm.select": "argmin"},
    PRIVATE: {"algorithm.name": "f-cdpfl", "algorithm.select": "exponential"},
}
MEASURES = {"mean": "accuracy_mean", "minority": "accuracy_minority", "worst cluster": "accuracy_worst_cluster"}
# Neither changes the result of a run; both save processor time.
QUICK = {"runtime.federation": ["in-process"], "output.evaluate_every": ["auto"]}
ROUNDS = {"laptop": 12, "paper": 200}  # laptop: half of the configuration's, since f-CDPFL scores all models in every round


class Variants(Reproduction):
    """Compares R-DPCFL with its own options and with f-CDPFL, at epsilon 5; (ours): the paper has no such figure."""

    name = "r-dpcfl/variants"
    paper = PAPER + ", Algorithm 1, lines 11 and 13 (ours); RC-DPFL, section 5 (f-CDPFL)"
    title = "Variants of R-DPCFL and choices by loss, at epsilon 5"
    complete_runs = True
    run_columns = ("variant", "seed")
    value_columns = ("epsilon", "noise_multiplier", "accuracy_mean")

    def compute(self, context: Context) -> ReproductionResult:
        setting = CONFIGS[context.scale][0]

        def plan(cell: tuple[str, int]) -> tuple[Sequence[Any], Grid]:
            variant, seed = cell
            axes: dict[str, Sequence[Any]] = {"privacy.epsilon": [EPSILON], "rounds": [ROUNDS[context.scale]], **QUICK}
            axes |= {key: [value] for key, value in VARIANTS[variant].items()}
            return cell, (packaged(f"r_dpcfl/fig6/{setting}"), axes | {"seed": [seed]})

        def lines_of(cell: tuple[str, int], result: Result) -> list[dict[str, Any]]:
            return [{"variant": cell[0], **line(setting, result)}]

        cells = list(itertools.product(VARIANTS, context.seeds(SEEDS[context.scale])))
        measured = measure(self, context, cells, plan, lines_of, whole=True)
        rows = measured.rows
        return measured.count(ReproductionResult(rows, claims(rows), [means(rows)], [table(rows)], [
            f"{ROUNDS[context.scale]} rounds (figures 6 and 7: 25 at laptop scale, 200 at the paper's).",
            "R-DPCFL's mixture: spectral by default; scikit-learn's fits all dimensions of the updates, as the paper is printed.",
            "An effective MSS of 0 opens the window of private choices in round 3, after a warm start in round 2.",
            "f-CDPFL with argmin sends raw indices, so its epsilon is inf: 5 is the epsilon of its updates alone.",
            "Learning rate and clip norm were chosen for the clustered systems together, not for each variant.",
        ]))  # fmt: skip


def line(setting: str, result: Result) -> dict[str, Any]:
    """Return a line of data.csv, with the lowest accuracy of a true cluster and the confidence of the first round."""
    row = row_of(setting, result)
    first = row.pop("diagnostics", {})
    worst = min(result.final["accuracy_by_cluster"])
    return {
        **row, "accuracy_worst_cluster": worst, "mss": first.get("MSS"), "mss_plain": first.get("uncorrected MSS"), "mpo": first.get("MPO"),
    }  # fmt: skip


def by_variant(
    rows: Sequence[Mapping[str, Any]], measure: str, *, of: str = "variant", unit: float = 100
) -> dict[str, dict[int, float]]:
    """Collect a column of data.csv by variant and seed.

    Args:
        rows: Lines of data.csv; those without the measure are left out.
        measure: The column.
        of: Column with the name of the variant.
        unit: Factor of the values; 100: percent.

    Returns:
        Variant to seed to value.
    """
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(measure) is not None:
            found.setdefault(row[of], {})[row["seed"]] = unit * float(row[measure])
    return found


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Check what each variant gains or costs.

    Args:
        rows: Lines of data.csv.

    Returns:
        The claims.
    """
    mean, found, where = by_variant(rows, MEASURES["mean"]), by_variant(rows, RECOVERED, unit=1), "(ours) epsilon 5"
    return [
        ordering(where, mean, WARM, DEFAULT),
        ordering(where, mean, DEFAULT, SKLEARN),
        recovery(where, found, DEFAULT, SKLEARN),
        ordering(where, mean, PRIVATE, ARGMIN, margin=-SLACK),
        ordering(where, mean, DEFAULT, PRIVATE),
        ordering(where, mean, DEFAULT, ARGMIN, margin=-SLACK),
        recovery(where, found, DEFAULT, PRIVATE),
    ]


def means(rows: Sequence[Mapping[str, Any]], *, of: str = "variant") -> Figure:
    """Plot the mean over seeds of each accuracy by variant.

    Args:
        rows: Lines of data.csv.
        of: Column with the name of the variant.

    Returns:
        The figure.
    """
    at = {words: by_variant(rows, key, of=of) for words, key in MEASURES.items()}
    names = dict.fromkeys(row[of] for row in rows)
    heights = {name: {words: statistics.fmean(own[name].values()) for words, own in at.items()} for name in names}
    return bars("accuracy", f"Accuracy at epsilon {EPSILON:g}, mean over seeds", heights, "accuracy, %")


def table(rows: Sequence[Mapping[str, Any]], *, of: str = "variant") -> Table:
    """Tabulate accuracy, noise and recovery by variant: mean and standard deviation over seeds.

    Args:
        rows: Lines of data.csv.
        of: Column with the name of the variant.

    Returns:
        The table.
    """
    columns = {words: by_variant(rows, key, of=of) for words, key in MEASURES.items()}
    z, found = by_variant(rows, "noise_multiplier", of=of, unit=1), by_variant(rows, RECOVERED, of=of, unit=1)
    lines = [
        [
            name,
            f"{statistics.fmean(z[name].values()):.3f}",
            *(spread(own[name].values()) for own in columns.values()),
            f"{sum(found[name].values()):.0f} of {len(found[name])}" if name in found else "–",
        ]
        for name in z
    ]
    return Table("Accuracy in percent", ["", "z", *columns, "clusters recovered"], lines, "+-: standard deviation over seeds.")


def spread(values: Iterable[float]) -> str:
    """Format mean and standard deviation, for example "72.6 +- 0.5"; the mean alone for one value."""
    numbers = list(values)
    deviation = f" +- {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.1f}{deviation}"
