"""A run as a person starts it: processes, files, the same bits in one process and in ten, crashes, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from conftest import (
    DPCFL,
    ROOT,
    SMALL,
    assert_nothing_left,
    at_a_terminal,
    charged_by_round,
    command_line,
    dpcfl,
    only_run,
    write_config,
)
from run_results import job_of, last_models
from simulate import simulate

from dpcfl_net.core import runlog
from dpcfl_net.data import cache
from dpcfl_net.experiment import build, config
from dpcfl_net.federation.claim import verify_claim
from dpcfl_net.federation.late_answer import LateAnswer
from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.results import epsilon_spent
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.one_process import OPEN_FILES, OTHER_FILES

RUN_KEYS = {
    "name", "algorithm", "state", "rounds_done", "wall_s", "processes", "devices", "bytes_up", "bytes_down", "privacy", "final", "versions", "seed",
}  # fmt: skip
PRIVACY_KEYS = {
    "unit", "adjacency", "trust", "epsilon", "delta", "accountant", "noise_multiplier", "epsilon_spent", "epsilon_replace_one",
    "claim_of_paper", "ledger_scope", "covered", "not_covered", "insecure", "epsilon_with_secret_noise",
}  # fmt: skip
FINAL_KEYS = {
    "accuracy_mean", "accuracy_worst", "accuracy_minority", "accuracy_by_cluster", "clusters_recovered", "minority_recovered", "ari",
    "clusters", "diagnostics",
}  # fmt: skip
FILES = [
    "config.yaml", "protocol.json", "roster.jsonl", "experiment.json", "run.json", "metrics.jsonl", "clusters.jsonl", "messages.jsonl", "spans.jsonl",
    "first_round.npz", "transcript.msgpack", "report.html", "checkpoints", "ledgers", "logs",
]  # fmt: skip


def test_run_folder_holds_every_file_and_run_json_exactly_its_keys(finished_run):
    assert not [name for name in FILES if not (finished_run / name).exists()]
    document = json.loads((finished_run / "run.json").read_text())
    assert set(document) == RUN_KEYS
    assert set(document["privacy"]) == PRIVACY_KEYS
    assert set(document["final"]) == FINAL_KEYS
    assert document["state"] == "finished"
    assert document["rounds_done"] == 6
    assert document["processes"] == 10
    assert document["devices"] == {"cpu": 8}


def test_a_run_with_seeded_noise_states_no_epsilon_anywhere(finished_run):
    """The holder of the seed can subtract the noise, so there is no epsilon for any plan."""
    privacy = json.loads((finished_run / "run.json").read_text())["privacy"]
    assert privacy["insecure"] is True
    assert (privacy["epsilon"], privacy["epsilon_spent"], privacy["epsilon_replace_one"]) == (None, None, None)
    assert privacy["epsilon_with_secret_noise"] == 5
    assert privacy["covered"] == []
    assert privacy["not_covered"][0] == "noise is seeded: whoever has the seed subtracts it (INSECURE)"
    job = job_of(finished_run)
    assert verify_claim(job.algorithm, 0, Path(cache.folder()) / "claims") == math.inf
    curves = [
        line["epsilon_spent_by_client"]
        for line in runlog.read(finished_run / "metrics.jsonl")
        if "epsilon_spent_by_client" in line
    ]
    assert {value for curve in curves for value in curve} == {None}
    page = (finished_run / "report.html").read_text()
    assert "no finite epsilon" in page
    done = dpcfl("compare", finished_run, finished_run)
    assert "inf" in done.stdout, done.stdout


def test_the_noise_seed_follows_from_nothing_in_the_protocol(finished_run):
    """Everything that the server is started with, and the seed of the configuration, which is guessed at once."""
    job, text = job_of(finished_run), (finished_run / "protocol.json").read_text()
    assert job.experiment.noise_seed not in text
    other = build.Secrets.of(config.resolve({**SMALL, "privacy": {**SMALL["privacy"], "noise_seed": "ab" * 32}}))
    assert other.noise.hex() != job.experiment.noise_seed  # the same seed of the configuration, another secret
    drawn = [
        build.Secrets.of(config.resolve({**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4, "noise": "seeded"}}))
        for _ in range(2)
    ]
    assert drawn[0].noise != drawn[1].noise
    assert yaml.safe_load((finished_run / "config.yaml").read_text())["privacy"]["noise_seed"] == SMALL["privacy"]["noise_seed"]


def test_a_run_says_what_it_has_spent(private_run):
    privacy = json.loads((private_run / "run.json").read_text())["privacy"]
    assert privacy["epsilon_spent"] <= privacy["epsilon"] == 5
    assert privacy["epsilon_replace_one"] > 5
    assert (privacy["insecure"], privacy["epsilon_with_secret_noise"]) == (False, None)


def test_every_round_has_a_server_line_and_an_observer_line(private_run):
    lines = runlog.read(private_run / "metrics.jsonl")
    for view, field in (("server", "bytes_up"), ("observer", "accuracy_mean"), ("server", "epsilon_spent_by_client")):
        assert [line["round"] for line in lines if line["view"] == view and field in line] == [1, 2, 3, 4, 5, 6]
    spent = [max(line["epsilon_spent_by_client"]) for line in lines if "epsilon_spent_by_client" in line]
    assert spent == sorted(spent)
    assert spent[-1] <= 5


def test_clusters_are_recovered_and_the_roster_order_says_nothing(finished_run):
    document = json.loads((finished_run / "run.json").read_text())
    first = next(line for line in runlog.read(finished_run / "clusters.jsonl") if line["view"] == "observer")
    assert (first["round"], first["recovered"], document["final"]["clusters"]) == (1, True, 4)
    truth = json.loads((finished_run / "experiment.json").read_text())["true_clusters"]
    assert truth != sorted(truth)


def test_one_process_gives_the_same_bits_as_ten(finished_run, tmp_path):
    state = simulate(job_of(finished_run), tmp_path)
    assert state.models.tobytes() == last_models(finished_run)


@pytest.mark.slow
def test_one_process_with_few_open_files_gives_the_same_bits(finished_run, tmp_path, monkeypatch):
    def open_ledgers(t, state):
        locks = [file.path for file in psutil.Process().open_files() if Path(file.path).name == "lock"]
        counts.append(sum(path.startswith(f"{tmp_path}/") for path in locks))

    counts: list[int] = []
    # Told, not set: this process may have more files open than the limit.
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (OTHER_FILES + 2 * OPEN_FILES,) * 2)
    state = simulate(job_of(finished_run), tmp_path, on_round=open_ledgers)
    assert counts == [2] * 6
    assert state.models.tobytes() == last_models(finished_run)


def test_an_interrupted_client_computation_resumes_to_the_same_bits(finished_run, tmp_path, monkeypatch):
    """A crash in the middle of a round, at another client each time: after the debit and before the release."""
    from dpcfl_net.federation import client_host

    whole = client_host.ClientHost._compute
    crashes = iter([(1, 3), (2, 0), (3, 7), (4, 5), (5, 2), (6, 6)])
    due = [next(crashes)]

    def crashing(self, task, charge, state):
        if due and (task.round, self.client) == due[0]:
            due[0:1] = [following] if (following := next(crashes, None)) else []
            raise KeyboardInterrupt
        return whole(self, task, charge, state)

    monkeypatch.setattr(client_host.ClientHost, "_compute", crashing)
    stops = 0
    while True:
        try:
            state = simulate(job_of(finished_run), tmp_path)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops == 6
    assert state.models.tobytes() == last_models(finished_run)


@pytest.fixture(scope="module")
def undisturbed(finished_run):
    return last_models(finished_run)


def test_what_whole_runs_of_one_plan_spend_is_computed_once_on_a_host(private_run, tmp_path, monkeypatch):
    job, asked = job_of(private_run), []
    real = accountant.epsilon_by_prefix
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(accountant, "epsilon_by_prefix", lambda *question: asked.append(question) or real(*question))
    found = []
    for _ in range(2):
        epsilon_spent._whole_curve.cache_clear()  # as in another process
        epsilon_spent._curves_of_last_call.cache_clear()
        found.append(epsilon_spent.epsilon_curves(private_run, job))
    assert len(asked) == len({tuple(map(tuple, groups)) for groups, *_ in asked}) == 1
    assert found[0] == found[1]
    written = [
        line["epsilon_spent_by_client"]
        for line in runlog.read(private_run / "metrics.jsonl")
        if "epsilon_spent_by_client" in line
    ]
    assert [list(curve) for curve in zip(*written, strict=True)] == found[0]


def test_kill_of_the_whole_tree_in_mid_round_then_resume(undisturbed, tmp_path):
    config = write_config(tmp_path / "c")
    run = subprocess.Popen(
        [*DPCFL, "run", str(config), "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )
    tree = wait_for_round(tmp_path, 2, run)
    for process in tree:
        if process.is_running():
            process.send_signal(signal.SIGKILL)
    run.wait(10)
    folder = only_run(tmp_path)
    assert_nothing_left(folder)
    again = dpcfl("run", "--resume", folder)
    assert again.returncode == 0, again.stderr + again.stdout
    assert last_models(folder) == undisturbed
    job = job_of(folder)
    (charged,) = [check for check in verify_run(folder) if "that of the noisy updates alone" in check.what]
    assert charged.holds, charged  # at most 5 in each ledger: nothing was spent twice
    assert all(len(charged_by_round(folder, job, client)) == 6 for client in range(8))
    assert dpcfl("verify", folder).returncode == 0


@pytest.mark.slow
def test_ctrl_c_stops_everything_within_five_seconds_and_the_run_resumes(undisturbed, tmp_path):
    config = write_config(tmp_path / "c")
    run = at_a_terminal("run", config, "--out", tmp_path)
    wait_for_round(tmp_path, 2, run)
    started = time.monotonic()
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=20)
    folder = only_run(tmp_path)
    assert_nothing_left(folder, 5 - min(4.5, time.monotonic() - started))
    assert run.returncode == 130
    assert "--resume" in output
    assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    assert dpcfl("run", "--resume", folder).returncode == 0
    assert last_models(folder) == undisturbed


def test_a_run_that_is_going_cannot_be_resumed(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(document | {"state": "interrupted"}))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = dpcfl("run", "--resume", folder)
    assert (done.returncode, "run by another process" in done.stderr) == (2, True), done.stderr


def test_a_killed_worker_is_started_again_and_spends_nothing_twice(undisturbed, tmp_path):
    config = write_config(tmp_path / "c")
    run = subprocess.Popen([*DPCFL, "run", str(config), "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    tree = wait_for_round(tmp_path, 1, run)
    victim = next(p for p in tree if "client 3" in command_line(p))
    victim.kill()
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    folder = only_run(tmp_path)
    assert last_models(folder) == undisturbed
    assert len(charged_by_round(folder, job_of(folder), 3)) == 6


def wait_for_round(out, t, run) -> list[psutil.Process]:
    """Wait until the checkpoint of round t is there; every process of the run."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and run.poll() is None:
        if any((path / "checkpoints" / f"round_{t:05d}").exists() for path in out.iterdir()):
            return [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        time.sleep(0.01)
    raise AssertionError(f"round {t} was not reached")


def test_processes_started_by_hand_give_the_same_bits_and_the_coordinator_opens_no_data(tmp_path):
    """The same signed job in separate processes; an audit hook writes down every file that the coordinator opens."""
    few = {**SMALL["data"], "clients": [2, 1]}
    done = dpcfl(
        "run", write_config(tmp_path, data=few, algorithm={"name": "r-dpcfl", "clusters": 2}), "--out", tmp_path / "launched"
    )
    assert done.returncode == 0, done.stderr
    launched = only_run(tmp_path / "launched")
    opened = tmp_path / "opened.txt"
    spy = (
        "import sys; log = open(sys.argv.pop(1), 'a', buffering=1)\n"
        "sys.addaudithook(lambda event, args: log.write(f'{args[0]}\\n') if event == 'open' else None)\n"
        "from dpcfl_net.launch.cli import main; main()"
    )
    keys, operator = launched / "keys", launched / "operator.pub"
    from_operator = ["--keys", keys, "--operator-key", operator]
    free = ["--bind", "tcp://127.0.0.1:*"]
    run = tmp_path / "run"
    started = []

    def start(*arguments, prefix=DPCFL):
        started.append(subprocess.Popen([*prefix, *map(str, arguments)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        return started[-1]

    def address(name):
        path = run / "addresses" / name
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return path.read_text()

    try:
        start("observer", launched, *free, *from_operator, "--out", run)
        observer = address("observer")
        # The coordinator gets a folder with the protocol and its signature, and nothing else of the job.
        public = tmp_path / "public"
        public.mkdir()
        for name in ("protocol.json", "protocol.json.sig", "roster.jsonl"):
            (public / name).write_bytes((launched / name).read_bytes())
        spied = [DPCFL[0], "-c", spy, opened]
        coordinator = start(
            "coordinator",
            public / "protocol.json",
            *free,
            *from_operator,
            "--observer",
            observer,
            "--out",
            run,
            prefix=[*map(str, spied)],
        )
        where = address("coordinator")
        for client in range(3):
            start(
                "worker", launched, "--client", client, "--connect", where, "--observer", observer, *from_operator,
                "--ledgers", tmp_path / "ledgers",
            )  # fmt: skip
        assert coordinator.wait(120) == 0
        assert all(process.wait(30) == 0 for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert last_models(run) == last_models(launched)
    assert [line["round"] for line in runlog.read(run / "metrics.jsonl") if line["view"] == "observer"] == [1, 2, 3, 4, 5, 6]
    paths = opened.read_text()
    assert str(public / "protocol.json") in paths
    assert "experiment.json" not in paths
    assert "config.yaml" not in paths
    assert not [line for line in paths.splitlines() if ".npy" in line or "digits" in line or "idx" in line]


def test_forked_workers_never_share_noise(finished_run, tmp_path):
    """Two children of one parent, with the same data, model and torch seed: their noise differs as independent noise does."""
    from dpcfl_net.core.tensors import unpack
    from dpcfl_net.core.types import Task

    job = job_of(finished_run)
    entry = job.protocol.roster[0]
    unseeded = type(job)(job.protocol, job.experiment.model_copy(update={"noise_seed": None}))
    theta = np.zeros(job.protocol.model.parameters, dtype=np.float32)
    children = []
    for number in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            host = make_host(unseeded, entry.id, tmp_path / str(number))
            answer = host.answer(Task(1, "first_round_update", {"model": theta}))
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer.release)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            children.append(unpack(pipe.read())["update"].astype(np.float64))
        os.waitpid(child, 0)
    local = job.protocol.local
    expected = np.sqrt(2) * local.lr * entry.noise_multiplier * local.clip / entry.records
    difference = children[0] - children[1]
    # 6,090 coordinates: the deviation of a sample deviation is 0.9 %; 6 % is further out than 1e-6.
    assert np.std(difference) == pytest.approx(expected, rel=0.06)


def test_the_servers_files_hold_nothing_that_only_the_observer_may_know(finished_run):
    """What the coordinator wrote: no accuracy, loss, label or true cluster."""
    protocol = json.loads((finished_run / "protocol.json").read_text())
    assert protocol["oracle"] is None
    server = [
        line
        for name in ("metrics.jsonl", "clusters.jsonl")
        for line in runlog.read(finished_run / name)
        if line["view"] == "server"
    ]
    words = ("accuracy", "loss", "label", "truth", "recovered", "ari", "count")
    for text in (
        json.dumps(server),
        (finished_run / "messages.jsonl").read_text(),
        (finished_run / "logs" / "coordinator.log").read_text(),
    ):
        assert not [word for word in words if f'"{word}' in text or f"{word}=" in text]


def test_verify_holds_and_notices_every_kind_of_tampering(finished_run, tmp_path):
    good = dpcfl("verify", finished_run)
    assert good.returncode == 0, good.stdout
    assert "FAILS" not in good.stdout
    for name, change in {
        "protocol.json": lambda data: data.replace(b'"rounds":6', b'"rounds":7'),
        "roster.jsonl": lambda data: data.replace(b'"noise_multiplier":', b'"noise_multiplier":0', 1),
        "experiment.json": lambda data: data.replace(b'"seed":0', b'"seed":1'),
        "ledgers/client_0002/ledger.jsonl": lambda data: data.replace(b'"round":3', b'"round":4', 1),
        "transcript.msgpack": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    }.items():
        copy = tmp_path / name.replace("/", "_")
        shutil.copytree(finished_run, copy)
        (copy / name).write_bytes(change((copy / name).read_bytes()))
        assert any(check.holds is False for check in verify_run(copy, None)), name
    bad = dpcfl("verify", copy)
    assert bad.returncode == 3, bad.stdout
    assert "FAILS" in bad.stdout


def test_inspect_shows_what_crossed(finished_run):
    shown = dpcfl("inspect", finished_run, "--client", "3", "--round", "4").stdout
    assert "select_and_train" in shown
    assert "models f4[4, 6090]" in shown
    assert "choice i8[]" in shown
    assert "client 2" not in shown
    assert "late" not in shown


def test_inspect_marks_late_answers(finished_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished_run, copy)
    answer, at = LateAnswer(3, 4, "select_and_train", "release", 5, "a" * 64), time.time()
    with closing(runlog.Lines(copy / "warnings.jsonl")) as lines:
        lines.write({"time": at, "text": str(answer)})
    shown = dpcfl("inspect", copy, "--client", "3", "--limit", "10000").stdout.splitlines()
    marked = [line.split() for line in shown if "(late: set aside)" in line]
    assert [(words[4], words[5]) for words in marked] == [("4", "RESULT")], marked
