"""Workers on this machine, forked from the parent of all workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

from dpcfl_net.core import host_memory, open_files
from dpcfl_net.core.cores import usable_cores
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.base import ClientRange, Node
from dpcfl_net.launch.placement.child import Child, start_of, stop, worker_environment
from dpcfl_net.launch.placement.fork_server import FIRST_FREE, GROUP_MAIN, WORKER_MAIN
from dpcfl_net.runtime.specs import GroupSpec, WorkerSpec
from dpcfl_net.training.devices import CPU, Device

STOP_S = 4.0


def compute_slots(runtime: RuntimeSettings) -> int:
    """Return how many workers compute at a time on this host: the setting, or one per usable core."""
    if runtime.federation == "in-process":
        return 1
    return usable_cores() if runtime.slots == "auto" else runtime.slots


class LocalHandle:
    """A worker on this machine (see `base.Handle`).

    Args:
        child: The process.
        pipe: Connection for start and stop commands of a group; None for one client.
    """

    def __init__(self, child: Child, pipe: Connection | None) -> None:
        self._child, self._pipe = child, pipe
        self.sentinel: int = child.sentinel
        self.log_path = child.log

    @property
    def reason(self) -> str:
        return self._child.reason

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._child.sentinel < 0

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self._child.wait(timeout_s)

    def signal(self, number: int) -> None:
        if self.wait(0) is None:
            self._child.signal(number)

    def send_command(self, command: str) -> None:
        assert self._pipe is not None, "a process of one client takes no commands"
        try:
            self._pipe.send_bytes(command.encode())
        except OSError:
            return  # it has ended or is exiting; the command is sent again when it restarts

    def finish(self) -> None:
        if self._pipe is not None:
            self._pipe.close()  # a group exits when no more clients can start

    def close(self) -> None:
        """Release its file descriptors; the sentinel stays open until then."""
        self.finish()
        if self.wait(0) is not None:
            self._child.close()


class LocalLauncher:
    """Starts workers of one job on this machine (see `base.Launcher`).

    Args:
        spec: Specification of a worker; client and device are replaced for each worker.
        logs: Folder of the logs.
        devices: Device of each process, by its first client; the CPU for others.
        namespaces: Network namespace of each client; those of others is the launcher's.
    """

    def __init__(
        self, spec: WorkerSpec, logs: Path, devices: Mapping[int, Device], namespaces: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._spec, self._logs, self._devices, self._namespaces = spec, logs, devices, namespaces
        self._started: list[LocalHandle] = []

    def connect_to(self, address: str) -> None:
        """Set the address that workers connect to from now on.

        Args:
            address: Address of the coordinator or the aggregator.
        """
        self._spec = replace(self._spec, connect=address)

    def start(self, process: ClientRange) -> LocalHandle:
        open_files.allow(open_files.files_for(len(self._started) + 1))
        first = process.clients[0]
        worker = replace(
            self._spec,
            client=first,
            device=self._devices.get(first, CPU),
            relayed={client: at for client in process.clients if (at := self._spec.relayed.get(client)) is not None},
            namespace=self._namespaces.get(first),
        )
        if process.group:
            receiver, sender = multiprocessing.Pipe(duplex=False)
            with receiver:
                child = self._fork(process, GROUP_MAIN, worker, receiver.fileno())
            handle = LocalHandle(child, sender)
        else:
            handle = LocalHandle(self._fork(process, WORKER_MAIN, worker), None)
        self._started = [*(other for other in self._started if not other.closed), handle]
        return handle

    def close(self) -> None:
        """End all workers that still run."""
        stop(self._started, STOP_S)

    def _fork(self, process: ClientRange, main: str, worker: WorkerSpec, *descriptors: int) -> Child:
        argument = GroupSpec(worker, FIRST_FREE) if descriptors else worker
        start = start_of(main, argument, worker_environment())
        return parents.fork_worker(process.title, start, self._logs / process.log, descriptors)


def local_node(*, cpu: bool) -> Node:
    """Describe this machine.

    Args:
        cpu: True if no worker may use a GPU: GPUs are not listed, since a driver may hang.
    """
    import socket

    from dpcfl_net.training.devices import visible_gpus

    gpus = () if cpu else tuple(f"{gpu.name} {gpu.uuid}" for gpu in visible_gpus())
    host = socket.gethostname()
    return Node(host, host, usable_cores(), host_memory.available(), gpus)
