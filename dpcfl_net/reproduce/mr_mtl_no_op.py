"""MR-MTL against R-DPCFL's published code, in which its regulariser has no effect, because Opacus discards it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Claim, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, row_of
from dpcfl_net.reproduce.r_dpcfl_variants import by_variant, spread
from dpcfl_net.results.tables import Table

STRENGTHS = (0.0, 0.005, 0.02, 0.1, 0.5)
SEEDS = {"laptop": tuple(range(6)), "paper": (0, 1, 2, 3)}
LOCAL = "Local"
Cell = tuple[str, float | None, int]  # algorithm, lambda (None: Local) and seed of a run


class NoOp(Reproduction):
    """Accuracy against lambda; at lambda = 0, or with the term in the loss under Opacus, MR-MTL equals Local."""

    name = "mr-mtl/no-op"
    paper = "Liu, Hu, Wu, Smith, On privacy and personalization in cross-silo federated learning, 2022, Algorithm A1"
    title = "MR-MTL: effective regulariser against a regulariser without effect"
    complete_runs = True

    run_columns = ("algorithm", "lam", "seed")
    value_columns = ("accuracy_mean",)

    def compute(self, context: Context) -> ReproductionResult:
        setting, seeds = CONFIGS[context.scale][0], context.seeds(SEEDS[context.scale])

        def plan(cell: Cell) -> tuple[Sequence[Any], Grid]:
            algorithm, lam, seed = cell
            strength = {} if lam is None else {"algorithm.lam": [lam]}
            return cell, (packaged(f"r_dpcfl/fig6/{setting}"), {"algorithm.name": [algorithm], **strength, "seed": [seed]})

        cells: list[Cell] = [("mr-mtl", lam, seed) for lam in STRENGTHS for seed in seeds]
        cells += [("local", None, seed) for seed in seeds]
        measured = measure(
            self, context, cells, plan, lambda cell, result: [{"lam": cell[1], **row_of(setting, result)}], whole=True
        )
        return measured.count(self.judge(measured.rows))

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build plot, table and claims from the lines of data.csv."""
        named = [{**row, "system": LOCAL if row["lam"] is None else f"MR-MTL, lambda {row['lam']:g}"} for row in rows]
        mean, minority = (
            {name: fmean(own.values()) for name, own in by_variant(named, key, of="system").items()}
            for key in ("accuracy_mean", "accuracy_minority")
        )
        names = {lam: f"MR-MTL, lambda {lam:g}" for lam in STRENGTHS}
        figure = lines(
            "no-op", "Accuracy against lambda",
            {"mean": [(lam, mean[name]) for lam, name in names.items()],
             "minority": [(lam, minority[name]) for lam, name in names.items()],
             "mean, Local": [(lam, mean[LOCAL]) for lam in STRENGTHS]},
            "lambda", "accuracy, %", caption="R-DPCFL's published code computes lambda 0 for every lambda.",
        )  # fmt: skip
        note = (
            "As a term of the loss, the regulariser has no effect under Opacus: its optimiser replaces the gradient by the "
            "clipped per-record sums, which do not contain the term (a test shows it). "
            "Such code computes lambda = 0 for every lambda."
        )
        shown = [by_variant(named, f"accuracy_{which}", of="system") for which in ("mean", "minority", "worst")]
        accuracies = [[name, *(spread(own[name].values()) for own in shown), str(len(shown[0][name]))] for name in shown[0]]
        table = Table(
            "Accuracy", ["", "mean, %", "minority, %", "worst, %", "runs"], accuracies, "+-: standard deviation over seeds."
        )
        return ReproductionResult(rows, self.claims(rows), [figure], [table], [note])

    def claims(self, rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
        """Check that lambda 0 equals Local, that the largest lambda has an effect, and that some lambda beats Local.

        Args:
            rows: Lines of data.csv.

        Returns:
            The claims.
        """
        local = {row["seed"]: 100 * float(row["accuracy_mean"]) for row in rows if row["algorithm"] == "local"}
        by_strength = {
            lam: {row["seed"]: 100 * float(row["accuracy_mean"]) for row in rows if row["lam"] == lam} for lam in STRENGTHS
        }
        means = {lam: fmean(values.values()) for lam, values in by_strength.items()}
        listed = ", ".join(f"lambda {lam:g}: {value:.1f} %" for lam, value in means.items())
        against = f"{listed}; Local: {fmean(local.values()):.1f} %"
        none, most = by_strength[STRENGTHS[0]], by_strength[STRENGTHS[-1]]
        ends = (none, most) if means[STRENGTHS[0]] >= means[STRENGTHS[-1]] else (most, none)
        return [
            Claim(
                "MR-MTL without an effective regulariser equals Local (within 1 point; noise differs)",
                f"lambda 0: {means[0.0]:.1f} %, Local: {fmean(local.values()):.1f} %",
                [paired(none, local, -1.0, name="lambda 0 - Local"), paired(local, none, -1.0, name="Local - lambda 0")],
            ),
            Claim(
                "the largest lambda changes the accuracy by more than 1 point",
                listed,
                [paired(*ends, 1.0, name="lambda 0 against the largest")],
            ),
            Claim(
                "MR-MTL with some lambda is above Local",
                against,
                [paired(own, local, LEAD, name=f"lambda {lam:g}") for lam, own in by_strength.items() if lam > 0],
                every=False,
            ),
        ]
