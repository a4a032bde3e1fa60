"""Locks between processes: waiting, not waiting, and the probe of a run folder."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.locks import is_running, locked, run_lock, try_lock


def count_up(path, lock, times):
    for _ in range(times):
        with locked(lock):
            number = int(path.read_text())
            time.sleep(0.001)
            path.write_text(str(number + 1))


def hold(lock, ready, done):
    with locked(lock):
        ready.set()
        done.wait(30)


def test_one_process_at_a_time(tmp_path):
    path, lock = tmp_path / "number", tmp_path / "lock"
    path.write_text("0")
    spawn = multiprocessing.get_context("spawn")
    running = [spawn.Process(target=count_up, args=(path, lock, 20)) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert path.read_text() == "60"
    assert lock.stat().st_mode & 0o777 == 0o600


def test_a_wait_has_a_limit_and_the_end_of_the_holder_releases(tmp_path):
    lock, spawn = tmp_path / "lock", multiprocessing.get_context("spawn")
    ready, done = spawn.Event(), spawn.Event()
    holder = spawn.Process(target=hold, args=(lock, ready, done))
    holder.start()
    assert ready.wait(60)
    assert try_lock(lock) is None
    with pytest.raises(TimeoutError), locked(lock, timeout_s=0.1):
        pass
    holder.kill()
    holder.join(10)
    with locked(lock, timeout_s=10):
        assert try_lock(lock) is None
    handle = try_lock(lock)
    assert handle is not None
    os.close(handle)


def test_a_run_folder_is_held_by_one_and_probed_by_all(tmp_path):
    assert not is_running(tmp_path)
    with run_lock(tmp_path):
        assert is_running(tmp_path)
        with pytest.raises(ConfigError, match="being run by another process"), run_lock(tmp_path):
            pass
        assert is_running(tmp_path)
    assert not is_running(tmp_path)
