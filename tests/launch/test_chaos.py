"""`dpcfl run --chaos`: faults by schedule change neither the released bits nor what a client is charged, and a replay repeats them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_runs import ROUNDS, TINY, chaos, charges, faults, kinds, run
from cli_cases import call
from conftest import assert_nothing_left, dpcfl, only_run, write_config
from run_results import last_models

from dpcfl_net.core import runlog
from dpcfl_net.launch.chaos import Chaos
from dpcfl_net.launch.chaos_file import read_chaos

EVERYTHING = {
    "drop": 0.05,
    "duplicate": 0.02,
    "delay": {"share": 0.3, "seconds": [0.01, 0.2]},
    "reorder": 0.02,
    "corrupt": 0.02,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """An undisturbed run of TINY."""
    return run(tmp_path_factory.mktemp("tiny"), None, TINY)[0]


@pytest.mark.slow
def test_a_run_with_late_lost_and_damaged_messages_and_a_killed_worker_releases_the_same_bits(tiny, tmp_path):
    compare_with(tiny, tmp_path, TINY)


@pytest.mark.slow
def test_a_run_of_eight_clients_and_four_clusters_does_so_too(finished_run, tmp_path):
    compare_with(finished_run, tmp_path, {})


def compare_with(undisturbed: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Run the same job with faults of every kind, and compare bits and charges."""
    plan = chaos(tmp_path, messages=[EVERYTHING], processes=[{"kill": "client 2", "at": {"round": 3, "step": "charged"}}])
    folder, printed = run(tmp_path, plan, settings)
    assert last_models(folder) == last_models(undisturbed)
    assert charges(folder) == charges(undisturbed)
    assert not faults(undisturbed)
    found = kinds(folder)
    assert {"drop", "delay", "kill"} <= set(found)
    # Each task and each result has at least a header, a chunk and an acknowledgement: six messages per charge.
    least = 6 * sum(map(len, charges(folder).values()))
    assert found["delay"] > least * 0.3 / 3
    assert "client 2 ended with code -9" in (folder / "warnings.jsonl").read_text()
    assert f"{found['drop']} drop" in printed
    assert (folder / "chaos.yaml").read_text() == plan.read_text()
    checked = dpcfl("verify", folder)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow  # faults of all kinds in one run: above
def test_partitioned_clients_miss_their_rounds_and_come_back(tmp_path, tiny):
    settings = {**TINY, "runtime": {"quorum": 0.3, "round_timeout_s": 2}}
    folder, _ = run(tmp_path, chaos(tmp_path, partitions=[{"clients": [0, 2], "rounds": [3, 4]}]), settings)
    rows = [line for line in runlog.read(folder / "metrics.jsonl") if "missing" in line]
    assert {line["round"]: line["missing"] for line in rows} == {t: [0, 2] if t in (3, 4) else [] for t in range(1, ROUNDS + 1)}
    assert kinds(folder) == {"partition": len(faults(folder))}
    assert {(span["who"], span["round"]) for span in faults(folder)} == {(f"client {c}", t) for c in (0, 2) for t in (3, 4)}
    whole = charges(tiny)
    for name, charged in charges(folder).items():
        missed = (3, 4) if name in ("client_0000", "client_0002") else ()
        assert charged == [(t, kind) for t, kind in whole[name] if t not in missed]


@pytest.mark.slow
def test_a_replay_has_the_same_message_faults(tmp_path):
    """Repetitions depend on time, and so do acknowledgements of tasks, which short tasks have none of; other first attempts do not."""

    def first_attempts(out: Path, seed: int) -> list[tuple[str, int, str]]:
        plan = chaos(out, seed=seed, messages=[EVERYTHING])
        folder, _ = run(out, plan, TINY)
        found = ((span["who"], span["round"], span["fault"]) for span in faults(folder))
        return sorted(one for one in found if "attempt 1" in one[2] and "up ack" not in one[2])

    one = first_attempts(tmp_path / "one", 5)
    assert len(one) > 10
    assert first_attempts(tmp_path / "two", 5) == one
    assert first_attempts(tmp_path / "three", 6) != one


@pytest.mark.slow
@pytest.mark.parametrize("step", ["sent", "charged", "answered", "done"])
def test_killed_and_stopped_workers_come_back_at_every_step(tmp_path, tiny, step):
    plan = [
        {"kill": "random 2 clients", "at": {"round": 2, "step": step}},
        {"stop": "client 1", "at": {"round": 4, "step": step}, "seconds": 1.5},
    ]
    folder, _ = run(tmp_path, chaos(tmp_path, processes=plan), TINY)
    assert kinds(folder) == {"kill": 2, "stop": 1}
    assert len({span["who"] for span in faults(folder) if span["what"] == "fault kill"}) == 2
    assert last_models(folder) == last_models(tiny)
    assert charges(folder) == charges(tiny)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "observer", "coordinator"])
def test_other_processes_are_killed_by_name_and_the_run_ends_with_the_same_bits(tmp_path, tiny, victim):
    plan = chaos(tmp_path, processes=[{"kill": victim, "at": {"round": 3, "step": "answered"}}])
    done = dpcfl("run", write_config(tmp_path / "c", **TINY), "--out", tmp_path / "runs", "--chaos", plan)
    folder = only_run(tmp_path / "runs")
    assert_nothing_left(folder)
    assert kinds(folder) == {"kill": 1}
    if done.returncode:  # resumed with the same file: what happened does not happen again
        assert done.returncode == 4
        again = dpcfl("run", "--resume", folder, "--chaos", plan)
        assert again.returncode == 0, again.stderr
    assert kinds(folder) == {"kill": 1}
    assert last_models(folder) == last_models(tiny)
    assert charges(folder) == charges(tiny)


@pytest.mark.slow
def test_files_that_do_not_grow_end_the_run_with_a_reason_and_it_is_resumed(tmp_path, tiny):
    plan = chaos(tmp_path, disk=[{"full": "all", "at": {"round": 3, "step": "sent"}, "seconds": 2}])
    folder, printed = run(tmp_path, plan, TINY, code=4)
    assert "Traceback" not in printed
    assert kinds(folder)["full"]
    again = dpcfl("run", "--resume", folder)
    assert again.returncode == 0, again.stderr
    assert last_models(folder) == last_models(tiny)
    assert charges(folder) == charges(tiny)


STAND_IN = "import setproctitle, time; setproctitle.setproctitle('dpcfl client 0'); print('ready', flush=True); time.sleep(60)"


@contextmanager
def stopped_worker(folder: Path, plan: Path) -> Iterator[tuple[Chaos, psutil.Process]]:
    """A process with the title of a worker, which the chaos file has just stopped."""
    (folder / "logs").mkdir(parents=True)
    faults_of_run, log = Chaos(folder, read_chaos(plan, 2, 6), 2), folder / "logs" / "client_0.log"
    with log.open("w") as output, subprocess.Popen([sys.executable, "-c", STAND_IN], stdout=output) as process:
        try:
            tick_until(faults_of_run, lambda: "ready" in log.read_text())
            (folder / "messages.jsonl").write_text('{"kind":"TASK","peer":"client 0","round":1}\n')
            tick_until(faults_of_run, lambda: is_stopped(psutil.Process(process.pid)))
            yield faults_of_run, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def tick_until(faults_of_run: Chaos, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        faults_of_run.tick()
        time.sleep(0.02)


def test_a_stopped_worker_is_continued_when_the_run_is_interrupted(tmp_path):
    plan = chaos(
        tmp_path, processes=[{"stop": "client 0", "at": {"round": 1}, "seconds": 600}, {"kill": "client 1", "at": {"round": 2}}]
    )
    folder = tmp_path / "run"
    with stopped_worker(folder, plan) as (faults_of_run, process):
        faults_of_run.close()
        assert not is_stopped(process)
    assert [span["what"] for span in faults(folder)] == ["fault stop"]
    assert "kill client 1 at round 2 sent did not happen" in (folder / "warnings.jsonl").read_text()


def test_a_stop_lasts_its_time_also_if_the_clock_is_set_back(tmp_path, monkeypatch):
    plan = chaos(tmp_path, processes=[{"stop": "client 0", "at": {"round": 1}, "seconds": 1}])
    now = time.time
    with stopped_worker(tmp_path / "run", plan) as (faults_of_run, process):
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        tick_until(faults_of_run, lambda: not is_stopped(process))


BAD = [
    ("", "must be a section of keys and values"),
    ("messages: []", "line 1: seed is missing"),
    ("seed: 7\nmessages:\n  - {drop: 1.5}", "line 3: messages.0.drop is 1.5: must be less than or equal to 1"),
    ("seed: 7\nmessages:\n  - {dorp: .5}", "line 3: unknown key 'messages.0.dorp', did you mean 'drop'?"),
    ("seed: 7\nmessages:\n  - clients: some", "line 3: messages.0.clients is 'some': must be all, or a list of client ids"),
    ("seed: 7\nmessages:\n  - clients: [9]", "line 3: messages.0.clients holds 9: must be a client of the run, 0 to 7"),
    ("seed: 7\nmessages:\n  - kinds: [tsk]", "messages.0.kinds.0 is 'tsk': must be 'hello'"),
    ("seed: 7\nmessages:\n  - rounds: [5, 2]", "messages.0.rounds is [5, 2]: the first must not exceed the second"),
    ("seed: 7\npartitions:\n  - {clients: all}", "line 3: partitions.0.rounds is missing"),
    (
        "seed: 7\nprocesses:\n  - {kill: cleint 3, at: {round: 1}}",
        "processes.0.kill is 'cleint 3': must be client N, random N clients",
    ),
    (
        "seed: 7\nprocesses:\n  - {kill: client 3, at: {round: 7}}",
        "processes.0.at.round is 7: must be a round of the run, 1 to 6",
    ),
    ("seed: 7\nprocesses:\n  - {kill: client 3, at: {round: 1, step: sentt}}", "at.step is 'sentt': must be 'sent', 'charged'"),
    ("seed: 7\nprocesses:\n  - {stop: client 3, at: {round: 1}}", "processes.0: seconds belongs to stop, which needs it"),
    ("seed: 7\nprocesses:\n  - {at: {round: 1}}", "processes.0: must have either kill or stop"),
    ("seed: 7\nseed: 8", "line 2: key 'seed' is given twice"),
    ("seed: [", "is not YAML"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_bad_file_names_line_field_value_and_what_is_allowed(capsys, tmp_path, text, words):
    path = tmp_path / "chaos.yaml"
    path.write_text(text)
    done = call(capsys, "run", write_config(tmp_path / "c"), "--out", tmp_path / "runs", "--chaos", path)
    assert done.code == 2
    assert words in done.err
    assert str(path) in done.err
    assert not [*(tmp_path / "runs").iterdir()]


def test_chaos_needs_processes(capsys, tmp_path):
    config = write_config(tmp_path / "c", runtime={"federation": "in-process"}, output={"transcript": "off"})
    done = call(capsys, "run", config, "--out", tmp_path / "runs", "--chaos", chaos(tmp_path))
    assert (done.code, "runtime.federation must be 'network'" in done.err) == (2, True), done.err


def test_the_example_of_the_documentation_is_valid(tmp_path):
    document = (Path(__file__).parents[2] / "docs" / "how-to" / "chaos.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    assert examples
    for number, text in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        read_chaos(path, 8, 6)


def test_a_run_without_chaos_has_no_fault(finished_run):
    assert not faults(finished_run)
    assert not (finished_run / "chaos.yaml").exists()
    assert "refused" not in (finished_run / "logs" / "coordinator.log").read_text().replace("refused []", "")
    assert json.loads((finished_run / "run.json").read_text())["state"] == "finished"
