"""State of each client at the coordinator's endpoint, and the events it reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from dpcfl_net.transport.channel import Channel, Stamp, Stream
from dpcfl_net.transport.messages import Header


@dataclass(frozen=True)
class ServerEvent:
    """Event that `ServerEndpoint.poll` reports.

    Attributes:
        kind: "joined" or "left" (connection), "phase" (heartbeat), "result" (answer to an open task), "late" (answer to a
            cancelled task, without its tensors) or "failed" (broken message).
        client: Client id; None if a broken message came from no known client.
        round: Round of the task.
        task: Name of the task.
        id: Message id of the task. On "failed", that task is closed and gets no answer; empty if none is concerned.
        status: Status of a result.
        tensors: Tensors of a result with status "release".
        phase: New phase of the client.
        code: Error code of a broken message.
        reason: Reason of a status or error.
        bytes: Size of a result, header and payload.
        blake3: Hash of the payload of a late result, as its client states it.
    """

    kind: Literal["joined", "left", "result", "late", "phase", "failed"]
    client: int | None = None
    round: int = 0
    task: str = ""
    id: str = ""
    status: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    phase: str = ""
    code: str = ""
    reason: str = ""
    bytes: int = 0
    blake3: str = ""


@dataclass
class OpenTask:
    """A task without an answer.

    Attributes:
        round: Its round.
        task: Its name.
        stream: The message.
        damaged: Number of times that the task or its answer arrived damaged.
        arrived: True if the client has acknowledged it on this connection.
    """

    round: int
    task: str
    stream: Stream
    damaged: int = 0
    arrived: bool = False

    def is_overdue(self, phase: str, now: float, resend_s: float) -> bool:
        """Return True if the task is to be sent again to a client that reports this phase."""
        return (not self.arrived or phase == "idle") and now > self.stream.due(resend_s)

    @property
    def id(self) -> str:
        return self.stream.id


class Peer:
    """State of one client, which outlives its connections.

    Args:
        client: Client id.
        stamp: Makes the headers.
        send: Sends one message of this peer; returns False if the socket refuses it.
        wake: Called with this peer when there may be something to send.
    """

    def __init__(
        self,
        client: int,
        stamp: Stamp,
        send: Callable[[Peer, Header, bytes, memoryview | None], bool],
        wake: Callable[[Peer], None],
    ) -> None:
        self.client = client
        self.name = f"client {client}"
        self.route: bytes | None = None
        self.boot = ""
        self.boots: OrderedDict[str, None] = OrderedDict()
        self.phase = "idle"
        self.heard = 0.0  # time of its last valid message, monotonic clock
        self.told = 0.0  # time of the last message to it
        self.open: OpenTask | None = None
        self.answering = ""  # id of the latest RESULT to the open task
        self.cancelled: OrderedDict[str, tuple[int, str]] = OrderedDict()  # (round, task) of tasks whose answer would be late
        self.delivered: OrderedDict[str, None] = OrderedDict()
        self.channel = Channel(stamp, partial(send, self), partial(wake, self))
