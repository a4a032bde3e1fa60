"""RR-Cluster's Theorem 4.10: the contraction of one round, checked without noise in fractions and with noise by simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from dpcfl_net.clustering.rebalance import rebalance
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.claims import Cause, Claim, Comparison, Exact, share
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.rr_accuracy import PAPER
from dpcfl_net.reproduce.rr_lemma import DELTA, label_epsilon, label_term, largest_noise
from dpcfl_net.results.tables import Table

SEEDS = tuple(range(20))
TRIALS = 20  # rounds of a seed
CLUSTERS, CLIENTS, MIN_SIZE = 4, 40, 9
FAILURE = 0.5  # delta_c
STEP = Fraction(9, 10)  # gamma; the proof needs gamma below 1 / L, and L is 1
CURVATURES = tuple(Fraction(tenths, 20) for tenths in (20, 15, 10, 8, 6, 5, 4, 2, 1))  # lambda / L


@dataclass(frozen=True)
class Round:
    """One round: cluster j has the loss (lam x_1^2 + x_2^2 + ... + x_d^2) / 2 around its optimum; L = 1.

    Attributes:
        curvature: lambda.
        gradient_noise: v.
        update_noise: Deviation 2 C sigma_theta of the noise on a sum.
        label_noise: sigma_s.
    """

    curvature: float
    gradient_noise: float
    update_noise: float
    label_noise: float = 0.05
    beta: float = 0.4
    distance: float = 3.0  # Delta: Assumption 4.9 holds for every tau, since B Delta / 2 < rho / (gamma L)
    dimension: int = 20

    @property
    def name(self) -> str:
        """Settings as text."""
        return f"lambda/L {self.curvature:g}, v {self.gradient_noise:g}, noise {self.update_noise:g}"

    @property
    def tau(self) -> float:
        """Bound of Lemma 4.8; clusters have equal sizes, and eta is that of gradient noise within 2 Delta."""
        loss_noise = self.gradient_noise * 2 * self.distance / math.sqrt(self.dimension)
        chosen = 8 * loss_noise**2 * CLUSTERS / (self.beta**2 * self.curvature**2 * self.distance**4)
        return chosen + label_term(self.label_noise)


ROUNDS_CHECKED = tuple(Round(curvature, v, noise) for curvature in (1.0, 0.5, 0.1) for v, noise in ((0.0, 0.0), (0.005, 0.01)))


class Contraction(Reproduction):
    """All clients take part; the first model is off in the direction of the smallest curvature."""

    name = "rr-cluster/theorem410"
    paper = PAPER + ", Theorem 4.10"
    title = "Contraction of a round and its bound"
    any_scale = True

    def compute(self, context: Context) -> ReproductionResult:
        rows: list[dict[str, Any]] = [
            {"lambda/L": float(ratio), "measured": float(left), "printed": float(printed), "ours": float(ours)}
            for ratio in CURVATURES
            for left, printed, ours in [factors(ratio)]
        ]
        series = {
            name: [(row["lambda/L"], row[key]) for row in rows]
            for name, key in (("measured", "measured"), ("printed bound", "printed"), ("corrected bound", "ours"))
        }
        figure = lines(
            "contraction", "Distance to the optimum after a round over that before, without noise", series, "lambda / L", "factor",
            caption="The printed bound lies below the measured factor where lambda / L is below B / (2 rho).",
        )  # fmt: skip
        kept = {case: {seed: simulate(case, seed) for seed in context.seeds(SEEDS)} for case in ROUNDS_CHECKED}
        rows += [
            {"setting": case.name, "seed": seed, "within_printed": sum(a for a, _ in found) / len(found),
             "within_ours": sum(b for _, b in found) / len(found)}
            for case, by_seed in kept.items()
            for seed, found in by_seed.items()
        ]  # fmt: skip
        compared = [
            [share({seed: [pair[side] for pair in found] for seed, found in by_seed.items()}, 1 - FAILURE, name=case.name)
             for case, by_seed in kept.items()]
            for side in (0, 1)
        ]  # fmt: skip
        shown = [[case.name, *(f"{_percent(side[k]):.0f}" for side in compared)] for k, case in enumerate(ROUNDS_CHECKED)]
        table = Table("Rounds within the bound, %", ["setting", "printed", "corrected"], shown)
        return ReproductionResult(rows, [exact(), *simulated(*compared), finite(), assumptions()], [figure], [table])


def factors(ratio: Fraction) -> tuple[Fraction, Fraction, Fraction]:
    """Compute the contraction of a round without noise and with right clusters of equal size, and two bounds, at L = 1.

    Args:
        ratio: lambda / L.

    Returns:
        1 - gamma lambda, the factor in the direction of the smallest curvature; the printed bound 1 - gamma L B / (2 rho); the
        bound with lambda L / (lambda + L) instead of L / 2.
    """
    share_of_right = Fraction(MIN_SIZE, CLIENTS - (CLUSTERS - 1) * MIN_SIZE)  # B / rho
    printed = 1 - STEP * share_of_right / 2
    return 1 - STEP * ratio, printed, 1 - STEP * ratio / (ratio + 1) * share_of_right


def exact() -> Claim:
    """Claim the printed contraction without noise: v, eta, sigma_theta, tau are 0, so that epsilon is 0."""
    broken = [ratio for ratio in CURVATURES if factors(ratio)[0] > factors(ratio)[1]]
    left, printed, ours = factors(broken[-1] if broken else CURVATURES[-1])
    assert all(factors(ratio)[0] <= factors(ratio)[2] for ratio in CURVATURES)
    return Claim(
        "Theorem 4.10 without noise: a round contracts the distance by 1 - gamma L B / (2 rho), here with B = 9 of 40 clients in 4 clusters",
        f"broken for lambda / L = {', '.join(str(ratio) for ratio in broken)}; at the smallest {float(left):.3f} instead of {float(printed):.3f}",
        Exact(not broken),
        Cause(
            "equation 27 replaces lambda L / (lambda + L) by L / 2, which is larger unless lambda = L",
            f"with lambda L / (lambda + L) the bound is {float(ours):.3f} and holds for all {len(CURVATURES)} values",
        ),
    )


def simulated(printed: Sequence[Comparison], ours: Sequence[Comparison]) -> list[Claim]:
    """Claim both bounds with noise, each with the probability 1 - delta_c.

    Args:
        printed: Shares of the rounds within the printed bound, by setting.
        ours: Shares of the rounds within the corrected bound.

    Returns:
        The claims.
    """

    def listed(compared: Sequence[Comparison]) -> str:
        return "; ".join(f"{one.name}: {_percent(one):.0f} %" for one in compared)

    return [
        Claim(
            f"Theorem 4.10: the bound holds with probability at least 1 - delta_c = {1 - FAILURE:g} in every setting",
            listed(printed), printed, Cause("the contraction is that of lambda = L", "the corrected bound holds in the same rounds"),
        ),
        Claim(
            "(ours) with lambda L / (lambda + L) for L / 2, 4 tau M / delta_c for 2 tau M / delta_c, and gamma before 4 v, it does",
            listed(ours), ours,
        ),
    ]  # fmt: skip


def finite() -> Claim:
    """Claim that the error term is a number at the privacy of the experiments, for the largest B."""
    most = FAILURE / (4 * CLUSTERS)  # B delta_c / (4 M) at B = M / k
    sigma = largest_noise(most)
    spent = label_epsilon(sigma)
    return Claim(
        "(ours) at the epsilon of the experiments, 2 to 8, the error term is finite: B delta_c > 4 tau M",
        f"tau must be below {most:.3f} even for B = M/k and delta_c = {FAILURE:g}, so sigma_s below {sigma:.2f}: "
        f"labels alone then cost epsilon {spent:.0f} at delta {DELTA:g}",
        Exact(spent <= 8),
        Cause("the number of wrong clients is bounded by Markov's inequality from tau", f"epsilon {spent:.0f} against 8"),
    )


def assumptions() -> Claim:
    """Claim that the assumptions can hold together on all of R^d."""
    return Claim(
        "Assumptions 4.3 and 4.7 hold together for every theta: strong convexity, and gradients of norm at most G",
        "strong convexity gives |grad F(theta)| >= lambda |theta - theta*|, above G beyond the distance G / lambda",
        Exact(False),
        Cause("both are asked for on all of R^d", "on a ball of radius G / L around the optima both can hold"),
    )


def simulate(case: Round, seed: int) -> list[tuple[bool, bool]]:
    """Simulate independent rounds and compare with both bounds.

    Args:
        case: The round.
        seed: Seed.

    Returns:
        For each round, True if the first model lies within the printed bound, and within the corrected one.
    """
    rng, k, d = np.random.default_rng([seed, round(1000 * case.curvature)]), CLUSTERS, case.dimension
    curvature = np.ones(d)
    curvature[0] = case.curvature
    optima = np.zeros((k, d))
    optima[np.arange(k), np.arange(k) + 1] = case.distance / math.sqrt(2)
    models = optima.copy()
    models[:, 0] += (0.5 - case.beta) * math.sqrt(case.curvature) * case.distance * 0.99
    true, before, found = np.repeat(np.arange(k), CLIENTS // k), float(np.linalg.norm(models[0] - optima[0])), []
    for _ in range(TRIALS):
        noise = case.gradient_noise / math.sqrt(d) * rng.standard_normal((CLIENTS, d))
        away = models[None] - optima[true][:, None]  # (M, k, d)
        losses = (curvature * away**2).sum(axis=2) / 2 + (noise[:, None] * away).sum(axis=2)
        named = (np.eye(k)[losses.argmin(axis=1)] + case.label_noise * rng.standard_normal((CLIENTS, k))).argmax(axis=1)
        members = np.flatnonzero(rebalance(named, k, MIN_SIZE, rng, "any") == 0)
        gradients = curvature * away[members, 0] + noise[members]
        total = gradients.sum(axis=0) + case.update_noise * rng.standard_normal(d)
        after = float(np.linalg.norm(models[0] - float(STEP) * total / len(members) - optima[0]))
        found.append((after <= bound(case, before, printed=True), after <= bound(case, before, printed=False)))
    return found


def bound(case: Round, before: float, printed: bool) -> float:
    """Compute the right side of Theorem 4.10.

    Args:
        case: The round.
        before: Distance of the model to its optimum.
        printed: True: as printed; False: with lambda L / (lambda + L), 4 tau M / delta_c, and gamma before the first error term.
    """
    gamma, rho, wrong = float(STEP), CLIENTS - (CLUSTERS - 1) * MIN_SIZE, case.tau * CLIENTS
    right = MIN_SIZE - (2 if printed else 4) * wrong / FAILURE
    rate = 0.5 if printed else case.curvature / (1 + case.curvature)
    v, slack = case.gradient_noise, MIN_SIZE * FAILURE - 4 * wrong
    logs = math.log(4 / FAILURE)
    error = (
        (1 if printed else gamma) * 4 * v / math.sqrt(FAILURE * slack)
        + 6 * gamma * case.distance * wrong / (FAILURE * MIN_SIZE)
        + 8 * gamma * v * CLUSTERS * math.sqrt(CLUSTERS * wrong) / (MIN_SIZE * FAILURE**1.5)
        + gamma * case.update_noise / MIN_SIZE * math.sqrt(case.dimension + 2 * math.sqrt(case.dimension * logs) + 2 * logs)
    )
    return (1 - gamma * rate * right / rho) * before + error


def _percent(one: Comparison) -> float:
    return 100 * sum(one.values.values()) / len(one.values)
