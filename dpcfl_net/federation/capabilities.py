"""Declarations of an algorithm: its interface, capabilities, client steps, central steps, and named sides of tensors."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dpcfl_net.core.frozen import once
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.signed_settings import LocalTraining, ModelTemplate, PrivacyTarget, Upload
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.secure.stages import GROUP_SIDES, STAGES
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.privacy.slots import Slot


@dataclass(frozen=True)
class Setting:
    """Public facts that an algorithm's options are checked against; known before any key or noise multiplier.

    Attributes:
        rounds: Rounds of the run.
        clients: Clients in the roster.
        local: Local training.
        privacy: Privacy target.
        validation: Largest fraction of its records that a client sets aside for validation.
        true_clusters: Number of true clusters; 0 unless the job holds them for the oracle.
        away_at_first: Number of clients that the availability schedule names as away in round 1.
        upload: Form of the updates that clients send.
    """

    rounds: int
    clients: int
    local: LocalTraining
    privacy: PrivacyTarget
    validation: float = 0.0
    true_clusters: int = 0
    away_at_first: int = 0
    upload: Upload = field(default_factory=Upload)

    @classmethod
    def of(cls, protocol: Protocol) -> Setting:
        """Read the setting from a signed protocol.

        Args:
            protocol: The signed protocol.
        """
        return once(protocol, "setting", lambda: cls._read(protocol))

    @classmethod
    def _read(cls, protocol: Protocol) -> Setting:
        validation, away = 0.0, 0
        for entry in protocol.roster:
            validation = max(validation, entry.validation_records / (entry.records + entry.validation_records))
            away += not entry.is_there(1)
        true_clusters = max(protocol.oracle or [-1]) + 1
        return cls(
            protocol.rounds, len(protocol.roster), protocol.local, protocol.privacy, validation, true_clusters, away,
            protocol.communication.up,
        )  # fmt: skip


@dataclass(frozen=True)
class Capabilities:
    """Protection, needs and publications of an algorithm under given options.

    Attributes:
        expected_releases: Expected number of releases with an update over the whole run, all clients together.
        without_clients: What a round does if some clients are away or do not answer; a short sentence.
        protects: (unit, trust) pairs that the algorithm can run under.
        covers: Releases of single clients that epsilon covers against an untrusted server, besides cluster selections, which the
            plan shows; phrases for the privacy statement.
        published: Releases of a trusted server that epsilon covers; phrases for the privacy statement.
        sent_raw: What a trusted server receives without noise; phrases for the privacy statement.
        caveats: Sentences for the privacy statement about releases that epsilon does not cover.
        claim_of_paper: The paper's privacy claim, if it differs from what holds.
        sound_events: Maps the central server's noise multiplier to events that hold under replace-one adjacency, for a run
            whose adjacency allows no finite epsilon; None if there are none.
        plain_sgd: True if the local step is plain SGD (momentum and weight decay allowed), False if it is DP-SGD.
        uses_oracle: True if the job must hold the true clusters.
        holds_state: True if a client's release depends on earlier rounds in which it took part.
        personal: True if clients have personal models, `me.state["model"]`, which only they can evaluate.
        max_models: Most models in one task.
        least_models: Fewest models in one task, on which a step may rely. With fewer models a step may fail and end its client, in a
            secure sum only if the client's secret coin is in.
        sent_models: Of plain SGD: models in a task with an update, on average over the run; None: `max_models`.
        published_models: Most rows of `State.models`.
        model_per_client: True if row i of `State.models` is the model of client i, for any cluster.
        shared_models: First rows of `State.models` whose outputs are added to those of every cluster's model.
        asynchronous: True if a request's round is the number of the client's participation, and models change while clients
            work.
        participations: Most participations of a client in noisy sums of a trusted server, each charged to that client alone
            (`ParticipationSlot`); 0 if all clients pay for each sum.
        summed_rounds: Rounds in which the server only adds updates (`Federation.add_up`), so that aggregators send sums.
        sides: Named sides of tensors besides "p" and "M", as functions of the model template.
    """

    expected_releases: float
    without_clients: str = ""
    protects: tuple[tuple[str, str], ...] = (("sample", "untrusted-server"),)
    covers: tuple[str, ...] = ("model updates",)
    published: tuple[str, ...] = ("noisy sums of clipped updates",)
    sent_raw: tuple[str, ...] = ("the raw update of every sampled client",)
    caveats: tuple[str, ...] = ()
    claim_of_paper: str | None = None
    sound_events: Callable[[float], list[Event]] | None = None
    plain_sgd: bool = False
    uses_oracle: bool = False
    holds_state: bool = False
    personal: bool = False
    max_models: int = 1
    least_models: int = 1
    sent_models: float | None = None
    published_models: int = 1
    model_per_client: bool = False
    shared_models: int = 0
    asynchronous: bool = False
    participations: int = 0
    summed_rounds: int = 0
    sides: Mapping[str, Callable[[ModelTemplate], int]] = field(default_factory=dict)

    def rows_for(self, client: int, cluster: int | None) -> tuple[int, ...]:
        """Select the rows of `State.models` whose outputs are added for a client.

        Args:
            client: Client id.
            cluster: Its cluster; None counts as the first.
        """
        row = client if self.model_per_client else cluster or 0
        return (*range(self.shared_models), self.shared_models + row)


class ClientSide(typing.Protocol):
    """The part of an algorithm that the client runtime uses; `algorithms.base.Algorithm` implements it."""

    protocol: Protocol
    options: Any
    setting: Setting
    capabilities: Capabilities

    @property
    def name(self) -> str: ...

    def problems(self, options: Any, setting: Setting) -> list[str]: ...

    def plan(self, client: ClientEntry) -> list[Slot]: ...

    def central_plan(self) -> list[Slot]: ...

    def secure_group(self, t: int) -> tuple[int, ...] | None: ...

    def secure_code(self, participants: int) -> SumCode | None: ...


def client_steps(algorithm: ClientSide) -> dict[str, ClientStep]:
    """Return the client steps of an algorithm by task name, with the stages of secure sums if the job has them."""
    steps = declared_steps(type(algorithm))
    if algorithm.protocol.privacy.secure:
        return {**steps, **STAGES}
    return {kind: step for kind, step in steps.items() if "boxes" not in step.takes}


def declared_steps(algorithm: type) -> dict[str, ClientStep]:
    """Return the client steps that a class of algorithms declares, by task name."""
    return dict(_marked(algorithm, "client_step"))


def central_steps(algorithm: object) -> dict[str, ClientStep]:
    """Return the central steps of an algorithm by task name."""
    owner: Any = type(algorithm)
    return dict(_marked(owner, "central_step"))


def update_tensor(step: ClientStep) -> str | None:
    """Find the tensor of a step's release that holds its update.

    Args:
        step: The client step.

    Returns:
        Its name; None unless there is exactly one.
    """
    names = [name for name, spec in step.gives.items() if spec.is_update]
    return names[0] if len(names) == 1 else None


def tensor_sides(algorithm: ClientSide) -> dict[str, int | tuple[int, int]]:
    """Compute the sizes of named tensor sides.

    Args:
        algorithm: The job's algorithm.

    Returns:
        Name to size: "p" and the algorithm's names have an exact size; "M" ranges from `least_models` to `max_models`, and "group",
        "holders" and "witnesses" of secure sums up to the number of clients.
    """
    model, capabilities = algorithm.protocol.model, algorithm.capabilities
    named = {name: size(model) for name, size in capabilities.sides.items()}
    among = dict.fromkeys(GROUP_SIDES, (1, len(algorithm.protocol.roster)))
    least, most = capabilities.least_models, capabilities.max_models
    return {"p": model.parameters, "M": most if least == most else (least, most), **among, **named}


@lru_cache(maxsize=16)
def _marked(algorithm: type, mark: str) -> dict[str, ClientStep]:
    methods = (getattr(algorithm, name) for name in dir(algorithm))
    steps = (getattr(method, mark, None) for method in methods)
    return {step.kind: step for step in steps if step is not None}
