"""EM-FDRO's objective and approximate losses: Proposition 4.3, equation 4 and Corollary 4.6, in exact fractions where possible."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from dpcfl_net.privacy.loss_weighting import probabilities
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.claims import Cause, Claim, Exact
from dpcfl_net.reproduce.em_fdro_bounds import PROFILES
from dpcfl_net.reproduce.em_fdro_draws import PAPER
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.results.tables import Table

CLIENTS = 25
BASES = tuple(Fraction(numerator, 8) for numerator in (9, 10, 12, 16, 32, 128))  # e^(epsilon / 2 tau), rising
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
RANDOM, DRAWS = 300, 20  # random loss vectors; random distributions q for each
ROUNDING = 1e-10  # relative, of equation 4 in float64
NU = (0.25, 0.5, 1.0, 2.0)  # error of the losses over tau
R = Fraction(2)  # e^(epsilon / 2)


class Objective(Reproduction):
    """Losses are whole numbers and e^(epsilon / 2 tau) is a fraction, so that all probabilities are fractions."""

    name = "em-fdro/prop43"
    paper = PAPER + ", Proposition 4.3, equation 4, Corollary 4.6"
    title = "Objective of loss-weighted sampling, and its privacy with approximate losses"
    any_scale = True

    def compute(self, context: Context) -> ReproductionResult:
        vectors = list(itertools.chain(on_grid(), at_random()))
        rows: list[dict[str, Any]] = [
            {"gaps": name, "epsilon": epsilon, "distance to the largest loss": distance(name, epsilon)}
            for name in PROFILES
            for epsilon in EPSILONS
        ]
        series = {
            name: [(float(row["epsilon"]), float(row["distance to the largest loss"])) for row in rows if row["gaps"] == name]
            for name in PROFILES
        }
        figure = lines("distance", "max L_i - L_EM, 25 clients", series, "epsilon", "in units of tau", log_x=True)
        found = [approximate(Fraction(nu).limit_denominator()) for nu in NU]
        shown = [[f"{nu:g}", *(f"{value:.3f}" for value in values)] for nu, values in zip(NU, found, strict=True)]
        table = Table(
            "Corollary 4.6 at e^(epsilon/2) = 2: log of the largest probability ratio of 25 clients",
            ["nu / tau", "epsilon + 2 gamma", "exact losses", "losses off by nu", "epsilon / 2 + 4 gamma"],
            shown,
        )
        rows += [dict(zip(("nu", *COLUMNS), (nu, *values), strict=True)) for nu, values in zip(NU, found, strict=True)]
        claims = [*self.objective(vectors), *self.representation(), *self.approximation(found)]
        return ReproductionResult(rows, claims, [figure], [table])

    def objective(self, vectors: Sequence[Sequence[int]]) -> list[Claim]:
        """Check Proposition 4.3, the formula of its proof, and what governs the rate."""
        rising = bounded = 0
        for losses in vectors:
            values = [mean_loss(losses, base) for base in BASES]
            constant = len(set(losses)) == 1
            rising += all((low == high) if constant else (low < high) for low, high in itertools.pairwise(values))
            bounded += all(_between(losses, base, value) for base, value in zip(BASES, values, strict=True))
        of = f"of {len(vectors)}"
        equal, epsilon = [1.0] * CLIENTS, 2.0
        slope = _slope(lambda e: 2 / e * _log_sum(equal, e), epsilon)
        right = 2 * _slope(lambda e: _log_sum(equal, e), epsilon)
        return [
            Claim(
                "Proposition 4.3: L_EM rises with epsilon towards the largest loss",
                f"rises at every step in {rising} {of}; its derivative is Var(L) / (2 tau)",
                Exact(rising == len(vectors)),
            ),
            Claim(
                "Proposition 4.3, rate: the distance to the largest loss lies between 1/n and 1 times the sum of gap_i w_i",
                f"in {bounded} {of}; w_i = e^(-epsilon gap_i / 2 tau)",
                Exact(bounded == len(vectors)),
            ),
            Claim(
                "proof of Proposition 4.3: L_EM is the derivative by epsilon of (2 tau / epsilon) log sum_i e^(epsilon L_i / 2 tau)",
                f"25 equal losses of 1, epsilon 2: derivative {slope:.3f}, L_EM 1",
                Exact(abs(slope - 1) < ROUNDING),
                Cause(
                    "the factor 1 / epsilon must stand outside of the derivative",
                    f"2 tau times the derivative of log sum_i e^(epsilon L_i / 2 tau) is {right:.3f}",
                ),
            ),
        ]

    def representation(self) -> list[Claim]:
        """Check equation 4 by Gibbs' identity: value(p) - value(q) = (2 tau / epsilon) KL(q || p), which is 0 at q = p only."""
        rng, worst, cases, above = np.random.default_rng(0), 0.0, 0, 0
        for _ in range(RANDOM):
            n = int(rng.integers(2, CLIENTS + 1))
            losses, epsilon = rng.uniform(0, 1, n), float(rng.choice(EPSILONS))
            p = probabilities(losses.tolist(), epsilon, 1.0)
            left = 2 / epsilon * (_log_sum(losses.tolist(), epsilon) - math.log(n))
            worst = max(worst, abs(value(p, losses, epsilon) - left) / max(abs(left), 1))
            for q in rng.dirichlet(np.full(n, 0.5), DRAWS):
                gap = left - value(q, losses, epsilon)
                expected = 2 / epsilon * _divergence(q, p)
                worst, cases, above = max(worst, abs(gap - expected) / max(abs(left), 1)), cases + 1, above + (gap < 0)
        return [
            Claim(
                "equation 4: the supremum over q is the log-sum-exp objective, attained at the sampling probabilities p",
                f"{above} of {cases} random q lie above; value(p) - value(q) = (2 tau / epsilon) KL(q || p) up to {worst:.0e}",
                Exact(worst < ROUNDING and not above),
            )
        ]

    def approximation(self, found: Sequence[Sequence[float]]) -> list[Claim]:
        """Check Corollary 4.6 as an implication, and with the gamma that Lemma 4.5 gives."""
        broken, cases = distorted()
        at = [f"nu = {nu:g} tau: {values[2]:.2f} of {values[0]:.2f}" for nu, values in zip(NU, found, strict=True)]
        exceeds = [nu for nu, values in zip(NU, found, strict=True) if values[2] > values[0] + ROUNDING]
        return [
            Claim(
                "Corollary 4.6: epsilon-DP with a distortion of e^(+-gamma) is (epsilon + 2 gamma)-DP",
                f"broken in {broken} of {cases} pairs of distributions",
                Exact(not broken),
            ),
            Claim(
                "Corollary 4.6 with gamma = epsilon nu / (2 tau) of Lemma 4.5: losses off by at most nu (not by the same in both data sets) cost epsilon + 2 gamma",
                "; ".join(at),
                Exact(not exceeds),
                Cause(
                    "Lemma 4.5's distortion is e^(2 gamma), so that the corollary gives epsilon + 4 gamma",
                    f"broken from nu = {min(exceeds):g} tau only, since exact losses cost epsilon / 2 and not epsilon" if exceeds else "",
                ),
            ),
            Claim(
                "(ours) losses off by nu cost at most epsilon / 2 + 4 gamma if one loss changes and the models are given",
                f"largest share of it: {max(values[2] / values[3] for values in found):.1%}",
                Exact(all(values[2] <= values[3] + ROUNDING for values in found)),
            ),
        ]  # fmt: skip


COLUMNS = ("epsilon + 2 gamma", "exact losses", "losses off by nu", "epsilon / 2 + 4 gamma")


def on_grid() -> Iterator[tuple[int, ...]]:
    """Yield all whole losses of 4 clients between 0 and 6."""
    yield from itertools.combinations_with_replacement(range(7), 4)


def at_random() -> Iterator[tuple[int, ...]]:
    """Yield random whole losses of 2 to 25 clients between 0 and 40."""
    rng = random.Random(0)
    for _ in range(RANDOM):
        yield tuple(rng.randint(0, 40) for _ in range(rng.randint(2, CLIENTS)))


def mean_loss(losses: Sequence[int], base: Fraction) -> Fraction:
    """Compute L_EM exactly, with p_i proportional to base^L_i.

    Args:
        losses: Whole losses.
        base: e^(epsilon / 2 tau), above 1.

    Returns:
        The mean loss under p.
    """
    weights = [base**loss for loss in losses]
    return sum((w * loss for w, loss in zip(weights, losses, strict=True)), Fraction(0)) / sum(weights)


def distance(profile: str, epsilon: float) -> float:
    """Compute max L_i - L_EM of 25 clients at tau = 1.

    Args:
        profile: Key of PROFILES.
        epsilon: Epsilon.
    """
    gaps = np.array([0.0, *(PROFILES[profile](k) for k in range(1, CLIENTS))])
    return float(probabilities((-gaps).tolist(), epsilon, 1.0) @ gaps)


def value(q: np.ndarray, losses: np.ndarray, epsilon: float) -> float:
    """Compute the right-hand side of equation 4 at q, with tau = 1.

    Args:
        q: Distribution over the clients, (n,).
        losses: Losses, (n,).
        epsilon: Epsilon.
    """
    return float(q @ losses) - 2 / epsilon * _divergence(q, np.full(len(q), 1 / len(q)))


def distorted() -> tuple[int, int]:
    """Distort random pairs of distributions and compare their largest ratio with the corollary's bound, in fractions.

    Returns:
        Number of pairs that exceed the bound, and number of pairs.
    """
    rng, broken = random.Random(1), 0
    for k in range(RANDOM):
        n = rng.randint(2, CLIENTS)
        first, second = ([Fraction(rng.randint(1, 99)) for _ in range(n)] for _ in range(2))
        up = [Fraction(rng.randint(1, 3)) if k % 2 else (Fraction(3) if j == 0 else Fraction(1)) for j in range(n)]
        down = [1 / factor for factor in up]
        p, q = _scaled(first), _scaled(second)
        changed = [_scaled([w * f for w, f in zip(one, by, strict=True)]) for one, by in ((p, up), (q, down))]
        ratios = [_largest(*pair) for pair in ((p, q), (changed[0], p), (p, changed[0]), (changed[1], q), (q, changed[1]))]
        broken += _largest(*changed) > ratios[0] * max(ratios[1:]) ** 2
    return broken, RANDOM


def approximate(nu: Fraction) -> tuple[float, float, float, float]:
    """Find the largest log ratio of a client's probability when its loss moves by tau, all losses being off by nu at worst.

    All other losses are equal. The ratio of the client itself is searched over the weight of the others, which is monotone.

    Args:
        nu: Error of the losses over tau.

    Returns:
        Values of COLUMNS; epsilon is 2 log R.
    """
    g = math.exp(float(nu) * math.log(R))  # e^gamma
    r, worst = float(R), [0.0, 0.0]
    for exponent in range(13):
        others = (CLIENTS - 1) * 10.0**exponent  # weight of the others over that of the client
        for place, error in enumerate((1.0, g)):
            high = r * error / (r * error + others / error)
            low = (1 / error) / (1 / error + others * error)
            worst[place] = max(worst[place], math.log(high / low))
    gamma, half = math.log(g), math.log(r)
    return 2 * half + 2 * gamma, worst[0], worst[1], half + 4 * gamma


def _between(losses: Sequence[int], base: Fraction, mean: Fraction) -> bool:
    """Check 1/n sum gap_i w_i <= max - mean <= sum gap_i w_i, with weights relative to the worst client's."""
    top = max(losses)
    total = sum((top - loss) * base ** (loss - top) for loss in losses)
    return total / len(losses) <= top - mean <= total


def _log_sum(losses: Sequence[float], epsilon: float) -> float:
    scores = np.asarray(losses) * epsilon / 2
    return float(scores.max() + math.log(np.exp(scores - scores.max()).sum()))


def _slope(function: Callable[[float], float], at: float) -> float:
    """Differentiate numerically, by the five-point rule (error of order step^4)."""
    step = 1e-4
    near, far = (function(at + s * step) - function(at - s * step) for s in (1, 2))
    return float((8 * near - far) / (12 * step))


def _divergence(q: np.ndarray, p: np.ndarray) -> float:
    """Relative entropy KL(q || p)."""
    inside = q > 0
    return float(np.sum(q[inside] * np.log(q[inside] / p[inside])))


def _scaled(weights: Sequence[Fraction]) -> list[Fraction]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _largest(p: Sequence[Fraction], q: Sequence[Fraction]) -> Fraction:
    """Largest ratio of probabilities, in either direction."""
    return max(max(a / b, b / a) for a, b in zip(p, q, strict=True))
