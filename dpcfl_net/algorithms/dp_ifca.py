"""DP-IFCA (Liu, Hu, Wu, Smith 2022; 'IFCA' in Malekmohammadi et al., TMLR 2025; after Ghosh et al. 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.buffered import also_without_answers
from dpcfl_net.algorithms.noise_weights import MayWeighByNoise, WeighedByNoise
from dpcfl_net.algorithms.secure_clusters import SecureClusters, also_without_survivors
from dpcfl_net.algorithms.shared_steps import Choosing, Selection, too_many_clusters
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment, State
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = (
    "the mean of a cluster is over its clients that answered; a cluster without an answer keeps its model; a "
    "client without a choice is in the first cluster"
)
JOINING = "one that is away in the whole window by schedule chooses privately in its first round"


class DPIFCA(WeighedByNoise, SecureClusters, Choosing):
    """M models with different initial values; clients choose privately in the first rounds, then clusters are frozen.

    Source: Liu, Hu, Wu, Smith 2022.
    """

    name = "dp-ifca"
    paper = "Liu, Hu, Wu, Smith 2022; Ghosh et al. 2020"

    class Options(MayWeighByNoise):
        clusters: int = Field(ge=1, le=64, examples=[4], description="M: number of clusters")
        selection: Selection = Field(default=Selection(), description="private choices of a cluster, in a window from round 1")

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        joining = "" if setting.privacy.secure else f"; {JOINING}"
        said = also_without_survivors(also_without_answers(WITHOUT_CLIENTS + joining, options), setting)
        return replace(super().capabilities_for(options, setting), summed_rounds=setting.rounds, without_clients=said)

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        return super().problems(options, setting) + too_many_clusters(options.clusters, setting.clients)

    @classmethod
    def most_synchronous(cls, options: Any, setting: Setting) -> int:
        return options.selection.window(setting.rounds)

    @property
    def window(self) -> int:
        """Number of rounds with private choices."""
        return self.options.selection.window(self.protocol.rounds)

    def plan(self, client: ClientEntry) -> list[Slot]:
        choices, fraction = client.rounds_there(1, self.window), self.options.selection.budget_fraction
        if self.secure:
            after = client.rounds_there(self.window + 1, self.protocol.rounds)
            selections = self.selections(client, choices, fraction)
            return [*self.training(client, choices), *selections, *self.secure_slots(client, after)]
        # A client that misses the whole window by schedule chooses once, in its first round.
        selections = self.selections(client, choices or 1, fraction)
        return [*self.training(client, self.participations_from(client, 1)), *selections]

    def start(self, fed: Federation) -> State:
        models = np.stack([fed.initial_model(m) for m in range(self.options.clusters)])
        return State(models, [None] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        assignment: Assignment
        means = ModelMeans(state.models, self.weights)
        if t <= self.window:
            assignment = self.choose(fed, means, state.assignment)
            return State(means.moved(), assignment, diagnostics={"phase": "window"})
        assignment = [0 if m is None else m for m in state.assignment]  # None: missing in every round of the window
        state = replace(state, assignment=assignment, diagnostics=state.diagnostics | {"phase": "frozen"})
        if self.asynchronous is not None:
            return self.buffered_round(state, t, fed)
        if self.secure:
            return self.secure_step(state, assignment, fed)
        assignment = self.choose_on_joining(fed, means, assignment, self.joining(t, 0))
        return replace(state, models=means.moved(), assignment=assignment)
