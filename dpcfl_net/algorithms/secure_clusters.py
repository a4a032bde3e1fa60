"""One DP-SGD step of each public cluster by a secure sum: its clients share one noise instead of adding one each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import MODEL, on_client
from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment, Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.secure.job_terms import honest_shares
from dpcfl_net.federation.secure.rounds import secure_sums
from dpcfl_net.federation.secure.stages import MASKED, MASKING, secure_rounds
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.privacy.slots import SecureSlot, Slot, given

FREE_PACE = "privacy.trust is 'secure-aggregation': local.pace must be 'free', got {!r}: secure sums take no padded batches"
WITHOUT_SURVIVORS = (
    "the secure sum of a cluster is over its clients whose masked vector arrived; with fewer than the threshold it is aborted, and "
    "the cluster keeps its model in that round"
)


def also_without_survivors(without_clients: str, setting: Setting) -> str:
    """Add to an algorithm's sentence on missing clients what its secure sums do, if the job has any."""
    return f"{without_clients}; {WITHOUT_SURVIVORS}" if setting.privacy.secure else without_clients


class SecureClusters(FromModel):
    """A round with fixed clusters may be one DP-SGD step for each cluster, whose noisy gradient is a secure sum.

    Each client draws a Poisson batch, sums its clipped gradients, and adds a share of the noise; the server learns the sum of a
    cluster, with the noise of one DP-SGD step, and steps theta -= lr * sum / (expected records of all batches). It is the law of
    one DP-SGD run on the records of the whole cluster.
    """

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        able = super().capabilities_for(options, setting)
        return replace(able, protects=(("sample", "untrusted-server"), ("sample", "secure-aggregation")),
                       sides={**able.sides, "masked": lambda model: model.parameters})  # fmt: skip

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems, local = super().problems(options, setting), setting.local
        if not setting.privacy.secure:
            return problems
        if local.epochs != 1:
            why = "a secure sum is one step: after a step with a share of the noise, the next one would have no guarantee"
            problems.append(f"local.epochs is {local.epochs}: must be 1 with privacy.trust secure-aggregation, since {why}")
        if local.pace != "free":
            problems.append(FREE_PACE.format(local.pace))
        return problems

    @property
    def secure(self) -> bool:
        """True if rounds with fixed clusters are secure sums."""
        return self.setting.privacy.secure

    def secure_slots(self, client: ClientEntry, rounds: int) -> list[Slot]:
        """List the slots of rounds with secure sums, one step of sampling rate b/N each.

        Args:
            client: The client's roster entry.
            rounds: Number of rounds.
        """
        return secure_rounds(SecureSlot("masked", self.rate(client)), rounds)

    def rate(self, client: ClientEntry) -> float:
        """Return the sampling rate of a step, b/N.

        Args:
            client: The client's roster entry.
        """
        return min(self.protocol.local.batch_size, client.records) / client.records

    def secure_code(self, participants: int) -> SumCode | None:
        if not self.secure or (honest := honest_shares(participants, self.setting.privacy)) < 1:
            return None
        local = self.protocol.local
        batch = min(local.batch_size, int(max(self.protocol.records.values())))
        return SumCode(
            d=self.protocol.model.parameters, participants=participants,
            honest=honest,
            noise_multiplier=given(self.protocol.roster[0].noise_multiplier), clip=local.clip, largest=batch + 12 * batch**0.5 + 12, rounded=True,
        )  # fmt: skip

    def secure_step(self, state: State, assignment: Assignment, fed: Federation) -> State:
        """Run a round of one step for each cluster.

        Args:
            state: State before the round.
            assignment: Cluster of each client.
            fed: Federation of the clients.
        """
        there = set(fed.clients) - set(fed.away(fed.round))
        groups = {
            m: tuple(client for client, row in enumerate(assignment) if row == m and client in there)
            for m in range(len(state.models))
        }
        work = {group: {"model": state.models[m]} for m, group in groups.items() if group}
        results = secure_sums(fed, self.masked_step, work)
        models, aborted = state.models.copy(), []
        for m, group in groups.items():
            result = results.get(group)
            if result is None or result.total is None:
                aborted.append(f"{m}: {result.aborted if result else 'no client is there'}")
                continue
            entries = [self.protocol.client(client) for client in result.survivors]
            expected = sum(self.rate(entry) * entry.records for entry in entries)
            models[m] -= (self.protocol.local.lr / expected * result.total).astype(np.float32)
        shown = {"secure sums": "; ".join(aborted) or "ok"}
        return State(models, assignment, state.memory, state.diagnostics | shown)

    @on_client(charges=["masked"], takes={**MASKING, "model": MODEL}, gives={"masked": MASKED})
    def masked_step(self, me: Client, model: np.ndarray) -> Release:
        """Add the clipped gradients of a Poisson batch to the secure sum of the cluster.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(masked=me.masked_gradient("masked", model))
