"""Messages to the observer: their closed schema, and what the observer reads from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpcfl_net.core.clock import MOST_SECONDS
from dpcfl_net.core.types import Assignment
from dpcfl_net.transport.messages import WireError, plain, unpack_strict

COORDINATOR = "coordinator"
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z -]{0,19}$")]  # of labels: a phrase for the report
Work = Literal["receive", "train", "wait", "send"]
MOST_SPANS = 64  # in one message
MOST_CLIENTS = 10**6  # in a list of the coordinator's notes
MAX_NOTE = 3 << 20  # bytes of the coordinator's notes; a frame holds them
MOST_LOSS = 1e80  # above the loss, also squared, of every model whose outputs are float32; sums over all clients stay finite
Round = Annotated[int, Field(ge=0, le=10**6)]
Time = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=-MOST_LOSS, le=MOST_LOSS, allow_inf_nan=False)]
Cluster = Annotated[int, Field(ge=0, le=10**6)]


class Period(BaseModel):
    """A period of work in a message: its kind and round, begin and end in seconds since the epoch."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    what: Work
    round: Round
    start: Time
    end: Time


class Note(BaseModel):
    """One message to the observer without its chunk; fields that its kind does not use keep their defaults.

    A missing accuracy or loss is a number and a mark: encryption shows sizes, and a note that is shorter without a model would tell
    the network which clients a secret coin has never drawn.

    Attributes:
        version: Version of the protocol.
        run: Run id, hex.
        job: Hash of the job, hex.
        boot: Id of the sender's connection, hex.
        sequence: Increases with every message of one boot.
        sender: -1 for the coordinator, otherwise a client id.
        has_model: False: there is no accuracy.
        has_loss: False: there is no loss.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=0, le=1 << 31)]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    job: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    boot: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    sequence: Annotated[int, Field(ge=1, le=1 << 62)]
    kind: Literal["MODELS", "CHUNK", "PERSONAL", "SPANS", "END"]
    sender: Annotated[int, Field(ge=-1, le=10**6)]
    round: Round = 0
    assignment: Annotated[list[Cluster | None], Field(max_length=MOST_CLIENTS)] = []
    models: Annotated[int, Field(ge=0, le=4096)] = 0
    clients: Annotated[list[Cluster], Field(max_length=MOST_CLIENTS)] | None = None
    labels: Annotated[dict[Kind, Annotated[list[Cluster | None], Field(max_length=MOST_CLIENTS)]], Field(max_length=8)] = {}
    blake3: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    index: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    accuracy: Share = 0.0
    has_model: bool = True
    loss: Loss = 0.0
    has_loss: bool = True
    spans: Annotated[list[Period], Field(max_length=MOST_SPANS)] = []
    reason: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]{0,500}$")] = ""


@dataclass(frozen=True)
class Models:
    """Cluster models after a round.

    Attributes:
        round: The round.
        assignment: Cluster of each client, by client id; None: no cluster.
        models: Models, (M, p) float32.
        clients: Trusted server only: clients of the round; None if they are not known, after a restart of the server.
        labels: Trusted server only: for each kind of label (as sent, as released) the cluster of each of `clients`; None: not known.
    """

    round: int
    assignment: Assignment
    models: np.ndarray
    clients: list[int] | None = None
    labels: dict[str, list[int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Personal:
    """Evaluation of a personal model on its client's test data.

    Attributes:
        client: Client id.
        round: The round.
        accuracy: 0 to 1; None if the client has no personal model yet, because no round has drawn it.
        loss: Mean loss in nats; None if not finite, or without a model.
    """

    client: int
    round: int
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class Span:
    """A period of work of one process.

    Attributes:
        who: Name of the process.
        what: Kind of work, one of `Work`.
        round: The round.
        start: Begin, seconds since the epoch.
        end: End, seconds since the epoch.
    """

    who: str
    what: str
    round: int
    start: float
    end: float


@dataclass(frozen=True)
class End:
    """End of the run, sent by the coordinator."""

    round: int
    reason: str


def decode_note(data: bytes | memoryview, *, lists_clients: bool = False) -> Note:
    """Decode a note.

    Args:
        data: Bytes from any sender.
        lists_clients: True for the coordinator, whose notes may be longer than a header: they name the cluster of each client.

    Raises:
        WireError: If they are not a well-formed note; no other exception is raised.
    """
    try:
        return Note.model_validate(unpack_strict(data, MAX_NOTE, MOST_CLIENTS) if lists_clients else unpack_strict(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(plain(str(part), 40) for part in first["loc"][:4])
        raise WireError("schema", plain(f"{where}: {first['msg']}", 200)) from None


def sender_name(sender: int) -> str:
    """Name of a sender."""
    return COORDINATOR if sender == -1 else f"client {sender}"
