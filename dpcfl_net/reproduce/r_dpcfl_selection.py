"""Privacy cost of selections: composed jointly with the updates, or subtracted first as in published code."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from dpcfl_net.core import yaml_file
from dpcfl_net.privacy.accounting.accountant import calibrate, epsilon
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, Row, packaged
from dpcfl_net.reproduce.claims import LEAD, Claim, Exact, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, row_of
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER, TrainingSchedule
from dpcfl_net.reproduce.r_dpcfl_variants import by_variant, spread
from dpcfl_net.results.tables import Table

TARGET, DELTA, FRACTION = 5.0, 1e-4, 0.03
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}
WAYS = {"sum": "subtracted as a sum", "zcdp": "subtracted by zCDP", "rdp": "subtracted by RDP"}
JOINTLY, PAPERS = "jointly", "with the paper's plan,"


class SelectionCost(Reproduction):
    """Compares joint composition with subtraction at one epsilon; subtraction assumes that the worst cases coincide."""

    name = "r-dpcfl/selection-cost"
    paper = PAPER + ", Algorithm 1 and the published code"
    title = "Cost of selections: joint composition against subtraction"
    complete_runs = True

    run_columns = ("paid", "seed")
    value_columns = ("epsilon", "noise_multiplier", "accuracy_mean")

    def compute(self, context: Context) -> ReproductionResult:
        setting = CONFIGS[context.scale][0]
        path = packaged(f"r_dpcfl/fig6/{setting}")
        settings = yaml_file.load(path)
        own = noise(settings["data"].get("train_per_client", 8000), settings["rounds"], settings["local"]["batch_size"])
        paper = noise(6600, 200, 32)
        spends = actually_spent(own, paper)
        for name, (ratio, really) in spends.items():
            context.say(f"{name}: noise x {ratio:.3f}, actual epsilon {really:.3f}")

        def plan(cell: tuple[str, int]) -> tuple[Sequence[Any], Grid]:
            name, seed = cell
            axes: dict[str, Sequence[Any]] = {"privacy.epsilon": [TARGET]}
            if name != JOINTLY:
                really = spends[name][1]
                axes = {"privacy.epsilon": [really], "algorithm.selection.budget_fraction": [FRACTION * TARGET / really]}
            return cell, (path, axes | {"algorithm.name": ["r-dpcfl"], "seed": [seed]})

        cells = list(itertools.product((JOINTLY, *spends), context.seeds(SEEDS[context.scale])))
        measured = measure(
            self, context, cells, plan, lambda cell, result: [{"paid": cell[0], **row_of(setting, result)}], whole=True
        )
        plans = [{"plan": f"N {p['records']}, E {p['rounds']}, {p['selections']} selections", **p} for p in (own, paper)]
        rows = measured.rows
        return measured.count(ReproductionResult(rows, self.claims(paper, rows), [], [_noise_table(plans), _accuracy_table(rows)], [
            "Subtraction adds noise, so a run that claims epsilon 5 spends less. "
            "Such a run is configured with its actual epsilon and with selections of the same epsilon, 0.15 each."
        ]))  # fmt: skip

    def claims(self, paper: dict[str, Any], rows: Sequence[Row]) -> list[Claim]:
        """Check the assumption of the published code that subtraction pays for selections; no paper claims it.

        Args:
            paper: Result of `noise` for the paper's plan.
            rows: Lines of data.csv.

        Returns:
            The claims.
        """
        by_seed = by_variant(rows, "accuracy_mean", of="paid")
        mean = {name: statistics.fmean(own.values()) for name, own in by_seed.items()}
        more = {way: 100 * (paper[way] / paper["joint"] - 1) for way in WAYS}
        return [
            Claim(
                "subtracting 20 selections of 0.15 from epsilon 5 costs more noise than composing them (N 6600, E 200, RDP)",
                f"z {paper['joint']:.4f} jointly; "
                + "; ".join(f"{WAYS[w]}: {paper[w]:.4f}, {more[w]:.0f} % more" for w in WAYS),
                Exact(min(more.values()) > 5),
            ),
            *(
                Claim(
                    f"the additional noise costs accuracy: {name}",
                    f"{value:.1f} against {mean[JOINTLY]:.1f} % jointly",
                    [paired(by_seed[JOINTLY], by_seed[name], LEAD)],
                )
                for name, value in mean.items()
                if name.startswith(PAPERS)
            ),
        ]


def actually_spent(own: dict[str, Any], paper: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Compute the additional noise of subtraction, with this run's plan and with the paper's 200 rounds.

    Args:
        own: Result of `noise` for this run's plan.
        paper: The same for the paper's plan.

    Returns:
        Name of the way to its noise as a multiple of that of joint composition, and the epsilon that a run with it spends.
    """
    ratios = {"subtracted as a sum": own["sum"] / own["joint"]}
    ratios |= {f"{PAPERS} {WAYS[way]}": paper[way] / paper["joint"] for way in ("sum", "zcdp")}
    return {name: (ratio, spent(own, own["joint"] * ratio)) for name, ratio in ratios.items()}


def noise(records: int, rounds: int, batch: int) -> dict[str, Any]:
    """Solve z by RDP for R-DPCFL's plan at epsilon 5.

    Args:
        records: Records of a client (N).
        rounds: Rounds of the run (E).
        batch: Batch size after round 1 (b>1).

    Returns:
        The plan's sizes, its events, "joint" for joint composition, and each key of WAYS for subtraction.
    """
    selections = max(1, rounds // 10)
    schedule = TrainingSchedule(records, records, min(batch, records), rounds, TARGET)
    each = FRACTION * TARGET

    def together(z: float) -> list[Any]:
        return [*schedule.events(z), BoundedRangeSelection(each, selections)]

    rho = selections * each**2 / 8  # zCDP of the exponential mechanism (R, appendix B.3)
    alone = {
        "sum": selections * each,
        "zcdp": rho + 2 * math.sqrt(rho * math.log(1 / DELTA)),
        "rdp": epsilon([BoundedRangeSelection(each, selections)], DELTA, accountant="rdp"),
    }
    return {
        "records": records, "rounds": rounds, "selections": selections, "events": together,
        "joint": calibrate(together, TARGET, DELTA, accountant="rdp"),
        **{way: calibrate(schedule.events, TARGET - cost, DELTA, accountant="rdp") for way, cost in alone.items()},
    }  # fmt: skip


def spent(own: dict[str, Any], z: float) -> float:
    """Compute the actual epsilon of a run by PLD, with joint composition.

    Args:
        own: Result of `noise`.
        z: Noise multiplier on the RDP scale.

    Returns:
        Epsilon at DELTA.
    """
    # Runs are calibrated by PLD; ratios of noise carry over.
    pld_over_rdp = calibrate(own["events"], TARGET, DELTA) / own["joint"]
    events: list[SampledGaussian | BoundedRangeSelection] = own["events"](z * pld_over_rdp)
    return epsilon(events, DELTA)


def _noise_table(plans: list[dict[str, Any]]) -> Table:
    rows = [
        [p["plan"], f"{p['joint']:.4f}", *(f"{p[way]:.4f} (+{100 * (p[way] / p['joint'] - 1):.1f} %)" for way in WAYS)]
        for p in plans
    ]
    return Table("Noise multiplier at epsilon 5 by RDP", ["plan", "jointly", *WAYS.values()], rows)


def _accuracy_table(rows: Sequence[Row]) -> Table:
    lines = [
        [
            name,
            f"{own[0]['noise_multiplier']:.4f}",
            f"{own[0]['epsilon_claimed']:.3f}",
            *(spread(100 * float(row[key]) for row in own) for key in ("accuracy_mean", "accuracy_minority", "accuracy_worst")),
            str(len(own)),
        ]
        for name in dict.fromkeys(row["paid"] for row in rows)
        if (own := [row for row in rows if row["paid"] == name])
    ]
    columns = ["composition", "z", "actual epsilon", "mean, %", "minority, %", "worst, %", "runs"]
    return Table("Accuracy", columns, lines, "+-: standard deviation over seeds.")
