"""Accountant queries as JSON: epsilon of listed events, or the noise for a target; `python -m` reads one from standard input."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.privacy.accounting.accountant import calibrate, check_question, epsilon, rounded_up
from dpcfl_net.privacy.accounting.adaptive import filtered_epsilon
from dpcfl_net.privacy.accounting.tuned import ASSUMES, Trials, tuned_epsilon
from dpcfl_net.privacy.events.base import Event, event_types
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection

NOISE = "noise_multiplier"
RANGES = (
    "the range of each BoundedRangeSelection is that under replace-one: for a choice by counts of records it is twice its range under "
    "zero-out, and the accountant doubles sensitivities of Gaussians only"
)


def account(document: dict[str, Any]) -> dict[str, Any]:
    """Compute epsilon of the events in a document, or the noise multiplier for them; the output of `dpcfl account`.

    Args:
        document: "events", a list of objects with "type", the name of an event type, and its fields: {"type":
            "SampledGaussian", "noise_multiplier", "sampling_rate", "steps"}, {"type": "FixedSizeGaussian", "noise_multiplier",
            "sample_size", "population", "steps"}, {"type": "AllocatedGaussian", "noise_multiplier", "batches", "epochs"},
            {"type": "BoundedRangeSelection", "epsilon", "count"}, {"type": "RandomisedResponse", "epsilon", "categories", "count"},
            {"type": "LabelledFixedSizeGaussian", "noise_multiplier", "label_epsilon", "categories", "sample_size", "population", "steps"},
            {"type": "Unprotected", "reason"}, {"type": "DataFree"}; "delta"; optionally "adjacency", "accountant", and "target_epsilon", for which every noise
            multiplier that is absent or null is found (one for all); or "tuned" ({"law", "mean"} of `tuned.Trials`, with accountant
            rdp) for the best of a random number of trials with these events; or "order" (with accountant rdp) for events whose
            choice may depend on earlier releases: a Renyi order that was fixed before them (`adaptive.filtered_epsilon`).

    Returns:
        The settings with "epsilon" (None for infinity, then with a "reason") and, if sought, "noise_multiplier"; with "tuned" also
        "epsilon_of_one_trial", "gamma" of the law, and "assumes"; "assumes" also with selections under "replace-one".

    Raises:
        ConfigError: Lists every unknown key and bad value, and the allowed ones.
    """
    problems = _unknown("", document, ("events", "delta", "adjacency", "accountant", "target_epsilon", "tuned", "order"))
    entries = document.get("events")
    if not isinstance(entries, list):
        raise ConfigError([*problems, f"events: must be a list of events, got {entries!r}"])
    settings: dict[str, Any] = {"delta": document.get("delta"), "adjacency": "zero-out", "accountant": "pld"}
    settings |= {key: document[key] for key in ("adjacency", "accountant") if key in document}
    try:
        check_question(**settings)
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
    trials = _trials(document, settings["accountant"], problems)
    order = document.get("order")
    if order is not None and (settings["accountant"] != "rdp" or target is not None or trials is not None):
        problems.append(f"order: needs accountant rdp, got {shown(settings['accountant'])}, no target_epsilon and no tuned")
    if problems:
        raise ConfigError(problems)
    try:
        if order is not None:
            answer = _filtered(entries, order, settings)
        else:
            answer = _answer(entries, target, settings) if trials is None else _tuned(entries, trials, settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    selects = any(entry["type"] == BoundedRangeSelection.__name__ for entry in entries)
    if selects and settings["adjacency"] == "replace-one":
        answer["assumes"] = "; ".join(filter(None, [answer.get("assumes"), RANGES]))
    return answer


def _answer(entries: list[dict[str, Any]], target: float | None, settings: dict[str, Any]) -> dict[str, Any]:
    answer = dict(settings)
    noise = 1.0
    if target is not None:
        noise = calibrate(lambda z: [_event(entry, z) for entry in entries], target, **settings)
        answer |= {"target_epsilon": target, NOISE: noise}
    events = [_event(entry, noise) for entry in entries]
    spent = epsilon(events, **settings)
    answer["epsilon"] = spent if spent < math.inf else None
    if answer["epsilon"] is None:
        answer["reason"] = "; ".join(dict.fromkeys(event.unprotected for event in events if event.unprotected))
    return answer


def _trials(document: dict[str, Any], accountant: Any, problems: list[str]) -> Trials | None:
    """Read the number of trials; None if the question is about one run."""
    given = document.get("tuned")
    if given is None:
        return None
    if accountant != "rdp" or document.get("target_epsilon") is not None:
        problems.append(f"tuned: needs accountant rdp, got {shown(accountant)}, and no target_epsilon")
    if not isinstance(given, dict) or set(given) != {"law", "mean"}:
        problems.append(f'tuned: must be an object such as {{"law": "geometric", "mean": 10}}, got {shown(given)}')
        return None
    try:
        return Trials(given["law"], given["mean"])
    except ValueError as error:
        problems.append(f"tuned.{error}")
        return None


def _tuned(entries: list[dict[str, Any]], trials: Trials, settings: dict[str, Any]) -> dict[str, Any]:
    answer = _answer(entries, None, settings)
    found = tuned_epsilon([_event(entry, 1.0) for entry in entries], settings["delta"], trials, settings["adjacency"])
    terms = {"tuned": {"law": trials.law, "mean": trials.mean}, "gamma": trials.gamma, "assumes": ASSUMES}
    return {**answer, **terms, "epsilon_of_one_trial": answer["epsilon"], "epsilon": found if found < math.inf else None}


def _filtered(entries: list[dict[str, Any]], order: float, settings: dict[str, Any]) -> dict[str, Any]:
    found = filtered_epsilon([_event(entry, 1.0) for entry in entries], settings["delta"], order, settings["adjacency"])
    return {**settings, "order": order, "epsilon": rounded_up(found) if found < math.inf else None}


def _keys(kind: type[Event]) -> list[str]:
    return [field.name for field in fields(kind)]  # type: ignore[arg-type]


def _is_open(entry: Any) -> bool:
    kind = event_types().get(str(entry.get("type"))) if isinstance(entry, dict) else None
    return kind is not None and NOISE in _keys(kind) and entry.get(NOISE) is None


def _event(entry: Any, noise: float) -> Event:
    name = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(name, str) or name not in event_types():
        raise ConfigError(f": must be an object whose type is one of {', '.join(event_types())}, got {shown(entry)}")
    kind = event_types()[name]
    keys = _keys(kind)
    values = {key: value for key, value in entry.items() if key != "type"}
    if _is_open(entry):
        values[NOISE] = noise
    problems = _unknown(".", values, keys) + [f".{key}: missing" for key in keys if key not in values]
    problems += [
        f".{key} is {shown(values[key])}: must be at most {most:g}"
        for key, most in kind.maxima.items()
        if isinstance(values.get(key), (int, float)) and values[key] > most
    ]
    if problems:
        raise ConfigError(problems)
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f".{error}") from error


def _unknown(prefix: str, found: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    return [f"{prefix}{key}: unknown key, allowed are {', '.join(allowed)}" for key in found if key not in allowed]


def main() -> int:
    """Read a document from standard input and print the result. A separate process frees the accountant's memory.

    Returns:
        The exit code.
    """
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
