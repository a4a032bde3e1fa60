"""R-DPCFL's figures 5 and 8: effect of the batch sizes on the first updates and their clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from dpcfl_net.clustering import mixture, separation
from dpcfl_net.clustering.metrics import recovered
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.report.figures import Figure
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.claims import Claim, Comparison, Exact, paired
from dpcfl_net.reproduce.first_rounds import FirstRound, bank, keys, setting
from dpcfl_net.reproduce.plots import lines, points
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER, TrainingSchedule, noise_multiplier

SEPARATED = 2.0  # MSS above which the paper calls clusters separated (Figure 13)
SMALL, FULL = "b1 = 32", "full batch"
LAPTOP = "Computed on {data} with {records} records per client, E = {rounds}, four rotations, {{3, 6, 6, 6}} clients."


def batches(records: int) -> list[int]:
    """Return the paper's batch size 32 and its doubles up to N/2; above, rounding to whole steps is too coarse."""
    return [batch for batch in (32, 64, 128, 256, 512, 1024, 2048) if batch <= records / 2]


def noise_for(config: Config, records: int, *, first: int, later: int, epsilon: float) -> float:
    """Solve z for a configuration's rounds by the paper's accountant, without selections.

    Args:
        config: Its number of rounds is used.
        records: Records of a client (N).
        first: Batch size of round 1 (b1).
        later: Batch size of later rounds (b>1).
        epsilon: Target epsilon at delta 1e-4.

    Returns:
        The noise multiplier.

    Source: Lemma 4.1.
    """
    return noise_multiplier(TrainingSchedule(records, first, later, config.rounds, epsilon))


def stated(config: Config, records: int) -> str:
    """Return a sentence on the data and rounds of a figure."""
    return LAPTOP.format(data=config.data.dataset, records=records, rounds=config.rounds)


class Pictures(Reproduction):
    """Figure 5: first updates in two components, with small and with full batches."""

    name = "r-dpcfl/fig5"
    paper = PAPER + ", Figure 5"
    title = "First updates with small and with full batches"

    def compute(self, context: Context) -> ReproductionResult:
        rows: list[dict[str, Any]] = []
        figures: list[Figure] = []
        seeds = context.seeds(range(6))
        for seed in seeds:
            fits, first = self.fits(context, seed)
            for panel, fit in fits.items():
                found = recovered(first.truth, fit.labels.tolist())
                rows += [
                    {
                        "seed": seed, "panel": panel, "client": i, "cluster": first.truth[i], "x": x, "y": y, "mss": fit.mss,
                        "label": int(fit.labels[i]), "recovered": found,
                    }
                    for i, (x, y) in enumerate(fit.coordinates.tolist())
                ]  # fmt: skip
            if seed == seeds[0]:
                figures = [
                    scatter(f"panel{k}", f"{panel}, epsilon 10, seed {seed}", fit, first.truth)
                    for k, (panel, fit) in enumerate(fits.items())
                ]
            context.say(f"seed {seed} done")
        note = stated(setting(context.scale, seeds[0]), first.records)
        return ReproductionResult(rows, [self.claim(rows)], figures, notes=[note])

    def fits(self, context: Context, seed: int) -> tuple[dict[str, mixture.MixtureFit], FirstRound]:
        """Fit the mixture to first updates with small and with full batches.

        Args:
            context: The scale.
            seed: Seed of data and model.

        Returns:
            The fit of each panel, small batches first, and the first round before noise.
        """
        config = setting(context.scale, seed)
        kept = bank(config)
        first, n = kept.full_batch(), config.data.client_count
        noise = {b1: noise_for(config, first.records, first=b1, later=32, epsilon=10) for b1 in (32, first.records)}
        labels = ("fig5", seed) if seed else ("fig5",)
        updates = {
            SMALL: kept.stochastic(32, noise[32], keys(n, *labels, 32)),
            FULL: first.updates(noise[first.records], keys(n, *labels, "full")),
        }
        return {panel: mixture.fit(x, clusters=4, seed=seed) for panel, x in updates.items()}, first

    def claim(self, rows: Sequence[Mapping[str, Any]]) -> Claim:
        """Check that full batches separate the clusters and small ones do not: effective MSS above and below SEPARATED."""
        scores = {panel: {row["seed"]: row["mss"] for row in rows if row["panel"] == panel} for panel in (SMALL, FULL)}
        found = {panel: {row["seed"]: row["recovered"] for row in rows if row["panel"] == panel} for panel in (SMALL, FULL)}
        return Claim(
            "the clusters are separated with full batches in round 1 (MSS above 2) and not with batches of 32 (below 2)",
            "; ".join(
                f"{panel}: effective MSS {fmean(own.values()):.1f}, clusters found in {sum(found[panel].values())} of {len(own)}"
                for panel, own in scores.items()
            ),
            [
                Comparison(scores[FULL], SEPARATED, "MSS", FULL),
                Comparison({seed: -mss for seed, mss in scores[SMALL].items()}, -SEPARATED, "-MSS", SMALL),
            ],
        )


class LaterBatches(Reproduction):
    """Figure 8: b>1 determines z, and z determines how far the first updates scatter."""

    name = "r-dpcfl/fig8"
    paper = PAPER + ", Figure 8"
    title = "Separation of the first updates against b>1"

    def compute(self, context: Context) -> ReproductionResult:
        rows: list[dict[str, Any]] = []
        pictures: dict[int, tuple[mixture.MixtureFit, list[int]]] = {}
        seeds = context.seeds(range(10))
        for seed in seeds:
            config = setting(context.scale, seed)
            first = bank(config).full_batch()
            for later in batches(first.records):
                noise = noise_for(config, first.records, first=first.records, later=later, epsilon=10)
                x = first.updates(noise, keys(len(first.truth), "fig8", seed, later))
                fits = {space: mixture.fit(x, clusters=4, space=space, seed=seed) for space in ("spectral", "pca2")}
                pictures.setdefault(later, (fits["spectral"], first.truth))
                rows.append(
                    {
                        "seed": seed, "b_later": later, "z": noise, "mss_effective": fits["spectral"].mss,
                        "mss_plain_pca2": fits["pca2"].mss_plain,
                        "scatter": math.sqrt(separation.within(x, np.array(first.truth)) / len(x)),
                        "recovered": recovered(first.truth, fits["spectral"].labels.tolist()),
                        "recovered_pca2": recovered(first.truth, fits["pca2"].labels.tolist()),
                    }
                )  # fmt: skip
            context.say(f"seed {seed} done")
        means = {key: averages(rows, "b_later", key) for key in ("z", "mss_effective", "mss_plain_pca2", "scatter")}
        scores = {"effective MSS (spectral)": means["mss_effective"], "plain MSS (two components)": means["mss_plain_pca2"]}
        figures = [
            *(scatter(f"b{b}", f"b>1 = {b}", *picture) for b, picture in pictures.items()),
            lines("mss", f"MSS against b>1, mean of {len(seeds)} seeds", scores, "b>1", "MSS", log_x=True),
        ]
        claims = [
            Claim("the noise multiplier grows with b>1", listed(means["z"]), Exact(rising([z for _, z in means["z"]]))),
            Claim(
                "MSS falls as b>1 grows (effective, M - 1 components)", listed(means["mss_effective"]), steps(rows, "mss_effective", -1)
            ),
            Claim(
                "MSS falls as b>1 grows (plain, two components, as the published code)", listed(means["mss_plain_pca2"]),
                steps(rows, "mss_plain_pca2", -1),
            ),
            Claim(
                "updates scatter further around their clusters as b>1 grows",
                "root mean square distance from the true cluster's mean: " + listed(means["scatter"]),
                steps(rows, "scatter", 1),
            ),
        ]  # fmt: skip
        return ReproductionResult(rows, claims, figures, notes=[stated(config, first.records)])


def scatter(key: str, title: str, fit: mixture.MixtureFit, truth: Sequence[int]) -> Figure:
    """Plot updates in their first two components by true cluster, with the fitted centres.

    Args:
        key: Identifier of the figure.
        title: Title of the figure.
        fit: Mixture of the updates.
        truth: True cluster of each client.

    Returns:
        The figure.
    """
    series: dict[str, list[tuple[float, float]]] = {f"cluster {m}": [] for m in sorted(set(truth))}
    for cluster, (x, y) in zip(truth, fit.coordinates.tolist(), strict=True):
        series[f"cluster {cluster}"].append((x, y))
    rings = {"centres found": [(x, y) for x, y in fit.centres.tolist()]}
    title = f"{title}: effective MSS {fit.mss:.1f}"
    return points(key, title, series, "first component", "second component", rings=rings, equal=True)


def averages(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """Return (x, mean of y over the rows with that x), in order of first appearance."""
    return [(at, fmean(row[y] for row in rows if row[x] == at)) for at in dict.fromkeys(row[x] for row in rows)]


def listed(curve: Sequence[tuple[float, float]]) -> str:
    """Format a curve, for example "32: 1.2, 64: 1.5"."""
    return ", ".join(f"{x:g}: {y:.3g}" for x, y in curve)


def steps(rows: Sequence[Mapping[str, Any]], measure: str, sign: int) -> list[Comparison]:
    """Compare a measure at each b>1 with the next, on the same seeds.

    Args:
        rows: Lines of data.csv.
        measure: Column.
        sign: 1 if it should rise with b>1, -1 if it should fall.

    Returns:
        One comparison per step.
    """
    curves: dict[int, dict[Any, float]] = {}
    for row in rows:
        curves.setdefault(row["b_later"], {})[row["seed"]] = sign * row[measure]
    return [
        paired(curves[large], curves[small], 0.0, unit="" if sign > 0 else "fall", name=f"b>1 {small} to {large}")
        for small, large in itertools.pairwise(curves)
    ]


def rising(values: Sequence[float]) -> bool:
    """Return True if each value is larger than the previous one."""
    return all(one < two for one, two in itertools.pairwise(values))
