"""A tuning study: its plan, the configurations of its trials and final runs, and their outcomes."""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dpcfl_net.core import tuning
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import TuneFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_overrides import change
from dpcfl_net.experiment.config_schema import MOST_ROUNDS, Config
from dpcfl_net.launch.cells.outcome import CellOutcome
from dpcfl_net.launch.new_run import check_gpus
from dpcfl_net.launch.own_code import check_code
from dpcfl_net.launch.sweep_grid import Source, first_of, job_key
from dpcfl_net.launch.sweeps import STORE
from dpcfl_net.launch.tuning.search import count_trials, searcher
from dpcfl_net.launch.tuning.space import Space, idle_overrides, spaces

VALIDATION = 0.2  # fraction of the training records, where the configuration sets none


@dataclass(frozen=True)
class TuneOptions:
    """Options of `dpcfl tune`.

    Attributes:
        search: "grid": all combinations; "random": a seeded sample; "optuna": TPE sampler (extra `tune`).
        trials: Trials of each algorithm; None: the whole grid.
        search_seed: Seed of random and optuna.
        score: Figure of the last round on validation records: accuracy_mean, accuracy_worst or accuracy_minority.
        validation: Fraction of each client's training records for validation; None: that of the configuration, else 0.2.
        trial_seeds: Seeds with which each trial is run; its score is their mean. Empty: the configuration's seed.
        seeds: Seeds of the final runs. Empty: the configuration's seed.
    """

    search: tuning.Search = "grid"
    trials: int | None = None
    search_seed: int = 0
    score: tuning.Score = "accuracy_mean"
    validation: float | None = None
    trial_seeds: Sequence[int] = ()
    seeds: Sequence[int] = ()

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: With every problem.
        """
        problems = []
        for name, kind in (("search", tuning.Search), ("score", tuning.Score)):
            if getattr(self, name) not in (allowed := get_args(kind)):
                problems.append(f"{name} is {getattr(self, name)!r}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
        if self.validation is not None and not 0 < self.validation < 1:
            problems.append(f"validation is {self.validation}: must be above 0 and below 1")
        if self.search_seed < 0:
            problems.append(f"search_seed is {self.search_seed}: must be at least 0")
        if self.search == "grid" and self.search_seed:
            problems.append(
                f"search_seed is {self.search_seed}: only for search random and optuna, which draw; search is 'grid'"
            )
        for name in ("trial_seeds", "seeds"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                problems.append(f"{name} has a seed twice: {list(getattr(self, name))}")
        if problems:
            raise ConfigError(problems)


@dataclass
class Trial:
    """One combination of settings of an algorithm.

    Attributes:
        index: Its number in the search space.
        outcomes: Outcome for each seed of the trials; WAITING before its run has ended.
        scores: Score of each run; empty until all have finished.
    """

    index: int
    outcomes: list[CellOutcome]
    scores: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Mean score over the seeds."""
        return statistics.fmean(self.scores)


@dataclass
class Tuned:
    """An algorithm that is tuned.

    Attributes:
        space: Its search space.
        trials: Trials in the order in which the search proposed them.
        outcomes: Outcome of the final run of each seed; empty before the choice.
    """

    space: Space
    trials: list[Trial] = field(default_factory=list)
    outcomes: list[CellOutcome] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """The trial with the largest score, the first of equal ones."""
        return max(self.trials, key=lambda trial: trial.score)


@dataclass
class Study:
    """A tuning study of several algorithms on one configuration.

    Attributes:
        document: The configuration as a dictionary.
        options: Options, with all seeds and the fraction of validation records filled in.
        count: Trials of each algorithm.
        tuned: The algorithms.
        folder: Folder of tuning.json, trials.csv and the pages.
        store: Folder of the runs, shared with sweeps.
    """

    document: dict[str, Any]
    options: TuneOptions
    count: int
    tuned: list[Tuned]
    folder: TuneFolder
    store: Path

    @classmethod
    def of(
        cls,
        source: Source,
        overrides: Iterable[str] | Mapping[str, Any],
        algorithms: Sequence[str],
        grid: Mapping[str, Sequence[str]],
        options: TuneOptions,
        out: Path,
    ) -> Study:
        """Plan a study and check the configuration of every trial that is known.

        Args:
            source: Configuration, as `configuration.load` accepts it.
            overrides: Changes to it.
            algorithms: Algorithms to tune.
            grid: Values as YAML text, by dotted key, as `spaces` takes them.
            options: Options.
            out: Parent of the study's folder and of the run store.

        Raises:
            ConfigError: With every problem.
        """
        options.check()
        given = overrides if isinstance(overrides, Mapping) else list(overrides)
        document = change(configuration.source_document(source), given)
        document.pop("tuning", None)
        found = spaces(algorithms, grid)
        idle = idle_overrides(found, change({}, given))
        of_each = [configuration.without_effect(source, change(change({}, given), space.changes(0))) for space in found]
        if problems := list(dict.fromkeys(itertools.chain(idle, *of_each))):
            raise ConfigError(problems)
        count = count_trials(options.search, found, options.trials)
        options = _filled(options, configuration.load(document, {"algorithm.name": algorithms[0]}))
        identity = json.dumps(
            [document, [[s.algorithm, s.axes] for s in found], repr(options), count], sort_keys=True, default=str
        )
        name = f"{document.get('name')}-tune-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        study = cls(document, options, count, [Tuned(space) for space in found], TuneFolder(out / name), out / STORE)
        study._check()
        return study

    @property
    def trial_runs(self) -> int:
        """Number of runs of all trials."""
        return len(self.tuned) * self.count * len(self.options.trial_seeds)

    @property
    def final_runs(self) -> int:
        """Number of final runs."""
        return len(self.tuned) * len(self.options.seeds)

    def candidates(self, space: Space) -> list[int]:
        """Return the combinations of an algorithm that the search may try."""
        if self.options.search == "random":
            return searcher("random", space, self.count, self.options.search_seed).ask()
        return list(range(len(space)))

    def trial_config(self, space: Space, index: int, seed: int) -> Config:
        """Build the configuration of a trial, which is evaluated on validation records, after the last round only.

        Args:
            space: Search space of the algorithm.
            index: Combination.
            seed: Seed.
        """
        aside = {"data.validation": self.options.validation, "data.evaluate": "validation"}
        changes = {**space.changes(index), **aside, "seed": seed, "output.evaluate_every": MOST_ROUNDS}
        return configuration.load(self.document, changes)

    def final_config(self, space: Space, index: int, seed: int) -> Config:
        """Build the configuration of a final run: that of the user with the chosen settings, and a note on the search.

        Args:
            space: Search space of the algorithm.
            index: Combination.
            seed: Seed.
        """
        note = tuning.Tuning(
            search=self.options.search, trials=self.count, seeds=list(self.options.trial_seeds),
            algorithms=[one.space.algorithm for one in self.tuned], settings=space.axes, score=self.options.score,
            validation=self.options.validation or VALIDATION,
        )  # fmt: skip
        document = {**self.document, "tuning": note.model_dump(mode="json")}
        return configuration.load(document, {**space.changes(index), "seed": seed})

    def _check(self) -> None:
        """Check every trial that is known, and one final run of each algorithm."""
        problems: list[str] = []
        found: dict[str, list[str]] = {}
        finals: list[Config] = []
        for one in self.tuned:
            seen: dict[str, int] = {}
            for index in self.candidates(one.space):
                try:
                    key = job_key(self.trial_config(one.space, index, self.options.trial_seeds[0]))
                    finals.append(self.final_config(one.space, index, self.options.seeds[0]))
                except ConfigError as error:
                    for problem in error.problems:
                        found.setdefault(problem, []).append(one.space.label(index))
                    continue
                other = seen.setdefault(key, index)
                if other != index:
                    problems.append(
                        f"trials {one.space.label(other)!r} and {one.space.label(index)!r} are the same job: the setting in which "
                        "they differ has no effect"
                    )
        problems = [f"{problem} (trial {first_of(labels)})" for problem, labels in found.items()] + problems
        if problems:
            raise ConfigError(problems)
        check_code(finals)
        check_gpus(finals[0])  # all runs have the same runtime settings


def _filled(options: TuneOptions, config: Config) -> TuneOptions:
    """Fill in seeds and the fraction of validation records from the configuration."""
    if config.data.evaluate != "test":
        raise ConfigError("data.evaluate is 'validation': must be test; `dpcfl tune` sets it for its trials")
    own = config.data.validation
    if own and options.validation not in (None, own):
        raise ConfigError(
            f"validation is {options.validation}: data.validation of the configuration is {own}, give one of the two"
        )
    return TuneOptions(
        options.search, options.trials, options.search_seed, options.score, options.validation or own or VALIDATION,
        tuple(options.trial_seeds) or (config.seed,), tuple(options.seeds) or (config.seed,),
    )  # fmt: skip
