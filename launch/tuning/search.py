"""Searches: which combinations of a search space are tried, and in which order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.core.tuning import Search
from dpcfl_net.launch.sweep_axes import MOST_CELLS
from dpcfl_net.launch.tuning.space import Space

REPEATS = 100  # proposals of tried combinations in a row, after which one is drawn


class Searcher(Protocol):
    """Proposes the trials of one algorithm."""

    def ask(self) -> list[int]:
        """Return the combinations to try next; empty at the end."""

    def tell(self, index: int, score: float) -> None:
        """Take the score of a combination."""


class Listed(Searcher):
    """Tries combinations that are known from the start: those of a grid, or a random sample.

    Args:
        indices: The combinations.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._left = list(indices)

    def ask(self) -> list[int]:
        left, self._left = self._left, []
        return left

    def tell(self, index: int, score: float) -> None:
        """Scores have no effect."""


class Optuna(Searcher):
    """Tries the proposals of Optuna's TPE sampler; every trial is a new combination.

    Args:
        space: The search space.
        trials: Number of trials.
        seed: Seed of the sampler.

    Raises:
        ConfigError: If Optuna is not installed.
    """

    def __init__(self, space: Space, trials: int, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"--search optuna needs the extra `tune`: {advice('tune')} ({error})") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # a line per trial otherwise
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed % 2**32))
        self._rng = np.random.default_rng(seed)
        self._space, self._left = space, trials
        self._scores: dict[int, float] = {}
        self._asked: Any = None

    def ask(self) -> list[int]:
        if not self._left:
            return []
        self._left -= 1
        for _ in range(REPEATS):
            self._asked = self._study.ask()
            # The place of a value keeps the order of the values, which TPE uses.
            places = [self._asked.suggest_int(key, 0, len(values) - 1) for key, values in self._space.axes.items()]
            index = self._space.index(places)
            if index not in self._scores:
                return [index]
            self._study.tell(self._asked, self._scores[index])
        self._asked = None
        untried = [index for index in range(len(self._space)) if index not in self._scores]
        return [int(self._rng.choice(untried))]

    def tell(self, index: int, score: float) -> None:
        self._scores[index] = score
        if self._asked is not None:
            self._study.tell(self._asked, score)


def searcher(search: Search, space: Space, trials: int, seed: int) -> Searcher:
    """Build the search of one algorithm.

    Args:
        search: "grid", "random" or "optuna".
        space: The search space.
        trials: Number of trials, as `count_trials` returns it.
        seed: Seed of random and optuna.

    Raises:
        ConfigError: If Optuna is not installed.
    """
    if search == "grid":
        return Listed(range(len(space)))
    own = np.random.SeedSequence([seed, zlib.crc32(space.algorithm.encode())])
    if search == "random":
        return Listed(np.random.default_rng(own).choice(len(space), trials, replace=False).tolist())
    return Optuna(space, trials, int(own.generate_state(1)[0]))


def count_trials(search: Search, found: Sequence[Space], trials: int | None) -> int:
    """Return the number of trials of each algorithm.

    Args:
        search: "grid", "random" or "optuna".
        found: Search space of each algorithm.
        trials: Number that the user asked for; None: the whole grid.

    Raises:
        ConfigError: If the algorithms cannot have the same number of trials.
    """
    sizes = {space.algorithm: len(space) for space in found}
    listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    if trials is None and search != "grid":
        raise ConfigError(
            f"trials is missing: search {search} needs the number of trials of each algorithm: "
            "--trials N, or TuneOptions(trials=N) in Python"
        )
    if trials is not None and trials < 1:
        raise ConfigError(f"trials is {trials}: must be at least 1")
    if search == "grid" and (len(set(sizes.values())) > 1 or trials not in (None, *sizes.values())):
        asked = "" if trials is None else f"; trials is {trials}"
        raise ConfigError(
            f"search grid tries all combinations, and each algorithm must have the same number of trials; combinations: {listed}{asked}. "
            "Change the values of an algorithm with --grid algorithms.NAME.KEY=VALUE,VALUE, or in Python with "
            "grid={'algorithms.NAME.KEY': [VALUE, VALUE]}; or use --search random --trials N, or TuneOptions(search='random', trials=N) in Python"
        )
    wanted = trials or max(sizes.values())
    if few := [name for name, size in sizes.items() if size < wanted]:
        raise ConfigError(f"trials is {wanted}: more than the combinations of {', '.join(few)} (combinations: {listed})")
    most = max(sizes.values()) if search == "optuna" else wanted
    if most > MOST_CELLS:
        raise ConfigError(f"{most:,} combinations of an algorithm: must be at most {MOST_CELLS:,}")
    return wanted
