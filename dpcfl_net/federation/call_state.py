"""State of one call over the network: queue, deadlines, answers and pause."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dpcfl_net.federation.in_order import Arrays, InOrder
from dpcfl_net.federation.pause import Pause


@dataclass
class CallState:
    """State of a call.

    Attributes:
        queue: Clients that wait for a place.
        order: Passes releases on in client order; None: they stay in `answers`.
        waiting: Deadline of each client that is waited for.
        asked: Start time of each client's turn.
        met: Clients that have connected since the task was sent: a new connection does not extend the deadline.
        sent: Clients with a task.
        overdue: Clients past their deadline; they keep their task, and their answer counts until the call ends.
        pause: The pause below the quorum; None before it.
        paused_at: Begin of the pause.
        answers: Releases by client in order of arrival, if there is no `order`.
        lost: Clients whose answer a crash lost.
        refused: Clients that refused the task.
        earliest: No deadline of `waiting` is before this time.
    """

    queue: list[int]
    order: InOrder | None = None
    waiting: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    overdue: set[int] = field(default_factory=set)
    pause: Pause | None = None
    paused_at: float = 0.0
    answers: dict[int, Arrays] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    earliest: float = math.inf

    @property
    def count(self) -> int:
        """Number of answers that count towards the quorum."""
        return (len(self.answers) if self.order is None else self.order.count) + len(self.lost)

    def admits(self, client: int) -> bool:
        """Return True if a client may be asked now: it is within the window of the order."""
        return self.order is None or self.order.admits(client)

    def put(self, client: int, release: Arrays) -> None:
        """Take a client's release."""
        if self.order is None:
            self.answers[client] = release
        else:
            self.order.put(client, release)

    def close(self, client: int) -> None:
        """Wait no longer for a client's release."""
        if self.order is not None:
            self.order.close(client)

    def wait_until(self, client: int, due: float) -> None:
        """Wait for a client until `due`."""
        self.waiting[client] = due
        self.earliest = min(self.earliest, due)

    def late(self, now: float) -> list[int]:
        """Return the clients whose deadline has passed, in order; looks at all of them only if one may have."""
        if now < self.earliest:
            return []
        self.earliest = min((due for due in self.waiting.values() if due > now), default=math.inf)
        return sorted(client for client, due in self.waiting.items() if due <= now)

    def deadline(self, due: float) -> float:
        """Deadline of a client: `due`, or the end of the pause if that is later."""
        return due if self.pause is None else max(due, self.paused_at + self.pause.seconds)
