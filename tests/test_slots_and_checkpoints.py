"""Compute slots hold between processes and across crashes; a checkpoint is whole or not there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from dpcfl_net.checkpoint import Checkpoints
from dpcfl_net.errors import RunFailed
from dpcfl_net.slots import Slots
from dpcfl_net.types import State


def work(folder, holders, most, hold_s):
    slots = Slots(folder, 2)
    for _ in range(5):
        with slots.hold():
            with holders.get_lock():
                holders.value += 1
                most.value = max(most.value, holders.value)
            time.sleep(hold_s)
            with holders.get_lock():
                holders.value -= 1


def test_no_more_hold_a_slot_than_there_are(tmp_path):
    context = multiprocessing.get_context("fork")
    holders, most = context.Value("i", 0), context.Value("i", 0)
    workers = [context.Process(target=work, args=(tmp_path, holders, most, 0.01)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert most.value == 2  # both slots were used, and never a third


def test_a_killed_holder_gives_its_slot_back(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with Slots(tmp_path, 1).hold():
            os.write(writer, b"held")
            time.sleep(60)
        os._exit(0)
    assert os.read(reader, 4) == b"held"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    started = time.monotonic()
    with Slots(tmp_path, 1).hold():
        assert time.monotonic() - started < 5


def state(value: float) -> State:
    memory = {"phase": "soft", "posteriors": np.full((3, 2), float(value)), "soft_until": 7, "nested": {"list": [1, None, "x"]}}
    return State(np.full((2, 5), value, np.float32), [0, None, 1], memory)


def test_a_state_is_read_as_it_was_written_and_old_ones_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    for t in range(1, 5):
        checkpoints.write(t, state(t))
    assert checkpoints.rounds() == [3, 4]
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    t, read = found
    assert (t, read.assignment, read.memory["nested"], read.memory["soft_until"]) == (
        4,
        [0, None, 1],
        {"list": [1, None, "x"]},
        7,
    )
    assert read.models.tobytes() == state(4).models.tobytes()
    assert read.memory["posteriors"].dtype == np.float64
    assert (read.memory["posteriors"] == 4).all()
    empty = State(np.empty((0, 5), np.float32), [None])
    checkpoints.write(5, empty)
    assert checkpoints.read(5).models.shape == (0, 5)


def test_a_half_written_checkpoint_is_not_one_and_a_damaged_one_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(1, state(1))
    (tmp_path / ".round_00002.part").mkdir()
    assert checkpoints.rounds() == [1]
    checkpoints.write(2, state(2))
    (tmp_path / "round_00002" / "cluster_1.safetensors").write_bytes(b"x")
    with pytest.raises(RunFailed, match="round_00002"):
        checkpoints.newest()
