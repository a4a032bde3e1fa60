"""Privacy accounting: epsilon of the joint composition of events, and the noise multiplier that meets a target epsilon."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.types import (
    ADJACENCIES,
    Adjacency,
    BoundedRangeSelection,
    Event,
    FixedSizeGaussian,
    SampledGaussian,
    Unprotected,
)
from dpcfl_net.privacy.accounting.event_counts import Charges, EventCounts
from dpcfl_net.privacy.accounting.pld import COARSE, CURVE, FINE, Grid, pld_deltas, pld_epsilon
from dpcfl_net.privacy.accounting.rdp import QUICK, rdp_epsilon

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "BoundedRangeSelection",
    "FixedSizeGaussian",
    "SampledGaussian",
    "Unprotected",
    "account",
    "calibrate",
    "deltas",
    "epsilon",
    "epsilon_by_prefix",
]

Accountant = Literal["pld", "rdp"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp")

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_TOLERANCE = 1e-4
_DIGITS = Context(prec=7, rounding=ROUND_CEILING)


def epsilon(events: Iterable[Event], delta: float, adjacency: Adjacency = "zero-out", accountant: Accountant = "pld") -> float:
    """Compute epsilon of a composition of mechanisms.

    The answer is a function of the question: equal for the same mechanisms in any order and grouping, whatever else was
    asked, in every process of a machine and with any number of threads. It is rounded up to seven digits, so that the last
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
        ValueError: If delta, adjacency, accountant or an event is out of range (it names the argument); for a
            FixedSizeGaussian without "replace-one", for "rdp" with "replace-one" and a SampledGaussian, and for a delta too
            small for the PLD accountant to resolve.
    """
    _check(delta, adjacency, accountant)
    return _spent(_charges(events, adjacency, accountant), delta, adjacency, accountant, FINE)


def deltas(events: Iterable[Event], epsilons: Sequence[float], adjacency: Adjacency = "zero-out") -> np.ndarray:
    """Delta at each epsilon (not negative), by privacy loss distributions: the trade-off curve of everything in `events` together.

    Delta is 1 where an event is Unprotected or has next to no noise. ValueError as in `epsilon`.
    """
    _check(0.5, adjacency, "pld")
    charges = _charges(events, adjacency, "pld")
    if charges.unprotected:
        return np.ones(len(epsilons))
    return pld_deltas(charges, epsilons, adjacency, CURVE)


def calibrate(
    events_of: Callable[[float], Iterable[Event]],
    epsilon: float,
    delta: float,
    adjacency: Adjacency = "zero-out",
    accountant: Accountant = "pld",
) -> float:
    """The noise multiplier z with epsilon(events_of(z)) <= `epsilon`, at most 0.05 % above the smallest such.

    ValueError, naming the argument: epsilon not positive and finite; delta outside (0, 1); a target that no noise meets
    (the selections alone exceed it, an event is Unprotected) or that the least noise allowed, 0.01, meets.
    """
    _check(delta, adjacency, accountant)
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}")
    first = _charges(events_of(1.0), adjacency, accountant)
    _check_reachable(first, epsilon, delta, adjacency, accountant)

    def bound(noise: float) -> float:
        return rdp_epsilon(EventCounts().add(map(_as_poisson, events_of(noise))).charges(), delta, QUICK)

    def spent(noise: float, grid: Grid) -> float:
        return _spent(EventCounts().add(events_of(noise)).charges(), delta, adjacency, accountant, grid)

    # Each search starts where the cheaper one before it ended: a rough Renyi bound, a coarse grid, what decides.
    found = _smallest(bound, epsilon, 1.0, 2.0, 0.05)
    if accountant == "pld":
        found *= 2 if adjacency == "replace-one" and first.gaussians else 1
        found = _smallest(lambda z: spent(z, COARSE), epsilon, found, 1.1, 0.002)
    return _smallest(lambda z: spent(z, FINE), epsilon, found, 1.005, _TOLERANCE)


def epsilon_by_prefix(
    groups: Sequence[Sequence[Event]], delta: float, adjacency: Adjacency = "zero-out", accountant: Accountant = "pld"
) -> list[float]:
    """Epsilon after groups[0], after groups[0] and groups[1], and so on: what is spent by the end of each round.

    Every value is exactly what `epsilon` says of its groups, so that it does not depend on what comes after. ValueError as
    there.
    """
    _check(delta, adjacency, accountant)
    tally, found = EventCounts(), []
    for group in groups:
        charges = _allowed(tally.add(group).charges(), adjacency, accountant)
        found.append(_spent(charges, delta, adjacency, accountant, FINE))
    return found


def _check(delta: float, adjacency: str, accountant: str) -> None:
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}")
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {accountant!r}")


def _charges(events: Iterable[Event], adjacency: Adjacency, accountant: str) -> Charges:
    return _allowed(EventCounts().add(events).charges(), adjacency, accountant)


def _allowed(charges: Charges, adjacency: Adjacency, accountant: str) -> Charges:
    """The charges, if their releases have a bound under this adjacency by this accountant."""
    if charges.fixed and adjacency != "replace-one":
        raise ValueError(
            f'FixedSizeGaussian holds for adjacency "replace-one" only, got {adjacency!r}: in a sample of fixed size whoever is '
            "left out makes room for somebody else"
        )
    if charges.gaussians and (adjacency, accountant) == ("replace-one", "rdp"):
        raise ValueError('accountant "rdp" has no bound for SampledGaussian under "replace-one": use accountant "pld"')
    return charges


def _as_poisson(event: Event) -> Event:
    """A sample of fixed size taken for a Poisson one of the same rate: near enough for a search to start from."""
    if isinstance(event, FixedSizeGaussian):
        return SampledGaussian(event.noise_multiplier, event.sampling_rate, event.steps)
    return event


@lru_cache(maxsize=4096)  # A run that is going asks for its earlier rounds again and again.
def _spent(charges: Charges, delta: float, adjacency: Adjacency, accountant: Accountant, grid: Grid) -> float:
    if charges.unprotected:
        return math.inf
    found = rdp_epsilon(charges, delta) if accountant == "rdp" else pld_epsilon(charges, delta, adjacency, grid)
    return _rounded_up(found)


def _rounded_up(value: float) -> float:
    """The next number of seven digits, so that the last bits of a computation do not show; never less."""
    return float(_DIGITS.create_decimal_from_float(value))


def _check_reachable(charges: Charges, target: float, delta: float, adjacency: Adjacency, accountant: Accountant) -> None:
    if charges.unprotected:
        raise ValueError(f"epsilon {target!r} cannot be met: an event is Unprotected")
    if not charges.gaussians and not charges.fixed:
        raise ValueError("events_of has no event whose noise could be chosen")
    if charges.selections:
        floor = _spent(replace(charges, precision=0.0, poisson=(), fixed=()), delta, adjacency, accountant, FINE)
        if floor >= target:
            raise ValueError(f"epsilon {target!r} cannot be met at any noise: the selections alone spend {floor:.6g}")


def _smallest(spent: Callable[[float], float], target: float, guess: float, factor: float, tolerance: float) -> float:
    """The z with spent(z) <= target and spent(z / (1 + tolerance)) > target, for a decreasing function, sought from `guess`."""
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
        z = _rounded_up(low[0] * math.exp(share * width))
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
        if here[0] >= _MOST_NOISE:
            raise ValueError(f"epsilon {target!r} cannot be met at any noise: {here[1]:.6g} is spent at {here[0]:.6g}")
        if here[0] <= _LEAST_NOISE:
            raise ValueError(f"epsilon {target!r} is met by a noise multiplier of {here[0]:.6g}: no guarantee worth the name")
        z = _rounded_up(here[0] * factor if upward else here[0] / factor)
        there = (z, spent(z))
        if (there[1] > target) != upward:
            return (here, there) if upward else (there, here)
        here, factor = there, factor**2


def account(document: dict[str, Any]) -> dict[str, Any]:
    """Epsilon of the events in a document, or the noise multiplier for them; what `dpcfl account` prints.

    document: "events", a list of {"type": "SampledGaussian", "noise_multiplier", "sampling_rate", "steps"},
    {"type": "FixedSizeGaussian", "noise_multiplier", "sample_size", "population", "steps"},
    {"type": "BoundedRangeSelection", "epsilon", "count"} or {"type": "Unprotected", "reason"}; "delta"; optionally
    "adjacency", "accountant", and "target_epsilon", for which every noise multiplier left out or null is found (one for all).
    Returns the settings with "epsilon" (None for infinity, then with a "reason") and, if sought, "noise_multiplier".
    ConfigError: every unknown key and bad value found, with what is allowed.
    """
    problems = _unknown("", document, ("events", "delta", "adjacency", "accountant", "target_epsilon"))
    entries = document.get("events")
    if not isinstance(entries, list):
        raise ConfigError([*problems, f"events: must be a list of events, got {entries!r}"])
    settings: dict[str, Any] = {"delta": document.get("delta"), "adjacency": "zero-out", "accountant": "pld"}
    settings |= {key: document[key] for key in ("adjacency", "accountant") if key in document}
    try:
        _check(**settings)
    except ValueError as error:
        problems.append(str(error))
    target = document.get("target_epsilon")
    sought = [i for i, entry in enumerate(entries) if _is_open(entry)]
    if target is None and sought:
        problems.append(f"events[{sought[0]}].noise_multiplier: needed, unless target_epsilon asks for it")
    elif target is not None and not sought:
        problems.append("target_epsilon: no Gaussian event leaves its noise_multiplier open (absent or null)")
    for i, entry in enumerate(entries):
        try:
            _event(entry, 1.0)
        except ConfigError as error:
            problems += [f"events[{i}]{problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    try:
        return _answer(entries, target, settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _answer(entries: list[dict[str, Any]], target: float | None, settings: dict[str, Any]) -> dict[str, Any]:
    answer = dict(settings)
    noise = 1.0
    if target is not None:
        noise = calibrate(lambda z: [_event(entry, z) for entry in entries], target, **settings)
        answer |= {"target_epsilon": target, "noise_multiplier": noise}
    events = [_event(entry, noise) for entry in entries]
    spent = epsilon(events, **settings)
    answer["epsilon"] = spent if spent < math.inf else None
    if answer["epsilon"] is None:
        reasons = [event.reason for event in events if isinstance(event, Unprotected)]
        answer["reason"] = "; ".join(reasons) or "a noise multiplier below 0.001 protects nothing"
    return answer


_KINDS: dict[str, tuple[Callable[..., Event], tuple[str, ...]]] = {
    "SampledGaussian": (SampledGaussian, ("noise_multiplier", "sampling_rate", "steps")),
    "FixedSizeGaussian": (FixedSizeGaussian, ("noise_multiplier", "sample_size", "population", "steps")),
    "BoundedRangeSelection": (BoundedRangeSelection, ("epsilon", "count")),
    "Unprotected": (Unprotected, ("reason",)),
}


# Beyond these, numbers overflow or an answer takes minutes.
_MOST = {
    "noise_multiplier": 1e15, "sampling_rate": 1, "steps": 1e9, "sample_size": 1e9, "population": 1e9,
    "epsilon": 1e6, "count": 1e9,
}  # fmt: skip


def _is_open(entry: Any) -> bool:
    noisy = isinstance(entry, dict) and entry.get("type") in ("SampledGaussian", "FixedSizeGaussian")
    return noisy and entry.get("noise_multiplier") is None


def _event(entry: Any, noise: float) -> Event:
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f": must be an object whose type is one of {', '.join(_KINDS)}, got {shown(entry)}")
    make, keys = _KINDS[kind]
    values = {key: value for key, value in entry.items() if key != "type"}
    if _is_open(entry):
        values["noise_multiplier"] = noise
    problems = _unknown(".", values, keys) + [f".{key}: missing" for key in keys if key not in values]
    problems += [
        f".{key} is {shown(values[key])}: must be at most {most:g}"
        for key, most in _MOST.items()
        if isinstance(values.get(key), (int, float)) and values[key] > most
    ]
    if problems:
        raise ConfigError(problems)
    if entry["type"] == "Unprotected" and not isinstance(entry["reason"], str):
        raise ConfigError(f".reason: must be text, got {entry['reason']!r}")
    try:
        return make(**values)
    except ValueError as error:
        raise ConfigError(f".{error}") from error


def _unknown(prefix: str, found: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    return [f"{prefix}{key}: unknown key, allowed are {', '.join(allowed)}" for key in found if key not in allowed]


def main() -> int:
    """Read such a document from standard input and print the answer: a process of its own, so that its memory is freed."""
    try:
        document = json.load(sys.stdin)
        if not isinstance(document, dict):
            raise ConfigError(f"the document must be a JSON object, got {type(document).__name__}")
        print(json.dumps(account(document), indent=2))
    except (ConfigError, json.JSONDecodeError) as error:
        print(error, file=sys.stderr)
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
