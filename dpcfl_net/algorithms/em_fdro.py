"""EM-FDRO (Yan, Guo, Liu, Liu, "Client-Level Differential Privacy via Federated Distributionally Robust Optimization")."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, Algorithm, Options, dpsgd_norm, full_epochs, on_client
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Release, State, TensorSpec
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Arrays, Federation, Results
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.client_selection import paper_events, selection_epsilon, unconditional_epsilon
from dpcfl_net.privacy.loss_weighting import draw, probabilities, top_mass
from dpcfl_net.privacy.mechanisms import MOST_DRAWN
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot, Slot, UnprotectedSlot, given

LOSS = TensorSpec("f4")
MOST = float(np.finfo(np.float32).max)  # loss of mode `paper` in place of one that is larger or infinite
TOP = 5  # the diagnostics hold the probability of the TOP likeliest clients together
CLIPPED = "updates leave the client without noise, and so do its losses, which are only clipped"


WITHOUT_CLIENTS = (
    "clients are drawn whether they are there or not; the mean is weighted by records over the drawn clients that "
    "answered; a client keeps its latest loss, and one without any counts as the average (mode selection: as tau / 2)"
)


def em_norm(algorithm: Algorithm, client: ClientEntry) -> float:
    """Bound the norm of an honest update: inf without protection, clip norm and noise for whole clients, or as DP-SGD.

    Args:
        algorithm: The job's algorithm.
        client: The client's roster entry.
    """
    if algorithm.options.mode != "full":
        return math.inf
    if algorithm.protocol.privacy.unit == "sample":
        return dpsgd_norm(algorithm, client)
    noise = given(client.noise_multiplier) * (algorithm.protocol.model.parameters**0.5 + 12)
    return algorithm.protocol.local.clip * (1 + noise)


def cost_of_draws(options: Any, setting: Setting) -> str:
    """State the epsilon of the draws alone in mode `selection`.

    Args:
        options: Options of the algorithm.
        setting: Public facts of the run.
    """
    if options.tilt > MOST_DRAWN:
        return (
            f"the draws: no epsilon is claimed for them above algorithm.tilt {MOST_DRAWN:g}, since they have 53 bits, with which a "
            "client of a smaller loss may never be drawn"
        )
    asked = (options.tilt, setting.clients, options.clients_per_round, setting.rounds)
    given_models, whole = (math.ceil(1e3 * found(*asked)) / 1e3 for found in (selection_epsilon, unconditional_epsilon))
    return (
        f"the draws alone, against an adversary that sees only them and does not know the server's seed: epsilon {given_models:.10g} if one "
        f"client's clipped losses may change and the models are fixed, {whole:.10g} if it moves the others' losses through the models"
    )


EM_UPDATE = TensorSpec("f4", ("p",), max_norm=em_norm)


class EMFDRO(Algorithm):
    """One model, trained in each round by m clients drawn with p_i proportional to exp(epsilon L_i / (2 tau)).

    Choices where Algorithm 1 is not specific: m clients are drawn without replacement. L_i is the latest validation loss that
    client i released (section 5.1): all clients release one at the start, and drawn clients release one in each round. Unlike in
    line 6, the server adds the mean of the updates weighted by N_i, not their sum. The paper clips losses to [-C, C] (section 3.2).

    Mode `full`: losses and updates leave the client with noise, and draws are post-processing. With privacy.unit sample, each
    record's loss is clipped to [0, tau], and updates come from DP-SGD. With privacy.unit client, whole updates are clipped to C,
    and the client adds the noise. The plan has an update for every round, since every client that is there may be drawn in each.
    Mode `selection`: losses are clipped to [0, tau] without noise, and updates are raw. Mode `paper`: losses and updates are raw, an
    infinite loss is sent as the largest float32 number.

    Source: Yan, Guo, Liu, Liu, Algorithm 1.
    """

    name = "em-fdro"
    paper = "Yan, Guo, Liu, Liu, Algorithm 1"

    class Options(Options):
        earlier_names = {"drawn": "clients_per_round"}
        mode: Literal["paper", "selection", "full"] = Field(
            default="full",
            description="protection: none (paper), clipped losses (selection), or noise on losses and updates (full)",
        )
        tilt: float = Field(
            default=2.0, ge=0, le=1e9,
            description="the paper's epsilon: how strongly draws depend on losses, 0: not at all; the guarantee is privacy.epsilon",
        )  # fmt: skip
        tau: float = Field(default=1.0, ge=1e-6, le=1e6, description="scale of the losses, and their largest value")
        clients_per_round: int = Field(
            default=20, ge=1, description="m: clients that train in each round (earlier name: drawn)"
        )
        loss_noise_ratio: float = Field(
            default=10.0, ge=1e-6, le=1e6,
            description="mode full: noise multiplier of a loss divided by that of an update (z)",
        )  # fmt: skip

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        rounds, each = setting.rounds, options.tilt
        claims = options.mode == "selection" and not cls.problems(options, setting)
        return Capabilities(
            expected_releases=float(options.clients_per_round * rounds),
            protects=(("sample", "untrusted-server"), ("client", "untrusted-server")),
            covers=("model updates", "validation losses, and so the draws of clients that follow from them"),
            caveats=(cost_of_draws(options, setting),) if claims else (),
            without_clients=WITHOUT_CLIENTS,
            claim_of_paper=f"client-level epsilon {rounds * each:g} for the draws of {rounds} rounds, {each:g} for each "
            "(Proposition 4.4)",
            plain_sgd=options.mode != "full" or setting.privacy.unit == "client",
        )

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems = options.unused("loss_noise_ratio", f"mode {options.mode}") if options.mode != "full" else []
        if options.clients_per_round > setting.clients:
            problems.append(
                f"algorithm.clients_per_round is {options.clients_per_round}: must be at most the number of clients, {setting.clients}"
            )
        if not setting.validation:
            why = "clients are drawn by their loss on validation records, and no client has any"
            add = "add to the file:  data: {validation: 0.1}  or on the command line:  data.validation=0.1"
            problems.append(f"data.validation is {setting.validation:g}: must be above 0, for example 0.1: {why}; {add}")
        return problems

    # ---- plan

    def plan(self, client: ClientEntry) -> list[Slot]:
        (loss, update), rounds = self.slots(client), client.rounds_there(1, self.protocol.rounds)
        return [*[loss] * (client.is_there(1) + rounds), *[update] * rounds]

    def slots(self, client: ClientEntry) -> tuple[Slot, Slot]:
        """Build the slots of one loss and one update.

        Args:
            client: The client's roster entry.
        """
        if self.options.mode != "full":
            (event,) = paper_events()
            reason = event.reason if self.options.mode == "paper" else CLIPPED
            return UnprotectedSlot("loss", reason), UnprotectedSlot("update", reason)
        loss = GaussianSlot("loss", self.options.loss_noise_ratio, doubles=False)
        if self.protocol.privacy.unit == "client":
            return loss, GaussianSlot("update")
        return loss, DPSGDSlot("update", *full_epochs(self.protocol.local, client))

    # ---- server

    def start(self, fed: Federation) -> State:
        n = len(fed.clients)
        return State(fed.initial_model()[None], [0] * n, {"losses": [None] * n})

    def round(self, state: State, t: int, fed: Federation) -> State:
        """Run a round: Algorithm 1, lines 2 to 6."""
        model, losses = state.models[0], dict(zip(fed.clients, state.memory["losses"], strict=True))
        if t == 1:
            losses |= self.released_losses(fed.call(self.evaluate, common={"model": model}))
        scores = self.scores(losses.values())
        epsilon, tau = self.options.tilt, self.options.tau
        chances = probabilities(scores, epsilon, tau)
        drawn = sorted(fed.clients[k] for k in draw(scores, epsilon, tau, self.options.clients_per_round, fed.rng("draw")))
        means = ModelMeans(state.models, self.protocol.records)
        found: dict[int, Arrays] = {}

        def take(client: int, release: Arrays) -> None:
            found[client] = {"loss": np.array(release["loss"])}
            means.add(0, client, release["update"])

        fed.stream(self.train, take, common={"model": model}, each={client: {} for client in drawn})
        losses |= self.released_losses(Results(drawn, found))
        shown = {
            "p_max": float(chances.max()),
            "top_mass": top_mass(chances, TOP),
            "drawn": [int(i in drawn) for i in fed.clients],
        }
        return State(means.moved(), state.assignment, {"losses": [*losses.values()]}, shown)

    def scores(self, losses: Collection[float | None]) -> list[float]:
        """Give clients that never answered a loss: the average of the others, or tau / 2 in mode `selection`.

        Epsilon of the draws in mode `selection` is that of one loss which moves one score; an average would move with it.

        Args:
            losses: Latest loss of each client; None if it never answered.
        """
        known = [loss for loss in losses if loss is not None]
        average = statistics.fmean(known) if known else 0.0
        unknown = self.options.tau / 2 if self.options.mode == "selection" else average
        return [unknown if loss is None else loss for loss in losses]

    def released_losses(self, results: Results) -> dict[int, float]:
        """Read the losses of the clients that answered, clipped to the range of an honest loss, which noise may leave.

        Args:
            results: Releases with a tensor "loss".

        Returns:
            Client to its loss.
        """
        max_loss = math.inf if self.options.mode == "paper" else self.options.tau
        return {client: min(max(float(loss), 0.0), max_loss) for client, loss in results.column("loss").items()}

    # ---- client steps

    @on_client(charges=["loss"], takes={"model": MODEL}, gives={"loss": LOSS})
    def evaluate(self, me: Client, model: np.ndarray) -> Release:
        """Release the loss of the received model: line 3.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(loss=self.loss(me, model))

    @on_client(charges=["loss", "update"], takes={"model": MODEL}, gives={"loss": LOSS, "update": EM_UPDATE})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Release the loss of the received model and the update from training it: lines 3 and 5.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(loss=self.loss(me, model), update=self.update(me, model))

    def loss(self, me: Client, model: np.ndarray) -> np.ndarray:
        """Compute L_i with the protection of the mode.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.

        Returns:
            The loss, () float32.
        """
        if self.options.mode == "full":
            return np.array(me.noisy_loss("loss", model, self.options.tau), np.float32)
        if self.options.mode == "selection":
            return np.array(me.validation_loss("loss", model, self.options.tau), np.float32)
        # A release that is not finite is sent as zeros, and the worst client would be the least likely one.
        return np.array(min(me.validation_loss("loss", model), MOST), np.float32)

    def update(self, me: Client, model: np.ndarray) -> np.ndarray:
        """Compute g_i with the protection of the mode.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.

        Returns:
            The update, (p,) float32.
        """
        if self.options.mode != "full":
            return me.sgd("update", model) - model
        if self.protocol.privacy.unit == "client":
            return me.noisy_update("update", model)
        return me.dpsgd("update", model) - model
