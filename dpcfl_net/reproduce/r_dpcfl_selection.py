"""What selections cost: composed jointly with the updates, or subtracted from the total as published code does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.privacy.accounting.accountant import calibrate, epsilon
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.reproduce.base import Claim, Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, PAPER, row_of
from dpcfl_net.reproduce.r_dpcfl_noise import Plan
from dpcfl_net.results.compare import Result
from dpcfl_net.results.tables import Table

TARGET, DELTA, FRACTION = 5.0, 1e-4, 0.03
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}
WAYS = {"sum": "subtracted as a sum", "zcdp": "subtracted by zCDP", "rdp": "subtracted by RDP"}
PAPERS = "with the paper's plan,"


class SelectionCost(Reproduction):
    """At one claimed epsilon, subtracting what selections cost by themselves forgets that worst cases do not coincide."""

    name = "r-dpcfl/selection-cost"
    paper = PAPER + ", Algorithm 1 and the published code"
    title = "Selections paid jointly against subtracted"

    def compute(self, context: Context) -> ReproductionResult:
        setting = CONFIGS[context.scale][0]
        path, seeds = Path("configs/r_dpcfl/fig6") / f"{setting}.yaml", SEEDS[context.scale]
        joint = context.results(path, {"privacy.epsilon": [TARGET], "algorithm.name": ["r-dpcfl"], "seed": seeds})
        settings = joint[0].settings
        own = noise(settings["data"]["train_per_client"] or 8000, settings["rounds"], settings["local"]["batch_size"])
        paper = noise(6600, 200, 32)
        found = {"jointly": joint}
        # As much more noise as subtracting costs with this run's plan, and as it costs with the paper's 200 rounds.
        ratios = {"subtracted as a sum": own["sum"] / own["joint"]}
        ratios |= {f"{PAPERS} {WAYS[way]}": paper[way] / paper["joint"] for way in ("sum", "zcdp")}
        for name, ratio in ratios.items():
            really = spent(own, own["joint"] * ratio)
            context.say(f"{name}: noise x {ratio:.3f}, which really spends epsilon {really:.3f}")
            axes: dict[str, Sequence[Any]] = {
                "privacy.epsilon": [really],
                "algorithm.selection.budget_fraction": [FRACTION * TARGET / really],
                "algorithm.name": ["r-dpcfl"],
                "seed": seeds,
            }
            found[name] = context.results(path, axes)
        rows = [{"paid": name, **row_of(setting, result)} for name, results in found.items() for result in results]
        plans = [{"plan": f"N {p['records']}, E {p['rounds']}, {p['selections']} selections", **p} for p in (own, paper)]
        return ReproductionResult(rows, self.claims(paper, found), [], [_noise_table(plans), _accuracy_table(found)], [
            "A run with subtracted selections is a run with more noise: what is claimed as 5 spends less. It is run as what it "
            "really spends, with selections of the same epsilon, 0.15 each."
        ])  # fmt: skip

    def claims(self, paper: dict[str, Any], found: dict[str, list[Result]]) -> list[Claim]:
        """No claim of a paper but what the published code assumes: that subtracting is how selections are paid."""
        mean = {name: 100 * statistics.fmean(float(r.final["accuracy_mean"]) for r in own) for name, own in found.items()}
        more = {way: 100 * (paper[way] / paper["joint"] - 1) for way in WAYS}
        return [
            Claim(
                "subtracting 20 selections of 0.15 from epsilon 5 costs more noise than composing them (N 6600, E 200, RDP)",
                f"z {paper['joint']:.4f} jointly; "
                + "; ".join(f"{WAYS[w]}: {paper[w]:.4f}, {more[w]:.0f} % more" for w in WAYS),
                min(more.values()) > 5,
            ),
            *(
                Claim(
                    f"as much more noise costs accuracy: {name}",
                    f"{value:.1f} against {mean['jointly']:.1f} % jointly",
                    value < mean["jointly"],
                    "the difference is smaller than that between seeds",
                )
                for name, value in mean.items()
                if name.startswith(PAPERS)
            ),
        ]


def noise(records: int, rounds: int, batch: int) -> dict[str, Any]:
    """z by RDP for R-DPCFL's whole plan at epsilon 5, selections composed jointly or subtracted first (see WAYS)."""
    selections = max(1, rounds // 10)
    plan = Plan(records, records, min(batch, records), rounds, TARGET)
    each = FRACTION * TARGET

    def together(z: float) -> list[Any]:
        return [*plan.events(z), BoundedRangeSelection(each, selections)]

    rho = selections * each**2 / 8  # zCDP of the exponential mechanism (R, appendix B.3)
    alone = {
        "sum": selections * each,
        "zcdp": rho + 2 * math.sqrt(rho * math.log(1 / DELTA)),
        "rdp": epsilon([BoundedRangeSelection(each, selections)], DELTA, accountant="rdp"),
    }
    return {
        "records": records, "rounds": rounds, "selections": selections, "events": together,
        "joint": calibrate(together, TARGET, DELTA, accountant="rdp"),
        **{way: calibrate(plan.events, TARGET - cost, DELTA, accountant="rdp") for way, cost in alone.items()},
    }  # fmt: skip


def spent(own: dict[str, Any], z: float) -> float:
    """The epsilon that a run with noise z really spends, selections composed jointly, by PLD."""
    events: list[SampledGaussian | BoundedRangeSelection] = own["events"](z * _pld_over_rdp(own))
    return epsilon(events, DELTA)


def _pld_over_rdp(own: dict[str, Any]) -> float:
    """Runs are calibrated by PLD, which needs less noise than RDP for the same epsilon: ratios of noise carry over."""
    return calibrate(own["events"], TARGET, DELTA) / own["joint"]


def _noise_table(plans: list[dict[str, Any]]) -> Table:
    rows = [
        [p["plan"], f"{p['joint']:.4f}", *(f"{p[way]:.4f} (+{100 * (p[way] / p['joint'] - 1):.1f} %)" for way in WAYS)]
        for p in plans
    ]
    return Table("Noise multiplier at epsilon 5 by RDP", ["plan", "jointly", *WAYS.values()], rows)


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
