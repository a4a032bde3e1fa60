"""Search space of one algorithm: the settings that are tuned, and their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.algorithms.base import find
from dpcfl_net.core import yaml_file
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.config_overrides import key_parts, section

TUNED = "local.*, algorithm.*, algorithms.NAME.* or rounds"
SECTION, OWN = "algorithm.", "algorithms."


@dataclass(frozen=True)
class Space:
    """All combinations of an algorithm's tuned settings, numbered from 0, the last setting fastest.

    Attributes:
        algorithm: Name of the algorithm.
        axes: Values by dotted key: local.*, algorithm.* and rounds.
    """

    algorithm: str
    axes: dict[str, list[Any]]

    def __len__(self) -> int:
        return math.prod(map(len, self.axes.values()))

    def values(self, index: int) -> dict[str, Any]:
        """Return the values of a combination by dotted key.

        Args:
            index: Number of the combination.
        """
        found = {}
        for key, values in reversed(self.axes.items()):
            index, place = divmod(index, len(values))
            found[key] = values[place]
        return dict(reversed(found.items()))

    def index(self, places: Sequence[int]) -> int:
        """Return the number of the combination with the given place of each setting's value."""
        found = 0
        for place, values in zip(places, self.axes.values(), strict=True):
            found = found * len(values) + place
        return found

    def changes(self, index: int) -> dict[str, Any]:
        """Return the overrides of a combination; they win over the configuration's `algorithms` section."""
        return {"algorithm.name": self.algorithm, **{self._winning(key): value for key, value in self.values(index).items()}}

    def label(self, index: int) -> str:
        """Name a combination, as "r-dpcfl local.lr=0.1"."""
        return f"{self.algorithm} {self.settings(index)}"

    def settings(self, index: int) -> str:
        """Name the values of a combination, as "local.lr=0.1"."""
        return " ".join(f"{key}={yaml_file.dump(value, flow=True).strip()}" for key, value in self.values(index).items())

    def _winning(self, key: str) -> str:
        """`algorithms.NAME.local` overrides `local`."""
        return f"{OWN}{self.algorithm}.{key}" if key.startswith("local.") else key


def spaces(algorithms: Sequence[str], axes: Mapping[str, Sequence[str]]) -> list[Space]:
    """Build the search space of each algorithm.

    Args:
        algorithms: Names of the algorithms.
        axes: Values as YAML text, by dotted key. `algorithms.NAME.KEY` holds for one algorithm, and replaces the common values of
            `algorithm.KEY` (or of `local.X` for KEY `local.X`).

    Raises:
        ConfigError: With every name that is no algorithm; else with every key that cannot be tuned, and every algorithm without a setting.
    """
    _check_names(algorithms)
    problems = [f"algorithm {name!r} is given twice" for name in dict.fromkeys(algorithms) if algorithms.count(name) > 1]
    common: dict[str, list[Any]] = {}
    own: dict[str, dict[str, list[Any]]] = {name: {} for name in algorithms}
    for key, texts in axes.items():
        values = [yaml_file.parse(text, f"grid {key}") for text in texts]
        if key.startswith(OWN):
            owner = next((name for name in algorithms if key.startswith(f"{OWN}{name}.")), None)
            if owner is None:
                problems.append(f"grid {key!r} names none of the tuned algorithms: {', '.join(algorithms)}")
                continue
            rest = key.removeprefix(f"{OWN}{owner}.")
            own[owner][rest if rest.startswith("local.") else f"{SECTION}{rest}"] = values
        elif key == "rounds" or (key.startswith(("local.", SECTION)) and key != "algorithm.name"):
            common[key] = values
        else:
            problems.append(f"grid {key!r}: must be {TUNED}; all trials have the same data, model and privacy")
    found = [Space(name, {**common, **own[name]}) for name in algorithms]
    problems = problems or [
        f"algorithm {space.algorithm!r} has no setting to tune: give --grid KEY=VALUE,VALUE, or grid={{'KEY': [VALUE, VALUE]}} in Python"
        for space in found
        if not space.axes
    ]
    if not algorithms:
        problems.append("algorithms is []: must name at least one, for example ['r-dpcfl', 'local']")
    if problems:
        raise ConfigError(problems)
    return found


def idle_overrides(found: Sequence[Space], changed: Mapping[str, Any]) -> list[str]:
    """Say which overrides have no effect: those of tuned settings, and those of algorithms that are not tuned.

    Args:
        found: Search spaces of all algorithms.
        changed: The overrides, as nested sections.
    """
    of_all = [key for key in found[0].axes if all(key in space.axes for space in found)]
    own = [f"{OWN}{space.algorithm}.{key.removeprefix(SECTION)}" for space in found for key in space.axes]
    names = [space.algorithm for space in found]
    return [
        f"override {key}: it has no effect, since --grid gives the values of {key}"
        for key in of_all + own
        if _has(changed, key)
    ] + [
        f"override {OWN}{name}: it has no effect, since the tuned algorithms are {', '.join(names)}"
        for name in section(changed, "algorithms")
        if name not in names
    ]


def _has(document: Any, key: str) -> bool:
    """True if a document of nested sections sets a dotted key."""
    for name in key_parts(key):
        if not isinstance(document, Mapping) or name not in document:
            return False
        document = document[name]
    return True


def _check_names(algorithms: Sequence[str]) -> None:
    problems = []
    for name in algorithms:
        try:
            if not name:
                raise ConfigError(
                    "an algorithm has an empty name: give --algorithms r-dpcfl,local, or algorithms=['r-dpcfl', 'local'] in Python"
                )
            find(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
