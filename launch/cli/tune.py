"""Implements `dpcfl tune`: prints a line per run, the chosen settings, and the comparison of the final runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config as configuration
from dpcfl_net.launch.cells import memory
from dpcfl_net.launch.cells.outcome import CellOutcome
from dpcfl_net.launch.cli import compare as comparison
from dpcfl_net.launch.cli.cell_screen import CellLines, ShownCells, open_cell_screen
from dpcfl_net.launch.cli.screen import print_table
from dpcfl_net.launch.sweep_axes import parse_axes
from dpcfl_net.launch.sweeps import outcome_line
from dpcfl_net.launch.tuning import output
from dpcfl_net.launch.tuning.runs import StudyRuns
from dpcfl_net.launch.tuning.study import Study, TuneOptions
from dpcfl_net.results.number_format import counted


def seeds(option: str, text: str | None) -> tuple[int, ...]:
    """Parse seeds of the command line: `0,1,2` or `0:3`.

    Args:
        option: Name of the option.
        text: Its value; None: no seeds.

    Raises:
        ConfigError: If it is not a list of whole numbers.
    """
    if text is None:
        return ()
    (values,) = parse_axes([f"seed={text}"]).values()
    if not all(value.isdecimal() for value in values):
        raise ConfigError(f"{option} is {text!r}: must be whole numbers such as 0,1,2 or 0:3")
    return tuple(map(int, values))


def plan(
    config: Path, overrides: Sequence[str], algorithms: str | None, grid: Sequence[str], options: TuneOptions, out: Path
) -> Study:
    """Plan the study of a command line; arguments and errors as `Study.of`."""
    if algorithms is None:
        names = [str(configuration.load(config, overrides).algorithm["name"])]
    else:
        names = [name.strip() for name in algorithms.split(",")]
    return Study.of(config, overrides, names, parse_axes(grid), options, out)


def dry_run(study: Study) -> tuple[int, dict[str, Any]]:
    """Print the trials and the final runs; start nothing. Returns exit code and JSON document."""
    adaptive = study.options.search == "optuna"
    for one in study.tuned:
        for index in [] if adaptive else study.candidates(one.space):
            print(one.space.label(index))
        if adaptive:
            print(f"{one.space.algorithm}: {study.count} of {len(one.space):,} combinations, proposed during the search")
    print(f"{counted(study.trial_runs, 'run')} of trials, then {counted(study.final_runs, 'final run')}")
    return 0, output.document(study)


def tune(study: Study, jobs: int) -> tuple[int, dict[str, Any]]:
    """Run a study and print its result.

    Args:
        study: The study.
        jobs: Runs at once.

    Returns:
        Exit code and JSON document.

    Raises:
        RunFailed: If runs failed.
    """
    try:
        _run(study, jobs)
    except KeyboardInterrupt:
        output.write(study)
        print("stopped; run the same command to resume")
        return 130, output.document(study)
    pages = output.write_pages(study)
    print_table(output.chosen_table(study))
    for one in study.tuned:
        joint = output.joint(study, one)
        print(f"{one.space.algorithm}: {output.joint_sentence(study, joint)}")
    print(output.choice_sentence(study))
    comparison.show(study.folder.path)
    print(f"trials: {pages[0]}")
    return 0, output.document(study)


def _run(study: Study, jobs: int) -> None:
    """Run a study, with a line per run, or with a live table of the runs at once."""

    def ended(number: int, label: str, outcome: CellOutcome) -> None:
        if screen is None:
            print(outcome_line(number, total, label, outcome), flush=True)
        else:
            screen.ended(number, outcome)

    runs, total = StudyRuns(study, ended), study.trial_runs + study.final_runs
    screen: CellLines | None = None
    if jobs > 1:
        screen = open_cell_screen(ShownCells(study.folder.path.name, total, runs.labels, runs.folders))
        left = runs.left()
        if min(len(left), jobs) > 1:
            screen.say(memory.note(left, jobs))
    runs.run(jobs, screen)
