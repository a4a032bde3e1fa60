"""The rehearsal in the parent of all workers: what a fork must not inherit does not exist, and the engine is ready."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import torch

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.job_files import read_job
from dpcfl_net.federation.engine import Engine
from dpcfl_net.launch import new_run
from dpcfl_net.launch.placement.rehearsal import Zeros, rehearse
from dpcfl_net.training.fast_path import FastPath

SETTINGS = {
    "name": "rehearsal", "data": {"dataset": "digits", "clients": [2], "shift": "none"}, "model": {"name": "digits-cnn"},
    "rounds": 2, "privacy": {"epsilon": 5, "delta": 1e-4}, "algorithm": {"name": "local"},
}  # fmt: skip


def prepared(folder):
    folder.mkdir()
    new_run.prepare(folder, configuration.resolve(SETTINGS))
    return read_job(folder, read_operator_key(RunFolder(folder).operator_key))


def kernel_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()


def test_it_draws_nothing_starts_no_thread_and_leaves_no_file(tmp_path, monkeypatch):
    job = prepared(tmp_path / "run")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.set_num_threads(1)
    random_state, numpy_state, threads = torch.get_rng_state(), np.random.get_state()[1].copy(), kernel_threads()
    before = sorted(tmp_path.rglob("*"))
    rehearse(job)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert kernel_threads() == threads
    assert sorted(tmp_path.rglob("*")) == before


def test_workers_of_one_process_share_the_engine_and_each_step_starts_from_the_same_model(tmp_path):
    job = prepared(tmp_path / "run")
    rehearse(job)
    engine = Engine.of(job.protocol)
    assert engine is Engine.of(job.protocol.model_copy())
    assert {"trainer", "evaluator", "initial_model"} <= set(vars(engine))
    assert np.array_equal(engine.initial_model, Engine(job.protocol).initial_model)


def test_workers_need_not_compare_the_usual_sizes_of_batches_again(tmp_path, monkeypatch):
    job = prepared(tmp_path / "run")
    rehearse(job)
    trainer, protocol = Engine.of(job.protocol).trainer, job.protocol
    (slot,) = set(job.algorithm.plan(protocol.roster[0]))
    usual = np.arange(round(slot.rate * protocol.roster[0].records))
    shapes = []
    gradients = FastPath.gradients

    def counted(path, theta, x, y):
        shapes.append(tuple(x.shape))
        return gradients(path, theta, x, y)

    monkeypatch.setattr(FastPath, "gradients", counted)
    theta, records = np.zeros(protocol.model.parameters, np.float32), Zeros(tuple(protocol.model.input_shape))
    trainer.clipped_sum(theta, records, usual)
    assert len(shapes) == 1
    trainer.clipped_sum(theta, records, usual[:1])  # a batch that no client draws
    assert len(shapes) > 2
