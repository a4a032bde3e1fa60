"""Tuning with equal numbers of trials: what is tried, on which records it is scored, what is tested, and what the statement says."""

from __future__ import annotations

import csv
import json
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from api_runs import TINY
from cli_cases import call
from conftest import assert_nothing_left, at_a_terminal, write_config
from conftest import dpcfl as command_line

import dpcfl_net as dpcfl
from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder, TuneFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.launch.cells.outcome import CellOutcome
from dpcfl_net.launch.sweep_axes import parse_axes
from dpcfl_net.launch.sweep_grid import cell_folder
from dpcfl_net.launch.tuning import output, runs
from dpcfl_net.launch.tuning.runs import StudyRuns
from dpcfl_net.launch.tuning.search import REPEATS, Optuna, count_trials, searcher
from dpcfl_net.launch.tuning.space import Space, spaces
from dpcfl_net.launch.tuning.study import Study, TuneOptions
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.results import summary
from dpcfl_net.results.tuned_epsilon import Candidate, JointEpsilon, joint_epsilon
from dpcfl_net.transport.keys import make_keys

SMALL = {
    **TINY, "data": {**TINY["data"], "test_per_client": 31},
    "rounds": 2, "model": {"name": "linear"}, "privacy": {**TINY["privacy"], "accountant": "rdp"}, "algorithm": {"name": "global"},
    "runtime": {"federation": "in-process"}, "output": {"transcript": "off"}, "algorithms": {"global": {"local": {"lr": 0.7}}},
}  # fmt: skip
SECRET = {**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}
GRID = {"local.lr": ["0.001", "0.5"]}
NAMES = ["global", "local"]
WHOLE_CLIENTS = {"unit": "client", "trust": "trusted-server"}


@dataclass
class Done:
    """A finished study and its tuning.json."""

    study: Study
    document: dict

    def run(self, folder: str) -> dpcfl.Run:
        return dpcfl.open_run(self.study.folder.path / folder)


def run(document: dict, algorithms: list[str], out: Path) -> Done:
    study = Study.of(document, {}, algorithms, GRID, TuneOptions(), out)
    StudyRuns(study).run()
    output.write_pages(study)
    return Done(study, json.loads(study.folder.tuning.read_text()))


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Done:
    """Seeded noise: quick, and without an epsilon."""
    return run(SMALL, NAMES, tmp_path_factory.mktemp("tune"))


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Done:
    return run(SECRET, ["global"], tmp_path_factory.mktemp("tune"))


def test_the_secret_of_seeded_noise_is_in_no_page_and_in_files_for_their_owner_only(done: Done):
    secret, folder = SMALL["privacy"]["noise_seed"].encode(), done.study.folder.path
    found = [file for file in folder.parent.rglob("*") if file.is_file() and secret in file.read_bytes()]
    assert {file.name for file in found} == {"tuning.json", "sweep.json", "config.yaml"}
    assert {file.stat().st_mode & 0o777 for file in found} == {0o600}


def test_every_algorithm_has_the_same_trials_and_the_best_is_tested(done: Done):
    for name in NAMES:
        one = done.document["algorithms"][name]
        assert [trial["values"] for trial in one["trials"]] == [{"local.lr": 0.001}, {"local.lr": 0.5}]
        best = max(one["trials"], key=lambda trial: trial["score"])
        assert one["chosen"] == {"values": best["values"], "score": best["score"]}
        (final,) = one["final"]
        settings = done.run(final["folder"]).config
        assert (settings.algorithm["name"], settings.local.lr) == (name, best["values"]["local.lr"])
        assert final["accuracy_mean"] == done.run(final["folder"]).final["accuracy_mean"]


def test_trials_are_scored_on_validation_records_and_final_runs_on_test_records(done: Done):
    for name, one in done.document["algorithms"].items():
        trial, final = done.run(one["trials"][1]["folders"][0]), done.run(one["final"][0]["folder"])
        assert [[entry.records for entry in run.job.protocol.roster] for run in (trial, final)] == [[160, 160], [200, 200]]
        assert [entry.validation_records for entry in trial.job.protocol.roster] == [40, 40]
        # A share of n records is a multiple of 1/n: 40 validation records, 31 test records.
        for run, count in ((trial, 40), (final, 31)):
            lines = [line for line in runlog.read(RunFolder(run.path).metrics) if line["view"] == "observer"]
            shares = [share for line in lines for share in line["accuracy_by_client"]]
            assert all(share * count == pytest.approx(round(share * count)) for share in shares)
            assert any(0 < share < 1 for share in shares)
            assert name == "local" or run is final or [line["round"] for line in lines] == [2]


def test_the_statement_of_a_final_run_names_the_search_and_what_no_epsilon_covers(done: Done):
    one = done.document["algorithms"]["global"]
    not_covered = summary.read_document(done.run(one["final"][0]["folder"]).path)["privacy"]["not_covered"]
    (said,) = [text for text in not_covered if text.startswith("hyper-parameter search")]
    for words in (
        "2 trials of global",
        "as many of one other algorithm",
        "grid search over local.lr of 0.001, 0.5",
        "without noise",
    ):
        assert words in said
    trial = done.run(one["trials"][0]["folders"][0])
    assert "hyper-parameter search" in summary.read_document(trial.path)["privacy"]["not_covered"]


def test_several_seeds_set_other_records_aside_and_further_final_runs_are_not_counted(done: Done, tmp_path):
    seeds = Study.of(SMALL, {}, ["global"], GRID, TuneOptions(trial_seeds=(0, 1), seeds=(0, 1, 2)), tmp_path)
    keys, aside = done.run(done.study.tuned[0].outcomes[0].folder).path / "keys", []
    for seed in seeds.options.trial_seeds:
        job = make_job(seeds.trial_config(seeds.tuned[0].space, 0, seed), keys)
        slices = [client_slice(job, client, None)[1] for client in job.protocol.clients]
        aside.append({row for piece in slices for row in piece.validation_rows.tolist()})
    assert aside[0] - aside[1]
    assert aside[1] - aside[0]
    one, several = (output.choice_sentence(study) for study in (done.study, seeds))
    assert ("others with each seed" in one, "others with each seed" in several) == (False, True)
    single = Study.of(SMALL, {}, ["global"], {"local.lr": ["0.1"]}, TuneOptions(), tmp_path)
    least, one, several = (output.joint_sentence(study, JointEpsilon(3.0, 1e-4)) for study in (single, done.study, seeds))
    assert least == f"1 trial run and{one.removeprefix('2 trial runs and')}"
    assert one == "2 trial runs and one final run together: epsilon 3 at delta 0.0001 for a record in all of them"
    assert several == f"4{one[1:]}; 2 further final runs not counted"
    final = seeds.final_config(seeds.tuned[0].space, 0, 0)
    (said,) = [text for text in _not_covered(job, final) if text.startswith("hyper-parameter search")]
    assert "(20 % of the training records, others with each seed)" in said


def _not_covered(job: Job, config: Config) -> list[str]:
    protocol = job.protocol.model_copy(update={"tuning": config.tuning})
    return privacy_statement(protocol, None)["not_covered"]


def test_seeded_noise_has_no_joint_epsilon(done: Done):
    joint = done.document["algorithms"]["local"]["joint"]
    assert (joint["epsilon"], "noise is seeded" in joint["reason"]) == (None, True)


@pytest.mark.slow
def test_the_joint_epsilon_is_the_composition_of_all_runs(secret: Done):
    done = secret
    one = done.document["algorithms"]["global"]
    folders = [*(folder for trial in one["trials"] for folder in trial["folders"]), one["final"][0]["folder"]]
    events = []
    for folder in folders:
        job = done.run(folder).job
        entry = job.protocol.roster[0]
        z = entry.noise_multiplier
        events += [slot.event(z) for slot in job.algorithm.plan(entry)]
    assert one["joint"]["reason"] == ""
    assert one["joint"]["epsilon"] == dpcfl.account(events, 1e-4)["epsilon"]
    assert 5 < one["joint"]["epsilon"] < 15


def test_a_study_keeps_the_validation_share_of_its_configuration_and_no_note_of_an_earlier_search(tmp_path: Path):
    own = {**SMALL, "data": {**SMALL["data"], "validation": 0.3}}
    study = Study.of(own, {}, ["global"], GRID, TuneOptions(), tmp_path)
    tuned = study.final_config(study.tuned[0].space, 0, 0)
    assert study.options.validation == tuned.tuning.validation == 0.3
    again = Study.of(tuned, {}, ["global"], GRID, TuneOptions(), tmp_path)
    assert again.trial_config(again.tuned[0].space, 0, 0).tuning is None


def protocols(folder: Path, document: dict, seeds: tuple[int, ...]) -> list[Protocol]:
    """Signed protocols of a study's trials with a learning rate, one for each seed, and of the final run."""
    study = Study.of(document, {}, ["global"], GRID, TuneOptions(trial_seeds=seeds, seeds=(7,)), folder)
    make_keys(folder, len(SMALL["data"]["clients"]))
    space = study.tuned[0].space
    configs = [*(study.trial_config(space, 0, seed) for seed in seeds), study.final_config(space, 1, 7)]
    return [make_job(config, folder).protocol for config in configs]


def candidate(protocol: Protocol, **local: object) -> Candidate:
    """Settings of a job with some changed."""
    return Candidate(protocol.options, protocol.local.model_copy(update=local), protocol.rounds)


def test_the_joint_epsilon_has_the_charges_of_every_trial(tmp_path: Path):
    *trials, final = protocols(tmp_path, SECRET, (0, 1))
    events = [event for one in (*trials, final) for event in plan_of_first(one)]
    found = joint_epsilon(trials, final, [candidate(final)])
    assert (found.reason, found.delta) == ("", 1e-4)
    assert found.epsilon == pytest.approx(dpcfl.account(events, 1e-4)["epsilon"], rel=1e-6)


def plan_of_first(protocol: Protocol) -> list[Event]:
    entry = protocol.roster[0]
    return [slot.event(entry.noise_multiplier) for slot in algorithm_of(protocol).plan(entry)]


def test_a_batch_that_holds_all_records_of_a_trial_and_a_part_of_the_final_runs_changes_the_plan(tmp_path: Path):
    trial, final = protocols(tmp_path, SECRET, (0,))
    assert [one.roster[0].records for one in (trial, final)] == [160, 200]
    settings = [candidate(final, batch_size=size) for size in (160, 200)]
    found = joint_epsilon([trial], final, settings)
    assert (found.epsilon, "depends on earlier releases" in found.reason) == (None, True)


def test_a_pace_that_was_not_tried_changes_the_noise(tmp_path: Path):
    """With a search that proposes trials from earlier scores, releases decide if a run has it, and so its noise and its delta."""
    trial, final = protocols(tmp_path, SECRET, (0,))
    found = joint_epsilon([trial], final, [candidate(final), candidate(final, pace="constant")])
    assert (found.epsilon, "depends on earlier releases" in found.reason) == (None, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local": {"pace": "constant"}}, "a part of each run's delta is kept"),
        ({"data": {"clients": [2], "sizes": [100, 200], "train_per_client": None}}, "clients have different plans"),
        ({"privacy": WHOLE_CLIENTS, "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5}}, "unit is a client"),
    ],
)
def test_jobs_that_cannot_be_composed_have_no_joint_epsilon(tmp_path: Path, change: dict, words: str):
    document = {**SECRET, "algorithms": {}, **{key: {**SECRET.get(key, {}), **value} for key, value in change.items()}}
    make_keys(tmp_path, 2)
    one = make_job(configuration.resolve(document), tmp_path).protocol
    found = joint_epsilon([one], one, [candidate(one)])
    assert found.epsilon is None
    assert words in found.reason


def test_files_and_pages(done: Done):
    folder = done.study.folder
    rows = list(csv.DictReader(folder.trials.open()))
    assert [(row["algorithm"], row["trial"], row["local.lr"]) for row in rows] == [
        ("global", "1", "0.001"), ("global", "2", "0.5"), ("local", "1", "0.001"), ("local", "2", "0.5"),
    ]  # fmt: skip
    assert {row["state"] for row in rows} == {"finished"}
    page = folder.page.read_text()
    assert "Grid search, 2 trials for each of global and local. Choice by accuracy_mean on validation records (20 %" in page
    assert "no epsilon covers it" in page
    assert len(json.loads(folder.sweep.read_text())["cells"]) == 2
    assert folder.report.exists()


@pytest.mark.slow
def test_the_command_finds_what_python_has_run(done: Done, tmp_path: Path, capsys):
    path = write_config(tmp_path, **SMALL)
    arguments = ["--algorithms", "global,local", "--grid", "local.lr=0.001,0.5", "--out", done.study.store.parent]
    again = call(capsys, "tune", path, *arguments)
    assert again.code == 0
    assert again.out.count("cached") == 6
    assert "no joint epsilon of trials and final run: noise is seeded" in again.out
    assert call(capsys, "compare", done.study.folder.path).code == 0


@pytest.mark.slow
def test_a_setting_that_changes_the_plan_has_no_joint_epsilon(secret: Done):
    done = secret
    from dpcfl_net.results.tuned_epsilon import Candidate, joint_epsilon

    one = done.document["algorithms"]["global"]
    trial, final = (done.run(folder).job.protocol for folder in (one["trials"][0]["folders"][0], one["final"][0]["folder"]))
    same = Candidate(final.options, final.local, final.rounds)
    more = Candidate(final.options, final.local, final.rounds + 1)
    assert joint_epsilon([trial], final, [same, same]).epsilon is not None
    own = joint_epsilon([trial.model_copy(update={"algorithm": "package.module:Own"})], final, [same])
    assert (own.epsilon, "algorithm of your own" in own.reason) == (None, True)
    found = joint_epsilon([trial], final, [same, more])
    assert (found.epsilon, "depends on earlier releases" in found.reason) == (None, True)


def test_own_values_of_an_algorithm_replace_the_common_ones():
    common, own = spaces(
        ["global", "mr-mtl"], parse_axes(["local.lr=1,2", "algorithms.mr-mtl.local.lr=3", "algorithms.mr-mtl.lam=0,.1"])
    )
    assert common.axes == {"local.lr": [1, 2]}
    assert own.axes == {"local.lr": [3], "algorithm.lam": [0, 0.1]}
    assert own.changes(1) == {"algorithm.name": "mr-mtl", "algorithms.mr-mtl.local.lr": 3, "algorithm.lam": 0.1}


class Backwards:
    """Stands in for `LocalCells`: runs that the last started of `jobs` ends first, with results that follow from the settings."""

    ends: ClassVar[dict[int, str]] = {}  # states with which runs end, by their number; all others finish

    def __init__(self, folder: Path, configs: list, store: Path, jobs: int) -> None:
        self.configs, self.store, self.jobs, self.busy = configs, store, jobs, []

    def free(self):
        return len(self.busy) < self.jobs

    def start(self, index, left):
        self.busy.append(index)

    def wait(self, also, timeout_s):
        index = self.busy.pop()
        if index in self.ends:
            return [(index, CellOutcome(cell_folder(self.configs[index], self.store), self.ends[index], error="burnt"))]
        return [(index, pretend(self.configs[index], self.store))]

    def stop(self):
        return [(index, CellOutcome(cell_folder(self.configs[index], self.store), "interrupted")) for index in self.busy]

    def close(self):
        pass


def pretend(config, store: Path) -> CellOutcome:
    folder = cell_folder(config, store)
    folder.mkdir(parents=True)
    final = dict.fromkeys(output.MEASURES, int(folder.name[-6:], 16) / 2**24)
    (folder / "run.json").write_text(json.dumps({"state": "finished", "final": final}))
    return CellOutcome(folder, "finished")


@pytest.fixture
def pretended(monkeypatch):
    """Studies without training."""
    monkeypatch.setattr(runs, "LocalCells", Backwards)
    monkeypatch.setattr(runs, "run_cell", pretend)
    monkeypatch.setattr(output, "joint", lambda study, one: JointEpsilon(None, 1e-4, "nothing was trained"))
    return monkeypatch


def study_of(search: str, out: Path) -> Study:
    options = TuneOptions(search, None if search == "grid" else 5, trial_seeds=(0, 1), seeds=(2, 3))
    return Study.of(SMALL, {}, NAMES, {"local.lr": ["0.1", "0.2", "0.3"], "local.clip": ["1", "2"]}, options, out)


def files(out: Path, search: str, jobs: int) -> list[str]:
    """Run a study; its trials.csv, tuning.json and sweep.json."""
    study = study_of(search, out)
    StudyRuns(study).run(jobs)
    kept = study.folder
    return [path.read_text().replace(str(out), "") for path in (kept.trials, kept.tuning, kept.sweep)]


@pytest.mark.parametrize("search", ["grid", "random", "optuna"])
def test_trials_order_and_choice_do_not_depend_on_the_runs_at_once(search, tmp_path, pretended):
    if search == "optuna":
        pytest.importorskip("optuna", reason="needs the extra tune")
    one, three = (files(tmp_path / str(jobs), search, jobs) for jobs in (1, 3))
    assert one == three
    assert one[0].count("finished") == 2 * 2 * (6 if search == "grid" else 5)
    algorithms = json.loads(one[1])["algorithms"].values()
    assert all(algorithm["chosen"] for algorithm in algorithms)
    finals = [final for algorithm in algorithms for final in algorithm["final"]] + json.loads(one[2])["cells"]
    assert [final["state"] for final in finals] == ["finished"] * 2 * 2 * 2  # the files are written after the last run


def test_the_table_has_mean_and_spread_of_the_final_runs_that_have_finished(tmp_path, pretended):
    study = study_of("grid", tmp_path)
    StudyRuns(study).run(1)
    one, other = study.tuned
    first, second = (100 * summary.read_document(outcome.folder)["final"]["accuracy_mean"] for outcome in one.outcomes)
    other.outcomes[0] = CellOutcome(other.outcomes[0].folder, "failed")
    alone = 100 * summary.read_document(other.outcomes[1].folder)["final"]["accuracy_mean"]
    told = output.document(study)["algorithms"].values()
    assert [part["joint"] is None for part in told] == [False, True]  # a run that failed may have no job
    assert [[final["accuracy_mean"] is None for final in part["final"]] for part in told] == [[False, False], [True, False]]
    said = [row[-1] for row in output.chosen_table(study).rows]
    assert said == [f"{(first + second) / 2:.1f} % +- {abs(first - second) / 2**0.5:.1f}", f"{alone:.1f} %"]


def test_a_failed_trial_ends_no_other_and_leaves_no_choice(tmp_path, pretended):
    pretended.setattr(Backwards, "ends", {4: "failed"})
    study, ended = study_of("grid", tmp_path), []
    with pytest.raises(RunFailed, match=r"1 of 24 cells failed(.|\n)*global local.lr=0.2 local.clip=1 seed=0: burnt"):
        StudyRuns(study, lambda number, label, outcome: ended.append(number)).run(3)
    assert sorted(ended) == list(range(1, 25))
    assert not any(one.outcomes for one in study.tuned)


@pytest.mark.parametrize(
    ("score", "advice"),
    [("accuracy_minority", "without a smallest true cluster use accuracy_mean"), ("accuracy_mean", "see its warnings")],
)
def test_a_run_without_the_score_ends_the_study_with_what_to_do(score, advice, tmp_path, pretended):
    """Such as a run whose last round was not measured: another score would not help it."""
    unmeasured = {name: None if name == score else 0.5 for name in output.MEASURES}

    def pretend_unmeasured(config, store: Path) -> CellOutcome:
        done = pretend(config, store)
        (done.folder / "run.json").write_text(json.dumps({"state": "finished", "final": unmeasured}))
        return done

    pretended.setattr(runs, "run_cell", pretend_unmeasured)
    options = TuneOptions("grid", None, trial_seeds=(0,), seeds=(1,), score=score)
    study = Study.of(SMALL, {}, NAMES, {"local.lr": ["0.1", "0.2"]}, options, tmp_path)
    with pytest.raises(ConfigError, match=f"score is '{score}': .* has none; {advice}"):
        StudyRuns(study).run(1)


def test_a_stopped_tuning_resumes_with_any_number_of_runs_at_once(tmp_path, pretended):
    pretended.setattr(Backwards, "ends", {7: "interrupted"})
    with pytest.raises(KeyboardInterrupt):
        files(tmp_path / "out", "grid", 3)
    pretended.setattr(Backwards, "ends", {})
    assert 0 < len(list((tmp_path / "out" / "store").iterdir())) < 24
    resumed = files(tmp_path / "out", "grid", 1)  # `pretend` refuses to run a finished run again
    assert resumed == files(tmp_path / "once", "grid", 1)


@pytest.mark.slow
def test_two_processes_tune_as_one_does(done: Done, tmp_path: Path):
    """The noise is seeded, so that all scores are the same."""
    path = write_config(tmp_path / "c", **SMALL)
    arguments = ["--algorithms", "global,local", "--grid", "local.lr=0.001,0.5", "--out", tmp_path / "out"]
    both = command_line("tune", path, *arguments, "--jobs", 2)
    assert both.returncode == 0, both.stderr
    assert "2 cells at once take about" in both.stdout
    folder = TuneFolder(tmp_path / "out" / done.study.folder.path.name)
    assert folder.trials.read_text() == done.study.folder.trials.read_text()
    keys = ("chosen", "trials", "settings")
    found, one = json.loads(folder.tuning.read_text())["algorithms"], done.document["algorithms"]
    assert {name: [found[name][key] for key in keys] for name in NAMES} == {
        name: [one[name][key] for key in keys] for name in NAMES
    }
    assert list(folder.logs.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_all_trials_and_they_resume(tmp_path: Path):
    path = write_config(tmp_path / "c", **{**SMALL, "rounds": 400})
    command = ["tune", path, "--grid", "local.lr=.1,.2,.3", "--jobs", "2", "--out", tmp_path / "out"]
    stopped = at_a_terminal(*command)
    deadline = time.monotonic() + 120
    while len({one.parent for one in (tmp_path / "out" / "store").glob("*/checkpoints/round_*")}) < 2:
        assert time.monotonic() < deadline
        assert stopped.poll() is None
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    printed, _ = stopped.communicate(timeout=60)
    assert (stopped.returncode, time.monotonic() - pressed < 6) == (130, True)
    assert "stopped; run the same command to resume" in printed
    (trials,) = (tmp_path / "out").glob("*-tune-*/trials.csv")
    assert [row["state"] for row in csv.DictReader(trials.open())] == ["interrupted", "interrupted", "waiting"]
    assert_nothing_left(tmp_path / "out", seconds=1)
    again = command_line(*command, timeout=240)
    assert again.returncode == 0, again.stderr
    assert [row["state"] for row in csv.DictReader(trials.open())] == ["finished"] * 3


def test_combinations_are_numbered_with_the_last_setting_fastest():
    space = Space("x", {"a": [1, 2], "b": [3, 4, 5]})
    assert [space.values(index) for index in (0, 1, 5)] == [{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 5}]
    assert [space.index(places) for places in ((0, 0), (0, 1), (1, 2))] == [0, 1, 5]


def test_a_random_search_is_a_seeded_sample_without_repetition():
    space = Space("x", {"a": list(range(10)), "b": list(range(10))})
    drawn = [searcher("random", space, 20, seed).ask() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 20


def test_optuna_proposes_new_combinations_and_finds_the_peak():
    pytest.importorskip("optuna", reason="needs the extra tune")
    space = Space("x", {"a": list(range(8)), "b": list(range(8))})

    def tried(seed: int) -> list[int]:
        search, found = searcher("optuna", space, 30, seed), []
        while asked := search.ask():
            (index,) = asked
            place = space.values(index)
            search.tell(index, -float((place["a"] - 6) ** 2 + (place["b"] - 1) ** 2))
            found.append(index)
        return found

    first = tried(0)
    assert first == tried(0)
    assert len(set(first)) == 30
    assert space.index((6, 1)) in first


def test_optuna_is_told_each_score_and_asked_again_for_a_combination_that_was_tried(monkeypatch):
    made, told, highest = [], [], {"a": 1, "b": 2}
    places = [highest, highest, {"a": 0, "b": 1}, *[highest] * REPEATS]  # of the proposals, in order

    def suggest_from(place: dict[str, int], key: str, low: int, high: int) -> int:
        assert (low, high) == (0, highest[key])
        return place[key]

    class Study:
        def ask(self) -> SimpleNamespace:
            return SimpleNamespace(suggest_int=partial(suggest_from, places.pop(0)))

        def tell(self, trial: SimpleNamespace, score: float) -> None:
            told.append((trial.suggest_int.args[0], score))

    stand_in = SimpleNamespace(
        logging=SimpleNamespace(WARNING=30, set_verbosity=lambda level: None), samplers=SimpleNamespace(TPESampler=dict),
        create_study=lambda **settings: made.append(settings) or Study(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "optuna", stand_in)
    search = Optuna(Space("x", {"a": [1, 2], "b": [3, 4, 5]}), 3, 2**32 + 7)
    assert made == [{"direction": "maximize", "sampler": {"seed": 7}}]
    assert search.ask() == [5]
    search.tell(5, 0.25)
    assert search.ask() == [1]
    search.tell(1, 0.5)
    assert told == [(highest, 0.25), (highest, 0.25), ({"a": 0, "b": 1}, 0.5)]
    (drawn,) = search.ask()
    assert drawn in {0, 2, 3, 4}
    assert (told[3:], places) == ([(highest, 0.25)] * REPEATS, [])
    search.tell(drawn, 0.75)
    assert (len(told), search.ask()) == (3 + REPEATS, [])


def test_a_missing_optuna_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"needs the extra `tune`: pip install"):
        searcher("optuna", Space("x", {"a": [1, 2]}), 2, 0)


@pytest.mark.parametrize(
    ("search", "trials", "sentence"),
    [
        ("grid", None, r"combinations: a 2, b 3\. .* or in Python with grid={'algorithms\.NAME\.KEY': \[VALUE, VALUE\]}; "),
        ("grid", 3, r"combinations: a 2, b 3; trials is 3\. .* or TuneOptions\(search='random', trials=N\) in Python$"),
        ("random", None, r"^trials is missing: .*: --trials N, or TuneOptions\(trials=N\) in Python$"),
        ("random", 3, "^trials is 3: more than the combinations of a"),
        ("random", 0, "^trials is 0: must be at least 1"),
    ],
)
def test_unequal_numbers_of_trials_are_refused(search, trials, sentence):
    with pytest.raises(ConfigError, match=sentence):
        count_trials(search, [Space("a", {"x": [1, 2]}), Space("b", {"x": [1, 2, 3]})], trials)


@pytest.mark.parametrize(
    ("algorithms", "grid", "options", "sentence"),
    [
        (NAMES, {"privacy.epsilon": ["1", "2"]}, {}, "grid 'privacy.epsilon': must be local"),
        (
            NAMES,
            {"algorithms.mr-mtl.lam": ["1", "2"], "model.name": ["linear"]},
            {},
            r"(?s)names none of the tuned algorithms: global, local.*grid 'model.name': must be local",
        ),
        (["global", "global"], GRID, {}, "'global' is given twice"),
        (["global"], {}, {}, r"has no setting to tune: give --grid .*, or grid={'KEY': \[VALUE, VALUE\]} in Python$"),
        ([], GRID, {}, r"^algorithms is \[\]: must name at least one"),
        (
            ["global", ""],
            GRID,
            {},
            r"an algorithm has an empty name: give --algorithms r-dpcfl,local, or algorithms=\['r-dpcfl', 'local'\] in Python$",
        ),
        (["gobal"], GRID, {}, "algorithm.name is 'gobal': must be one of"),
        (["gobal"], GRID, {}, "did you mean 'global'"),
        (NAMES, {"local.momentum": ["0", "0.0"]}, {}, "are the same job"),
        (NAMES, {"local.lr": ["-1", "1"]}, {}, r"local.lr is -1.*\(trial global local.lr=-1 and 1 more\)"),
        (
            NAMES,
            {"local.lrr": ["1", "2"]},
            {},
            r"^unknown key 'local.lrr', .*'local.lr'\? \(trial global local.lrr=1 and 3 more\)$",
        ),
        (NAMES, GRID, {"score": "loss"}, "score is 'loss': must be accuracy_mean"),
        (NAMES, GRID, {"search": "guess"}, "search is 'guess': must be grid, random or optuna"),
        (NAMES, GRID, {"validation": 1.0}, "validation is 1.0: must be above 0"),
        (NAMES, GRID, {"validation": 0.0}, "validation is 0.0: must be above 0"),
        (NAMES, GRID, {"search_seed": -1}, "search_seed is -1: must be at least 0"),
        (NAMES, GRID, {"search_seed": 3}, "search_seed is 3: only for search random and optuna, which draw; search is 'grid'"),
        (NAMES, GRID, {"seeds": (1, 1)}, "seeds has a seed twice"),
    ],
)
def test_a_study_that_cannot_run_is_a_sentence(algorithms, grid, options, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        Study.of(SMALL, {}, algorithms, grid, TuneOptions(**options), tmp_path)
    assert not list(tmp_path.iterdir())


def test_validation_records_are_set_aside_as_the_options_or_the_configuration_say(tmp_path):
    def planned(options: TuneOptions, *overrides: str) -> float | None:
        return Study.of(SMALL, overrides, NAMES, GRID, options, tmp_path).options.validation

    own, again = "data.validation=0.3", TuneOptions(validation=0.3)
    assert [planned(TuneOptions()), planned(again), planned(TuneOptions(), own), planned(again, own)] == [0.2, 0.3, 0.3, 0.3]
    with pytest.raises(
        ConfigError, match=r"^validation is 0\.4: data\.validation of the configuration is 0\.3, give one of the two$"
    ):
        planned(TuneOptions(validation=0.4), own)
    with pytest.raises(
        ConfigError, match=r"^data\.evaluate is 'validation': must be test; `dpcfl tune` sets it for its trials$"
    ):
        planned(TuneOptions(), own, "data.evaluate=validation")


def test_an_axis_replaces_the_local_values_of_an_own_algorithm(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_tuned.py").write_text(
        "from dpcfl_net.algorithms.global_model import Global\nclass Own(Global):\n    pass\n"
    )
    name = "own_tuned:Own"
    document = {**SMALL, "algorithms": {name: {"local": {"lr": 0.7}}}}
    study = Study.of(document, {}, [name], GRID, TuneOptions(), tmp_path)
    assert [study.trial_config(study.tuned[0].space, index, 0).local.lr for index in range(2)] == [0.001, 0.5]
    with (tmp_path / "own_tuned.py").open("a") as module:
        module.write("# edited\n")
    with pytest.raises(ConfigError, match=r"own_tuned.* changed"):  # processes of the runs would import other code
        Study.of(document, {}, [name], GRID, TuneOptions(), tmp_path)


def test_a_change_that_the_section_of_one_algorithm_outweighs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^local\.lr is 0\.1: .*algorithms\.global\.local\.lr is 0\.7; set algorithms"):
        Study.of(SMALL, ["local.lr=0.1"], NAMES, {"local.clip": ["1", "2"]}, TuneOptions(), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "grid", "key"),
    [
        (["local.lr=0.3"], GRID, "local.lr"),
        ({"local": {"lr": 0.3}}, GRID, "local.lr"),
        (["algorithms.global.local.lr=0.3"], GRID, "algorithms.global.local.lr"),
        (["rounds=3"], {"rounds": ["1", "2"]}, "rounds"),
    ],
)
def test_an_override_that_every_trial_replaces_is_refused(overrides, grid, key, tmp_path):
    with pytest.raises(ConfigError, match=f"^override {key}: it has no effect, since --grid gives the values of {key}$"):
        Study.of(SMALL, overrides, NAMES, grid, TuneOptions(), tmp_path)


def test_an_override_of_an_algorithm_that_is_not_tuned_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^override algorithms\.mr-mtl: it has no effect, since the tuned algorithms are global, "
    ):
        Study.of(SMALL, ["algorithms.mr-mtl.local.lr=0.3"], NAMES, GRID, TuneOptions(), tmp_path)


def test_an_override_that_one_algorithm_keeps_is_taken(tmp_path):
    document = {key: value for key, value in SMALL.items() if key != "algorithms"}
    study = Study.of(
        document,
        ["local.lr=0.3"],
        NAMES,
        {"algorithms.global.local.lr": ["0.1"], "local.clip": ["1", "2"]},
        TuneOptions(),
        tmp_path,
    )
    assert [study.trial_config(one.space, 0, 0).local.lr for one in study.tuned] == [0.1, 0.3]


def test_a_dry_run_lists_the_trials(capsys):
    listed = call(
        capsys, "tune", "quickstart", "--algorithms", "global,local", "--grid", "local.lr=.1,.5", "--seeds", "0:3", "--dry-run"
    )
    assert listed.code == 0
    assert listed.out.splitlines() == [
        "global local.lr=0.1", "global local.lr=0.5", "local local.lr=0.1", "local local.lr=0.5",
        "4 runs of trials, then 6 final runs",
    ]  # fmt: skip
    one = call(capsys, "tune", "quickstart", "--grid", "local.lr=.1", "--dry-run")
    assert one.out.splitlines()[-1] == "1 run of trials, then 1 final run"
    assert call(capsys, "tune", "quickstart", "--grid", "local.lr=.1,.5", "--seeds", "a,b").err.startswith(
        "error: --seeds is 'a,b'"
    )


@pytest.mark.slow
def test_python_has_it(done: Done):
    result = dpcfl.tune(SMALL, NAMES, {"local.lr": [0.001, 0.5]}, out=done.study.store.parent)
    assert result.path == done.study.folder.path
    assert result.chosen == {name: done.document["algorithms"][name]["chosen"]["values"] for name in NAMES}
    assert [run.config.algorithm["name"] for run in result.finals] == NAMES
