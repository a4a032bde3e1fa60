"""One model and the round of DP-FedAvg: over a secret sample of clients, by a trusted server or a secure sum, or over a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from dpcfl_net.algorithms.asynchronous_options import Asynchronous, MayBeAsynchronous, asynchronous_of
from dpcfl_net.algorithms.base import MODEL, RAW_UPDATE, on_central_server, on_client
from dpcfl_net.algorithms.client_level import ClientLevel, Sampled
from dpcfl_net.algorithms.open_tasks import fill_buffer
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.secure.stages import MASKED, MASKING
from dpcfl_net.privacy.slots import ParticipationSlot, RawSlot, Slot

PARTICIPATION = "participation"  # name of the slot of a client in a buffer
SAMPLE = ("sampling_rate", "sampling", "server_lr")
NO_AMPLIFICATION = (
    "amplification by sampling: there is no secret sample, so epsilon counts every participation of a client in full"
)
TAKES_PART = (
    "that a client takes part, and in which versions: the guarantee compares the run with one in which all updates of the client are "
    "zero, not with one without the client"
)
ORDER_SHOWS = (
    "order of arrival and missing answers: they decide which updates are in which version, and the guarantee assumes that they do not "
    "depend on the values of a client's records (virtual durations of a run in one process do not)"
)
WITHOUT_ANSWERS = (
    "a participation without an answer fills a place of its buffer and counts as zeros; the noisy sum is divided by K as always"
)


class SampledOrBuffered(MayBeAsynchronous, Sampled):
    """Options of client sampling; with `asynchronous` there is no sample."""

    @model_validator(mode="before")
    @classmethod
    def _no_sample(cls, values: Any) -> Any:
        buffered = isinstance(values, Mapping) and values.get("asynchronous") is not None
        if given := [name for name in SAMPLE if buffered and name in values]:
            hint = "; the server's learning rate is asynchronous.server_lr" if "server_lr" in given else ""
            raise ValueError(f"{', '.join(given)} must be absent with asynchronous: clients are not sampled{hint}")
        return values

    @model_serializer(mode="wrap")
    def _without_unset(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        left_out = ("asynchronous",) if self.asynchronous is None else SAMPLE
        return {key: value for key, value in standard(self).items() if key not in left_out}


class OneModel(ClientLevel):
    """One model and the round of DP-FedAvg; subclasses define how a client trains.

    With `asynchronous` a version is the noisy sum over a buffer: updates are clipped, then weighted by their staleness.
    """

    Options = SampledOrBuffered

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        able, how = super().capabilities_for(options, setting), asynchronous_of(options)
        able = replace(able, sides={"masked": cls.update_size})
        if how is None:
            return able
        return replace(
            able,
            asynchronous=True,
            expected_releases=float(how.buffer * setting.rounds),
            without_clients=WITHOUT_ANSWERS,
            participations=how.planned(setting.clients, setting.rounds),
            sent_raw=("the raw update of every participation",),
            caveats=(*able.caveats, NO_AMPLIFICATION, TAKES_PART, ORDER_SHOWS),
        )

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        how = asynchronous_of(options)
        return super().problems(options, setting) if how is None else how.problems(setting)

    @property
    def asynchronous(self) -> Asynchronous | None:
        """Options of asynchronous rounds; None: they are synchronous."""
        return asynchronous_of(self.options)

    def plan(self, client: ClientEntry) -> list[Slot]:
        """List one raw release for each round, or for each participation."""
        if self.asynchronous is None:
            return super().plan(client)
        return [RawSlot("raw")] * self.capabilities.participations

    def central_plan(self) -> list[Slot]:
        if self.asynchronous is None:
            return super().central_plan()
        return [ParticipationSlot(PARTICIPATION)] * self.capabilities.participations

    @staticmethod
    def update_size(model: ModelTemplate) -> int:
        """Count the parameters in a client's update, which are the first of the model.

        Args:
            model: The job's model.
        """
        return model.parameters

    def round(self, state: State, t: int, fed: Federation) -> State:
        if self.asynchronous is not None:
            return self._buffered_round(self.asynchronous, state, t, fed)
        if self.secure:
            return self._secure_round(state, fed)
        released = fed.release(self.noisy_sum, model=state.models[0])
        if released is None:
            return state
        return replace(state, models=_moved(state.models, self.options.server_lr * released["sum"] / self.clients_per_round))

    def _secure_round(self, state: State, fed: Federation) -> State:
        """Move the model by a secure sum, divided by the expected number of clients in it."""
        result = self.sum_securely(fed, self.masked_update, model=state.models[0])
        shown = {"secure sum": result.aborted or "ok", "survivors": len(result.survivors)}
        if result.total is None:
            return replace(state, diagnostics=shown)
        step = self.options.server_lr * result.total / (self.coin * len(result.survivors))
        return replace(state, models=_moved(state.models, step), diagnostics=shown)

    def new_sums(self) -> ClippedSums:
        return ClippedSums((1, self.update_size(self.protocol.model)), self.protocol.local.clip)

    def _buffered_round(self, how: Asynchronous, state: State, t: int, fed: Federation) -> State:
        """Form version t from the noisy sum over a buffer.

        The server's ledger decides who is in it: after a crash a version has the clients that were charged for it, and a client
        without a participation left in the ledger is left out, whatever the checkpoint says. All others in the buffer are
        charged, so that neither noise nor charges depend on an update.
        """
        server = fed.trusted_server
        left = server.participations_left(PARTICIPATION, before=t)
        used_up = {client for client, count in left.items() if count <= 0}
        charged = server.participants(PARTICIPATION, t)
        buffer = fill_buffer(self, how, self.capabilities.participations, state, t, fed, charged, used_up)
        state = State(state.models, state.assignment, state.memory | buffer.memory, state.diagnostics | buffer.figures)
        clients = sorted(buffer.staleness.keys() - used_up) if charged is None else charged
        if not clients:
            return state
        tensors = {"clients": np.array(clients), "staleness": np.array([buffer.staleness[client] for client in clients])}
        released = fed.release(self.noisy_buffer, buffer=buffer.releases, **tensors)
        if released is None:
            return state
        return replace(state, models=_moved(state.models, how.server_lr * released["sum"] / how.buffer))

    @on_central_server(charges=[PARTICIPATION], clients_in="clients")
    def noisy_buffer(self, me: CentralContext, clients: np.ndarray, staleness: np.ndarray) -> Release:
        """Clip each update of the buffer to C, weight it by its staleness, sum them and add noise; a missing one counts as zeros.

        Args:
            me: The buffer and mechanisms.
            clients: Clients that are charged, (m,) int64.
            staleness: Versions that were formed since each was given its task, (m,) int64.
        """
        how = self.asynchronous
        assert how is not None
        clipped = self.new_sums()
        for client, s in zip(clients.tolist(), staleness.tolist(), strict=True):
            if client in me.buffer:
                clipped.add(client, [(0, me.buffer[client]["update"])], weight=how.weight(s))
        sums = me.noisy_buffer(PARTICIPATION, clipped)
        me.show_observer(clients=sorted(clipped.clients))
        return Release(sum=sums[0])

    @on_central_server(charges=["round"])
    def noisy_sum(self, me: CentralContext, model: np.ndarray) -> Release:
        """Sample clients, collect updates, clip each to C, sum them and add noise.

        Args:
            me: The round's sample and mechanisms.
            model: (p,) float32.
        """
        clipped = self.new_sums()
        answered = me.stream(
            self.train,
            lambda client, release: clipped.add(client, [(0, release["update"])]),
            {client: {"model": model} for client in me.sample("round")},
        )
        sums, _ = me.noisy_total("round", "sums", clipped)
        me.show_observer(clients=answered)
        return Release(sum=sums[0])

    @on_client(charges=["raw"], takes={"model": MODEL}, gives={"update": RAW_UPDATE})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Train from the model and release the raw update.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(update=self.update(me, "raw", model))

    @on_client(charges=["masked"], takes={**MASKING, "model": MODEL}, gives={"masked": MASKED})
    def masked_update(self, me: Client, model: np.ndarray) -> Release:
        """Train from the model if the client's coin says so, and add the clipped update to the secure sum.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(masked=me.masked_update("masked", lambda: self.vector([(0, self.update(me, "masked", model))])))

    def update(self, me: Client, slot: str, model: np.ndarray) -> np.ndarray:
        """Run local epochs of plain SGD from the model and return the update, (update_size,) float32.

        Args:
            me: The client's data and mechanisms.
            slot: Slot that pays.
            model: (p,) float32.
        """
        return me.sgd(slot, model) - model


def _moved(models: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Add a step to the first parameters of the only model."""
    moved = models.copy()
    moved[0, : step.size] += step.astype(np.float32)
    return moved
