"""The launcher follows the commands of an untrusted server, and returns to signals and other processes whatever it sends."""

from __future__ import annotations

import contextlib
import os
import select
import threading

import pytest

from dpcfl_net.launch.coordinator_pipes import LONGEST_COMMAND, MOST_READ, CoordinatorPipes
from dpcfl_net.runtime.launcher_pipes import command_sender


@pytest.fixture
def ends():
    """The launcher's pipes, and the coordinator's descriptor for commands."""
    pipes = CoordinatorPipes()
    with pipes.renewed() as (commands, _):
        sender = os.dup(commands)
    yield pipes, sender
    pipes.close()
    with contextlib.suppress(OSError):  # the test has closed it
        os.close(sender)


def read(pipes):
    """Commands of one call, which must end within a minute."""
    found = []
    reader = threading.Thread(target=pipes.read_commands, args=(found.append,), daemon=True)
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    return found


def test_commands_arrive_in_order_and_the_pipe_is_closed_after_the_last(ends):
    pipes, sender = ends
    send = command_sender(sender)
    send("start", 3)
    send("stop", 12)
    assert read(pipes) == [b"start 3", b"stop 12"]
    assert read(pipes) == []
    send("start", 4)
    os.close(sender)
    assert read(pipes) == [b"start 4"]
    assert pipes.commands is not None
    assert read(pipes) == []
    assert pipes.commands is None


def test_the_launcher_does_not_wait_for_the_rest_of_a_command(ends):
    pipes, sender = ends
    os.write(sender, b"start 3\nsta")
    assert read(pipes) == [b"start 3"]
    assert read(pipes) == []
    os.write(sender, b"rt 4\n")
    assert read(pipes) == [b"start 4"]


def test_a_server_that_never_stops_sending_does_not_hold_the_launcher(ends):
    pipes, sender = ends
    ended = threading.Event()

    def flood():
        with contextlib.suppress(BrokenPipeError):
            while not ended.is_set():
                os.write(sender, b"stop 3\n" * 500)

    sending = threading.Thread(target=flood, daemon=True)
    sending.start()
    for _ in range(3):
        assert select.select([pipes.commands], [], [], 60)[0]  # the sender may not have run yet
        assert 0 < len(read(pipes)) <= MOST_READ
    ended.set()
    pipes.close()
    sending.join(60)
    assert not sending.is_alive()


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_nothing_is_read_after_a_command_that_is_too_long(ends, end):
    pipes, sender = ends
    os.write(sender, b"start 3\n" + b"x" * (LONGEST_COMMAND + 1) + end)
    assert read(pipes) == [b"start 3"]
    assert pipes.commands is None
