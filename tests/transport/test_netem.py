"""Links by Linux netem: exact commands, refusals, and real namespaces where the machine allows them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.transport.links import netem
from dpcfl_net.transport.links.link import Link
from dpcfl_net.transport.links.presets import PRESETS
from dpcfl_net.transport.links.schedule import Schedule, Step

RUN = os.urandom(8).hex()  # other test processes of this machine have theirs
SLOW = Link(latency_s=0.05, jitter_s=0.005, up_bps=1e6, down_bps=8e6, loss=0.01)


def test_the_commands_of_one_client() -> None:
    (_, space) = netem.namespaces("0123456789abcdef", 2, "10.200.0.0/16")
    assert [" ".join(command) for command in netem.set_up_commands(space, SLOW)] == [
        "ip netns add dpcfl-01234567-1",
        "ip link add d01234567h1 type veth peer name d01234567c1 netns dpcfl-01234567-1",
        "ip address add 10.200.0.5/30 dev d01234567h1",
        "ip -n dpcfl-01234567-1 address add 10.200.0.6/30 dev d01234567c1",
        "ip link set dev d01234567h1 gso_max_segs 1 up",
        "ip -n dpcfl-01234567-1 link set dev d01234567c1 gso_max_segs 1 up",
        "ip -n dpcfl-01234567-1 link set dev lo up",
        "ip -n dpcfl-01234567-1 route add default via 10.200.0.5",
        "tc qdisc replace dev d01234567h1 root netem limit 103 delay 50000us 5000us loss 1% rate 8000000bit",
        "tc -n dpcfl-01234567-1 qdisc replace dev d01234567c1 root netem limit 32 delay 50000us 5000us loss 1% rate 1000000bit",
    ]
    assert space.prefix == ["ip", "netns", "exec", "dpcfl-01234567-1"]


def test_names_of_ten_thousand_clients_fit() -> None:
    spaces = netem.namespaces(RUN, 10_000, "10.200.0.0/16")
    assert max(len(name) for space in spaces for name in (space.host_end, space.client_end)) <= 15  # Linux's limit
    addresses = {address for space in spaces for address in (space.host_address, space.client_address)}
    assert len(addresses) == 20_000
    assert all(address.startswith("10.200.") for address in addresses)


def test_an_unlimited_link_has_no_rate_and_no_delay() -> None:
    assert netem.netem(Link(), "up") == ["netem", "limit", "1000000"]


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (Schedule(Link(on_s=1.0, off_s=1.0)), "it has off times"),
        (Schedule(Link(resets_per_hour=1.0)), "it resets connections"),
        (Schedule(Link(), (Step(0.0, 1.0),)), "a trace changes it over time"),
    ],
)
def test_links_that_change_are_refused(schedule: Schedule, why: str) -> None:
    with pytest.raises(ConfigError, match=f"netem cannot make the link of client 1: {why}; use relay"):
        netem.NetemNetwork(RUN, [Schedule(), schedule])


def test_a_wrong_run_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="run id is 'x': must begin with 8 hex digits"):
        netem.namespaces("x", 1, "10.200.0.0/16")


def test_missing_commands_and_rights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert netem.problems()[:2] == [f"the command {name} is not installed (package iproute2)" for name in ("ip", "tc")]
    with pytest.raises(ConfigError, match="netem is not available: the command ip is not installed"):
        netem.NetemNetwork(RUN, [Schedule()])


def test_a_command_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netem, "_COMMAND_S", 0.1)
    with pytest.raises(RunFailed, match=r"^`sleep 30` did not end within 0\.1 s$"):
        netem.execute(["sleep", "30"])


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give up its rights")
def test_missing_rights_are_named() -> None:
    code = "from dpcfl_net.transport.links import netem; print(netem.problems())"
    command = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "this process has no CAP_NET_ADMIN: run it as root" in done.stdout


def without_tc(command: netem.Command) -> str:
    """Run `ip`, and print what `tc` is asked: some kernels have network namespaces, but no netem."""
    return netem.execute(command) if command[0] == "ip" else ""


NO_NAMESPACES = netem.problems(without_tc)
NO_NETEM = NO_NAMESPACES or netem.problems()
needs_namespaces = pytest.mark.skipif(bool(NO_NAMESPACES), reason="; ".join(NO_NAMESPACES))
needs_netem = pytest.mark.skipif(bool(NO_NETEM), reason="; ".join(NO_NETEM))


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    assert netem.clean_up(RUN) == []


def left() -> list[str]:
    """Devices and namespaces of this test's run."""
    names = [link["ifname"] for link in json.loads(netem.execute(["ip", "-j", "link"]))]
    names += [entry["name"] for entry in json.loads(netem.execute(["ip", "-j", "netns"]) or "[]") if entry]
    return [name for name in names if RUN[:8] in name]


@needs_namespaces
@pytest.mark.usefixtures("clean")
def test_each_client_reaches_the_host_from_its_namespace_and_nothing_stays() -> None:
    with netem.NetemNetwork(RUN, [Schedule(SLOW), Schedule()], without_tc) as network:
        assert len(left()) == 4
        for space in network.spaces:
            with socket.create_server((space.host_address, 0)) as server:
                code = f"import socket; socket.create_connection({server.getsockname()!r}).sendall(b'hello')"
                done = subprocess.Popen([*space.prefix, sys.executable, "-c", code])
                server.settimeout(20)
                accepted, (host, _) = server.accept()
                with accepted:
                    assert (host, accepted.recv(5)) == (space.client_address, b"hello")
                assert done.wait(10) == 0
    assert left() == []


@needs_namespaces
@pytest.mark.usefixtures("clean")
def test_a_crashed_run_is_cleaned_up_by_its_id() -> None:
    other = RUN[::-1]
    with netem.NetemNetwork(other, [Schedule()], without_tc) as network:
        crashed = netem.NetemNetwork(RUN, [Schedule()] * 2, without_tc)
        crashed.__enter__()
        assert network.spaces[0].host_address != crashed.spaces[0].host_address
        with netem.NetemNetwork(RUN, [Schedule()], without_tc):  # the resumed run
            assert len(left()) == 2
        assert netem.execute(["ip", "link", "show", network.spaces[0].host_end])


@needs_namespaces
@pytest.mark.usefixtures("clean")
def test_a_failed_command_leaves_nothing() -> None:
    def fails(command: netem.Command) -> str:
        if command[0] == "tc" and RUN[:8] in " ".join(command):
            raise RunFailed("`tc` failed: no such thing")
        return without_tc(command)

    with pytest.raises(RunFailed, match="no such thing"), netem.NetemNetwork(RUN, [Schedule()], fails):
        pass
    assert left() == []


@needs_namespaces
@pytest.mark.skipif(not NO_NETEM, reason="this kernel has netem")
def test_a_kernel_without_netem_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the kernel has no netem queue \(module sch_netem\): `tc -n dpcfl-probe"):
        netem.NetemNetwork(RUN, [Schedule()])


@needs_namespaces
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("link", [SLOW, Link(), Link(latency_s=1.5e-6, up_bps=1500.5, loss=1e-6), PRESETS["datacenter"].link])
def test_tc_understands_the_commands(link: Link) -> None:
    """Only a kernel without netem may refuse them; errors of tc itself are about a word."""

    def in_namespaces(command: netem.Command) -> str:
        try:
            return netem.execute(command)
        except RunFailed as error:
            if NO_NETEM and str(error).endswith("Error: Specified qdisc kind is unknown."):
                return ""
            raise

    with netem.NetemNetwork(RUN, [Schedule(link)], in_namespaces):
        assert len(left()) == 2


@needs_netem
@pytest.mark.usefixtures("clean")
def test_netem_delays_and_limits() -> None:
    link = Link(latency_s=0.05, up_bps=8e6, down_bps=8e6)
    code = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as end:
    started = time.monotonic(); end.sendall(b"p"); end.recv(1); print(time.monotonic() - started)
    end.sendall(bytes(1_000_000)); end.recv(1)
"""
    with (
        netem.NetemNetwork(RUN, [Schedule(link)]) as network,
        socket.create_server((network.spaces[0].host_address, 0)) as server,
    ):
        host, port = server.getsockname()
        command: list[Any] = [*network.spaces[0].prefix, sys.executable, "-c", code, host, str(port)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        accepted, _ = server.accept()
        with accepted:
            accepted.recv(1)
            accepted.sendall(b"p")
            accepted.recv(1)
            started, size = time.monotonic(), 1
            while size < 1_000_000:
                size += len(accepted.recv(1 << 16))
            took_s = time.monotonic() - started
            accepted.sendall(b"x")
        ping_s = float(client.communicate(timeout=10)[0])
    assert 0.1 <= ping_s < 0.2
    assert 0.9 < took_s < 2.0
