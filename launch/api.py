"""The public Python functions: load, run, resume, open_run, sweep, tune, compare, account."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.files import given_path, reason, shown
from dpcfl_net.core.types import Adjacency
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.packaged import replacement_note
from dpcfl_net.launch import caller, new_run, running, saved_run, sweep_axes, sweeps
from dpcfl_net.launch.api_results import SweepResult, TuneResult
from dpcfl_net.launch.calling_process import IN_PROCESS
from dpcfl_net.launch.cells.local import LocalCells
from dpcfl_net.launch.feed import Callback
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.own_code import check_code
from dpcfl_net.launch.progress_bar import open_bar
from dpcfl_net.launch.sweep_grid import Cell, Source, cell_folder
from dpcfl_net.launch.tuning import output as tuning_output
from dpcfl_net.launch.tuning.runs import StudyRuns
from dpcfl_net.launch.tuning.study import Study, TuneOptions
from dpcfl_net.launch.watcher import CellsBar, Watcher
from dpcfl_net.privacy.accounting.accountant import Accountant
from dpcfl_net.privacy.accounting.document import account as account_document
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.report.run import Run
from dpcfl_net.report.trackers.base import Tracker
from dpcfl_net.results.comparison import Comparison

__all__ = [
    "FEDERATIONS", "SweepResult", "TuneOptions", "TuneResult", "account", "compare", "load", "open_run", "resume", "run", "sweep", "tune",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
FEDERATIONS = ("network", "in-process")
FederationName = Literal["network", "in-process"]


def load(config: Source, overrides: Mapping[str, Any] | None = None, /, **more: Any) -> Config:
    """Load and check a configuration.

    Args:
        config: Path of a YAML file, name of a packaged configuration ("quickstart", "r_dpcfl/fmnist_rotation"), dictionary, or
            configuration to change. A warning says if a packaged configuration stands in for a file that is not there.
        overrides: Values by dotted key, as {"privacy.epsilon": 2}. Nested dictionaries are merged into their sections.
        **more: Overrides as keyword arguments, with a double underscore for a dot: `rounds=3`, `privacy__epsilon=2`,
            `privacy={"epsilon": 2}`. They are applied after `overrides`.

    Returns:
        The checked, immutable configuration.

    Raises:
        ConfigError: With the field, the value and the allowed values of every problem.
    """
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(f"overrides is {shown(overrides)}: must be a dictionary, for example {{'rounds': 3}}")
    loaded = {**(overrides or {}), **{key.replace("__", "."): value for key, value in more.items()}}
    _warn_if_replaced(config)
    return config if isinstance(config, Config) and not loaded else configuration.load(config, loaded)


def _without_settings(function: Callable[P, T]) -> Callable[P, T]:
    """Name `load` in the error of a call that has settings of the configuration as arguments."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if unknown := [name for name in kwargs if name not in known]:
            name, call = unknown[0], f"dpcfl.{function.__name__}"
            raise TypeError(
                f"{call} has no argument {name!r}; change settings by dpcfl.load: {call}(dpcfl.load(config, {name}=...))"
            )
        return function(*args, **kwargs)

    return checked


@_without_settings
def run(
    config: Source,
    out: Path | str = "runs",
    federation: FederationName | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    progress: bool = True,
) -> Run:
    """Run an experiment and wait until it ends.

    Args:
        config: A configuration, as `load` accepts it. Change its settings by `load`: `run(load("quickstart", rounds=3))`.
        out: Parent of the new run folder.
        federation: "network": a coordinator, an observer and one worker process per client, as in `dpcfl run`.
            "in-process": all clients one after another in the calling process, where breakpoints work; no transcript. With one
            `privacy.noise_seed` both give the same bits on the CPU. None: the configuration's setting.
        callbacks: Called with the `RoundMetrics` of each round. If a callback returns False or raises `StopRun`, the run
            stops early. If it raises another exception, the run stops and the exception is raised again. Trackers
            (`TensorBoard`, `MLflow`, `WandB`) also get configuration, privacy statement and result.
        progress: Show a progress bar in a terminal (stderr) or notebook.

    Returns:
        The run. Its state is `interrupted` if a callback stopped it.

    Raises:
        ConfigError: If the configuration is invalid or asks for a GPU that this machine lacks, `out` cannot be written, or the file of an
            algorithm or model of your own has changed since this process imported it.
        Refused: If a worker's gate or the launcher refuses the job.
        RunFailed: If the run cannot continue; a note names the run folder.
        KeyboardInterrupt: After Ctrl-C, SIGTERM or SIGHUP, once every process has ended. The run can be resumed.
        Exception: What a callback raises, or code of your own in a run in one process.
    """
    watching, parent = _callbacks(callbacks), _absolute("out", out)
    with caller.restored(), Interrupts() as interrupts:
        with interrupts.raising():
            _warn_if_replaced(config, stacklevel=4)  # `_without_settings` is between
            settings = _with_federation(config, federation)
            check_code([settings])
            new_run.check_gpus(settings)
        try:
            folder = new_run.new_folder(settings, parent)
        except OSError as error:
            raise ConfigError(f"{error.filename or out}: {reason(error)}") from None
        return _watched(folder, settings, 0.0, interrupts, watching, progress)


def resume(path: Path | str, *, callbacks: Iterable[Callback] = (), progress: bool = True) -> Run:
    """Resume a run that stopped, crashed or failed, with its signed job, ledgers and checkpoints.

    Args:
        path: The run folder. A finished run is returned unchanged.
        callbacks: As in `run`, for the remaining rounds.
        progress: As in `run`.

    Returns:
        The run.

    Raises:
        ConfigError: If the folder holds no run, one with workers on other hosts, or an unfinished one that an earlier version started or
            whose config.yaml differs from its signed job; for a run in one process also as in `run` if code has changed.
        Refused: As in `run`.
        RunFailed: As in `run`.
        KeyboardInterrupt: As in `run`.
    """
    watching, folder = _callbacks(callbacks), _absolute("path", path)
    with caller.restored(), Interrupts() as interrupts:
        with interrupts.raising():
            saved = saved_run.read_saved_run(folder)
        if saved.finished:
            return Run(folder)
        if saved.config.runtime.federation == "in-process":  # other runs read the code again, in new processes
            check_code([saved.config])
        return _watched(folder, saved.config, saved.seconds, interrupts, watching, progress)


def open_run(path: Path | str) -> Run:
    """Open a run folder for reading: finished, interrupted or still running.

    Args:
        path: The run folder.

    Returns:
        The run.

    Raises:
        ConfigError: If the folder holds no run.
    """
    return Run(_absolute("path", path))


def sweep(
    config: Source, axes: Mapping[str, Sequence[Any]], out: Path | str = "runs", *, progress: bool = True, jobs: int = 1
) -> SweepResult:
    """Run every combination of settings. Finished runs in `out` are not repeated, stopped ones are resumed.

    Args:
        config: A configuration, as `load` accepts it. Prefer a name or a path if `algorithm.name` is an axis.
        axes: Values by dotted key: {"privacy.epsilon": [2, 5], "seed": range(3)}.
        out: Parent of the sweep's folder and of the run store shared by all sweeps.
        progress: Show a progress bar.
        jobs: Combinations that run at once; they share the cores of this machine equally.

    Returns:
        The runs.

    Raises:
        ConfigError: With every problem of every combination, before the first run.
        RunFailed: After the last combination, if some failed; the same call runs them again.
        KeyboardInterrupt: After Ctrl-C; the same call resumes the sweep.
    """
    _check_jobs(jobs)
    parent = _absolute("out", out)
    _warn_if_replaced(config)
    with caller.restored():
        grid = sweeps.Sweep.of(config, axes, parent)
        total = len(grid.cells)

        def display(number: int, cell: Cell) -> Watcher:
            bar = open_bar(progress)
            return Watcher(cell_folder(cell.config, grid.store), cell.config, (), bar, f"{number}/{total} {cell.label}")

        if jobs == 1:
            outcomes = grid.run(display=display)
        else:
            watcher = CellsBar(open_bar(progress), grid.folder.name, total)
            place = LocalCells(grid.folder, [cell.config for cell in grid.cells], grid.store, jobs)
            outcomes = grid.run(watcher.ended, place=place, watcher=watcher)
    if sweeps.stopped(outcomes):
        raise KeyboardInterrupt("sweep stopped; the same call resumes it")
    if failures := grid.failures(outcomes):
        raise sweeps.failed_cells(failures, total)
    return SweepResult(grid.folder, [Run(outcome.folder) for outcome in outcomes], [cell.values for cell in grid.cells])


def tune(
    config: Source,
    algorithms: Sequence[str],
    grid: Mapping[str, Sequence[Any]],
    options: TuneOptions | None = None,
    out: Path | str = "runs",
    *,
    jobs: int = 1,
) -> TuneResult:
    """Tune algorithms with the same number of trials each, scored on validation records; then test the best settings once.

    Finished runs in `out` are not repeated, stopped ones are resumed.

    Args:
        config: A configuration, as `load` accepts it. Prefer a name or a path for several algorithms.
        algorithms: Names of the algorithms.
        grid: Values by dotted key: {"local.lr": [0.1, 0.3], "algorithms.mr-mtl.lam": [0, 0.01]}.
        options: Search, number of trials, seeds, score; None: the defaults.
        out: Parent of the tuning's folder and of the run store shared with sweeps.
        jobs: Runs at once; they share the cores of this machine equally. The trials and the choice do not depend on it.

    Returns:
        The chosen settings and the final runs.

    Raises:
        ConfigError: With every problem, before the first run.
        RunFailed: If runs failed; the same call runs them again.
        KeyboardInterrupt: After Ctrl-C; the same call resumes.
    """
    _check_jobs(jobs)
    names = _listed("algorithms", algorithms, "['r-dpcfl', 'local']")
    given = TuneOptions() if options is None else options
    if not isinstance(given, TuneOptions):
        raise ConfigError(f"options is of type {type(given).__name__}: must be TuneOptions, for example TuneOptions(trials=8)")
    parent = _absolute("out", out)
    _warn_if_replaced(config)
    with caller.restored():
        study = Study.of(config, {}, names, sweep_axes.axes_of(grid), given, parent)
        bar = CellsBar(open_bar(jobs > 1), study.folder.path.name, study.trial_runs + study.final_runs)
        StudyRuns(study, bar.ended).run(jobs, bar if jobs > 1 else None)
        tuning_output.write_pages(study)
    document = tuning_output.document(study)
    chosen = {name: one["chosen"]["values"] for name, one in document["algorithms"].items()}
    outcomes = [(one.space.algorithm, outcome) for one in study.tuned for outcome in one.outcomes]
    finals = [Run(outcome.folder) for _, outcome in outcomes]
    values = [{"algorithm.name": name, "seed": run.config.seed} for (name, _), run in zip(outcomes, finals, strict=True)]
    return TuneResult(study.folder.path, chosen, document, SweepResult(study.folder.path, finals, values))


def compare(
    runs: Iterable[Run | SweepResult | Path | str] | SweepResult,
    *,
    force: bool = False,
    fairness: bool = False,
    target: float | None = None,
) -> Comparison:
    """Compare finished runs over seeds.

    Args:
        runs: Runs, sweeps, or their folders.
        force: Compare runs whose privacy or data differ; they are marked.
        fairness: Add F_acc and F_loss, measured against models trained without privacy.
        target: Mean accuracy in (0, 1]: rounds and seconds until it was first reached; None: one that all runs reached.

    Returns:
        A table with `.rows`, `.records` and `.to_csv(path)`, which a notebook shows as HTML.

    Raises:
        ConfigError: If a run has not finished, or if privacy or data differ and `force` is not set.
    """
    if isinstance(runs, SweepResult):
        return runs.compare(force=force, fairness=fairness, target=target)
    folders = [
        one.path if isinstance(one, Run | SweepResult) else _absolute(f"runs[{number}]", one)
        for number, one in enumerate(_listed("runs", runs, "[run, 'runs/NAME']"))
    ]
    if not folders:
        raise ConfigError("nothing to compare: give runs, sweeps or their folders")
    return Comparison.of(folders, force=force, fairness=fairness, target=target)


def account(
    events: Mapping[str, Any] | Iterable[Event | Mapping[str, Any]],
    delta: float | None = None,
    *,
    adjacency: Adjacency = "zero-out",
    accountant: Accountant = "pld",
    target_epsilon: float | None = None,
) -> dict[str, Any]:
    """Compute epsilon of a composition of mechanisms, or the noise multiplier for a target epsilon.

    Args:
        events: Events (`SampledGaussian(1.0, 0.01, 1000)`), dictionaries such as {"type": "SampledGaussian",
            "noise_multiplier": 1.0, "sampling_rate": 0.01, "steps": 1000}, or a complete document of `dpcfl account`.
        delta: Target delta, in (0, 1); None only with a complete document.
        adjacency: "zero-out" or "replace-one".
        accountant: "pld" (tight) or "rdp" (as in the papers).
        target_epsilon: Compute the noise multiplier of all dictionaries that omit it or set it to None.

    Returns:
        The settings, "epsilon" (None for infinity, with a "reason"), and "noise_multiplier" if `target_epsilon` is given.

    Raises:
        ConfigError: With every unknown key and bad value.

    Source: Doroshenko et al. 2022 (connect-the-dots PLD); Mironov et al. 2019 (RDP).
    """
    if isinstance(events, Mapping):
        if (delta, adjacency, accountant, target_epsilon) != (None, "zero-out", "pld", None):
            raise ConfigError(
                "a complete document holds delta, adjacency, accountant and target_epsilon: do not pass them as arguments"
            )
        return account_document(dict(events))
    delta, target_epsilon = _plain(delta), _plain(target_epsilon)
    document = {
        "events": [_event(event) for event in _listed("events", events, "[SampledGaussian(1.0, 0.01, 1000)]")],
        "delta": delta,
        "adjacency": adjacency,
        "accountant": accountant,
    }
    return account_document(document if target_epsilon is None else {**document, "target_epsilon": target_epsilon})


def _warn_if_replaced(config: Any, stacklevel: int = 3) -> None:
    """Warn the caller of a public function if a packaged configuration stands in for a file that is not there."""
    if isinstance(config, str | os.PathLike) and (note := replacement_note(os.fspath(config))):
        warnings.warn(note, stacklevel=stacklevel)


def _check_jobs(jobs: int) -> None:
    if type(jobs) is not int or not 1 <= jobs <= sweep_axes.MOST_CELLS:
        raise ConfigError(f"jobs is {jobs!r}: must be a whole number from 1 to {sweep_axes.MOST_CELLS:,}")


def _absolute(name: str, path: Any) -> Path:
    """Return a path that is still right when the caller, a callback or another thread changes the folder of the process."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name} is {shown(path)}: must be a path, for example 'runs'")
    try:
        return given_path(path, name).absolute()
    except FileNotFoundError:
        raise ConfigError(f"{name} is {shown(path)}: must be absolute, since the current folder was removed") from None


def _listed(name: str, values: Any, example: str) -> list[Any]:
    """Return an argument as a list; ConfigError for one value, or for a text, whose items are its letters."""
    if isinstance(values, str | bytes | Path | Mapping | type) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} is {shown(values)}: must be a list, for example {example}")
    return list(values)


def _callbacks(callbacks: Any) -> list[Callback]:
    """Return the callbacks as a list; ConfigError before anything runs for what cannot be called with a round."""
    found = _listed("callbacks", callbacks, "[print]")
    for number, callback in enumerate(found):
        if isinstance(callback, type) and issubclass(callback, Tracker):
            raise ConfigError(
                f"callbacks[{number}] is the class {callback.__name__}: must be an object of it, {callback.__name__}(...)"
            )
        if not callable(callback):
            raise ConfigError(
                f"callbacks[{number}] is {shown(callback)}: must be a function of a round's metrics, or a tracker"
            )
    return found


def _event(event: Event | Mapping[str, Any]) -> Any:
    """Convert an event to its entry in the document of `dpcfl account`."""
    if dataclasses.is_dataclass(event) and not isinstance(event, type):
        return {"type": type(event).__name__, **dataclasses.asdict(event)}
    return {key: _plain(value) for key, value in event.items()} if isinstance(event, Mapping) else event


def _plain(value: Any) -> Any:
    """Convert a number of NumPy to one of Python."""
    return value.item() if isinstance(value, np.number) else value


def _with_federation(config: Source, federation: str | None) -> Config:
    """Load a configuration with a federation, which other settings may need; in one process there is no transcript."""
    if federation not in (None, *FEDERATIONS):
        raise ConfigError(f"federation is {shown(federation)}: must be {' or '.join(FEDERATIONS)}")
    if federation is None or (isinstance(config, Config) and config.runtime.federation == federation):
        return config if isinstance(config, Config) else configuration.load(config)
    return configuration.load(config, IN_PROCESS if federation == "in-process" else {"runtime.federation": federation})


def _watched(
    folder: Path, config: Config, seconds_before: float, interrupts: Interrupts, callbacks: list[Callback], progress: bool
) -> Run:
    """Start or resume the run of a folder, with the errors and callbacks of `run`."""
    title, in_process = f"{config.name} {config.algorithm['name']}", config.runtime.federation == "in-process"
    watcher = Watcher(folder, config, callbacks, open_bar(progress, keep_stdout=in_process), title)
    feed = watcher.feed
    try:
        options = running.RunOptions(seconds_before, interrupts=interrupts, in_calling_process=in_process)
        document, failure = running.run_in(folder, config, watcher, options)
        if failure is not None:
            raise failure
        if document.get("state") == "finished":
            feed.update(ended=True)
    except DpcflError as error:
        if folder.exists():
            error.add_note(f"run folder {folder}; resume with dpcfl.resume({str(folder)!r})")
        raise
    finally:
        feed.end()
    if feed.error is not None:
        raise feed.error
    if document.get("state") != "finished" and not feed.stopped:
        hint = f"resume with dpcfl.resume({str(folder)!r})" if folder.exists() else "the new run folder was removed"
        raise KeyboardInterrupt(f"stopped; {hint}")
    return Run(folder)
