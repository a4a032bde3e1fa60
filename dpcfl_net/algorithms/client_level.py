"""Base of client-level algorithms: a trusted server samples clients, collects raw updates and publishes noisy sums."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dpcfl_net.algorithms.base import Algorithm, Options
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import CentralSlot, RawSlot, Slot

WITHOUT_CLIENTS = (
    "clients are sampled whether they are there or not; the noisy sum lacks the updates of those without an "
    "answer, and is divided by q n as always"
)


class Sampled(Options):
    """Options of client sampling and of the server step."""

    why_synchronous = (
        "its epsilon holds for a fresh secret sample of the clients in each round, and clients that take part whenever they are "
        "free are no such sample"
    )

    sampling_rate: float = Field(default=0.1, gt=0, le=1, description="q: fraction of the clients that a round samples")
    sampling: Literal["auto", "poisson", "fixed"] = Field(
        default="auto",
        description="poisson: each client with probability q; fixed: q n clients; auto: fixed for replace-one, else poisson",
    )
    server_lr: float = Field(
        default=1.0, gt=0, le=1e6, description="gamma: learning rate of the server for the noisy mean update"
    )


class ClientLevel(Algorithm):
    """Whole-client protection: updates are clipped to C and summed with noise at the server; clients run plain SGD."""

    Options = Sampled

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return Capabilities(
            expected_releases=float(options.sampling_rate * setting.clients) * setting.rounds,
            protects=(("client", "trusted-server"),),
            plain_sgd=True,
            without_clients=WITHOUT_CLIENTS,
        )

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        per_round, adjacency = options.sampling_rate * setting.clients, setting.privacy.adjacency
        sampling = sampling_of(options.sampling, adjacency)
        problems = []
        if per_round < 1:
            problems.append(
                f"algorithm.sampling_rate is {options.sampling_rate}: samples less than one of {setting.clients} clients"
            )
        if sampling == "fixed" and adjacency != "replace-one":
            why = "the size of a fixed sample does not depend on the clients, so only replacement can be protected"
            problems.append(f"algorithm.sampling is 'fixed': needs privacy.adjacency replace-one, {why}")
        if sampling == "fixed" and abs(per_round - round(per_round)) > 1e-9:
            problems.append(
                f"algorithm.sampling_rate is {options.sampling_rate}: {per_round:g} of {setting.clients} clients is not a whole number"
            )
        if sampling == "fixed" and cls.capabilities_for(options, setting).holds_state:
            why = "clients that keep a state reveal earlier samples, which a sample of fixed size does not hide"
            problems.append(f"{cls.name} with these options needs Poisson sampling: {why}")
        return problems

    @property
    def clients_per_round(self) -> float:
        """q n, the expected number of clients in a round; public, and the divisor of the sums over all clients."""
        return float(self.options.sampling_rate * len(self.clients))

    def plan(self, client: ClientEntry) -> list[Slot]:
        """List one raw release for each round."""
        return [RawSlot("raw")] * self.protocol.rounds

    def central_plan(self) -> list[Slot]:
        return [round_slot(self.options, self.setting)] * self.protocol.rounds

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[0] * len(fed.clients))


def sampling_of(asked: str, adjacency: str) -> Literal["poisson", "fixed"]:
    """Choose the sampling of a round.

    Args:
        asked: The option: "poisson", "fixed" or "auto".
        adjacency: Adjacency of the privacy target, which decides for "auto".
    """
    if asked == "auto":
        return "fixed" if adjacency == "replace-one" else "poisson"
    return "fixed" if asked == "fixed" else "poisson"


def round_slot(options: Any, setting: Setting, *parts: tuple[str, float]) -> CentralSlot:
    """Build the central slot of one round.

    Args:
        options: Options of a client-level algorithm.
        setting: Public facts of the run.
        parts: (name, share of 1 / z^2) of each release of the round; the sums alone by default.
    """
    sampling = sampling_of(options.sampling, setting.privacy.adjacency)
    per_round = float(options.sampling_rate * setting.clients)
    size = round(per_round) if sampling == "fixed" else per_round
    return CentralSlot("round", sampling, size, setting.clients, parts or (("sums", 1.0),))
