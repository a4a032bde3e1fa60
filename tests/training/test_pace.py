"""Constant pace: what a step computes on does not follow what it drew, what it cuts is paid for, answers leave at deadlines."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing, nullcontext

import numpy as np
import pytest
from conftest import SMALL, dpcfl, only_run, write_config
from records import Images
from scipy.stats import binom

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import CUT_SHARE
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.statement import privacy_statement, replace_one_epsilon
from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.training.models import flatten
from dpcfl_net.training.pace import covered_epsilon, room
from dpcfl_net.training.physical_batches import padded
from dpcfl_net.transport.keys import make_keys

PRIVACY = {"epsilon": 5, "delta": 1e-4}
DATA = {"dataset": "digits", "clients": [2], "shift": "none", "train_per_client": 400, "test_per_client": 20}


@pytest.mark.parametrize(("records", "rate", "steps"), [(2000, 0.016, 2500), (60, 0.5, 400), (718, 32 / 718, 460), (5, 0.2, 1)])
@pytest.mark.parametrize("epsilon", [0.1, 5.0, 60.0])
def test_room_is_the_least_that_delta_covers(records, rate, steps, epsilon):
    kept = CUT_SHARE * 1e-4
    found = room(records, rate, steps, epsilon, kept)
    log_kept = math.log(kept) - math.log(steps)

    def cost(size):  # log of (1 + e^epsilon') beta for the largest epsilon' that it is to hold for
        return binom.logsf(size, records, rate) + np.logaddexp(0.0, 3 * epsilon + 10)

    assert cost(found) <= log_kept or found == records
    assert cost(found - 1) > log_kept - math.log(2)  # but for the bound of log(1 + e^x)
    assert room(records, 1.0, steps, epsilon, kept) == records


@pytest.mark.parametrize("epsilon", [231.0, 300.0, 400.0, 1000.0])
def test_room_covers_tails_below_the_smallest_float(epsilon):
    """They counted as zero, so that a large epsilon had room for 422 records whose rest delta did not pay for."""
    records, rate, steps, kept = 2000, 0.016, 2520, CUT_SHARE * 1e-4
    found = room(records, rate, steps, epsilon, kept)
    log_allowed = math.log(kept) - math.log(steps) - (3 * epsilon + 10)
    terms = binom.logpmf(np.arange(found + 1, records + 1), records, rate)
    assert np.logaddexp.reduce(terms, initial=-np.inf) <= log_allowed
    assert found < records
    fewer = binom.logpmf(np.arange(found - 2, records + 1), records, rate)
    assert np.logaddexp.reduce(fewer) > log_allowed - math.log(2)


def test_every_step_computes_on_the_same_batches_whatever_it_draws():
    module = models.build("digits-cnn", (1, 8, 8), 10)
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=32)
    theta, slot = flatten(module), DPSGDSlot("train", 32 / 400, 20)
    counts = {}
    for how in (None, 150):
        data = Images(400)
        trainer.train(theta, data, slot, 1.0, b"k" * 32, room=how)
        counts[how] = list(zip(map(len, data.rows), data.sizes, strict=True))
    sizes = {size for _, size in counts[150]}
    assert (len(sizes), len(counts[150])) == (1, 20 * 2)
    assert sum(rows for rows, _ in counts[150]) == sum(rows for rows, _ in counts[None])  # the same draws
    free = [sum(rows for rows, _ in counts[None][k:]) for k in range(len(counts[None]))]
    assert len(counts[None]) < 20 * 2  # positive control: otherwise the number of batches follows the draw
    assert len(set(free)) == len(free)


def test_cutting_changes_nothing_but_batches_that_are_too_large():
    module = models.build("digits-cnn", (1, 8, 8), 10)
    trainer, data = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=32), Images(100)
    theta, rows = flatten(module), np.arange(90)
    free = trainer.clipped_sum(theta, data, rows)
    assert np.allclose(trainer.clipped_sum(theta, data, rows, room=200), free, rtol=2e-3, atol=1e-5)
    for most in (37, 81):  # 81: two pieces of 41
        cut = trainer.clipped_sum(theta, data, rows[:most])
        assert np.allclose(trainer.clipped_sum(theta, data, rows, room=most), cut, rtol=2e-3, atol=1e-5)
    size, batches = padded(rows, 200)
    assert (size, len(batches), [len(b) for b in batches]) == (67, 3, [67, 23, 0])


def job_of(folder, **local):
    make_keys(folder, 2)
    document = {
        **SMALL,
        "data": DATA,
        "rounds": 5,
        "algorithm": {"name": "global"},
        "privacy": PRIVACY,
        "model": {"name": "linear"},
    }
    return make_job(config.resolve({**document, "local": {"batch_size": 32, "lr": 0.5, **local}}), folder)


def test_what_is_cut_is_paid_for(tmp_path, monkeypatch):
    free, paced = job_of(tmp_path / "a"), job_of(tmp_path / "b", pace="constant")
    noise = [job.protocol.client(0).noise_multiplier for job in (free, paced)]
    assert noise[0] < noise[1] < 1.01 * noise[0]
    assert paced.protocol.accounted_delta == pytest.approx(0.99e-4)
    plan = paced.algorithm.plan(paced.protocol.client(0))
    events = [slot.event(noise[1]) for slot in plan]
    assert accountant.epsilon(events, 0.99e-4) <= 5 < accountant.epsilon(events, 0.98e-4)
    host = make_host(paced, 0, tmp_path / "ledgers", durable=False)
    assert host.room(plan[0]) == room(400, 32 / 400, 5 * 13, 5.0, 1e-6)
    host.close()
    replaced = replace_one_epsilon(paced.protocol)
    assert replaced is not None
    assert replaced <= covered_epsilon(5)
    # No epsilon is stated above those for which a reserved part of delta pays.
    for reserve in ("covered_epsilon", "epsilon_of_reserve"):
        with monkeypatch.context() as patch:
            patch.setattr(f"dpcfl_net.experiment.statement.{reserve}", lambda _: replaced - 1e-3)
            assert replace_one_epsilon(paced.protocol) is None


@pytest.mark.parametrize(
    ("local", "spent"),
    [({"pace": "free"}, [0, 1]), ({"pace": "constant"}, [0, 1]), ({"pace": "constant", "deadline_s": 2.0}, [1])],
    ids=["free", "constant", "deadline"],
)
def test_a_clients_steps_have_the_room_of_its_plan(tmp_path, monkeypatch, local, spent):
    """With a deadline no client waits for a core before its charge, even to check the model: the client before may compute there."""
    job, rooms, train = job_of(tmp_path / "keys", **local), [], Trainer.train
    monkeypatch.setattr(Trainer, "train", lambda self, *args: rooms.append(args[-1]) or train(self, *args))
    turns = []
    with closing(make_host(job, 0, tmp_path / "ledgers", durable=False)) as host:
        host.turn = lambda: (turns.append(len(host.gate.spent())), nullcontext())[1]
        task = Task(1, "train", {"model": np.zeros(job.protocol.model.parameters, np.float32)})
        assert host.answer(task).status == "release"
        assert rooms == [host.room(job.algorithm.plan(job.protocol.client(0))[0])]
    assert (rooms == [None]) == (local == {"pace": "free"})
    assert turns == spent


def test_statements_say_what_time_shows(tmp_path):
    said = {}
    for name, local in (("free", {}), ("paced", {"pace": "constant"}), ("due", {"pace": "constant", "deadline_s": 2.0})):
        said[name] = " ".join(privacy_statement(job_of(tmp_path / name, **local).protocol, None)["not_covered"])
    assert "the time of a step depends on the number of sampled records" in said["free"]
    assert "answers are sent as soon as they are ready" in said["paced"]
    assert "duration of tasks" not in said["due"]
    assert ["longer than local.deadline_s, 2 s" in said[name] for name in ("free", "paced", "due")] == [False, False, True]


@pytest.mark.parametrize(
    ("algorithm", "adjacency", "said"),
    [
        ({"sampling_rate": 0.5}, "zero-out", ["how many clients a round samples and on which"]),
        ({"sampling_rate": 0.5}, "replace-one", ["on which clients a round samples"]),
        ({"sampling_rate": 1.0}, "zero-out", []),
        ({"asynchronous": {"buffer": 1}}, "zero-out", []),
    ],
)
def test_a_trusted_servers_statement_says_that_rounds_show_their_sample(tmp_path, algorithm, adjacency, said):
    document = {
        **SMALL,
        "data": {**SMALL["data"], "train_per_client": 20},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedavg", **algorithm},
        "privacy": {"epsilon": 5, "delta": 1e-2, "unit": "client", "trust": "trusted-server", "adjacency": adjacency},
    }
    make_keys(tmp_path, 8)
    statement = privacy_statement(make_job(config.resolve(document), tmp_path).protocol, None)
    lines = [line for line in statement["not_covered"] if line.startswith("duration of rounds")]
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))
    # Which clients a round samples also decides if enough of them answer.
    assert all("and whether a round reaches its quorum" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"local": {"deadline_s": 2.0}},
            "local.deadline_s is 2: belongs to local.pace constant, got 'free', or to privacy.unit client with",
        ),
        ({"local": {"pace": "constant"}, "ledger": {"scope": "dataset", "root": "x"}}, "ledger.scope must be 'run'"),
        (
            {
                "local": {"pace": "constant"},
                "algorithm": {"name": "dp-fedavg"},
                "privacy": {"epsilon": 5, "delta": 1e-4, "unit": "client", "trust": "trusted-server"},
            },
            "belongs to DP-SGD",
        ),
    ],
)
def test_settings_that_hide_nothing_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        config.resolve({**SMALL, "privacy": PRIVACY, "algorithm": {"name": "global"}, **changes})


@pytest.mark.slow  # the wait itself: tests/threats/test_secure_losses.py; in virtual time: tests/federation
def test_answers_leave_at_their_deadline_in_a_real_run(tmp_path):
    """Two clients, two rounds: every answer leaves a whole number of deadlines after its task came."""
    path = write_config(
        tmp_path / "c", data=DATA, rounds=2, model={"name": "linear"}, algorithm={"name": "global"}, privacy=PRIVACY,
        local={"batch_size": 32, "lr": 0.5, "pace": "constant", "deadline_s": 1.5},
    )  # fmt: skip
    start = time.monotonic()
    done = dpcfl("run", path, "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr + done.stdout
    assert time.monotonic() - start > 2 * 1.5
    folder = only_run(tmp_path / "runs")
    sent = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    tasks = {(line["peer"], line["round"]): line["time"] for line in sent if line["kind"] == "TASK"}
    answers = {(line["peer"], line["round"]): line["time"] for line in sent if line["kind"] == "RESULT"}
    waited = [answers[key] - tasks[key] for key in tasks]
    assert len(waited) == 4
    for seconds in waited:  # the way there and back, and a machine that is busy, add some
        assert seconds // 1.5 >= 1
        assert seconds % 1.5 < 0.6, waited
    assert dpcfl("verify", folder).returncode == 0
