"""Results that one process makes and others wait for: a stopped process holds nobody up."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dpcfl_net.core import shared_result
from dpcfl_net.core.locks import try_lock
from dpcfl_net.core.shared_result import shared
from dpcfl_net.data import cache as data_cache
from dpcfl_net.privacy.accounting.cache import cached


def answer(folder, began, go):
    def compute():
        began.set()
        go.wait(60)
        return 1.5

    cached(folder, {"epsilon": 5}, compute)


def decoded(folder, began, go):
    def decode():
        began.set()
        go.wait(60)
        return {"x": np.arange(3)}

    os.environ["XDG_CACHE_HOME"] = str(folder)
    data_cache.arrays("some", "text", decode, ("x",))


@pytest.fixture
def maker():
    """Starts a process that makes a result and, once it has begun, is told to go on by an event."""
    spawn, made = multiprocessing.get_context("spawn"), []

    def start(target, folder):
        began, go = spawn.Event(), spawn.Event()
        made.append(spawn.Process(target=target, args=(folder, began, go)))
        made[-1].start()
        assert began.wait(60)
        return made[-1], go

    yield start
    for process in made:
        process.kill()
        process.join()


def stop(process):
    os.kill(process.pid, signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


@pytest.mark.timeout(60)
def test_a_stopped_process_holds_up_no_other_and_is_named(maker, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "data"))
    first, go = maker(answer, tmp_path)
    other, go_too = maker(decoded, tmp_path / "data")
    stop(first)
    stop(other)
    asked = []
    for _ in range(2):
        assert cached(tmp_path, {"epsilon": 5}, lambda: asked.append(1) or 1.5) == 1.5
        found = data_cache.arrays("some", "text", lambda: asked.append(2) or {"x": np.arange(3)}, ("x",))
        assert found["x"].tolist() == [0, 1, 2]
    assert asked == [1, 2]
    for one, text in zip((first, other), caplog.messages, strict=True):
        assert f"process {one.pid} is stopped" in text
    for process, event in ((first, go), (other, go_too)):
        os.kill(process.pid, signal.SIGCONT)
        event.set()  # waits for those that wait for it
        process.join(30)
        assert process.exitcode == 0
    assert cached(tmp_path, {"epsilon": 5}, lambda: 2.0) == 1.5


@pytest.mark.timeout(60)
def test_a_process_that_computes_is_waited_for_and_named(maker, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(shared_result, "SAY_S", 0.3)
    process, go = maker(answer, tmp_path)
    threading.Thread(target=lambda: (wait_for_message(caplog), go.set()), daemon=True).start()
    assert cached(tmp_path, {"epsilon": 5}, lambda: 9.0) == 1.5
    (text,) = caplog.messages
    assert text.startswith(f"waiting for process {process.pid}")


def wait_for_message(caplog):
    while not caplog.messages:
        time.sleep(0.01)


@pytest.mark.parametrize("note", ["", "77", "1 other-kernel pid:[1]"])
def test_a_process_that_is_not_seen_is_waited_for(tmp_path, caplog, monkeypatch, note):
    monkeypatch.setattr(shared_result, "SAY_S", 0.2)
    (tmp_path / "lock").write_text(note)
    handle, kept = try_lock(tmp_path / "lock"), []

    def answer_once_it_is_waited_for():
        wait_for_message(caplog)
        kept.append("theirs")

    threading.Thread(target=answer_once_it_is_waited_for, daemon=True).start()
    with caplog.at_level(logging.WARNING):
        assert shared(tmp_path / "lock", lambda: kept[0] if kept else None, lambda: "own") == "theirs"
    assert caplog.messages[0].startswith("waiting for a process of another host or container")
    os.close(handle)
