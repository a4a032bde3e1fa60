"""f-CDPFL: clusters by training loss in every round (a baseline of RC-DPFL; Ghosh et al. 2020, Mansour et al. 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import Options
from dpcfl_net.algorithms.shared_steps import Choosing, too_many_clusters
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment, State
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = (
    "the mean of a cluster is over its clients that answered; a cluster without an answer keeps its model; a "
    "client without an answer keeps its last choice"
)


class FCDPFL(Choosing):
    """M models with different initial values; in every round each client chooses the model of least training loss and trains it.

    The paper sends the raw index, which has no finite epsilon; `select: exponential` is the private variant. With one cluster there is
    nothing to choose: clients send no index, and pay for none.

    Source: Malekmohammadi et al., RC-DPFL (earlier version), section 5.
    """

    name = "f-cdpfl"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version), section 5"

    class Options(Options):
        clusters: int = Field(ge=1, le=64, examples=[4], description="M: number of clusters")
        select: Literal["argmin", "exponential"] = Field(
            default="argmin", description="argmin: raw, so epsilon is inf; exponential: private"
        )
        budget_fraction: float = Field(
            default=0.01, gt=0, lt=1, description="select exponential: epsilon of one selection, as a fraction of the total"
        )

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        claim = "record-level (epsilon, delta) for the updates (section 3)"
        if options.select == "argmin" and options.clusters > 1:
            claim += "; a raw argmin has no finite epsilon"
        return replace(
            super().capabilities_for(options, setting), claim_of_paper=claim, summed_rounds=setting.rounds,
            without_clients=WITHOUT_CLIENTS,
        )  # fmt: skip

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        unused = options.unused("select", "clusters 1") if options.clusters == 1 else []
        if options.select == "argmin":
            unused += options.unused("budget_fraction", "select argmin")
        return unused + too_many_clusters(options.clusters, setting.clients)

    @property
    def raw(self) -> bool:
        """True if indices leave the client without protection."""
        return bool(self.options.select == "argmin")

    def plan(self, client: ClientEntry) -> list[Slot]:
        rounds = client.rounds_there(1, self.protocol.rounds)
        if self.options.clusters == 1:
            return [*self.training(client, rounds)]
        choices = self.argmins(rounds) if self.raw else self.selections(client, rounds, self.options.budget_fraction)
        return [*self.training(client, rounds), *choices]

    def start(self, fed: Federation) -> State:
        models = np.stack([fed.initial_model(m) for m in range(self.options.clusters)])
        return State(models, [None] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        means = ModelMeans(state.models)
        if self.options.clusters == 1:
            assignment: Assignment = [0] * len(fed.clients)
            self.stream_each(fed, means, assignment)
            return State(means.moved(), assignment, diagnostics={"phase": "single"})
        assignment = self.choose(fed, means, state.assignment, raw=self.raw)
        return State(means.moved(), assignment, diagnostics={"phase": "window"})
