"""Both ends of the wire on 127.0.0.1 for tests: server, clients, a lying client, a cable that can be cut, and leak checks."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from dpcfl_net.adversaries.hostile_connection import HostileConnection, Target
from dpcfl_net.adversaries.hostile_worker import Reaction, play
from dpcfl_net.core.errors import Refused
from dpcfl_net.transport.endpoint import ClientEndpoint, ClientTimes, Link, MessageLog, Payload, ServerEndpoint, ServerTimes
from dpcfl_net.transport.messages import Header, TensorTemplate

RUN, JOB, P = "ab12", "0" * 64, 1_250_000  # P float32: 5 MB, so that chunks and credit are at work
UPDATE = np.array([1, 2, 3], "f4")


def pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


SERVER, OBSERVER, KEYS = pair(), pair(), {client: pair() for client in range(3)}


def task_template(task: str) -> dict[str, TensorTemplate] | None:
    return {"models": TensorTemplate("f4", ((1, 4), P))} if task == "train" else {} if task == "small" else None


def result_template(task: str) -> dict[str, TensorTemplate]:
    return {"update": TensorTemplate("f4", (P,))} if task == "train" else {"update": TensorTemplate("f4", (3,))}


def bounded(client: int, task: str, tensors: dict[str, np.ndarray]) -> None:
    if np.linalg.norm(tensors["update"].astype("f8")) > 1e4:
        raise Refused("norm", "the update is longer than any honest one")


def fds(kind: str) -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            found += kind in os.readlink(entry)
    return found


def open_things() -> tuple[int, int, int]:
    return psutil.Process().num_threads(), fds("socket:"), fds("eventpoll")


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Start pyzmq's collector of zero-copy buffers, one per process, before anything is counted."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://warm")
        two.connect("inproc://warm")
        one.send(bytearray(1 << 20), copy=False)
        two.recv()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Assert that no thread of Python or libzmq and no socket outlives its test (those of the previous test may still end)."""
    before = open_things()
    yield
    deadline = time.monotonic() + 30
    while more(open_things(), before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not more(now := open_things(), before), (now, before)


def more(things: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return any(now > then for now, then in zip(things, before, strict=True))


def make_server(bind: str = "tcp://127.0.0.1:*", **changes: Any) -> ServerEndpoint:
    given: dict[str, Any] = {"run": RUN, "job": JOB, "keys": SERVER, "clients": {k: key[0] for k, key in KEYS.items()}}
    given |= {"result_template": result_template, "check": bounded, "heartbeat_s": 0.1, "resend_s": 0.3} | changes
    link, log, times = part_of(Link, given), part_of(MessageLog, given), part_of(ServerTimes, given)
    return ServerEndpoint(bind, link, log=log, times=times, **given)


def make_client(address: str, client: int = 0, **changes: Any) -> ClientEndpoint:
    given: dict[str, Any] = {"run": RUN, "job": JOB, "client": client, "server_key": SERVER[0], "keys": KEYS[client]}
    given |= {"task_template": task_template, "heartbeat_s": 0.1, "resend_s": 0.3} | changes
    link, times = part_of(Link, given), part_of(ClientTimes, given)
    return ClientEndpoint(address, link, times=times, **given)


def part_of(kind: Any, given: dict[str, Any]) -> Any:
    """Create an object from the arguments that its class accepts, and remove them from `given`."""
    return kind(**{name: given.pop(name) for name in inspect.signature(kind).parameters if name in given})


class Ends:
    """Polls a server and clients in turn and keeps what they report."""

    def __init__(self, server: ServerEndpoint, *clients: ClientEndpoint) -> None:
        self.server, self.clients = server, clients
        self.seen: list[Any] = []
        self.told: dict[ClientEndpoint, list[Any]] = {client: [] for client in clients}

    def until(self, done: Callable[[], object], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline, (self.seen, list(self.told.values()), self.server.failures)
            self.seen += self.server.poll(0.005)
            for client in self.clients:
                self.told[client] += client.poll(0.0)

    def joined(self) -> Ends:
        self.until(lambda: len(self.server.ready) == len(self.clients) and all(client.welcomed for client in self.clients))
        return self

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.seen if event.kind == kind]

    def tasks(self, client: ClientEndpoint) -> list[Any]:
        return [event for event in self.told[client] if event.kind == "task"]

    def round(self, client: ClientEndpoint, number: int, round_index: int, update: np.ndarray) -> Any:
        """Send one small task and receive its result."""
        had = len(self.tasks(client))
        self.server.send_task(number, round_index, "small", {})
        self.until(lambda: len(self.tasks(client)) > had)
        client.send_result(self.tasks(client)[-1].id, "release", {"update": update})

        def found() -> list[Any]:
            return [e for e in self.of("result") + self.of("failed") if (e.client, e.round) == (number, round_index)]

        self.until(found)
        return found()[-1]


def refusal(client: ClientEndpoint, ends: Ends) -> str:
    """Return the code of the error with which the client leaves."""
    try:
        deadline = time.monotonic() + 60
        while not client.poll(0.02) and time.monotonic() < deadline:
            ends.seen += ends.server.poll(0.0)
    except Refused as error:
        return error.code
    return "none"


class Liar(HostileConnection):
    """A connection with a client's valid keys that sends any message of a test."""

    def __init__(
        self, address: str, client: int = 0, keys: tuple[str, str] | None = None, curve: bool = True, routing_id: bytes = b""
    ) -> None:
        super().__init__(target(address, client), keys, "curve" if curve else "none", routing_id)
        self.client = client

    def hello(self, ends: Ends, **fields: Any) -> Header:
        said = self.say("HELLO", client=fields.pop("client", self.client))
        ends.until(lambda: self.hears(parent=said.id))
        return self.hears(parent=said.id)[-1]


def target(address: str, client: int = 0, **changes: Any) -> Target:
    """Return the target of a hostile worker for `make_server`."""
    releases = {task: result_template(task) for task in ("train", "small")}
    given = {"server_key": SERVER[0], "keys": KEYS[client], "releases": releases}
    return Target(address, RUN, JOB, client, (client + 1) % len(KEYS), **(given | changes))


def play_steps(
    ends: Ends, attack: Target, *steps: str, meanwhile: Callable[[], object] = lambda: None, **how: Any
) -> list[Reaction]:
    """Run the hostile worker's steps in another thread while the server and its honest clients run here."""
    found: list[Reaction] = []
    enough = threading.Event()

    def run() -> None:
        for reaction in play(attack, steps, **{"wait_s": 10.0, "task_s": 10.0, **how}):
            found.append(reaction)
            if enough.is_set():
                return

    with ThreadPoolExecutor(1) as hostile:
        played = hostile.submit(run)
        try:
            ends.until(lambda: (meanwhile(), played.done())[1], 30)
        except AssertionError as late:
            raise AssertionError(found) from late
        finally:
            enough.set()
        played.result()
    return found


def zmtp(address: str, kind: str = "DEALER") -> socket.socket:
    """Open a plain TCP connection after the ZMTP 3.0 greeting and NULL handshake as a socket of that kind."""
    host, port = address.removeprefix("tcp://").split(":")
    raw = socket.create_connection((host, int(port)))
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31))
    body = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()
    raw.sendall(b"\x04" + bytes([len(body)]) + body)
    return raw


def deliver(liar: Liar, payload: Payload, **fields: Any) -> Header:
    header = liar.say("RESULT", tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks), **fields)
    for index, chunk in enumerate(payload.chunks):
        liar.say("CHUNK", bytes(chunk), parent=header.id, index=index)
    return header


class Cable:
    """Forwards TCP to the server until it is cut; new connections pass. Stores all bytes, and those to the server."""

    def __init__(self, address: str) -> None:
        self.target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listening.getsockname()[1]}"
        self.ends: list[socket.socket] = []
        self.seen = bytearray()
        self.up = bytearray()
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                inner, _ = self.listening.accept()
            except OSError:
                return
            outer = socket.create_connection(self.target)
            self.ends += [inner, outer]
            for one, two, up in ((inner, outer, True), (outer, inner, False)):
                self.threads.append(threading.Thread(target=self.forward, args=(one, two, up)))
                self.threads[-1].start()

    def forward(self, one: socket.socket, two: socket.socket, up: bool) -> None:
        try:
            while data := one.recv(1 << 16):
                self.seen += data
                if up:
                    self.up += data
                two.sendall(data)
        except OSError:
            pass
        finally:
            self.end(one, two)

    def end(self, *ends: socket.socket) -> None:
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def cut(self) -> None:
        self.end(*self.ends)

    def __enter__(self) -> Cable:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self.listening)
        self.listening.close()
        self.cut()
        for thread in self.threads:
            thread.join()
        for end in self.ends:
            end.close()
