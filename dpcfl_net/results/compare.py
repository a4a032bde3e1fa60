"""Runs grouped over seeds, the settings that differ between them, and runs that are not comparable."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.results.number_format import number, plain
from dpcfl_net.results.privacy_statement import hides_participation, statement
from dpcfl_net.results.result import Result

# Settings that do not change the experiment; runs that differ only in the seed are repetitions.
ASIDE = ("seed", "name", "output.", "runtime.", "data.root", "ledger.root", "privacy.noise_seed", "tuning.")
# Settings of these sections that do: sweeps run each of their values, too (`launch.sweep_grid.job_key`).
NOT_ASIDE = ("runtime.quorum", "runtime.transport.")
SECRETS = ("privacy.noise_seed",)  # with the seed of the noise, the noise can be subtracted
HIDDEN = "secret, not shown here"
MOST_NAMED = 3  # runs in an alert
TERMS = ("delta", "unit", "adjacency", "trust", "insecure")
# Settings that must be equal, too: data, and those of the promise that the largest epsilon of a client does not show.
EQUAL = ("data.", "privacy.epsilon_by_client.", "privacy.secure_aggregation.colluders")


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed.

    Attributes:
        results: The runs.
        settings: Their settings by dotted key.
    """

    results: tuple[Result, ...]
    settings: dict[str, Any]

    @property
    def algorithm(self) -> str:
        return self.results[0].algorithm

    @property
    def epsilon(self) -> float:
        return max(result.epsilon for result in self.results)

    def values(self, key: str) -> list[float]:
        """Return a figure of `final` for each run that has it."""
        return [found for result in self.results if (found := number(result.final.get(key))) is not None]

    def costs(self, key: str) -> list[float]:
        """Return a figure of `cost` for each run that has it."""
        return [result.cost[key] for result in self.results if key in result.cost]

    def count(self, key: str) -> tuple[int, int]:
        """Count a Boolean of `final`: (runs where it is True, runs that have it)."""
        judged = [result.final[key] for result in self.results if isinstance(result.final.get(key), bool)]
        return sum(judged), len(judged)


def distinct(results: Iterable[Result]) -> list[Result]:
    """Drop duplicates of a run, such as one that two sweeps share, also under another path."""
    return list({result.folder.resolve(): result for result in results}.values())


def rows(results: Iterable[Result]) -> list[Row]:
    """Group runs that differ only in their seed, in order of first appearance; duplicates of a run are dropped."""
    found: dict[str, list[Result]] = {}
    for result in distinct(results):
        found.setdefault(repr(sorted(dotted(result.settings).items())), []).append(result)
    return [Row(tuple(group), dotted(group[0].settings)) for group in found.values()]


def differing(table: Sequence[Row]) -> list[str]:
    """Find the settings that differ between rows.

    Returns:
        Dotted keys; an option of an algorithm counts only if it differs between rows of that algorithm.
    """
    keys = dict.fromkeys(key for row in table for key in row.settings)
    return [key for key in keys if _differs(key, table)]


def telling(table: Sequence[Row]) -> list[str]:
    """Find the settings that differ between rows of the same algorithm, as dotted keys."""
    by_algorithm: dict[str, list[Row]] = {}
    for row in table:
        by_algorithm.setdefault(row.algorithm, []).append(row)
    return [key for key in differing(table) if any(_differs(key, own) for own in by_algorithm.values())]


def unequal(results: Sequence[Result], apart: Collection[str] = ()) -> dict[Path, str]:
    """Find runs whose privacy terms or data settings differ from those of most runs.

    Args:
        results: The runs.
        apart: Dotted keys; runs with different values of them are not compared with each other.

    Returns:
        What differs, by run folder.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        own = dotted(result.settings)
        groups.setdefault(json.dumps([own.get(key) for key in apart]), []).append(result)
    return {path: text for group in groups.values() for path, text in _unequal(group).items()}


def terms(result: Result) -> dict[str, str]:
    """Return the terms that must be equal for comparable runs: claimed privacy, and data."""
    privacy = {"epsilon": plain(result.epsilon, 6) if math.isfinite(result.epsilon) else "inf"}
    privacy |= {key: str(result.privacy.get(key, "not stated")) for key in TERMS}
    privacy |= {"participation": "protected" if hides_participation(result.privacy) else "public"}
    return privacy | {key: word(value) for key, value in dotted(result.settings).items() if key.startswith(EQUAL)}


def refusal(found: Mapping[Path, str]) -> ConfigError:
    """Build the error for runs that are not comparable, from the result of `unequal`."""
    return ConfigError(
        [f"{path.name}: {text}" for path, text in found.items()] + ["--force, or force=True in Python, shows them with a mark"]
    )


def statements(results: Iterable[Result]) -> tuple[list[str], list[str]]:
    """Collect the privacy statements of runs.

    Returns:
        Distinct headlines, distinct alerts; an alert of some of the runs names them.
    """
    said = [(result.folder.name, statement(result.privacy)) for result in results]
    alerts: dict[str, list[str]] = {}
    for name, one in said:
        for alert in one.alerts:
            alerts.setdefault(alert, []).append(name)
    return list(dict.fromkeys(one.headline for _, one in said)), [
        alert if len(names) == len(said) else f"{_named(names)}: {alert}" for alert, names in alerts.items()
    ]


def _named(runs: Sequence[str]) -> str:
    more = len(runs) - MOST_NAMED
    return ", ".join(runs[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def word(value: Any) -> str:
    """Format a setting; a dash if it is missing."""
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def short_key(key: str) -> str:
    """Return the last word of a dotted key, the one before a `name`; with the words before if one is the number of a client or group."""
    *_, group, before, last = ["", "", *key.removesuffix(".name").split(".")]
    if before.isdecimal():  # a field of one client
        return f"{group} {before} {last}"
    return f"{before} {last}" if last.isdecimal() else last


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with their dotted keys."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key, without those that do not change the experiment."""
    return {key: value for key, value in flat(settings) if key.startswith(NOT_ASIDE) or not key.startswith(ASIDE)}


def _differs(key: str, table: Sequence[Row]) -> bool:
    if key in ("algorithm.name", "privacy.epsilon"):  # these always have a column
        return False
    if key.startswith("algorithm."):
        by_algorithm: dict[str, set[str]] = {}
        for row in table:
            by_algorithm.setdefault(row.algorithm, set()).add(json.dumps(row.settings.get(key)))
        return any(len(values) > 1 for values in by_algorithm.values())
    return len({json.dumps(row.settings.get(key)) for row in table}) > 1


def _unequal(results: Sequence[Result]) -> dict[Path, str]:
    stated = [terms(result) for result in results]
    found: dict[Path, list[str]] = {}
    for key in dict.fromkeys(key for own in stated for key in own):
        usual, _ = Counter(own.get(key) for own in stated).most_common(1)[0]
        for result, own in zip(results, stated, strict=True):
            if own.get(key) != usual:
                found.setdefault(result.folder, []).append(f"{key} is {word(own.get(key))}, elsewhere {word(usual)}")
    return {path: "; ".join(texts) for path, texts in found.items()}
