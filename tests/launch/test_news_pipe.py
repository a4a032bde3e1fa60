"""The launcher tells a server process who is lost without waiting for it, however many are lost at once."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dpcfl_net.launch.coordinator_pipes import CoordinatorPipes
from dpcfl_net.runtime.launcher_pipes import LauncherNews, open_pipe
from dpcfl_net.transport.keys import OBSERVER

LOST = range(100_000, 130_000)  # of 10 bytes each in a pipe of 64 KiB


@pytest.fixture
def ends():
    """The launcher's pipes, and the news as the coordinator reads them."""
    pipes = CoordinatorPipes()
    with pipes.renewed() as (_, losses):
        news = LauncherNews(open_pipe(os.dup(losses)))
    yield pipes, news
    pipes.close()


def test_more_losses_than_a_pipe_holds_do_not_stall_the_launcher(ends):
    pipes, news = ends

    def tell() -> None:
        for client in LOST:
            pipes.tell(client)
        pipes.tell(OBSERVER)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    teller.join(60)
    assert not teller.is_alive(), "it waits until the coordinator reads"
    lost: list[int] = []
    deadline = time.monotonic() + 60
    while not news.observer_has_ended() and time.monotonic() < deadline:
        lost += news.lost_clients()
    assert news.observer_has_ended()
    assert [*lost, *news.lost_clients()] == list(LOST)


def test_a_coordinator_that_has_ended_is_not_told():
    pipes = CoordinatorPipes()
    with pipes.renewed():
        pass  # its end is closed
    for client in LOST:
        pipes.tell(client)
    pipes.close()


def test_what_was_told_before_the_pipe_is_closed_arrives(ends):
    pipes, news = ends
    pipes.tell(3)
    pipes.close()
    deadline = time.monotonic() + 60
    while not (lost := news.lost_clients()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lost == [3]
