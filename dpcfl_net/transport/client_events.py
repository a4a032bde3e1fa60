"""Events that a worker's end of the wire reports, and its time limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class ClientEvent:
    """Event that `ClientEndpoint.poll` reports.

    Attributes:
        kind: "welcome" (after each new connection), "task", "sent" (the coordinator has received a result), "error" (the
            coordinator refused a message) or "bye".
        id: Message id of the task, of the result, or of the refused message.
        round: Round of the task or result.
        task: Name of the task.
        tensors: Tensors of the task.
        code: Code of an error.
        reason: Reason of an error.
        blake3: Hash of a task's tensors, verified; hex, "" for a task without bytes.
        begun: Time when a task's first byte arrived, or a result was ready to be sent; monotonic clock, seconds.
        arrived: Time when the task was complete, or the result's receipt was confirmed; monotonic clock, seconds.
    """

    kind: Literal["welcome", "task", "sent", "error", "bye"]
    id: str = ""
    round: int = 0
    task: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    code: str = ""
    reason: str = ""
    blake3: str = ""
    begun: float = 0.0
    arrived: float = 0.0


@dataclass(frozen=True)
class ClientTimes:
    """Time limits and intervals of a ClientEndpoint, in seconds.

    Attributes:
        heartbeat_s: Interval of heartbeats. An idle client sends them with those of the coordinator, or after a quarter more.
        resend_s: Time without acknowledgement after which a result is sent again; it doubles with each repetition.
        orphan_timeout_s: Silence of the coordinator after which `poll` raises RunFailed.
        handshake_limit_s: Time without a completed handshake after which `poll` raises RunFailed.
        ack_delay_s: Time after which the coordinator hears that a task arrives, or has arrived. It need not hear of a task that
            arrives sooner, and a result that is ready sooner acknowledges its task, which saves messages.
        duplicate_grace_s: Time during which the coordinator may report the key as connected already.
    """

    heartbeat_s: float = 2.0
    resend_s: float = 2.0
    orphan_timeout_s: float = 300.0
    handshake_limit_s: float = 30.0
    duplicate_grace_s: float = 35.0
    ack_delay_s: float = 0.05
