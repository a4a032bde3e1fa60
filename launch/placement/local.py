"""Workers on this machine, forked from one preloaded parent."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import Any

from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.interrupts import blocked_signals
from dpcfl_net.launch.placement.base import ClientRange, Node
from dpcfl_net.launch.placement.child import Child, without_main
from dpcfl_net.launch.placement.interpreter import single_threaded
from dpcfl_net.runtime.worker_spec import GroupSpec, WorkerSpec
from dpcfl_net.training.compute_semaphore import host_folder
from dpcfl_net.training.devices import CPU, Device

STOP_S = 4.0
PRELOAD, JOB = "dpcfl_net.launch.placement.preload", "DPCFL_PRELOAD_JOB"


def forkserver() -> Any:
    """Return the context that forks processes from the preloaded parent, which has no thread, socket or GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


def preload(job: tuple[Path, str, str | None] | None = None) -> None:
    """Start the preloaded parent, unless it runs.

    Args:
        job: Folder, operator's key and data folder of a job to read in advance, which workers inherit.
    """
    forkserver()
    if job is not None:
        folder, operator_key, data_root = job
        os.environ[JOB] = json.dumps({"folder": str(folder), "operator_key": operator_key, "data_root": data_root})
    try:
        with blocked_signals(), without_main(), single_threaded():
            ensure_running()
    finally:
        os.environ.pop(JOB, None)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def compute_slots(runtime: RuntimeSettings) -> int:
    """Return how many workers compute at a time on this host: the setting, or one per usable core."""
    if runtime.federation == "in-process":
        return 1
    return cores() if runtime.slots == "auto" else runtime.slots


def own_slots(runtime: RuntimeSettings, name: str) -> tuple[Path, int] | None:
    """Return folder and number of the compute slots of one run; None: it uses the slots of the host.

    Args:
        runtime: Settings of the run.
        name: Name of the run.
    """
    return None if runtime.slots == "auto" else (host_folder() / f"run-{name}", runtime.slots)


# Imports inside: an agent starts workers without loading their libraries.
def _serve_one(spec: WorkerSpec) -> None:
    from dpcfl_net.runtime.worker import run_worker

    run_worker(spec)


def _serve_group(spec: GroupSpec) -> None:
    from dpcfl_net.runtime.worker_group import run_group

    run_group(spec)


class LocalHandle:
    """A worker on this machine.

    Args:
        child: The process.
        pipe: Connection for start and stop commands of a group; None for one client.
    """

    def __init__(self, child: Child, pipe: Connection | None) -> None:
        self._child, self._pipe = child, pipe
        self._code: int | None = None
        self.sentinel: int = child.sentinel
        self.log_path = child.log

    def poll(self) -> int | None:
        """See `base.Handle`."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See `base.Handle`."""
        if self._code is None:
            self._code = self._child.wait(timeout_s)
        return self._code

    def signal(self, number: int) -> None:
        """See `base.Handle`."""
        if self.poll() is None:
            self._child.signal(number)

    def kill(self) -> None:
        """See `base.Handle`."""
        self.signal(SIGKILL)

    def send_command(self, command: str) -> None:
        """See `base.Handle`."""
        assert self._pipe is not None, "a process of one client takes no commands"
        try:
            self._pipe.send_bytes(command.encode())
        except OSError:
            return  # it has ended or is exiting; the command is sent again when it restarts

    def finish(self) -> None:
        """See `base.Handle`."""
        if self._pipe is not None:
            self._pipe.close()  # a group exits when no more clients can start

    def close(self) -> None:
        """See `base.Handle`. The sentinel stays open until then."""
        self.finish()
        if self.poll() is not None:
            self._child.close()


class LocalLauncher:
    """Starts workers of one job on this machine.

    Args:
        spec: Specification of a worker; client and device are replaced for each worker.
        logs: Folder of the logs.
        devices: Device of each process, by its first client; the CPU for others.
    """

    def __init__(self, spec: WorkerSpec, logs: Path, devices: Mapping[int, Device]) -> None:
        self._spec, self._logs, self._devices, self._context = spec, logs, devices, forkserver()
        self._started: list[LocalHandle] = []

    def capacity(self) -> list[Node]:
        """See `base.Launcher`."""
        return [local_node()]

    def start(self, process: ClientRange) -> LocalHandle:
        """See `base.Launcher`."""
        first = process.clients[0]
        worker = replace(self._spec, client=first, device=self._devices.get(first, CPU))
        if process.group:
            receiver, sender = multiprocessing.Pipe(duplex=False)
            handle = LocalHandle(self._fork(process, _serve_group, GroupSpec(worker, receiver)), sender)
            receiver.close()
        else:
            handle = LocalHandle(self._fork(process, _serve_one, worker), None)
        self._started = [*(other for other in self._started if other.poll() is None), handle]
        return handle

    def close(self) -> None:
        """See `base.Launcher`."""
        end(self._started)

    def _fork(self, process: ClientRange, main: Callable[[Any], None], spec: Any) -> Child:
        child = Child(process.title, main, spec, self._logs / process.log)
        child.launch(self._context)
        return child


def end(handles: Sequence[LocalHandle]) -> None:
    """End workers: SIGTERM, and SIGKILL after `STOP_S` seconds."""
    for handle in handles:
        handle.signal(SIGTERM)
        handle.signal(SIGCONT)  # a stopped process does not receive SIGTERM
    deadline = time.monotonic() + STOP_S
    for handle in handles:
        if handle.wait(max(0.05, deadline - time.monotonic())) is None:
            handle.kill()
            handle.wait()
        handle.close()


def local_node() -> Node:
    """Describe this machine."""
    import socket

    import psutil

    from dpcfl_net.training.devices import visible_gpus

    gpus = tuple(f"{gpu.name} {gpu.uuid}" for gpu in visible_gpus())
    host = socket.gethostname()
    return Node(host, host, cores(), psutil.virtual_memory().available, gpus)
