"""EM-FDRO's figures 2 and 3: accuracy (global, worst, tail) and p_max by epsilon of the draws, 20 or 5 of 25 clients drawn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.report.figures import Figure
from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Claim, Comparison, Exact, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

PAPER = "Yan, Guo, Liu, Liu, Client-Level Differential Privacy via Federated Distributionally Robust Optimization"
CONFIGS = {"laptop": "cifar10_laptop", "paper": "cifar10_paper"}
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}
EPSILONS, DRAWN = (0.0, 2.0, 4.0), (20, 5)
MEASURES = {
    "accuracy_central": "global accuracy (central test set)",
    "accuracy_mean": "mean accuracy of the clients",
    "accuracy_worst": "worst client's accuracy",
    "accuracy_p10": "tail accuracy (10th percentile)",
    "p_max": "largest probability of a draw",
    "top_mass": "probability of the five likeliest",
}
PANELS = ("accuracy_central", "accuracy_worst", "accuracy_p10", "p_max")  # of the paper's figures
WINDOW = 5  # rounds of the moving average in the paper's figures
SLACK = 1.0  # points: a larger loss of global accuracy counts as harm
NOTES = (
    "Losses and updates are raw, as published: no run here has a finite epsilon. The epsilon of the draws is no guarantee.",
    "Global accuracy is measured on a central test set that no client holds, as in the paper. Worst client, tail and the clients' "
    "mean are measured on each client's test records, which have its label proportions; the paper's tail uses the validation "
    "records that also steer the draws.",
)

Rows = Sequence[Mapping[str, Any]]


class Robustness(Reproduction):
    """Figures 2 and 3; values are means over the rounds of a run, then over seeds, as in the paper."""

    name = "em-fdro/fig3"
    paper = PAPER + ", Figures 2 and 3"
    title = "Effect of loss-weighted client sampling on the worst client, the tail and global accuracy"
    complete_runs = True
    run_columns = ("clients_per_round", "tilt", "seed")
    value_columns = ("clients_per_round", "tilt", "round", "accuracy_mean")

    def compute(self, context: Context) -> ReproductionResult:
        path, seeds = packaged(f"em_fdro/{CONFIGS[context.scale]}"), context.seeds(SEEDS[context.scale])

        def plan(cell: tuple[int, float, int]) -> tuple[Sequence[Any], Grid]:
            drawn, tilt, seed = cell
            return cell, (path, {"algorithm.clients_per_round": [drawn], "algorithm.tilt": [tilt], "seed": [seed]})

        cells = list(itertools.product(DRAWN, EPSILONS, seeds))
        measured = measure(self, context, cells, plan, lambda _, result: rows_of(result), whole=True)
        outcome = ReproductionResult(measured.rows, [])
        for drawn in DRAWN:
            own = [row for row in outcome.rows if row["clients_per_round"] == drawn]
            outcome.figures += [*mean_curves(drawn, own), *single_run(drawn, own, min(row["seed"] for row in own))]
            outcome.tables += [table(drawn, own), leaders(drawn, own)]
            outcome.claims += claims(drawn, own)
        outcome.notes += NOTES
        return measured.count(outcome)


def rows_of(result: Result) -> list[dict[str, Any]]:
    """Read every measure by round from the files of observer and server, as lines of data.csv."""
    files, own = RunFolder(result.folder), result.settings["algorithm"]
    found: dict[int, dict[str, Any]] = {}
    for line in [*runlog.read(files.metrics), *runlog.read(files.clusters)]:
        found.setdefault(line["round"], {}).update({**line, **line.get("diagnostics", {})})
    of_run = {"clients_per_round": own["clients_per_round"], "tilt": float(own["tilt"]), "seed": result.seed}
    return [{**of_run, "round": t, **{measure: float(found[t][measure]) for measure in MEASURES}} for t in sorted(found)]


def mean_curves(drawn: int, rows: Rows) -> list[Figure]:
    """Plot figure 3's panels, and the clients' mean: means over seeds, smoothed as in the paper."""
    return [_curves(f"{key}-{drawn}", key, f"{drawn} of 25 clients drawn", rows) for key in list(MEASURES)[:5]]


def single_run(drawn: int, rows: Rows, seed: int) -> list[Figure]:
    """Plot figure 2's panels: one seed, smoothed as in the paper."""
    own, where = [row for row in rows if row["seed"] == seed], f"{drawn} of 25 clients drawn, seed {seed} alone"
    return [_curves(f"one-run-{key}-{drawn}", key, where, own) for key in PANELS]


def _curves(key: str, measure: str, where: str, rows: Rows) -> Figure:
    percent = 100 if measure.startswith("accuracy") else 1
    series = {
        f"epsilon {epsilon:g}": smoothed([row for row in rows if row["tilt"] == epsilon], measure, percent)
        for epsilon in EPSILONS
    }
    unit = f"{MEASURES[measure]}, %" if percent == 100 else MEASURES[measure]
    return lines(key, f"{MEASURES[measure].capitalize()}, {where}", series, "round", unit)


def smoothed(rows: Rows, measure: str, scale: float) -> list[tuple[float, float]]:
    """Average over seeds and over the last WINDOW rounds.

    Args:
        rows: Lines of data.csv with one epsilon.
        measure: Column.
        scale: Factor of the values.

    Returns:
        (round, mean) pairs.
    """
    rounds = sorted({row["round"] for row in rows})
    means = [scale * statistics.fmean(row[measure] for row in rows if row["round"] == t) for t in rounds]
    return [(float(t), statistics.fmean(means[max(0, k + 1 - WINDOW) : k + 1])) for k, t in enumerate(rounds)]


def table(drawn: int, rows: Rows) -> Table:
    """Tabulate means over rounds, as mean and standard deviation over seeds."""
    shown = [[f"{epsilon:g}", *(_spread(rows, measure, epsilon) for measure in MEASURES)] for epsilon in EPSILONS]
    return Table(f"{drawn} of 25 clients drawn", ["epsilon", *MEASURES.values()], shown)


def leaders(drawn: int, rows: Rows) -> Table:
    """Tabulate for each seed the epsilon with the largest mean over rounds, and its lead: what one run, as figure 2, shows."""
    measures = [measure for measure in PANELS if measure.startswith("accuracy")]
    values = {measure: {epsilon: over_runs(rows, measure, epsilon) for epsilon in EPSILONS} for measure in measures}
    seeds = sorted({row["seed"] for row in rows})
    shown = [[str(seed), *(_leader({e: own[seed] for e, own in values[key].items()}) for key in measures)] for seed in seeds]
    return Table(
        f"Best epsilon in each run, {drawn} of 25 clients drawn", ["seed", *(MEASURES[key] for key in measures)], shown
    )


def _leader(values: Mapping[float, float]) -> str:
    best = max(values, key=lambda epsilon: values[epsilon])
    lead = values[best] - max(value for epsilon, value in values.items() if epsilon != best)
    return f"{best:g} (by {lead:.1f} points)"


def claims(drawn: int, rows: Rows) -> list[Claim]:
    """Check the claims of section 5.2 on figure 3.

    Args:
        drawn: Clients drawn per round.
        rows: Lines of data.csv with that number; a run's value is the mean over its rounds.

    Returns:
        The claims.
    """
    peak = {epsilon: over_runs(rows, "p_max", epsilon, 1) for epsilon in EPSILONS}
    general, mean = (
        {epsilon: over_runs(rows, measure, epsilon) for epsilon in EPSILONS}
        for measure in ("accuracy_central", "accuracy_mean")
    )
    both = f"{_listed(general)} (mean over clients: {_listed(mean)})"
    uniform = all(abs(value - 0.04) < 1e-9 for value in peak[0.0].values())
    growth = [
        paired(peak[high], peak[low], 0.0, unit="", name=f"epsilon {high:g} - {low:g}")
        for low, high in ((0.0, 2.0), (2.0, 4.0))
    ]
    return [
        Claim(
            f"{drawn} drawn: p_max grows with epsilon from 1/n",
            ", ".join(f"{statistics.fmean(values.values()):.3f} at {epsilon:g}" for epsilon, values in peak.items()),
            growth if uniform else Exact(False),
        ),
        _best(f"{drawn} drawn: epsilon 2 is best for the worst client", rows, "accuracy_worst", 2.0),
        _best(f"{drawn} drawn: epsilon 0 is best for the tail", rows, "accuracy_p10", 0.0),
        Claim(
            f"{drawn} drawn: epsilon 2 does not harm global accuracy (by more than 1 point)",
            both,
            [paired(general[2.0], general[0.0], -SLACK, name="epsilon 2 - 0")],
        ),
        Claim(
            f"{drawn} drawn: epsilon 4 gives global accuracy no further gain on epsilon 2 (of more than 1 point)",
            both,
            [paired(general[2.0], general[4.0], -SLACK, name="epsilon 2 - 4")],
        ),
    ]  # fmt: skip


def _best(text: str, rows: Rows, measure: str, wanted: float) -> Claim:
    """Claim that one epsilon leads every other by LEAD."""
    values = {epsilon: over_runs(rows, measure, epsilon) for epsilon in EPSILONS}
    leads: list[Comparison] = [
        paired(values[wanted], own, LEAD, name=f"epsilon {wanted:g} - {epsilon:g}")
        for epsilon, own in values.items()
        if epsilon != wanted
    ]
    return Claim(text, _listed(values), leads)


def over_runs(rows: Rows, measure: str, epsilon: float, scale: float = 100) -> dict[Any, float]:
    """Return the mean of a measure over the rounds of each run with an epsilon, by seed; in percent unless the scale is 1."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        if row["tilt"] == epsilon:
            found.setdefault(row["seed"], []).append(scale * row[measure])
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def _listed(values: Mapping[float, Mapping[Any, float]]) -> str:
    return ", ".join(f"{statistics.fmean(own.values()):.1f} % at {epsilon:g}" for epsilon, own in values.items())


def _spread(rows: Rows, measure: str, epsilon: float) -> str:
    scale, digits = (100, 1) if measure.startswith("accuracy") else (1, 3)
    values = list(over_runs(rows, measure, epsilon, scale).values())
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.{digits}f}"
