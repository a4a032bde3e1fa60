"""Connections to agents in the bundles of a Ray cluster, with a stand-in for Ray whose actors are objects of this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dpcfl_net.launch.placement import ray
from dpcfl_net.launch.placement.ray import Bundle, Cluster, RayConnection

ECHO = "cat; echo 'no room' >&2; exit 7"  # an agent that repeats its commands until its input ends


class StandInForRay:
    """Runs the methods of an actor in a thread for each concurrency group; `lost` ends them with an error, as the loss of a node."""

    class exceptions:
        class RayError(Exception):
            pass

        class GetTimeoutError(RayError, TimeoutError):
            pass

    def __init__(self) -> None:
        self.lost, self.placed, self.killed, self.bundles = False, True, [], []
        self._threads = {group: ThreadPoolExecutor(1) for group in (ray.COMMANDS, ray.REPORTS)}

    def actor(self, bundle: int) -> Any:
        return SimpleNamespace(remote=self._start)

    def _start(self, *arguments: Any) -> _Actor:
        self.bundles.append(Bundle(*arguments))
        return _Actor(self, self.bundles[-1])

    def close(self) -> None:
        for bundle in self.bundles:
            bundle.hang_up()
            bundle._listener.join()
            with bundle._agent:  # closes its pipes
                pass
        for thread in self._threads.values():
            thread.shutdown()

    def call(self, group: str, function: Any, arguments: tuple[Any, ...]) -> Future:
        return self._threads[group].submit(function, *arguments)

    def get(self, answer: Any, timeout: float | None = None) -> Any:
        if answer == "ready" and not self.placed:
            raise self.exceptions.GetTimeoutError
        if self.lost:
            raise self.exceptions.RayError("the node is lost\nat once")
        return None if answer == "ready" else answer.result(timeout)

    def kill(self, actor: _Actor) -> None:
        self.killed.append(actor)
        actor.bundle._agent.kill()


class _Actor:
    """Handle of an actor."""

    def __init__(self, cluster: StandInForRay, bundle: Bundle) -> None:
        self.cluster, self.bundle = cluster, bundle
        self.__ray_ready__ = SimpleNamespace(remote=lambda: "ready")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.bundle, name)
        return SimpleNamespace(options=lambda concurrency_group: SimpleNamespace(
            remote=lambda *arguments: self.cluster.call(concurrency_group, method, arguments)))  # fmt: skip


@pytest.fixture
def cluster(monkeypatch):
    """Opens a connection to an agent that is a script of the shell."""
    made = StandInForRay()

    def connect(script: str = ECHO) -> RayConnection:
        def command(python: str, root: str, run: str, name: str, *, cpu: bool) -> list[str]:
            assert (root, run, name, cpu) == ("/root", "a-run", "bundle-2", True)
            return ["sh", "-c", script]

        monkeypatch.setattr(ray, "agent_command", command)
        return RayConnection(SimpleNamespace(ray=made, wait_s=3.0, actor=made.actor), 2, "/root", "a-run", True)

    made.connect = connect
    yield made
    made.close()


def test_commands_and_reports_pass_a_bundle_whole_and_in_order_until_its_agent_ends(cluster):
    connection = cluster.connect()
    sent = [b"first\n", b"long " * 100_000 + b"\n", b"cut", b" off\n"]
    for data in sent:
        connection.send(data)
    reports = connection.reports()
    assert b"\n".join(next(reports) for _ in range(3)) + b"\n" == b"".join(sent)
    connection.hang_up()
    assert [*reports] == []
    assert connection.failure() == "exit code 7: no room"
    connection.send(b"too late\n")
    connection.close(5.0)
    assert len(cluster.killed) == 1


def test_a_bundle_that_is_closed_lets_its_agent_end_in_order(cluster):
    connection = cluster.connect()
    connection.send(b"word\n")
    assert next(connection.reports()) == b"word"
    connection.close(30.0)
    (actor,) = cluster.killed
    assert actor.bundle._agent.returncode == 7


def test_the_end_of_a_bundle_is_told(cluster):
    connection = cluster.connect("exit 0")
    assert [*connection.reports()] == []
    assert connection.failure() == "exit code 0: no message"
    connection = cluster.connect()
    assert connection.failure() == "the connection was lost"
    reports = connection.reports()
    connection.send(b"word\n")
    assert next(reports) == b"word"
    cluster.lost = True
    assert [*reports] == []
    assert connection.failure() == "Ray: RayError: the node is lost"
    connection.close(5.0)  # it has ended with its node
    assert len(cluster.killed) == 1


@pytest.mark.parametrize(
    ("placed", "said"), [(False, "Ray did not place the bundle within 3 s"), (True, "Ray: RayError: the node is lost")]
)
def test_a_bundle_that_never_starts_is_given_up_and_cut_off(cluster, placed, said):
    cluster.placed, cluster.lost = placed, placed
    connection = cluster.connect()
    assert [*connection.reports()] == []
    assert connection.failure() == said
    connection.hang_up()
    assert len(cluster.killed) == 1


def test_a_bundle_takes_the_sum_of_its_workers_and_whole_gpus_above_one():
    def resources(gpus: float, workers: int) -> dict[str, float]:
        cluster = object.__new__(Cluster)
        cluster._cpus, cluster._gpus = 2, gpus
        return cluster.resources(workers)

    assert resources(0, 3) == {"CPU": 6}
    assert resources(0.1, 3) == {"CPU": 6, "GPU": 0.3}
    assert resources(0.25, 4) == {"CPU": 8, "GPU": 1}
    assert resources(0.25, 5) == {"CPU": 10, "GPU": 2}
