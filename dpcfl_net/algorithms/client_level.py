"""What the client-level algorithms share: a trusted server, a sample of clients each round, raw releases that it protects."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, Algorithm, Options, Setting, on_central_server, on_client
from dpcfl_net.core.protocol import ClientEntry, PrivacyTarget
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.central_dp import Desk
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import CentralSlot, RawSlot, Slot


class Sampled(Options):
    """Which clients a round draws, and what its mean is multiplied by."""

    sampling_rate: float = Field(default=0.1, gt=0, le=1, description="q: the share of the clients that a round draws")
    sampling: Literal["auto", "poisson", "fixed"] = Field(
        default="auto", description="poisson: a coin for each client; fixed: q n of them; auto: what the adjacency allows"
    )
    server_lr: float = Field(default=1.0, gt=0, le=1e6, description="gamma: the server's step along the noisy mean update")


class ClientLevel(Algorithm):
    """A client's whole update is clipped to C and hidden in a noisy sum; the client itself runs plain SGD and adds nothing."""

    protects = (("client", "trusted-server"),)
    stateful = False  # what a client sends depends on earlier rounds, and so on whether it was drawn then
    Options = Sampled

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        drawn, adjacency = options.sampling_rate * setting.clients, setting.privacy.adjacency
        sampling = sampling_of(options.sampling, adjacency)
        problems = []
        if drawn < 1:
            problems.append(
                f"algorithm.sampling_rate is {options.sampling_rate}: draws less than one of {setting.clients} clients"
            )
        if sampling == "fixed" and adjacency != "replace-one":
            why = "the size of a fixed sample shows nobody's absence, so only replacement can be promised"
            problems.append(f"algorithm.sampling is 'fixed': needs privacy.adjacency replace-one, {why}")
        if sampling == "fixed" and abs(drawn - round(drawn)) > 1e-9:
            problems.append(
                f"algorithm.sampling_rate is {options.sampling_rate}: {drawn:g} of {setting.clients} is no whole number"
            )
        if sampling == "fixed" and cls.holds_state(options):
            why = "clients that keep a state show who was drawn before, which a sample of fixed size does not hide"
            problems.append(f"{cls.name} with these options needs Poisson sampling: {why}")
        return problems

    @classmethod
    def plain_sgd(cls, options: Any, privacy: PrivacyTarget) -> bool:
        return True

    @classmethod
    def holds_state(cls, options: Any) -> bool:
        """Whether clients keep something from round to round."""
        return cls.stateful

    @property
    def sampling(self) -> Literal["poisson", "fixed"]:
        return sampling_of(self.options.sampling, self.protocol.privacy.adjacency)

    @property
    def drawn(self) -> float:
        """q n, the (expected) number of clients in a round: public, and the divisor of means over everybody."""
        return float(self.options.sampling_rate * len(self.clients))

    @property
    def expected_releases(self) -> float:
        return self.drawn * self.protocol.rounds

    def plan(self, client: ClientEntry) -> list[Slot]:
        """At most one raw answer a round."""
        return [RawSlot("raw")] * self.protocol.rounds

    def central_plan(self) -> list[Slot]:
        return [self.central_slot()] * self.protocol.rounds

    def central_slot(self, *parts: tuple[str, float]) -> CentralSlot:
        """One round's slot; `parts` and their shares of 1 / z^2, the sums alone if none is named."""
        drawn = round(self.drawn) if self.sampling == "fixed" else self.drawn
        return CentralSlot("round", self.sampling, drawn, len(self.clients), parts or (("sums", 1.0),))

    def max_update_norm(self, client: ClientEntry) -> float:
        """Any: the curator clips what it gets."""
        return math.inf

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[0] * len(fed.clients))


class OneModel(ClientLevel):
    """A round of DP-FedAvg; subclasses say how a client trains."""

    @property
    def update_size(self) -> int:
        """How many parameters a client's update has."""
        return self.protocol.model.parameters

    def round(self, state: State, t: int, fed: Federation) -> State:
        released = fed.release(self.noisy_sum, model=state.models[0])
        if released is None:
            return state
        step = self.options.server_lr * released["sum"] / self.drawn
        models = state.models.copy()
        models[0, : step.size] += step.astype(np.float32)
        return State(models, state.assignment, state.memory)

    @on_central_server(bundle=["round"])
    def noisy_sum(self, me: Desk, model: np.ndarray) -> Release:
        """Sample, collect, clip to C, sum, add noise."""
        answers = me.call(self.train, {client: {"model": model} for client in me.sample("round")})
        updates = {client: [(0, update)] for client, update in answers.column("update").items()}
        sums, _ = me.noisy_sums("round", "sums", updates, (1, self.update_size), self.protocol.local.clip)
        me.show_observer(clients=list(answers))
        return Release(sum=sums[0])

    @on_client(bundle=["raw"], takes={"model": MODEL}, gives={"update": MODEL})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Local epochs of plain SGD from the model; the difference as it is."""
        return Release(update=me.sgd("raw", model) - model)


def sampling_of(asked: str, adjacency: str) -> Literal["poisson", "fixed"]:
    """The sampling that a round uses: as asked, or what goes with the adjacency."""
    if asked == "auto":
        return "fixed" if adjacency == "replace-one" else "poisson"
    return "fixed" if asked == "fixed" else "poisson"
