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


def rounds_of_choices(options: Any, rounds: int) -> int:
    """Return the number of rounds in which clients choose a cluster; none if there is one cluster."""
    window: int = options.selection.window(rounds)
    return 0 if options.clusters == 1 else window


class DPIFCA(WeighedByNoise, SecureClusters, Choosing):
    """M models with different initial values; clients choose privately in the first rounds, then clusters are frozen.

    With one cluster there is nothing to choose, and no choice is paid for.

    Source: Liu, Hu, Wu, Smith 2022.
    """

    name = "dp-ifca"
    paper = "Liu, Hu, Wu, Smith 2022; Ghosh et al. 2020"

    class Options(MayWeighByNoise):
        clusters: int = Field(ge=1, le=64, examples=[4], description="M: number of clusters")
        selection: Selection = Field(default=Selection(), description="private choices of a cluster, in a window from round 1")

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        joining = "" if setting.privacy.secure or options.clusters == 1 else f"; {JOINING}"
        said = also_without_survivors(also_without_answers(WITHOUT_CLIENTS + joining, options), setting)
        return replace(super().capabilities_for(options, setting), summed_rounds=setting.rounds, without_clients=said)

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        unused = options.unused("selection", "clusters 1") if options.clusters == 1 else []
        return super().problems(options, setting) + unused + too_many_clusters(options.clusters, setting.clients)

    @classmethod
    def most_synchronous(cls, options: Any, setting: Setting) -> int:
        return rounds_of_choices(options, setting.rounds)

    @property
    def window(self) -> int:
        """Number of rounds with private choices."""
        return rounds_of_choices(self.options, self.protocol.rounds)

    def plan(self, client: ClientEntry) -> list[Slot]:
        choices, fraction = client.rounds_there(1, self.window), self.options.selection.budget_fraction
        if self.secure:
            after = client.rounds_there(self.window + 1, self.protocol.rounds)
            selections = self.selections(client, choices, fraction)
            return [*self.training(client, choices), *selections, *self.secure_slots(client, after)]
        # A client that misses the whole window by schedule chooses once, in its first round.
        selections = self.selections(client, choices or 1, fraction) if self.window else []
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
        phase = "frozen" if self.window else "single"
        state = replace(state, assignment=assignment, diagnostics=state.diagnostics | {"phase": phase})
        if self.asynchronous is not None:
            return self.buffered_round(state, t, fed)
        if self.secure:
            return self.secure_step(state, assignment, fed)
        assignment = self.choose_on_joining(fed, means, assignment, self.joining(t, 0) if self.window else [])
        return replace(state, models=means.moved(), assignment=assignment)
