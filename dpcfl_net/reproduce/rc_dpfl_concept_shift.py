"""RC-DPFL's figure 6 (bottom) and tables 10 and 11: labels shifted by cluster, and how much f-CDPFL varies over seeds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import Claim, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.r_dpcfl_accuracy import RECOVERED, SLACK, ordering, recovery
from dpcfl_net.reproduce.r_dpcfl_variants import MEASURES, QUICK, ROUNDS, by_variant, line, means, table

SYSTEMS = ("oracle", "r-dpcfl", "f-cdpfl", "dp-ifca", "local", "global")
CONFIGS = {"laptop": "laptop_fashion_mnist_label_flip", "paper": "paper_cifar10_label_flip"}
EPSILON = 5.0
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2, 3)}


class ConceptShift(Reproduction):
    """Accuracy, worst cluster and recovery where clusters differ in their labels, with R-DPCFL in place of RC-DPFL."""

    name = "rc-dpfl/concept-shift"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version of R-DPCFL), Figure 6 (bottom), Tables 10 and 11"
    title = "Labels shifted by cluster, at epsilon 5"
    complete_runs = True
    run_columns = ("algorithm", "seed")
    value_columns = ("epsilon", "noise_multiplier", "accuracy_mean")

    def compute(self, context: Context) -> ReproductionResult:
        setting = CONFIGS[context.scale]

        def plan(cell: tuple[str, int]) -> tuple[Sequence[Any], Grid]:
            algorithm, seed = cell
            axes: dict[str, Sequence[Any]] = {"privacy.epsilon": [EPSILON], "rounds": [ROUNDS[context.scale]], **QUICK}
            return cell, (packaged(f"r_dpcfl/fig6/{setting}"), axes | {"algorithm.name": [algorithm], "seed": [seed]})

        cells = list(itertools.product(SYSTEMS, context.seeds(SEEDS[context.scale])))
        measured = measure(self, context, cells, plan, lambda _, result: [line(setting, result)], whole=True)
        rows = measured.rows
        return measured.count(ReproductionResult(rows, claims(rows), [means(rows, of="algorithm")], [table(rows, of="algorithm")], [
            f"{setting.replace('_', ' ')}: {ROUNDS[context.scale]} rounds; the paper: ResNet-18 on CIFAR-10, 200 rounds.",
            "f-CDPFL sends raw indices, so its epsilon is inf: 5 is the epsilon of its updates alone. R-DPCFL, with private choices, "
            "stands for RC-DPFL, with raw ones.",
            "The fairness metrics of the tables need models without privacy and were not computed.",
        ]))  # fmt: skip


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Check the paper's statements on concept shift, for R-DPCFL in place of RC-DPFL.

    Args:
        rows: Lines of data.csv.

    Returns:
        The claims.
    """
    mean, worst = (by_variant(rows, MEASURES[words], of="algorithm") for words in ("mean", "worst cluster"))
    found, where = by_variant(rows, RECOVERED, of="algorithm", unit=1), "label flip, epsilon 5"
    return [
        ordering(where, mean, "r-dpcfl", "oracle", margin=-SLACK),
        *(ordering(where, mean, "r-dpcfl", below) for below in ("dp-ifca", "local", "global")),
        ordering(where, worst, "r-dpcfl", "f-cdpfl", group="the worst cluster"),
        recovery(where, found, "r-dpcfl", "f-cdpfl"),
        varies_more(where, mean, "f-cdpfl", "r-dpcfl"),
    ]


def varies_more(where: str, at: Mapping[str, Mapping[int, float]], more: str, less: str) -> Claim:
    """Claim that the accuracy of one system varies more over seeds than that of another.

    Args:
        where: Configuration and epsilon, for the text.
        at: System to seed to accuracy in percent.
        more: The system that varies more.
        less: The other system.

    Returns:
        The claim, on the absolute deviation of each seed from the median of its system.

    Source: Brown, Forsythe 1974; here paired by seed.
    """
    middle = {name: statistics.median(at[name].values()) for name in (more, less)}
    apart = {name: {seed: abs(value - middle[name]) for seed, value in at[name].items()} for name in (more, less)}
    deviations = ", ".join(f"{name} {statistics.stdev(at[name].values()):.1f}" for name in (more, less) if len(at[name]) > 1)
    return Claim(
        f"{where}: the accuracy of {more} varies more over seeds than that of {less}",
        f"standard deviation over seeds: {deviations or 'one seed'} points",
        [paired(apart[more], apart[less], 0.0)],
    )
