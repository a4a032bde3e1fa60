"""Privacy accounting: epsilon of a composition of events, and the noise multiplier that meets a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from dpcfl_net.core.types import ADJACENCIES, Adjacency
from dpcfl_net.privacy.accounting.event_counts import EventCounts, MergedEvents
from dpcfl_net.privacy.accounting.pld import COARSE, CURVE, FINE, Grid, pld_deltas, pld_epsilon
from dpcfl_net.privacy.accounting.rdp import QUICK, rdp_epsilon
from dpcfl_net.privacy.events.base import Event

Accountant = Literal["pld", "rdp"]
ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)

_MIN_NOISE, _MAX_NOISE = 1e-2, 1e6
_TOLERANCE = 1e-4
_DIGITS = Context(prec=7, rounding=ROUND_CEILING)


def epsilon(events: Iterable[Event], delta: float, adjacency: Adjacency = "zero-out", accountant: Accountant = "pld") -> float:
    """Compute epsilon of a composition of mechanisms.

    The result depends on the arguments only: not on the order or grouping of the mechanisms, on earlier calls, on the process or
    on the number of threads. It is rounded up to seven digits, so that the last
    bits in which processors and builds of numpy differ do not show, except where they straddle a step of these digits.

    Args:
        events: Mechanisms in any order, composed adaptively; equal ones are merged, full-batch Gaussians into one.
        delta: Target delta, in (0, 1).
        adjacency: "zero-out", a record replaced by nothing (add/remove numbers), or "replace-one", by another record. Under
            "replace-one" a BoundedRangeSelection must come with the range that it has there.
        accountant: "pld" composes privacy loss distributions, rounded pessimistically; "rdp" gives the numbers of the Renyi
            accountants of the literature.

    Returns:
        Epsilon; inf if an event is Unprotected or has next to no noise; 0 for no events.

    Raises:
        ValueError: If delta, adjacency, accountant or an event is out of range (it names the argument); if the accountant has
            no bound for a mechanism under this adjacency (FixedSizeGaussian without "replace-one"; "rdp" with "replace-one" and
            a SampledGaussian); or if delta is too small for the PLD accountant to resolve.
    """
    check_question(delta, adjacency, accountant)
    merged = EventCounts().add(events).checked(adjacency, accountant)
    return _spent(merged, delta, adjacency, accountant, FINE)


def deltas(events: Iterable[Event], epsilons: Sequence[float], adjacency: Adjacency = "zero-out") -> np.ndarray:
    """Compute the privacy curve delta(epsilon) of a composition of mechanisms, by privacy loss distributions.

    Args:
        events: Mechanisms in any order.
        epsilons: Values of epsilon >= 0, n of them.
        adjacency: "zero-out" or "replace-one".

    Returns:
        Delta at each epsilon, (n,) float64; 1 where an event is Unprotected or has next to no noise.

    Raises:
        ValueError: As in `epsilon`.
    """
    check_question(0.5, adjacency, "pld")
    merged = EventCounts().add(events).checked(adjacency, "pld")
    if merged.unprotected:
        return np.ones(len(epsilons))
    return pld_deltas(merged, epsilons, adjacency, CURVE)


def calibrate(
    events_of: Callable[[float], Iterable[Event]],
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "zero-out",
    accountant: Accountant = "pld",
) -> float:
    """Find the noise multiplier z with epsilon(events_of(z)) <= `epsilon`.

    Args:
        events_of: Noise multiplier to events.
        epsilon: Target epsilon, positive and finite.
        delta: Target delta, in (0, 1).
        adjacency: "zero-out" or "replace-one".
        accountant: "pld" or "rdp".

    Returns:
        A noise multiplier at most 0.05 % above the smallest that meets the target.

    Raises:
        ValueError: If an argument is out of range (it names the argument); if no noise meets the target (the selections and labels alone
            exceed it, an event is Unprotected); or if the smallest allowed noise, 0.01, meets it.
    """
    check_question(delta, adjacency, accountant)
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}")
    first = EventCounts().add(events_of(1.0)).checked(adjacency, accountant)
    _check_reachable(first, epsilon, delta, adjacency, accountant)

    def bound(noise: float) -> float:
        events = (event.search_start() for event in events_of(noise))
        return rdp_epsilon(EventCounts().add(events).merged(), delta, QUICK)

    def spent(noise: float, grid: Grid) -> float:
        return _spent(EventCounts().add(events_of(noise)).merged(), delta, adjacency, accountant, grid)

    # Each search starts where the cheaper one before it ended: a rough Renyi bound, a coarse grid, the grid that decides.
    # Noise takes the rough bound to its least value only, which may be above an epsilon that the accountant can meet.
    least = bound(_MAX_NOISE)
    found = _smallest(bound, epsilon if least < epsilon else 2 * least, 1.0, 2.0, 0.05)
    if accountant == "pld":
        found *= 2 if adjacency == "replace-one" and any(mechanism.doubles for mechanism in first.mechanisms) else 1
        found = _smallest(lambda z: spent(z, COARSE), epsilon, found, 1.1, 0.002)
    return _smallest(lambda z: spent(z, FINE), epsilon, found, 1.005, _TOLERANCE)


def epsilon_by_prefix(
    groups: Sequence[Sequence[Event]], delta: float, adjacency: Adjacency = "zero-out", accountant: Accountant = "pld"
) -> list[float]:
    """Compute epsilon spent by the end of each round.

    Args:
        groups: Events of each round.
        delta: Target delta, in (0, 1).
        adjacency: "zero-out" or "replace-one".
        accountant: "pld" or "rdp".

    Returns:
        Epsilon after groups[0], after groups[0] and groups[1], and so on. Each value is exactly that of `epsilon` for its
        groups, and does not depend on later ones.

    Raises:
        ValueError: As in `epsilon`.
    """
    check_question(delta, adjacency, accountant)
    counts, found = EventCounts(), []
    for group in groups:
        merged = counts.add(group).checked(adjacency, accountant)
        found.append(_spent(merged, delta, adjacency, accountant, FINE))
    return found


def check_question(delta: float, adjacency: str, accountant: str) -> None:
    """ValueError, naming the argument, if delta, adjacency or accountant is out of range."""
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}")
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {accountant!r}")


@lru_cache(maxsize=4096)  # A run in progress repeats the queries of its earlier rounds.
def _spent(events: MergedEvents, delta: float, adjacency: Adjacency, accountant: Accountant, grid: Grid) -> float:
    if events.unprotected:
        return math.inf
    found = rdp_epsilon(events, delta) if accountant == "rdp" else pld_epsilon(events, delta, adjacency, grid)
    return rounded_up(found)


def rounded_up(value: float) -> float:
    """Round up to seven digits, so that the last bits of a computation do not show."""
    return float(_DIGITS.create_decimal_from_float(value))


def _check_reachable(events: MergedEvents, target: float, delta: float, adjacency: Adjacency, accountant: Accountant) -> None:
    if events.unprotected:
        raise ValueError(f"epsilon {target!r} cannot be met: an event is Unprotected")
    floors = (mechanism.floor() for mechanism in events.mechanisms)
    fixed = tuple(floor for floor in floors if floor is not None)
    if fixed == events.mechanisms:
        raise ValueError("events_of has no event whose noise could be chosen")
    if fixed:
        floor = _spent(replace(events, mechanisms=fixed), delta, adjacency, accountant, FINE)
        if floor >= target:
            raise ValueError(
                f"epsilon {target!r} cannot be met at any noise: the selections and labels alone spend {floor:.6g}"
            )


def _smallest(spent: Callable[[float], float], target: float, guess: float, factor: float, tolerance: float) -> float:
    """The z with spent(z) <= target and spent(z / (1 + tolerance)) > target, for a decreasing function, searched from `guess`."""
    low, high = _bracket(spent, target, guess, factor)
    turn = 0
    while high[0] / low[0] > 1 + tolerance:
        turn += 1
        width = math.log(high[0] / low[0])
        share = 0.5
        if turn % 3:
            # Interpolate between the logarithms, then step a little past the root on the side whose end is farther off.
            values = [math.log(max(value, 1e-9) / target) for value in (low[1], high[1])]
            root = values[0] / (values[0] - values[1])
            nudge = 0.4 * tolerance / width
            share = min(max(root + (nudge if root < 0.5 else -nudge), 0.02), 0.98)
        z = rounded_up(low[0] * math.exp(share * width))
        value = spent(z)
        if value > target:
            low = (z, value)
        else:
            high = (z, value)
    return high[0]


def _bracket(
    spent: Callable[[float], float], target: float, guess: float, factor: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(z, spent(z)) above the target and (z, spent(z)) at or below it, stepping away from the guess by growing factors."""
    here = (guess, spent(guess))
    upward = here[1] > target
    while True:
        if here[0] >= _MAX_NOISE:
            raise ValueError(
                f"epsilon {target!r} is not met at the largest noise multiplier, {here[0]:.6g}: {here[1]:.6g} is spent there"
            )
        if here[0] <= _MIN_NOISE:
            raise ValueError(
                f"epsilon {target!r} is met by a noise multiplier of {here[0]:.6g}: too little noise for a meaningful guarantee"
            )
        z = rounded_up(here[0] * factor if upward else here[0] / factor)
        there = (z, spent(z))
        if (there[1] > target) != upward:
            return (here, there) if upward else (there, here)
        here, factor = there, factor**2
