"""An audited run whose clients are the canaries, with secure sums: scores every client by the sums that the server opened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from dpcfl_net.algorithms.client_level import ClientLevel
from dpcfl_net.attacks.audit.bounds import TradeOff
from dpcfl_net.attacks.audit.clients import ClientRecord, PublishedSum
from dpcfl_net.attacks.audit.gather import SERVER
from dpcfl_net.attacks.audit.opened_sums import OpenedSum, opened_sums
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.privacy.slots import SecureSlot, given
from dpcfl_net.results.epsilon_spent import charges, ledger_folder


class SecureClientRecord(ClientRecord):
    """Canaries, the ledger of the first of them, and the secure sums that its vector is in.

    All clients of a round are charged alike. The sums are opened from the transcript as the server opened them.

    Args:
        folder: Run folder.
        job: The signed job of a client-level algorithm, with an audit.
    """

    view = SERVER

    def __init__(self, folder: Path, job: Job) -> None:
        super().__init__(folder, job)
        assert isinstance(job.algorithm, ClientLevel), "only these add updates of whole clients"
        self._algorithm = job.algorithm
        self._z = given(job.protocol.roster[0].noise_multiplier)

    @property
    def claim(self) -> TradeOff:
        """Trade-off curve of the charges."""
        return TradeOff.of([[slot.event(self._z, "zero-out") for slot in self._charged]])

    def sums(self) -> Iterator[PublishedSum]:
        """Read every secure sum that the first canary's vector is in.

        Yields:
            The sums in the order of rounds.

        Raises:
            ConfigError: If the transcript is not full.
        """
        for number in sorted(self._opened):
            yield self._published(number, self._opened[number])

    @property
    def _observed(self) -> list[str]:
        said = [
            "A client is audited by what the server learnt: the secure sums over all clients, opened from the transcript, with the shares "
            "of the noise of all survivors. Secret coins say whose updates are in a sum. The claim counts T - C shares (threshold less "
            "colluders). With more survivors the noise is larger than the claim counts (noise/stated above 1), and the bound is lower."
        ]
        if unopened := len(self._charged) - len(self._opened):
            first = self.audit.clients[0]
            said.append(
                f"{unopened} secure sums were charged to client {first} and not opened with its vector: they show nothing here."
            )
        return said

    @cached_property
    def _charged(self) -> list[SecureSlot]:
        """Masked releases that the first canary was charged for."""
        first = self.audit.clients[0]
        plan = {slot.name: slot for slot in self._algorithm.plan(self.protocol.client(first))}
        lines = charges(ledger_folder(self.folder, first), self.protocol)
        slots = [plan[name] for line in lines for name in line.slots]
        return [slot for slot in slots if isinstance(slot, SecureSlot)]

    @cached_property
    def _opened(self) -> dict[int, OpenedSum]:
        return opened_sums(self._algorithm, self.audit.clients[0], RunFolder(self.folder).transcript)

    def _published(self, number: int, opened: OpenedSum) -> PublishedSum:
        empty, clip = self._algorithm.new_sums(), self.protocol.local.clip
        sums, counts = empty.split(opened.total.reshape(empty.total.shape))
        blocks = np.stack([self.canaries.project(row) for row in sums]) / clip
        weights = self._weights({} if counts is None else {"counts": counts}, len(blocks))
        return PublishedSum(number, blocks, weights, self._algorithm.coin, self._z * empty.unit / clip)
