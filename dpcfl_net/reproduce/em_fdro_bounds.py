"""EM-FDRO's theory in exact fractions: Propositions 4.1 and 4.4, Corollary 4.2, Lemma 4.5."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from dpcfl_net.privacy.client_selection import selection_epsilon, unconditional_epsilon
from dpcfl_net.privacy.loss_weighting import near_mass, printed_bounds, probabilities, sharp_bounds
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.claims import Cause, Claim, Exact
from dpcfl_net.reproduce.em_fdro_draws import PAPER
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.results.tables import Table

STEPS, RANDOM = 10, 1000  # grid of tenths; number of random vectors
CLIENTS, DRAWN, ROUNDS = 25, 20, 30
# Gaps of the other 24 clients to the worst client, in units of tau.
PROFILES: dict[str, Callable[[int], float]] = {
    "one apart": lambda k: 1.0,
    "evenly spread": lambda k: k / 24,
    "five near the worst": lambda k: 0.05 if k < 5 else 1.0,
}
EPSILONS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

Weights = Sequence[Fraction]


class Bounds(Reproduction):
    """Checks the theory for all weights of 4 clients on a grid and for random weights of up to 25 clients.

    The weights e^(-epsilon gap / 2 tau) can be any numbers in (0, 1], so fractions represent them exactly.
    """

    name = "em-fdro/prop41"
    paper = PAPER + ", Propositions 4.1 and 4.4, Corollary 4.2, Lemma 4.5"
    title = "Probability mass near the worst client: exact bounds and limits"
    any_scale = True

    def compute(self, context: Context) -> ReproductionResult:
        cases = list(itertools.chain(on_grid(), at_random()))
        vectors = list(dict.fromkeys(weights for weights, _ in cases))
        rows = [row(name, epsilon) for name in PROFILES for epsilon in EPSILONS]
        series = {name: [(epsilon, _p_max(name, epsilon)) for epsilon in EPSILONS] for name in PROFILES}
        figure = lines("p-max", "Probability of the worst of 25 clients", series, "epsilon", "p_max")
        columns = list(rows[0])
        cells = [[value if isinstance(value, str) else f"{value:.4g}" for value in line.values()] for line in rows]
        claims = [*self.bounds(cases), self.limits(vectors), *self.lemma(vectors), self.draws()]
        caption = "N(delta): clients within delta = .1 tau of the worst"
        return ReproductionResult(rows, claims, [figure], [Table("Mass near the worst client", columns, cells, caption)])

    def bounds(self, cases: Sequence[tuple[Weights, Fraction]]) -> list[Claim]:
        """Check Proposition 4.1 and how tight its printed bounds are."""
        broken = weak = empty = loose = 0
        for weights, threshold in cases:
            mass, (low, high), (lower, upper) = (
                near_mass(weights, threshold),
                printed_bounds(weights, threshold),
                sharp_bounds(weights, threshold),
            )
            share = Fraction(sum(w >= threshold for w in weights), len(weights))
            broken += not low <= mass <= high
            loose += not share <= lower <= mass <= upper <= 1
            weak += low <= share
            empty += high > 1
        of = f"of {len(cases)}"
        same = f"the formula; the best bounds from the same numbers meet it in {len(cases) - loose} {of}"
        return [
            Claim("Proposition 4.1: both bounds hold", f"broken in {broken} {of}", Exact(not broken)),
            Claim("(ours) the best bounds from the same numbers hold", f"broken in {loose} {of}", Exact(not loose)),
            Claim(
                "(ours) the printed lower bound is above the trivial bound N(delta) / n",
                f"at most N(delta) / n in {weak} {of}",
                Exact(weak < len(cases)),
                Cause("its numerator assumes gap delta for all near clients, its denominator assumes gap 0", same),
            ),
            Claim(
                "(ours) the printed upper bound is at most 1",
                f"above 1 in {empty} {of}",
                Exact(not empty),
                Cause("its numerator assumes gap 0 for all near clients, its denominator assumes gap delta", same),
            ),
        ]

    def limits(self, vectors: Sequence[Weights]) -> Claim:
        """Check Corollary 4.2; at k times epsilon the weights are k-th powers, so fractions decide whether p_max rises."""
        apart = [weights for weights in vectors if weights.count(Fraction(1)) == 1]
        rising = uniform = worst = 0
        for weights in apart:
            peaks = [1 / sum(w**k for w in weights) for k in (1, 2, 3)]
            rising += peaks[0] < peaks[1] < peaks[2] < 1
            losses = [2 * math.log(w) for w in weights]  # at epsilon = tau = 1
            uniform += abs(probabilities(losses, 1e-9, 1.0) - 1 / len(weights)).max() < 1e-8
            worst += probabilities(losses, 1e5, 1.0).max() > 1 - 1e-8
        return Claim(
            "Corollary 4.2: p_max rises strictly from 1/n to 1",
            f"rises in {rising}, is 1/n at epsilon 1e-9 in {uniform} and 1 at 1e5 in {worst} of {len(apart)} with a single worst client",
            Exact(rising == uniform == worst == len(apart)),
        )

    def lemma(self, vectors: Sequence[Weights]) -> list[Claim]:
        """Check Lemma 4.5 at its worst case: one weight rises by g = e^gamma, here 2, and all others fall by g."""
        g, most = Fraction(2), Fraction(0)
        for weights in vectors:
            total = sum(weights)
            most = max(most, *(g * total / (own * g + (total - own) / g) for own in weights))
        return [
            Claim(
                "Lemma 4.5: losses off by nu move a probability by a factor of at most e^gamma (here 2)",
                f"by up to {float(most):.3f}",
                Exact(most <= g),
                Cause(
                    "the sum of all weights changes as well, in the opposite direction",
                    "with the sum held fixed the factor is 2",
                ),
            ),
            Claim("(ours) by a factor of at most e^(2 gamma)", f"by up to {float(most):.3f} of 4", Exact(most <= g**2)),
        ]

    def draws(self) -> Claim:
        """Check the composition of Proposition 4.4 for the settings of the experiments."""
        found = [
            (eps, selection_epsilon(eps, CLIENTS, DRAWN, ROUNDS), unconditional_epsilon(eps, CLIENTS, DRAWN, ROUNDS))
            for eps in (2, 4)
        ]
        single = [selection_epsilon(eps, CLIENTS, 1, ROUNDS) for eps in (2, 4)]
        listed = "; ".join(
            f"epsilon {eps}: {given:.1f} with the models given, {whole:g} without" for eps, given, whole in found
        )
        return Claim(
            f"Proposition 4.4: {ROUNDS} rounds of draws cost {ROUNDS} epsilon, 60 and 120",
            listed,
            Exact(all(given <= ROUNDS * eps for eps, given, _ in found)),
            Cause(
                f"a round draws {DRAWN} clients, not one, and a client's data change every other loss through the model",
                f"with one client drawn and the models given the cost is {' and '.join(f'{value:.1f}' for value in single)}",
            ),
        )


def on_grid() -> Iterator[tuple[Weights, Fraction]]:
    """Yield all weights of 4 clients in tenths (the worst client has 1), with all thresholds in tenths."""
    grid = [Fraction(k, STEPS) for k in range(1, STEPS + 1)]
    for others in itertools.combinations_with_replacement(grid, 3):
        for threshold in grid:
            yield (Fraction(1), *others), threshold


def at_random() -> Iterator[tuple[Weights, Fraction]]:
    """Yield random weights of 2 to 25 clients and a threshold, in thousandths."""
    rng = random.Random(0)
    for _ in range(RANDOM):
        others = [Fraction(rng.randint(1, 1000), 1000) for _ in range(rng.randint(1, CLIENTS - 1))]
        yield (Fraction(1), *others), Fraction(rng.randint(1, 1000), 1000)


def row(profile: str, epsilon: float) -> dict[str, str | float]:
    """Evaluate Proposition 4.1 at tau = 1 and delta = .1.

    Args:
        profile: Key of PROFILES.
        epsilon: Epsilon.

    Returns:
        A line of data.csv.
    """
    weights = [1.0, *(math.exp(-epsilon * PROFILES[profile](k) / 2) for k in range(1, CLIENTS))]
    threshold = math.exp(-epsilon * 0.1 / 2)
    near = sum(1 for k in range(1, CLIENTS) if PROFILES[profile](k) <= 0.1) + 1
    if not epsilon:  # at epsilon 0 every weight is 1 for any gaps
        return {"gaps": profile, "epsilon": epsilon, "N(delta)": near, "p_max": 1 / CLIENTS, "mass": near / CLIENTS,
                "printed low": near / CLIENTS, "printed high": near / CLIENTS, "best low": near / CLIENTS, "best high": near / CLIENTS}  # fmt: skip
    printed, best = printed_bounds(weights, threshold), sharp_bounds(weights, threshold)
    return {"gaps": profile, "epsilon": epsilon, "N(delta)": near, "p_max": _p_max(profile, epsilon), "mass": near_mass(weights, threshold),
            "printed low": printed[0], "printed high": printed[1], "best low": best[0], "best high": best[1]}  # fmt: skip


def _p_max(profile: str, epsilon: float) -> float:
    return float(probabilities([0.0, *(-PROFILES[profile](k) for k in range(1, CLIENTS))], epsilon, 1.0).max())
