"""A process of several clients follows the launcher's start and stop commands, whenever they come."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpcfl_net.core import open_files
from dpcfl_net.core.errors import LedgerError, RunFailed
from dpcfl_net.core.failed_clients import ClientsFailed, failed_clients
from dpcfl_net.launch.placement.base import failure
from dpcfl_net.launch.placement.fork_server import LONGEST_TEXT
from dpcfl_net.runtime import worker_group
from dpcfl_net.runtime.specs import GroupSpec, WorkerSpec
from dpcfl_net.transport.endpoint import ClientEndpoint, Link
from dpcfl_net.transport.observer_outbox import ObserverOutbox

SPEC = WorkerSpec(Path(), 0, "", "", Path(), "", Path())


class Waiting:
    """A worker that serves until it is stopped."""

    def __init__(self, spec, job, host, context, turn, pair):
        self.client, self.came_too_late, self.turn = spec.client, False, turn
        self._stopped, self.serving = threading.Event(), threading.Event()

    def serve(self):
        self.came_too_late = self._stopped.is_set()
        self.serving.set()
        assert self._stopped.wait(60)

    def stop(self):
        self._stopped.set()


class Process:
    """A group in a thread, the launcher's end of its pipe, and its workers in the order of their start."""

    def __init__(self, monkeypatch):
        self.workers, self.may_open, self.errors, self.gates = [], threading.Event(), {}, {}
        self.may_open.set()
        monkeypatch.setattr(worker_group, "turns", lambda spec: contextlib.nullcontext)
        monkeypatch.setattr(worker_group, "make_host", self._opened)
        monkeypatch.setattr(worker_group, "own_keys", lambda spec, job: ("public", "secret"))
        monkeypatch.setattr(worker_group, "Worker", self._made)
        receiver, self._pipe = multiprocessing.Pipe(duplex=False)
        with receiver:
            spec = GroupSpec(SPEC, os.dup(receiver.fileno()))
        self.error, self._group = None, worker_group.Group(spec, None, None)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        try:
            self._group.serve()
        except Exception as error:
            self.error = error

    def _opened(self, job, client, *about, **more):
        self.may_open.wait(60)
        if client in self.gates:
            self.gates[client].wait(60)
        if client in self.errors:
            raise self.errors[client]

    def _made(self, *about):
        self.workers.append(Waiting(*about))
        return self.workers[-1]

    def send(self, *commands):
        for command in commands:
            self._pipe.send_bytes(command.encode())

    def started(self, count):
        """Wait until so many workers have been started; return the clients of all."""
        until(lambda: len(self.workers) >= count)
        assert self.workers[count - 1].serving.wait(60)
        return [worker.client for worker in self.workers]

    def end(self):
        """Close the pipe; the group ends once its clients have left."""
        self._pipe.close()
        assert self.failure() is None

    def failure(self):
        """Error with which the process ends; None if it ends without one."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.error


def until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_served(client):
    return f"client {client}" in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def group(monkeypatch):
    process = Process(monkeypatch)
    yield process
    process.may_open.set()
    for worker in process.workers:
        worker.stop()
    until(lambda: not any(map(is_served, range(10))))  # the next test looks for threads of the same names


def test_a_client_that_is_stopped_while_its_gate_is_opened_leaves(group):
    group.may_open.clear()
    group.send("start 3", "stop 3", "start 4")
    until(lambda: is_served(4))  # its command came after the others
    group.may_open.set()
    until(lambda: not is_served(3))
    assert sorted(group.started(2)) == [3, 4]
    assert is_served(4)
    group.send("stop 4")
    group.end()


def test_a_client_goes_on_after_the_end_of_the_commands_until_it_leaves(group):
    """As after the last round: the process would end while its clients still send."""
    group.send("start 3")
    group.started(1)
    group._pipe.close()
    group._thread.join(0.2)
    assert group._thread.is_alive()
    group.workers[0].stop()
    assert group.failure() is None


def test_one_client_of_a_process_computes_at_a_time(group):
    """They share one engine."""
    group.send("start 3", "start 4")
    group.started(2)
    entered = threading.Event()

    def compute():
        with group.workers[1].turn():
            entered.set()

    with group.workers[0].turn():
        threading.Thread(target=compute, daemon=True).start()
        assert not entered.wait(0.1)
    assert entered.wait(60)


def test_what_is_no_command_ends_the_process_with_an_error(group):
    """It would wait for commands that it no longer reads."""
    group.send("start 3", "start all")
    assert isinstance(group.failure(), ValueError)


def test_a_client_that_is_started_before_it_has_left_starts_once_more(group):
    group.send("start 3")
    group.started(1)
    group.send("start 3", "start 4")
    assert group.started(2) == [3, 4]
    group.workers[0].stop()  # the coordinator has said goodbye
    assert group.started(3) == [3, 4, 3]
    group.workers[2].stop()
    until(lambda: not is_served(3))
    group.send("start 5", "stop 4", "stop 5")
    group.end()
    assert [worker.client for worker in group.workers] == [3, 4, 3, 5]


def test_a_stop_command_takes_back_a_start_command_and_a_start_command_a_stop_command(group):
    group.send("start 3")
    group.started(1)
    group.send("start 3", "stop 3")
    until(lambda: not is_served(3))
    group.send("start 3")
    assert group.started(2) == [3, 3]
    assert [worker.came_too_late for worker in group.workers] == [False, False]
    group.send("stop 3")
    group.end()
    assert len(group.workers) == 2


@pytest.mark.parametrize(
    ("errors", "message", "code"),
    [
        ({4: LedgerError("ledger-broken", "edited")}, "client 4: LedgerError: ledger-broken: edited", 3),
        ({2: ValueError("two\nlines"), 4: LedgerError("ledger-broken", "edited"), 5: ValueError("b")},
         "clients 2, 4-5: ValueError: two lines", 70),
    ],
)  # fmt: skip
def test_a_process_ends_with_the_names_of_all_clients_that_failed(group, errors, message, code):
    """Its launcher starts the others again. All clients of the process were lost with the one whose error ended it."""
    group.errors.update(errors)
    group.may_open.clear()
    group.send(*(f"start {client}" for client in range(2, 7)))
    until(lambda: is_served(6))
    group.may_open.set()
    failed = group.failure()
    assert (type(failed), str(failed), failed.exit_code) == (ClientsFailed, message, code)
    assert failed_clients(f"ClientsFailed: {failed}", range(2, 7)) == sorted(errors)
    assert {worker.client for worker in group.workers} == set(range(2, 7)) - set(errors)


def test_a_process_whose_client_failed_ends_when_the_last_gate_is_open(group):
    """Its other clients would go on, and the launcher would not hear of the failure before they leave."""
    group.errors[3], group.gates[4] = ValueError("broken"), threading.Event()
    group.may_open.clear()
    group.send("start 3")
    until(lambda: is_served(3))
    group.send("start 4")
    until(lambda: is_served(4))
    group.may_open.set()
    until(lambda: not is_served(3) and group._group._news.empty())
    group._thread.join(0.1)
    assert group._thread.is_alive()  # client 4 may fail for the same reason
    group.gates[4].set()
    assert str(group.failure()) == "client 3: ValueError: broken"


@pytest.mark.parametrize(
    ("failed", "named", "shown"),
    [
        (range(10_001, 11_801, 2), range(10_001, 11_801, 2), "10001, 10003, 10005, 10007, 10009, 10011, 10013, 10015, 10017, 10019 and 890 more"),
        (range(10_001, 14_001, 2), [], "10001, 10003, 10005, 10007, 10009, 10011, 10013, 10015, 10017, 10019 and 1,990 more"),
    ],
    ids=["all fit the message", "not all fit it"],
)  # fmt: skip
def test_the_message_of_many_failed_clients_fits_and_its_text_is_short(tmp_path, failed, named, shown):
    """A list of more than 300 was cut: the text lacked its cause, and all clients of the process counted as failed."""
    error = ClientsFailed(dict.fromkeys(failed, ValueError("x" * 5000)))
    reason = f"ClientsFailed: {error}"
    assert len(reason) <= LONGEST_TEXT
    assert failed_clients(reason, range(10_000, 15_000)) == list(named)
    assert f": ClientsFailed: clients {shown}: ValueError: xxx" in str(failure("a process", 70, tmp_path / "log", reason))


@pytest.mark.parametrize("error", [RunFailed("the coordinator does not answer"), OSError(errno.ENOSPC, "full")])
def test_an_error_that_concerns_all_clients_of_a_process_names_none(group, error):
    group.errors[3] = error
    group.send("start 3")
    assert group.failure() is error


def test_a_client_whose_keys_are_not_on_this_host_gets_no_ledger_here(monkeypatch, tmp_path):
    """Its ledger is where its keys are. A worker of many clients made an empty one before it looked for the keys."""
    opened = []
    job = SimpleNamespace(protocol=SimpleNamespace(client=lambda client: SimpleNamespace(public_key="")))
    monkeypatch.setattr(worker_group, "turns", lambda spec: contextlib.nullcontext)
    monkeypatch.setattr(worker_group, "make_host", lambda *about, **more: opened.append(about))
    receiver, pipe = multiprocessing.Pipe(duplex=False)
    with receiver, pipe:
        pipe.send_bytes(b"start 3")
        group = worker_group.Group(GroupSpec(replace(SPEC, keys=tmp_path), os.dup(receiver.fileno())), job, None)
        with pytest.raises(ClientsFailed, match=r"^client 3: ConfigError: .*client_0003\.public") as failed:
            group.serve()
    assert (failed.value.exit_code, opened) == (2, [])


def test_a_process_has_sockets_for_all_clients_of_the_job():
    """With a pool of more than 1,024 clients, one process could get as many at once: Too many open files."""
    clients = 1100
    if open_files.allow(open_files.files_for(clients)) < open_files.files_for(clients):
        pytest.skip("the system allows a process fewer open files")
    with worker_group.new_context(clients) as context, contextlib.ExitStack() as stack:
        link = Link("ab12", "0" * 64, security="none", context=context)
        for client in range(clients):
            for end in (
                ClientEndpoint("tcp://127.0.0.1:1", link, client=client, task_template={}.get),
                ObserverOutbox("tcp://127.0.0.1:1", link, sender=client),
            ):
                stack.callback(end.close, abort=True)


def test_a_process_of_many_clients_raises_its_limit_on_open_files_for_all_of_each(monkeypatch):
    """150 clients had 1,664 files open; the limit was raised to 728, so that the usual 1,024 were too few."""
    asked = []
    job = SimpleNamespace(protocol=SimpleNamespace(roster=range(150)))
    monkeypatch.setattr(worker_group, "prepare_process", lambda spec: None)
    monkeypatch.setattr(worker_group, "read_job", lambda *_: job)
    monkeypatch.setattr(worker_group, "Group", lambda *_: SimpleNamespace(serve=lambda: None))
    monkeypatch.setattr(worker_group.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(open_files, "allow", asked.append)
    worker_group.run_group(GroupSpec(SPEC, 0))
    assert asked[0] >= 1664
