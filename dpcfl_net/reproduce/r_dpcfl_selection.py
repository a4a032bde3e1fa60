"""What selections cost: composed jointly with the updates, or subtracted from the total as published code does."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from dpcfl_net.compare import Result
from dpcfl_net.privacy.accounting import BoundedRangeSelection, SampledGaussian, calibrate, epsilon
from dpcfl_net.report.pages import Table
from dpcfl_net.reproduce.base import Claim, Context, Outcome, Reproduction
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, PAPER, row_of
from dpcfl_net.reproduce.r_dpcfl_noise import Plan

TARGET, DELTA, FRACTION = 5.0, 1e-4, 0.03
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}


class SelectionCost(Reproduction):
    """At one claimed epsilon, subtracting sum(epsilon_select) pays for selections as if their worst cases added up."""

    name = "r-dpcfl/selection-cost"
    paper = PAPER + ", Algorithm 1 and the published code"
    title = "Selections paid jointly against subtracted"

    def compute(self, context: Context) -> Outcome:
        setting = CONFIGS[context.scale][0]
        path, seeds = Path("configs/r_dpcfl/fig6") / f"{setting}.yaml", SEEDS[context.scale]
        joint = context.results(path, {"privacy.epsilon": [TARGET], "algorithm.name": ["r-dpcfl"], "seed": seeds})
        settings = joint[0].settings
        own = noise(settings["data"]["train_per_client"] or 8000, settings["rounds"], settings["local"]["batch_size"])
        paper = noise(6600, 200, 32)
        found = {"jointly": joint}
        # As much noise as subtracting costs with this run's plan, and as it costs with the paper's 200 rounds.
        for name, ratio in (("subtracted", own["ratio"]), ("subtracted, at the cost of the paper's plan", paper["ratio"])):
            really = spent(own, own["joint"] * ratio)
            context.say(f"{name}: noise x {ratio:.3f}, which really spends epsilon {really:.3f}")
            axes = {
                "privacy.epsilon": [really],
                "algorithm.selection.budget_fraction": [FRACTION * TARGET / really],
                "algorithm.name": ["r-dpcfl"],
                "seed": seeds,
            }
            found[name] = context.results(path, axes)
        rows = [{"paid": name, **row_of(setting, result)} for name, results in found.items() for result in results]
        plans = [{"plan": f"N {p['records']}, E {p['rounds']}, {p['selections']} selections", **p} for p in (own, paper)]
        return Outcome(rows, self.claims(paper, found), [], [_noise_table(plans), _accuracy_table(found)], [
            "A run with subtracted selections is a run with more noise: what is claimed as 5 spends less. It is run as what it "
            "really spends, with selections of the same epsilon, 0.15 each."
        ])  # fmt: skip

    def claims(self, paper: dict[str, Any], found: dict[str, list[Result]]) -> list[Claim]:
        """No claim of a paper but what the published code assumes: that subtracting is how selections are paid."""
        mean = {name: 100 * statistics.fmean(float(r.final["accuracy_mean"]) for r in own) for name, own in found.items()}
        costly = "subtracted, at the cost of the paper's plan"
        return [
            Claim(
                "subtracting 20 selections of 0.15 from epsilon 5 costs more noise than composing them (N 6600, E 200, RDP)",
                f"z {paper['subtracted']:.4f} against {paper['joint']:.4f}: {100 * (paper['ratio'] - 1):.0f} % more",
                paper["ratio"] > 1.05,
            ),
            Claim(
                "that much more noise costs accuracy",
                ", ".join(f"{name} {value:.1f} %" for name, value in mean.items()),
                mean[costly] < mean["jointly"],
                "the difference is smaller than that between seeds",
            ),
        ]


def noise(records: int, rounds: int, batch: int) -> dict[str, Any]:
    """z by RDP for R-DPCFL's whole plan at epsilon 5, selections composed jointly or subtracted first, and their ratio."""
    selections = max(1, rounds // 10)
    plan = Plan(records, records, min(batch, records), rounds, TARGET)
    each = FRACTION * TARGET

    def together(z: float) -> list[Any]:
        return [*plan.events(z), BoundedRangeSelection(each, selections)]

    joint = calibrate(together, TARGET, DELTA, accountant="rdp")
    subtracted = calibrate(plan.events, TARGET - selections * each, DELTA, accountant="rdp")
    return {
        "records": records, "rounds": rounds, "selections": selections, "joint": joint, "subtracted": subtracted,
        "ratio": subtracted / joint, "events": together,
    }  # fmt: skip


def spent(own: dict[str, Any], z: float) -> float:
    """The epsilon that a run with noise z really spends, selections composed jointly, by PLD."""
    events: list[SampledGaussian | BoundedRangeSelection] = own["events"](z * _pld_over_rdp(own))
    return epsilon(events, DELTA)


def _pld_over_rdp(own: dict[str, Any]) -> float:
    """Runs are calibrated by PLD, which needs less noise than RDP for the same epsilon: ratios of noise carry over."""
    return calibrate(own["events"], TARGET, DELTA) / own["joint"]


def _noise_table(plans: list[dict[str, Any]]) -> Table:
    rows = [[p["plan"], f"{p['joint']:.4f}", f"{p['subtracted']:.4f}", f"{100 * (p['ratio'] - 1):.1f} %"] for p in plans]
    return Table("Noise multiplier at epsilon 5 by RDP", ["plan", "jointly", "subtracted", "more noise"], rows)


def _accuracy_table(found: dict[str, list[Result]]) -> Table:
    rows = [
        [
            name,
            f"{own[0].privacy['noise_multiplier']['max']:.4f}",
            f"{own[0].epsilon:.3f}",
            *(_mean_of(own, key) for key in ("accuracy_mean", "accuracy_minority", "accuracy_worst")),
            str(len(own)),
        ]
        for name, own in found.items()
    ]
    return Table("Accuracy", ["paid", "z", "epsilon really spent", "mean", "minority", "worst", "runs"], rows)


def _mean_of(results: list[Result], key: str) -> str:
    values = [100 * float(result.final[key]) for result in results]
    spread = f" +- {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread} %"
