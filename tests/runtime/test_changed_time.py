"""Durations in the files of a run whose host's time is set back while it runs."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from api_runs import TINY
from conftest import SMALL

import dpcfl_net as dpcfl
from dpcfl_net import launch
from dpcfl_net.core import runlog
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.release_check import client_endpoint_arguments
from dpcfl_net.launch.chaos import Chaos
from dpcfl_net.launch.chaos_file import ChaosFile
from dpcfl_net.launch.preparation import StepRecorder
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.runtime.worker import Worker, own_keys
from dpcfl_net.transport.endpoint import Link, ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR, OBSERVER, make_keys, read_pair
from dpcfl_net.transport.observer_inbox import ObserverInbox

BACK_S = 1000.0  # by which the time is set back at each look at it


@pytest.fixture
def set_back(monkeypatch):
    real, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() - BACK_S * next(looks))


def test_rounds_and_spans_have_no_negative_durations(set_back, tmp_path: Path):
    run = dpcfl.run({**TINY, "algorithm": {"name": "global"}}, tmp_path, "in-process", progress=False)
    seconds = [line["seconds"] for line in runlog.each(run.path / "metrics.jsonl") if "bytes_up" in line]
    assert len(seconds) == TINY["rounds"]
    assert all(0 < one < BACK_S for one in seconds)
    spans = [line for line in runlog.each(run.path / "spans.jsonl") if line["who"] in ("coordinator", "observer")]
    assert {line["what"] for line in spans} == {"wait", "evaluate"}
    assert all(0 < line["end"] - line["start"] < BACK_S for line in spans)


def test_steps_of_the_preparation_have_no_negative_durations(set_back, tmp_path: Path):
    steps = StepRecorder(tmp_path, lambda step: None)
    steps.begin("data set")
    steps.end()
    (span,) = runlog.each(tmp_path / "spans.jsonl")
    assert 0 <= span["end"] - span["start"] < BACK_S


def test_faults_have_no_negative_durations(set_back, tmp_path: Path, monkeypatch):
    plan = ChaosFile.model_validate(
        {"seed": 0, "processes": [{"stop": "client 1", "at": {"round": 1, "step": "sent"}, "seconds": 0.2}]}
    )
    with subprocess.Popen(["sleep", "60"]) as process, contextlib.closing(Chaos(tmp_path, plan, 2)) as chaos:
        monkeypatch.setattr(launch.chaos, "running_processes", lambda logs: {"client 1": [psutil.Process(process.pid)]})
        with contextlib.closing(runlog.Lines(tmp_path / "messages.jsonl")) as messages:
            messages.write({"kind": "TASK", "peer": "client 1", "round": 1, "task": "train"})
        while not (spans := list(runlog.each(tmp_path / "spans.jsonl"))):
            chaos.tick()
        process.kill()
    (span,) = spans
    assert span["what"] == "fault stop"
    assert 0.2 <= span["end"] - span["start"] < BACK_S


def test_a_worker_reports_no_negative_durations(set_back, tmp_path: Path):
    keys = tmp_path / "keys"
    make_keys(keys, 8)
    job = make_job(config.resolve({**SMALL, "algorithm": {"name": "global"}}), keys)
    protocol, found = job.protocol, []
    pairs = {name: read_pair(keys, name, key) for name, key in
             ((COORDINATOR, protocol.coordinator_key), (OBSERVER, protocol.observer_key))}  # fmt: skip
    server = ServerEndpoint(
        "tcp://127.0.0.1:*", Link.of(protocol, pairs[COORDINATOR]), **client_endpoint_arguments(job.algorithm, [0])
    )
    inbox = ObserverInbox(
        "tcp://127.0.0.1:*", Link.of(protocol, pairs[OBSERVER]), coordinator_key=protocol.coordinator_key,
        client_keys={entry.id: entry.public_key for entry in protocol.roster}, parameters=protocol.model.parameters, max_models=1,
    )  # fmt: skip
    spec = WorkerSpec(tmp_path, 0, server.address, inbox.address, keys, "", tmp_path / "ledgers")

    @contextlib.contextmanager
    def turn():
        time.sleep(0.1)  # a wait for a core is reported, too
        yield

    with zmq.Context() as context, contextlib.closing(server), contextlib.closing(inbox):
        worker = Worker(spec, job, make_host(job, 0, tmp_path / "ledgers"), context, lambda: turn(), own_keys(spec, job))
        serving = threading.Thread(target=worker.serve)
        serving.start()
        try:
            server.send_task(0, 1, "train", {"model": np.zeros(protocol.model.parameters, np.float32)})
            deadline = time.monotonic() + 60
            while not {"receive", "wait", "train"} <= {span.what for span in found} and time.monotonic() < deadline:
                server.poll(0.05)
                found += inbox.poll(0.05)
        finally:
            worker.stop()
            serving.join()
    assert [span.what for span in found if span.what != "send"] == ["receive", "wait", "train"]  # "send" comes when it is over
    assert all(0 <= span.end - span.start < BACK_S for span in found)
