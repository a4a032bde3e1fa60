"""The network's scenarios: strangers, impostors, replays, eavesdroppers and idlers, each let through once with its defence off."""

from __future__ import annotations

import socket
import subprocess
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import DPCFL, ROOT, SMALL
from wire_ends import (
    UPDATE,
    Cable,
    Ends,
    Liar,
    _nothing_is_left,  # noqa: F401 - fixtures
    _warm,  # noqa: F401
    make_client,
    make_server,
    pair,
    play_steps,
    refusal,
    target,
)

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.experiment import config
from dpcfl_net.experiment.job_files import read_job
from dpcfl_net.launch import new_run
from dpcfl_net.runtime.coordinator import run_coordinator
from dpcfl_net.runtime.specs import CoordinatorSpec
from dpcfl_net.transport import sockets, transcript
from dpcfl_net.transport.channel import Channel
from dpcfl_net.transport.connections import Connections
from dpcfl_net.transport.endpoint import ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR
from dpcfl_net.transport.messages import Header
from dpcfl_net.transport.sockets import AllowList

GREETING = 64  # bytes of a ZMTP 3 greeting; a peer that sends more before the other side's greeting is dropped


class AnyClient(dict):
    """A roster that takes every key for client 0's."""

    def get(self, key: str, default: object = None) -> int:
        return 0


def call(liar: Liar, ends: Ends, limit_s: float = 5.0, **fields: Any) -> str:
    """What comes of a HELLO: WELCOME, a code, how the connection ended, or silence."""
    had, said, deadline = len(liar.hears()), liar.say("HELLO", **fields), time.monotonic() + limit_s

    def answers() -> list[Header]:
        return [h for h in liar.hears()[had:] if h.parent in (said.id, "") and h.kind in ("WELCOME", "ERROR")]

    ends.until(lambda: answers() or liar.closed or time.monotonic() > deadline)
    return (answers()[-1].code or answers()[-1].kind) if answers() else liar.closed or "silence"


@pytest.mark.scenario(1)
def test_an_unknown_key_gets_no_message_through(evidence, monkeypatch):
    stranger, log = pair(), []
    with make_server(on_failure=log.append) as server, make_client(server.address, 1) as honest:
        ends = Ends(server, honest)
        with Liar(server.address, 0, keys=stranger) as liar:
            assert call(liar, ends, client=0) == "handshake"
            assert not liar.heard
        with make_client(server.address, 0, keys=stranger) as worker:
            assert refusal(worker, ends) == "handshake"
        ends.joined()
        assert server.ready == {1}
        assert {event.client for event in ends.seen} <= {None, 1}
        assert {line["code"] for line in log} == {"unknown-key"}
        assert all(stranger[0] in line["reason"] for line in log)
    evidence.got("not let in, nothing heard; logged as unknown-key with the key; a worker with it leaves: handshake")

    monkeypatch.setattr(AllowList, "callback", lambda self, domain, key: True)
    with make_server() as server, Liar(server.address, 0, keys=stranger) as liar:
        ends = Ends(server)
        assert call(liar, ends, client=0) == "unknown-key"
        assert server.bytes_up > 0
        server._connections._by_key = AnyClient()
        assert call(liar, ends, client=0) == "WELCOME"
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: liar.hears(kind="TASK", id=task))
    evidence.control(
        "with an allow-list that admits every key its message arrives, and with such a roster it gets client 0's task"
    )


@pytest.mark.scenario(2)
def test_a_client_without_curve_is_refused(evidence):
    with make_server() as server, Liar(server.address, curve=False) as liar:
        ends = Ends(server)
        assert call(liar, ends, client=0) == "handshake"
        ends.until(lambda: server.failures["handshake"])
        assert (server.ready, server.bytes_up, liar.heard) == (set(), 0, [])
    evidence.got("handshake refused and logged, no byte of it read")
    with make_server(security="none") as server, Liar(server.address, curve=False) as liar:
        assert call(liar, Ends(server), client=0) == "WELCOME"
        assert server.ready == {0}
    evidence.control("at a plain socket the same client is welcomed")


class NoAuthenticator:
    """One that was never started."""

    def __init__(self, context: zmq.Context) -> None:
        pass

    def start(self) -> None:
        pass

    stop = start

    def configure_curve_callback(self, **how: Any) -> None:
        pass


@pytest.mark.scenario(3)
def test_without_an_authenticator_nobody_gets_in(evidence, monkeypatch):
    context = zmq.Context()
    with context.socket(zmq.REP) as taken:
        taken.bind("inproc://zeromq.zap.01")
        with pytest.raises(Refused) as caught:
            make_server(context=context)
        assert caught.value.code == "authenticator"
    context.term()
    evidence.got("where it cannot start, bind refuses: authenticator")

    monkeypatch.setattr(sockets, "ThreadAuthenticator", NoAuthenticator)
    with make_server() as server, Liar(server.address, keys=pair()) as liar:
        # libzmq drops the connection at once, or leaves it to its handshake limit.
        ends = Ends(server)
        assert call(liar, ends, 1.0, client=0) in ("handshake", "silence")
        ends.until(lambda: server.failures["handshake"])
        assert (server.bytes_up, liar.heard) == (0, [])
    evidence.got("where it is missing, a stranger's handshake fails and nothing of his is read")

    serve = sockets._serve_curve

    def lenient(made: zmq.Socket, *how: Any) -> Any:
        found = serve(made, *how)
        made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)
        return found

    monkeypatch.setattr(sockets, "_serve_curve", lenient)
    with make_server() as server, Liar(server.address, keys=pair()) as liar:
        ends = Ends(server)
        server._connections._by_key = AnyClient()
        assert call(liar, ends, client=0) == "WELCOME"
    evidence.control("with ZAP_ENFORCE_DOMAIN=0 the missing authenticator lets a stranger in")


@dataclass
class Crossed:
    """A run of one worker process over a cable: how the worker ended, what passed, and every tensor of the transcript."""

    code: int
    seen: bytes
    tensors: list[np.ndarray]
    job: str
    task: str


def start_worker(folder: Path, address: str, ledgers: Path) -> subprocess.Popen:
    arguments = ["worker", folder, "--client", 0, "--connect", address, "--keys", folder / "keys", "--operator-key",
                 folder / "operator.pub", "--ledgers", ledgers]  # fmt: skip
    return subprocess.Popen([*DPCFL, *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def prepared(folder: Path, security: str) -> Path:
    new_run.prepare(
        folder,
        config.resolve(
            {
                **SMALL,
                "data": {**SMALL["data"], "clients": [1], "train_per_client": 100},
                "rounds": 2,
                "algorithm": {"name": "global"},
                "runtime": {"transport": {"security": security}},
            }
        ),
    )
    return folder


def run_over_a_cable(folder: Path) -> Crossed:
    """A whole run of a coordinator and a worker process, with a cable between them that keeps every byte."""
    operator = (folder / "operator.pub").read_text().strip()
    spec = CoordinatorSpec(folder / "protocol.json", operator, "tcp://127.0.0.1:*", None, folder / "keys", folder, "full")
    where = folder / "addresses" / COORDINATOR
    with ThreadPoolExecutor(1) as thread:
        coordinator = thread.submit(run_coordinator, spec)
        while not where.exists() and not coordinator.done():
            time.sleep(0.01)
        with Cable(where.read_text()) as cable:
            worker = start_worker(folder, cable.address, folder / "ledgers")
            try:
                coordinator.result(120)
                worker.communicate(timeout=30)
            finally:
                worker.kill()
            seen = bytes(cable.seen)
    found = list(transcript.messages(folder / "transcript.msgpack"))
    tensors = [array for _, _, tensors in found for array in (tensors or {}).values()]
    names = {header.task for _, header, _ in found if header.task}
    return Crossed(worker.returncode, seen, tensors, digest(read_job(folder, operator).protocol), names.pop())


@pytest.fixture(scope="module")
def crossed(tmp_path_factory) -> dict[str, Any]:
    """Three worker processes at once: with the right server under CURVE and without, and with an impostor."""
    made = {security: prepared(tmp_path_factory.mktemp(security), security) for security in ("curve", "none")}
    protocol = read_job(made["curve"], (made["curve"] / "operator.pub").read_text().strip()).protocol
    clients = {0: protocol.roster[0].public_key}
    with (
        make_server(run=protocol.run, job=digest(protocol), keys=pair(), clients=clients) as impostor,
        ThreadPoolExecutor(2) as pool,
    ):
        misled = start_worker(made["curve"], impostor.address, tmp_path_factory.mktemp("ledgers"))
        try:
            found = {security: pool.submit(run_over_a_cable, folder) for security, folder in made.items()}
            done = {security: future.result() for security, future in found.items()}
            _, said = misled.communicate(timeout=60)
        finally:
            misled.kill()
        impostor.poll(0.05)
        assert (impostor.ready, impostor.bytes_up) == (set(), 0)
    return {**done, "impostor": (misled.returncode, said)}


@pytest.mark.scenario(4)
def test_a_worker_with_another_server_exits_with_its_code(evidence, crossed):
    code, said = crossed["impostor"]
    assert (code, "handshake: no coordinator with the expected key" in said) == (3, True), said
    evidence.got("the worker process exits with 3 (handshake: no coordinator with the expected key), having said nothing")
    assert crossed["curve"].code == 0
    evidence.control("with the right key the same worker serves the run and exits with 0")


@pytest.mark.scenario(31)
def test_weights_do_not_cross_in_clear(evidence, crossed):
    def in_clear(run: Crossed) -> int:
        """Tensors of which 32 bytes out of the middle were seen on the cable."""
        middles = [array.tobytes()[array.nbytes // 2 :][:32] for array in run.tensors]
        assert all(len(set(middle)) > 8 for middle in middles)
        return sum(middle in run.seen for middle in middles)

    curve, none = crossed["curve"], crossed["none"]
    for run in (curve, none):
        assert len(run.tensors) == 4  # two rounds, down and up
        assert len(run.seen) > sum(array.nbytes for array in run.tensors)
    assert in_clear(curve) == 0
    assert curve.job.encode() not in curve.seen
    assert curve.task.encode() not in curve.seen
    evidence.got(f"{len(curve.seen):,} bytes captured: none of {len(curve.tensors)} tensors, no job hash, no task name in them")
    assert in_clear(none) == 4
    assert none.job.encode() in none.seen
    assert none.task.encode() in none.seen
    evidence.control("with security none all 4 tensors, the job hash and the task name are in the capture")


@pytest.mark.scenario(5)
def test_b_that_claims_to_be_a_stays_b(evidence):
    with make_server() as server, make_client(server.address, 0) as a, Liar(server.address, 1) as b:
        ends = Ends(server, a).joined()
        assert call(b, ends, client=0) == "WELCOME"
        assert server.ready == {0, 1}
        assert server.failures == {"identity": 1}
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: ends.tasks(a))
        assert not b.hears(kind="TASK")
        b.say("RESULT", parent=task, round=1, task="small", code="lost")
        ends.until(lambda: ends.of("failed"))
        assert (ends.of("failed")[-1].client, ends.of("failed")[-1].code) == (1, "task-closed")
        a.send_result(task, "release", {"update": UPDATE})
        ends.until(lambda: ends.of("result"))
        assert [event.client for event in ends.of("result")] == [0]
    evidence.got("welcomed as B and counted (identity); A's task goes to A, B's answer to it is refused: task-closed")
    with make_server(security="none") as server, Liar(server.address, 1, curve=False) as b:
        ends = Ends(server)
        assert call(b, ends, client=0) == "WELCOME"
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: b.hears(kind="TASK", id=task))
        b.say("RESULT", parent=task, round=1, task="small", code="lost")
        ends.until(lambda: ends.of("result"))
        assert (ends.of("result")[0].client, server.ready) == (0, {0})
    evidence.control("with security none, where the claim is all there is, B gets A's task and answers it as A")


@pytest.mark.scenario(6)
def test_one_key_twice_is_refused_until_the_first_is_gone(evidence, monkeypatch):
    with make_server() as server:
        first = make_client(server.address)
        try:
            ends = Ends(server, first).joined()
            with make_client(server.address, duplicate_grace_s=0.0) as second:
                assert refusal(second, ends) == "duplicate"
            assert ends.round(first, 0, 1, UPDATE).kind == "result"
        finally:
            first.close(abort=True)
        with make_client(server.address) as third:
            assert ends_with(server, third).round(third, 0, 2, UPDATE).kind == "result"
    evidence.got("second refused: duplicate; the first works on; once it has gone the key may connect again")
    with make_server() as server:
        assert route_taken(server) == (True, False)
    evidence.got("a routing id that another connection has is ignored")

    def handing_over(*how: Any) -> zmq.Socket:
        made = new_socket(*how)
        made.router_handover = 1
        return made

    new_socket = sockets.new_socket
    monkeypatch.setattr(sockets, "new_socket", handing_over)
    with make_server() as server:
        assert route_taken(server) == (False, True)
    evidence.control("with ROUTER_HANDOVER=1 client 1 asks for client 0's routing id and gets its task")
    monkeypatch.setattr(sockets, "new_socket", new_socket)
    monkeypatch.setattr(Connections, "_alive", lambda self, peer: False)
    with make_server() as server, Liar(server.address) as one, Liar(server.address) as two:
        ends = Ends(server)
        assert (call(one, ends, client=0), call(two, ends, client=0)) == ("WELCOME", "WELCOME")
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: two.hears(kind="TASK", id=task))
        assert not one.hears(kind="TASK")
    evidence.control("without the look at the first connection the second takes its place and its task")


def ends_with(server: ServerEndpoint, *clients: Any) -> Ends:
    return Ends(server, *clients).joined()


def route_taken(server: ServerEndpoint) -> tuple[bool, bool]:
    """Client 1 asks for the routing id of client 0's connection: whether 0, and whether 1, then hears 0's task."""
    with Liar(server.address, 0, routing_id=b"one") as first:
        ends = Ends(server)
        assert call(first, ends, client=0) == "WELCOME"
        with Liar(server.address, 1, routing_id=b"one") as second:
            said = second.say("HELLO", client=1)
            for _ in range(60):
                ends.seen += server.poll(0.005)
                if second.hears(parent=said.id):
                    break
            task = server.send_task(0, 1, "small", {})
            ends.until(lambda: first.hears(kind="TASK", id=task) or second.hears(kind="TASK", id=task))
            return bool(first.hears(kind="TASK")), bool(second.hears(kind="TASK"))


class Forgetful(OrderedDict):
    """A set of boot ids that stores nothing."""

    def __contains__(self, key: object) -> bool:
        return False


@pytest.mark.scenario(7)
def test_a_replay_on_a_new_connection_is_stale(evidence, monkeypatch):
    with make_server() as server:
        ends = Ends(server)
        same, other, replay = play_steps(ends, target(server.address), "same-sequence", "other-boot", "replay")
        assert [same.code, other.code, replay.code] == ["sequence", "boot", "stale-boot"]
        assert "stale-boot, no-hello" in replay.reason
        assert not ends.of("result")
    with make_server() as server:
        recorded = recording(server, "curve")
        ends = Ends(server)
        replayed(server, ends, recorded, lambda: server.failures["handshake"])
        assert not ends.seen
    evidence.got("its own bytes again: stale-boot, then no-hello; recorded TCP bytes do not pass CURVE's handshake at all")
    with make_server(security="none") as server:
        recorded = recording(server, "none")
        ends = Ends(server)
        replayed(server, ends, recorded, lambda: server.failures["no-hello"])
        assert server.failures["stale-boot"] >= 1
        assert not [event for event in ends.seen if event.kind != "failed"]
    evidence.got("without CURVE: stale-boot, nothing delivered")
    monkeypatch.setattr(Channel, "admit", lambda self, header: None)
    with make_server(security="none") as server:
        recorded = recording(server, "none")
        ends = Ends(server)
        server._peers[0].boots = Forgetful()
        replayed(server, ends, recorded, lambda: ends.of("phase"))
        assert [event.phase for event in ends.of("phase")] == ["computing"]
        assert ends.of("joined")[0].client == 0
    evidence.control("with boot and sequence checks off the recorded client joins again and its words are delivered")


def recording(server: ServerEndpoint, security: str) -> bytes:
    """All that client 0 sent over TCP while it joined and said that it computes; it has left since."""
    with Cable(server.address) as cable, Liar(cable.address, curve=security == "curve") as victim:
        ends = Ends(server)
        assert call(victim, ends, client=0) == "WELCOME"
        victim.say("HEARTBEAT", code="computing")
        ends.until(lambda: ends.of("phase"))
        recorded = bytes(cable.up)
    ends = Ends(server)
    ends.until(lambda: not server.ready)
    server.failures.clear()
    return recorded


def replayed(server: ServerEndpoint, ends: Ends, recorded: bytes, done: Any) -> None:
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.settimeout(5)
        raw.sendall(recorded[:GREETING])
        while GREETING > len(heard := raw.recv(GREETING, socket.MSG_PEEK)) > 0:
            time.sleep(0.01)
        assert heard
        raw.sendall(recorded[GREETING:])
        ends.until(done)


@pytest.mark.scenario(33)
@pytest.mark.parametrize("limit_ms", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_slow_handshake_is_closed(evidence, monkeypatch, limit_ms):
    def with_limit(milliseconds: int) -> None:
        def limited(*how: Any) -> zmq.Socket:
            made = new_socket(*how)
            assert made.handshake_ivl == 10_000
            made.handshake_ivl = milliseconds
            return made

        monkeypatch.setattr(sockets, "new_socket", limited)

    new_socket, limit_s = sockets.new_socket, limit_ms / 1000
    if limit_ms != 10_000:
        with_limit(limit_ms)
    with make_server() as server, make_client(server.address, 1) as honest:
        ends = Ends(server, honest)
        lasted = trickle(ends, 0.3 * limit_s, limit_s + 8)  # below 10 s, the limit of a run
        assert lasted is not None
        assert lasted > 0.8 * limit_s
        assert ends.joined().round(honest, 1, 1, UPDATE).kind == "result"
    evidence.got(
        f"a greeting byte by byte is closed after {lasted:.1f} s (limit {limit_s:g} s, 10 s in a run), other connections continue"
    )
    with_limit(0)
    with make_server() as server:
        assert trickle(Ends(server), 0.3 * limit_s, 3 * limit_s + 1) is None
    evidence.control(f"with HANDSHAKE_IVL 0 it is still open after {3 * limit_s + 1:.1f} s")


def trickle(ends: Ends, pause_s: float, limit_s: float) -> float | None:
    """Send a greeting byte by byte: seconds until the connection is closed, None if it is open after `limit_s`."""
    host, port = ends.server.address.removeprefix("tcp://").split(":")
    greeting = iter(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0"))
    start = time.monotonic()
    with socket.create_connection((host, int(port))) as slow:
        slow.settimeout(pause_s)
        while time.monotonic() - start < limit_s:
            ends.server.poll(0)
            try:
                slow.send(bytes(islice(greeting, 1)))
                if not slow.recv(4096):
                    return time.monotonic() - start
            except TimeoutError:
                continue
            except ConnectionError:
                return time.monotonic() - start
    return None
