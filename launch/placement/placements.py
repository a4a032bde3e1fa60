"""Placements of workers: the interface, and this machine. The keys of a client are created on its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dpcfl_net.core.files import in_home
from dpcfl_net.core.protocol import LARGE_ROSTER
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Policy
from dpcfl_net.experiment.config_schema import Config, RuntimeSettings
from dpcfl_net.launch.aggregators import Aggregators, LocalAggregators
from dpcfl_net.launch.placement.base import Addresses, Launcher, Node
from dpcfl_net.runtime.specs import WorkerSpec, WorkerTerms
from dpcfl_net.training.devices import deal
from dpcfl_net.transport.identities import make_all_identities
from dpcfl_net.transport.keys import (
    COORDINATOR,
    make_aggregator_keys,
    make_client_keys,
    make_packed_keys,
)

if TYPE_CHECKING:
    from dpcfl_net.launch.placement.local import LocalLauncher
    from dpcfl_net.launch.placement.parents import JobSource
    from dpcfl_net.launch.placement.slot_folder import SlotFolder


def worker_terms(config: Config) -> WorkerTerms:
    """Return the workers' terms from the configuration: largest epsilon and delta, record book and budget."""
    ledger, policy = config.ledger, Policy(config.runtime.max_epsilon, config.runtime.max_delta)
    if ledger.root is None:
        return WorkerTerms(policy, durable=config.runtime.durable)
    budget = None if ledger.budget is None else (ledger.budget.epsilon, ledger.budget.delta)
    return WorkerTerms(policy, in_home(ledger.root, "ledger.root").resolve(), budget, config.runtime.durable)


@dataclass(frozen=True)
class KeyOwners:
    """Processes of a run whose keys a placement creates.

    Attributes:
        clients: Number of clients.
        size: Clients per worker process.
        identities: Create the pairs with which clients sign messages of secure sums, too.
        groups: Clients of each aggregator.
        runtime: Settings whose GPUs each host must have.
    """

    clients: int
    size: int
    identities: bool
    groups: tuple[range, ...]
    runtime: RuntimeSettings

    @classmethod
    def of(cls, config: Config) -> KeyOwners:
        """Return those of a configuration."""
        clients, runtime = config.data.client_count, config.runtime
        return cls(clients, runtime.clients_per_worker, config.privacy.secure, tuple(runtime.groups(clients)), runtime)


class Placement(Protocol):
    """The hosts of the workers of one run."""

    def capacity(self) -> list[Node]:
        """Return the hosts, or parts of hosts, that can run workers."""

    def make_keys(self, keys: Path, owners: KeyOwners) -> None:
        """Create the key pair of every client and every aggregator on its host.

        Args:
            keys: Folder that receives the public keys.
            owners: The clients and aggregators.
        """

    def bind(self, role: str) -> str:
        """Return the address on which the coordinator or the observer listens."""

    def reachable_address(self, address: str) -> str:
        """Return the address at which workers reach a socket bound to `address`."""

    def first_relay_port(self) -> int | None:
        """Return the relay's port for client 0, followed by those of the others; None: any free ports."""

    def preload(self, job: JobSource) -> None:
        """Load in advance the libraries and the job of all workers (see `parents.preload`)."""

    def aggregators(self, files: RunFolder, runtime: RuntimeSettings, groups: Sequence[range]) -> Aggregators:
        """Return the aggregators of a run; they are not started yet.

        Args:
            files: The run folder, with the signed job.
            runtime: Settings of the run.
            groups: Clients of each aggregator.
        """

    def launcher(self, folder: Path, config: Config, operator_key: str, addresses: Addresses) -> Launcher:
        """Return the launcher for the workers of a job.

        Args:
            folder: The run folder, with the signed job.
            config: The configuration of the run.
            operator_key: The operator's public key.
            addresses: Addresses for the workers.
        """

    def devices(self) -> dict[str, int]:
        """Return the number of worker processes by device, "cpu" or the UUID of a GPU, as far as known."""

    def close(self) -> list[str]:
        """End all workers; may be called twice.

        Returns:
            A warning about each host that did not end them.
        """


class LocalPlacement(Placement):
    """All workers on this machine, connected over loopback.

    Args:
        cpu: True if `capacity` leaves out the GPUs, since no worker may use one.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        self._cpu = cpu
        self._launcher: LocalLauncher | None = None
        self._devices: list[str] = []
        self._slots: SlotFolder | None = None

    def capacity(self) -> list[Node]:
        from dpcfl_net.launch.placement.local import local_node

        return [local_node(cpu=self._cpu)]

    def make_keys(self, keys: Path, owners: KeyOwners) -> None:
        make_aggregator_keys(keys, range(len(owners.groups)))
        if owners.clients >= LARGE_ROSTER:
            make_packed_keys(keys, owners.clients)
        else:
            make_client_keys(keys, range(owners.clients))
        if owners.identities:
            make_all_identities(keys, owners.clients)

    def bind(self, role: str) -> str:
        return "tcp://127.0.0.1:*"

    def reachable_address(self, address: str) -> str:
        return address

    def first_relay_port(self) -> int | None:
        return None

    def preload(self, job: JobSource) -> None:
        from dpcfl_net.launch.placement import parents

        parents.preload(job)

    def aggregators(self, files: RunFolder, runtime: RuntimeSettings, groups: Sequence[range]) -> Aggregators:
        return LocalAggregators(files, runtime, groups, self.bind(COORDINATOR))

    def launcher(self, folder: Path, config: Config, operator_key: str, addresses: Addresses) -> Launcher:
        from dpcfl_net.launch.placement.local import LocalLauncher
        from dpcfl_net.launch.placement.slot_folder import SlotFolder

        runtime, files = config.runtime, RunFolder(folder)
        self._slots = SlotFolder.of(runtime)
        firsts = range(0, config.data.client_count, runtime.clients_per_worker)
        spec = WorkerSpec(
            folder, 0, addresses.coordinator, addresses.observer, files.keys, operator_key, files.ledgers, worker_terms(config),
            config.data.root, self._slots.spec if self._slots else None, runtime.orphan_timeout_s, relayed=addresses.relayed,
        )  # fmt: skip
        devices = deal(runtime, len(firsts))
        self._devices = [device.uuid or "cpu" for device in devices]
        self._launcher = LocalLauncher(spec, files.logs, dict(zip(firsts, devices, strict=True)), addresses.namespaces)
        return self._launcher

    def devices(self) -> dict[str, int]:
        return dict(Counter(self._devices))

    def close(self) -> list[str]:
        with ExitStack() as closing:
            for one in (self._slots, self._launcher):
                if one is not None:
                    closing.callback(one.close)
        return []
