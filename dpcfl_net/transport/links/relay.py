"""Relay process: one listening port per client, whose TCP streams pass its emulated link on the way to the server."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import select
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from dpcfl_net.core import open_files
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import reason, shown
from dpcfl_net.core.runlog import Lines
from dpcfl_net.transport.links.connection import Connection, Port
from dpcfl_net.transport.links.pipe import Bottleneck
from dpcfl_net.transport.links.schedule import Schedule

MOST_CONNECTIONS = 16  # of one client; it needs one, but while its link is off it may have tried to connect again and again
OTHER_FILES = 64  # besides a listener for each client and two sockets for each connection
_UPSTREAM = re.compile(r"tcp://(?P<host>\[[^\s\[\]]+\]|[^\s:/\[\]*\x00]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class RelaySpec:
    """Arguments of the relay process.

    Attributes:
        upstream: Address of the server, "tcp://host:port".
        clients: Link of each client.
        addresses: File to write: JSON, {"0": "tcp://127.0.0.1:port"}; complete as soon as it exists.
        report: JSON-lines file; one line per client every `report_s` seconds and at the end; None: no report.
        seed: Seed of jitter, losses and resets; each client has its own generator.
        listen: Host to listen on.
        report_s: Seconds between reports.
        ports: Ports to listen on, by client: those of a relay that has crashed; a free port for others.
        elapsed_s: Seconds of the schedules that have passed before.
    """

    upstream: str
    clients: dict[int, Schedule]
    addresses: Path
    report: Path | None = None
    seed: int = 0
    listen: str = "127.0.0.1"
    report_s: float = 60.0
    ports: dict[int, int] = field(default_factory=dict)
    elapsed_s: float = 0.0


def run_relay(spec: RelaySpec) -> None:
    """Relay until SIGTERM, then close all connections and write the last report.

    Second 0 of every schedule is `spec.elapsed_s` before the start of this function.

    Args:
        spec: Arguments of the process.

    Raises:
        ConfigError: If an address is malformed or cannot be listened on.
    """
    _allow_files(len(spec.clients))
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FineSelector())) as runner:
        runner.run(_relay(spec))


class FineSelector(selectors.EpollSelector):
    """Selector whose time-outs are exact: those of epoll are whole milliseconds, as long as the delay of a fast link."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


async def _relay(spec: RelaySpec) -> None:
    relay = Relay(spec)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    report = Lines(spec.report) if spec.report is not None else None
    try:
        write_atomically(spec.addresses, json.dumps(relay.addresses))
        while not stopped.is_set():
            try:
                await asyncio.wait_for(stopped.wait(), spec.report_s)
            except TimeoutError:
                relay.report(report)
    finally:
        relay.close()
        relay.report(report)
        if report is not None:
            report.close()


class Relay:
    """Listens for every client and relays its connections; must be created inside a running event loop.

    Args:
        spec: Arguments of the process.

    Raises:
        ConfigError: See `run_relay`.
    """

    def __init__(self, spec: RelaySpec) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time() - spec.elapsed_s
        self._upstream = _resolve(spec.upstream)
        self._ports: list[Port] = []
        try:
            for client, schedule in spec.clients.items():
                random = Random(f"{spec.seed}/{client}")
                up, down = Bottleneck(schedule, "up", random), Bottleneck(schedule, "down", random)
                port = Port(
                    client, _listen(spec.listen, spec.ports.get(client, 0), up.kernel_buffer), schedule, random, up, down
                )
                self._ports.append(port)
                self._loop.add_reader(port.listener, self._accept, port)
        except BaseException:
            self.close()
            raise
        self.addresses = {str(port.client): _address(port.listener) for port in self._ports}

    def now_s(self) -> float:
        """Return seconds since the start of the run."""
        return self._loop.time() - self._start

    def close(self) -> None:
        """Reset every connection and stop listening."""
        for port in self._ports:
            self._loop.remove_reader(port.listener)
            port.listener.close()
            for connection in list(port.connections):
                connection.reset()

    def report(self, lines: Lines | None) -> None:
        """Append one line per client."""
        if lines is None:
            return
        elapsed_s = self.now_s()
        for port in self._ports:
            off_s = round(port.schedule.off_before_s(elapsed_s), 3)
            open_now = len(port.connections)
            line = {"time": time.time(), "elapsed_s": round(elapsed_s, 3), "client": port.client, **vars(port.totals)}
            lines.write({**line, "open": open_now, "off_s": off_s})

    def _accept(self, port: Port) -> None:
        try:
            accepted, _ = port.listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._make_room_for_files(error)
            return
        if len(port.connections) >= MOST_CONNECTIONS:
            _make_room(port)
        try:
            made = self._connection(accepted, port)
        except BaseException:
            accepted.close()
            raise
        port.totals.connections += 1
        port.connections[made] = None

    def _connection(self, accepted: socket.socket, port: Port) -> Connection:
        try:
            return Connection(accepted, port, self._upstream, self.now_s)
        except OSError as error:  # the accepted socket has taken the last file: the newest connection is not the one to end
            self._make_room_for_files(error)
            return Connection(accepted, port, self._upstream, self.now_s)

    def _make_room_for_files(self, error: OSError) -> None:
        """Reset a connection of the client with most of them if the process may open no more files; raise any other error."""
        port = max(self._ports, key=lambda port: len(port.connections))
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not port.connections:
            raise error
        _make_room(port)


def _make_room(port: Port) -> None:
    """Reset the oldest of the connections that carried least: those of strangers must not end that of the client."""
    min(port.connections, key=lambda connection: connection.carried).reset()


def _listen(host: str, port: int, kernel_buffer: int) -> socket.socket:
    """Listen on a port, 0 for a free one; accepted sockets inherit the receive buffer, whose size must be known before the handshake."""
    family, address = _resolve(f"tcp://{host}:{port}", name="listen")
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_buffer)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(MOST_CONNECTIONS)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot listen on {host}: {reason(error)}") from None
    return made


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _resolve(address: str, name: str = "upstream") -> tuple[int, tuple]:
    """Address family and socket address of "tcp://host:port"."""
    form = _UPSTREAM.fullmatch(address)
    if form is None or int(form["port"]) > 65535:
        raise ConfigError(f"{name} is {shown(address)}: must look like tcp://host:port with a port up to 65535")
    try:
        found = socket.getaddrinfo(form["host"].strip("[]"), int(form["port"]), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{name} is {shown(address)}: {reason(error)}") from None
    return found[0][0], found[0][4]


def _allow_files(clients: int) -> None:
    """Raise the limit on open files; ConfigError if the system allows less than two connections of each client need."""
    needed, most = (OTHER_FILES + (1 + 2 * each) * clients for each in (2, MOST_CONNECTIONS))
    if (allowed := open_files.allow(most)) < needed:
        raise ConfigError(f"the relay needs {needed} open files, but `ulimit -Hn` is {allowed}")
