"""Runs with aggregators: the bits of a run in one process, crashes, lost clients, and messages that do not fit a group."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, command_line, dpcfl, only_run, write_config
from pydantic import ValidationError
from run_results import assert_bits_of_one_process, job_of, last_state, server_lines
from simulate import simulate

from dpcfl_net.adversaries.hostile_connection import Target
from dpcfl_net.adversaries.malicious_coordinator import MaliciousCoordinator
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.core.protocol import AggregatorEntry, Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation import group_messages as wire
from dpcfl_net.federation.aggregation import GroupedMeans, ModelMeans
from dpcfl_net.federation.aggregator import AggregatorFederation
from dpcfl_net.federation.asynchronous import Participation
from dpcfl_net.federation.call_limits import NO_LAUNCHER, CallLimits
from dpcfl_net.federation.tree import GroupCalls, TreeFederation
from dpcfl_net.launch.aggregators import LocalAggregators
from dpcfl_net.launch.placement import parents
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.aggregator import Uplink, _serve, run_aggregator
from dpcfl_net.runtime.specs import AggregatorSpec
from dpcfl_net.transport.endpoint import ClientEvent
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.messages import WireError, match_template

SETTINGS = {
    "data": {"dataset": "digits", "clients": [1, 2, 2], "train_per_client": 100, "test_per_client": 40},
    "model": {"name": "linear"}, "rounds": 6, "privacy": {**SMALL["privacy"], "accountant": "rdp"}, "output": {"transcript": "off"},
}  # fmt: skip
R_DPCFL = {"name": "r-dpcfl", "clusters": 2}


def settings(algorithm=None, *, runtime=None, **changes):
    return {**SETTINGS, "algorithm": algorithm or R_DPCFL, "runtime": {"aggregators": 2, **(runtime or {})}, **changes}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of r-dpcfl: a round that passes updates on, rounds with choices, and rounds with sums."""
    out = tmp_path_factory.mktemp("tree")
    done = dpcfl("run", write_config(out / "c", **settings()), "--out", out / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(out / "runs")


def test_a_run_with_aggregators_has_the_bits_of_one_process(finished, tmp_path):
    assert_bits_of_one_process(finished, tmp_path)
    assert not [check for check in verify_run(finished) if check.holds is False]
    assert_nothing_left(finished)


def test_the_server_receives_an_answer_per_aggregator(finished):
    p = job_of(finished).protocol.model.parameters
    last = server_lines(finished)[-1]
    assert last["answered"] == 5
    assert 2 * 2 * 8 * p < last["bytes_up"] < 2 * (2 * 8 * p + 4096)  # two aggregators, sums for two models
    results = [line for line in runlog.read(finished / "messages.jsonl") if line["kind"] == "RESULT" and line["round"] == 6]
    assert sorted(line["peer"] for line in results) == [f"client {k}" for k in range(5)]


def test_the_predicted_bytes_of_the_server_are_those_of_a_run(finished):
    expected, lines = estimate(job_of(finished).protocol), server_lines(finished)
    up, down = (sum(line[key] for line in lines) for key in ("bytes_up", "bytes_down"))
    assert expected["bytes_up"] < up < 1.3 * expected["bytes_up"]
    headers = 2 * len(lines) * 2_500  # of two aggregators; as large as the models of this small run
    assert 0.7 * expected["bytes_down"] < down < 1.3 * expected["bytes_down"] + headers


def test_the_statement_says_that_aggregators_belong_to_the_server(finished):
    protocol = job_of(finished).protocol.model_copy(update={"unprotected": []})
    with_them = privacy_statement(protocol, None)
    without = privacy_statement(protocol.model_copy(update={"aggregators": []}), None)
    assert [line for line in with_them["covered"] if line not in without["covered"]] == [
        "the same releases as aggregators receive them: aggregators belong to the untrusted server"
    ]
    assert with_them | {"covered": without["covered"]} == without


def test_clients_connect_to_the_aggregator_of_their_group(finished):
    protocol = job_of(finished).protocol
    assert [list(entry.clients) for entry in protocol.aggregators] == [[0, 1], [2, 3, 4]]
    assert len({protocol.server_key(client) for client in range(5)}) == 2
    assert protocol.coordinator_key not in {protocol.server_key(client) for client in range(5)}
    assert protocol.server_key(1) == protocol.aggregators[0].public_key
    target = Target.of(protocol, 3, "tcp://127.0.0.1:1", finished / "keys")  # with another key every attack seems to fail
    assert target.server_key == protocol.aggregators[1].public_key
    with pytest.raises(ConfigError, match="the job has aggregators"):  # no client would ever come
        MaliciousCoordinator(protocol, "tcp://127.0.0.1:*", finished / "keys")


def test_a_protocol_names_each_client_in_one_group(finished):
    document = job_of(finished).protocol.model_dump()
    for groups in ([(0, 1)], [(0, 2), (2, 4)], [(1, 4)], [(0, 1), (3, 4)], [(0, 4), (5, 5)], [(0, 4), (5, 4)]):
        entries = [AggregatorEntry(public_key="k" * 40, first=a, last=b).model_dump() for a, b in groups]
        with pytest.raises(ValidationError, match="each client of the roster once"):
            Protocol.model_validate({**document, "aggregators": entries})


@pytest.mark.parametrize("trust", ["trusted-server", "secure-aggregation"])
def test_a_signed_job_gives_no_aggregator_what_only_a_trusted_server_or_no_one_may_read(finished, trust):
    """The statement names no aggregator as a receiver of these answers. No signature makes such a job valid."""
    document = job_of(finished).protocol.model_dump()
    document["privacy"] |= {"unit": "client", "trust": trust}
    if trust == "secure-aggregation":
        document["privacy"]["secure_aggregation"] = {
            "threshold": 1.0,
            "colluders": 0,
            "neighbours": None,
            "stage_deadline_s": 0.2,
        }
    with pytest.raises(ValidationError, match=f"aggregators must be empty with trust {trust}"):
        Protocol.model_validate(document)


def test_the_groups_decide_the_last_bits_of_a_mean():
    updates = np.random.default_rng(1).normal(size=(40, 500)) * 10.0 ** (np.arange(40) % 12)[:, None]
    found = {}
    for size in (40, 7, 20):
        means = ModelMeans(np.zeros((1, 500), np.float32))
        grouped = GroupedMeans(means, [range(a, min(40, a + size)) for a in range(0, 40, size)])
        for client, update in enumerate(updates):
            grouped.add(0, client, update.astype(np.float32))
        grouped.close_group()
        found[size] = means.sums().totals
        assert means.sums().counts.tolist() == [40]
    flat = ModelMeans(np.zeros((1, 500), np.float32))
    for client, update in enumerate(updates):
        flat.add(0, client, update.astype(np.float32))
    assert np.array_equal(found[40], flat.sums().totals)
    assert not np.array_equal(found[7], found[20])
    assert np.allclose(found[7], found[20], rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"runtime": {"aggregators": 6}}, "runtime.aggregators is 6: must be at most the number of clients, 5"),
        ({"privacy": {"epsilon": 5, "delta": 1e-4, "unit": "client", "trust": "trusted-server"}, "algorithm": {"name": "dp-fedavg"}},
         "an aggregator would read raw updates"),
        ({"algorithm": {"name": "global", "asynchronous": {"buffer": 2}}}, "algorithm.asynchronous must be null"),
        ({"network": {"how": "relay"}}, "network.how must be 'off', got 'relay'"),
        ({"runtime": {"aggregators": 2, "max_live_workers": 3}}, "runtime.max_live_workers must be at least 5, got 3"),
        ({"output": {"transcript": "full"}}, "output.transcript must be 'off', got 'full'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_with_aggregators_are_named(changes, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        configuration.resolve({"name": "tree", **settings(), **changes})


def test_messages_that_do_not_fit_a_group_are_refused(finished):
    algorithm, group = job_of(finished).algorithm, range(2, 5)
    messages, p = wire.GroupMessages(algorithm), algorithm.protocol.model.parameters
    models = np.zeros((2, p), np.float32)
    tasks = {client: {"model": models[client % 2]} for client in (2, 4)}
    name = "train" + wire.SUMMED
    good = wire.group_task(group, tasks, wire.Summing({2: 0, 4: 1}, {}, 2))
    _match(good, messages.task_template(group, name))
    messages.check_task(name, good)
    assert wire.client_tasks(group, messages.steps["train"], good).keys() == {2, 4}
    different = {client: {"model": np.full(p, client % 2, np.float32)} for client in group}
    different[4] = different[2]
    found = wire.client_tasks(group, messages.steps["train"], wire.group_task(group, different, None))
    assert {client: task["model"][0] for client, task in found.items()} == {2: 0, 3: 1, 4: 0}
    most = max(algorithm.capabilities.max_models, algorithm.capabilities.published_models)
    for rows in (1, most):
        messages.check_task(name, good | {wire.ROWS: np.int64(rows), wire.ROW: np.zeros(3, np.int64)})
    one = np.ones(3, np.int64)
    for bad in (
        {"model.of": 2 * one},
        {"model.of": -one},
        {wire.ROW: 2 * one},
        {wire.ROW: -2 * one},
        {wire.ROW: -one},  # the aggregator ended by a KeyError: an answer to `train` holds no choice
        {wire.ROWS: np.int64(0)},
        {wire.ROWS: np.int64(most + 1)},
    ):
        with pytest.raises(Refused):
            messages.check_task(name, good | bad)
    choosing = {"models": models[None], "models.of": 0 * one, wire.ROW: -one}
    messages.check_task("select_and_train" + wire.SUMMED, good | choosing)
    with pytest.raises(Refused, match=r"^group: \.row is out of range$"):
        messages.check_task("select_and_train" + wire.SUMMED, good | choosing | {wire.ROW: -2 * one})
    assert messages.task_template(group, "nothing" + wire.SUMMED) is None
    answer = {wire.STATUS: one, wire.ROW: np.array([0, -1, 1]), wire.TOTALS: np.zeros((2, p))}
    for status in (one, np.arange(3)):
        messages.check_answer(1, name, answer | {wire.STATUS: status})
    of_two = {wire.STATUS: one[:2], wire.ROW: one[:2]}
    for bad in (
        {wire.STATUS: one[:2]},
        {wire.STATUS: 4 * one},
        {wire.STATUS: -one},
        {wire.ROW: 2 * one},
        {wire.ROW: -2 * one},
        {wire.ROW: one[:2]},
        of_two,
    ):
        with pytest.raises(Refused):
            messages.check_answer(1, name, answer | bad)
    for status in (one, np.array([1, 1, 4]), one[:2]):
        with pytest.raises(Refused):
            messages.check_answer(1, "train", {wire.STATUS: status, "update": np.zeros((2, p), np.float32)})
    nobody = {wire.STATUS: one[:1], **wire.stacked(messages.encoding.release_template(messages.steps["train"]), [])}
    _match(nobody, messages.answer_template("train"))  # a group of one client, which is missing
    _match({wire.STATUS: one[:1], wire.ROW: one[:1], wire.TOTALS: np.zeros((1, p))}, messages.answer_template(name))
    too_many = {wire.STATUS: np.ones(4, np.int64), "update": np.zeros((4, p), np.float32)}  # all but one of the roster
    for part in ({wire.STATUS: one}, {"update": np.zeros((3, p), np.float32)}):
        with pytest.raises(WireError, match="template"):  # before memory is taken for more than the largest group
            _match(too_many | part, messages.answer_template("train"))


@pytest.mark.parametrize("summing", [None, wire.Summing({2: 0, 3: 0, 4: 1}, {}, 2)])
def test_an_aggregator_tells_who_was_asked_who_answered_whose_answer_is_lost_and_who_is_missing(finished, monkeypatch, summing):
    """A lost answer counts towards the quorum, and a missing one does not."""
    algorithm, group = job_of(finished).algorithm, range(1, 5)
    p = algorithm.protocol.model.parameters
    fed = AggregatorFederation(algorithm, group, None, CallLimits(0.0), NO_LAUNCHER, print)

    def exchange(kind, tasks, keep, limit):
        assert tasks.keys() == {2, 3, 4}
        keep(2, {"update": np.ones(p, np.float32)})
        fed.lost = [3]

    monkeypatch.setattr(fed, "_exchange", exchange)
    task = wire.group_task(group, {client: {"model": np.zeros(p, np.float32)} for client in (2, 3, 4)}, summing)
    answer = fed.answer(1, "train" + (wire.SUMMED if summing else ""), task)
    assert answer[wire.STATUS].tolist() == [wire.NOT_ASKED, wire.ANSWERED, wire.LOST, wire.MISSING]
    assert answer[wire.TOTALS if summing else "update"].any(axis=1).tolist() == ([True, False] if summing else [True])


def test_no_sums_are_asked_of_a_step_that_gives_no_update(tmp_path):
    document = {**settings({"name": "feddp-kmeans", "clusters": 2, "centres": 3}), "rounds": 5}
    make_keys(tmp_path, 5, 2)
    messages = wire.GroupMessages(make_job(configuration.resolve({"name": "tree", **document}), tmp_path).algorithm)
    assert messages.task_template(range(2), "moments") is not None
    assert messages.task_template(range(2), "moments" + wire.SUMMED) is None
    assert messages.task_template(range(2), "train" + wire.SUMMED) is not None
    totals = messages.answer_template("train" + wire.SUMMED)[wire.TOTALS]
    assert totals.shape[0] == (1, 2)  # a task has one model, the state two


@pytest.fixture
def added(finished, monkeypatch):
    """Adds up the updates of clients 0, 2 and 3, of weights 1, 2 and 3, for models 0, 1 and 1; the second aggregator lies."""
    algorithm = job_of(finished).algorithm
    fed = TreeFederation(algorithm, None, CallLimits(quorum=0.0), NO_LAUNCHER, print)
    p, totals = algorithm.protocol.model.parameters, {0: [[UNIT], [0.0]], 1: [[0.0], [10 * UNIT]]}

    def add_up(quorum=0.0, asked=(0, 2, 3), **lies):
        fed.quorum = quorum

        def exchange(calls, t, task, messages, take):
            for number, tensors in messages.items():
                status = np.where(tensors[wire.ASKED] == 1, wire.ANSWERED, wire.NOT_ASKED)
                honest = {
                    wire.STATUS: status,
                    wire.ROW: np.where(status == wire.ANSWERED, tensors[wire.ROW], -1),
                    wire.TOTALS: np.repeat(np.array(totals[number]), p, axis=1),
                }
                take(number, honest | {f".{name}": np.array(value) for name, value in lies.items() if number == 1})

        monkeypatch.setattr(GroupCalls, "exchange", exchange)
        means = ModelMeans(np.zeros((2, p), np.float32), {0: 1.0, 2: 2.0, 3: 3.0})
        each = {client: {"model": means.models[ROWS[client]]} for client in asked}
        return fed.add_up(algorithm.train, means, ROWS, each=each), means.moved()[:, 0].tolist()

    return add_up


ROWS = {0: 0, 2: 1, 3: 1}
UNIT = 1 / 64  # of each number in an update, within the bound of an update's norm


@pytest.mark.parametrize("row", [[1, 1, -1], [0, 1, -1], [-1, 1, 1], [-1, -1, -1]])
def test_the_server_counts_and_weighs_the_updates_of_a_group_itself(added, row):
    """An aggregator that sent the weight 0 with some updates made a model that was not finite, which a checkpoint kept."""
    assert added(row=row) == (ROWS, [UNIT, 2 * UNIT])


def test_an_aggregator_without_a_client_that_is_asked_gets_no_task(added):
    assert added(asked=(2, 3)) == ({2: 1, 3: 1}, [0.0, 2 * UNIT])


def test_an_aggregator_may_miss_a_client(added):
    assert added(status=[1, 3, 0]) == ({0: 0, 2: 1}, [UNIT, 5 * UNIT])  # client 3 is missing


def test_a_sum_may_be_as_long_as_the_updates_within_their_bounds_and_a_choice_of_no_model_adds_nothing():
    group, summing = range(2, 5), wire.Summing({}, {}, 2, {2: 3.0, 4: 4.0})

    def answer(length):
        totals = np.array([[length, 0.0], [np.inf, 0.0]])  # no client is counted for model 1: it is not read
        return {wire.STATUS: np.array([1, 0, 1]), wire.ROW: np.array([0, -1, -1]), wire.TOTALS: totals}

    rows, sums = wire.read_sums(group, answer(3.0), summing)
    assert (rows, sums.counts.tolist(), sums.weights.tolist()) == ({2: 0}, [1, 0], [1.0, 0.0])
    for length in (3.0, 3.0 * (1 + 1e-12)):
        assert wire.beyond_bounds(group, answer(length), summing) == ""
    assert wire.beyond_bounds(group, answer(3.0 * (1 + 1e-6)), summing) == (
        "its sum for model 0 has norm 3, over the bound 3 of its clients"
    )
    assert wire.beyond_bounds(group, answer(1e30), summing._replace(bounds={4: 4.0})) == ""


TOO_LONG = [[0.0] * 650, [4.0] * 650]
OTHERS = "it answered for other clients than those that were asked"


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        ({"status": [1, 1, 1]}, OTHERS),
        ({"status": [1, 0, 0]}, OTHERS),
        ({"totals": [[0.0]]}, "it sent sums for 1 models of 2"),
        ({"totals": TOO_LONG}, "its sum for model 1 has norm 102, over the bound 55 of its clients"),
        ({"totals": [[0.0] * 650, [1e300] * 650]}, "its sum for model 1 has norm inf, over the bound 55 of its clients"),
    ],
)
def test_an_aggregator_whose_answer_does_not_fit_loses_its_group_for_the_round(added, capsys, lies, words):
    """It ended the run, also where the quorum was met without its clients."""
    assert added(**lies) == ({0: 0}, [UNIT, 0.0])
    assert capsys.readouterr().out == f"aggregator 1 is out of round 0: {words}\n"
    with pytest.raises(RunFailed, match=rf"^round 0: 1 of 3 clients answered, .*; client 2 and 1 more: aggregator 1: {words}$"):
        added(quorum=1.0, **lies)


@pytest.mark.parametrize(
    ("release", "code"),
    [
        (
            {"update": np.float32([1, 1]), "update.index": np.int32([3, 3])},
            "encoding",
        ),  # the server ended while it decoded them
        ({"update": np.float32([99, 99]), "update.index": np.int32([3, 4])}, "norm"),
    ],
)
def test_an_aggregator_that_passes_on_what_no_server_accepts_of_a_client_is_refused(tmp_path, release, code):
    up = {"form": "top-k", "fraction": 2 / 650}
    make_keys(tmp_path, 5, 2)
    job = make_job(configuration.resolve({"name": "tree", **settings({"name": "global"}, communication={"up": up})}), tmp_path)
    messages, status = wire.GroupMessages(job.algorithm), np.array([wire.MISSING, wire.ANSWERED, wire.ANSWERED])
    good = {"update": np.float32([1, 1]), "update.index": np.int32([3, 4])}

    def answer(*releases):
        return {wire.STATUS: status} | {name: np.stack([one[name] for one in releases]) for name in good}

    messages.check_answer(1, "train", answer(good, good))
    with pytest.raises(Refused, match=f"^{code}: "):
        messages.check_answer(1, "train", answer(good, release))


def test_an_answer_that_a_crash_lost_counts_towards_the_quorum_also_behind_an_aggregator(added):
    lost, missing = [1, 2, 0], [1, 3, 0]
    assert added(quorum=1.0, status=lost) == ({0: 0, 2: 1}, [UNIT, 5 * UNIT])
    with pytest.raises(RunFailed, match="2 of 3 clients answered"):
        added(quorum=1.0, status=missing)


def _match(arrays, template):
    match_template([(key, a.dtype.kind + str(a.dtype.itemsize), a.shape, a.nbytes) for key, a in arrays.items()], template)


def test_an_aggregator_at_a_wrong_address_says_so_while_its_clients_are_away(finished, tmp_path):
    done = dpcfl(
        "aggregator", finished / "protocol.json", "--number", "0", "--bind", "tcp://127.0.0.1:*", "--connect", "tcp://127.0.0.1:1",
        "--keys", finished / "keys", "--operator-key", finished / "operator.pub", "--out", tmp_path, "--orphan-timeout", "1",
    )  # fmt: skip
    listening, failed = done.stderr.splitlines()
    assert "listening at tcp://127.0.0.1:" in listening
    assert (done.returncode, failed) == (4, "error: nothing was heard from the coordinator at tcp://127.0.0.1:1 for 1 s")


class Silent:
    """An end of a connection to a coordinator that does not answer."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def register(self, source, handle):
        pass

    def heartbeat(self, phase):
        raise RunFailed("the coordinator is silent")


def test_an_aggregator_whose_coordinator_is_lost_ends_with_and_without_a_task():
    """It would wait for ever for the next task."""
    with contextlib.closing(Uplink(Silent())) as uplink:
        uplink._thread.join(60)
        for look in (uplink.newest, uplink.check):
            with pytest.raises(RunFailed, match=r"^the coordinator is silent$"):
                look()


def test_an_aggregator_hears_its_clients_between_tasks_and_answers_those_of_the_coordinator():
    done, task = [], ClientEvent("task", id="i", round=3, task="train", tensors={})
    events = iter([False, task, False, None])
    uplink = SimpleNamespace(newest=lambda: next(events), answer=lambda *answer: done.append(answer))
    fed = SimpleNamespace(idle=lambda seconds: done.append("hears"), answer=lambda *about: about)
    _serve(fed, uplink)
    assert done == ["hears", ("i", (3, "train", {})), "hears"]


def test_an_aggregator_that_the_job_does_not_have_is_named(finished, tmp_path):
    files = RunFolder(finished)
    spec = AggregatorSpec(
        files.protocol, 2, read_operator_key(files.operator_key), "tcp://127.0.0.1:*", "tcp://127.0.0.1:1", files.keys, tmp_path
    )
    with pytest.raises(ConfigError, match="--number is 2: the job has 2 aggregators, numbered from 0"):
        run_aggregator(spec)
    assert not [*tmp_path.iterdir()]


def test_the_quorum_counts_the_clients_whose_aggregators_have_joined(finished, monkeypatch):
    algorithm, joined = job_of(finished).algorithm, SimpleNamespace(ready={1})

    def fed(quorum):
        return TreeFederation(algorithm, joined, CallLimits(quorum=quorum), NO_LAUNCHER, print)

    monkeypatch.setattr(GroupCalls, "join", lambda *_: None)
    assert fed(0.6).live == 3
    fed(0.6).join()
    said = r"^the aggregators of 3 of 5 clients have joined, the quorum is 4 \(runtime\.quorum is 0\.8\)$"
    for t in (1, algorithm.protocol.rounds):
        with pytest.raises(RunFailed, match=said):
            fed(0.8).join(t)
    fed(0.8).join(algorithm.protocol.rounds + 1)  # all rounds are done: aggregators were told to leave

    seen, warned = [], []

    def late(calls, t):
        seen.append((calls.quorum, calls.timeout_s, calls.join_timeout_s))
        calls._warn("clients [0] have not joined")
        raise RunFailed("clients [0] did not join within 4 s")

    monkeypatch.setattr(GroupCalls, "join", late)
    for quorum in (1.0, 0.8):
        limits = CallLimits(quorum, timeout_s=3.0, join_timeout_s=2.0)
        with pytest.raises(RunFailed, match=r"^aggregators \[0\] did not join within 4 s$"):
            TreeFederation(algorithm, joined, limits, NO_LAUNCHER, warned.append).join()
    assert seen == [(1.0, 6.0, 4.0), (0.0, 6.0, 4.0)]  # aggregators wait for their clients as long as one server would
    assert warned == 2 * ["aggregators [0] have not joined"]


def test_an_aggregator_of_this_machine_restarts_at_its_address_and_is_told_its_lost_clients(tmp_path, monkeypatch):
    files, specs, pipes = RunFolder(tmp_path), [], []
    files.addresses.mkdir()
    files.address("coordinator").write_text("tcp://127.0.0.1:4700")
    files.operator_key.write_text("0" * 64)
    aggregators = LocalAggregators(files, RuntimeSettings(), [range(2), range(2, 5)], "tcp://127.0.0.1:*")

    def fork(title, start, log, descriptors):
        specs.append(json.loads(start.argument))
        pipes.append(Connection(os.dup(descriptors[0]), writable=False))

    monkeypatch.setattr(parents, "fork_role", fork)
    for number in (0, 1, 1):
        aggregators.start(f"aggregator_000{number}")
        files.address(f"aggregator_000{number}").write_text(f"tcp://127.0.0.1:471{number}")
    assert [(spec["number"], spec["bind"], spec["connect"]) for spec in specs] == [
        (0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:4700"), (1, "tcp://127.0.0.1:*", "tcp://127.0.0.1:4700"),
        (1, "tcp://127.0.0.1:4711", "tcp://127.0.0.1:4700"),
    ]  # fmt: skip
    assert aggregators.addresses() == {c: f"tcp://127.0.0.1:471{int(c > 1)}" for c in range(5)}
    aggregators.tell_again("aggregator_0001", [4, 0, 2])
    aggregators.close()
    heard = []
    for pipe in pipes:
        heard.append([])
        with pipe, contextlib.suppress(EOFError):
            while True:
                assert pipe.poll(20), "it is still open"
                heard[-1].append(pipe.recv_bytes())
    assert heard == [[], [], [b"2", b"4"]]


def start(out, algorithm=None, **changes):
    path = write_config(out / "c", **settings(algorithm, **changes))
    return subprocess.Popen(
        [*DPCFL, "run", str(path), "--out", str(out / "runs")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def rounds_done(out):
    return sum(len(server_lines(path.parent)) for path in (out / "runs").glob("*/metrics.jsonl"))


def kill(run, title):
    """Kill a process of a run with SIGKILL."""
    for process in psutil.Process(run.pid).children(recursive=True):
        if re.search(rf"\b{title}\b", command_line(process)):
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"there is no process {title}")


def until_round(run, out, t, limit_s=100):
    deadline = time.monotonic() + limit_s
    while rounds_done(out) < t:
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("title", ["aggregator_0000", "aggregator_0001", "coordinator"])
def test_a_killed_process_starts_again_and_changes_no_bit(tmp_path, title):
    run = start(tmp_path, rounds=40, local={"batch_size": 8, "lr": 0.5, "epochs": 4}, runtime={"max_restarts": 5})
    for t in (1, 5):
        until_round(run, tmp_path, t)
        kill(run, title)
        time.sleep(1)
    output = run.communicate(timeout=150)[0]
    assert run.returncode == 0, output
    folder = only_run(tmp_path / "runs")
    assert sum(title in line["text"] for line in runlog.read(folder / "warnings.jsonl")) >= 2
    assert_bits_of_one_process(folder, tmp_path / "again")
    assert_nothing_left(folder)


@pytest.mark.slow
def test_a_run_without_restarts_can_be_resumed(tmp_path):
    run = start(tmp_path, rounds=40, local={"batch_size": 8, "lr": 0.5, "epochs": 4}, runtime={"max_restarts": 0})
    until_round(run, tmp_path, 3)
    kill(run, "aggregator_0001")
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 4, output
    folder = only_run(tmp_path / "runs")
    assert dpcfl("run", "--resume", folder).returncode == 0
    assert_bits_of_one_process(folder, tmp_path / "again")


@pytest.mark.slow
def test_a_lost_client_is_missing_and_the_others_go_on(tmp_path):
    run = start(tmp_path, {"name": "global"}, rounds=40, local={"batch_size": 8, "lr": 0.5, "epochs": 4},
                runtime={"max_restarts": 0, "quorum": 0.5})  # fmt: skip
    until_round(run, tmp_path, 3)
    kill(run, "client 3")
    output = run.communicate(timeout=100)[0]
    assert run.returncode == 0, output
    lines = server_lines(only_run(tmp_path / "runs"))
    assert (len(lines), lines[-1]["missing"], lines[-1]["answered"]) == (40, [3], 4)


@pytest.mark.slow
def test_a_dry_run_and_a_job_need_no_keys_of_aggregators(tmp_path):
    config = write_config(tmp_path / "c", **settings())
    for words in (["run", config, "--dry-run"], ["job", config, "--out", tmp_path / "job"]):
        done = dpcfl(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(job_of(tmp_path / "job").protocol.aggregators) == 2


@pytest.mark.slow
def test_the_clients_of_a_lost_aggregator_are_missing_and_the_others_go_on(tmp_path):
    run = start(tmp_path, {"name": "global"}, rounds=40, local={"batch_size": 8, "lr": 0.5, "epochs": 4},
                runtime={"max_restarts": 0, "quorum": 0.4})  # fmt: skip
    until_round(run, tmp_path, 3)
    kill(run, "aggregator_0001")
    output = run.communicate(timeout=200)[0]
    assert run.returncode == 0, output
    folder = only_run(tmp_path / "runs")
    lines, told = server_lines(folder), [line["text"] for line in runlog.read(folder / "warnings.jsonl")]
    assert (len(lines), lines[-1]["missing"], lines[-1]["answered"]) == (40, [2, 3, 4], 2)
    assert any("lost for the rest of the run, with its clients 2 to 4" in text for text in told)
    assert_nothing_left(folder)


@pytest.mark.slow
def test_a_coordinator_that_restarts_counts_the_clients_of_aggregators_and_not_aggregators(tmp_path):
    run = start(tmp_path, {"name": "global"}, rounds=200, local={"batch_size": 8, "lr": 0.5, "epochs": 4},
                runtime={"aggregators": [4, 1], "max_restarts": 1, "quorum": 0.8})  # fmt: skip
    for t in (2, 4):
        until_round(run, tmp_path, t)
        kill(run, "aggregator_0001")
        time.sleep(3)
    until_round(run, tmp_path, 6)
    kill(run, "coordinator")
    output = run.communicate(timeout=200)[0]
    assert run.returncode == 0, output
    lines = server_lines(only_run(tmp_path / "runs"))
    assert (lines[-1]["round"], lines[-1]["missing"], lines[-1]["answered"]) == (200, [4], 4)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"name": "oracle"}, {"name": "dp-ifca", "clusters": 2}, {"name": "mr-mtl"}])
def test_other_algorithms_and_forms_have_the_bits_of_one_process(tmp_path, algorithm):
    up = {"form": "top-k", "fraction": 0.2, "error_feedback": True}
    changes = {"communication": {"down": "bfloat16", "up": up}, "runtime": {"aggregators": 3}}
    done = dpcfl("run", write_config(tmp_path / "c", **settings(algorithm, **changes)), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_bits_of_one_process(only_run(tmp_path / "runs"), tmp_path / "again")


@pytest.mark.slow
def test_processes_that_are_started_manually(tmp_path):
    keys, job = tmp_path / "keys", tmp_path / "job"
    assert dpcfl("keygen", keys, "--clients", 5, "--aggregators", 2).returncode == 0
    assert dpcfl("job", write_config(tmp_path / "c", **settings()), "--out", job, "--keys", keys).returncode == 0
    given = ["--keys", keys, "--operator-key", job / "operator.pub"]
    running = []

    def begin(role, *arguments):
        command = [*DPCFL, role, *map(str, [*arguments, *given])]
        running.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}))

    def address(folder, role):
        path, deadline = folder / "addresses" / role, time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return path.read_text()

    try:
        run, anywhere = tmp_path / "run", ("--bind", "tcp://127.0.0.1:*")
        begin("coordinator", job / "protocol.json", *anywhere, "--out", run)
        root = address(run, "coordinator")
        for number, group in enumerate(([0, 1], [2, 3, 4])):
            out = tmp_path / f"host {number}"
            begin("aggregator", job / "protocol.json", "--number", number, *anywhere, "--connect", root, "--out", out)
            host = address(out, f"aggregator_000{number}")
            for client in group:
                begin("worker", job, "--client", client, "--connect", host, "--ledgers", out / "ledgers")
        assert [process.wait(timeout=120) for process in running] == [0] * 8
    finally:
        for process in running:
            process.kill()
            process.wait()
    _, state = last_state(run)
    alone = simulate(job_of(job), tmp_path / "again")
    assert np.array_equal(state.models.view("u4"), alone.models.view("u4"))
    assert not (run / "transcript.msgpack").exists()  # it would hold messages of aggregators, which no ledger charges


@pytest.mark.parametrize("kind", ["headers", "full"])
def test_a_coordinator_with_aggregators_refuses_a_transcript(finished, tmp_path, kind):
    job = ("--keys", finished / "keys", "--operator-key", finished / "operator.pub", "--out", tmp_path / "run")
    listening = ("--bind", "tcp://127.0.0.1:*", "--join-timeout", 1, "--pause", 0)
    done = dpcfl("coordinator", finished / "protocol.json", *job, *listening, "--transcript", kind)
    assert done.returncode == 2, done.stderr
    assert f"transcript is {kind!r}: must be 'off'" in done.stderr
    assert not (tmp_path / "run" / "transcript.msgpack").exists()


def test_a_coordinator_with_aggregators_writes_no_transcript_of_its_own_accord(finished, tmp_path):
    run = tmp_path / "run"
    job = ("--keys", finished / "keys", "--operator-key", finished / "operator.pub", "--out", run)
    listening = ("--bind", "tcp://127.0.0.1:*", "--join-timeout", 1, "--pause", 0)
    done = dpcfl("coordinator", finished / "protocol.json", *job, *listening)
    assert done.returncode == 4, done.stderr  # nobody joined
    assert not (run / "transcript.msgpack").exists()


def test_a_task_cannot_stay_open_with_aggregators(finished):
    """A user's algorithm that asked for it ended with an error that had no message."""
    algorithm = job_of(finished).algorithm
    fed = TreeFederation(algorithm, None, CallLimits(quorum=0.0), NO_LAUNCHER, print)
    means = ModelMeans(np.zeros((2, algorithm.protocol.model.parameters), np.float32))
    with pytest.raises(RunFailed, match=r"^round 0: client step 'train' gives no 'choice'"):
        fed.add_up(algorithm.train, means)
    for ask in (lambda: fed.submit(Participation(0, 1, "train", {})), fed.next_outcome):
        with pytest.raises(RunFailed, match=r"tasks cannot stay open with runtime\.aggregators"):
            ask()
