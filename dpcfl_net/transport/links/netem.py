"""Links by Linux netem: one network namespace per client, joined to the host by a veth pair with a queue at each end."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.files import reason, shown
from dpcfl_net.transport.links.link import Direction, Link
from dpcfl_net.transport.links.schedule import Schedule

Command = list[str]
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bits in /proc/self/status; the second mounts namespaces
_COMMAND_S = 10.0
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_PACKET_BYTES = 1500
_QUEUE_S = 0.1  # netem holds the packets on the way and a queue; tc's 1,000 packets would be 12 s at 1 Mbit/s
_LEAST_PACKETS, _MOST_PACKETS = 32, 1_000_000


@dataclass(frozen=True)
class Namespace:
    """Network of one client. All names carry the run's id, so that a crashed run can be cleaned up.

    Attributes:
        client: The client.
        name: Network namespace.
        host_end: Network device on the host; its queue is the download.
        client_end: Network device in the namespace; its queue is the upload.
        host_address: Address at which the client reaches the host.
        client_address: The client's own address.
    """

    client: int
    name: str
    host_end: str
    client_end: str
    host_address: str
    client_address: str

    @property
    def prefix(self) -> Command:
        """Words before a command that runs it as this client."""
        return ["ip", "netns", "exec", self.name]


def execute(command: Command) -> str:
    """Run a command; RunFailed with its error if it fails, or does not end in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"`{' '.join(command)}` did not end within {_COMMAND_S:g} s") from None
    if done.returncode:
        raise RunFailed(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def namespaces(run: str, clients: int, network: str) -> list[Namespace]:
    """Name the namespaces and addresses of a run.

    Args:
        run: Run id, at least 8 hex digits.
        clients: Number of clients, up to 10,000.
        network: Network of 65,536 addresses; each client takes four.
    """
    first, mark = ipaddress.IPv4Network(network).network_address, _mark(run)
    return [
        Namespace(i, f"dpcfl-{mark}-{i}", f"d{mark}h{i}", f"d{mark}c{i}", str(first + 4 * i + 1), str(first + 4 * i + 2))
        for i in range(clients)
    ]


def set_up_commands(space: Namespace, link: Link) -> list[Command]:
    """Return the commands that make a client's network, in order."""
    inside = ["ip", "-n", space.name]
    # Without gso_max_segs, netem would delay, count and lose packets of up to 64 kB, which no real link carries.
    return [
        ["ip", "netns", "add", space.name],
        ["ip", "link", "add", space.host_end, "type", "veth", "peer", "name", space.client_end, "netns", space.name],
        ["ip", "address", "add", f"{space.host_address}/30", "dev", space.host_end],
        [*inside, "address", "add", f"{space.client_address}/30", "dev", space.client_end],
        ["ip", "link", "set", "dev", space.host_end, "gso_max_segs", "1", "up"],
        [*inside, "link", "set", "dev", space.client_end, "gso_max_segs", "1", "up"],
        [*inside, "link", "set", "dev", "lo", "up"],
        [*inside, "route", "add", "default", "via", space.host_address],  # so that one address of the host serves all
        ["tc", "qdisc", "replace", "dev", space.host_end, "root", *netem(link, "down")],
        ["tc", "-n", space.name, "qdisc", "replace", "dev", space.client_end, "root", *netem(link, "up")],
    ]


def netem(link: Link, direction: Direction) -> Command:
    """Return the words of tc-netem for one direction of a link."""
    nominal = link.up_bps if direction == "up" else link.down_bps
    packets = math.inf if nominal is None else nominal * (link.latency_s + link.jitter_s + _QUEUE_S) / (8 * _PACKET_BYTES)
    words = ["netem", "limit", str(int(min(_MOST_PACKETS, max(_LEAST_PACKETS, packets))))]
    if link.latency_s:
        words += ["delay", _us(link.latency_s), *([_us(link.jitter_s)] if link.jitter_s else [])]
    if link.loss:
        words += ["loss", f"{100 * link.loss:.6g}%"]
    if nominal is not None:
        words += ["rate", f"{nominal:.0f}bit"]
    return words


def unsupported(schedule: Schedule) -> str | None:
    """Return why netem cannot make a link; None if it can."""
    if schedule.steps:
        return "a trace changes it over time"
    if schedule.link.on_s is not None:
        return "it has off times"
    return "it resets connections" if schedule.link.resets_per_hour else None


def problems(run_command: Callable[[Command], str] = execute) -> list[str]:
    """Return what this machine lacks for netem, one sentence each; empty if nothing. Makes a namespace for a moment."""
    found = [f"the command {name} is not installed (package iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if missing := _missing_capabilities():
        found.append(f"this process has no {' and no '.join(missing)}: run it as root")
    return found or _kernel_problems(run_command)


class NetemNetwork:
    """Context manager: networks of all clients of a run, removed at its end.

    What an earlier, crashed process of the same run left is removed first.

    Args:
        run: Run id, at least 8 hex digits.
        schedules: Link of each client, in order.
        run_command: Runs a command and returns its output.

    Attributes:
        spaces: Network of each client; every `host_address` is reachable from all of them.

    Raises:
        ConfigError: If a link cannot be made, or this machine lacks something.
        RunFailed: If a command fails; all that was made is removed.
    """

    def __init__(self, run: str, schedules: Sequence[Schedule], run_command: Callable[[Command], str] = execute) -> None:
        refused = [(client, why) for client, schedule in enumerate(schedules) if (why := unsupported(schedule))]
        if refused:
            raise ConfigError([f"netem cannot make the link of client {client}: {why}; use relay" for client, why in refused])
        if lacking := problems(run_command):
            raise ConfigError([f"netem is not available: {problem}" for problem in lacking])
        self._run, self._schedules, self._run_command = run, schedules, run_command
        self.spaces: list[Namespace] = []

    def __enter__(self) -> NetemNetwork:
        clean_up(self._run, self._run_command)
        self.spaces = namespaces(self._run, len(self._schedules), _free_network(self._run, self._run_command))
        try:
            for space, schedule in zip(self.spaces, self._schedules, strict=True):
                for command in set_up_commands(space, schedule.link):
                    self._run_command(command)
        except BaseException:
            clean_up(self._run, self._run_command)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        clean_up(self._run, self._run_command)


def enter(name: str) -> None:
    """Move this thread, and threads that it starts, into a network namespace.

    Raises:
        RunFailed: If that fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    try:
        with open(f"/run/netns/{name}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise RunFailed(f"cannot enter the network namespace {name}: {reason(error)}") from None


def clean_up(run: str, run_command: Callable[[Command], str] = execute) -> list[str]:
    """Remove every device and namespace of a run, also after a crash.

    Args:
        run: Run id.
        run_command: Runs a command and returns its output.

    Returns:
        Names of what was removed.

    Raises:
        RunFailed: If something cannot be removed.
    """
    mark = _mark(run)
    devices = [link["ifname"] for link in _listed(run_command(["ip", "-j", "link", "show", "type", "veth"]))]
    spaces = [space["name"] for space in _listed(run_command(["ip", "-j", "netns", "list"]))]
    ours = [name for name in devices if name.startswith(f"d{mark}h")]
    theirs = [name for name in spaces if name.startswith(f"dpcfl-{mark}-")]
    for name in ours:
        run_command(["ip", "link", "delete", name])
    for name in theirs:
        run_command(["ip", "netns", "delete", name])
    return ours + theirs


def _mark(run: str) -> str:
    """First 8 hex digits of a run id: names of network devices have at most 15 letters."""
    if len(run) < 8 or not set(run[:8]) <= set("0123456789abcdef"):
        raise ConfigError(f"run id is {shown(run)}: must begin with 8 hex digits")
    return run[:8]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}us"


def _listed(output: str) -> list[dict[str, str]]:
    """List of objects that `ip -j` printed; it prints nothing, or empty objects, where there is none."""
    return [entry for entry in json.loads(output or "[]") if entry]


def _free_network(run: str, run_command: Callable[[Command], str]) -> str:
    """Network in 10.128.0.0/9 of which this machine uses no address."""
    used = [
        ipaddress.ip_address(address["local"])
        for device in json.loads(run_command(["ip", "-j", "-4", "address"]) or "[]")
        for address in device.get("addr_info", [])
    ]
    for offset in range(128):
        network = ipaddress.ip_network(f"10.{128 + (int(run[:2], 16) + offset) % 128}.0.0/16")
        if not any(address in network for address in used):
            return str(network)
    raise RunFailed("this machine has addresses in every network from 10.128.0.0/16 to 10.255.0.0/16; netem needs a free one")


def _missing_capabilities() -> list[str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    held = int(next(line.split()[1] for line in lines if line.startswith("CapEff")), 16)
    return [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]


def _kernel_problems(run_command: Callable[[Command], str]) -> list[str]:
    """Try netem on the loopback of a new namespace."""
    probe = f"dpcfl-probe-{os.getpid()}"
    try:
        run_command(["ip", "netns", "add", probe])
    except RunFailed as error:
        return [f"this machine makes no network namespace: {error}"]
    try:
        run_command(["tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except RunFailed as error:
        return [f"the kernel has no netem queue (module sch_netem): {error}"]
    finally:
        with suppress(RunFailed):  # the next probe has another name
            run_command(["ip", "netns", "delete", probe])
    return []
