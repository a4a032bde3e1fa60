"""The relay as a process between plain sockets, and between real ZeroMQ CURVE sockets: rates, delays, off times, resets."""

from __future__ import annotations

import hashlib
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closed_port import closed_port
from conftest import ROOT
from relay_process import RelayProcess, Server, drain, echo, exactly
from wire_ends import (
    UPDATE,
    Ends,
    P,
    _nothing_is_left,  # noqa: F401 - fixtures
    _warm,  # noqa: F401
    make_client,
    make_server,
)

from dpcfl_net.core import open_files
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.transport.links.link import Link
from dpcfl_net.transport.links.relay import MOST_CONNECTIONS, _allow_files
from dpcfl_net.transport.links.schedule import Schedule, Step

MOST_ATTEMPTS = 15  # on a busy machine
RATES = [mbps for mbps in (1, 10, 100) for _ in range(7)]  # of 21 clients


def rate(mbps: float, **more: Any) -> Link:
    return Link(up_bps=mbps * 1e6, down_bps=mbps * 1e6, **more)


class Meter:
    """Serves transfers: the first 12 bytes give number, size and direction; measures their seconds."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def serve(self, end: socket.socket) -> None:
        head = exactly(end, 12)
        number, size, up = int.from_bytes(head[:4]), int.from_bytes(head[4:8]), head[8]
        if up:
            drain(end, size)
            self.ended[number] = time.monotonic()
            end.sendall(b"x")
        else:
            self.ended[number] = time.monotonic()
            end.sendall(bytes(size))
        end.recv(1)

    def seconds(self, relay: RelayProcess, client: int, size: int, up: bool) -> float:
        with relay.connect(client) as end:
            time.sleep(0.2 + 2 * relay.spec.clients[client].link.latency_s)  # the handshake over the link
            message = client.to_bytes(4) + size.to_bytes(4) + bytes([up, 0, 0, 0]) + bytes(size if up else 0)
            started = time.monotonic()
            end.sendall(message)
            drain(end, 1 if up else size)
            return self.ended[client] - started if up else time.monotonic() - self.ended[client]


def errors_of_21_clients(folder: Path, seconds: float, up: bool) -> tuple[list[float], float]:
    """Relative error of a transfer of each client, seven at 1, 10 and 100 Mbit/s, all at once; seconds that the relay waited to run."""
    meter, latency_s = Meter(), 0.02
    links = [rate(mbps, latency_s=latency_s) for mbps in RATES]
    with (
        Server(meter.serve) as server,
        ThreadPoolExecutor(21) as pool,
        RelayProcess(folder, server.address, links) as relay,
    ):
        before_s, waited_before_s = relay.cpu_s(), relay.waited_s()
        sizes = [int(mbps * 125_000 * seconds) for mbps in RATES]
        took = list(pool.map(lambda i: meter.seconds(relay, i, sizes[i], up), range(21)))
        spent_s, waited_s = relay.cpu_s() - before_s, relay.waited_s() - waited_before_s
    found = []
    for mbps, size, took_s in zip(RATES, sizes, took, strict=True):
        found.append((mbps, took_s / Schedule(rate(mbps, latency_s=latency_s)).transfer_time(size, "up") - 1))
    for mbps in (1, 10, 100):
        errors = [error for other, error in found if other == mbps]
        print(f"{'up' if up else 'down':4} {mbps:4} Mbit/s x 7, {seconds} s: {min(errors):+.2%} to {max(errors):+.2%}")
    print(
        f"relay: {spent_s / sum(sizes) * 1e9:.2f} ms of processor time per MB ({sum(sizes) / 1e6:.0f} MB), waited {waited_s:.2f} s"
    )
    return [error for _, error in found], waited_s


def assert_rates(folder: Path, seconds: float, up: bool, tolerance: float) -> None:
    """No client is ever faster than its link, and none is slower in each attempt.

    A client of 100 Mbit/s needs the processor all the time, and may be slower by the time that others kept the relay waiting.
    """
    slowest = [float("inf")] * 21
    for attempt in range(MOST_ATTEMPTS):
        (folder / str(attempt)).mkdir()
        errors, waited_s = errors_of_21_clients(folder / str(attempt), seconds, up)
        assert min(errors) > -0.01
        excused = [waited_s / seconds if mbps == 100 else 0.0 for mbps in RATES]
        slowest = [min(before, error - busy) for before, error, busy in zip(slowest, errors, excused, strict=True)]
        if max(slowest) < tolerance:
            return
    raise AssertionError(f"errors of the fastest attempt of each client: {slowest}")


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_21_clients_get_their_rates(tmp_path: Path, up: bool) -> None:
    assert_rates(tmp_path, 1.0, up, 0.15)


@pytest.mark.slow
@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_21_clients_get_their_rates_within_5_percent(tmp_path: Path, up: bool) -> None:
    assert_rates(tmp_path, 6.0, up, 0.05)


def test_connections_of_one_client_share_its_link(tmp_path: Path) -> None:
    def sink(end: socket.socket) -> None:
        exactly(end, 1_000_000)
        end.sendall(b"x")

    with Server(sink) as server, RelayProcess(tmp_path, server.address, [rate(10)]) as relay:
        ends = [relay.connect() for _ in range(3)]
        started = time.monotonic()
        for end in ends:
            threading.Thread(target=end.sendall, args=(bytes(1_000_000),)).start()
        assert [exactly(end, 1) for end in ends] == [b"x"] * 3
        assert 2.39 < time.monotonic() - started < 6.0  # 2.4 s for 3 MB; 7.2 s if each had a ninth of the link
        for end in ends:
            end.close()


def test_a_message_and_its_echo_take_two_delays(tmp_path: Path) -> None:
    links = [Link(latency_s=0.005), Link(latency_s=0.08), rate(1, latency_s=0.02)]
    with Server(echo) as server, RelayProcess(tmp_path, server.address, links) as relay:
        for client, link in enumerate(links):
            started = time.monotonic()  # before the relay can have accepted
            with relay.connect(client) as end:
                took = []
                for _ in range(12):
                    end.sendall(b"ping")
                    assert exactly(end, 4) == b"ping"
                    took.append(time.monotonic() - started)
                    started = time.monotonic()
                handshake_s, *pings_s = took
                print(f"{link}: {[f'{value * 1e3:.2f} ms' for value in (handshake_s, statistics.median(pings_s))]}")
                assert min(pings_s) > 2 * link.latency_s
                assert sorted(pings_s)[2] < 2 * link.latency_s + 0.02  # some of the 11: a busy machine delays the others
                assert handshake_s > 4 * link.latency_s  # the connection itself takes a round trip


def test_lost_packets_delay_a_message_by_a_round_trip(tmp_path: Path) -> None:
    """A busy machine delays the others, too; the longer a round trip, the less that counts."""
    for latency_s in (0.005, 0.02, 0.08):
        link = Link(latency_s=latency_s, loss=0.1)  # an echo crosses twice: 19 % are delayed
        (tmp_path / str(latency_s)).mkdir()
        with (
            Server(echo) as server,
            RelayProcess(tmp_path / str(latency_s), server.address, [link]) as relay,
            relay.connect() as end,
        ):
            took = []
            for _ in range(151):
                started = time.monotonic()
                end.sendall(b"p")
                assert exactly(end, 1) == b"p"
                took.append(time.monotonic() - started)
        assert sum(ping_s > 3.8 * latency_s for ping_s in took[1:]) > 6  # fewer of 150 with probability 5e-8
        if sum(ping_s < 3.8 * latency_s for ping_s in took[1:]) > 30:
            return
    raise AssertionError(took)


def send_500_kb(end: socket.socket) -> None:
    end.sendall(bytes(500_000))
    end.recv(1)


def test_nothing_passes_while_the_link_is_off(tmp_path: Path) -> None:
    link = rate(4, on_s=0.5, off_s=0.5)  # 1 s of 4 Mbit/s
    with Server(send_500_kb) as server, RelayProcess(tmp_path, server.address, [link]) as relay:
        started = time.monotonic()
        with relay.connect() as end:
            left, times = 500_000, []
            while left:
                left -= len(end.recv(1 << 16))
                times.append(time.monotonic())
        (last,) = relay.stop()
    assert max(after - before for before, after in pairwise(times)) > 0.4
    assert 1.4 < times[-1] - started < 4.0  # one to two off times, if the machine is not busy
    assert last["off_s"] == pytest.approx(last["elapsed_s"] / 2, abs=0.26)


def test_a_step_of_a_trace_turns_one_direction_off(tmp_path: Path) -> None:
    schedule = Schedule(rate(4), (Step(0.0, 0.3), Step(0.3, 1.3, down_bps=0)))
    with Server(send_500_kb) as server, RelayProcess(tmp_path, server.address, [schedule]) as relay:
        with relay.connect() as end:
            assert len(exactly(end, 500_000)) == 500_000
        (last,) = relay.stop()
    assert last["off_s"] == pytest.approx(1.0)
    assert last["elapsed_s"] > 2.0  # 1 s of sending and 1 s off, also if the connection came after the step began


def test_a_relay_that_starts_again_continues_the_schedule_on_its_port(tmp_path: Path) -> None:
    off = Schedule(Link(), (Step(0.0, 1000.0, up_bps=0, down_bps=0),))
    with (
        closed_port() as port,
        Server(echo) as server,
        RelayProcess(tmp_path, server.address, [off], elapsed_s=1000.0, ports={0: port}) as relay,
        relay.connect() as end,
    ):
        assert relay.addresses == {"0": f"tcp://127.0.0.1:{port}"}
        end.sendall(b"ping")
        assert exactly(end, 4) == b"ping"
        (last,) = relay.stop()
    assert (last["off_s"], last["elapsed_s"] > 1000) == (1000.0, True)


def test_the_oldest_of_too_many_connections_is_reset(tmp_path: Path) -> None:
    """As of a client that tried again and again while its link was off."""
    with Server(echo) as server, RelayProcess(tmp_path, server.address, [Link(on_s=0.001, off_s=2.0)]) as relay:
        ends = [relay.connect() for _ in range(MOST_CONNECTIONS + 3)]
        for end in ends[:3]:
            with pytest.raises(ConnectionResetError):
                end.recv(1)
        for end in ends:
            end.close()


def test_connections_of_strangers_do_not_end_that_of_the_client(tmp_path: Path) -> None:
    """Anyone who reached the port of a relay could cut a client off with 16 connections that send nothing."""
    with Server(echo) as server, RelayProcess(tmp_path, server.address, [Link()]) as relay, ExitStack() as stack:
        client = stack.enter_context(relay.connect())
        for number in range(MOST_CONNECTIONS + 3):
            client.sendall(bytes([number]))
            assert client.recv(1) == bytes([number])
            stack.enter_context(relay.connect())


def test_a_relay_that_may_open_no_more_files_ends_connections_that_wait(tmp_path: Path) -> None:
    """Clients whose links are off try again and again; each failure to accept one was a traceback, without end."""
    off = Link(on_s=0.001, off_s=1000.0)
    with (
        Server(echo) as server,
        RelayProcess(tmp_path, server.address, [Link(), off, off, off]) as relay,
        ExitStack() as stack,
    ):
        client = stack.enter_context(relay.connect())
        client.sendall(b"a")
        assert client.recv(1) == b"a"
        resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE, (60, 61))
        for number in range(1, 4):
            for _ in range(MOST_CONNECTIONS):
                stack.enter_context(relay.connect(number))
        for limit in (60, 60, 61):  # one of them leaves the relay one file, where a connection needs two
            resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE, (limit, 61))
            again = stack.enter_context(relay.connect())
            for end in (client, again):
                end.sendall(b"b")
                assert end.recv(1) == b"b"
        relay.process.terminate()
        assert relay.process.communicate(timeout=10)[1] == ""


@pytest.mark.parametrize(("clients", "allowed"), [(100, 564), (100, 563)])
def test_a_relay_needs_files_for_two_connections_of_each_client(monkeypatch: Any, clients: int, allowed: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(open_files, "allow", lambda wanted: asked.append(wanted) or allowed)
    with pytest.raises(ConfigError, match="needs 564 open files") if allowed < 564 else nullcontext():
        _allow_files(clients)
    assert asked == [64 + clients * (1 + 2 * MOST_CONNECTIONS)]


def test_resets_are_seen_by_both_ends_and_counted(tmp_path: Path) -> None:
    seen = []

    def wait(end: socket.socket) -> None:
        try:
            end.recv(1)
        except ConnectionResetError:
            seen.append("reset")

    link = Link(resets_per_hour=36_000)  # after 0.1 s on average
    with Server(wait) as server, RelayProcess(tmp_path, server.address, [link, Link()], seed=3) as relay:
        lives = []
        with relay.connect(1) as other:
            for _ in range(30):
                started = time.monotonic()
                with relay.connect() as end, pytest.raises(ConnectionResetError):
                    end.recv(1)
                lives.append(time.monotonic() - started)
            other.sendall(b"x")
        first, second = relay.stop()
    assert (first["resets"], first["connections"], second["resets"]) == (30, 30, 0)
    assert 0 < len(seen) <= 30  # some connections end before the server has accepted them
    assert sum(lives) > 0.9  # below with probability 3e-8: 30 exponential lives of 0.1 s


@pytest.mark.parametrize("link", [Link(), rate(50, latency_s=0.01, jitter_s=0.01, loss=0.01)], ids=["unlimited", "lossy"])
def test_bytes_arrive_unchanged_and_in_order(tmp_path: Path, link: Link) -> None:
    data = random.Random(1).randbytes(700_000)
    with Server(echo) as server, RelayProcess(tmp_path, server.address, [link]) as relay, relay.connect() as end:
        sender = threading.Thread(target=end.sendall, args=(data,))
        sender.start()
        assert exactly(end, len(data)) == data
        sender.join()
        end.shutdown(socket.SHUT_WR)
        assert end.recv(1) == b""  # the end of the stream passes, too
        (last,) = relay.stop()
    assert (last["bytes_up"], last["bytes_down"], last["open"]) == (700_000, 700_000, 0)


def test_memory_is_bounded_while_the_reader_stalls(tmp_path: Path) -> None:
    go, found = threading.Event(), []

    def stall(end: socket.socket) -> None:
        go.wait(20)
        digest = hashlib.sha256()
        while data := end.recv(1 << 20):
            digest.update(data)
        found.append(digest.digest())

    digest, sent = hashlib.sha256(), 0
    link = rate(200, latency_s=0.05)  # 1.25 MB are on the way
    with Server(stall, receive_buffer=1 << 16) as server, RelayProcess(tmp_path, server.address, [link]) as relay:
        with relay.connect(send_buffer=1 << 16) as end:
            before, data = relay.memory(), bytes(range(256)) * 256
            end.settimeout(0.8)
            with suppress(TimeoutError):
                while sent < 100 << 20:
                    passed = end.send(data)
                    digest.update(data[:passed])
                    sent += passed
            print(f"{sent:,} bytes passed before the sender stalled; the relay grew by {relay.memory() - before:,} bytes")
            assert relay.memory() - before < 12 << 20
            go.set()
            end.shutdown(socket.SHUT_WR)
            end.settimeout(10)
            assert end.recv(1) == b""
        relay.stop()
    assert sent < 12 << 20
    assert found == [digest.digest()]


def test_the_sender_sees_a_slow_link(tmp_path: Path) -> None:
    with Server(echo) as server, RelayProcess(tmp_path, server.address, [rate(2)]) as relay:
        with relay.connect(send_buffer=4096) as end:
            started = time.monotonic()
            end.sendall(bytes(250_000))  # 1 s
            took_s = time.monotonic() - started
        print(f"250 kB at 2 Mbit/s were sent after {took_s:.2f} s")
        assert took_s > 0.6


def test_a_client_is_disconnected_until_the_server_is_there(tmp_path: Path) -> None:
    with closed_port() as port, RelayProcess(tmp_path, f"tcp://127.0.0.1:{port}", [Link(latency_s=0.01)]) as relay:
        with relay.connect() as end, pytest.raises(ConnectionResetError):
            end.recv(1)
        with Server(echo, port=port), relay.connect() as end:
            end.sendall(b"ping")
            assert exactly(end, 4) == b"ping"
        (last,) = relay.stop()
    assert (last["failures"], last["connections"]) == (1, 2)


def test_a_client_notices_that_the_server_died(tmp_path: Path) -> None:
    with (
        Server(lambda end: None) as server,
        RelayProcess(tmp_path, server.address, [Link(latency_s=0.05)]) as relay,
        relay.connect() as end,
    ):
        assert end.recv(1) == b""


def test_the_relay_stops_with_open_connections(tmp_path: Path) -> None:
    with Server(echo) as server, RelayProcess(tmp_path, server.address, [rate(0.1)]) as relay, relay.connect() as end:
        end.sendall(bytes(100_000))
        (last,) = relay.stop()
        assert last["client"] == 0
        with pytest.raises(ConnectionResetError):
            exactly(end, 100_000)
        with pytest.raises(ConnectionRefusedError):
            relay.connect()


def test_zeromq_curve_passes_the_link(tmp_path: Path) -> None:
    link = rate(40, latency_s=0.03)
    with make_server() as server, RelayProcess(tmp_path, server.address, [link, link]) as relay:
        with make_client(relay.addresses["0"], 0) as one, make_client(relay.addresses["1"], 2) as two:
            ends = Ends(server, one, two)
            ends.until(lambda: server.ready == {0, 2} and one.welcomed and two.welcomed)
            models = np.random.default_rng(1).standard_normal((1, P), dtype="f4")  # 5 MB, 1 s
            started = time.monotonic()
            for client in (0, 2):
                server.send_task(client, 1, "train", {"models": models})
            ends.until(lambda: ends.tasks(one) and ends.tasks(two))
            took_s = time.monotonic() - started
            assert np.array_equal(ends.tasks(one)[0].tensors["models"], models)
        reports = relay.stop()
    assert took_s > Schedule(link).transfer_time(models.nbytes, "down")
    assert all(models.nbytes < line["bytes_down"] < 1.1 * models.nbytes for line in reports)


def test_the_relay_loads_no_numerical_library() -> None:
    check = (
        "import sys, dpcfl_net.transport.links.relay; print(sorted({'torch', 'numpy', 'zmq', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"upstream": "127.0.0.1:1"}, "upstream is '127.0.0.1:1': must look like tcp://host:port"),
        ({"upstream": "tcp://127.0.0.1:99999"}, "with a port up to 65535"),
        ({"listen": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
    ],
)
def test_wrong_addresses_are_refused(tmp_path: Path, change: dict[str, str], said: str) -> None:
    given: dict[str, Any] = {"upstream": "tcp://127.0.0.1:1", **change}
    with pytest.raises(AssertionError, match=said.replace(".", "\\.")):
        RelayProcess(tmp_path, links=[Link()], **given)


def test_zeromq_connects_again_after_resets(tmp_path: Path) -> None:
    link = rate(40, latency_s=0.005, resets_per_hour=10_000)  # after 0.36 s on average
    with (
        make_server() as server,
        RelayProcess(tmp_path, server.address, [link], seed=5) as relay,
        make_client(relay.addresses["0"], 0) as client,
    ):
        ends = Ends(server, client).joined()
        for t in range(15):
            ends.round(client, 0, t, UPDATE)
            time.sleep(0.1)
        (last,) = relay.stop()
    assert last["resets"] >= 1
    assert last["connections"] > 1
    assert len(ends.of("result")) >= 15
