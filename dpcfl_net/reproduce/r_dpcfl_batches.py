"""R-DPCFL's figures 5, 8, 9 and 14: what batch sizes do to the first updates and to the clusters among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from dpcfl_net.clustering import mixture, separation
from dpcfl_net.clustering.metrics import recovered
from dpcfl_net.config import Config
from dpcfl_net.report.figures import Figure
from dpcfl_net.reproduce.base import Claim, Context, Outcome, Reproduction, Scale
from dpcfl_net.reproduce.first_rounds import FirstRound, bank, keys, setting
from dpcfl_net.reproduce.plots import lines, points, slope
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER, Plan, noise_multiplier

LAPTOP = "Computed on {data} with {records} records a client, E = {rounds}, four rotations, {{3, 6, 6, 6}} clients."
SPACES: tuple[mixture.Space, ...] = ("pca2", "full", "spectral")


def batches(records: int) -> list[int]:
    """R's batch size, 32, and its doubles up to half of a client's records, so that whole steps are no coarse measure."""
    return [batch for batch in (32, 64, 128, 256, 512, 1024, 2048) if batch <= records / 2]


def noise_for(config: Config, records: int, *, first: int, later: int, epsilon: float) -> float:
    """z of Lemma 4.1 for these batch sizes and the rounds of a configuration, by the paper's accountant, without selections."""
    return noise_multiplier(Plan(records, first, later, config.rounds, epsilon))


def stated(config: Config, records: int) -> str:
    """What a figure was computed on, as a sentence."""
    return LAPTOP.format(data=config.data.dataset, records=records, rounds=config.rounds)


class Pictures(Reproduction):
    """Figure 5: the first updates in two components, with small batches and with full ones."""

    name = "r-dpcfl/fig5"
    paper = PAPER + ", Figure 5"
    title = "First updates with small and with full batches"

    def compute(self, context: Context) -> Outcome:
        config = setting(context.scale, 0)
        kept = bank(config)
        first, n = kept.full_batch(), sum(config.data.clients)
        noise = {b1: noise_for(config, first.records, first=b1, later=32, epsilon=10) for b1 in (32, first.records)}
        updates = {
            "b1 = 32": kept.stochastic(32, noise[32], keys(n, "fig5", 32)),
            "full batch": first.updates(noise[first.records], keys(n, "fig5", "full")),
        }
        fits = {panel: mixture.fit(x, clusters=4) for panel, x in updates.items()}
        rows = [
            {
                "panel": panel,
                "client": i,
                "cluster": first.truth[i],
                "x": x,
                "y": y,
                "mss": fit.mss,
                "label": int(fit.labels[i]),
            }
            for panel, fit in fits.items()
            for i, (x, y) in enumerate(fit.coordinates.tolist())
        ]
        figures = [
            scatter(f"panel{k}", f"{panel}, epsilon 10", fit, first.truth) for k, (panel, fit) in enumerate(fits.items())
        ]
        found = {panel: recovered(first.truth, fit.labels.tolist()) for panel, fit in fits.items()}
        small, full = fits
        claim = Claim(
            "with full batches in round 1 the clusters are apart, with batches of 32 they are not",
            "; ".join(
                f"{panel}: effective MSS {fits[panel].mss:.1f}, clusters {'found' if found[panel] else 'not found'}" for panel in fits
            ),
            found[full] and not found[small] and fits[full].mss > fits[small].mss,
        )  # fmt: skip
        return Outcome(rows, [claim], figures, notes=[stated(config, first.records)])


class LaterBatches(Reproduction):
    """Figure 8: b>1 decides z, and z how far the first updates scatter."""

    name = "r-dpcfl/fig8"
    paper = PAPER + ", Figure 8"
    title = "Separation of the first updates against b>1"

    def compute(self, context: Context) -> Outcome:
        rows: list[dict[str, Any]] = []
        pictures: dict[int, tuple[mixture.MixtureFit, list[int]]] = {}
        for seed in range(5):
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
            lines("mss", "MSS against b>1, mean of 5 seeds", scores, "b>1", "MSS", log_x=True),
        ]
        claims = [
            Claim("the noise multiplier grows with b>1", listed(means["z"]), rising([z for _, z in means["z"]])),
            Claim("MSS falls as b>1 grows (effective, M - 1 components)", *falling(means["mss_effective"])),
            Claim(
                "MSS falls as b>1 grows (plain, two components, as the published code)", *falling(means["mss_plain_pca2"]),
                "when the clusters are lost a mixture in a plane still finds groups that look apart",
            ),
            Claim(
                "updates scatter further around their clusters as b>1 grows",
                "root mean square distance from the true cluster's mean: " + listed(means["scatter"]),
                rising([distance for _, distance in means["scatter"]]),
            ),
        ]  # fmt: skip
        return Outcome(rows, claims, figures, notes=[stated(config, first.records)])


class Iterations(Reproduction):
    """Figure 9: EM iterations against b1 (left), MSS against epsilon for two sizes of the clients' data (right)."""

    name = "r-dpcfl/fig9"
    paper = PAPER + ", Figure 9 and Theorem 4.3"
    title = "EM iterations against b1, and MSS against epsilon for two sizes"

    def compute(self, context: Context) -> Outcome:
        left = [row for seed in range(2) for row in self.left(context, seed)]
        right = [row for seed in range(3) for row in self.right(context, seed)]
        iterations: dict[str, list[tuple[float, float]]] = {
            space: averages([row for row in left if row["space"] == space], "b1", "iterations") for space in SPACES
        }
        names = list(dict.fromkeys(row["setting"] for row in right))
        scores = {
            name: averages([row for row in right if row["setting"] == name], "epsilon", "mss_effective") for name in names
        }
        figures = [
            lines("iterations", "EM iterations of the run that was kept", iterations, "b1", "iterations", log_x=True),
            lines("mss", "Effective MSS against epsilon", scores, "epsilon", "effective MSS", log_y=False),
        ]
        config = setting(context.scale, 0)
        note = stated(config, bank(config).full_batch().records)
        return Outcome([*left, *right], [*self.claims_left(iterations), *self.claims_right(scores)], figures, notes=[note])

    def left(self, context: Context, seed: int) -> Iterable[dict[str, Any]]:
        """A row for every b1 and space, two seeds, epsilon 10."""
        config = setting(context.scale, seed)
        kept = bank(config)
        first = kept.full_batch()
        for b1 in (*batches(first.records), first.records):
            noise = noise_for(config, first.records, first=b1, later=32, epsilon=10)
            name = keys(len(first.truth), "fig9", seed, b1)
            x = first.updates(noise, name) if b1 == first.records else kept.stochastic(b1, noise, name)
            context.say(f"seed {seed}, b1 = {b1}")
            for space in SPACES:
                fit = mixture.fit(x, clusters=4, space=space, seed=seed)
                found = recovered(first.truth, fit.labels.tolist())
                yield {
                    "panel": "left",
                    "seed": seed,
                    "b1": b1,
                    "space": space,
                    "iterations": fit.iterations,
                    "recovered": found,
                }

    def right(self, context: Context, seed: int) -> Iterable[dict[str, Any]]:
        """A row for every epsilon: the smaller size with b>1 of 32 and 8, the larger with 32."""
        small, large = rounds_of_two_sizes(context.scale, seed)
        config = setting(context.scale, seed)
        for first, later in ((large, 32), (small, 32), (small, 8)):
            for epsilon in (2, 3, 5, 10, 15):
                noise = noise_for(config, first.records, first=first.records, later=later, epsilon=epsilon)
                x = first.updates(noise, keys(len(first.truth), "fig9", seed, first.records, later, epsilon))
                fit = mixture.fit(x, clusters=4, seed=seed)
                yield {
                    "panel": "right", "seed": seed, "setting": f"N = {first.records}, b>1 = {later}", "epsilon": epsilon,
                    "z": noise, "mss_effective": fit.mss, "recovered": recovered(first.truth, fit.labels.tolist()),
                }  # fmt: skip

    def claims_left(self, iterations: Mapping[str, Sequence[tuple[float, float]]]) -> list[Claim]:
        return [
            Claim(
                f"EM needs fewer iterations the larger b1 is, very few at full batch ({words})",
                "mean by b1: " + listed(iterations[space]),
                iterations[space][-1][1] < iterations[space][0][1],
                cause,
            )
            for space, words, cause in (
                ("pca2", "two components, as the published code", "two components of 21 points are few and 20 starts end soon anyway"),
                ("full", "all dimensions, as printed", "in p dimensions each point pulls its own centre: EM stays where it starts"),
                ("spectral", "M - 1 components, this project's", "three components of 21 points are few and EM ends soon anyway"),
            )
        ]  # fmt: skip

    def claims_right(self, scores: Mapping[str, Sequence[tuple[float, float]]]) -> list[Claim]:
        def compared(upper: int, lower: int) -> tuple[str, bool]:
            (one, high), (two, low) = (list(scores.items())[k] for k in (upper, lower))
            return f"{one}: {listed(high)}; {two}: {listed(low)}", dominates(high, low)

        large, small, smaller = range(3)
        return [
            Claim("larger local data give a larger MSS at every epsilon", *compared(large, small)),
            Claim("a smaller b>1 raises the MSS of the smaller data at every epsilon", *compared(smaller, small)),
            Claim(
                "a smaller b>1 makes up for smaller local data", *compared(smaller, large),
                "b>1 = 8 lowers z, yet the clipped sums of fewer records stay shorter against the same noise",
            ),
        ]  # fmt: skip


def dominates(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> bool:
    """Whether one curve is above the other at each of their common x."""
    return all(one[1] > two[1] for one, two in zip(upper, lower, strict=True))


class Centres(Reproduction):
    """Figure 14: cluster centres draw together as b1 grows (left), while z hardly grows (right)."""

    name = "r-dpcfl/fig14"
    paper = PAPER + ", Figure 14 and equation 32"
    title = "Distance of cluster centres against b1, and the price of a full batch"

    def compute(self, context: Context) -> Outcome:
        config = setting(context.scale, 0)
        distances = self.distances(config)
        prices = self.prices()
        rows = [
            *({"panel": "left", "pair": pair, "b1": b1, "distance": d} for pair, curve in distances.items() for b1, d in curve),
            *(
                {"panel": "right", "epsilon": e, "b_later": b, "ratio": ratio}
                for e, curve in prices.items()
                for b, ratio in curve
            ),
        ]
        slopes = [slope(curve) for curve in distances.values()]
        worst = max(ratio for curve in prices.values() for _, ratio in curve)
        claims = [
            Claim(
                "centres of clusters draw k times closer as b1 grows k times: slope about -1 (paper: -.95)",
                f"slopes {min(slopes):.3f} to {max(slopes):.3f} over {len(slopes)} pairs",
                all(-1.1 < value < -0.9 for value in slopes),
                "the model moves within a round of many steps, so that later steps see other gradients",
            ),
            Claim(
                "a full batch in round 1 raises z by no more than 2.5 times (N = 50,000)", f"largest ratio {worst:.3f}", worst <= 2.5
            ),
        ]  # fmt: skip
        series = {f"epsilon {e}": curve for e, curve in prices.items()}
        figures = [
            lines("distance", "Distance between cluster centres", distances, "b1", "distance", log_x=True, log_y=True),
            lines("price", "z with a full first batch over z without", series, "b>1 = b1", "ratio", log_x=True),
        ]
        notes = [
            stated(config, bank(config).full_batch().records) + " Left panel: steps all but without noise, since the claim is "
            "about expectations.",
            "Right panel: the Renyi accountant, as in the paper.",
        ]
        return Outcome(rows, claims, figures, notes=notes)

    def distances(self, config: Config) -> dict[str, list[tuple[float, float]]]:
        """By pair of clusters: (b1, distance of the mean updates), batches drawn as always, noise a millionth of the clip norm."""
        kept = bank(config)
        first = kept.full_batch()
        truth = np.array(first.truth)
        found: dict[str, list[tuple[float, float]]] = {}
        for b1 in (first.records // steps for steps in (20, 10, 5, 2, 1)):  # whole passes over the data
            name = keys(len(truth), "fig14", b1)
            x = first.updates(1e-6, name) if b1 == first.records else kept.stochastic(b1, 1e-6, name)
            centres = [x[truth == m].mean(axis=0) for m in range(4)]
            for a, b in itertools.combinations(range(4), 2):
                found.setdefault(f"{a} and {b}", []).append((b1, float(np.linalg.norm(centres[a] - centres[b]))))
        return found

    def prices(self) -> dict[float, list[tuple[float, float]]]:
        """By epsilon: (b>1, z with b1 = N over z with b1 = b>1), N = 50,000, K = 1, E = 200."""
        found: dict[float, list[tuple[float, float]]] = {}
        for epsilon, later in itertools.product((3, 5, 10, 15), (16, 32, 64, 128, 256, 512, 1024)):
            full, same = (noise_multiplier(Plan(50_000, first, later, 200, epsilon)) for first in (50_000, later))
            found.setdefault(epsilon, []).append((later, full / same))
        return found


def rounds_of_two_sizes(scale: Scale, seed: int) -> tuple[FirstRound, FirstRound]:
    """First rounds with fewer and with more records a client."""
    small, large = {"laptop": (600, 1000), "paper": (3300, 6600)}[scale]
    return bank(setting(scale, seed, records=small)).full_batch(), bank(setting(scale, seed, records=large)).full_batch()


def scatter(key: str, title: str, fit: mixture.MixtureFit, truth: Sequence[int]) -> Figure:
    """Updates in their first two components by true cluster, and the centres of the fitted components."""
    series: dict[str, list[tuple[float, float]]] = {f"cluster {m}": [] for m in sorted(set(truth))}
    for cluster, (x, y) in zip(truth, fit.coordinates.tolist(), strict=True):
        series[f"cluster {cluster}"].append((x, y))
    rings = {"centres found": [(x, y) for x, y in fit.centres.tolist()]}
    title = f"{title}: effective MSS {fit.mss:.1f}"
    return points(key, title, series, "first component", "second component", rings=rings, equal=True)


def averages(rows: Sequence[Mapping[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """(x, mean of y over rows with that x), in the order in which x appears."""
    return [(at, fmean(row[y] for row in rows if row[x] == at)) for at in dict.fromkeys(row[x] for row in rows)]


def listed(curve: Sequence[tuple[float, float]]) -> str:
    """A curve in words: 32: 1.2, 64: 1.5."""
    return ", ".join(f"{x:g}: {y:.3g}" for x, y in curve)


def falling(curve: Sequence[tuple[float, float]]) -> tuple[str, bool]:
    """A curve in words, and whether it falls all along."""
    return listed(curve), rising([-y for _, y in curve])


def rising(values: Sequence[float]) -> bool:
    """Whether each value is larger than the one before it."""
    return all(one < two for one, two in itertools.pairwise(values))
