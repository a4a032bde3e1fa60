"""Files of a tuning study: tuning.json, trials.csv, sweep.json of the final runs, and two pages."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.canonical import finite
from dpcfl_net.core.csv_text import csv_text
from dpcfl_net.launch.cells.outcome import FINISHED, CellOutcome
from dpcfl_net.launch.new_run import mode_of
from dpcfl_net.launch.tuning.study import Study, Trial, Tuned
from dpcfl_net.results import summary
from dpcfl_net.results.number_format import at_most, counted, percent
from dpcfl_net.results.tables import Table
from dpcfl_net.results.tuned_epsilon import Candidate, JointEpsilon, joint_epsilon

MEASURES = ("accuracy_mean", "accuracy_worst", "accuracy_minority")


def write(study: Study) -> None:
    """Write tuning.json, trials.csv, and sweep.json once settings are chosen."""
    study.folder.path.mkdir(parents=True, exist_ok=True)
    mode = mode_of(study.document)
    write_atomically(study.folder.tuning, json.dumps(finite(document(study)), indent=2, default=str) + "\n", mode=mode)
    write_atomically(study.folder.trials, _csv(study))
    if all(one.outcomes for one in study.tuned):
        write_atomically(study.folder.sweep, json.dumps(_sweep(study), indent=2, default=str) + "\n", mode=mode)


def document(study: Study) -> dict[str, Any]:
    """Return the content of tuning.json: search, all trials, chosen settings, test results and joint epsilons."""
    options = study.options
    return {
        "folder": str(study.folder.path),
        "config": study.document,
        "search": {
            "search": options.search, "trials": study.count, "search_seed": options.search_seed, "score": options.score,
            "validation": options.validation, "trial_seeds": list(options.trial_seeds), "seeds": list(options.seeds),
        },
        "algorithms": {one.space.algorithm: _tuned(study, one) for one in study.tuned},
    }  # fmt: skip


def _tuned(study: Study, one: Tuned) -> dict[str, Any]:
    chosen = one.best if one.outcomes else None
    return {
        "settings": one.space.axes,
        "trials": [_trial(study, one, trial) for trial in one.trials],
        "chosen": None if chosen is None else {"values": one.space.values(chosen.index), "score": chosen.score},
        "final": [_final(study, seed, outcome) for seed, outcome in zip(study.options.seeds, one.outcomes, strict=False)],
        "joint": vars(joint(study, one)) if one.outcomes and one.outcomes[0].state == FINISHED else None,
    }


def _trial(study: Study, one: Tuned, trial: Trial) -> dict[str, Any]:
    return {
        "values": one.space.values(trial.index),
        "score": trial.score if trial.scores else None,
        "scores": trial.scores,
        "states": [outcome.state for outcome in trial.outcomes],
        "folders": [_relative(study, outcome.folder) for outcome in trial.outcomes],
    }


def _final(study: Study, seed: int, outcome: CellOutcome) -> dict[str, Any]:
    final = summary.read_document(outcome.folder).get("final", {}) if outcome.state == FINISHED else {}
    figures = {key: final.get(key) for key in MEASURES}
    return {"seed": seed, "state": outcome.state, "folder": _relative(study, outcome.folder), **figures}


def joint(study: Study, one: Tuned) -> JointEpsilon:
    """Compute the joint epsilon of an algorithm's trials and its first final run."""
    trials = [summary.read_run_job(outcome.folder).protocol for trial in one.trials for outcome in trial.outcomes]
    configs = [study.final_config(one.space, index, study.options.seeds[0]) for index in study.candidates(one.space)]
    candidates = [Candidate(config.options.model_dump(mode="json"), config.local, config.rounds) for config in configs]
    found = joint_epsilon(trials, summary.read_run_job(one.outcomes[0].folder).protocol, candidates)
    if found.epsilon == math.inf:
        return JointEpsilon(None, found.delta, "the accountant has no finite bound for all runs together")
    return found


def joint_sentence(study: Study, found: JointEpsilon) -> str:
    """Say what all trials and one final run of an algorithm cost a record together, on which all of them trained.

    Args:
        study: The study.
        found: The algorithm's joint epsilon.
    """
    if found.epsilon is None:
        return f"no joint epsilon of trials and final run: {found.reason}"
    runs, further = study.count * len(study.options.trial_seeds), len(study.options.seeds) - 1
    said = (
        f"{counted(runs, 'trial run')} and one final run together: epsilon {at_most(found.epsilon)} at delta {found.delta:g} for a record in "
        "all of them"
    )
    return said + (f"; {counted(further, 'further final run')} not counted" if further else "")


def choice_sentence(study: Study) -> str:
    """Say for which records no epsilon covers the choice."""
    others = "" if len(study.options.trial_seeds) == 1 else ", which are others with each seed"
    return f"The choice uses validation records without noise: no epsilon covers it for those records{others}."


def chosen_table(study: Study) -> Table:
    """Tabulate the chosen settings of each algorithm, their score and their accuracy on test records."""
    rows = []
    for one in study.tuned:
        values = one.space.settings(one.best.index)
        ended = [outcome.folder for outcome in one.outcomes if outcome.state == FINISHED]
        found = [summary.read_document(folder)["final"]["accuracy_mean"] for folder in ended]
        finals = [accuracy for accuracy in found if accuracy is not None]
        spread = f" +- {100 * statistics.stdev(finals):.1f}" if len(finals) > 1 else ""
        tested = f"{percent(statistics.fmean(finals))}{spread}" if finals else "–"
        rows.append([one.space.algorithm, values, str(len(one.trials)), percent(one.best.score), tested])
    caption = f"Score: {study.options.score} on validation records. Test: mean accuracy over {counted(len(study.options.seeds), 'seed')}."
    return Table("Chosen settings", ["algorithm", "settings", "trials", "score", "test"], rows, caption)


def write_pages(study: Study) -> tuple[Path, Path]:
    """Write the page of the trials and the comparison of the final runs; return both paths."""
    from dpcfl_net.report.pages import write_page
    from dpcfl_net.report.sweep import write_sweep
    from dpcfl_net.report.tuning import score_figure

    joints = [f"{one.space.algorithm}: {joint_sentence(study, joint(study, one))}." for one in study.tuned]
    series = [(one.space.algorithm, [(one.space.settings(t.index), t.score) for t in one.trials]) for one in study.tuned]
    page = write_page(
        study.folder.page,
        title="Tuning",
        lead=[search_sentence(study), *joints, choice_sentence(study)],
        figures=[score_figure(series)],
        tables=[chosen_table(study), _trials_table(study)],
    )
    return page, write_sweep(study.folder.path)


def search_sentence(study: Study) -> str:
    """Describe the search and the choice in two sentences."""
    options, (*others, last) = study.options, [one.space.algorithm for one in study.tuned]
    names = f"each of {', '.join(others)} and {last}" if others else last
    seeds = "" if len(options.trial_seeds) == 1 else f" with {len(options.trial_seeds)} seeds each"
    return (
        f"{options.search.capitalize()} search, {counted(study.count, 'trial')}{seeds} for {names}. Choice by {options.score} on validation records "
        f"({100 * (options.validation or 0):g} % of the training records)."
    )


def _trials_table(study: Study) -> Table:
    rows = [
        [
            one.space.algorithm,
            one.space.settings(trial.index),
            percent(trial.score),
            "yes" if trial is one.best else "no",
        ]
        for one in study.tuned
        for trial in one.trials
    ]
    return Table("Trials", ["algorithm", "settings", "score", "chosen"], rows)


def _csv(study: Study) -> str:
    keys = list(dict.fromkeys(key for one in study.tuned for key in one.space.axes))
    rows: list[list[Any]] = []
    for one in study.tuned:
        for number, trial in enumerate(one.trials, 1):
            values = one.space.values(trial.index)
            for place, (seed, outcome) in enumerate(zip(study.options.trial_seeds, trial.outcomes, strict=True)):
                score, folder = trial.scores[place] if trial.scores else "", _relative(study, outcome.folder)
                row = [one.space.algorithm, number, *(values.get(key, "") for key in keys), seed, score, outcome.state, folder]
                rows.append(row)
    return csv_text(["algorithm", "trial", *keys, "seed", "score", "state", "folder"], rows)


def _sweep(study: Study) -> dict[str, Any]:
    """The final runs as a sweep, which `dpcfl compare` and `dpcfl report` read."""
    cells = []
    for one in study.tuned:
        for seed, outcome in zip(study.options.seeds, one.outcomes, strict=True):
            values = {"algorithm.name": one.space.algorithm, "seed": seed}
            cells.append({"values": values, "folder": _relative(study, outcome.folder), "state": outcome.state})
    axes = {"algorithm.name": [one.space.algorithm for one in study.tuned], "seed": list(study.options.seeds)}
    return {"config": study.document, "axes": axes, "device": None, "cells": cells}


def _relative(study: Study, folder: Path) -> str:
    return os.path.relpath(folder, study.folder.path)
