"""R-DPCFL's figures 3 and 4: effect of both batch sizes on the noise multiplier and on the noise of an update."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from dpcfl_net.privacy.accounting.accountant import Accountant, calibrate
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.claims import Cause, Claim, Exact
from dpcfl_net.reproduce.plots import lines, slope

PAPER = "Malekmohammadi, Taik, Farnadi, Differentially Private Clustered Federated Learning, TMLR 2025"
FIRST = (32, 64, 128, 256, 512, 1024, 2048, 4096, 6600)
LATER = (16, 32, 64, 128, 256, 512)
WHOLE = (33, 66, 132, 264, 550, 1100, 2200, 3300, 6600)  # batch sizes that divide the 6600 records: whole numbers of steps
LABEL = {"b1": "b1", "b_later": "b>1"}
SOLVED = 5e-4  # relative accuracy of `calibrate`


@dataclass(frozen=True)
class TrainingSchedule:
    """One client's DP-SGD over a run.

    Attributes:
        records: Records (N).
        first: Batch size of round 1 (b1).
        later: Batch size of later rounds (b>1).
        rounds: Rounds (E).
        epsilon: Target epsilon.
        epochs: Local epochs (K).
        delta: Target delta.
    """

    records: int
    first: int
    later: int
    rounds: int
    epsilon: float
    epochs: int = 1
    delta: float = 1e-4

    def events(self, noise_multiplier: float) -> list[SampledGaussian]:
        """Return the accountant's events: both phases with Poisson batches, no selections (as in the paper's figures)."""
        return [
            SampledGaussian(noise_multiplier, batch / self.records, rounds * self.steps(batch))
            for batch, rounds in ((self.first, 1), (self.later, self.rounds - 1))
        ]

    def steps(self, batch: int) -> int:
        """Return the steps of one round: K ceil(N/b)."""
        return self.epochs * math.ceil(self.records / batch)


@cache
def noise_multiplier(schedule: TrainingSchedule, accountant: Accountant = "rdp") -> float:
    """Solve z(epsilon, delta, b1, b>1, N, K, E).

    Args:
        schedule: The client's DP-SGD.
        accountant: "pld" or "rdp".

    Returns:
        Standard deviation of the noise on a sum of gradients, divided by the clip norm.

    Source: Lemma 4.1.
    """
    return calibrate(schedule.events, schedule.epsilon, schedule.delta, accountant=accountant)


def grid(first: Sequence[int] = FIRST, later: Sequence[int] = LATER) -> dict[tuple[int, int], TrainingSchedule]:
    """Return the schedules of figures 3 and 4 by (b1, b>1): N = 6600, epsilon 5, delta 1e-4, K = 1, E = 200."""
    return {
        (b1, b): TrainingSchedule(records=6600, first=b1, later=b, rounds=200, epsilon=5)
        for b1, b in itertools.product(first, later)
    }


def update_variance(
    schedule: TrainingSchedule, batch: int, noise: float, *, clip: float, rate: float, parameters: int
) -> float:
    """Compute the noise variance of an update: steps * (rate * clip * noise / batch)^2 * p.

    Args:
        schedule: The client's DP-SGD.
        batch: Batch size of the round.
        noise: Noise multiplier z.
        clip: Clip norm c.
        rate: Learning rate.
        parameters: Parameters of the model (p).

    Returns:
        Var(delta theta) without the variance of the records.

    Source: equation 2, with the actual K ceil(N/b) steps in place of K N/b.
    """
    return schedule.steps(batch) * (rate * clip * noise / batch) ** 2 * parameters


class Variance(Reproduction):
    """Figure 3: variance of a model update in round 1 (left) and in later rounds (right)."""

    name = "r-dpcfl/fig3"
    paper = PAPER + ", Figure 3 and Lemma 4.1"
    title = "Noise in a model update against both batch sizes"
    any_scale = True
    setting: ClassVar[dict[str, Any]] = {"clip": 3.0, "rate": 5e-4, "parameters": 11_181_642}

    def compute(self, context: Context) -> ReproductionResult:
        schedules = grid()
        rows: list[dict[str, Any]] = []
        for (b1, b), schedule in schedules.items():
            noise = noise_multiplier(schedule)
            variances = {
                "first": update_variance(schedule, b1, noise, **self.setting),
                "later": update_variance(schedule, b, noise, **self.setting),
            }
            rows.append(
                {"b1": b1, "b_later": b, "z_rdp": noise, "var_first": variances["first"], "var_later": variances["later"]}
            )
        context.say(f"{len(rows)} noise multipliers solved")
        figures = [
            _by_series(rows, "b1", "b_later", "var_first", "variance of a first update", "left"),
            _by_series(rows, "b_later", "b1", "var_later", "variance of a later update", "right"),
        ]
        return ReproductionResult(rows, self.claims(rows), figures)

    def claims(self, rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
        """Check the claims; the number of steps is an integer."""
        schedule = TrainingSchedule(6600, 6600, 32, 200, 5)
        fixed = slope([(b, update_variance(schedule, b, 1.0, **self.setting)) for b in LATER])
        first = _slopes(rows, "b1", "b_later", "var_first")
        later = _slopes(rows, "b_later", "b1", "var_later")
        full = {row["b_later"]: row["var_first"] for row in rows if row["b1"] == FIRST[-1]}
        return [
            Claim("at a fixed noise multiplier the variance of an update falls as b^-3", f"slope {fixed:.3f}", Exact(abs(fixed + 3) < 0.1)),
            Claim(
                "the variance of the first update falls steeply with b1 at every b>1",
                f"falls at every step: {_word(_monotone(rows, 'b1', 'b_later', 'var_first', -1))}; "
                f"slopes {min(first):.2f} to {max(first):.2f}, the rise of z included",
                Exact(_monotone(rows, "b1", "b_later", "var_first", -1) and max(first) < -1),
            ),
            Claim(
                "the variance of later updates falls steeply with b>1 at every b1",
                f"falls at every step: {_word(_monotone(rows, 'b_later', 'b1', 'var_later', -1))}; "
                f"slopes {min(later):.2f} to {max(later):.2f}",
                Exact(_monotone(rows, "b_later", "b1", "var_later", -1) and max(later) < -1),
            ),
            Claim(
                "the effect of b>1 on the variance of the first update is considerable",
                f"at full batch {full[LATER[-1]] / full[32]:.1f} times as large at b>1 = {LATER[-1]} as at 32",
                Exact(full[LATER[-1]] > 2 * full[32]),
            ),
        ]  # fmt: skip


class NoiseMultiplier(Reproduction):
    """Figure 4: z against both batch sizes by the paper's Renyi accountant; at full batch also by PLD."""

    name = "r-dpcfl/fig4"
    paper = PAPER + ", Figure 4"
    title = "Noise multiplier against both batch sizes"
    any_scale = True

    def compute(self, context: Context) -> ReproductionResult:
        rows: list[dict[str, Any]] = []
        for (b1, b), schedule in grid().items():
            tight = noise_multiplier(schedule, "pld") if b1 == FIRST[-1] else None
            rows.append({"b1": b1, "b_later": b, "z_rdp": noise_multiplier(schedule), "z_pld": tight})
        context.say(f"{len(rows)} noise multipliers solved")
        figures = [
            _by_series(rows, "b1", "b_later", "z_rdp", "noise multiplier", "first"),
            _by_series(rows, "b_later", "b1", "z_rdp", "noise multiplier", "later"),
        ]
        less = [1 - row["z_pld"] / row["z_rdp"] for row in rows if row["z_pld"]]
        note = f"At full batch the PLD accountant meets the same target with {min(less):.1%} to {max(less):.1%} less noise."
        return ReproductionResult(rows, self.claims(rows), figures, notes=[note])

    def claims(self, rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
        """Check that z grows, that it grows sublinearly, and that b>1 has the larger effect."""
        first = _steps(rows, "b1", "b_later", "z_rdp")
        later = _steps(rows, "b_later", "b1", "z_rdp")
        fall, where = max(_falls(rows, "b1", "b_later", "z_rdp") + _falls(rows, "b_later", "b1", "z_rdp"))
        return [
            Claim(
                "z grows with b1 and with b>1",
                f"its largest fall from one point of the grid to the next is {max(fall, 0):.2%} (solved to {SOLVED:.2%}), {where}",
                Exact(fall <= SOLVED),
                _rounding(where),
            ),
            Claim(
                "z grows sublinearly in both",
                f"steepest slope between neighbours on log-log: b1 {max(first):.2f}, b>1 {max(later):.2f}",
                Exact(max(first) < 1 and max(later) < 1),
            ),
            Claim(
                "the effect of b>1 is much larger than that of b1",
                f"16 to 512: z grows {_growth(rows, 'b_later', 'b1', 'z_rdp')} by b>1; "
                f"32 to 6600: {_growth(rows, 'b1', 'b_later', 'z_rdp')} by b1",
                Exact(min(_slopes(rows, "b_later", "b1", "z_rdp")) > max(_slopes(rows, "b1", "b_later", "z_rdp"))),
            ),
        ]


def _rounding(where: str) -> Cause:
    """Isolate the effect of rounding to whole steps: the largest fall over batch sizes that divide N."""
    rows = [{"b1": b1, "b_later": b, "z": noise_multiplier(plan)} for (b1, b), plan in grid(WHOLE).items()]
    fall, place = max(_falls(rows, "b1", "b_later", "z"))
    return Cause(
        "a round has a whole number of steps, ceil(N/b1): one step fewer can outweigh the larger batch; this explains "
        "most of the fall, not all of it",
        f"over b1 that divide N the largest fall is {max(fall, 0):.2%} ({place}), instead of the one {where}",
    )


def _curves(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str) -> dict[int, list[tuple[float, float]]]:
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(row[by], []).append((row[x], row[y]))
    return found


def _slopes(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str) -> list[float]:
    return [slope(curve) for curve in _curves(rows, x, by, y).values()]


def _steps(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str) -> list[float]:
    return [slope(pair) for curve in _curves(rows, x, by, y).values() for pair in itertools.pairwise(curve)]


def _falls(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str) -> list[tuple[float, str]]:
    """Return the relative fall of y between neighbours, and its place."""
    return [
        (1 - two[1] / one[1], f"{LABEL[x]} from {one[0]} to {two[0]} at {LABEL[by]} = {value}")
        for value, curve in _curves(rows, x, by, y).items()
        for one, two in itertools.pairwise(curve)
    ]


def _monotone(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str, sign: int) -> bool:
    return all(sign * step > 0 for step in _steps(rows, x, by, y))


def _growth(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str) -> str:
    factors = [curve[-1][1] / curve[0][1] for curve in _curves(rows, x, by, y).values()]
    return f"{min(factors):.2f} to {max(factors):.2f} times"


def _word(held: bool) -> str:
    return "yes" if held else "no"


def _by_series(rows: Sequence[Mapping[str, Any]], x: str, by: str, y: str, words: str, key: str) -> Any:
    series = {f"{LABEL[by]} = {value}": curve for value, curve in _curves(rows, x, by, y).items()}
    return lines(key, f"{words.capitalize()} against {LABEL[x]}", series, LABEL[x], words, log_x=True, log_y=True)
