"""Open tasks of a coordinator's federation over real sockets: order of arrival, silent and hostile clients."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import test_federation
from test_federation import federation as network
from test_federation import shifted

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.federation.asynchronous import Participation
from dpcfl_net.federation.call_limits import LauncherLink
from dpcfl_net.federation.network_asynchronous import AsynchronousNetworkFederation

job = test_federation.job


def open_task(client, number, theta):
    return Participation(client, number, "train", {"model": theta})


def test_open_tasks_end_in_order_of_arrival_and_outlive_a_round(job):
    may_answer = {client: threading.Event() for client in range(4)}

    def when_allowed(client, by):
        def answer(model):
            may_answer[client].wait(60)
            return model + np.float32(by)

        return answer

    def next_client(fed, client):
        may_answer[client].set()
        return fed.next_outcome()

    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    with network(
        *job, {client: when_allowed(client, client / 10) for client in range(4)}, kind=AsynchronousNetworkFederation
    ) as (fed, _, _):
        for client in range(4):
            fed.submit(open_task(client, 1, theta))
        assert [next_client(fed, client).client for client in (2, 1)] == [2, 1]
        fed.round = 2
        fed.submit(open_task(2, 2, theta + np.float32(0.1)))
        fed.submit(open_task(0, 1, theta))  # it is open: nothing is sent again
        ended = [next_client(fed, client) for client in (2, 3, 0)]
        assert [outcome.client for outcome in ended] == [2, 3, 0]
        assert [round(float(outcome.release["update"][0]), 3) for outcome in ended] == [0.3, 0.3, 0.0]
        assert not fed.endpoint.failures


def test_open_tasks_that_fail_end_without_a_release_and_hold_no_other_up(job):
    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    may_answer = threading.Event()
    answers = {
        0: shifted(0),
        1: lambda m: m if may_answer.wait(60) else None,
        2: lambda m: np.full_like(m, np.nan),
        3: shifted(0),
    }
    with network(*job, answers, quorum=0.5, timeout_s=2.5, kind=AsynchronousNetworkFederation) as (fed, _, actors):
        for client in range(4):
            fed.submit(open_task(client, 1, theta))
        first = [fed.next_outcome() for _ in range(3)]
        assert {outcome.client: outcome.release is None for outcome in first} == {0: False, 2: True, 3: False}
        silent = fed.next_outcome()
        assert (silent.client, silent.release, silent.lost) == (1, None, False)
        # Control: the same client with an honest answer takes part again, after its late answer, which counts as such.
        fed.round, actors[1].answer = 2, shifted(0)
        may_answer.set()
        fed.submit(open_task(1, 2, theta))
        assert [outcome.client for outcome in fed.gather(1)] == [1]
        assert (fed.missing, fed.answered, fed.counts.round, fed.counts.late) == ([], 1, 2, [1])


def test_an_answer_that_a_crash_lost_counts_towards_the_quorum_of_its_round_alone(job):
    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    answers = {0: shifted(0), 1: lambda m: "lost", 2: lambda m: "refused", 3: shifted(0)}
    with network(*job, answers, kind=AsynchronousNetworkFederation) as (fed, _, actors):
        for client in (0, 1):
            fed.submit(open_task(client, 1, theta))
        assert [(outcome.client, outcome.lost) for outcome in fed.gather(2)] == [(0, False), (1, True)]
        assert (fed.lost, fed.missing, fed.answered) == ([1], [1], 1)
        fed.round, actors[1].answer = 2, shifted(0)
        for client in (0, 1):
            fed.submit(open_task(client, 2, theta))
        assert [(outcome.client, outcome.lost) for outcome in fed.gather(2)] == [(0, False), (1, False)]
        assert (fed.lost, fed.missing, fed.answered) == ([], [], 2)
        fed.submit(open_task(2, 1, theta))
        with pytest.raises(RunFailed, match="0 of 1 buffered participations were answered, the quorum is 1"):
            fed.gather(1)


def test_lost_clients_take_no_place_of_a_client_that_answers(job):
    def after_a_while(model):
        time.sleep(0.5)
        return model

    theta = np.zeros(job[0].protocol.model.parameters, np.float32)
    answers, lost = {2: after_a_while, 3: after_a_while}, {"launcher": LauncherLink(lost=lambda: [0, 1])}
    with network(*job, answers, listeners=lost, quorum=0.5, kind=AsynchronousNetworkFederation) as (fed, _, _):
        for version in (1, 2):
            fed.round = version
            for client in range(4):
                fed.submit(open_task(client, version if client in answers else 1, theta))
            assert [outcome.client for outcome in fed.gather(2)] == [2, 3]
        # With no other task open, theirs end: a version that needs them does not wait for ever.
        silent = fed.next_outcome(among=[1])
        assert (silent.client, silent.release) == (1, None)
        assert fed.next_outcome().client == 0
