"""The aggregators of a run, on this machine or one on each host: start, addresses, and news of lost clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.news_pipe import NewsPipe
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.base import Role
from dpcfl_net.launch.placement.child import role_environment, start_of
from dpcfl_net.launch.placement.fork_server import AGGREGATOR_MAIN, FIRST_FREE
from dpcfl_net.launch.placement.messages import PUBLIC_FILES, LoseClient, StartAggregator
from dpcfl_net.launch.placement.remote import HostAgent
from dpcfl_net.runtime.specs import AggregatorSpec
from dpcfl_net.transport.keys import COORDINATOR, aggregator_key


class Aggregators(ABC):
    """The aggregators that a signed job names.

    Args:
        files: The run folder.
        runtime: Settings of the run.
        groups: Clients of each aggregator.

    Attributes:
        groups: Clients of each aggregator, by the name of its process; that is also the name of its keys, address and log.
    """

    def __init__(self, files: RunFolder, runtime: RuntimeSettings, groups: Iterable[range]) -> None:
        self._files, self._runtime = files, runtime
        self.groups = {aggregator_key(k): group for k, group in enumerate(groups)}

    @abstractmethod
    def start(self, title: str) -> Role:
        """Start an aggregator; one that ran before listens on its previous address, to which its clients connect again.

        Args:
            title: Name of the process.
        """

    @abstractmethod
    def addresses(self) -> dict[int, str]:
        """Return the address of the aggregator of each client, once all listen; empty if the clients' hosts know it."""

    @abstractmethod
    def tell(self, client: int) -> None:
        """Tell the aggregator of a client that the client is lost.

        Args:
            client: Client id.
        """

    def tell_again(self, title: str, lost: Iterable[int]) -> None:
        """Tell an aggregator that has restarted which of its clients are lost.

        Args:
            title: Name of the process.
            lost: All lost clients.
        """
        for client in sorted(set(lost).intersection(self.groups[title])):
            self.tell(client)

    def number(self, title: str) -> int:
        """Return the number of an aggregator in the job."""
        return list(self.groups).index(title)

    @abstractmethod
    def close(self) -> None:
        """Release the file descriptors."""

    def _title(self, client: int) -> str:
        return next(title for title, group in self.groups.items() if client in group)


class LocalAggregators(Aggregators):
    """Aggregators on this machine.

    Args:
        files: As `Aggregators`.
        runtime: As `Aggregators`.
        groups: As `Aggregators`.
        bind: Address to listen on at the first start.
    """

    def __init__(self, files: RunFolder, runtime: RuntimeSettings, groups: Iterable[range], bind: str) -> None:
        super().__init__(files, runtime, groups)
        self._bind = bind
        self._losses: dict[str, NewsPipe] = {}

    def start(self, title: str) -> Role:
        files, runtime, previous = self._files, self._runtime, self._files.address(title)
        spec = AggregatorSpec(
            files.protocol, self.number(title), read_operator_key(files.operator_key),
            previous.read_text() if previous.exists() else self._bind, files.address(COORDINATOR).read_text(), files.keys, files.path,
            runtime.round_timeout_s, runtime.join_timeout_s, runtime.orphan_timeout_s, FIRST_FREE,
        )  # fmt: skip
        self._close(title)
        self._losses[title] = NewsPipe()
        with self._losses[title].receiver as theirs:
            start = start_of(AGGREGATOR_MAIN, spec, role_environment())
            return parents.fork_role(title, start, files.log(title), (theirs.fileno(),))

    def addresses(self) -> dict[int, str]:
        found = {title: self._files.address(title).read_text() for title in self.groups}
        return {client: found[title] for title, group in self.groups.items() for client in group}

    def tell(self, client: int) -> None:
        self._losses[self._title(client)].tell(client)

    def close(self) -> None:
        for title in self.groups:
            self._close(title)

    def _close(self, title: str) -> None:
        if (pipe := self._losses.pop(title, None)) is not None:
            pipe.close()


class RemoteAggregators(Aggregators):
    """One aggregator on each host, next to the workers of its clients, which connect over the host's loopback interface.

    Args:
        files: As `Aggregators`.
        runtime: As `Aggregators`.
        groups: As `Aggregators`.
        hosts: Agent of the host of each group, by the first client of the group.
        reachable: Returns the address at which the hosts reach an address of this machine.
    """

    def __init__(
        self,
        files: RunFolder,
        runtime: RuntimeSettings,
        groups: Iterable[range],
        hosts: Mapping[int, HostAgent],
        reachable: Callable[[str], str],
    ) -> None:
        super().__init__(files, runtime, groups)
        self._hosts, self._reachable = hosts, reachable

    def start(self, title: str) -> Role:
        """Start an aggregator on its host, which knows its previous address."""
        files, runtime = self._files, self._runtime
        command = StartAggregator(
            files={name: (files.path / name).read_text() for name in PUBLIC_FILES},
            operator_key=read_operator_key(files.operator_key),
            connect=self._reachable(files.address(COORDINATOR).read_text()),
            round_timeout_s=runtime.round_timeout_s,
            join_timeout_s=runtime.join_timeout_s,
            orphan_timeout_s=runtime.orphan_timeout_s,
        )
        return self._hosts[self.groups[title][0]].start_aggregator(command, title, files)

    def addresses(self) -> dict[int, str]:
        """Return nothing: agents know the addresses."""
        return {}

    def tell(self, client: int) -> None:
        self._hosts[self.groups[self._title(client)][0]].send(LoseClient(client=client))

    def close(self) -> None:
        """The placement closes the connections to the hosts."""
