"""Deadlines and quorum over real sockets: late answers are set aside, and a round below its quorum waits for clients to return."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import zmq
from test_federation import Actor, federation, job, made, shifted

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.federation import network
from dpcfl_net.federation.call_limits import LauncherLink
from dpcfl_net.federation.late_answer import LateAnswer
from dpcfl_net.federation.pause import PauseListener
from dpcfl_net.federation.release_check import client_endpoint_arguments
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.runtime.worker import Worker, own_keys
from dpcfl_net.transport.endpoint import Link, ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR, read_pair

__all__ = ["job"]  # the fixture
PAUSE_S = 20.0


class Pauses:
    """Collects the begin and the end of pauses, and calls `then` at the begin."""

    def __init__(self):
        self.began, self.ended, self.in_pause, self.then = [], [], threading.Event(), lambda: None
        self.listeners = {"pauses": PauseListener(self._begin, lambda pause, seconds: self.ended.append(seconds))}

    def _begin(self, pause):
        self.began.append(pause)
        self.in_pause.set()
        self.then()


def theta(job):
    return np.zeros(job[0].protocol.model.parameters, np.float32)


def test_a_late_answer_is_counted_and_never_mixed_into_the_next_round(job):
    release, first = threading.Event(), []

    def slow(model):
        if not first:
            first.append(model)
            release.wait(20)
            return model + np.float32(1)  # the answer to round 1, after its deadline
        return model + np.float32(0.25)

    warnings = []
    answers, listeners = {0: slow} | dict.fromkeys((1, 2, 3), shifted(0)), {"warn": warnings.append}
    with federation(*job, answers, listeners=listeners, quorum=0.75, timeout_s=2.0, pause_s=PAUSE_S) as (
        fed,
        algorithm,
        _,
    ):
        assert fed.call(algorithm.train, common={"model": theta(job)}).missing == [0]
        assert (fed.missing, fed.counts.late) == ([0], [])
        fed.round, fed.timeout_s = 2, 20.0
        release.set()
        updates = fed.call(algorithm.train, common={"model": theta(job)}).column("update")
        assert float(updates[0][0]) == 0.25
        assert (fed.counts.late, fed.missing, fed.counts.missing) == ([0], [], set())
        assert [w for w in warnings if "set aside" in w and "client 0 answered round 1" in w], warnings
        (late,) = [found for w in warnings if (found := LateAnswer.read(w)) is not None]
        assert (late.client, late.round, late.task, late.status, late.arrived, len(late.blake3)) == (
            0,
            1,
            "train",
            "release",
            2,
            64,
        )
        assert str(late) in warnings
        assert fed.endpoint.failures == {}


def test_a_late_answer_is_counted_in_a_round_that_does_not_ask_its_client(job):
    release = threading.Event()

    def slow(model):
        release.wait(20)
        return model

    def after_the_late_one(model):
        release.set()
        time.sleep(1.0)
        return model

    with federation(*job, {0: slow} | dict.fromkeys((1, 2, 3), shifted(0)), quorum=0.75, timeout_s=3.0) as (
        fed,
        algorithm,
        actors,
    ):
        assert fed.call(algorithm.train, common={"model": theta(job)}).missing == [0]
        fed.round, fed.timeout_s, actors[1].answer = 2, 20.0, after_the_late_one
        assert list(fed.call(algorithm.train, each={1: {"model": theta(job)}})) == [1]
        assert (fed.counts.late, fed.missing) == ([0], [])


def test_an_answer_that_a_crash_lost_counts_so_that_no_round_pauses_for_another(job):
    pauses, answers = Pauses(), {0: shifted(0), 1: shifted(0), 2: lambda model: "lost", 3: lambda model: None}
    with federation(*job, answers, listeners=pauses.listeners, quorum=0.75, timeout_s=3.0, pause_s=2.0) as (fed, algorithm, _):
        results = fed.call(algorithm.train, common={"model": theta(job)})
        assert (list(results), results.missing, fed.lost, pauses.began) == ([0, 1], [2, 3], [2], [])


def test_a_client_that_computes_when_a_pause_ends_has_its_time(job):
    def from_the_pause_on(model):
        pauses.in_pause.wait(20)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            actors[2].endpoint.poll(0.1)  # the server hears that it computes
        return model

    pauses, answers = Pauses(), {0: shifted(0), 1: shifted(0), 2: from_the_pause_on, 3: lambda model: None}
    with federation(*job, answers, listeners=pauses.listeners, quorum=0.75, timeout_s=3.0, pause_s=1.0) as (
        fed,
        algorithm,
        actors,
    ):
        assert list(fed.call(algorithm.train, common={"model": theta(job)})) == [0, 1, 2]
        assert len(pauses.began) == 1


def test_an_overdue_answer_counts_while_the_round_waits_for_others(job):
    def after_the_pause_began(model):
        pauses.in_pause.wait(20)
        return model + np.float32(0.25)

    pauses, answers = Pauses(), {0: after_the_pause_began, 1: shifted(0), 2: shifted(0), 3: lambda model: None}
    with federation(*job, answers, listeners=pauses.listeners, quorum=0.75, timeout_s=0.5, pause_s=PAUSE_S) as (
        fed,
        algorithm,
        _,
    ):
        results = fed.call(algorithm.train, common={"model": theta(job)})
        assert (list(results), results.missing, float(results[0]["update"][0])) == ([0, 1, 2], [3], 0.25)
        assert (fed.counts.late, len(pauses.began)) == ([], 1)


def test_a_round_below_its_quorum_waits_and_goes_on_when_a_client_returns(job):
    document, folder = job
    came_back, pauses = [], Pauses()
    how = {"listeners": pauses.listeners, "quorum": 0.75, "timeout_s": 2.0, "pause_s": PAUSE_S}
    with federation(document, folder, dict.fromkeys(range(4), shifted(0)), **how) as (
        fed,
        algorithm,
        actors,
    ):
        for gone in actors[2:]:
            gone.stop.set()
            gone.join()
        pauses.then = lambda: came_back.append(Actor(document, folder, 3, fed.endpoint.address, shifted(0.25)))
        try:
            results = fed.call(algorithm.train, common={"model": theta(job)})  # it does not wait for client 2
            assert (list(results), results.missing) == ([0, 1, 3], [2])
            assert float(results[3]["update"][0]) == 0.25
            (pause,) = pauses.began
            expected = (
                f"round 1: 2 of 4 clients answered, the quorum is 3: paused, waiting up to {PAUSE_S:g} s for clients to return"
            )
            assert pause.text == expected
            assert pauses.ended == [fed.counts.paused_s]
            assert fed.counts.paused_s < PAUSE_S
            fed.round, fed.quorum = 2, 0.75  # the client is there from the start
            assert list(fed.call(algorithm.train, common={"model": theta(job)})) == [0, 1, 3]
            assert (len(pauses.began), fed.counts.paused_s) == (1, 0.0)
        finally:
            for actor in came_back:
                actor.stop.set()
                actor.join()


def test_a_pause_that_nobody_ends_fails_the_round(job):
    pauses, answers = Pauses(), {0: shifted(0), 1: shifted(0), 2: lambda model: None, 3: lambda model: None}
    with federation(*job, answers, listeners=pauses.listeners, quorum=0.75, timeout_s=2.0, pause_s=0.7) as (fed, algorithm, _):
        with pytest.raises(RunFailed, match="2 of 4 clients answered, the quorum is 3"):
            fed.call(algorithm.train, common={"model": theta(job)})
        assert (len(pauses.began), len(pauses.ended)) == (1, 1)
        assert pauses.ended[0] >= 0.7


def test_a_quorum_that_lost_clients_cannot_reach_fails_without_a_pause(job):
    pauses, answers = Pauses(), {0: shifted(0), 1: shifted(0), 2: lambda model: None, 3: lambda model: None}
    listeners = pauses.listeners | {"launcher": LauncherLink(lost=lambda: [2, 3] if pauses.in_pause.is_set() else [])}
    with federation(*job, answers, listeners=listeners, quorum=0.75, timeout_s=20, pause_s=1000) as (fed, algorithm, _):
        pauses.in_pause.set()
        with pytest.raises(RunFailed, match="2 of 4 clients answered"):
            fed.call(algorithm.train, common={"model": theta(job)})
        assert not pauses.began  # nobody could end it


def test_joining_below_the_quorum_waits_for_more_clients(job):
    document, folder = job
    more, pauses = [], Pauses()
    with federation(document, folder, {0: shifted(0), 1: shifted(0)}, join_s=3, listeners=pauses.listeners, quorum=0.5) as (
        fed,
        _,
        _,
    ):
        fed.quorum, fed.pause_s, fed.join_timeout_s = 0.75, PAUSE_S, 0.2
        pauses.then = lambda: more.append(Actor(document, folder, 2, fed.endpoint.address, shifted(0)))
        try:
            fed.join()
            assert sorted(fed.endpoint.ready) == [0, 1, 2]
            assert "2 of 4 have joined, the quorum is 3: paused" in pauses.began[0].text
            assert pauses.ended[0] < PAUSE_S
        finally:
            for actor in more:
                actor.stop.set()
                actor.join()


def test_joining_waits_for_no_client_that_is_lost(job):
    """With clients 2 and 3 the quorum is out of reach; with client 3 alone it is reached once client 2 comes."""
    document, folder = job
    lost, more, pauses = [], [], Pauses()
    listeners = pauses.listeners | {"launcher": LauncherLink(lost=lambda: lost)}
    with federation(document, folder, {0: shifted(0), 1: shifted(0)}, join_s=3, listeners=listeners, quorum=0.5) as (fed, _, _):
        fed.quorum, fed.pause_s, fed.join_timeout_s = 0.75, 1000, 0.2
        pauses.then = lambda: more.append(Actor(document, folder, 2, fed.endpoint.address, shifted(0)))
        try:
            lost.append(3)
            fed.join()
            assert sorted(fed.endpoint.ready) == [0, 1, 2]
            more[0].stop.set()
            more[0].join()
            while 2 in fed.endpoint.ready:
                fed.endpoint.poll(0.1)
            lost.append(2)
            fed.join_timeout_s = 1000
            with pytest.raises(RunFailed, match=r"^clients \[2, 3\] are lost$"):
                fed.join()
            assert len(pauses.began) == len(pauses.ended) == 1  # the second time, no client is left that could end a pause
        finally:
            for actor in more:
                actor.stop.set()
                actor.join()


def test_a_client_that_does_not_come_before_a_pause_ends_keeps_no_place(job):
    document, folder = job
    pauses, started, told = Pauses(), {}, []

    def tell(word, client):
        told.append((word, client))
        if word == "start" and client and (client != 1 or pauses.in_pause.is_set()):
            started[client] = Actor(document, folder, client, fed.endpoint.address, shifted(0))

    listeners = pauses.listeners | {"launcher": LauncherLink(tell)}
    how = {"join_s": 2.0, "quorum": 0.5, "pause_s": PAUSE_S, "max_live": 3}
    with federation(document, folder, {}, listeners=listeners, **how) as (fed, algorithm, _):
        model = {"model": theta(job)}
        try:
            assert list(fed.call(algorithm.train, each=dict.fromkeys((0, 1, 2), model))) == [1, 2]
            assert len(pauses.ended) == 1
            fed.round = 2
            assert list(fed.call(algorithm.train, each=dict.fromkeys((1, 2, 3), model))) == [1, 2, 3]
            starts_and_stops = [("start", 0), ("stop", 0)]
            assert [word for word in told if word[1] == 0] == 2 * starts_and_stops
            assert ("stop", 2) not in told  # there was a place for client 3
        finally:
            for actor in started.values():
                actor.stop.set()
                actor.join()


def test_time_in_which_a_client_waits_for_a_core_is_not_counted_up_to_a_limit(job, monkeypatch):
    monkeypatch.setattr(network, "WAITS", 2)

    def says(client, phases, seconds):
        """Answers after some seconds in which the client reports these phases in turn."""

        def answer(model):
            end = time.monotonic() + seconds
            while time.monotonic() < end and not actors[client].stop.is_set():
                for phase in phases:
                    actors[client].endpoint.heartbeat(phase)
                    actors[client].endpoint.poll(0.1)
            return model

        return answer

    with federation(*job, dict.fromkeys(range(4), shifted(0)), quorum=0.25, timeout_s=2.0) as (fed, algorithm, actors):
        actors[0].answer = says(0, ["waiting"], 3.0)
        actors[1].answer = says(1, ["computing"], 20)
        actors[2].answer = says(2, ["waiting"], 20)
        actors[3].answer = says(3, ["waiting", "computing"], 20)
        took = {}
        for client in range(4):
            begun = time.monotonic()
            answered = list(fed.call(algorithm.train, each={client: {"model": theta(job)}}, quorum=0.0))
            took[client] = time.monotonic() - begun
            assert answered == [0] * (client == 0)
        assert took[0] >= 3.0
        assert 2.0 <= took[1] < 3.9, took  # it computes, and has one timeout for that
        assert all(4.0 <= took[client] < 15 for client in (2, 3)), took  # two timeouts


@pytest.mark.parametrize("deadline_s", [None, 1.5])
def test_a_phase_tells_when_a_core_became_free_only_if_answers_leave_at_once(tmp_path, deadline_s):
    """Clients of one host compute in turn, so that the begin of one tells how long another one computed."""
    job, keys = made(tmp_path / "keys", local={"batch_size": 32, "lr": 0.5, "pace": "constant", "deadline_s": deadline_s})
    protocol, free, told, phases = job.protocol, threading.Event(), threading.Event(), []

    @contextlib.contextmanager
    def turn():
        free.wait(20)
        yield

    @contextlib.contextmanager
    def computing():
        with worker._computing():
            told.wait(0 if deadline_s else 20)
            yield

    server = ServerEndpoint(
        "tcp://127.0.0.1:*", Link.of(protocol, read_pair(keys, COORDINATOR, protocol.coordinator_key)),
        **client_endpoint_arguments(job.algorithm, [0]),
    )  # fmt: skip
    spec = WorkerSpec(tmp_path, 0, server.address, None, keys, "", tmp_path / "ledgers")

    def seen(seconds, last=None):
        """Phases of the client in some seconds, or until its answer or the last phase that is asked for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (last is None or last not in phases):
            for event in server.poll(0.05):
                if event.kind == "result":
                    return
                phases.extend([event.phase] if event.kind == "phase" else [])

    with zmq.Context() as context, contextlib.closing(server):
        worker = Worker(spec, job, make_host(job, 0, tmp_path / "ledgers"), context, lambda: turn(), own_keys(spec, job))
        worker.host.turn = computing
        serving = threading.Thread(target=worker.serve)
        serving.start()
        try:
            while not server.ready:
                server.poll(0.05)
            server.send_task(0, 1, "train", {"model": np.zeros(protocol.model.parameters, np.float32)})
            seen(0.8 if deadline_s is None else 20, last="computing")
            busy, before = bool(phases) and phases[-1] == "computing", len(phases)
            free.set()
            seen(10, last="computing")
            told.set()
            seen(20)
        finally:
            worker.stop()
            serving.join()
    assert busy == (deadline_s is not None)
    assert "computing" in phases  # also if the turn came late
    if busy:
        assert phases[before:] == []
