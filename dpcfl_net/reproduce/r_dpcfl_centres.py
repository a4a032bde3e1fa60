"""R-DPCFL's figure 14: distance of the cluster centres and noise multiplier against b1."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.claims import Claim, Comparison, Exact
from dpcfl_net.reproduce.first_rounds import bank, keys, setting
from dpcfl_net.reproduce.plots import lines, slope
from dpcfl_net.reproduce.r_dpcfl_batches import stated
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER, TrainingSchedule, noise_multiplier

Curve = list[tuple[float, float]]


class Centres(Reproduction):
    """Figure 14: the centres move closer as b1 grows (left), while z hardly grows (right)."""

    name = "r-dpcfl/fig14"
    paper = PAPER + ", Figure 14 and equation 32"
    title = "Distance of cluster centres against b1, and cost of a full batch"

    def compute(self, context: Context) -> ReproductionResult:
        seeds = context.seeds(range(3))
        config = setting(context.scale, seeds[0])
        by_seed = {seed: self.distances(setting(context.scale, seed)) for seed in seeds}
        distances = by_seed[seeds[0]]
        prices = self.prices()
        series = {f"epsilon {e}": curve for e, curve in prices.items()}
        figures = [
            lines(
                "distance",
                f"Distance between cluster centres, seed {seeds[0]}",
                distances,
                "b1",
                "distance",
                log_x=True,
                log_y=True,
            ),
            lines("price", "z with a full first batch over z without", series, "b>1 = b1", "ratio", log_x=True),
        ]
        notes = [
            stated(config, bank(config).full_batch().records) + " Left panel: almost no noise, because the claim is about "
            "expectations.",
            "Right panel: the Renyi accountant, as in the paper.",
        ]
        return ReproductionResult(_rows(by_seed, prices), _claims(by_seed, prices), figures, notes=notes)

    def distances(self, config: Config) -> dict[str, Curve]:
        """Measure the distances of the cluster means; the noise is a millionth of the clip norm.

        Args:
            config: Configuration of the first round.

        Returns:
            Pair of clusters to (b1, distance of the mean updates).
        """
        kept = bank(config)
        first = kept.full_batch()
        truth = np.array(first.truth)
        labels = ("fig14", config.seed) if config.seed else ("fig14",)
        found: dict[str, Curve] = {}
        for b1 in (first.records // steps for steps in (20, 10, 5, 2, 1)):  # whole passes over the data
            name = keys(len(truth), *labels, b1)
            x = first.updates(1e-6, name) if b1 == first.records else kept.stochastic(b1, 1e-6, name)
            centres = [x[truth == m].mean(axis=0) for m in range(4)]
            for a, b in itertools.combinations(range(4), 2):
                found.setdefault(f"{a} and {b}", []).append((b1, float(np.linalg.norm(centres[a] - centres[b]))))
        return found

    def prices(self) -> dict[float, Curve]:
        """Return by epsilon: (b>1, z at b1 = N divided by z at b1 = b>1), for N = 50,000, K = 1, E = 200."""
        found: dict[float, Curve] = {}
        for epsilon, later in itertools.product((3, 5, 10, 15), (16, 32, 64, 128, 256, 512, 1024)):
            full, same = (noise_multiplier(TrainingSchedule(50_000, first, later, 200, epsilon)) for first in (50_000, later))
            found.setdefault(epsilon, []).append((later, full / same))
        return found


def _rows(by_seed: Mapping[int, Mapping[str, Curve]], prices: Mapping[float, Curve]) -> list[dict[str, Any]]:
    left = [
        {"panel": "left", "seed": seed, "pair": pair, "b1": b1, "distance": distance}
        for seed, own in by_seed.items()
        for pair, curve in own.items()
        for b1, distance in curve
    ]
    right = [
        {"panel": "right", "epsilon": epsilon, "b_later": later, "ratio": ratio}
        for epsilon, curve in prices.items()
        for later, ratio in curve
    ]
    return [*left, *right]


def _claims(by_seed: Mapping[int, Mapping[str, Curve]], prices: Mapping[float, Curve]) -> list[Claim]:
    slopes = {seed: [slope(curve) for curve in own.values()] for seed, own in by_seed.items()}
    pairs, worst = len(next(iter(by_seed.values()))), max(ratio for curve in prices.values() for _, ratio in curve)
    return [
        Claim(
            "the distance of cluster centres falls k-fold as b1 grows k-fold: slope about -1 (paper: -.95)",
            f"slopes {min(map(min, slopes.values())):.3f} to {max(map(max, slopes.values())):.3f} over "
            f"{pairs} pairs and {len(by_seed)} seeds",
            [
                Comparison({seed: min(own) for seed, own in slopes.items()}, -1.1, "", "steepest pair"),
                Comparison({seed: -max(own) for seed, own in slopes.items()}, 0.9, "", "flattest pair, negated"),
            ],
        ),
        Claim(
            "a full batch in round 1 raises z by no more than 2.5 times (N = 50,000)", f"largest ratio {worst:.3f}",
            Exact(worst <= 2.5),
        ),
    ]  # fmt: skip
