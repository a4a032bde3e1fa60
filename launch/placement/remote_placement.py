"""Placement of workers on other hosts, with an agent on each, which creates the keys of its clients and aggregator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_key_file
from dpcfl_net.experiment.config_schema import Config, RuntimeSettings
from dpcfl_net.launch.aggregators import Aggregators, RemoteAggregators
from dpcfl_net.launch.placement.base import Addresses, Launcher, Node
from dpcfl_net.launch.placement.messages import FILES, CheckGpus, PrepareKeys, SetJob
from dpcfl_net.launch.placement.parents import JobSource
from dpcfl_net.launch.placement.placements import KeyOwners, Placement
from dpcfl_net.launch.placement.remote import HELLO_S, Host, HostAgent, RemoteLauncher, close_all, node_of
from dpcfl_net.launch.placement.shares import assign_processes, share_processes
from dpcfl_net.transport.identities import identity_path
from dpcfl_net.transport.keys import COORDINATOR, OBSERVER, aggregator_key, client_key, public_path
from dpcfl_net.transport.sockets import require_free

CLOCK_S = 5.0  # more than the hello of a host usually takes to arrive


@dataclass(frozen=True)
class ListenAddress:
    """Addresses on which coordinator and observer listen for workers of other hosts.

    Attributes:
        address: Address at which workers reach this machine.
        bind: Address to bind, if `address` is not one of this machine.
        ports: Ports of coordinator and observer, followed by those of the relay; 0: any free ports.
    """

    address: str
    bind: str | None = None
    ports: tuple[int, int] = (0, 0)


class RemotePlacement(Placement):
    """Hosts with an agent on each.

    Args:
        hosts: The hosts and how to connect to them.
        listening: Addresses of coordinator and observer.
        assigned: Host name of each worker process in a resumed run; None: a new run.
    """

    def __init__(self, hosts: Sequence[Host], listening: ListenAddress, assigned: Sequence[str] | None = None) -> None:
        self._listening, self._size, self._assigned = listening, 1, assigned
        self._closed = False
        self._groups: Sequence[range] = ()
        self._agents = [HostAgent(host) for host in hosts]
        self._agent_of: list[HostAgent] = []  # by worker process

    def open(self) -> None:
        """Connect to all hosts.

        Raises:
            ConfigError: If coordinator and observer could not listen here.
            RunFailed: If one does not answer.
        """
        for role in (COORDINATOR, OBSERVER):
            try:
                require_free(self.bind(role))
            except ConfigError as error:
                raise ConfigError(
                    f"{error}; --address takes a name or an address of this machine, without brackets and port (--bind, if workers reach "
                    "it at another one), and --ports two free ports"
                ) from None
        for agent in self._agents:
            agent.open()
        for agent in self._agents:
            agent.wait_for(agent.has_answered, HELLO_S)

    def clock_warnings(self) -> list[str]:
        """Return a sentence for each host whose clock differs from this machine's by more than `CLOCK_S`."""
        return [
            f"the clock of host {agent.host.name} is {abs(agent.ahead_s):,.0f} s {'ahead of' if agent.ahead_s > 0 else 'behind'} "
            "this machine's: so are the times of its clients in spans.jsonl, timelines and traces"
            f"{'' if agent.ahead_s > 0 else ' (unless only its first message was late)'}"
            for agent in self._agents
            if abs(agent.ahead_s) > CLOCK_S
        ]

    def capacity(self) -> list[Node]:
        return [node_of(agent) for agent in self._agents]

    def group_sizes(self, clients: int, size: int) -> list[int]:
        """Return the number of clients of each host's aggregator, in proportion to the shares of the hosts.

        Args:
            clients: Number of clients.
            size: Clients per worker process.

        Raises:
            ConfigError: If there are more hosts than worker processes.
        """
        counts = share_processes(-(-clients // size), self._shares())
        ends = [min(clients, size * end) for end in accumulate(counts)]
        return [end - start for start, end in pairwise([0, *ends])]

    def assign_hosts(self, clients: int, size: int, groups: Sequence[range] = ()) -> list[str]:
        """Assign the worker processes to hosts; in a resumed run each to its previous host.

        Args:
            clients: Number of clients.
            size: Clients per worker process.
            groups: Clients of each aggregator: those of a group run on the same host, next to their aggregator.

        Returns:
            Host name of each worker process, in the order of their clients.

        Raises:
            ConfigError: If a host of a resumed run is missing, or if the groups do not fit the hosts.
        """
        self._size, self._groups, count = size, groups, -(-clients // size)
        if self._assigned is not None:
            by_name = {agent.host.name: agent for agent in self._agents}
            if missing := sorted(set(self._assigned) - set(by_name)):
                raise ConfigError(f"this run has clients on {', '.join(missing)}: these hosts are not in the current list")
            self._agent_of = [by_name[name] for name in self._assigned]
        elif groups:
            self._check_groups()
            self._agent_of = [agent for agent, group in zip(self._agents, groups, strict=True) for _ in group[::size]]
        else:
            self._agent_of = [self._agents[k] for k in assign_processes(count, self._shares())]
        for number, group in enumerate(groups):
            self._agent_of[group[0] // size].aggregator = number
        return [agent.host.name for agent in self._agent_of]

    def _shares(self) -> list[int]:
        return [agent.host.workers or node_of(agent).cores for agent in self._agents]

    def _check_groups(self) -> None:
        """ConfigError unless each host gets one group of whole worker processes."""
        sizes = [len(group) for group in self._groups]
        if len(sizes) != len(self._agents):
            raise ConfigError(
                f"runtime.aggregators makes {len(sizes)} groups of clients: must be one for each of the {len(self._agents)} hosts "
                f"({', '.join(agent.host.name for agent in self._agents)}); --tree sets it"
            )
        if any(size % self._size for size in sizes[:-1]):
            raise ConfigError(
                f"runtime.aggregators makes groups of {', '.join(map(str, sizes))} clients: all but the last must be multiples of "
                f"runtime.clients_per_worker, {self._size}, since a worker process runs on one host; --tree sets it"
            )

    def check_gpus(self, runtime: RuntimeSettings) -> None:
        """Let the hosts with workers check that they have the GPUs of the settings; comes after `assign_hosts`.

        Args:
            runtime: The configuration's `runtime` section.

        Raises:
            RunFailed: If a host lacks one, or does not answer.
        """
        for agent in dict.fromkeys(self._agent_of):
            agent.send(CheckGpus(runtime=agent.host.runtime(runtime)))
        for agent in dict.fromkeys(self._agent_of):
            agent.wait_for(agent.has_gpus, HELLO_S)

    def make_keys(self, keys: Path, owners: KeyOwners) -> None:
        """Create the keys; in a resumed run they must exist and match the signed job."""
        self.assign_hosts(owners.clients, owners.size, owners.groups)
        for agent in self._agents:
            if assigned := self._clients_of(agent, owners.clients):
                agent.ask_for_keys(PrepareKeys(
                    clients=assigned, existing=self._assigned is not None, identities=owners.identities, aggregator=agent.aggregator,
                    runtime=agent.host.runtime(owners.runtime),
                ))  # fmt: skip
        for agent in dict.fromkeys(self._agent_of):
            agent.wait_for(agent.has_keys, HELLO_S)
            agent.begin()
            found = {public_path(keys, client_key(client)): key for client, key in agent.keys.items()}
            found |= {identity_path(keys, client_key(client)): key for client, key in agent.identities.items()}
            if agent.aggregator is not None and agent.aggregator_key is not None:
                found[public_path(keys, aggregator_key(agent.aggregator))] = agent.aggregator_key
            for path, key in found.items():
                if self._assigned is not None and read_key_file(path) != key:
                    raise Refused("keys", f"{path.name} on {agent.host.name} differs from the key in the job")
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(key + "\n")

    def bind(self, role: str) -> str:
        port = self._listening.ports[role == OBSERVER]
        return f"tcp://{_bracketed(self._listening.bind or self._listening.address)}:{port or '*'}"

    def reachable_address(self, address: str) -> str:
        return f"tcp://{_bracketed(self._listening.address)}:{address.rpartition(':')[2]}"

    def first_relay_port(self) -> int | None:
        return max(self._listening.ports) + 1 if all(self._listening.ports) else None

    def preload(self, job: JobSource) -> None:
        """Agents load it on their hosts."""

    def aggregators(self, files: RunFolder, runtime: RuntimeSettings, groups: Sequence[range]) -> Aggregators:
        hosts = {group[0]: self._agent_of[group[0] // self._size] for group in groups}
        return RemoteAggregators(files, runtime, groups, hosts, self.reachable_address)

    def launcher(self, folder: Path, config: Config, operator_key: str, addresses: Addresses) -> Launcher:
        size, clients = config.runtime.clients_per_worker, config.data.client_count
        files = {name: (folder / name).read_text() for name in FILES}
        for agent in dict.fromkeys(self._agent_of):
            agent.ledgers = RunFolder(folder).ledgers
            agent.set_job(SetJob(
                files=files, operator_key=operator_key, connect=addresses.coordinator, observer=addresses.observer,
                relayed=dict(addresses.relayed), runtime=agent.host.runtime(config.runtime), data_root=agent.host.data_root or config.data.root,
                firsts=[k * size for k, other in enumerate(self._agent_of) if other is agent],
            ))  # fmt: skip
        return RemoteLauncher(
            {first: self._agent_of[first // size] for first in range(0, clients, size)}, RunFolder(folder).logs
        )

    def devices(self) -> dict[str, int]:
        return dict(Counter(device for agent in self._agents for device in agent.devices))

    def close(self) -> list[str]:
        if self._closed:
            return []
        self._closed = True
        return close_all(self._agents)

    def _clients_of(self, agent: HostAgent, clients: int) -> list[int]:
        return [client for client in range(clients) if self._agent_of[client // self._size] is agent]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
