"""A relay in a process of its own, and plain TCP ends for it: a server that takes, sends or returns bytes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from conftest import ROOT
from pydantic import TypeAdapter

from dpcfl_net.transport.links.link import Link
from dpcfl_net.transport.links.relay import RelaySpec
from dpcfl_net.transport.links.schedule import Schedule

MAIN = """
import sys
from pydantic import TypeAdapter
from dpcfl_net.transport.links.relay import RelaySpec, run_relay
run_relay(TypeAdapter(RelaySpec).validate_json(sys.stdin.buffer.readline()))
"""


class RelayProcess:
    """Starts a relay from the JSON of its specification; ends it with SIGTERM."""

    def __init__(self, folder: Path, upstream: str, links: list[Link | Schedule], **changes: Any) -> None:
        clients = {i: link if isinstance(link, Schedule) else Schedule(link) for i, link in enumerate(links)}
        self._report = folder / "links.jsonl"
        self.spec = RelaySpec(upstream, clients, folder / "addresses.json", self._report, **changes)
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.process.stdin.write(TypeAdapter(RelaySpec).dump_json(self.spec).decode() + "\n")
        self.process.stdin.flush()
        while not self.spec.addresses.exists():
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.01)
        self.addresses = json.loads(self.spec.addresses.read_text())

    def connect(self, client: int = 0, send_buffer: int | None = None) -> socket.socket:
        host, port = self.addresses[str(client)].removeprefix("tcp://").split(":")
        made = socket.socket()
        if send_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        made.settimeout(30)
        made.connect((host, int(port)))
        return made

    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def waited_s(self) -> float:
        """Seconds for which it could run and other processes had the processors; 0 where the system does not count them."""
        try:
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def stop(self) -> list[dict[str, Any]]:
        """End the relay; returns the last report of each client."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=10)
        assert self.process.returncode == 0, errors
        lines = [json.loads(line) for line in self._report.read_text().splitlines()]
        return lines[-len(self.spec.clients) :]

    def __enter__(self) -> RelayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for pipe in (self.process.stdin, self.process.stderr):
            pipe.close()


class Server:
    """A TCP server; each connection is served by `serve` in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None], receive_buffer: int | None = None, port: int = 0) -> None:
        self._serve = serve
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if receive_buffer is not None:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._listening.bind(("127.0.0.1", port))
        self._listening.listen(64)
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._run, args=(accepted,)))
            self._threads[-1].start()

    def _run(self, accepted: socket.socket) -> None:
        with accepted:
            try:
                self._serve(accepted)
            except ConnectionError:
                return  # the relay was stopped

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(10)


def echo(end: socket.socket) -> None:
    while data := end.recv(1 << 16):
        end.sendall(data)


def exactly(end: socket.socket, size: int) -> bytes:
    """Read `size` bytes, or what comes before the end of the stream."""
    parts = []
    while size and (data := end.recv(min(size, 1 << 20))):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def drain(end: socket.socket, size: int) -> None:
    """Read `size` bytes without keeping them."""
    buffer = bytearray(min(size, 1 << 18))
    while size:
        read = end.recv_into(buffer, min(size, len(buffer)))
        assert read, f"the stream ended {size} bytes early"
        size -= read
