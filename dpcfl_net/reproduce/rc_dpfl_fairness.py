"""RC-DPFL's figure 4: accuracy by cluster and F_acc of RC-DPFL and its baselines at epsilon 5."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, Row, packaged
from dpcfl_net.reproduce.claims import LEAD, Cause, Claim, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import bars
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, by_system, result_of, row_of
from dpcfl_net.results import compare, compare_table
from dpcfl_net.results.fairness import add_fairness
from dpcfl_net.results.result import Result, read_result
from dpcfl_net.results.tables import Table

SYSTEMS = ("oracle", "rc-dpfl", "f-cdpfl", "km-cdpfl", "global")
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}
BY_CLUSTER = "accuracy_by_cluster"


class Fairness(Reproduction):
    """Figure 4 on Fashion-MNIST and MNIST with rotation; RC-DPFL and f-CDPFL send raw indices, so their epsilon is inf."""

    name = "rc-dpfl/fig4"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version of R-DPCFL), Figure 4"
    title = "Accuracy by cluster and F_acc at epsilon 5"
    complete_runs = True

    run_columns = ("setting", "algorithm", "seed")
    value_columns = ("epsilon", "noise_multiplier", "accuracy_mean")

    def compute(self, context: Context) -> ReproductionResult:
        settings = CONFIGS[context.scale][:2]

        def plan(cell: tuple[str, int, str]) -> tuple[Sequence[Any], Grid]:
            setting, seed, algorithm = cell
            axes: dict[str, Sequence[Any]] = {"privacy.epsilon": [5], "seed": [seed], "algorithm.name": [algorithm]}
            return (setting, algorithm, seed), (packaged(f"r_dpcfl/fig6/{setting}"), axes)

        cells = list(itertools.product(settings, context.seeds(SEEDS[context.scale]), SYSTEMS))
        measured = measure(self, context, cells, plan, lambda cell, result: [line(cell[0], result)], whole=True)
        outcome = ReproductionResult(measured.rows, [])
        for setting in settings:
            self.add(outcome, setting, [row for row in measured.rows if row["setting"] == setting])
        outcome.notes.append(
            "For rc-dpfl and f-cdpfl epsilon 5 covers the noisy updates only; their raw cluster indices have no finite "
            "epsilon. For the other systems it covers every release of a client."
        )
        return measured.count(outcome)

    def add(self, outcome: ReproductionResult, setting: str, rows: Sequence[Row]) -> None:
        """Add figures, table and claims of one data setting; accuracy by cluster is plotted of the runs that have it."""
        results = [result_of({key: value for key, value in row.items() if key != BY_CLUSTER}) for row in rows]
        table = compare_table.table(compare.rows(results)).without_empty_columns()
        outcome.tables.append(Table(setting, table.columns, table.rows, table.caption))
        unfair = {name: fmean(values.values()) for name, values in by_system(results, "f_acc").items()}
        outcome.figures.append(bars(f"f-acc-{setting}", f"F_acc, {setting}", {"F_acc": unfair}, "F_acc, points"))
        clusters = by_cluster(rows)
        if clusters.keys() == set(SYSTEMS):
            series = {f"cluster {k + 1}": {name: clusters[name][k] for name in SYSTEMS} for k in range(len(clusters["oracle"]))}
            outcome.figures.append(bars(f"clusters-{setting}", f"Accuracy by cluster, {setting}", series, "accuracy, %"))
        outcome.claims += self.claims(setting, results)

    def claims(self, setting: str, results: Sequence[Result]) -> list[Claim]:
        """Check fairness of KM-CDPFL, accuracy of RC-DPFL, and recovery of RC-DPFL against f-CDPFL."""
        unfair, mean, minority = (by_system(results, key) for key in ("f_acc", "accuracy_mean", "accuracy_minority"))
        found = {
            name: {r.seed: float(r.final["clusters_recovered"]) for r in results if r.algorithm == name} for name in SYSTEMS
        }
        listed = ", ".join(f"{name} {fmean(own.values()):.1f}" for name, own in unfair.items())
        weakest = ", ".join(f"{name} {fmean(minority[name].values()):.1f} %" for name in ("global", "km-cdpfl"))
        return [
            Claim(
                f"{setting}: KM-CDPFL has the highest F_acc",
                f"{listed} points",
                [paired(unfair["km-cdpfl"], unfair[name], LEAD, name=name) for name in SYSTEMS if name != "km-cdpfl"],
                Cause("one model for several clusters is worse for the minority than myopic clusters", f"minority in these runs: {weakest}"),
            ),
            Claim(
                f"{setting}: RC-DPFL is on a par with the oracle (within 2 points)",
                f"{fmean(mean['rc-dpfl'].values()):.1f} against {fmean(mean['oracle'].values()):.1f} %",
                [paired(mean["rc-dpfl"], mean["oracle"], -2.0)],
            ),
            Claim(
                f"{setting}: RC-DPFL recovers the clusters more often than f-CDPFL",
                ", ".join(f"{name} {sum(found[name].values()):.0f} of {len(found[name])}" for name in ("rc-dpfl", "f-cdpfl")),
                [paired(found["rc-dpfl"], found["f-cdpfl"], 0.0, unit="runs", test="sign")],
            ),
        ]  # fmt: skip


def line(setting: str, result: Result) -> dict[str, Any]:
    """Return a line of data.csv with F_acc and the accuracy of each true cluster; computes F_acc of a run that lacks it."""
    add_fairness(result.folder, result.settings["data"]["root"])
    complete = read_result(result.folder)
    return {**row_of(setting, complete), BY_CLUSTER: json.dumps(complete.final[BY_CLUSTER])}


def by_cluster(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return accuracy in percent by system and true cluster, mean over the lines that have it."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        if row.get(BY_CLUSTER):
            found.setdefault(row["algorithm"], []).append(json.loads(row[BY_CLUSTER]))
    return {name: [100 * fmean(values) for values in zip(*own, strict=True)] for name, own in found.items()}
