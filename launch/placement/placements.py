"""Placements of a run's workers: this machine, or hosts with an agent. Clients' keys are created where they are used."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Policy
from dpcfl_net.experiment.config import Config
from dpcfl_net.launch.placement.base import Launcher, Node
from dpcfl_net.launch.placement.messages import FILES, PrepareKeys, SetJob
from dpcfl_net.launch.placement.remote import HELLO_S, Host, HostAgent, RemoteLauncher, close_all, node_of, place
from dpcfl_net.runtime.worker_spec import Terms, WorkerSpec
from dpcfl_net.training.devices import deal
from dpcfl_net.transport.keys import OBSERVER, client_key, make_client_keys, public_path, read_public


def terms_of(config: Config) -> Terms:
    """Return the terms of the workers from the configuration: largest epsilon and delta, record book and budget."""
    ledger, policy = config.ledger, Policy(config.runtime.max_epsilon, config.runtime.max_delta)
    if ledger.root is None:
        return Terms(policy)
    budget = None if ledger.budget is None else (ledger.budget.epsilon, ledger.budget.delta)
    return Terms(policy, Path(ledger.root).expanduser().resolve(), budget)


class Placement(Protocol):
    """Hosts of all workers of one run."""

    def capacity(self) -> list[Node]:
        """Return the hosts, or shares of hosts, that take workers."""

    def make_keys(self, keys: Path, clients: int, size: int) -> None:
        """Create every client's key pair on its host.

        Args:
            keys: Folder that receives the public keys.
            clients: Number of clients.
            size: Clients per worker process.
        """

    def bind(self, role: str) -> str:
        """Return the address on which the coordinator or the observer listens."""

    def reached(self, address: str) -> str:
        """Return the address at which workers reach a socket bound to `address`."""

    def preload(self, job: tuple[Path, str, str | None] | None = None) -> None:
        """Load in advance what every worker needs (see `local.preload`)."""

    def launcher(self, folder: Path, config: Config, operator_key: str, connect: str, observer: str) -> Launcher:
        """Return the launcher of the workers of the job in `folder`."""

    def devices(self) -> dict[str, int]:
        """Count worker processes by device, "cpu" or the UUID of a GPU, as far as known."""

    def close(self) -> None:
        """End all workers."""


class LocalPlacement:
    """This machine; all connections over loopback."""

    def __init__(self) -> None:
        self._launcher: Launcher | None = None
        self._devices: list[str] = []
        self._slots: tuple[Path, int] | None = None

    def capacity(self) -> list[Node]:
        """See `Placement`."""
        from dpcfl_net.launch.placement.local import here

        return [here()]

    def make_keys(self, keys: Path, clients: int, size: int) -> None:
        """See `Placement`."""
        make_client_keys(keys, range(clients))

    def bind(self, role: str) -> str:
        """See `Placement`."""
        return "tcp://127.0.0.1:*"

    def reached(self, address: str) -> str:
        """See `Placement`."""
        return address

    def preload(self, job: tuple[Path, str, str | None] | None = None) -> None:
        """See `Placement`."""
        from dpcfl_net.launch.placement.local import preload

        preload(job)

    def launcher(self, folder: Path, config: Config, operator_key: str, connect: str, observer: str) -> Launcher:
        """See `Placement`."""
        from dpcfl_net.launch.placement.local import LocalLauncher, own_slots

        runtime, files = config.runtime, RunFolder(folder)
        self._slots = own_slots(runtime, secrets.token_hex(8))
        firsts = range(0, sum(config.data.clients), runtime.clients_per_worker)
        spec = WorkerSpec(
            folder, 0, connect, observer, files.keys, operator_key, files.ledgers, terms_of(config), config.data.root,
            self._slots, runtime.orphan_timeout_s,
        )  # fmt: skip
        devices = deal(runtime, len(firsts))
        self._devices = [device.uuid or "cpu" for device in devices]
        self._launcher = LocalLauncher(spec, files.logs, dict(zip(firsts, devices, strict=True)))
        return self._launcher

    def devices(self) -> dict[str, int]:
        """See `Placement`."""
        return dict(Counter(self._devices))

    def close(self) -> None:
        """See `Placement`."""
        if self._launcher is not None:
            self._launcher.close()
        if self._slots is not None:
            shutil.rmtree(self._slots[0], ignore_errors=True)


@dataclass(frozen=True)
class ListenAddress:
    """Addresses on which coordinator and observer listen for workers of other hosts.

    Attributes:
        address: Address at which workers reach this machine.
        bind: Address to bind, if `address` is not one of this machine.
        ports: Ports of coordinator and observer; 0: any free port.
    """

    address: str
    bind: str | None = None
    ports: tuple[int, int] = (0, 0)


class RemotePlacement:
    """Hosts with an agent on each.

    Args:
        hosts: How to reach them.
        listening: Addresses of coordinator and observer.
        placed: Host name of each worker process in a resumed run.
    """

    def __init__(self, hosts: Sequence[Host], listening: ListenAddress, placed: Sequence[str] | None = None) -> None:
        self._listening, self._size, self._placed = listening, 1, placed
        self._closed = False
        self._agents = [HostAgent(host) for host in hosts]
        self._of: list[HostAgent] = []  # the agent of each process

    def open(self) -> None:
        """Connect to all hosts.

        Raises:
            RunFailed: If one does not answer.
        """
        for agent in self._agents:
            agent.open()
        for agent in self._agents:
            agent.wait_for(agent.has_answered, HELLO_S)

    def capacity(self) -> list[Node]:
        """See `Placement`."""
        return [node_of(agent) for agent in self._agents]

    def places(self, clients: int, size: int) -> list[str]:
        """Return the host name of each worker process, in the order of their clients."""
        self._size, count = size, -(-clients // size)
        if self._placed is not None:
            by_name = {agent.host.name: agent for agent in self._agents}
            if missing := sorted(set(self._placed) - set(by_name)):
                raise ConfigError(f"this run has clients on {', '.join(missing)}, which are not among the hosts now")
            self._of = [by_name[name] for name in self._placed]
        else:
            shares = [agent.host.workers or node_of(agent).cores for agent in self._agents]
            self._of = [self._agents[k] for k in place(count, shares)]
        return [agent.host.name for agent in self._of]

    def make_keys(self, keys: Path, clients: int, size: int) -> None:
        """See `Placement`. In a resumed run the keys must exist and match the signed job."""
        self.places(clients, size)
        for agent in self._agents:
            if theirs := self._clients_of(agent, clients):
                agent.send(PrepareKeys(clients=theirs, existing=self._placed is not None))
        for agent in dict.fromkeys(self._of):
            agent.wait_for(agent.has_keys, HELLO_S)
            for client, key in agent.keys.items():
                path = public_path(keys, client_key(client))
                if self._placed is not None and read_public(keys, client_key(client)) != key:
                    raise Refused("keys", f"client {client} on {agent.host.name} has not the key that the job names")
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(key + "\n")

    def bind(self, role: str) -> str:
        """See `Placement`."""
        port = self._listening.ports[role == OBSERVER]
        return f"tcp://{_bracketed(self._listening.bind or self._listening.address)}:{port or '*'}"

    def reached(self, address: str) -> str:
        """See `Placement`."""
        return f"tcp://{_bracketed(self._listening.address)}:{address.rpartition(':')[2]}"

    def preload(self, job: tuple[Path, str, str | None] | None = None) -> None:
        """See `Placement`: agents load it on their hosts."""

    def launcher(self, folder: Path, config: Config, operator_key: str, connect: str, observer: str) -> Launcher:
        """See `Placement`."""
        size, clients = config.runtime.clients_per_worker, sum(config.data.clients)
        files = {name: (folder / name).read_text() for name in FILES}
        for agent in dict.fromkeys(self._of):
            agent.ledgers = RunFolder(folder).ledgers
            agent.set_job(SetJob(
                files=files, operator_key=operator_key, connect=connect, observer=observer, runtime=config.runtime,
                data_root=agent.host.data_root or config.data.root,
                firsts=[k * size for k, other in enumerate(self._of) if other is agent],
            ))  # fmt: skip
        return RemoteLauncher({first: self._of[first // size] for first in range(0, clients, size)}, RunFolder(folder).logs)

    def devices(self) -> dict[str, int]:
        """See `Placement`."""
        return dict(Counter(device for agent in self._agents for device in agent.devices))

    def close(self) -> None:
        """See `Placement`."""
        if self._closed:
            return
        self._closed = True
        close_all(self._agents)

    def _clients_of(self, agent: HostAgent, clients: int) -> list[int]:
        return [client for client in range(clients) if self._of[client // self._size] is agent]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
