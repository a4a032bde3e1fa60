"""Runs of a tuning study in one queue: the trials, and after the choice the final runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.cells.local import LocalCells
from dpcfl_net.launch.cells.outcome import FAILED, FINISHED, INTERRUPTED, WAITING, CellOutcome
from dpcfl_net.launch.cells.queue import CellPlace, CellQueue, CellWatcher, InThisProcess
from dpcfl_net.launch.cells.run_cell import run_cell
from dpcfl_net.launch.sweep_grid import cell_folder
from dpcfl_net.launch.sweeps import failed_cells, stopped
from dpcfl_net.launch.tuning import output
from dpcfl_net.launch.tuning.search import Searcher, searcher
from dpcfl_net.launch.tuning.study import Study, Trial, Tuned
from dpcfl_net.results import summary

OnRun = Callable[[int, str, CellOutcome], None]  # number from 1, label and outcome of a run that ended


@dataclass
class Progress:
    """Progress of an algorithm's search.

    Attributes:
        searcher: Proposes trials.
        left: Runs of the proposed trials that have not ended.
        failed: True if one of them failed.
    """

    searcher: Searcher
    left: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Place:
    """Owner of a run's outcome: an algorithm's trial, or its final runs.

    Attributes:
        one: Its algorithm.
        trial: Its trial; None for a final run.
        seed: Position of its seed.
    """

    one: Tuned
    trial: Trial | None
    seed: int

    @property
    def outcomes(self) -> list[CellOutcome]:
        """Outcomes of the trial, or of the algorithm's final runs."""
        return self.one.outcomes if self.trial is None else self.trial.outcomes


class StudyRuns:
    """Runs the trials of a study, chooses, and runs the final configurations. Finished runs are not repeated.

    The files of the study are written after the trials of an algorithm, the choice and the final runs.

    What is tried and chosen does not depend on the number of runs at once: a search that proposes trials from earlier scores sees
    all scores of its algorithm before it proposes the next trial, so that only other algorithms and seeds run beside it.

    Args:
        study: The study.
        on_run: Called after each run.

    Attributes:
        labels: Label of each run that is known; the search and the choice add more.
        configs: Their configurations.
        folders: Their run folders.
    """

    def __init__(self, study: Study, on_run: OnRun = lambda number, label, outcome: None) -> None:
        options = study.options
        self._study, self._on_run = study, on_run
        self._searches = {
            one.space.algorithm: Progress(searcher(options.search, one.space, study.count, options.search_seed))
            for one in study.tuned
        }
        self.labels: list[str] = []
        self.configs: list[Config] = []
        self.folders: list[Path] = []
        self._places: list[Place] = []
        self._queue: CellQueue | None = None
        self._finals_left = 0
        for one in study.tuned:
            self._ask(one)

    def left(self) -> list[Config]:
        """Return the configurations of the known runs that have not finished."""
        states = [summary.read_document(folder).get("state") for folder in self.folders]
        return [config for config, state in zip(self.configs, states, strict=True) if state != FINISHED]

    def run(self, jobs: int = 1, watcher: CellWatcher | None = None) -> None:
        """Run all.

        Args:
            jobs: Runs at once; above 1 each in a process of `cells.process`.
            watcher: Shows runs that run at the same time.

        Raises:
            RunFailed: If runs failed; after a failed trial nothing is chosen. The same call tries them again.
            KeyboardInterrupt: After a signal; the same call resumes.
        """
        study = self._study
        place: CellPlace
        if jobs == 1:
            place = InThisProcess(lambda index: run_cell(self.configs[index], study.store))
        else:
            place = LocalCells(study.folder.path, self.configs, study.store, jobs)
        self._queue = CellQueue(self.folders, place, self._ended, watcher)
        outcomes = self._queue.run()
        if stopped(outcomes):
            raise KeyboardInterrupt("tuning stopped; the same command resumes it")
        failures = [
            (f"{label}: {end.error} (run folder {end.folder})", place.trial is None)
            for label, end, place in zip(self.labels, outcomes, self._places, strict=True)
            if end.state == FAILED
        ]
        if failures:  # either of trials or of final runs, since a failed trial leaves no choice
            _, finals = failures[0]
            raise failed_cells([text for text, _ in failures], sum((place.trial is None) == finals for place in self._places))

    def _ended(self, index: int, outcome: CellOutcome) -> None:
        place = self._places[index]
        place.outcomes[place.seed] = outcome
        self._on_run(index + 1, self.labels[index], outcome)
        if outcome.state == INTERRUPTED:
            return
        if place.trial is not None:
            self._trial_run_ended(place.one, place.trial, outcome)
        else:
            self._finals_left -= 1
            if not self._finals_left:
                output.write(self._study)

    def _trial_run_ended(self, one: Tuned, trial: Trial, outcome: CellOutcome) -> None:
        """Score the trial after its last run. After the last known trial ask for more, unless one failed."""
        progress = self._searches[one.space.algorithm]
        progress.left -= 1
        progress.failed |= outcome.state != FINISHED
        if all(end.state == FINISHED for end in trial.outcomes):
            trial.scores = [self._score(end.folder) for end in trial.outcomes]
            progress.searcher.tell(trial.index, trial.score)
        if progress.left or (not progress.failed and self._ask(one)):
            return
        output.write(self._study)
        if not any(other.left or other.failed for other in self._searches.values()):
            self._choose()

    def _choose(self) -> None:
        """Add the final runs of all algorithms."""
        for one in self._study.tuned:
            configs = [self._study.final_config(one.space, one.best.index, seed) for seed in self._study.options.seeds]
            one.outcomes = self._waiting(configs)
            label = f"final {one.space.label(one.best.index)}"
            self._add([Place(one, None, seed) for seed in range(len(configs))], label, configs)
            self._finals_left += len(configs)
        output.write(self._study)

    def _ask(self, one: Tuned) -> bool:
        """Add the next trials of an algorithm; False if there are none."""
        progress = self._searches[one.space.algorithm]
        asked = progress.searcher.ask()
        for index in asked:
            configs = [self._study.trial_config(one.space, index, seed) for seed in self._study.options.trial_seeds]
            trial = Trial(index, self._waiting(configs))
            one.trials.append(trial)
            self._add([Place(one, trial, seed) for seed in range(len(configs))], one.space.label(index), configs)
            progress.left += len(configs)
        return bool(asked)

    def _add(self, places: Sequence[Place], label: str, configs: Sequence[Config]) -> None:
        folders = [place.outcomes[place.seed].folder for place in places]
        self.labels.extend(f"{label} seed={config.seed}" for config in configs)
        self.configs.extend(configs)
        self.folders.extend(folders)
        self._places.extend(places)
        if self._queue is not None:
            self._queue.add(folders)

    def _waiting(self, configs: Sequence[Config]) -> list[CellOutcome]:
        return [CellOutcome(cell_folder(config, self._study.store), WAITING) for config in configs]

    def _score(self, folder: Path) -> float:
        name = self._study.options.score
        value = summary.read_document(folder)["final"].get(name)
        if value is None:
            why = "without a smallest true cluster use accuracy_mean" if name == "accuracy_minority" else "see its warnings"
            raise ConfigError(f"score is {name!r}: {folder} has none; {why}")
        return float(value)
