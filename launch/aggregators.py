"""The aggregators of a run on this machine: their arguments, addresses, and connections to the launcher."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable
from multiprocessing.connection import Connection

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.launch.placement.fork_server import FIRST_FREE
from dpcfl_net.runtime.specs import AggregatorSpec
from dpcfl_net.transport.keys import aggregator_key

AGGREGATOR_MAIN = "dpcfl_net.runtime.aggregator:run_aggregator"


class Aggregators:
    """The aggregators that a signed job names.

    Args:
        files: The run folder.
        runtime: Settings of the run.
        job: The job.
        operator_key: The operator's public key.

    Attributes:
        titles: Name of each process; also that of its keys, address and log.
    """

    def __init__(self, files: RunFolder, runtime: RuntimeSettings, job: Job, operator_key: str) -> None:
        self._files, self._runtime, self._operator_key = files, runtime, operator_key
        self._groups = [entry.clients for entry in job.protocol.aggregators]
        self.titles = [aggregator_key(k) for k in range(len(self._groups))]
        self._losses: dict[str, Connection] = {}

    def pipe(self, title: str) -> Connection:
        """Return the aggregator's end of a new pipe for lost clients.

        Args:
            title: Name of the process.
        """
        self._close(title)
        theirs, self._losses[title] = multiprocessing.Pipe(duplex=False)
        return theirs

    def spec(self, title: str, coordinator: str, bind: str) -> AggregatorSpec:
        """Return the arguments of a process.

        Args:
            title: Its name.
            coordinator: Address of the coordinator.
            bind: Address to listen on.
        """
        runtime = self._runtime
        return AggregatorSpec(
            self._files.protocol, self.titles.index(title), self._operator_key, bind, coordinator, self._files.keys, self._files.path,
            runtime.round_timeout_s, runtime.join_timeout_s, runtime.orphan_timeout_s, FIRST_FREE,
        )  # fmt: skip

    def addresses(self) -> dict[int, str]:
        """Return the address of each client's aggregator, once all of them listen."""
        found = [self._files.address(title).read_text() for title in self.titles]
        return {client: address for address, group in zip(found, self._groups, strict=True) for client in group}

    def tell(self, client: int) -> None:
        """Tell the aggregator of a client that the client is lost.

        Args:
            client: Client id.
        """
        title = next(title for title, group in zip(self.titles, self._groups, strict=True) if client in group)
        with contextlib.suppress(BrokenPipeError):  # the aggregator has ended; it is told again when it restarts
            self._losses[title].send_bytes(str(client).encode())

    def tell_again(self, title: str, lost: Iterable[int]) -> None:
        """Tell an aggregator that has restarted which of its clients are lost.

        Args:
            title: Name of the process.
            lost: All lost clients.
        """
        for client in sorted(set(lost).intersection(self._groups[self.titles.index(title)])):
            self.tell(client)

    def close(self) -> None:
        """Close all pipes."""
        for title in self.titles:
            self._close(title)

    def _close(self, title: str) -> None:
        if (pipe := self._losses.pop(title, None)) is not None:
            pipe.close()
