"""A process that ends says why also if its log cannot be written."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from api_runs import TINY
from conftest import assert_nothing_left

from dpcfl_net.core.errors import RunFailed, StopRun
from dpcfl_net.experiment import config
from dpcfl_net.launch import running
from dpcfl_net.launch.placement import child, parents
from dpcfl_net.launch.placement.child import ForkServer, role_environment, start_of, worker_environment
from dpcfl_net.launch.placement.fork_server import FIRST_FREE
from dpcfl_net.launch.placement.host_aggregator import end_of_log


@pytest.fixture(scope="module")
def server():
    """A fork server that has loaded its libraries."""
    made = ForkServer()
    made.wait_until_loaded(lambda: None)
    yield made
    made.close()


def message_of(server: ForkServer, main: str, argument: object, log: Path) -> str:
    """Message of a child that has failed."""
    forked = server.fork("the child", start_of(main, argument, role_environment()), log)
    try:
        return str(forked.failure(forked.wait(60)))
    finally:
        forked.close()


@pytest.mark.parametrize("log", ["log", "full"])
def test_a_full_disk_is_told_with_the_file_and_the_code_of_a_failed_run(tmp_path, log, server):
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "log").write_text("round 2 of 6 done\n")
    found = message_of(server, "full_disk:fill", "/some/file", tmp_path / log)
    assert found == (f"the child ended with code 4: RunFailed: /some/file: no space left on the device (log: {tmp_path / log})")


def test_a_process_starts_where_the_current_folder_was_removed(tmp_path, server, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "RunFailed: /some/file: no space left" in message_of(server, "full_disk:fill", "/some/file", tmp_path / "log")


def test_another_error_is_told_too_where_the_log_cannot_be_written(tmp_path, server):
    (tmp_path / "full").symlink_to("/dev/full")
    found = message_of(server, "full_disk:empty", "", tmp_path / "full")
    assert found.startswith("the child ended with code 70: AttributeError: module 'full_disk' has no attribute 'empty'")


def test_a_process_that_the_system_killed_says_what_that_may_mean(tmp_path, server):
    (tmp_path / "log").write_text("round 2 of 6 done\n")
    forked = server.fork("the child", start_of("test_ended_processes:rest", 60.0, role_environment()), tmp_path / "log")
    os.kill(forked.pid, signal.SIGKILL)
    found = str(forked.failure(forked.wait(60)))
    forked.close()
    assert found == (
        "the child ended with code -9 (killed, for example because the machine had no memory left): round 2 of 6 done "
        f"(log: {tmp_path / 'log'})"
    )


def show_files(name: str) -> None:
    """Main function of a child that shows its open files, which of them its own children get, and what it can read from the first."""
    held = [number for number in range(200) if os.path.exists(f"/proc/self/fd/{number}")]
    print(name, held, [number for number in held if os.get_inheritable(number)], flush=True)
    print(os.read(FIRST_FREE, 100).decode(), file=sys.stderr, flush=True)


def test_a_process_has_its_own_files_and_none_of_another_process(tmp_path, server):
    receiver, sender = os.pipe()
    os.write(sender, b"for client 1")
    resting = server.fork("client 0", start_of("test_ended_processes:rest", 600, role_environment()), tmp_path / "other log")
    start = start_of("test_ended_processes:show_files", "client 1", role_environment())
    forked = server.fork("client 1", start, tmp_path / "log", [receiver])
    assert forked.wait(60) == 0
    assert (tmp_path / "log").read_text() == "client 1 [0, 1, 2, 3, 4] [0, 1, 2]\nfor client 1\n"
    for one in (forked, resting):
        one.close()
    for end in (receiver, sender):
        os.close(end)


def show_place(name: str) -> None:
    """Main function of a child that shows its environment, its current folder and its module path."""
    print(json.dumps([name, dict(os.environ), os.getcwd(), sys.path]), flush=True)


@pytest.mark.parametrize("changes", [{}, {"OWN": "1", "PATH": None}])
def test_a_process_has_the_environment_that_it_is_given_and_the_folder_and_module_path_of_the_launcher(
    tmp_path, server, monkeypatch, changes
):
    """All three may have changed since its parent was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = {name: text for name, text in {**role_environment(), **changes}.items() if text is not None}
    forked = server.fork("a", start_of("test_ended_processes:show_place", "a", environment), tmp_path / "log")
    assert forked.wait(60) == 0
    assert json.loads((tmp_path / "log").read_text()) == ["a", environment, str(tmp_path), sys.path]
    forked.close()


@pytest.mark.parametrize("environment", [role_environment, worker_environment])
def test_the_libraries_of_a_process_use_one_thread_also_if_those_of_the_launcher_use_more(monkeypatch, environment):
    """Several threads would compute other bits."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "2")
    assert [environment()[name] for name in names] == ["1", "1", "1"]


def test_a_process_that_sigterm_does_not_end_is_killed_and_its_files_are_closed(tmp_path, server):
    opened = psutil.Process().num_fds()
    start = start_of("one_operation:ignore_sigterm", str(tmp_path / "ready"), role_environment())
    forked = server.fork("the child", start, tmp_path / "log")
    while not (tmp_path / "ready").exists():
        assert forked.alive(0.01)
    child.stop([forked], 0.1)
    assert forked.wait(0) == -signal.SIGKILL
    assert psutil.Process().num_fds() == opened


class Killed(Exception):
    """Stands for the end of the launcher."""


def rest(seconds: float) -> None:
    """Main function of a child that has nothing to do."""
    time.sleep(seconds)


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_process_ends_with_a_launcher_that_was_killed_while_it_started_it(tmp_path, server, monkeypatch, has_answered):
    def killed(wait, seconds):
        if has_answered:
            assert wait(seconds)  # the answer has arrived; it stays unread
        raise Killed

    log, start = tmp_path / "log", start_of("test_ended_processes:rest", 600, role_environment())
    with monkeypatch.context() as patched:
        patched.setattr(child, "wait_awake", killed)
        with pytest.raises(Killed):
            server.fork("the child", start, log)
    later = server.fork("the next child", start, tmp_path / "other log")  # so the first one was forked
    try:
        parent, deadline = psutil.Process(server.pid), time.monotonic() + 60
        while len(parent.children()) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ([left.pid for left in parent.children()], log.read_text()) == ([later.pid], "")
    finally:
        later.close()


def fail(length: int) -> None:
    """Main function of a child that fails with a long message, which begins with a byte of a file name that is no text."""
    raise ValueError("\udcff" + "x" * length)


def test_a_long_message_is_cut(tmp_path, server):
    """A socket takes no message of a megabyte, and without one the whole last line of the log would be shown."""
    forked = server.fork("the child", start_of("test_ended_processes:fail", 1 << 20, role_environment()), tmp_path / "log")
    error = str(forked.failure(forked.wait(60)))
    forked.close()
    assert error.startswith("the child ended with code 70: ValueError: ?xxx")
    assert len(error) < 3000


def test_a_parent_keeps_no_file_of_a_process_that_has_ended(tmp_path, server):
    parent, start = psutil.Process(server.pid), start_of("full_disk:fill", "/some/file", role_environment())
    without_children(parent)
    before = parent.num_fds()
    for _ in range(3):
        forked = server.fork("the child", start, tmp_path / "log")
        assert forked.wait(60) == 4
        forked.close()
    without_children(parent)
    assert parent.num_fds() == before


def without_children(parent: psutil.Process) -> None:
    """Wait until its children have ended and it waits for a request: it closes the files of a child after it has reaped it."""
    deadline = time.monotonic() + 60
    while (parent.children() or parent.status() != psutil.STATUS_SLEEPING) and time.monotonic() < deadline:
        time.sleep(0.002)


class KillsFirst:
    """A parent whose first child is killed before it has read its arguments."""

    def __init__(self, server: ForkServer, monkeypatch) -> None:
        self.parent, self.killed = psutil.Process(server.pid), []
        without_children(self.parent)
        in_memory = child._in_memory
        monkeypatch.setattr(child, "_in_memory", lambda content: in_memory(content) if self.killed else self._blocked())

    @contextlib.contextmanager
    def _blocked(self):
        receiver, sender = os.pipe()
        threading.Thread(target=self._kill, args=(sender,)).start()
        try:
            yield receiver
        finally:
            os.close(receiver)

    def _kill(self, sender: int) -> None:
        while not (children := self.parent.children()):
            time.sleep(0.01)
        self.killed = [one.pid for one in children]
        for one in children:
            one.kill()
        os.close(sender)


def test_a_process_that_is_killed_while_it_is_forked_is_named_with_the_signal(tmp_path, server, monkeypatch):
    KillsFirst(server, monkeypatch)
    with pytest.raises(RunFailed, match=r"^client 0 was not started: it ended with code -9$"):
        server.fork("client 0", start_of("test_ended_processes:rest", 600, role_environment()), tmp_path / "log")


def test_a_process_that_is_killed_while_it_is_forked_is_forked_again(tmp_path, server, monkeypatch):
    """The run ended with "client 0 was not started: -9", though a worker that is killed later starts again."""
    kills = KillsFirst(server, monkeypatch)
    monkeypatch.setattr(parents, "_libraries", server)
    forked = parents.fork_role("client 0", start_of("test_ended_processes:rest", 600, role_environment()), tmp_path / "log")
    assert forked.alive()
    assert len(kills.killed) == 1
    forked.close()


def test_a_process_that_cannot_take_its_files_says_so(tmp_path):
    """It went on as the fork server, wrote a traceback into the terminal, and the message was that it ended with code 1."""
    limited = ForkServer()
    limited.wait_until_loaded(lambda: None)
    resource.prlimit(limited.pid, resource.RLIMIT_NOFILE, (60, 60))
    with pytest.raises(RunFailed, match=r"^client 0 was not started: its files could not be put in place: invalid argument$"):
        limited.fork("client 0", start_of("test_ended_processes:rest", 600, role_environment()), tmp_path / "log")
    limited.close()


def leave_free(server: ForkServer, descriptors: int) -> None:
    """Limit the open files of a parent that waits for a request, until it has read the next one."""
    parent = psutil.Process(server.pid)
    without_children(parent)
    held = {int(name) for name in os.listdir(f"/proc/{server.pid}/fd")}
    limit = max(most for most in range(64) if most - sum(number < most for number in held) == descriptors)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize(
    ("free", "why"),
    [
        (0, ""),
        (1, "cannot fork: too many open files"),
        (2, "cannot fork: too many open files"),
        (3, "its files could not be put in place"),
    ],
)
def test_a_parent_without_free_descriptors_stays_for_the_next_process(tmp_path, server, free, why):
    """It ended with a traceback if the files of a request took the last descriptors, and the exit codes of its children were lost."""
    parent, start = psutil.Process(server.pid), start_of("full_disk:fill", "/some/file", role_environment())
    server.fork("client 0", start, tmp_path / "log").close()
    without_children(parent)
    before = parent.num_fds()
    leave_free(server, free)
    with pytest.raises(RunFailed, match=f"^client 1 was not started: {why}"):
        server.fork("client 1", start, tmp_path / "log")
    later = server.fork("client 2", start, tmp_path / "log")
    assert later.wait(60) == 4
    later.close()
    without_children(parent)
    assert parent.num_fds() == before


class Broken:
    """A display whose terminal goes away."""

    def prepare(self, step: str) -> None:
        pass

    def update(self, view: Any) -> None:
        if view.round >= 1:
            raise StopRun

    def close(self) -> None:
        raise BrokenPipeError("the terminal is gone")


def test_a_display_that_cannot_be_closed_leaves_no_process_and_no_file_open(tmp_path):
    settings = config.resolve({**TINY, "rounds": 2000, "output": {"transcript": "off"}})
    with pytest.raises(BrokenPipeError, match="the terminal is gone"):
        running.run_in(tmp_path, settings, Broken())
    assert_nothing_left(tmp_path)


def test_an_agent_sends_the_end_of_a_log_with_the_message_that_it_lacks(tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier process\nround 2 of 6 done\n")
    start = len("of an earlier process\n")
    assert end_of_log(log, start, "RunFailed: disk") == "round 2 of 6 done\nRunFailed: disk"
    assert end_of_log(log, start, "") == "round 2 of 6 done\n"
    log.write_text("RunFailed: disk\n")
    assert end_of_log(log, 0, "RunFailed: disk") == "RunFailed: disk\n"
    assert end_of_log(tmp_path / "none", 0, "RunFailed: disk") == "RunFailed: disk"


def test_processes_have_titles_whatever_the_first_variable_of_the_environment(tmp_path, monkeypatch):
    """`dpcfl bench` and faults of processes find them by title."""
    monkeypatch.setattr(os, "environ", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "TOKEN_OF_USER": "secret", **os.environ})
    server, start = ForkServer(), start_of("test_ended_processes:rest", 600, role_environment())
    try:
        assert psutil.Process(server.pid).environ() == role_environment()  # the coordinator is its child
        forked = server.fork("client 0", start, tmp_path / "log")
        try:
            process, deadline = psutil.Process(forked.pid), time.monotonic() + 60
            while "client 0" not in process.cmdline()[0] and time.monotonic() < deadline:
                time.sleep(0.02)
            assert process.cmdline()[0] == "dpcfl client 0"
        finally:
            forked.close()
    finally:
        server.close()
