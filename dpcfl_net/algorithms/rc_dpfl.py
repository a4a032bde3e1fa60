"""RC-DPFL: the earlier version of R-DPCFL, whose clients send the raw argmin of their loss in every round after E_c."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dpcfl_net.algorithms.base import Options
from dpcfl_net.algorithms.r_dpcfl import RDPCFL, Clustering
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.federation.base import Federation
from dpcfl_net.privacy.slots import DPSGDSlot, Slot


class RCDPFL(RDPCFL):
    """As R-DPCFL, but within a cluster updates weigh as their clients' records, and choices are argmins, to the last round."""

    name = "rc-dpfl"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version), Algorithm 1"
    claim_of_paper = "record-level (epsilon, delta), the sensitivity of a choice being 'effectively zero'; it is not"

    class Options(Options):
        clusters: int | Literal["auto"] = Field(default="auto", description="M, or auto: chosen by effective separation")
        max_clusters: int = Field(default=8, ge=2, le=64, description="largest M that auto considers")
        clustering: Clustering = Field(default=Clustering(), description="the mixture")
        warm_start: bool = Field(default=False, description="start cluster models from the posterior-weighted first updates")

    @property
    def weights(self) -> dict[int, float]:
        return {entry.id: float(entry.records) for entry in self.protocol.roster}  # N_i

    def last_choice(self, soft_until: int) -> int:
        return self.protocol.rounds

    def plan(self, client: ClientEntry) -> list[Slot]:
        later = self.protocol.rounds - 1
        argmins = [] if self.options.clusters == 1 else self.argmins(later)  # E_c may be 1: then every round from 2 on
        return [DPSGDSlot("first", 1.0, self.protocol.local.epochs), *self.training(client, later), *argmins]

    def choices(self, fed: Federation, models: Any, assignment: dict[int, Any]) -> Any:
        return self.choose(fed, models, assignment, raw=True)
