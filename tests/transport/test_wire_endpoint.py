"""Real sockets on 127.0.0.1: tasks and results under CURVE, and what liars, cheats and accidents achieve (nothing)."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import zmq
from closed_port import closed_port
from conftest import ROOT
from wire_ends import (
    JOB,
    KEYS,
    OBSERVER,
    RUN,
    SERVER,
    UPDATE,
    Cable,
    Ends,
    Liar,
    P,
    _nothing_is_left,  # noqa: F401 - fixtures
    _warm,  # noqa: F401
    deliver,
    fds,
    make_client,
    make_server,
    more,
    open_things,
    pair,
    part_of,
    refusal,
    zmtp,
)

from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.runtime.wake_pipe import WakePipe
from dpcfl_net.transport import dialed, guard, observer_inbox, observer_outbox, sockets
from dpcfl_net.transport.channel import REPEATS, Stamp, new_id
from dpcfl_net.transport.dialed import HANDSHAKES, DialedConnection
from dpcfl_net.transport.endpoint import ClientTimes, Link, Payload, ServerEndpoint
from dpcfl_net.transport.guard import MOST_OF_KEY, PERIOD_S, SPARE, Connection
from dpcfl_net.transport.messages import CHUNK, MAX_FRAME, VERSION, WINDOW, Header, WireError, decode, encode
from dpcfl_net.transport.observer_inbox import KEPT_BOOTS, ObserverInbox
from dpcfl_net.transport.observer_notes import End, Models, Personal, Span, decode_note
from dpcfl_net.transport.observer_outbox import ObserverOutbox
from dpcfl_net.transport.server import FAILURES, FRESH_BEATS
from dpcfl_net.transport.sockets import DOMAIN, AllowList, Listener
from dpcfl_net.transport.transcript import Transcript, read


@pytest.fixture
def server() -> Iterator[ServerEndpoint]:
    with make_server() as made:
        yield made


def test_a_text_that_is_no_key_is_refused_and_the_own_pair_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="the public key of the listening side is 'abc': must be a CURVE key"):
        make_client("tcp://127.0.0.1:1", server_key="abc")
    for own in (("abc", KEYS[0][1]), (KEYS[0][0], "secret"), (KEYS[0][0], None)):
        with pytest.raises(ConfigError, match=r"^this side's key pair does not hold two CURVE keys$"):
            make_client("tcp://127.0.0.1:1", keys=own)
        with pytest.raises(ConfigError, match=r"^this side's key pair does not hold two CURVE keys$"):
            make_server(keys=own)


def test_tasks_and_results_of_5_mb_arrive_bit_for_bit(server: ServerEndpoint) -> None:
    with make_client(server.address, 0) as one, make_client(server.address, 2) as two:
        ends = Ends(server, one, two)
        ends.until(lambda: server.ready == {0, 2} and one.welcomed and two.welcomed)
        models = np.random.default_rng(0).standard_normal((2, P)).astype("f4")
        shared = Payload.of({"models": models})
        ids = {client: server.send_task(client, 7, "train", shared) for client in (0, 2)}
        ends.until(lambda: ends.tasks(one) and ends.tasks(two))
        for number, client in ((0, one), (2, two)):
            (task,) = ends.tasks(client)
            assert (task.id, task.round, task.task) == (ids[number], 7, "train")
            np.testing.assert_array_equal(task.tensors["models"], models)
            client.send_result(task.id, "release", {"update": models[0] + np.float32(number)})
        ends.until(lambda: len(ends.of("result")) == 2 and not one.pending and not two.pending)
        for result in ends.of("result"):
            assert (result.round, result.task, result.id, result.status) == (7, "train", ids[result.client], "release")
            np.testing.assert_array_equal(result.tensors["update"], models[0] + np.float32(result.client))
        ends.until(lambda: server.phases == {0: "idle", 2: "idle"})
        assert not server.failures
        assert not one.failures
        assert server.bytes_down > 2 * models.nbytes
        assert server.bytes_up > models.nbytes
        server.bye()
        ends.until(lambda: all(told[-1].kind == "bye" for told in ends.told.values()))


def test_broadcast_shares_the_bytes_of_the_array() -> None:
    models = np.zeros((2, P), "f4")
    payload = Payload.of({"models": models})
    assert len(payload.chunks) == 5
    assert all(np.shares_memory(np.frombuffer(chunk, "u1"), models) for chunk in payload.chunks)


def test_a_client_believes_only_answers_to_its_hello_and_the_boot_that_welcomed_it() -> None:
    stamp, other = Stamp(RUN, JOB), Stamp(RUN, JOB)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        with make_client(address, security="none") as client:

            def until(done: Callable[[], object], limit_s: float = 30.0) -> None:
                deadline = time.monotonic() + limit_s
                while not done():
                    assert time.monotonic() < deadline, client.failures
                    found.extend(client.poll(0.01))

            found: list[Any] = []
            until(lambda: router.poll(0))
            route, hello = router.recv_multipart()
            for count, fields in enumerate(({"kind": "WELCOME"}, {"kind": "ERROR", "code": "job"}), 1):
                router.send_multipart([route, encode(stamp.header(parent=new_id(), **fields))])
                until(lambda count=count: client.failures["no-welcome"] == count)
            assert not client.welcomed
            router.send_multipart([route, encode(stamp.header(kind="WELCOME", parent=decode(hello).id))])
            until(lambda: client.welcomed)
            for _ in range(2):  # a higher sequence number
                other.header(kind="BYE")
            for header in (other.header(kind="BYE"), other.header(kind="TASK", round=1, task="small")):
                router.send_multipart([route, encode(header)])
            until(lambda: client.failures["boot"] == 2)
            assert [event.kind for event in found] == ["welcome"]
            router.send_multipart([route, encode(stamp.header(kind="BYE"))])
            until(lambda: found[-1].kind == "bye")


def test_a_client_is_patient_with_each_connection_that_the_coordinator_takes_for_a_second_one(monkeypatch) -> None:
    """The coordinator may not have seen yet that the connection before has ended."""
    stamp, later_s = Stamp(RUN, JOB), [0.0]
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        address = "tcp://127.0.0.1:*"
        for connection in range(2):
            router = stack.enter_context(context.socket(zmq.ROUTER))
            router.linger = 0
            router.bind(address)
            if connection == 0:
                address = router.last_endpoint.decode()
                client = stack.enter_context(make_client(address, security="none"))
                now = client._clock.now
                monkeypatch.setattr(client._clock, "now", lambda now=now: now() + later_s[0])
            for answer in ({"kind": "ERROR", "code": "duplicate"}, {"kind": "WELCOME"}):
                while not router.poll(0):
                    client.poll(0.01)
                route, hello = router.recv_multipart()
                router.send_multipart([route, encode(stamp.header(parent=decode(hello).id, **answer))])
            while not client.welcomed:
                client.poll(0.01)
            router.close()
            while client.welcomed:
                client.poll(0.01)
            later_s[0] = 2 * ClientTimes.duplicate_grace_s


def test_a_client_says_that_a_task_arrives_only_if_it_takes_time() -> None:
    """Header and chunk are two messages: a client that woke up in between told the coordinator each time."""
    payload, stamp, heard = Payload.of({"models": np.zeros((1, P), "f4")}), Stamp(RUN, JOB), list[Header]()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        with make_client(address, security="none", heartbeat_s=60.0, ack_delay_s=1.0) as client:

            def until(done: Callable[[], object], limit_s: float = 60.0) -> None:
                deadline = time.monotonic() + limit_s
                while not done() and time.monotonic() < deadline:
                    client.poll(0.01)
                    while router.poll(0):
                        heard.append(decode(router.recv_multipart()[1]))

            def tell(**fields: Any) -> None:
                router.send_multipart([route, encode(stamp.header(**fields))])

            while not router.poll(0):
                client.poll(0.01)
            route, hello = router.recv_multipart()
            tell(kind="WELCOME", parent=decode(hello).id)
            until(lambda: heard)
            assert [header.code for header in heard] == ["idle"]
            about = {"tensors": payload.rows, "blake3": payload.blake3, "chunks": len(payload.chunks)}
            tell(kind="TASK", round=1, task="train", **about)
            until(lambda: len(heard) > 1, 0.3)
            assert [header.code for header in heard] == ["idle"]
            until(lambda: len(heard) > 1)
            assert [header.code for header in heard] == ["idle", "receiving"]


def test_answers_without_release_carry_a_status_and_a_reason(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 1, "small", {})
        ends.until(lambda: ends.tasks(client))
        client.send_result(ends.tasks(client)[0].id, "refused", reason="budget: the plan holds no such slot")
        ends.until(lambda: ends.of("result"))
        (result,) = ends.of("result")
        assert (result.status, result.reason, result.tensors) == ("refused", "budget: the plan holds no such slot", {})
        with pytest.raises(ValueError, match="no task"):
            client.send_result(new_id(), "release")


@pytest.mark.parametrize(("field", "value"), [("version", 1), ("run", "ffff"), ("job", "f" * 64)])
def test_other_version_run_or_job_is_refused_with_its_name(server: ServerEndpoint, field: str, value: object) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        header = replace(liar.stamp.header(kind="HELLO", client=0), **{field: value})
        liar.socket.send_multipart([encode(header)])
        ends.until(lambda: liar.hears(kind="ERROR", code=field, parent=header.id))
        assert not server.ready


def test_client_with_another_job_leaves_with_an_error(server: ServerEndpoint) -> None:
    with make_client(server.address, job="f" * 64) as client:
        assert refusal(client, Ends(server)) == "job"


def test_a_client_comes_back_though_the_server_has_not_noticed_that_it_left() -> None:
    with make_server(heartbeat_s=1000) as server:
        ends = Ends(server)
        for _ in range(2):
            with Liar(server.address, 1) as liar:
                ends.until(lambda liar=liar: liar.hello(ends).kind == "WELCOME", 20)


def test_a_client_whose_key_the_server_does_not_know_ends(server: ServerEndpoint) -> None:
    with make_client(server.address, keys=KEYS[0]) as known, make_client(server.address, 1, keys=pair()) as stranger:
        ends = Ends(server, known).joined()
        with pytest.raises(Refused, match=r"^handshake: the coordinator does not know this worker's key$"):
            ends.until(lambda: stranger.poll(0.01), 20)


def test_two_clients_with_one_key_are_refused() -> None:
    """One of them could never join: messages under the key are those of the other."""
    with pytest.raises(ConfigError, match="two clients of the roster have the same public key"):
        make_server(clients={0: KEYS[0][0], 1: KEYS[0][0]})


def test_nothing_but_hello_counts_before_hello(server: ServerEndpoint) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        for kind in ("RESULT", "ACK", "HEARTBEAT", "CREDIT", "BYE"):
            said = liar.say(kind, code={"RESULT": "lost", "HEARTBEAT": "idle"}.get(kind, ""))
            ends.until(lambda said=said: liar.hears(kind="ERROR", parent=said.id, code="no-hello"))
        assert not server.ready


def test_a_boot_id_counts_on_one_connection_only(server: ServerEndpoint) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        assert liar.hello(ends).kind == "WELCOME"
        liar.say("BYE")
        ends.until(lambda: not server.ready)
        assert liar.hello(ends).code == "stale-boot"
        liar.stamp.renew()
        assert liar.hello(ends).kind == "WELCOME"
        liar.stamp.renew()
        liar.say("HEARTBEAT", code="idle")
        ends.until(lambda: liar.hears(kind="ERROR", code="boot"))
        assert server.failures == {"stale-boot": 1, "boot": 1}


def test_broken_messages_get_typed_errors_and_others_go_on(server: ServerEndpoint) -> None:
    with make_client(server.address, 1) as honest, Liar(server.address, 0) as liar:
        ends = Ends(server, honest)
        liar.hello(ends)
        ends.until(lambda: server.ready == {0, 1} and honest.welcomed)
        header = encode(liar.stamp.header(kind="ACK"))
        for code, frames in {
            "not-msgpack": [header[:-3]],
            "header-too-large": [b"\x00" * 70_000],
            "schema": [header.replace(b"ACK", b"AXE")],
            "multipart": [header, b"x", b"y"],
        }.items():
            liar.socket.send_multipart(frames)
            ends.until(lambda code=code: server.failures[code] == 1 and liar.hears(kind="ERROR", code=code))
        liar.say("ACK", chunk=b"a chunk where none belongs")
        liar.say("TASK", task="train")
        liar.say("CHUNK", parent=new_id(), chunk=b"x")
        ends.until(lambda: server.failures["multipart"] == 2 and server.failures["kind"] == 1 and server.failures["chunk"] == 1)
        assert ends.round(honest, 1, 1, UPDATE).kind == "result"
        assert {event.client for event in ends.of("failed")} == {0}


def test_a_stream_of_broken_messages_gets_the_connection_cut(server: ServerEndpoint) -> None:
    with make_client(server.address, 1) as honest, Liar(server.address, 0) as liar:
        ends = Ends(server, honest)
        assert liar.hello(ends).kind == "WELCOME"
        for _ in range(1000):
            liar.socket.send(b"junk")
        ends.until(lambda: 0 not in server.ready)
        ends.joined()
        assert ends.round(honest, 1, 1, UPDATE).kind == "result"
        assert server.failures == {"not-msgpack": FAILURES + 1}  # the rest is dropped without a word


def test_what_a_connection_left_behind_gets_no_other_one_cut(server: ServerEndpoint) -> None:
    """The next connection is likely to get the descriptor of the one that has ended."""
    with Liar(server.address, 0) as liar:
        ends = Ends(server)
        assert liar.hello(ends).kind == "WELCOME"
        for _ in range(1000):
            liar.socket.send(b"junk")
        time.sleep(0.2)
    time.sleep(0.1)
    with Liar(server.address, 1) as other:
        said = other.say("HELLO", client=1)
        time.sleep(0.2)
        ends.until(lambda: server.failures["not-msgpack"] > FAILURES and other.hears(parent=said.id, kind="WELCOME"))
        for _ in range(20):
            server.poll(0.01)
            other.listen()
        assert not other.closed


FLOODED_AND_LEFT = """
import sys, time
from wire_ends import make_server, zmtp
from test_wire_endpoint import observer
from dpcfl_net.transport import sockets

new_socket = sockets.new_socket
def bounded(*how):
    made = new_socket(*how)
    made.rcvhwm = 64
    return made

kind, limit = sys.argv[1:]
if limit == "64":
    sockets.new_socket = bounded
with (make_server if kind == "DEALER" else observer)(security="none") as end:
    with zmtp(end.address, kind) as raw:
        time.sleep(0.3)
        ping = bytes([4, 7]) + bytes([4]) + b"PING" + bytes(2)
        raw.sendall((bytes([0, 4]) + b"junk") * 300 + ping)
        time.sleep(0.3)
    time.sleep(0.3)
    for _ in range(5):
        end.poll(0.1)
print("still here")
"""


@pytest.mark.parametrize("kind", ["DEALER", "PUSH"])
def test_a_peer_that_floods_and_leaves_does_not_end_the_process(kind: str) -> None:
    """With a bounded queue libzmq aborts at a PING that it finds behind what did not fit, once the connection is gone."""

    def ended(limit: str) -> subprocess.CompletedProcess:
        path = os.pathsep.join(map(str, [Path(__file__).parent, ROOT / "tests", ROOT / "tests" / "support", ROOT]))
        return subprocess.run(
            [sys.executable, "-c", FLOODED_AND_LEFT, kind, limit], env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    done = ended("none")
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr
    if zmq.zmq_version_info() <= (4, 3, 5):  # unless the machine is so busy that the peer leaves before its bytes are read
        assert any(ended("64").returncode == -signal.SIGABRT for _ in range(5))


@pytest.mark.parametrize("security", ["curve", "none"])
def test_frames_that_were_read_give_no_room_for_unread_ones(security: str) -> None:
    """The bytes of frames are counted exactly: counted too high, a peer of many short frames could send ahead without bound."""
    link = Link(RUN, JOB, SERVER, security=security)
    listener = Listener(zmq.ROUTER, "tcp://127.0.0.1:*", link, [KEYS[0][0]], unread_limit=1 << 18)
    found: list[WireError] = []
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            sockets.join_curve(peer, Link(RUN, JOB, KEYS[0], SERVER[0], security=security))
            peer.connect(listener.address)
            wait_for(lambda: listener.guard._connections)  # it counts a message that was read before as unread
            for _ in range(6):
                peer.send_multipart([b""] * 5000)
                wait_for(lambda: listener.receive() is not None)
            assert not listener.news()
            for _ in range(4):
                peer.send(bytes(1 << 17))
            deadline = time.monotonic() + 60
            while not (found := listener.news()) and time.monotonic() < deadline:
                time.sleep(0.02)
    finally:
        listener.close(0)
    assert [error.code for error in found] == ["flood"]


def test_messages_of_an_ended_connection_give_no_room_to_the_next_one() -> None:
    """It may get the same descriptor, under which the owner reads the messages of both."""
    listener = Listener(zmq.ROUTER, "tcp://127.0.0.1:*", Link(RUN, JOB, SERVER), [KEYS[0][0]], unread_limit=1 << 18)

    def connected(context: zmq.Context) -> tuple[zmq.Socket, int]:
        """A peer, and the descriptor of its connection at the listener."""
        peer = context.socket(zmq.DEALER)
        peer.linger = 10_000
        sockets.join_curve(peer, Link(RUN, JOB, KEYS[0], SERVER[0]))
        peer.connect(listener.address)
        wait_for(lambda: listener.guard._connections)
        return peer, next(iter(listener.guard._connections))

    try:
        for _ in range(10):  # another descriptor may have been closed meanwhile
            with zmq.Context() as context:
                first, before = connected(context)
                for _ in range(6):
                    first.send(bytes(1 << 15))
                first.close()
                wait_for(lambda: not listener.guard._connections)
                second, now = connected(context)
                with second:
                    second.linger = 0
                    listener.guard.all_read()  # as if the owner had found nothing just before the last messages arrived
                    wait_for(lambda: listener.receive() is not None)
                    while listener.receive() is not None:
                        pass
                    assert not listener.news()
                    for _ in range(3):
                        second.send(bytes(1 << 17))
                    until = time.monotonic() + 5
                    while not (found := listener.news()) and time.monotonic() < until:
                        time.sleep(0.01)
            if now == before:
                break
        assert (now, [error.code for error in found]) == (before, ["flood"])
    finally:
        listener.close(0)


@pytest.mark.parametrize("end", [Connection.shut_down, Connection.reset])
def test_a_connection_that_has_ended_already_can_be_ended(end: Callable[[Connection], None]) -> None:
    """An error would end the guard's thread, and with it all limits."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with accepted:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            with pytest.raises(ConnectionResetError):
                accepted.recv(1)
            connection = Connection(accepted.fileno())
            end(connection)
            connection.forget()


def test_the_guard_goes_on_after_a_connection_that_ended_before_it_heard_of_it(server: ServerEndpoint, monkeypatch) -> None:
    def ended(fd: int) -> Connection:
        raise OSError(errno.EBADF, f"{fd} is closed")

    for left in (1, 2):
        monkeypatch.setattr(guard, "Connection", ended if left == 1 else Connection)
        socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))).close()
        Ends(server).until(lambda left=left: server.failures["handshake"] == left)


def test_a_server_that_ends_gives_the_descriptors_of_its_connections_back() -> None:
    """Python would close them later, when they are those of other files."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        server = make_server()
        with make_client(server.address) as client:
            Ends(server, client).joined()
            server.close(abort=True)
        del server
        gc.collect()
    assert not found


def test_refused_keys_are_kept_up_to_a_limit_until_they_are_told() -> None:
    """A stranger may try more keys than a server that computes has memory for."""
    allow = AllowList([KEYS[0][0]])
    assert not any(allow.callback(DOMAIN, KEYS[1][0].encode()) for _ in range(1000))
    assert 0 < len(allow.refusals()) < 1000
    assert allow.refusals() == []


def wait_for(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_frame_above_the_limit_closes_the_connection() -> None:
    with make_server(security="none") as server, make_client(server.address, 1, security="none") as honest:
        ends = Ends(server, honest).joined()
        with zmtp(server.address) as raw:
            raw.sendall(b"\x02" + (MAX_FRAME + 1).to_bytes(8, "big") + bytes(1000))
            raw.settimeout(5)
            while raw.recv(4096):
                ends.until(lambda: True)
        assert ends.round(honest, 1, 1, UPDATE).kind == "result"


@pytest.mark.parametrize("security", ["curve", "none"])
def test_an_endless_message_of_a_coordinator_is_cut(security: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failures_of(mebibytes: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            if security == "curve":
                router.curve_server = True
                router.curve_publickey, router.curve_secretkey = (key.encode() for key in SERVER)
            address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            with make_client(
                address, security=security, on_failure=lambda line: found.append((line["code"], line["reason"]))
            ) as client:
                deadline = time.monotonic() + 60
                while not router.poll(0):  # its HELLO
                    client.poll(0.01)
                    assert time.monotonic() < deadline
                router.send_multipart([router.recv_multipart()[0], *[bytes(1 << 20)] * mebibytes], copy=False)
                while not found:
                    client.poll(0.01)
                    assert time.monotonic() < deadline
        return found

    ((code, reason),) = failures_of(512)
    assert code == "flood"
    assert 64 <= int(reason.removeprefix("cut a connection with ").split()[0]) < 256
    monkeypatch.setattr(DialedConnection, "flood", lambda self: None)
    assert [code for code, _ in failures_of(128)] == ["multipart"]  # all of it was kept until its end


def test_an_idle_client_sleeps_until_bytes_come_and_still_cuts_an_endless_message() -> None:
    """A thousand idle workers that looked at their connections four times a second took a third of two cores."""
    found: list[str] = []
    wake = WakePipe()
    with (
        closing(wake),
        make_server(security="none", heartbeat_s=1000) as server,
        make_client(
            server.address,
            security="none",
            heartbeat_s=1000,
            on_failure=lambda line: (found.append(line["reason"]), wake.wake()),
        ) as client,
    ):
        client.register(wake, wake.clear)
        Ends(server, client).joined()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        client.poll(2)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 6
        route = server._peers[0].route
        server._line.socket.send_multipart([route, *[bytes(1 << 20)] * 1024], copy=False)
        client.poll(30)
    assert found[0].startswith("cut a connection")  # else the whole message was kept, and then refused


def is_open(stranger: socket.socket) -> bool:
    """Return False if the other side has ended the connection."""
    try:
        while stranger.recv(4096, socket.MSG_DONTWAIT):  # its greeting
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_strangers_who_send_nothing_do_not_take_all_descriptors_of_a_server() -> None:
    """A coordinator with 400 open connections of strangers could not open its checkpoints: the run failed."""
    most = len(KEYS) + SPARE
    with contextlib.ExitStack() as stack, make_server() as server, make_client(server.address, 0) as early:
        ends = Ends(server, early).joined()
        quiet = stack.enter_context(Liar(server.address, 2))  # has proved its key
        quiet.wait(lambda: quiet._through, 10)
        where = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        strangers = [stack.enter_context(socket.create_connection(where)) for _ in range(400)]
        ends.until(lambda: sum(map(is_open, strangers)) <= most - 1, 5)  # the time limit of a handshake is 10 seconds
        until = time.monotonic() + 0.3
        ends.until(lambda: time.monotonic() > until)
        assert sum(map(is_open, strangers)) == most - 1
        quiet.listen()
        assert not quiet.closed
        assert fds("socket:") < 400 + most + 50  # the strangers' ends are in this process, too
        assert ends.round(early, 0, 1, UPDATE).kind == "result"
        with make_client(server.address, 1) as late:
            both = Ends(server, early, late).joined()
            assert both.round(late, 1, 1, UPDATE).kind == "result"
            assert both.round(early, 0, 2, UPDATE).kind == "result"
        assert server.failures["silent"] > 0


def test_messages_of_ended_connections_are_bounded_and_an_honest_client_waits_until_a_server_reads(monkeypatch) -> None:
    """Each left up to 64 MiB of messages behind, which filled the memory of a server that computed."""
    monkeypatch.setattr(sockets, "SPARE", 2)
    with make_server() as server:

        def is_through() -> bool:
            with Liar(server.address, 1) as liar:
                liar.wait(lambda: liar._through or liar.closed, 10)
                return liar._through

        assert all(is_through() for _ in range(len(KEYS) + 2))
        assert not all(is_through() for _ in range(20))
        with pytest.raises(ConnectionResetError):  # which a client takes for a coordinator that is down
            read_to_the_end(("127.0.0.1", int(server.address.rpartition(":")[2])))
        with make_client(server.address, 0) as client:
            client.poll(0.2)
            assert Ends(server, client).joined().round(client, 0, 1, UPDATE).kind == "result"
        assert server.failures["unread"] > 2
        assert is_through()


def read_to_the_end(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 10) as stranger:
        while stranger.recv(4096):
            pass


def test_a_client_that_connects_again_and_again_does_not_take_all_descriptors_of_a_server() -> None:
    """Each connection sent one message and stayed open: a few hundred, under one valid key, ended the run."""
    with contextlib.ExitStack() as stack, make_server() as server, make_client(server.address, 0) as other:
        ends = Ends(server, other).joined()
        for _ in range(3 * MOST_OF_KEY):  # one after another are not too many
            with Liar(server.address, 1) as only:
                for _ in range(3):
                    only.hello(ends)
        assert server.failures["connections"] == 0
        first = stack.enter_context(Liar(server.address, 1))
        first.hello(ends)
        first.hello(ends)  # a message that the server reads before its guard has heard of the connection does not count
        later = [stack.enter_context(Liar(server.address, 1)) for _ in range(3 * MOST_OF_KEY)]

        def left() -> list[Liar]:
            """The later connections that are still open, after another message on each."""
            for liar in [*later, first]:
                liar.listen()
            still = [liar for liar in later if not liar.closed]
            for liar in still:
                liar.say("HEARTBEAT", code="idle")
            return still

        ends.until(lambda: len(left()) < MOST_OF_KEY)
        assert len(left()) == MOST_OF_KEY - 1
        assert server.failures["connections"] == 2 * MOST_OF_KEY + 1
        assert not first.closed  # whoever copies a client's key must not be able to cut the client itself
        assert ends.round(other, 0, 1, UPDATE).kind == "result"


def test_result_sent_again_after_a_lost_ack_is_delivered_once(server: ServerEndpoint) -> None:
    ends = Ends(server)
    payload = Payload.of({"update": UPDATE})
    with Liar(server.address) as liar:
        liar.hello(ends)
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: liar.hears(kind="TASK", id=task))
        about = {"id": new_id(), "parent": task, "round": 1, "task": "small", "code": "release"}
        for times in (1, 2, 3):
            deliver(liar, payload, **about)
            ends.until(lambda times=times: len(liar.hears(kind="ACK", parent=about["id"])) == times)
        assert len(ends.of("result")) == 1
        assert not server.failures


def test_client_keeps_a_result_until_it_is_acknowledged_and_sends_it_over_a_new_connection() -> None:
    with make_server() as server, Cable(server.address) as cable, make_client(cable.address) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 1, "train", {"models": np.zeros((1, P), "f4")})
        ends.until(lambda: ends.tasks(client))
        cable.cut()
        update = np.full(P, 0.5, "f4")
        client.send_result(ends.tasks(client)[0].id, "release", {"update": update})
        ends.until(lambda: ends.of("left") and ends.of("result") and not client.pending)
        np.testing.assert_array_equal(ends.of("result")[0].tensors["update"], update)
        assert len(ends.tasks(client)) == 1
        assert [event.kind for event in ends.told[client]].count("welcome") == 2
        assert ends.round(client, 0, 2, UPDATE).kind == "result"


def test_task_cut_off_in_the_middle_arrives_over_a_new_connection() -> None:
    with make_server() as server, Cable(server.address) as cable, make_client(cable.address) as client:
        ends = Ends(server, client).joined()
        models = np.random.default_rng(1).standard_normal((4, P)).astype("f4")
        server.send_task(0, 1, "train", {"models": models})
        server.poll(0.01)
        cable.cut()
        ends.until(lambda: ends.tasks(client))
        np.testing.assert_array_equal(ends.tasks(client)[0].tensors["models"], models)


def test_client_finds_a_coordinator_that_was_started_again() -> None:
    first = make_server()
    with make_client(first.address) as client:
        ends = Ends(first, client).joined()
        first.send_task(0, 1, "small", {})
        ends.until(lambda: ends.tasks(client))
        address = first.address
        first.close(abort=True)
        with make_server(address) as second:
            again = Ends(second, client)
            client.send_result(ends.tasks(client)[0].id, "release", {"update": UPDATE})
            again.joined()
            again.until(lambda: not client.pending)
            assert second.failures["task-closed"] == 1
            assert again.round(client, 0, 1, UPDATE).kind == "result"


def test_template_is_checked_before_any_chunk_is_taken(server: ServerEndpoint) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        liar.hello(ends)
        task = server.send_task(0, 1, "train", {"models": np.zeros((1, P), "f4")})
        ends.until(lambda: liar.hears(kind="TASK"))
        huge = 1 << 33
        said = liar.say(
            "RESULT",
            parent=task,
            round=1,
            task="train",
            code="release",
            tensors=(("update", "f4", (huge // 4,), huge),),
            blake3="c" * 64,
            chunks=huge // CHUNK,
        )
        memory = psutil.Process().memory_info().vms
        liar.say("CHUNK", bytes(CHUNK), parent=said.id, index=0)
        ends.until(lambda: liar.hears(kind="ERROR", parent=said.id, code="template"))
        assert psutil.Process().memory_info().vms - memory < 64 << 20
        (failed,) = ends.of("failed")
        assert (failed.client, failed.code, failed.id, failed.round) == (0, "template", task, 1)
        assert server.failures == {"template": 1}


@pytest.mark.parametrize(
    ("update", "code"),
    [([np.nan, 0, 0], "non-finite"), ([np.inf, 0, 0], "non-finite"), ([1e6, 0, 0], "norm"), ([1, 2, 3, 4], "template")],
)
def test_a_poisoned_result_fails_for_its_client_alone(server: ServerEndpoint, update: list[float], code: str) -> None:
    with make_client(server.address, 0) as bad, make_client(server.address, 1) as good:
        ends = Ends(server, bad, good).joined()
        failed = ends.round(bad, 0, 1, np.array(update, "f4"))
        assert (failed.kind, failed.code, failed.client, failed.task) == ("failed", code, 0, "small")
        ends.until(lambda: not bad.pending)
        assert ends.round(good, 1, 1, UPDATE).kind == "result"
        assert ends.round(bad, 0, 2, UPDATE).kind == "result"


def test_payload_that_is_not_the_announced_one_is_asked_for_again_and_fails_in_the_end(server: ServerEndpoint) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        liar.hello(ends)
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: liar.hears(kind="TASK"))
        payload = Payload.of({"update": UPDATE})
        payload.blake3 = "0" * 64
        for times in range(1, REPEATS + 2):
            deliver(liar, payload, parent=task, round=1, task="small", code="release")
            ends.until(lambda times=times: len(ends.of("failed")) == times)
        assert {event.code for event in ends.of("failed")} == {"hash"}
        assert [event.id for event in ends.of("failed")] == [""] * REPEATS + [task]
        assert not ends.of("result")


def test_answers_to_other_tasks_rounds_and_statuses_are_refused(server: ServerEndpoint) -> None:
    ends = Ends(server)
    payload = Payload.of({"update": UPDATE})
    with Liar(server.address) as liar:
        liar.hello(ends)
        deliver(liar, payload, parent=new_id(), round=1, task="small", code="release")
        ends.until(lambda: server.failures["task-closed"])
        for code, about in {
            "round": {"round": 2, "task": "small", "code": "release"},
            "template": {"round": 1, "task": "small", "code": "lost"},
        }.items():
            task = server.send_task(0, 1, "small", {})
            deliver(liar, payload, parent=task, **about)
            ends.until(lambda code=code: server.failures[code])
        assert not ends.of("result")


def test_late_answer_to_a_cancelled_task_is_acknowledged_and_set_aside(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 1, "small", {})
        ends.until(lambda: ends.tasks(client))
        server.cancel(0)
        client.send_result(ends.tasks(client)[0].id, "release", {"update": UPDATE})
        ends.until(lambda: not client.pending and ends.of("late"))
        (late,) = ends.of("late")
        assert (late.client, late.round, late.task, late.status, late.tensors) == (0, 1, "small", "release", {})
        assert late.blake3 == Payload.of({"update": UPDATE}).blake3
        assert not ends.of("result")
        assert ends.round(client, 0, 2, UPDATE).kind == "result"
        assert (len(ends.of("late")), server.failures) == (1, {})


def test_late_answer_does_not_answer_the_next_task_and_its_payload_is_not_taken(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 1, "train", {"models": np.zeros((1, P), "f4")})
        ends.until(lambda: ends.tasks(client))
        server.send_task(0, 2, "small", {})  # replaces the first task
        ends.until(lambda: len(ends.tasks(client)) == 2)
        before = server.bytes_up
        first, second = ends.tasks(client)
        client.send_result(first.id, "release", {"update": np.ones(P, "f4")})
        ends.until(lambda: ends.of("late"))
        assert not ends.of("result")
        client.send_result(second.id, "release", {"update": UPDATE})
        ends.until(lambda: not client.pending)
        (result,) = ends.of("result")
        assert (result.round, result.task, [*result.tensors["update"]]) == (2, "small", [*UPDATE])
        assert (ends.of("late")[0].round, server.failures) == (1, {})
        assert server.bytes_up - before <= P * 4 + (64 << 10)  # not sent again


def test_an_answer_whose_task_is_cancelled_while_it_arrives_is_set_aside(server: ServerEndpoint) -> None:
    ends = Ends(server)
    payload = Payload.of({"update": np.ones(P, "f4")})
    with Liar(server.address) as liar:
        liar.hello(ends)
        task = server.send_task(0, 1, "train", {"models": np.zeros((1, P), "f4")})
        about = {"parent": task, "round": 1, "task": "train", "code": "release"}
        said = liar.say("RESULT", tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks), **about)
        first, *rest = map(bytes, payload.chunks)
        liar.say("CHUNK", first, parent=said.id, index=0)
        ends.until(lambda: server.bytes_up > CHUNK)
        server.cancel(0)
        for index, chunk in enumerate(rest, 1):
            liar.say("CHUNK", chunk, parent=said.id, index=index)
        ends.until(lambda: liar.hears(kind="ACK", parent=said.id))
        assert [(late.round, late.status, late.tensors) for late in ends.of("late")] == [(1, "release", {})]
        assert (ends.of("result"), server.failures) == ([], {})


def test_a_task_that_waits_while_a_late_answer_is_confirmed_is_not_sent_again(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 1, "small", {})
        ends.until(lambda: ends.tasks(client))
        server.send_task(0, 2, "small", {})  # replaces the first task
        ends.until(lambda: server.waits(0) and len(ends.tasks(client)) == 2)
        first, second = ends.tasks(client)
        client.send_result(first.id, "release", {"update": UPDATE})
        ends.until(lambda: ends.of("late"))
        until = time.monotonic() + 1  # three times resend_s
        ends.until(lambda: time.monotonic() > until)
        ends.until(lambda: server.waits(0))  # now, or with the next heartbeat if the machine stopped for a second
        assert "idle" not in {event.phase for event in ends.of("phase")}
        assert ends.tasks(client) == [first, second]
        client.send_result(second.id, "release", {"update": UPDATE})
        ends.until(lambda: ends.of("result"))
        ends.until(lambda: server.phases[0] == "idle" and not client.pending)
        assert server.failures == {}


def test_a_late_answer_under_another_round_or_twice_is_refused(server: ServerEndpoint) -> None:
    ends = Ends(server)
    payload = Payload.of({"update": UPDATE})
    with Liar(server.address) as liar:
        liar.hello(ends)
        for code, about in {"round": {"round": 2}, "task-closed": {"round": 1}}.items():
            task = server.send_task(0, 1, "small", {})
            server.cancel(0)
            if code == "task-closed":
                deliver(liar, payload, parent=task, task="small", code="release", **about)
            deliver(liar, payload, parent=task, task="small", code="release", **about)
            ends.until(lambda code=code: server.failures[code])
        assert (len(ends.of("late")), len(ends.of("result"))) == (1, 0)


def test_sender_stops_when_the_window_is_full(server: ServerEndpoint) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        liar.hello(ends)
        task = server.send_task(0, 1, "train", {"models": np.zeros((4, P), "f4")})
        ends.until(lambda: len(liar.hears(kind="CHUNK", parent=task)) >= WINDOW)
        for _ in range(20):
            server.poll(0.01)
        assert len(liar.hears(kind="CHUNK")) == WINDOW
        liar.say("CREDIT", parent=task, index=WINDOW)
        ends.until(lambda: len(liar.hears(kind="CHUNK")) == 10)


def test_a_server_that_sends_many_tasks_at_once_has_one_of_them_in_the_memory_of_a_client(server: ServerEndpoint) -> None:
    """42 tasks of 5 MB were delivered together; the worker keeps the last one, but all were in its memory."""
    with make_client(server.address, 0) as client:
        Ends(server, client).joined()
        peer = server._peers[0]
        for _ in range(20):
            server._send(
                peer, head := server._line.stamp.header(kind="TASK", id=new_id(), round=1, task="small"), encode(head), None
            )
        time.sleep(0.3)  # all of them have arrived
        delivered = [[event.kind for event in client.poll(0.1)].count("task") for _ in range(20)]
    assert delivered == [1] * 20


def test_idle_worker_gets_its_task_again_and_delivers_it_once_more(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        ends = Ends(server, client).joined()
        task = server.send_task(0, 1, "small", {})
        ends.until(lambda: ends.tasks(client))
        client.heartbeat("idle")  # its process lost the task
        ends.until(lambda: len(ends.tasks(client)) == 2)
        assert {event.id for event in ends.tasks(client)} == {task}
        client.send_result(task, "lost")
        ends.until(lambda: ends.of("result"))


def test_a_client_that_falls_silent_or_comes_again_does_not_wait_for_a_core(server: ServerEndpoint) -> None:
    ends = Ends(server)
    with Liar(server.address) as liar:
        liar.hello(ends)
        liar.say("HEARTBEAT", code="waiting")
        ends.until(lambda: server.waits(0))
        until = time.monotonic() + 0.1 * (FRESH_BEATS + 2)
        ends.until(lambda: time.monotonic() > until)
        assert (server.phases, server.waits(0)) == ({0: "waiting"}, False)
        liar.say("HEARTBEAT", code="waiting")
        ends.until(lambda: server.waits(0))
    ends.until(lambda: not server.ready)
    assert not server.waits(0)
    with Liar(server.address) as liar:
        liar.hello(ends)
        assert (server.phases, server.waits(0)) == ({0: "idle"}, False)


def test_a_task_is_acknowledged_on_each_connection_or_sent_again(server: ServerEndpoint) -> None:
    ends = Ends(server)
    task = server.send_task(0, 1, "small", {})
    for acknowledges in (True, False):
        with Liar(server.address) as liar:
            liar.hello(ends)
            ends.until(lambda liar=liar: liar.hears(kind="TASK", id=task))
            if acknowledges:
                liar.say("ACK", parent=task, code="computing")
            until = time.monotonic() + 1.0  # three times resend_s

            def enough(liar: Liar = liar, until: float = until, acknowledges: bool = acknowledges) -> bool:
                liar.say("HEARTBEAT", code="computing")
                return time.monotonic() > until if acknowledges else len(liar.hears(kind="TASK")) > 1

            ends.until(enough)
            assert (len(liar.hears(kind="TASK")) == 1) is acknowledges
        ends.until(lambda: not server.ready)


def test_client_turns_down_what_the_template_or_its_own_check_forbids(server: ServerEndpoint) -> None:
    def check(task: str, tensors: dict[str, np.ndarray]) -> None:
        raise Refused("too-long", "weights out of bounds")

    with make_client(server.address, 0) as one, make_client(server.address, 1, check=check) as two:
        ends = Ends(server, one, two).joined()
        for client, task, tensors, code in (
            (0, "train", {"models": np.zeros((5, P), "f4")}, "template"),
            (0, "small", {"noise_multiplier": np.zeros(1, "f4")}, "template"),
            (0, "upload_data", {}, "unknown-task"),
            (0, "train", {"models": np.full((1, P), np.nan, "f4")}, "non-finite"),
            (1, "small", {}, "too-long"),
        ):
            sent = server.send_task(client, 1, task, tensors)
            ends.until(lambda sent=sent: any(event.id == sent for event in ends.of("failed")))
            assert (ends.of("failed")[-1].client, ends.of("failed")[-1].code) == (client, code)
        assert not ends.tasks(one)
        assert not ends.tasks(two)


def test_registered_descriptor_wakes_poll(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        Ends(server, client).joined()
        inner, outer = socket.socketpair()
        with inner, outer:
            heard: list[bytes] = []
            client.register(inner, lambda: heard.append(inner.recv(10)))
            client.poll(0)
            timer = threading.Timer(0.1, outer.send, [b"ready"])
            timer.start()
            start = time.monotonic()
            client.poll(60)
            timer.join()
            assert heard == [b"ready"]
            assert time.monotonic() - start < 30


def test_client_without_a_coordinator_leaves_by_itself() -> None:
    with (
        closed_port() as port,
        make_client(f"tcp://127.0.0.1:{port}", orphan_timeout_s=0.3) as client,
        pytest.raises(RunFailed, match=r"for 0\.3 s"),
    ):
        client.poll(10)


def test_a_silent_address_is_logged_before_the_client_gives_up(monkeypatch, caplog) -> None:
    monkeypatch.setattr("dpcfl_net.transport.client.SILENT_S", 0.1)
    with closed_port() as port, make_client(address := f"tcp://127.0.0.1:{port}", orphan_timeout_s=60) as client:
        client.poll(0.8)
    assert caplog.messages == [f"nothing is heard from the coordinator at {address}: waiting up to 60 s for it"]


def test_a_client_that_does_not_announce_itself_yet_has_a_connection_and_no_place(server: ServerEndpoint, caplog) -> None:
    with make_client(server.address, announces=False, orphan_timeout_s=0.5) as client:
        ends, until = Ends(server, client), time.monotonic() + 1.0
        ends.until(lambda: time.monotonic() > until)
        assert not server.ready
        client.announce()
        ends.joined()
    assert not caplog.messages


def accepting(act: Callable[[socket.socket], object]) -> socket.socket:
    """Listen, and apply a function to each accepted connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                act(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    return listener


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_relay_that_reaches_no_coordinator_is_no_wrong_coordinator() -> None:
    """Its connections are reset at once; a worker that left for that would not be started again."""
    resets: list[None] = []
    with accepting(lambda connection: resets.append(reset(connection))) as relay:
        address = f"tcp://127.0.0.1:{relay.getsockname()[1]}"
        with (
            make_client(address, orphan_timeout_s=4.0) as client,
            pytest.raises(RunFailed, match=f"nothing was heard from the coordinator at {address} for 4 s"),
        ):
            client.poll(20)
        relay.shutdown(socket.SHUT_RDWR)
    assert len(resets) > HANDSHAKES


class Switch(Cable):
    """Forwards each of the next connections to a port of `detours`, and others to the server."""

    def __init__(self, address: str) -> None:
        self.detours: list[int] = []
        super().__init__(address)

    @property
    def target(self) -> tuple[str, int]:
        return ("127.0.0.1", self.detours.pop()) if self.detours else self._server

    @target.setter
    def target(self, address: tuple[str, int]) -> None:
        self._server = address


def test_failed_handshakes_count_in_a_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a long run some may fail; a worker that left for that would not be started again."""
    monkeypatch.setattr(dialed, "HANDSHAKES", 2)
    with (
        make_server() as server, make_server(keys=pair()) as stranger, Switch(server.address) as cable,
        make_client(cable.address) as client,
    ):  # fmt: skip
        ends = Ends(server, client).joined()
        port = int(stranger.address.rpartition(":")[2])
        for t in (1, 2):
            ends.seen.clear()
            cable.detours = [port]
            cable.cut()
            ends.until(lambda: not cable.detours and ends.of("left"))
            assert ends.joined().round(client, 0, t, UPDATE).kind == "result"
        cable.detours = [port] * 2
        cable.cut()
        assert refusal(client, ends) == "handshake"


def test_the_time_limit_of_a_handshake_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(dialed, "AwakeClock", lambda: SimpleNamespace(now=lambda: now[0]))
    monkeypatch.setattr("dpcfl_net.transport.client.WATCH_S", 0.0)
    with make_server() as server, make_client(server.address) as client:
        ends = Ends(server, client).joined()
        now[0] += 3600
        assert ends.round(client, 0, 1, UPDATE).kind == "result"


def test_a_coordinator_that_is_stopped_is_no_wrong_coordinator() -> None:
    kept: list[socket.socket] = []
    with accepting(kept.append) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with (
            make_client(address, handshake_limit_s=0.3) as client,
            pytest.raises(RunFailed, match=r"no handshake within 0\.3 s"),
        ):
            client.poll(10)
        silent.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def test_server_sees_a_client_that_vanished(server: ServerEndpoint) -> None:
    client = make_client(server.address)
    ends = Ends(server, client).joined()
    client.close(abort=True)
    ends.clients = ()
    ends.until(lambda: ends.of("left"))
    assert not server.ready


def test_security_none_is_for_loopback_only() -> None:
    with pytest.raises(ConfigError, match="loopback"):
        make_server("tcp://0.0.0.0:*", security="none")
    with pytest.raises(ConfigError, match="loopback"):
        make_client("tcp://192.0.2.1:5000", security="none")
    with pytest.raises(ConfigError, match="curve or none"):
        make_server(security="plain")
    with pytest.raises(ConfigError, match="key pair"):
        make_server(keys=None)
    with make_server() as server, pytest.raises(ConfigError, match="cannot listen"):
        make_server(server.address)


def has_ipv6() -> bool:
    """True if this machine has the address ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="the machine has no IPv6")
def test_an_ipv6_address_listens_and_connects() -> None:
    """It was accepted in every form, and then no socket could be bound: Resource temporarily unavailable."""
    with make_server("tcp://[::1]:*") as server, make_client(server.address, 0) as client:
        assert server.address.startswith("tcp://[::1]:")
        ends = Ends(server, client).joined()
        assert ends.round(client, 0, 1, UPDATE).kind == "result"


def test_a_name_without_an_address_is_called_so() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://nowhere\.invalid:5700: no address of this name or form"):
        make_server("tcp://nowhere.invalid:5700")


def test_security_none_believes_the_claim_but_not_two_of_them() -> None:
    with make_server(security="none") as server, make_client(server.address, 0, security="none") as client:
        ends = Ends(server, client).joined()
        assert ends.round(client, 0, 1, UPDATE).kind == "result"
        with Liar(server.address, 1, curve=False) as liar:
            assert liar.hello(ends, client=0).code == "duplicate"
            assert liar.hello(ends, client=9).code == "unknown-client"
            assert liar.hello(ends, client=1).kind == "WELCOME"
            assert liar.hello(ends, client=2).code == "identity"
        with contextlib.ExitStack() as stack:  # connections without a key are not those of one key
            many = [stack.enter_context(Liar(server.address, 1, curve=False)) for _ in range(MOST_OF_KEY + 1)]
            assert [liar.hello(ends, client=9).code for liar in 2 * many] == ["unknown-client"] * 2 * len(many)
        assert server.failures["connections"] == 0
        assert ends.round(client, 0, 2, UPDATE).kind == "result"


def test_a_wait_whose_time_is_over_ends(server: ServerEndpoint) -> None:
    """Between two looks at the clock a process may lose its core; ZeroMQ would wait for ever."""
    server._line.wait(-0.002)


def test_message_log_has_one_row_a_message() -> None:
    rows: list[dict[str, Any]] = []
    with make_server(on_messages=rows.extend) as server, make_client(server.address) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 3, "train", {"models": np.zeros((1, P), "f4")})
        ends.until(lambda: ends.tasks(client))
        client.send_result(ends.tasks(client)[0].id, "release", {"update": np.zeros(P, "f4")})
        ends.until(lambda: not client.pending)
    kinds = [row["kind"] for row in rows]
    assert [kinds.count(kind) for kind in ("HELLO", "WELCOME", "TASK", "RESULT", "CHUNK")] == [1, 1, 1, 1, 0]
    for row in rows:
        assert row.keys() - {"task"} == {"time", "direction", "peer", "kind", "round", "bytes", "id"}
        assert row.get("task") == ("train" if row["kind"] in ("TASK", "RESULT") else None)
        assert row["peer"] == "client 0"
    assert all(5_000_000 < row["bytes"] < 5_001_000 and row["round"] == 3 for row in rows if row["kind"] in ("TASK", "RESULT"))


def test_the_transcript_has_a_task_on_file_before_a_client_can_answer_it(tmp_path: Path) -> None:
    """A coordinator that is killed loses what it has not written; `dpcfl verify` needs the task of every answer."""
    with (
        closing(Transcript(tmp_path / "t", "headers")) as transcript,
        make_server(transcript=transcript) as server,
        make_client(server.address) as client,
    ):
        ends = Ends(server, client).joined()
        for number in range(1, 4):
            sent = server.send_task(0, number, "train", {"models": np.zeros((1, P), "f4")})
            ends.until(lambda number=number: len(ends.tasks(client)) == number)
            assert sent in [decode(record.header).id for record in read(tmp_path / "t")]
            client.send_result(ends.tasks(client)[-1].id, "release", {"update": np.zeros(P, "f4")})
            ends.until(lambda: not client.pending)
        sent = server.send_task(0, 4, "small", {})  # without chunks
        ends.until(lambda: len(ends.tasks(client)) == 4)
        assert sent in [decode(record.header).id for record in read(tmp_path / "t")]


def test_a_chunk_that_is_too_long_leaves_the_transcript_readable(tmp_path: Path) -> None:
    longest = MAX_FRAME - 1024
    with (
        closing(Transcript(tmp_path / "t", "full")) as transcript,
        make_server(transcript=transcript) as server,
        Liar(server.address, 0) as liar,
    ):
        ends = Ends(server)
        liar.hello(ends)
        liar.say("CHUNK", parent=new_id(), chunk=bytes(longest))
        ends.until(lambda: server.failures["chunk"] == 1)
    assert longest in [len(record.payload or b"") for record in read(tmp_path / "t")]
    with closing(Transcript(tmp_path / "t", "full")) as again:  # as when the run is resumed
        assert again.head == transcript.head


def observer(bind: str = "tcp://127.0.0.1:*", **changes: Any) -> ObserverInbox:
    given: dict[str, Any] = {"run": RUN, "job": JOB, "coordinator_key": SERVER[0]}
    given |= {"client_keys": {client: key[0] for client, key in KEYS.items()}, "keys": OBSERVER} | changes
    return ObserverInbox(bind, part_of(Link, given), parameters=P, max_models=3, **given)


def outbox(address: str, sender: str | int, keys: tuple[str, str], **changes: Any) -> ObserverOutbox:
    return ObserverOutbox(address, Link(RUN, JOB, keys, OBSERVER[0]), sender=sender, **changes)


@pytest.mark.parametrize("make", [make_client, lambda address: outbox(address, 0, KEYS[0])])
def test_an_end_that_cannot_connect_leaves_nothing_open(make: Callable[[str], object]) -> None:
    """A caller that kept the error kept sockets and threads of it, and its context would have waited for them."""
    before = open_things()
    with pytest.raises(ConfigError, match="cannot connect to") as kept:
        make("tcp://127.0.0.1:*")
    deadline = time.monotonic() + 5
    while more(open_things(), before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert kept.tb is not None
    assert not more(open_things(), before)


def collect(inbox: ObserverInbox, count: int, failures: int = 0) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 60
    while len(found) < count or inbox.failures.total() < failures:
        assert time.monotonic() < deadline, (found, inbox.failures)
        found += inbox.poll(0.05)
    return found


def test_observer_hears_models_figures_timings_and_the_end() -> None:
    models = np.random.default_rng(2).standard_normal((3, P)).astype("f4")
    with observer() as inbox, outbox(inbox.address, "coordinator", SERVER) as main, outbox(inbox.address, 1, KEYS[1]) as worker:
        main.models(4, [0, None, 2], models)
        main.models(5, [None] * 3, np.zeros((0, P), "f4"))
        main.spans([("wait", 4, 1.0, 2.0)])
        main.end(5, "all rounds done")
        found = collect(inbox, 4)
        assert [type(note) for note in found] == [Models, Models, Span, End]
        assert (found[0].round, found[0].assignment) == (4, [0, None, 2])
        np.testing.assert_array_equal(found[0].models, models)
        assert found[1].models.shape == (0, P)
        assert found[2] == Span("coordinator", "wait", 4, 1.0, 2.0)
        assert found[3] == End(5, "all rounds done")
        worker.personal(4, 0.5, 1.25)
        worker.personal(5, 0.25, float("nan"))
        assert collect(inbox, 2) == [Personal(1, 4, 0.5, 1.25), Personal(1, 5, 0.25, None)]
        assert not inbox.failures
        assert main.dropped == worker.dropped == 0


def test_observer_hears_the_largest_squared_error_of_float32_predictions() -> None:
    """A client whose personal model had diverged in a regression ended when it reported its loss."""
    largest = (2.0 * float(np.finfo("f4").max)) ** 2
    with observer() as inbox, outbox(inbox.address, 1, KEYS[1]) as worker:
        worker.personal(1, 0.0, largest)
        assert collect(inbox, 1) == [Personal(1, 1, 0.0, largest)]


def test_the_size_of_a_report_does_not_tell_whether_a_client_has_a_personal_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a secure sum it has one once its secret coin was in; encryption does not hide sizes from the network."""
    sizes, sent = [], observer_outbox.send
    monkeypatch.setattr(observer_outbox, "send", lambda made, *frames: (sizes.append(len(frames[0])), sent(made, *frames)))
    told = [(None, None), (0.0, 0.0), (1.0, 1e-9), (0.5, float("inf")), (0.25, 2.5)]
    with observer() as inbox, outbox(inbox.address, 1, KEYS[1]) as worker:
        for figures in told:
            worker.personal(3, *figures)
        heard = collect(inbox, len(told))
    assert [(note.accuracy, note.loss) for note in heard] == [*told[:3], (0.5, None), told[4]]
    assert len(set(sizes)) == 1, sizes


def test_observer_hears_what_a_coordinator_sent_before_it_crashed_after_the_first_message_of_the_next_one() -> None:
    models = np.zeros((1, P), "f4")
    with contextlib.ExitStack() as stack:
        inbox = stack.enter_context(observer())
        before, after, *others = (
            stack.enter_context(outbox(inbox.address, "coordinator", SERVER)) for _ in range(KEPT_BOOTS + 1)
        )
        before.models(1, [0, 0, 0], models)
        assert [note.round for note in collect(inbox, 1)] == [1]
        after.models(3, [0, 0, 0], models)
        assert [note.round for note in collect(inbox, 1)] == [3]
        before.models(2, [0, 0, 0], models)
        assert [note.round for note in collect(inbox, 1)] == [2]
        for sequence in (0, before._sequence - 1):  # replays of its first and its last message
            before._sequence = sequence
            before.end(3)
        assert collect(inbox, 0, failures=2) == []
        for other in others:
            other.spans([("wait", 4, 1.0, 2.0)])
        collect(inbox, len(others))
        before._sequence = 100
        before.end(3)
        assert collect(inbox, 0, failures=3) == []
        assert inbox.failures == {"sequence": 2, "stale-boot": 1}


def test_observer_hears_the_clusters_of_many_clients_from_the_coordinator_alone() -> None:
    clients, none = list(range(100_000)), np.zeros((0, P), "f4")
    labels = {"as sent": [client % 300 for client in clients]}
    with observer() as inbox, outbox(inbox.address, "coordinator", SERVER) as main, outbox(inbox.address, 1, KEYS[1]) as worker:
        main.models(4, [None] * len(clients), none, clients, labels)
        (found,) = collect(inbox, 1)
        assert (found.round, found.assignment, found.clients, found.labels) == (4, [None] * len(clients), clients, labels)
        worker.models(4, [None] * len(clients), none)
        assert collect(inbox, 0, failures=1) == []
        assert inbox.failures == {"header-too-large": 1}


@pytest.mark.parametrize(
    "said",
    [
        {"accuracy": 1.7e308},
        {"accuracy": -0.1},
        {"loss": 1.7e308},
        {"kind": "SPANS", "spans": [{"what": "train", "round": 1, "start": -1e308, "end": 1e308}]},
    ],
)
def test_observer_refuses_figures_that_no_client_has(said: dict[str, Any]) -> None:
    """Such an accuracy was averaged with those of the other clients, and the report could not be written."""
    note = {
        "version": VERSION,
        "run": RUN,
        "job": JOB,
        "boot": new_id(),
        "sequence": 1,
        "kind": "PERSONAL",
        "sender": 1,
        "round": 1,
    }
    with pytest.raises(WireError) as refused:
        decode_note(msgpack.packb({**note, **said}))
    assert refused.value.code == "schema"
    assert decode_note(msgpack.packb({**note, "accuracy": 1.0, "loss": 1e38})).accuracy == 1.0


def test_observer_believes_each_sender_its_own_things_only() -> None:
    with observer() as inbox, outbox(inbox.address, 1, KEYS[1]) as worker:
        worker.models(1, [0, 0, 0], np.zeros((1, P), "f4"))
        worker.end(1)
        with outbox(inbox.address, "coordinator", KEYS[1]) as liar:
            liar.end(1)
            with outbox(inbox.address, 0, KEYS[1]) as other:
                other.personal(1, 1.0, 0.0)
                with outbox(inbox.address, "coordinator", pair(), patience_s=0.1) as stranger:
                    stranger.end(1)
                    assert stranger.dropped == 1
                    assert collect(inbox, 0, failures=7) == []
        assert inbox.failures["identity"] == 2
        assert inbox.failures["unknown-key"] >= 1
        assert inbox.failures["kind"] == 5  # MODELS, its three chunks, END
        worker.personal(1, 0.5, 0.5)
        assert collect(inbox, 1) == [Personal(1, 1, 0.5, 0.5)]


def test_observer_is_bounded_and_strict() -> None:
    with observer() as inbox, outbox(inbox.address, "coordinator", SERVER) as main:
        main.models(1, [0, 0, 0], np.zeros((4, P), "f4"))
        main.models(1, [0, 1, 0], np.zeros((1, P), "f4"))
        main.models(1, [None] * 3, np.zeros((0, P), "f4"), [0, 1], {"as sent": [0]})
        main._send("MODELS", blake3="0" * 64, round=1, assignment=[None] * 3, models=0)
        main._send("END", memoryview(b"more"), round=1)
        main.models(1, [0, 0, 0], np.full((1, P), np.nan, "f4"))
        main.models(1, [0, 0, 0], np.zeros((1, 7), "f4"))
        main.models(2, [0, 0, 0], np.ones((1, P), "f4"))
        (found,) = collect(inbox, 1)
        assert (found.round, found.models.shape) == (2, (1, P))
        assert inbox.failures["template"] == 4
        assert inbox.failures["multipart"] == 1
        assert inbox.failures["non-finite"] == 1
    for field, other in (("job", "f" * 64), ("run", "cd34")):
        with observer(**{field: other}) as inbox, outbox(inbox.address, "coordinator", SERVER) as main:
            main.end(1)
            assert collect(inbox, 0, failures=1) == []
            assert inbox.failures == {field: 1}


def test_observer_without_curve_believes_the_claim_but_no_client_that_there_is_not() -> None:
    link = Link(RUN, JOB, security="none")
    with observer(security="none") as inbox, contextlib.ExitStack() as stack:
        for client in (1, len(KEYS)):
            stack.enter_context(ObserverOutbox(inbox.address, link, sender=client)).personal(1, 0.5, 0.5)
        assert (collect(inbox, 1, failures=1), inbox.failures) == ([Personal(1, 1, 0.5, 0.5)], {"identity": 1})


def test_models_that_the_coordinator_sends_ahead_of_a_busy_observer_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_inbox, "NOTES_UNREAD", 1 << 20)
    with observer() as inbox, outbox(inbox.address, "coordinator", SERVER) as main:
        for t in (1, 2):
            main.models(t, [0, 0, 0], np.zeros((3, P), "f4"))
        time.sleep(2 * PERIOD_S)  # in which the guard looks at the connection
        assert [found.round for found in collect(inbox, 2)] == [1, 2]
        assert not inbox.failures


def test_an_observer_out_of_reach_is_waited_for_once() -> None:
    with observer() as inbox, outbox(inbox.address, "coordinator", SERVER) as main:
        assert main.is_reachable(wait=True)
        assert main.is_reachable()
    with closed_port() as port, outbox(f"tcp://127.0.0.1:{port}", "coordinator", SERVER, patience_s=0.3) as main:
        start = time.monotonic()
        assert not main.is_reachable()
        assert not main.is_reachable(wait=True)
        assert time.monotonic() - start >= 0.3
        for _ in range(1000):
            assert not main.is_reachable(wait=True)
        assert time.monotonic() - start < 100  # not 0.3 s each


def test_missing_observer_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with closed_port() as port, outbox(f"tcp://127.0.0.1:{port}", "coordinator", SERVER, patience_s=0.5) as main:
        start = time.monotonic()
        for index in range(50):
            main.models(index, [0], np.zeros((1, P), "f4"))
        assert time.monotonic() - start < 20  # not 0.5 s each
        assert main.dropped == 50
        assert [record.getMessage() for record in caplog.records] == [
            f"the observer at tcp://127.0.0.1:{port} cannot be reached: what it should get is dropped until it can"
        ]
    forever = {"patience_s": 3600, "ended": lambda: True}
    with closed_port() as port, outbox(f"tcp://127.0.0.1:{port}", "coordinator", SERVER, **forever) as main:
        main.end(1)
        assert main.dropped == 1
    assert not hasattr(main, "poll")


def test_an_observer_that_starts_again_is_waited_for_over_a_pause_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-Z and fg it was taken for lost, and a round was not measured."""
    running, paused, started = time.monotonic, [0.0], list[ObserverInbox]()
    monkeypatch.setattr(time, "monotonic", lambda: running() + paused[0])
    with contextlib.ExitStack() as stack:
        address = f"tcp://127.0.0.1:{stack.enter_context(closed_port())}"

        def pause() -> bool:
            if not started:
                paused[0] = 60.0
                started.append(stack.enter_context(observer(address)))
            return False

        main = stack.enter_context(outbox(address, "coordinator", SERVER, ended=pause))
        main.end(1)
        assert main.dropped == 0
        assert collect(started[0], 1) == [End(1, "")]


def test_an_observer_that_ends_within_a_message_costs_this_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ then refuses the second frame, though the socket took the first."""
    refused = iter([False, True])  # the chunk of the first models

    def send(made: zmq.Socket, *frames: bytes | memoryview) -> None:
        if next(refused, False):
            raise zmq.Again
        sockets.send(made, *frames)

    monkeypatch.setattr(observer_outbox, "send", send)
    models = np.ones((1, P), "f4")
    with observer() as inbox, outbox(inbox.address, "coordinator", SERVER) as main:
        main.models(1, [0, 0, 0], models)
        assert main.dropped == 1
        main.models(2, [0, 0, 0], models)
        (found,) = collect(inbox, 1)
        assert found.round == 2
        assert main.dropped == 1


def test_wire_error_is_a_refusal() -> None:
    assert issubclass(WireError, Refused)


def test_a_client_reports_when_a_task_began_to_arrive_and_when_its_result_was_received(server: ServerEndpoint) -> None:
    with make_client(server.address) as client:
        ends = Ends(server, client).joined()
        before = time.monotonic()
        server.send_task(0, 2, "train", {"models": np.zeros((4, P), "f4")})
        ends.until(lambda: ends.tasks(client))
        (task,) = ends.tasks(client)
        assert before < task.begun < task.arrived
        client.send_result(task.id, "release", {"update": np.zeros(P, "f4")})
        ends.until(lambda: not client.pending)
        (sent,) = [event for event in ends.told[client] if event.kind == "sent"]
        assert (sent.round, sent.task) == (2, "train")
        assert task.arrived < sent.begun < sent.arrived < time.monotonic()
