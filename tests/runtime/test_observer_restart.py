"""An observer that starts again completes what a crash cut off, and the figures of personal models are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import closing
from html import escape
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, command_line, dpcfl, only_run, processes_of, write_config

import dpcfl_net
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import State
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.launch.cli.progress import ProgressTail
from dpcfl_net.launch.cli.run import report
from dpcfl_net.report.page import write_report
from dpcfl_net.results.rounds import unmeasured_rounds
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.observer import Observer
from dpcfl_net.runtime.specs import ObserverSpec
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.observer_notes import Models

DATA = {"dataset": "digits", "clients": [2, 2], "train_per_client": 100, "test_per_client": 20}
FEDPER = {"name": "dp-fedper", "sampling_rate": 0.6}
SEEDED = {"noise": "seeded", "noise_seed": "5eed" * 16}
DRAWN = {
    **SMALL, "data": DATA, "rounds": 4, "algorithm": FEDPER, "output": {},
    "privacy": {"unit": "client", "trust": "trusted-server", "epsilon": 8.0, "delta": 1e-2, **SEEDED},
}  # fmt: skip
ALL = {
    **DRAWN, "algorithm": {"name": "mr-mtl"}, "model": {"name": "linear"}, "local": {"batch_size": 1, "lr": 0.2},
    "privacy": {"epsilon": 5.0, "delta": 1e-4, **SEEDED},
}  # fmt: skip
COINS = {
    **DRAWN, "data": {**DATA, "clients": [6], "shift": "none"}, "local": {"batch_size": 32, "lr": 0.5, "deadline_s": 0.3},
    "algorithm": {**FEDPER, "sampling_rate": 0.8},
    "privacy": {
        "unit": "client", "trust": "secure-aggregation", "epsilon": 10, "delta": 0.1, **SEEDED,
        "secure_aggregation": {"stage_deadline_s": 0.05},
    },
}  # fmt: skip


def measured(folder):
    """Accuracy of each client, by round."""
    lines = runlog.read(RunFolder(folder).metrics)
    return {line["round"]: line["accuracy_by_client"] for line in lines if "accuracy_by_client" in line}


def test_scores_of_clusters_that_a_full_disk_cut_off_are_written_by_the_next_observer(tmp_path):
    make_keys(tmp_path / "keys", 4)
    job = make_job(config.resolve({**SMALL, "data": DATA, "model": {"name": "linear"}}), tmp_path / "keys")
    models = np.zeros((2, job.protocol.model.parameters), np.float32)
    note, clusters = Models(1, list(job.experiment.true_clusters), models), RunFolder(tmp_path).clusters
    for _ in range(3):
        with closing(Observer(ObserverSpec(tmp_path, "", "", tmp_path, tmp_path, None, 1), job)) as observer:
            observer.take(note)
            observer.take(note)
        scores = [line for line in runlog.read(clusters) if "assigned" in line]
        assert [(line["round"], line["recovered"]) for line in scores] == [(1, True)]
        assert sorted(measured(tmp_path)) == [1]
        if len(runlog.read(clusters)) == 1:
            clusters.write_bytes(clusters.read_bytes()[:20])  # the line of metrics.jsonl was written before it


@pytest.mark.parametrize(("algorithm", "judged"), [("global", False), ("r-dpcfl", True)])
def test_one_model_for_one_true_cluster_has_not_found_it(tmp_path, algorithm, judged):
    """`dpcfl compare` showed 2/2 under "clusters found" for two runs of an algorithm without clusters."""
    make_keys(tmp_path / "keys", 4)
    settings = {**SMALL, "data": {**DATA, "clients": [4]}, "model": {"name": "linear"}, "algorithm": {"name": algorithm}}
    job = make_job(config.resolve(settings), tmp_path / "keys")
    with closing(Observer(ObserverSpec(tmp_path, "", "", tmp_path, tmp_path, None, 1), job)) as observer:
        observer.take(Models(1, [0] * 4, np.zeros((1, job.protocol.model.parameters), np.float32)))
    (line,) = [line for line in runlog.read(RunFolder(tmp_path).clusters) if "assigned" in line]
    assert ({"recovered", "ari"} <= line.keys()) == judged


@pytest.mark.parametrize(("more", "value"), [(1, 0.0), (0, np.nan)])
def test_a_last_checkpoint_that_does_not_fit_the_job_is_not_evaluated(tmp_path, more, value):
    """An untrusted server wrote it. A longer model was evaluated by its first p numbers."""
    make_keys(tmp_path / "keys", 4)
    job = make_job(config.resolve({**SMALL, "data": DATA, "model": {"name": "linear"}}), tmp_path / "keys")
    models = np.full((2, job.protocol.model.parameters + more), value, np.float32)
    checkpoints = Checkpoints(RunFolder(tmp_path).checkpoints)
    checkpoints.write(job.protocol.rounds, State(models, list(job.experiment.true_clusters)))
    checkpoints.flush()
    with closing(Observer(ObserverSpec(tmp_path, "", "", tmp_path, tmp_path, None, 1), job)) as observer:
        with pytest.raises(RunFailed, match=r"(as|in row 0 of) State\.models"):
            observer.evaluate_last_round()
        assert measured(tmp_path) == {}


def test_figures_of_secret_coins_are_of_the_round_that_they_name_over_the_network_too(tmp_path):
    network, one = (dpcfl_net.run(COINS, tmp_path / kind, kind, progress=False) for kind in ("network", "in-process"))
    assert sorted(measured(one.path)) == [1, 2, 3, 4]
    assert measured(network.path) == measured(one.path)


def test_rounds_that_an_observer_on_a_full_disk_could_not_record_are_named_and_the_last_one_is_evaluated(tmp_path):
    def fill_disk(metrics):
        for process in processes_of(tmp_path) if metrics.round == 1 else []:
            if "dpcfl observer" in command_line(process):
                process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))  # its files do not grow

    settings = {**SMALL, "data": {**DATA, "clients": [1, 1]}, "model": {"name": "linear"}, "rounds": 60}
    settings |= {"algorithm": {"name": "global"}, "output": {"evaluate_every": 1}, "runtime": {"max_restarts": 0}}
    run = dpcfl_net.run(settings, tmp_path, callbacks=[fill_disk], progress=False)
    assert run.state == "finished"
    missing = sorted({*range(1, 61)} - {*measured(run.path)})
    assert missing
    assert missing[-1] < 60
    assert run.final["accuracy_mean"] == pytest.approx(np.mean(measured(run.path)[60]))
    lost, named = run.warnings
    assert lost.startswith("observer ended with code 4")
    assert named.startswith(f"no accuracy of round{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:10]))}")
    server = [line for line in runlog.read(RunFolder(run.path).metrics) if line["view"] == "server"]
    assert max(line.get("seconds", 0) for line in server) < 15  # no round waits for the lost observer
    assert named in ProgressTail(run.path).view().warnings
    write_report(run.path)
    assert escape(named, quote=True) in RunFolder(run.path).report.read_text()


def test_a_finished_run_whose_last_round_was_not_evaluated_has_no_final_accuracy(by_network, tmp_path):
    folder = Path(shutil.copytree(by_network.path, tmp_path / "run"))
    files = RunFolder(folder)
    lines = [line for line in runlog.read(files.metrics) if not (line["view"] == "observer" and line["round"] == 3)]
    files.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert unmeasured_rounds(folder, 3, 2) == [3]
    report(folder)
    assert json.loads(files.run.read_text())["final"]["accuracy_mean"] is None
    assert dpcfl_net.compare([folder]).rows[0]["mean %"] == "–"
    assert "no final accuracy" in files.report.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "t"), [(DRAWN, 2), (DRAWN, 4), (ALL, 1), (ALL, 2)], ids=["2", "4", "all-1", "all-2"])
def test_kill_of_all_processes_changes_no_figure_of_personal_models(tmp_path, settings, t):
    whole = measured(dpcfl_net.run(settings, tmp_path / "whole", "in-process", progress=False).path)
    out = tmp_path / "killed"
    killed = subprocess.Popen(
        [*DPCFL, "run", str(write_config(tmp_path / "c", **settings)), "--out", str(out)],
        cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not [*out.glob(f"*/checkpoints/round_{t:05d}")]:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    folder = only_run(out)
    assert_nothing_left(folder)
    assert dpcfl("run", "--resume", folder).returncode == 0
    again = measured(folder)
    assert again.items() <= whole.items()
    assert again[4] == whole[4]
