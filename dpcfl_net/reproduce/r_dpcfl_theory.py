"""R-DPCFL's theory: Lemmas 4.1 and 4.2, Theorems 4.3 and 5.1, exact where possible, else on simulated updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpcfl_net.privacy.accounting.accountant import calibrate, epsilon
from dpcfl_net.privacy.accounting.lower import epsilon_at_least
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult, Row
from dpcfl_net.reproduce.claims import Cause, Claim, Comparison, Exact
from dpcfl_net.reproduce.em_rate import POINTS, SEPARATIONS, SMALL, exact_rates, measured_rates, ratio_to_truth, tail
from dpcfl_net.reproduce.em_rate import overlap as overlap_at
from dpcfl_net.reproduce.plots import lines, slope
from dpcfl_net.reproduce.r_dpcfl_noise import FIRST, LATER, PAPER, WHOLE, TrainingSchedule, noise_multiplier, update_variance

SEEDS = tuple(range(10))
PLAN = TrainingSchedule(6600, 6600, 32, 200, 5)  # of the paper's figures 3 and 4; R-DPCFL's batch sizes
PARAMETERS = {"the CNN of Table 2": 28_938, "ResNet-18": 11_181_642}
NEAR = 0.1  # "approximately" is tested as: within 10 %
RECORDS, DIMENSION, REPEATS, RATE = 600, 2000, 20, 0.5  # of the simulated update; c and z are 1
RHO = 2.5  # of the paper's figure 14
STEPS, NOISE = (1, 10, 100, 1000), 20.0  # of releases without sampling
SELECTIONS, EACH = 20, 0.15  # of E = 200 rounds, .03 epsilon each


class Theory(Reproduction):
    """Checks each statement apart from the others, with the assumptions of its proof or without one of them."""

    name = "r-dpcfl/theory"
    paper = PAPER + ", Lemmas 4.1 and 4.2, Theorems 4.3 and 5.1"
    title = "Lemmas 4.1 and 4.2, Theorems 4.3 and 5.1 by numbers"
    any_scale = True

    def compute(self, context: Context) -> ReproductionResult:
        seeds = context.seeds(SEEDS)
        (noise, varied), (overlapping, shared), (rate, fallen) = updates(seeds), overlaps(seeds), rates(seeds)
        context.say(f"{len(seeds)} seeds simulated")
        lemmas = [whole_steps(), sampling(), *noise, curvature(), *overlapping, bound(), useful()]
        exact = exact_rates()
        series = {
            "rate of EM": [(o, value) for _, o, value in exact],
            "square root of the overlap": [(o, math.sqrt(o)) for _, o, _ in exact],
        }
        figure = lines(
            "rate", "Rate of EM for two components with known variance, many points", series, "overlap", "rate", log_x=True, log_y=True
        )  # fmt: skip
        rows = [
            *varied,
            *shared,
            *fallen,
            *({"part": "exact rate of EM", "setting": s, "value": value} for s, _, value in exact),
        ]
        return ReproductionResult(rows, [*lemmas, *rate, *privacy()], [figure])


def printed_variance(batch: int, noise: float, records: int, clip: float, rate: float, parameters: int) -> float:
    """Compute the right side of equation 2 at K = 1."""
    return records * rate**2 * parameters * (clip * noise) ** 2 / batch**3


def whole_steps() -> Claim:
    """Claim that ceil(N/b) steps add the printed noise."""

    def excess(batches: Sequence[int]) -> tuple[float, int]:
        """Largest relative difference, and its batch size."""
        exact = {b: update_variance(PLAN, b, 1.0, clip=1.0, rate=1.0, parameters=1) for b in batches}
        return max((exact[b] / printed_variance(b, 1.0, PLAN.records, 1.0, 1.0, 1) - 1, b) for b in batches)

    most, where = excess(sorted({*FIRST, *LATER}))
    return Claim(
        f"Lemma 4.1: the noise of a round's steps has the printed variance (within {NEAR:.0%}) at all batch sizes of figure 3",
        f"up to {most:.0%} more, at b = {where}",
        Exact(most <= NEAR),
        Cause(
            "a round has a whole number of steps, ceil(N/b), and the lemma counts N/b",
            f"over batch sizes that divide N = {PLAN.records} the largest difference is {excess(WHOLE)[0]:.1%}",
        ),
    )


def sampling() -> Claim:
    """Claim that the lemma may leave out the sampling of batches, which moves a sum by at most c^2 b (1 - b/N) in variance."""

    def most(batch: int, first: int, later: int, parameters: int) -> float:
        z = noise_multiplier(TrainingSchedule(PLAN.records, first, later, PLAN.rounds, PLAN.epsilon))
        return batch * (1 - batch / PLAN.records) / (parameters * z**2)

    own = max(most(b, PLAN.first, PLAN.later, p) for b in (PLAN.first, PLAN.later) for p in PARAMETERS.values())
    other = {
        name: max((most(first, first, PLAN.later, p), first) for first in FIRST) for name, p in PARAMETERS.items()
    }  # fmt: skip
    listed = "; ".join(f"{name}: up to {value:.2%}, at b1 = {first}" for name, (value, first) in other.items())
    return Claim(
        f"Lemma 4.1: without the sampling of batches the variance is right (within {NEAR:.0%}) at R-DPCFL's batch sizes, N and 32",
        f"sampling adds at most {own:.2%}; with other first batches {listed}",
        Exact(own <= NEAR),
    )


def curvature() -> Claim:
    """Claim that the noise of several steps adds up, on a quadratic loss whose gradients are not clipped."""
    steps, shrink = 10, 1 - 0.1
    share = sum(shrink ** (2 * t) for t in range(steps)) / steps
    return Claim(
        f"(ours) Lemma 4.1: the noise of {steps} steps adds up (within {NEAR:.0%}) on a quadratic loss with learning rate times curvature .1",
        f"it leaves {share:.0%} of the printed variance",
        Exact(share >= 1 - NEAR),
        Cause(
            "later gradients depend on earlier noise, and without clipping they undo a part of it; the proof adds the steps as if independent",
            "with one step, as in a first round with the full batch at K = 1, 100 % is left",
        ),
    )


def updates(seeds: Sequence[int]) -> tuple[list[Claim], list[Row]]:
    """Compare the variance of simulated DP-SGD updates with the printed one."""
    batches = (RECORDS, 60)
    found = {b: {seed: update_ratio(b, seed) for seed in seeds} for b in batches}
    rows = [
        {"part": "variance of an update", "setting": b, "seed": seed, "value": v} for b, own in found.items() for seed, v in own.items()
    ]  # fmt: skip
    means = "; ".join(f"b = {b}: {np.mean([*own.values()]):.3f}" for b, own in found.items())
    text = f"Lemma 4.1: simulated DP-SGD has the printed variance (within {NEAR:.0%}): logistic regression, clipped gradients, p = {DIMENSION}"
    evidence = [one for b, own in found.items() for one in _within(own, 1, NEAR, f"b = {b}")]
    return [Claim(text, f"measured over printed, {means}", evidence)], rows


def update_ratio(batch: int, seed: int) -> float:
    """Simulate one round of DP-SGD with Poisson batches, K = 1, c = z = 1, and compare with equation 2.

    Args:
        batch: Batch size b.
        seed: Seed of the records and of the noise.

    Returns:
        Total variance of the update over repetitions from the same start, divided by the printed one.
    """
    rng = np.random.default_rng([seed, batch])
    x = rng.standard_normal((RECORDS, DIMENSION)) + 0.02
    labels = np.where(rng.random(RECORDS) < 0.7, 1.0, -1.0)
    norms = np.linalg.norm(x, axis=1)
    changed = []
    for _ in range(REPEATS):
        theta = np.zeros(DIMENSION)
        for _ in range(math.ceil(RECORDS / batch)):
            size = 1 / (1 + np.exp(labels * (x @ theta)))  # of the gradient of the logistic loss, in multiples of x
            clipped = -labels * np.minimum(size, 1 / norms)
            total = (clipped * (rng.random(RECORDS) < batch / RECORDS)) @ x
            theta -= RATE * (total + rng.standard_normal(DIMENSION)) / batch
        changed.append(theta)
    return float(np.var(changed, axis=0, ddof=1).sum() / printed_variance(batch, 1.0, RECORDS, 1.0, RATE, DIMENSION))


def overlaps(seeds: Sequence[int]) -> tuple[list[Claim], list[Row]]:
    """Compare the overlap of two spherical Gaussians, the integral of the smaller density, with 2 Q(SS)."""
    dimension, draws, within = 1000, 4000, 0.01
    found = {s: {seed: overlap(s, dimension, draws, seed) - 2 * tail(s) for seed in seeds} for s in (0.5, 1.0, 2.0)}
    rows = [
        {"part": "overlap", "setting": s, "seed": seed, "value": value}
        for s, own in found.items()
        for seed, value in own.items()
    ]
    most = max(abs(np.mean([*own.values()])) for own in found.values())
    evidence = [one for s, own in found.items() for one in _within(own, 0, within, f"SS {s:g}")]
    return [Claim(
        f"Lemma 4.2: the overlap of two components is 2 Q(SS) (within {within:g}), in {dimension} dimensions",
        f"largest mean difference {most:.4f} at SS .5, 1 and 2", evidence,
    )], rows  # fmt: skip


def overlap(separation: float, dimension: int, draws: int, seed: int) -> float:
    """Estimate the integral of min(f, g) as the mean of min(1, g / f) over points of f."""
    rng = np.random.default_rng([seed, round(10 * separation)])
    direction = rng.standard_normal(dimension)
    shift = 2 * separation * direction / np.linalg.norm(direction)
    x = rng.standard_normal((draws, dimension))
    ratio = ((x**2).sum(axis=1) - ((x - shift) ** 2).sum(axis=1)) / 2
    return float(np.exp(np.minimum(0, ratio)).mean())


def growth() -> dict[tuple[int, int], float]:
    """Return z(k b) / z(b) for all pairs of batch sizes that divide N, by (b, k b)."""
    z = {b: noise_multiplier(TrainingSchedule(PLAN.records, b, PLAN.later, PLAN.rounds, PLAN.epsilon)) for b in WHOLE}
    return {(small, large): z[large] / z[small] for small, large in itertools.combinations(WHOLE, 2)}


def bound() -> Claim:
    """Claim the bound on the overlap at k b, taking for granted that the centres move k times closer (equation 32)."""
    most = max(growth().values())
    return Claim(
        f"Lemma 4.2: with rho = {RHO:g} the bound at k b holds, if the centres move k times closer (N = {PLAN.records}, epsilon {PLAN.epsilon:g})",
        f"it holds where z(kb) / z(b) is at most rho; the largest of {len(growth())} ratios is {most:.3f}",
        Exact(most <= RHO),
    )


def useful() -> Claim:
    """Claim that the bound at k b is below the overlap at b: sqrt(k) / rho > 1."""
    pairs = growth()
    idle = [pair for pair in pairs if pair[1] / pair[0] <= RHO**2]
    falls = sum(math.sqrt(large / small) > ratio for (small, large), ratio in pairs.items())
    return Claim(
        f"(ours) Lemma 4.2: with rho = {RHO:g} the bound at k b is below the overlap at b",
        f"not for k of at most rho^2 = {RHO**2:g}: {len(idle)} of {len(pairs)} pairs of batch sizes",
        Exact(not idle),
        Cause(
            "rho bounds the growth of z for every k", f"with the pair's own z(kb) / z(b) for rho it is, in {falls} of {len(pairs)} pairs"
        ),
    )  # fmt: skip


def rates(seeds: Sequence[int]) -> tuple[list[Claim], list[Row]]:
    """Claim the rate of EM: with many points and two components exactly, with four by simulation, and with 21 points."""
    exact = exact_rates()
    shares = [rate / math.sqrt(o) for _, o, rate in exact]
    found = {seed: measured_rates(seed) for seed in seeds}
    slopes = {seed: slope([(overlap_at(s), own[s]) for s in SEPARATIONS if s >= SMALL]) for seed, own in found.items()}
    few = {seed: ratio_to_truth(seed) for seed in seeds}
    rows: list[Row] = [
        {"part": "rate of EM", "setting": s, "seed": k, "value": v} for k, own in found.items() for s, v in own.items()
    ]
    rows += [{"part": "last ratio, 21 points", "setting": 3.0, "seed": seed, "value": value} for seed, value in few.items()]
    means = {s: float(np.mean([own[s] for own in found.values()])) for s in SEPARATIONS}
    listed = "; ".join(f"SS {s:g}: {mean:.4f}, {mean / math.sqrt(overlap_at(s)):.2f} roots" for s, mean in means.items())
    return [
        Claim(
            "Theorem 4.3: the rate of EM is of smaller order than the square root of the overlap: two components, many points",
            f"their quotient falls from {shares[0]:.2f} at SS {exact[0][0]:g} to {shares[-1]:.1e} at SS {exact[-1][0]:g}",
            Exact(all(a > b for a, b in itertools.pairwise(shares)) and shares[-1] < 1e-3),
        ),
        Claim(
            f"Theorem 4.3: the same for four components with unknown variances and weights, {POINTS:,} points, SS {SMALL:g} and above: exponent above .5",
            f"exponent {np.mean([*slopes.values()]):.2f}; rate, in square roots of the overlap: {listed}",
            [Comparison(slopes, 0.5, "")],
        ),
        Claim(
            "(ours) Theorem 4.3: EM comes closer to the true parameters with 21 clients {3, 6, 6, 6} (by 10% a step at SS 3, 1,000 dimensions)",
            f"the last step leaves {np.mean([*few.values()]):.3f} of the distance",
            [Comparison({seed: 1 - value for seed, value in few.items()}, 0.1, "")],
            Cause(
                "the theorem lets the number of points grow first; with n points EM ends at the estimate from n points, not at the truth",
                "here EM starts at the true parameters; its first step leaves them, and the others do not come back",
            ),
        ),
    ], rows  # fmt: skip


def proof_epsilon(steps: int, delta: float) -> float:
    """Compute epsilon of the proof of Theorem 5.1: T alpha / (2 z^2) + log(1 / delta) / (alpha - 1) at the best alpha."""
    step = steps / (2 * NOISE**2)
    return step + 2 * math.sqrt(step * math.log(1 / delta))


def privacy() -> list[Claim]:
    """Claim Theorem 5.1: its sum of Renyi divergences, under two adjacencies, and together with the selections."""
    delta = PLAN.delta
    releases = {t: [SampledGaussian(NOISE, 1.0, t)] for t in STEPS}
    zero_out = {t: epsilon(own, delta) for t, own in releases.items()}
    replaced = {
        t: epsilon_at_least(own, delta, epsilon(own, delta, "replace-one"), "replace-one") for t, own in releases.items()
    }
    said = {t: proof_epsilon(t, delta) for t in STEPS}
    doubled = {t: proof_epsilon(4 * t, delta) for t in STEPS}
    selections = BoundedRangeSelection(EACH, SELECTIONS)
    alone = calibrate(PLAN.events, PLAN.epsilon, delta)

    def together(z: float) -> list[Any]:
        return [*PLAN.events(z), selections]

    spent, joint = epsilon(together(alone), delta), calibrate(together, PLAN.epsilon, delta)
    plan = PLAN.events(alone)
    worst = epsilon_at_least(plan, delta, epsilon(plan, delta, "replace-one"), "replace-one")
    last = STEPS[-1]
    return [
        Claim(
            "Theorem 5.1: epsilon of the proof covers the updates if a record's gradient is taken out (sensitivity c)",
            f"{last} steps at z = {NOISE:g}: {said[last]:.3f} in the proof, {zero_out[last]:.3f} by PLD",
            Exact(all(zero_out[t] <= said[t] for t in STEPS)),
        ),
        Claim(
            "Theorem 5.1: the same if a record is replaced, which is the paper's definition of neighbours",
            f"{last} steps at z = {NOISE:g}: {said[last]:.3f} in the proof, at least {replaced[last]:.3f} for the worst records; "
            f"the paper's plan with z for epsilon 5: at least {worst:.3f}",
            Exact(all(replaced[t] <= said[t] for t in STEPS)),
            Cause(
                "the proof takes c as sensitivity; two clipped gradients in opposite directions differ by 2c",
                f"with 2c the proof's formula gives {doubled[last]:.3f}",
            ),
        ),
        Claim(
            "Theorem 5.1, proof: updates of epsilon 5 and private selections are together of epsilon 5",
            f"with {SELECTIONS} selections of {EACH:g} each: {spent:.3f} at z = {alone:.4f}",
            Exact(spent <= PLAN.epsilon),
            Cause("two mechanisms with the same epsilon compose to a larger one", f"solved together, z is {joint:.4f} at epsilon 5"),
        ),
    ]  # fmt: skip


def _within(values: dict[Any, float], middle: float, distance: float, name: str) -> list[Comparison]:
    """Two comparisons: the mean lies at most a distance below and above the middle."""
    return [
        Comparison(values, middle - distance, "", f"{name}, from below"),
        Comparison({seed: -value for seed, value in values.items()}, -middle - distance, "", f"{name}, from above, negated"),
    ]
