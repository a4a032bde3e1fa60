"""Availability by schedule: who is asked, what is charged, and how a client that joins late gets its cluster."""

from __future__ import annotations

import contextlib
import io
import math
from collections import Counter

import pytest
import run_results
from conftest import SMALL, only_run, write_config
from simulate import simulate
from test_algorithms import TINY, changes_of

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import canonical
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.claim import claimed_events, verify_claim
from dpcfl_net.launch.cli import run as runs
from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.slots import DPSGDSlot, SelectionSlot
from dpcfl_net.results import summary
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.one_process import federation
from dpcfl_net.transport.keys import client_key, make_keys

ROUNDS = 8  # r-dpcfl: E_c at most 4, a window of one round
TWINS = (
    "rc-dpfl",
    "dp-ifca",
    "f-cdpfl-private",
    "global",
    "local",
    "mr-mtl",
    "oracle",
    "km-cdpfl",
)  # of the case that runs by default
SAMPLE_LEVEL = ["r-dpcfl", *(pytest.param(case, marks=pytest.mark.slow) for case in TWINS)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 4)
    return folder


def job_of(keys, case, clients, rounds=ROUNDS, **changes):
    privacy = {**SMALL["privacy"], "accountant": "rdp"}  # calibrates faster
    document = {
        **SMALL,
        **changes_of(case),
        "rounds": rounds,
        "privacy": privacy,
        "availability": {"clients": clients},
        **changes,
    }
    return make_job(config.resolve(document), keys)


def charged(folder, client):
    """(round, kind) and slots of each debit of a client."""
    ledger = read_ledger(folder / "ledgers" / client_key(client))
    return [(entry.round, entry.kind, entry.slots) for entry in ledger if entry.type == "debit"]


def planned(job, client):
    return Counter(slot.name for slot in job.algorithm.plan(job.protocol.client(client)))


@pytest.mark.parametrize("case", SAMPLE_LEVEL)
def test_a_client_answers_and_pays_only_in_its_rounds_and_its_plan_is_what_it_does(keys, case, tmp_path):
    job = job_of(keys, case, {1: [[1, 3], [7, None]], 2: [[6, 8]]})
    simulate(job, tmp_path)
    assert [t for t, _, _ in charged(tmp_path, 0)] == [*range(1, 9)]
    assert [t for t, _, _ in charged(tmp_path, 1)] == [1, 2, 3, 7, 8]
    assert [t for t, _, _ in charged(tmp_path, 2)] == [6, 7, 8]
    for client in (0, 1, 2):
        spent = Counter(name for _, _, slots in charged(tmp_path, client) for name in slots)
        assert spent <= planned(job, client)
        assert spent["train"] + spent["first"] == planned(job, client)["train"] + planned(job, client)["first"]
    z = {client: job.protocol.client(client).noise_multiplier for client in (0, 1, 2)}
    assert z[2] < z[1] < z[0]  # fewer rounds at the same epsilon


def test_em_fdro_plans_a_loss_and_an_update_for_each_round_that_a_client_is_there(keys, tmp_path):
    """Its noise was that of all rounds, also of those in which a client is away. All clients are drawn in each round."""
    privacy = {**SMALL["privacy"], "unit": "client", "adjacency": "replace-one", "delta": 1e-2}  # calibrates fast
    job = job_of(keys, "em-fdro", {1: [[1, 2]], 2: [[2, 2], [4, None]]}, rounds=4, privacy=privacy)
    simulate(job, tmp_path)
    for client, rounds, first in ((0, 4, 1), (1, 2, 1), (2, 2, 0)):
        spent = Counter(name for _, _, slots in charged(tmp_path, client) for name in slots)
        assert spent == planned(job, client) == {"loss": rounds + first, "update": rounds}
    z = [job.protocol.client(client).noise_multiplier for client in (0, 1, 2)]
    assert z[2] < z[1] < z[0]


LATE = {3: [[7, 8]]}  # after the window of any E_c


def test_the_plan_of_a_late_client_is_one_choice_and_its_rounds_and_its_epsilon_is_the_target(keys, tmp_path):
    """No full-batch release is in the plan; noise is calibrated for exactly one selection and two rounds of training."""
    privacy = {**SMALL["privacy"], "noise": "os"}
    del privacy["noise_seed"]
    job = job_of(keys, "r-dpcfl", LATE, privacy=privacy)
    late, usual = job.protocol.client(3), job.protocol.client(0)
    plan = job.algorithm.plan(late)
    steps = math.ceil(late.records / job.protocol.local.batch_size)
    assert planned(job, 3) == {"train": 2, "select": 1}
    assert planned(job, 0) == {"first": 1, "train": 7, "select": 1}
    assert {slot.steps for slot in plan if isinstance(slot, DPSGDSlot)} == {steps}
    (selection,) = [slot for slot in plan if isinstance(slot, SelectionSlot)]
    assert selection in job.algorithm.plan(usual)
    for client in (0, 3):
        target = job.protocol.privacy
        epsilon = accountant.epsilon(claimed_events(job.algorithm, client), target.delta, adjacency=target.adjacency)
        assert 0.98 * target.epsilon <= epsilon <= target.epsilon
    # The client refuses a job with less noise.
    cheap = late.model_copy(update={"noise_multiplier": 0.9 * late.noise_multiplier})
    forged = job.protocol.model_copy(update={"roster": [*job.protocol.roster[:3], cheap]})
    with pytest.raises(Refused, match="costs client 3 epsilon"):
        verify_claim(type(job.algorithm)(forged), 3, tmp_path / "claims")


@pytest.mark.parametrize(("case", "first"), [pytest.param("r-dpcfl", 7, marks=pytest.mark.slow), ("dp-ifca", 4)])
def test_a_late_client_chooses_once_by_the_exponential_mechanism_and_its_gate_gives_no_second_choice(
    keys, case, first, tmp_path
):
    job = job_of(keys, case, {3: [[first, 8]]}, local={"batch_size": 20, "lr": 2.0})
    states = {}
    simulate(job, tmp_path, on_round=lambda t, state: states.update({t: state}))
    kinds = [(t, kind) for t, kind, _ in charged(tmp_path, 3)]
    assert kinds == [(first, "select_and_train"), *((t, "train") for t in range(first + 1, 9))]
    assert states[first].assignment[3] == states[8].assignment[3]
    with federation(job, tmp_path / "ledgers") as fed:
        answer = fed.hosts[3].answer(Task(8, "select_and_train", {"models": states[8].models}))
        assert (answer.status, answer.code) == ("refused", "quota")
        refused = fed.hosts[3].answer(Task(8, "first_round_update", {"model": states[8].models[0]}))
        assert (refused.status, refused.code) == ("refused", "unknown-kind")


def test_who_was_there_before_the_window_but_not_in_it_joins_in_its_next_round(keys):
    """Rounds 1 to 4 are before the window, round 5 is the window. Client 2 chose in it and is away afterwards."""
    job = job_of(keys, "r-dpcfl", {1: [[1, 4], [7, 8]], 2: [[1, 5], [8, 8]], 3: [[8, 8]]})
    assert [job.algorithm.joining(t, 4) for t in (6, 7, 8)] == [[], [1], [3]]


def test_a_silent_late_client_keeps_its_drawn_cluster_and_is_not_waited_for(keys, tmp_path, monkeypatch):
    job = job_of(keys, "r-dpcfl", LATE)
    from dpcfl_net.federation import client_host

    whole = client_host.ClientHost.answer

    def silent(self, task):
        if (self.client, task.round) == (3, 7):
            return type(whole(self, task))("refused", code="busy", reason="not now")
        return whole(self, task)

    monkeypatch.setattr(client_host.ClientHost, "answer", silent)
    states = {}
    simulate(job, tmp_path, on_round=lambda t, state: states.update({t: state}))
    assert [kind for _, kind, _ in charged(tmp_path, 3)] == ["select_and_train", "train"]
    assert states[7].assignment[3] == states[6].assignment[3]


def test_processes_and_one_process_agree_on_a_schedule(tmp_path):
    changes = {**changes_of("r-dpcfl"), "rounds": ROUNDS, "availability": {"clients": {**LATE, 0: [[1, 2], [5, 8]]}},
               "privacy": {**SMALL["privacy"], "accountant": "rdp"}}  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code, *_ = runs.new_run(write_config(tmp_path / "c", **changes), [], tmp_path / "runs")
    assert code == 0, said.getvalue()
    folder = only_run(tmp_path / "runs")
    job = run_results.job_of(folder)
    state = simulate(job, tmp_path / "one")
    _, found = run_results.last_state(folder)
    assert found.models.tobytes() == state.models.tobytes()
    assert found.assignment == state.assignment
    lines = [line for line in runlog.read(folder / "metrics.jsonl") if "bytes_up" in line]
    assert {line["round"]: line["away"] for line in lines} == {
        1: [3], 2: [3], 3: [0, 3], 4: [0, 3], 5: [3], 6: [3], 7: [], 8: []
    }  # fmt: skip
    clusters = {line["round"]: line for line in runlog.read(folder / "clusters.jsonl") if line["view"] == "server"}
    assert [clusters[t]["assignment"][3] for t in range(1, 9)] == [None] * 6 + [
        state.assignment[3]
    ] * 2  # none yet, then chosen
    assert [sum(clusters[t]["diagnostics"]["sizes"]) for t in range(1, 9)] == [3] * 6 + [4] * 2
    assert all(None not in clusters[t]["assignment"][:3] for t in range(1, 9))
    assert all((line["missing"], line["late"], line["paused_s"]) == ([], [], 0) for line in lines)
    assert not [check for check in verify_run(folder, None) if check.holds is False]
    assert summary.read_document(folder)["state"] == "finished"


def test_jobs_without_a_schedule_hold_no_new_field(keys):
    document = {**SMALL, **TINY, "algorithm": {"name": "global"}}
    usual = make_job(config.resolve(document), keys)
    assert not [line for line in usual.protocol.roster.lines() if b'"rounds":[' in line]
    assert "availability" not in config.resolve(document).model_dump(mode="json")
    always = make_job(config.resolve({**document, "availability": {"clients": {1: [[1, None]]}}}), keys)
    assert canonical(always.protocol) == canonical(usual.protocol)
    some = make_job(config.resolve({**document, "availability": {"clients": {1: [[2, None]]}}}), keys)
    assert some.protocol.client(1).rounds == [(2, 4)]
    assert len([line for line in some.protocol.roster.lines() if b'"rounds":[' in line]) == 1


def test_a_file_and_inline_spans_are_the_same_schedule_and_the_saved_configuration_needs_no_file(tmp_path):
    file = tmp_path / "away.csv"
    file.write_text("client,from_round,to_round\n1,1,1\n1,3,\n\n2,2,4\n")
    document = {**SMALL, **TINY, "algorithm": {"name": "global"}}
    read = config.resolve({**document, "availability": {"file": str(file), "clients": {0: [[2, 4]]}}})
    inline = config.resolve({**document, "availability": {"clients": {0: [[2, 4]], 1: [[1, 1], [3, None]], 2: [[2, 4]]}}})
    assert read.availability.clients == inline.availability.clients
    saved = read.model_dump(mode="json", exclude={"algorithms"})
    file.unlink()
    assert config.resolve(saved).availability == read.availability


@pytest.mark.parametrize(
    ("availability", "words"),
    [
        ({"clients": {9: [[1, 2]]}}, "availability.clients names client 9: must be 0 to 3"),
        ({"clients": {0: [[3, 2]]}}, "availability.clients.0 holds [3, 2]: must be 1 <= from_round <= to_round <= 4"),
        ({"clients": {0: [[2, 5]]}}, "must be 1 <= from_round <= to_round <= 4"),
        ({"clients": {0: [[1, 3], [2, 4]]}}, "overlap; must be disjoint"),
        ({"clients": {0: []}}, "must be at least one span"),
        ({"clients": {client: [[2, 4]] for client in range(4)}}, "leaves no client in round 1"),
        ({"clients": {0: [[1]]}}, "availability.clients"),
        ({"clients": {0: [[0, 2]]}}, "availability.clients"),
        ({"file": "nowhere.csv"}, "availability.file: cannot read nowhere.csv: no such file or folder"),
        ({"file": "/dev/null"}, "availability.file: cannot read /dev/null: is a device, not a file"),
    ],
)
def test_an_impossible_schedule_is_refused(availability, words):
    with pytest.raises(ConfigError) as caught:
        config.resolve({**SMALL, **TINY, "algorithm": {"name": "global"}, "availability": availability})
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,from,to\n", "must be client,from_round,to_round"),
        ("client,from_round,to_round\n1,x,2\n", "line 2 is '1,x,2'"),
        (f"client,from_round,to_round\n{'1' * 200_000},1,2\n", "a.csv: field larger than field limit"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, text, words):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.resolve({**SMALL, **TINY, "algorithm": {"name": "global"}, "availability": {"file": str(tmp_path / "a.csv")}})
    assert words in str(caught.value)


def test_r_dpcfl_needs_enough_clients_in_its_first_round():
    late = {"clients": {i: [[2, 4]] for i in range(3)}}
    document = {**SMALL, **TINY, "availability": late}
    for clusters, least in ((2, 2), ("auto", 2)):
        with pytest.raises(ConfigError, match=f"availability leaves 1 clients in round 1: must leave at least {least}"):
            config.resolve({**document, "algorithm": {"name": "r-dpcfl", "clusters": clusters}})
    assert config.resolve({**document, "algorithm": {"name": "r-dpcfl", "clusters": 1}})
