"""What the coordinator's endpoint knows of each client, and what it reports of them."""

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
    """What `poll` reports.

    joined, left: the client's connection. phase: what it says it is doing. result: its answer to an open task, with
    tensors where status is "release". failed: a broken message (client None: from no known client); with `id` set it
    concerns the open task of that id, which is closed then: no answer will come.
    """

    kind: Literal["joined", "left", "result", "phase", "failed"]
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


@dataclass
class OpenTask:
    """A task without an answer as yet."""

    round: int
    task: str
    stream: Stream

    @property
    def id(self) -> str:
        return self.stream.id


class Peer:
    """What the endpoint knows of one client; it outlives the client's connections."""

    def __init__(self, client: int, stamp: Stamp, send: Callable[[Peer, Header, bytes, memoryview | None], bool]) -> None:
        self.client = client
        self.name = f"client {client}"
        self.route: bytes | None = None
        self.boot = ""
        self.boots: OrderedDict[str, None] = OrderedDict()
        self.phase = "idle"
        self.heard = 0.0  # when its last good message came, by the monotonic clock
        self.open: OpenTask | None = None
        self.answering = ""  # id of the latest RESULT to the open task
        self.delivered: OrderedDict[str, None] = OrderedDict()
        self.channel = Channel(stamp, partial(send, self))
