"""More clients than may be connected at once: started, stopped, sharing processes; the same bits as with all of them there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import SMALL, assert_nothing_left, charged_by_round, command_line
from run_results import job_of, last_models
from simulate import simulate

import dpcfl_net as api
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.types import Task
from dpcfl_net.data.partition import open_set, plan_slices
from dpcfl_net.experiment import config
from dpcfl_net.federation.client_pool import BYE_AGAIN_S, INSIST_S, STAYS_S, ClientPool
from dpcfl_net.launch import running
from dpcfl_net.launch.cli import bench_live
from dpcfl_net.launch.placement import parents, worker_pool
from dpcfl_net.launch.placement.base import ClientRange
from dpcfl_net.launch.placement.child import Child
from dpcfl_net.launch.placement.local import LocalLauncher
from dpcfl_net.launch.placement.worker_pool import PoolLimits, WorkerPool
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.specs import WorkerSpec

TWELVE = {
    "name": "twelve",
    "data": {"dataset": "digits", "clients": [6, 6], "train_per_client": 60, "test_per_client": 20},
    "model": {"name": "linear"},
    "rounds": 4,
    "local": {"batch_size": 20, "lr": 0.5},
    "algorithm": {"name": "global"},
    "output": {"transcript": "off"},
}


# who has a place


class Told:
    """A pool of `bound` places with everything that it told, and a clock that stands still."""

    def __init__(self, bound: int) -> None:
        self.words: list[tuple[str, int]] = []
        self.now = 0.0
        self.pool = ClientPool(
            bound, lambda word, c: self.words.append((word, c)), lambda c: self.words.append(("bye", c)), clock=lambda: self.now
        )

    def new(self) -> list[tuple[str, int]]:
        words, self.words = self.words, []
        return words

    def here(self, *clients: int) -> None:
        self.pool.admit(clients, ())
        for client in clients:
            self.pool.joined(client)
        self.new()


def test_a_free_place_is_for_whoever_is_asked_first():
    told = Told(2)
    assert told.pool.admit([4, 1, 7], ()) == [4, 1]
    assert told.new() == [("start", 4), ("start", 1)]
    assert told.pool.admit([7], {4, 1}) == []
    assert told.new() == []


def test_clients_of_an_earlier_server_that_come_unasked_leave_before_others_start():
    told = Told(2)
    assert told.pool.admit([0, 1], ()) == [0, 1]
    told.pool.joined(2)
    assert told.new() == [("start", 0), ("start", 1), ("bye", 2)]
    assert told.pool.free == -1
    assert told.pool.admit([3], {0, 1}) == []  # the launcher has no room for its process
    assert told.new() == []


def test_the_longest_idle_makes_room_and_nobody_who_is_busy_or_wanted():
    told = Told(3)
    told.here(0, 1, 2)
    told.pool.done(0)
    assert told.pool.admit([5, 2], {1}) == [2]
    assert told.new() == [("bye", 0)]
    assert told.pool.admit([5], {1}) == []  # one place is about to become free: client 2, idle by now, need not leave
    assert told.new() == []
    told.pool.left(0, busy=False)
    assert told.new() == [("stop", 0)]
    assert told.pool.admit([5], {1, 2}) == [5]
    assert told.new() == [("start", 5)]
    assert told.pool.in_turn([0, 2, 1]) == [1, 2, 0]


def test_no_more_clients_leave_than_are_waited_for():
    told = Told(4)
    told.here(0, 1, 2, 3)
    assert told.pool.admit([3, 5, 6], ()) == [3]
    assert told.new() == [("bye", 0), ("bye", 1)]
    assert told.pool.admit([5], ()) == []
    assert told.new() == [], "two places are about to become free"


def test_who_has_just_answered_makes_room_last():
    told = Told(3)
    told.here(0, 1, 2)
    told.pool.done(1)
    told.pool.done(0)
    assert told.pool.admit([5, 6], ()) == []
    assert told.new() == [("bye", 2), ("bye", 1)]


def test_a_client_that_was_told_to_leave_starts_again_only_when_it_has_gone():
    told = Told(2)
    told.here(0, 1)
    told.pool.admit([2], {1})
    told.pool.left(1, busy=False)
    assert told.new() == [("bye", 0), ("stop", 1)]
    assert (told.pool.free, told.pool.admit([0], ())) == (1, [])
    told.pool.left(0, busy=False)
    assert told.pool.admit([0], ()) == [0]
    assert told.new() == [("stop", 0), ("start", 0)]


def test_a_goodbye_is_repeated_until_the_client_has_gone():
    told = Told(1)
    told.here(0)
    told.pool.admit([1], ())
    told.now = BYE_AGAIN_S
    told.pool.tend()
    told.pool.joined(0)  # it had lost its connection and missed both
    assert told.new() == [("bye", 0)] * 3
    told.pool.left(0, busy=False)
    told.now = INSIST_S
    told.pool.tend()
    assert told.new() == [("stop", 0)]


def test_who_does_not_go_is_reported_and_keeps_the_place_until_it_has_gone():
    told = Told(1)
    told.here(0)
    told.pool.admit([1], ())
    told.now = INSIST_S
    told.pool.tend()
    told.pool.tend()
    assert told.new() == [("bye", 0), ("stop", 0), ("bye", 0)]
    assert told.pool.admit([1], ()) == []
    told.pool.left(0, busy=False)
    assert told.pool.admit([1], ()) == [1]


def test_who_stays_for_good_holds_no_place_and_is_asked_where_it_is():
    """A worker that ignores goodbyes, on a host that does not end it, kept its place, and a call that asked it waited for ever."""
    told = Told(1)
    told.here(0)
    told.pool.admit([1], ())
    told.now = STAYS_S - 1
    told.pool.tend()
    told.new()
    assert (told.pool.free, told.pool.admit([0, 1], ())) == (0, [])
    told.now = STAYS_S
    assert told.pool.admit([1], ()) == [1]
    assert told.new() == [("start", 1)]
    assert told.pool.admit([0], {1}) == []  # it has to wait for a place like others
    told.pool.joined(1)
    told.pool.left(1, busy=False)
    assert told.pool.admit([0], ()) == [0]
    assert told.pool.here(0)
    told.now += INSIST_S
    told.pool.tend()
    assert told.new() == [("stop", 1)]  # it runs, and need not leave any more
    assert told.pool.admit([1], ()) == []
    assert told.new() == [("bye", 0)]
    assert told.pool.admit([1], ()) == [1]  # it is not waited for again


def test_who_comes_back_unasked_again_and_again_holds_no_place_for_ever():
    told = Told(1)
    told.here(0)
    told.pool.admit([1], ())
    for told.now in range(int(STAYS_S)):
        told.pool.left(0, busy=False)
        told.pool.joined(0)
        assert told.pool.admit([1], ()) == []
    told.now = STAYS_S
    told.pool.left(0, busy=False)
    told.pool.joined(0)
    told.new()
    assert told.pool.admit([1], ()) == [1]
    assert told.new() == [("start", 1)]
    told.pool.joined(1)
    told.pool.left(0, busy=False)
    told.pool.left(1, busy=False)
    assert told.pool.admit([0], ()) == [0]  # started, it holds a place again
    told.pool.joined(0)
    told.pool.admit([1], ())
    assert told.pool.free == 0


def test_who_is_lost_with_a_task_is_awaited_and_who_does_not_come_is_given_up():
    told = Told(2)
    told.here(0, 1)
    told.pool.left(0, busy=True)
    told.pool.left(1, busy=False)
    assert told.new() == [("stop", 1)]
    assert told.pool.admit([0, 2], ()) == [0, 2]  # client 0 keeps its place
    assert told.new() == [("start", 2)]
    told.pool.give_up(0)
    assert told.new() == [("stop", 0)]
    told.pool.joined(0)  # too late
    assert told.new() == [("bye", 0)]


def test_who_connects_again_before_the_loss_is_noticed_keeps_its_place():
    told = Told(1)
    told.here(0)
    told.pool.joined(0)
    told.pool.give_up(0)  # it has connected by now
    assert told.new() == []
    assert (told.pool.here(0), told.pool.free) == (True, 0)


def test_who_was_told_to_leave_is_not_awaited_though_it_has_a_task_of_an_earlier_server():
    told = Told(1)
    told.here(0)
    told.pool.joined(1)
    told.pool.left(1, busy=True)
    told.pool.done(1)  # its answer was read after the end of its connection
    assert told.new() == [("bye", 1), ("stop", 1)]
    assert told.pool.free == 0
    told.pool.left(0, busy=False)
    assert told.pool.free == 1


def test_the_bound_holds_whatever_happens():
    draw = random.Random(1)
    for bound in (1, 2, 5):
        told, tasks, connected, most = Told(bound), set(), set(), 0
        places: set[int] = set()
        queue = list(range(12)) * 3
        for _ in range(4000):
            wave = list(dict.fromkeys(queue))[:8]
            for client in told.pool.admit(wave, tasks):
                queue.remove(client)
                tasks.add(client)
            for word, client in told.new():
                (places.add if word == "start" else places.discard if word == "stop" else lambda c: None)(client)
                if word == "bye" and client in connected and draw.random() < 0.5:
                    connected.discard(client)
                    told.pool.left(client, client in tasks)
            client = draw.randrange(12)
            if client in places and client not in connected:
                connected.add(client)
                told.pool.joined(client)
            elif client in connected and draw.random() < 0.2:
                connected.discard(client)
                told.pool.left(client, client in tasks)
            elif client in connected and client in tasks:
                tasks.discard(client)
                told.pool.done(client)
            told.now += 0.5
            told.pool.tend()
            most = max(most, len(places))
        assert (most, queue) == (bound, [])


def test_the_launcher_follows_no_odd_word_of_the_coordinator(tmp_path):
    spec = WorkerSpec(tmp_path, 0, "tcp://127.0.0.1:1", None, tmp_path, "", tmp_path)
    launcher = LocalLauncher(spec, tmp_path, {})
    pool = WorkerPool(launcher, 12, PoolLimits(1, 3, 2, True), report=print, on_lost=print)
    pool.handle_command(b"start 11")
    for word in (b"start 12", b"start -1", b"begin 3", b"start", b"\xff\xff"):
        with pytest.raises(RunFailed, match="unknown command of the coordinator"):
            pool.handle_command(word)


class Exits:
    """Launcher and handle of processes that have ended with a code."""

    reason = ""

    def __init__(self, code: int, log_path: Path) -> None:
        self.code, self.log_path, self.sentinel = code, log_path, 0

    def start(self, process: ClientRange) -> Exits:
        self.sentinel = process.clients[0]
        return self

    def wait(self) -> int:
        return self.code

    def signal(self, number: int) -> None:
        self.code = -number

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("running", "gone"), [(2, [1]), (1, [])])
def test_a_worker_that_left_is_gone_for_good_unless_it_made_room_for_another(tmp_path, running, gone):
    lost, reported = list[int](), list[str]()
    limits = PoolLimits(1, running, 2, True)
    pool = WorkerPool(Exits(0, tmp_path / "log"), 2, limits, report=reported.append, on_lost=lost.append)
    pool.start_worker([1])
    pool.update()
    pool.ended(1)
    pool.update()
    assert (lost, pool.lost(), pool.sentinels, reported) == (gone, gone, [], [])


def test_a_worker_that_leaves_has_its_time_also_after_a_pause_of_the_whole_run(tmp_path, monkeypatch):
    """After Ctrl-Z and fg it was killed before it could do anything: figures that it had not reported were lost."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    worker = Exits(0, tmp_path / "log")
    pool = WorkerPool(worker, 2, PoolLimits(1, 1, 2, True), report=print, on_lost=print)
    pool.start_worker([1])
    pool.update()
    pool.stop_worker([1])
    pool.update()
    now[0] += 60
    pool.update()
    assert worker.code == 0
    for _ in range(16):
        now[0] += 1
        pool.update()
    assert worker.code == -9


def test_a_run_that_is_paused_while_it_starts_goes_on(tmp_path, monkeypatch):
    """After Ctrl-Z and fg the launcher took its observer for one that did not listen in time."""
    running_time, paused, wait_for = time.monotonic, [0.0], Child.wait

    def pause_once(self, timeout_s=None):
        paused[0] = 300.0
        return wait_for(self, timeout_s)

    monkeypatch.setattr(time, "monotonic", lambda: running_time() + paused[0])
    monkeypatch.setattr(Child, "wait", pause_once)
    settings = {**SMALL, **TWELVE, "data": {**TWELVE["data"], "clients": [1, 1]}, "rounds": 2}
    assert api.run(settings, tmp_path, progress=False).state == "finished"


def test_a_worker_that_ends_while_another_starts_is_still_seen_to_end(tmp_path):
    """The descriptor stays open until its watcher has read the exit code; a closed one could be reused."""
    (tmp_path / "logs").mkdir()
    spec = WorkerSpec(tmp_path / "no job", 0, "tcp://127.0.0.1:1", None, tmp_path, "", tmp_path)
    launcher = LocalLauncher(spec, tmp_path / "logs", {})
    first = launcher.start(ClientRange(range(1)))
    assert wait([first.sentinel], 60)
    assert first.wait(0) == 2
    second = launcher.start(ClientRange(range(1, 2)))
    assert wait([first.sentinel], 0) == [first.sentinel]
    assert second.wait(60) == 2
    assert "protocol.json: no such file" in second.log_path.read_text()
    for handle in (first, second):
        handle.close()
        assert handle.wait(0) == 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle.sentinel)
    launcher.close()


class Alive:
    """A process that does not end; counts looks at it."""

    log, reason, sentinel = Path("log"), "", 9

    def __init__(self) -> None:
        self.looks = 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.looks += 1


def test_the_start_of_a_worker_looks_at_none_of_those_that_run(tmp_path, monkeypatch):
    """The looks took two seconds of processor time at the start of a thousand workers."""
    children: list[Alive] = []

    def fork(*_: object) -> Alive:
        children.append(Alive())
        return children[-1]

    monkeypatch.setattr(parents, "fork_worker", fork)
    launcher = LocalLauncher(WorkerSpec(tmp_path, 0, "tcp://127.0.0.1:1", None, tmp_path, "", tmp_path), tmp_path, {})
    for client in range(100):
        launcher.start(ClientRange(range(client, client + 1)))
    assert (len(children), sum(child.looks for child in children)) == (100, 0)


# whole runs


class Watching:
    """Counts the worker processes of a run that this process started; `strike` may do something to one of them, once."""

    def __init__(self, strike=None) -> None:
        self.most = self.threads = 0
        self.strike, self.struck = strike, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            found = workers_of(psutil.Process())
            self.most = max(self.most, len(found))
            for _, process in found:
                try:
                    self.threads = max(self.threads, process.num_threads())
                except psutil.Error:
                    continue

    def prepare(self, step) -> None:
        pass

    def update(self, view) -> None:
        if view.round >= 1 and self.strike is not None and (found := workers_of(psutil.Process())):
            self.struck, process = found[0]
            self.strike, strike = None, self.strike
            strike(process)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def workers_of(launcher: psutil.Process) -> list[tuple[str, psutil.Process]]:
    """(title, process) of every worker below the launcher."""
    found = []
    for process in launcher.children(recursive=True):
        try:
            title = (process.cmdline() or [""])[0]
        except psutil.Error:
            continue
        if title.startswith("dpcfl client"):
            found.append((title.removeprefix("dpcfl "), process))
    return found


def run(folder, watching=None, **runtime):
    """A whole run of TWELVE from this process; (its folder, who watched)."""
    folder.mkdir(parents=True)
    watching = watching or Watching()
    document, failure = running.run_in(folder, config.resolve({**SMALL, **TWELVE, "runtime": runtime}), watching)
    assert failure is None, failure
    assert document["state"] == "finished"
    assert_nothing_left(folder)
    return folder, watching


def rounds_of(folder) -> list[dict]:
    return [line for line in runlog.read(folder / "metrics.jsonl") if "started" in line]


@pytest.fixture(scope="module")
def all_connected(tmp_path_factory):
    """The run with all twelve connected; the reference."""
    folder, watching = run(tmp_path_factory.mktemp("all_connected") / "run")
    assert watching.most == 12
    assert [(line["live"], line["started"]) for line in rounds_of(folder)] == [(12, 0)] * 4
    return folder


def test_three_at_a_time_give_the_bits_of_all_connected_and_of_one_process(all_connected, tmp_path):
    folder, watching = run(tmp_path / "run", max_live_workers=3)
    assert watching.most == 3
    assert (
        last_models(folder)
        == last_models(all_connected)
        == simulate(job_of(all_connected), tmp_path / "simulated").models.tobytes()
    )
    lines = rounds_of(folder)
    assert [line["started"] for line in lines] == [12, 9, 9, 9]  # who is here is asked first
    assert all(line["live"] <= 3 and line["answered"] == 12 for line in lines)
    job = job_of(folder)
    assert all(len(charged_by_round(folder, job, client)) == 4 for client in range(12))
    assert not [check for check in verify_run(folder, None) if check.holds is False]


@pytest.mark.slow  # a killed worker: test_run.py
def test_a_killed_one_of_three_comes_back(all_connected, tmp_path):
    folder, watching = run(tmp_path / "run", Watching(lambda process: process.kill()), max_live_workers=3)
    assert watching.struck.startswith("client ")
    assert last_models(folder) == last_models(all_connected)
    assert len(charged_by_round(folder, job_of(folder), int(watching.struck.split()[1]))) == 4


SLOW_LOCAL = """
import time

from dpcfl_net.algorithms.base import on_client
from dpcfl_net.algorithms.local import Local


class SlowLocal(Local):
    name = "slow-local"

    @on_client(charges=["train"], takes={}, gives={})
    def train(self, me):
        time.sleep(1.5)
        return Local.train(self, me)
"""


def test_a_client_that_makes_room_for_another_reports_the_figures_of_its_model_first(tmp_path, monkeypatch):
    """It waited for a core once more after its answer, was ended meanwhile, and an earlier round's figures were its final ones."""
    (tmp_path / "slow_local.py").write_text(SLOW_LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)  # of the processes, too
    monkeypatch.setattr(worker_pool, "EXIT_S", 0.5)  # less than the training of another client, as 15 s are with many of them
    settings = {
        **TWELVE, "data": {**TWELVE["data"], "clients": [2, 1]}, "rounds": 2,
        "privacy": {"epsilon": 5, "delta": 1e-4, "noise": "seeded", "noise_seed": "5eed" * 16},
    }  # fmt: skip
    few = {"algorithm": {"name": "slow_local:SlowLocal"}, "runtime": {"max_live_workers": 2, "slots": 1}}
    figures = []
    for changes in ({"algorithm": {"name": "local"}, "runtime": {"federation": "in-process"}}, few):
        done = api.run({**settings, **changes}, tmp_path / "runs", progress=False)
        lines = [line for line in runlog.read(done.path / "metrics.jsonl") if "accuracy_by_client" in line]
        figures.append({line["round"]: line["loss_by_client"] for line in lines}[2])
    assert figures[0] == figures[1]


@pytest.mark.parametrize("most", [pytest.param(12, marks=pytest.mark.slow), 3])
def test_clients_that_share_processes_give_the_same_bits(all_connected, tmp_path, most):
    strike = (lambda process: process.kill()) if most == 3 else None
    folder, watching = run(tmp_path / "run", Watching(strike), max_live_workers=most, clients_per_worker=4)
    assert watching.most == 3
    assert (most == 3) == watching.struck.startswith("clients ")
    # Two for each of the process's four clients (with three places, the fourth may still be leaving when the next one
    # starts); in addition to main, watch, start commands, and ZeroMQ's two.
    assert watching.threads <= 2 * 4 + 5
    assert last_models(folder) == last_models(all_connected)
    assert all(line["live"] <= most for line in rounds_of(folder))


@pytest.fixture
def usual_sigint():
    """A shell starts background jobs with SIGINT ignored, and an ignored signal stays ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_between_start_commands_leaves_nothing_and_the_run_resumes(all_connected, tmp_path, usual_sigint):
    folder = tmp_path / "run"
    folder.mkdir()
    settings = config.resolve({**SMALL, **TWELVE, "runtime": {"max_live_workers": 3}})

    def ctrl_c() -> None:
        """After the first round, with the coordinator held: the run cannot be over before the signal is seen."""
        while not any(
            line.get("view") == "server" for line in runlog.read(folder / "metrics.jsonl")
        ):  # written after the checkpoint
            time.sleep(0.002)
        (coordinator,) = [p for p in psutil.Process().children(recursive=True) if "dpcfl coordinator" in command_line(p)]
        coordinator.suspend()
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=ctrl_c)
    pressing.start()
    document, failure = running.run_in(folder, settings, Watching())
    pressing.join()
    assert (document["state"], failure) == ("interrupted", None)
    assert 1 <= document["rounds_done"] < 4
    assert_nothing_left(folder, 0)
    document, failure = running.run_in(folder, config.load(folder / "config.yaml"), Watching())
    assert (document["state"], failure) == ("finished", None)
    assert_nothing_left(folder)
    assert last_models(folder) == last_models(all_connected)


def test_a_client_that_comes_back_answers_the_same_task_with_the_same_bytes(all_connected, tmp_path):
    job = job_of(all_connected)
    theta = np.zeros(job.protocol.model.parameters, np.float32)
    answers = []
    for _ in range(2):
        host = make_host(job, 5, tmp_path)
        answers.append(host.answer(Task(1, "train", {"model": theta})))
        host.close()
    assert answers[0].release == answers[1].release
    assert [answer.cached for answer in answers] == [False, True]


def test_the_benchmark_has_a_record_for_each_of_a_hundred_thousand_clients():
    large = bench_live.configured(100_000, 1000, 5, None)
    assert large.runtime.clients_per_worker > 1
    slices = plan_slices(large.data, open_set(large.data), 0)
    assert len({int(row) for piece in slices for row in piece.train_rows}) == 100_000
    assert bench_live.configured(1000, 100, 5, None).data.dataset == "digits"


def test_a_benchmark_that_ends_between_two_looks_says_so(capsys):
    """It ended with an IndexError."""
    found = bench_live.live(clients=3, sampled=3, rounds=2)
    assert found["cpu_ms_by_role"] == {}
    assert "processor time: not measured, since rounds ended between two looks" in capsys.readouterr().out


@pytest.mark.parametrize(("started", "per", "each"), [(0, "client and round", 100.0), (1, "started client", 300.0)])
def test_the_benchmark_counts_by_clients_that_start_or_by_rounds_if_none_does(started, per, each):
    """With all clients alive it printed the processor time of all of them as that of one."""
    watcher = bench_live._Watcher(4)
    watcher.counts, watcher.spent = [(0.0, 3)], [(1, {"worker": 1.0}), (3, {"worker": 1.6})]
    found = watcher.figures([{"round": at, "seconds": 0.1, "started": started} for at in range(1, 5)], 3)
    assert (found["cpu_per"], found["cpu_ms"]) == (per, pytest.approx(each))


@pytest.mark.slow
def test_a_thousand_clients_with_a_hundred_alive_fit_three_gibibytes():
    found = bench_live.live(rounds=5)
    assert found["most_workers"] <= 100
    assert found["pss_processes"] > 3  # launcher, coordinator, observer and workers
    assert found["pss_gib"] <= 3
