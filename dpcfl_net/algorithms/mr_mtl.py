"""MR-MTL (Liu, Hu, Wu, Smith, "On privacy and personalization in cross-silo federated learning", 2022, Algorithm A1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, Algorithm, Options, dpsgd_norm, full_epochs, on_client
from dpcfl_net.core.frozen import once
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Release, State, TensorSpec
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.plan_examples import plan_examples
from dpcfl_net.privacy.slots import DPSGDSlot, Slot

WITHOUT_CLIENTS = (
    "the mean moves by the updates that arrived, weighted by records over all clients; an update that came too late or was lost on its way "
    "is in its client's personal model and not in the mean; a client without a task, or whose task a crash cut, keeps its model"
)


def pulled_norm(algorithm: Algorithm, client: ClientEntry) -> float:
    """Bound the norm of an honest update: that of DP-SGD, plus the proximal steps towards the mean.

    Let B bound the norm of noise and clipped sums in a round of S steps of the client, and D be its distance from the mean. A
    fraction r = (1 - lr lambda)^S of D is left after the round. All models start equal, and a round moves a model and the mean apart
    by at most twice the largest B of any client. The update is at most B + (1 - r) D.

    Args:
        algorithm: The job's algorithm.
        client: The client's roster entry.
    """
    protocol = algorithm.protocol
    _, steps, _ = full_epochs(protocol.local, client)
    remaining = (1 - protocol.local.lr * algorithm.options.lam) ** steps
    largest = once(protocol, "largest update", lambda: max(dpsgd_norm(algorithm, entry) for entry in plan_examples(algorithm)))
    return dpsgd_norm(algorithm, client) + (1 - remaining) * 2 * protocol.rounds * largest


PULLED = TensorSpec("f4", ("p",), max_norm=pulled_norm)


class MRMTL(Algorithm):
    """A personal model for each client, with the proximal gradient lambda (theta_i - mean) towards the mean of all models.

    The proximal gradient is added after clipping and noise: it does not depend on data, so it costs no epsilon and needs no
    clipping. (As a term of the loss it has no effect under Opacus, whose optimiser overwrites the gradient with the sum of the
    clipped per-record gradients, which does not contain the term.)

    Source: Liu, Hu, Wu, Smith 2022, Algorithm A1.
    """

    name = "mr-mtl"
    paper = "Liu, Hu, Wu, Smith 2022, Algorithm A1"

    class Options(Options):
        lam: float = Field(
            default=0.1, ge=0, le=1e6, description="lambda: weight of the proximal term towards the mean; 0: as local"
        )

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(super().capabilities_for(options, setting), personal=True, without_clients=WITHOUT_CLIENTS)

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems = []
        if options.lam * setting.local.lr >= 2:
            problems.append(
                f"algorithm.lam is {options.lam}: local.lr times algorithm.lam must be below 2, or training diverges"
            )
        if options.lam and setting.upload.form == "top-k" and not setting.upload.error_feedback:
            why = "clients keep all of an update, so that the server's mean would not be that of their models"
            problems.append(f"communication.up.error_feedback is false: must be true for mr-mtl with form top-k, since {why}")
        return problems

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * client.rounds_there(1, self.protocol.rounds)

    def start(self, fed: Federation) -> State:
        return State(fed.initial_model()[None], [None] * len(fed.clients), diagnostics={"phase": "personal"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        means = ModelMeans(state.models, self.protocol.records)
        fed.stream(
            self.train,
            lambda client, release: means.add(0, client, release["update"]),
            common={"mean": state.models[0]},
        )
        # Over all clients: the model of a client without a task stays, and counts in the mean as before.
        moves = means.sums().totals / sum(self.protocol.records.values())
        return replace(state, models=state.models + moves.astype(np.float32))

    @on_client(charges=["train"], takes={"mean": MODEL}, gives={"update": PULLED})
    def train(self, me: Client, mean: np.ndarray) -> Release:
        """Train the personal model, which is never reset to the mean.

        Args:
            me: The client's data, mechanisms and state.
            mean: Mean of all models, (p,) float32.
        """
        theta = me.state["model"] if "model" in me.state else me.initial_model()
        me.state["model"] = me.dpsgd("train", theta, proximal=(self.options.lam, mean))
        return Release(update=me.state["model"] - theta)
