"""RC-DPFL: the earlier version of R-DPCFL, whose clients send the raw argmin of their loss in every round after E_c."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpcfl_net.algorithms.r_dpcfl import RDPCFL, FromMixture
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = (
    "the first round clusters the clients that answered, and draws the others uniformly until they choose; the "
    "mean of a cluster is weighted by records over its clients that answered; a cluster without an answer keeps "
    "its model"
)


class RCDPFL(RDPCFL):
    """R-DPCFL with updates weighted by records within a cluster, and raw argmin choices in every round after E_c.

    Source: Malekmohammadi et al., RC-DPFL (earlier version), Algorithm 1.
    """

    name = "rc-dpfl"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version), Algorithm 1"

    class Options(FromMixture):
        """As R-DPCFL, without private choices, secure sums and weights by noise."""

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        claim = "record-level (epsilon, delta), the sensitivity of a choice being 'effectively zero'; it is not"
        return replace(super().capabilities_for(options, setting), claim_of_paper=claim, without_clients=WITHOUT_CLIENTS,
                       protects=(("sample", "untrusted-server"),))  # fmt: skip

    @property
    def weights(self) -> dict[int, float]:
        return self.protocol.records  # N_i

    @property
    def window(self) -> int:
        """All rounds: clients choose until the last one."""
        return self.protocol.rounds

    def choice_slots(self, client: ClientEntry) -> list[Slot]:
        most = client.rounds_there(self.earliest + 1, self.protocol.rounds)  # in every round after the least E_c
        return [] if self.options.clusters == 1 else [*self.argmins(most)]

    def choices(self, fed: Federation, means: ModelMeans, assignment: Assignment) -> Assignment:
        return self.choose(fed, means, assignment, raw=True)
