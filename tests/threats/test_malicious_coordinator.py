"""A server that has turned malicious, against real workers, and the same script against one with its defences off."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import DPCFL, ROOT, assert_nothing_left
from leak_scan import Secrets, scan, secrets_of, view
from wire_ends import JOB, RUN, more, open_things

from dpcfl_net.adversaries import hostile_connection, hostile_worker, malicious_coordinator, malicious_sums
from dpcfl_net.adversaries.hostile_connection import HostileConnection, Target
from dpcfl_net.adversaries.malicious_coordinator import MaliciousCoordinator
from dpcfl_net.adversaries.malicious_steps import SCRIPT, make, round_number, usual_step
from dpcfl_net.adversaries.reactions import Heard
from dpcfl_net.adversaries.scripts import chosen, run, verdict
from dpcfl_net.core import signing
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.types import Task
from dpcfl_net.experiment.job_files import Job, read_job, write_job
from dpcfl_net.federation.engine import Engine
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.results.split_models import given, other_than_charged, split_models
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.training.batches import poisson_rows
from dpcfl_net.transport import keys
from dpcfl_net.transport.keys import COORDINATOR, client_key, make_keys
from dpcfl_net.transport.messages import decode, encode
from dpcfl_net.transport.peers import ServerEvent
from dpcfl_net.transport.transcript import Transcript, messages, read

HONEST, CARELESS = (0, 1), 2
SPIED = [
    sys.executable, "-c",
    "import sys\nfrom dpcfl_net.runtime import client_hosts\nreal = client_hosts.client_records\n"
    "def noted(*which):\n    print('records opened', file=sys.stderr, flush=True)\n    return real(*which)\n"
    "client_hosts.client_records = noted\nfrom dpcfl_net.launch.cli import main\nmain()",
]  # fmt: skip
STEPS = {step.name: step for step in SCRIPT}
PLAYED = [step.name for step in SCRIPT if step.name != "other-job"]


def operator(folder):
    return (folder / "operator.pub").read_text().strip()


def job_of(folder) -> Job:
    return read_job(folder, operator(folder))


def worker(job, client, address, ledgers, log, prefix=DPCFL):
    """A worker process; its words go to `log`."""
    command = [
        *prefix, "worker", job, "--client", client, "--connect", address, "--keys", job / "keys", "--operator-key",
        job / "operator.pub", "--ledgers", ledgers, "--orphan-timeout", 60,
    ]  # fmt: skip
    return subprocess.Popen([*map(str, command)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log.open("w"))


@dataclass(frozen=True)
class Played:
    """The played script: reactions by step and client, and how all processes ended."""

    job: Job
    folder: Path
    report: str
    outcomes: dict[tuple[str, int], dict]
    codes: dict[str | int, int]

    def said(self, client):
        return (self.folder / f"client_{client}.log").read_text()

    def honest(self, *names):
        return [self.outcomes[name, client] for name in names for client in HONEST]

    def careless(self, *names):
        return [self.outcomes[name, CARELESS] for name in names]


def refused(outcomes):
    """The codes of steps that were all refused, released nothing and cost nothing."""
    for outcome in outcomes:
        assert (outcome["answer"], outcome["blake3"]) == ("refused", ""), outcome
        assert outcome["charges"][0] == outcome["charges"][1], outcome
        assert outcome["holds"], outcome
    return ", ".join(dict.fromkeys(outcome["code"] for outcome in outcomes))


def answered(outcomes):
    """Steps that a careless worker answered with bytes it had not sent before, each charged."""
    for outcome in outcomes:
        assert (outcome["answer"], outcome["repeated"], outcome["holds"]) == ("release", False, False), outcome
        assert outcome["charges"][1] == outcome["charges"][0] + 1, outcome
    return len(outcomes)


@pytest.fixture(scope="module")
def played(finished_run, tmp_path_factory):
    """The malicious server's own command against two real workers and a careless one, each a process."""
    folder = tmp_path_factory.mktemp("malicious")
    ledgers, started = folder / "ledgers", {}
    door = [sys.executable, "-m", "dpcfl_net.adversaries.malicious_coordinator", finished_run, "--keys", finished_run / "keys"]
    door += ["--clients", "0,1,2", "--ledgers", ledgers, "--out", folder, "--steps", ",".join(PLAYED)]
    server = subprocess.Popen(
        [*map(str, door)], cwd=ROOT, stdout=subprocess.PIPE, text=True, stderr=(folder / "coordinator.log").open("w")
    )
    try:
        address = server.stdout.readline().removeprefix("listening on ").strip()
        careless = [sys.executable, ROOT / "tests" / "threats" / "careless_worker.py"]
        for client, prefix in ((0, SPIED), (1, DPCFL), (2, careless)):
            log = folder / f"client_{client}.log"
            started[client] = worker(finished_run, client, address, ledgers, log, prefix)
        report, _ = server.communicate(timeout=180)
        codes = {client: process.wait(60) for client, process in started.items()}
    finally:
        for process in (server, *started.values()):
            process.kill()
            process.wait()
    assert_nothing_left(folder)
    outcomes = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
    by_step = {(outcome["step"], outcome["client"]): outcome for outcome in outcomes}
    return Played(job_of(finished_run), folder, report, by_step, {**codes, "server": server.returncode})


# The script itself


def test_real_workers_hold_at_every_step_and_the_careless_one_does_not(played):
    assert (played.codes[0], played.codes[1]) == (0, 0), played.said(0) + played.said(1)
    assert played.codes["server"] == 3
    assert all(outcome["holds"] for outcome in played.honest(*PLAYED))
    assert "DOES NOT HOLD" in played.report
    assert [outcome["charges"] for outcome in played.honest("honest", "again")] == [[0, 1], [0, 1], [1, 1], [1, 1]]
    for client in HONEST:
        charges = read_ledger(played.folder / "ledgers" / client_key(client))
        assert [entry.round for entry in charges if entry.type == "debit"] == [1, 3, 4, 5]
        assert [played.outcomes[step, client]["round"] for step in PLAYED if STEPS[step].pays] == [1, 3, 4, 5]


def test_a_script_is_checked_before_it_is_played():
    with pytest.raises(ConfigError, match=r"unknown step 'gift'.*honest, again"):
        chosen("honest,gift", SCRIPT)
    assert chosen("all", SCRIPT) == list(SCRIPT)
    with pytest.raises(ConfigError, match="no last round"):
        round_number("last", [], 6)
    assert [round_number(which, [1, 3, 4], 6) for which in ("next", "skip", "previous", "first", "left-out", "beyond")] == [
        5, 6, 3, 1, 2, 7,
    ]  # fmt: skip


def test_a_folder_without_the_ledger_of_a_connected_client_is_an_error(finished_run, tmp_path):
    """With another folder every step would seem to cost nothing, and every client to hold."""
    protocol, key_folder = job_of(finished_run).protocol, finished_run / "keys"
    with (
        MaliciousCoordinator(
            protocol, "tcp://127.0.0.1:*", key_folder, clients=[0], ledgers=tmp_path / "elsewhere", wait_s=20
        ) as server,
        HostileConnection(Target.of(protocol, 0, server.address, key_folder)) as client,
    ):
        client.say("HELLO", client=0)
        assert server.join() == []
        with pytest.raises(ConfigError, match=r"ledger\.jsonl is missing although client 0 is connected"):
            server.play(STEPS["honest"])


@pytest.mark.parametrize(
    ("pays", "answer", "charges", "repeated", "holds"),
    [
        (True, "release", (0, 1), False, True), (True, "release", (0, 0), True, True), (True, "release", (0, 2), False, False),
        (True, "refused", (0, 0), False, False), (True, "gone", (0, 0), False, False),
        (False, "refused", (3, 3), False, True), (False, "silence", (3, 3), False, True), (False, "refused", (3, 4), False, False),
        (False, "release", (3, 3), True, True), (False, "release", (3, 3), False, False), (False, "release", (3, 4), True, False),
        (False, "unusable", (3, 3), False, False), (False, "gone", None, False, True), (False, "release", None, False, False),
    ],
)  # fmt: skip
def test_a_client_holds_if_it_sends_no_new_bytes_and_charges_nothing_that_the_plan_does_not_pay(
    monkeypatch, pays, answer, charges, repeated, holds
):
    server = object.__new__(MaliciousCoordinator)
    heard = Heard(answer, tensors={"update": np.ones(3, np.float32)} if answer == "release" else {})
    server._seen, server._usual, before = set(), SimpleNamespace(kind="train"), None
    if charges is not None:
        before = charges[0]
    monkeypatch.setattr(server, "_charges", lambda client: None if charges is None else charges[1], raising=False)
    step = replace(STEPS["honest"], pays=pays)
    if repeated:
        server._reaction(step, 1, 0, heard, before)
    server._reaction(step, 1, 1, heard, before)  # the same bytes of another client
    found = server._reaction(step, 1, 0, heard, before)
    assert (found.holds, found.repeated, found.charges, found.task) == (holds, repeated, charges, "train")
    assert ("DOES NOT HOLD" in str(found)) != holds


def test_what_a_client_is_heard_to_say_belongs_to_its_task(monkeypatch):
    """A client that comes back is waited for. One that stays away has no task open, which it would charge during a later step."""
    server, now, ready, cancelled = object.__new__(MaliciousCoordinator), [0.0], {0, 1, 2, 3, 4, 5}, []
    events = {
        0.25: [ServerEvent("result", 0, id="before", status="release"), ServerEvent("left", 4), ServerEvent("left", 5)],
        0.5: [ServerEvent("failed", None), ServerEvent("failed", 2), ServerEvent("result", 3, id="task 0", status="release")],
        1.75: [
            ServerEvent("result", 0, id="task 0", status="refused", reason="plan: no such round: 9"), ServerEvent("joined", 5),
            ServerEvent("failed", 2, id="task 2", code="payload", reason="too short"),
            ServerEvent("failed", 3, id="task 3", code="header", reason="has a clip"),
        ],
        3.0: [ServerEvent("result", 4, id="task 4", status="release"), ServerEvent("result", 5, id="task 5", status="release")],
    }  # fmt: skip

    def poll(timeout_s):
        now[0] += timeout_s
        ready.discard(4)
        return events.get(now[0], [])

    monkeypatch.setattr(malicious_coordinator, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server.wait_s = 4.0
    server._endpoint = SimpleNamespace(
        poll=poll, ready=ready, cancel=cancelled.append, turned_down={"task 3"}, send_task=lambda client, *_: f"task {client}"
    )
    heard = server.ask(9, "train", {client: {} for client in range(7)}, {"clip": 1e9})
    assert heard == {
        0: Heard("refused", "plan", "no such round: 9"), 1: Heard("silence"), 2: Heard("unusable", "payload", "too short"),
        3: Heard("refused", "header", "has a clip"), 4: Heard("gone"), 5: Heard("release"),
    }  # fmt: skip
    assert (cancelled, now, server._endpoint.forged) == ([1, 4], [4.0], {"clip": 1e9})
    events[5.0] = [ServerEvent("result", 0, id="task 0", status="lost")]
    assert (server.ask(10, "train", {0: {}}), server._endpoint.forged) == ({0: Heard("lost")}, {})
    assert now == [5.0]  # no longer than until the last answer


def test_the_verdict_of_a_script_is_good_only_if_every_reaction_holds(capsys):
    held, broken = SimpleNamespace(holds=True), SimpleNamespace(holds=False)
    assert [verdict(reactions) for reactions in ([held, held], [held, broken], [])] == [0, 3, 3]
    assert capsys.readouterr().out == "2 of 2 reactions hold\n1 of 2 reactions hold\n0 of 0 reactions hold\n"


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        (malicious_coordinator, ["--clients", "0,x"], "--clients has 'x': must be ids of the roster, 0 to 7"),
        (malicious_coordinator, ["--clients", "8"], "--clients has '8': must be ids of the roster, 0 to 7"),
        (malicious_coordinator, ["--wait", "nan"], "argument --wait: 'nan': must be a number of seconds above 0"),
        (malicious_coordinator, ["--out", "/dev/null/out"], "error: /dev/null/out: "),
        (malicious_sums, [], "has no secure sums: its privacy.trust must be secure-aggregation"),
        (hostile_worker, ["--client", "3", "--steps", "hello", "--connect", "127.0.0.1:5700"], "must look like tcp://host:port"),
        (hostile_worker, ["--client", "3", "--steps", "hello", "--connect", "tcp://127.0.0.1:*"], "cannot connect to"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_script_are_one_line(finished_run, capsys, script, given, said):
    with pytest.raises(SystemExit) as ended:
        run(lambda: script.main([str(finished_run), "--keys", str(finished_run / "keys"), *given]))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_hostile_worker_tells_that_nothing_listens_from_silence(finished_run, capsys):
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--client", "3", "--steps", "hello, garbage*", "--connect", where, "--wait", "0.3"]
        assert hostile_worker.main([str(finished_run), "--keys", str(finished_run / "keys"), *arguments]) == 4
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["hello", "UNREACHED", "nothing", "listens", "at", where]


def test_a_hostile_worker_does_not_wait_for_ever_for_a_server_that_reads_nothing(monkeypatch):
    monkeypatch.setattr(hostile_connection, "SEND_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        target = Target(f"tcp://127.0.0.1:{stopped.getsockname()[1]}", RUN, JOB, 0, 1, security="none")
        with HostileConnection(target) as line:
            for _ in range(line.socket.sndhwm + 1):
                line.say("HEARTBEAT", code="idle")
            assert line.closed == "stalled"


# Scenarios


@pytest.mark.scenario(8)
def test_a_wrong_round_is_refused_and_costs_nothing(played, evidence):
    codes = refused(played.honest("left-out", "round-zero", "other-task"))
    assert codes == "round-order, round, unknown-task"
    evidence.got(f"a round left behind, round 0, a task of another kind: refused ({codes}), nothing charged")
    count = answered(played.careless("left-out", "round-zero"))
    evidence.control(f"without the gate's checks the {count} wrong rounds are answered and charged")


@pytest.mark.scenario(9)
def test_the_same_round_again_gets_the_same_bytes_and_one_charge(played, evidence):
    for client in HONEST:
        first, again = (played.outcomes[step, client] for step in ("honest", "again"))
        assert (again["answer"], again["blake3"], again["repeated"]) == ("release", first["blake3"], True)
        assert (first["charges"], again["charges"]) == ([0, 1], [1, 1])
    assert refused(played.honest("other-model")) == "other-content"
    evidence.got("the same bytes again, 1 charge; with another model: refused (other-content)")
    first, again = played.careless("honest", "again")
    answered([again])
    assert first["blake3"] != again["blake3"]
    answered(played.careless("other-model"))
    evidence.control("with the ledger's memory and checks off the second answer differs and is a second charge")


@pytest.mark.scenario(10)
def test_more_rounds_than_the_job_are_refused(played, evidence):
    assert played.honest("beyond")[0]["round"] == played.job.protocol.rounds + 1
    evidence.got(f"round 7 of 6: refused ({refused(played.honest('beyond'))}), nothing charged")
    answered(played.careless("beyond"))
    evidence.control("without the gate's checks round 7 of 6 is answered and charged")


@pytest.mark.scenario(11)
def test_noise_clip_or_batch_in_a_message_is_refused(played, evidence):
    steps = ("noise-field", "clip-field", "batch-field")
    refused(played.honest(*steps))
    for client in HONEST:
        for name in ("noise_multiplier", "clip", "batch_size"):
            assert f"refused a message of coordinator: schema: {name}: no field of a header" in played.said(client)
    assert refused(played.honest("extra-tensor")) == "template"
    evidence.got("unknown fields noise_multiplier, clip, batch_size: refused (schema); as a tensor: refused (template)")
    count = answered(played.careless(*steps, "extra-tensor"))
    evidence.control(f"with a schema and template that let them pass, all {count} messages are taken and answered")


@pytest.mark.scenario(12)
def test_a_changed_job_hash_is_refused_before_data_is_read(played, finished_run, tmp_path, evidence):
    assert refused(played.honest("job-field")) == "job"
    before = open_things()
    with MaliciousCoordinator(
        played.job.protocol, "tcp://127.0.0.1:*", finished_run / "keys", clients=[0], ledgers=tmp_path / "ledgers", wait_s=60
    ) as server:
        process = worker(finished_run, 0, server.address, tmp_path / "ledgers", tmp_path / "log", SPIED)
        try:
            (outcome,) = server.play(STEPS["other-job"])
            code = process.wait(60)
        finally:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 30
    while more(open_things(), before) and time.monotonic() < deadline:  # something of an earlier test may have ended meanwhile
        time.sleep(0.02)
    assert not more(open_things(), before)
    words = (tmp_path / "log").read_text()
    assert (outcome.answer, outcome.charges, code) == ("gone", (0, 0), 3), words
    assert "error: job: the peer has job" in words
    assert "records opened" not in words
    assert "records opened" in played.said(0)  # the same look at a worker that did serve
    evidence.got("at WELCOME the worker leaves with exit code 3 (job), no record opened; in a task: refused (job)")
    answered(played.careless("job-field"))
    evidence.control("without the comparison the task of another job is answered and charged")


@pytest.mark.scenario(13)
def test_a_job_that_the_operator_did_not_sign_is_refused(finished_run, tmp_path, evidence, monkeypatch):
    """The attacker's job: its own key in place of the server's, so that workers would come to it."""
    mine, forged = tmp_path / "mine", tmp_path / "forged"
    make_keys(mine, 1)
    job = job_of(finished_run)
    stolen = job.protocol.model_copy(update={"coordinator_key": keys.read_public(mine, COORDINATOR)})
    write_job(Job(stolen, job.experiment), forged, mine)
    done = subprocess.run(
        [*DPCFL, "worker", str(forged), "--client", "0", "--connect", "tcp://127.0.0.1:1", "--keys", str(finished_run / "keys"),
         "--operator-key", str(finished_run / "operator.pub"), "--ledgers", str(tmp_path / "ledgers")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "operator-signature" in done.stderr) == (3, True), done.stderr
    assert not (tmp_path / "ledgers").exists()
    pinned, names = operator(finished_run), ("protocol.json", "experiment.json")
    codes = set()
    for name in names:
        for change in (lambda data: data.replace(b'"seed":0', b'"seed":9').replace(b"digits-cnn", b"digits-cxn"), None):
            copy = tmp_path / f"{name} {change}"
            copy.mkdir()
            for other in (*names, *(f"{name}.sig" for name in names), "roster.jsonl"):
                (copy / other).write_bytes((finished_run / other).read_bytes())
            if change is None:
                (copy / f"{name}.sig").unlink()
            else:
                (copy / name).write_bytes(change((copy / name).read_bytes()))
            with pytest.raises(Refused) as error:
                read_job(copy, pinned)
            codes.add(error.value.code)
    assert codes == {"operator-signature", "experiment-hash"}
    evidence.got("signed by another operator: the worker leaves with exit code 3; a changed byte, no signature: refused")
    monkeypatch.setattr(signing, "verify", lambda *_: True)
    believed = read_job(forged, pinned)
    host = make_host(believed, 0, tmp_path / "believed", durable=False)
    answer = host.answer(Task(1, "train", make(usual_step(job.algorithm), job.algorithm, "honest", 1, 0)))
    host.close()
    assert (answer.status, believed.protocol.coordinator_key) == ("release", stolen.coordinator_key)
    evidence.control("without the check of the signature the job is served, and the forger is the server")


@pytest.mark.scenario(14)
def test_a_server_that_was_rolled_back_gets_nothing_new(played, evidence):
    for outcome in played.honest("rollback", "rollback-previous"):
        assert (outcome["answer"], outcome["repeated"]) == ("release", True)
    for outcome in played.honest("rollback", "rollback-previous", "rollback-first", "rollback-other"):
        assert outcome["charges"][0] == outcome["charges"][1] == 3
    assert {outcome["answer"] for outcome in played.honest("rollback-first")} == {"stale"}
    assert refused(played.honest("rollback-other")) == "other-content"
    assert {outcome["answer"] for outcome in played.honest("go-on")} == {"release"}
    evidence.got("the last two rounds: the bytes sent before; an older one: stale; with other numbers: refused; no charge")
    count = answered(played.careless("rollback", "rollback-previous", "rollback-first", "rollback-other"))
    evidence.control(f"without the ledger's memory {count} spent rounds are answered again, each with fresh noise")


@pytest.mark.scenario(17)
def test_weights_that_are_not_finite_are_refused(played, evidence):
    assert refused(played.honest("not-finite", "infinite")) == "non-finite"
    evidence.got("a NaN, an infinity: refused (non-finite), nothing charged")
    for outcome in played.careless("not-finite", "infinite"):
        assert (outcome["answer"], outcome["code"]) == ("unusable", "non-finite")
        assert outcome["charges"][1] == outcome["charges"][0] + 1
    evidence.control("without the check the task is charged and computed, and the update that comes back is not finite")


@pytest.mark.scenario(19)
def test_a_changed_architecture_is_refused(played, evidence):
    assert refused(played.honest("other-shape", "whole-numbers")) == "template"
    layout = [(name, sides) for name, sides in played.job.protocol.model.layout[:-1]]
    model = played.job.protocol.model.model_copy(update={"layout": layout})
    with pytest.raises(Refused, match="model"):
        Engine.of(played.job.protocol.model_copy(update={"model": model}))
    evidence.got("one parameter more, another type: refused (template); a job with another layout: refused (model)")
    (longer,) = played.careless("other-shape")
    assert longer["answer"] == "gone"
    assert longer["charges"][1] == longer["charges"][0] + 1
    assert "the model has shape (6091,): must be (6090,)" in played.said(CARELESS)
    assert played.codes[CARELESS] == 1
    evidence.control("without the template the round is charged and the worker dies of it: budget spent, nothing learnt")


@pytest.mark.scenario(20)
def test_a_model_of_its_own_for_each_client_shows_in_the_transcript(played, finished_run, tmp_path, evidence):
    clusters = tmp_path / "clusters.jsonl"
    lines = [{"view": "server", "round": t, "assignment": [0] * len(played.job.protocol.roster)} for t in (3, 4, 5)]
    clusters.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = given(read(played.folder / "transcript.msgpack"))
    problems = split_models(shown, played.job.protocol, clusters)
    assert "round 4 train: clients 0 and 1 of cluster 0 were given different models" in problems
    assert not [problem for problem in problems if problem.startswith(("round 3", "round 5"))]
    charged = {
        client: [entry for entry in read_ledger(played.folder / "ledgers" / client_key(client)) if entry.type == "debit"]
        for client in HONEST
    }
    assert other_than_charged(shown, played.job.protocol, charged) == []
    for answered in (True, False):
        path = forged(played.folder, tmp_path / f"forged {answered}", show_to=1, the_task_of=0, answered=answered)
        hidden = given(read(path))
        assert not [p for p in split_models(hidden, played.job.protocol, clusters) if "clients 0 and 1" in p]
        assert ((1, 4) in [(client, task.round) for client, task in hidden.released]) == answered
        assert other_than_charged(hidden, played.job.protocol, charged) == [
            "client 1 was charged in round 4 for another train than the transcript shows"
        ]
    named = {check.what: check for check in verify_run(finished_run)}
    assert named["models: clients of one cluster were given the same"].holds
    assert named["messages: clients were charged for the models that the transcript shows"].holds
    evidence.got("the split round is named, honest rounds are not; a transcript that hides it does not fit client 1's ledger")
    for outcome in played.honest("split"):
        assert (outcome["answer"], outcome["charges"]) == ("release", [2, 3])
    evidence.control("a client by itself notices nothing: each answers its own model with a release")


def forged(folder, path, show_to, the_task_of, answered):
    """The transcript rewritten with a valid chain, in which one client of round 4 got another client's model and may not answer."""
    heads = {
        client: task
        for client, task in given(read(folder / "transcript.msgpack")).released
        if (task.round, task.kind) == (4, "TASK")
    }
    shown = heads[the_task_of].blake3
    written = Transcript(path, "headers")
    for record in read(folder / "transcript.msgpack"):
        header = _decoded(record.header)
        data = record.header
        if not answered and header is not None and record.client == show_to and (header.kind, header.round) == ("RESULT", 4):
            continue
        if header is not None and header.blake3 == heads[show_to].blake3:
            data = encode(replace(header, blake3=shown))
        written.record(record.direction, record.peer, data)
    written.close()
    return path


def _decoded(data):
    try:
        return decode(data)
    except Refused:
        return None


@pytest.mark.scenario(32)
def test_logs_and_transcript_hold_nothing_raw(finished_run, played, evidence):
    job = job_of(finished_run)
    engine = Engine.of(job.protocol)
    everything = view(
        [*(finished_run / f"{name}.jsonl" for name in ("messages", "metrics", "clusters", "spans", "warnings")),
         finished_run / "logs" / "coordinator.log"],
        [finished_run / "first_round.npz", *finished_run.glob("checkpoints/*/*")],
        finished_run / "transcript.msgpack",
    )  # fmt: skip
    searched = 0
    for secrets in secrets_of_run(finished_run, job, engine):
        searched += secrets.values
        assert scan(everything, secrets) == []
    assert searched > 8 * 20
    choices = [header for _, header, _ in messages(finished_run / "transcript.msgpack") if "choice" in str(header.tensors)]
    assert {(header.kind, header.task) for header in choices} == {("RESULT", "select_and_train")}
    evidence.got(
        f"{searched} losses, counts, labels and batches of 8 clients searched in {len(everything.files) + len(everything.words)}"
        " files: none; indices only as released choices"
    )
    logs, transcript = (
        [played.folder / "coordinator.log", played.folder / "messages.jsonl"],
        played.folder / "transcript.msgpack",
    )
    for client in HONEST:
        assert scan(view(logs, [], transcript, without=f"client {CARELESS}"), secrets_of_play(played, engine, client)) == []
    assert scan(view(logs, [], transcript), secrets_of_play(played, engine, CARELESS)) == [
        "count in words: transcript.msgpack",
        "labels in words: coordinator.log",
        "labels in words: transcript.msgpack",
        "loss in words: transcript.msgpack",
        "loss or count as float32: releases",
    ]
    evidence.control(
        "of a leaking worker the same search finds the loss in its updates, loss and count in its answers' words, "
        "labels in its complaints and in the server's log"
    )


def secrets_of_run(folder, job, engine) -> list[Secrets]:
    """The true values of every client of a finished seeded run, for all models that it was given and made."""
    asked, models, made = {}, {}, {}
    for record, header, tensors in messages(folder / "transcript.msgpack"):
        client = int(record.peer.removeprefix("client "))
        if header.kind == "TASK":
            asked[header.id] = tensors
            models.setdefault(client, {}).update({m.tobytes(): m for m in tensors.get("models", [tensors.get("model")])})
        elif header.kind == "RESULT":
            start = asked[header.parent]
            start = start["models"][int(tensors["choice"])] if "choice" in tensors else start["model"]
            made.setdefault(client, []).append(start + tensors["update"])
    found = []
    for entry in job.protocol.roster:
        secrets = secrets_of(job, entry.id, engine, models[entry.id].values(), made[entry.id])
        slots = {slot.name: slot for slot in job.algorithm.plan(entry)}
        for debit in read_ledger(folder / "ledgers" / client_key(entry.id)):
            for name in (name for name in debit.slots if isinstance(slots[name], DPSGDSlot) and slots[name].rate < 1):
                charge = derive(
                    bytes.fromhex(job.experiment.noise_seed), "charge", entry.id, debit.round, debit.kind, *debit.slots
                )
                batches = stream(derive(charge, "slot", name), "batches")
                rows = poisson_rows(entry.records, slots[name].rate, batches)
                secrets.sequences[f"batch of round {debit.round}"] = rows.tolist()
        found.append(secrets)
    return found


def secrets_of_play(played, engine, client) -> Secrets:
    usual, algorithm = usual_step(played.job.algorithm), played.job.algorithm
    sent = [
        make(usual, algorithm, step.weights, played.outcomes[step.name, client]["round"], client)
        for step in SCRIPT
        if step.pays and (step.name, client) in played.outcomes
    ]
    return secrets_of(played.job, client, engine, [tensors["model"].astype(np.float32) for tensors in sent])
