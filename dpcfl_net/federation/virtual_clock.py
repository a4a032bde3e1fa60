"""Virtual time: when tasks and answers would arrive over the clients' links, computed without waiting."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dpcfl_net.transport.links.link import Direction
from dpcfl_net.transport.links.schedule import Schedule
from dpcfl_net.transport.messages import CREDIT_CHUNKS, WINDOW


@dataclass(frozen=True)
class VirtualNetwork:
    """Links and speeds of the clients.

    Attributes:
        links: Link by client id.
        cores: Cores that all clients share; None: each client computes on a separate device.
        compute_factors: Factor on the measured processor time by client id; 1 for the others.
        timeout_s: Seconds after which a real run counts a client as missing; only a warning here.
    """

    links: dict[int, Schedule]
    cores: int | None = None
    compute_factors: dict[int, float] = field(default_factory=dict)
    timeout_s: float = math.inf


@dataclass(frozen=True)
class Trip:
    """Times of one client's part in a call, in seconds of the run.

    Attributes:
        asked: The server sends the task.
        arrived: The task is complete at the client.
        begun: The client computes; later than `arrived` if it waits for a core.
        computed: The client has computed.
        sent: The client sends its answer; later than `computed` with `local.deadline_s`.
        answered: The answer is complete at the server.
    """

    asked: float
    arrived: float
    begun: float
    computed: float
    sent: float
    answered: float

    def spans(self) -> Iterator[tuple[str, float, float]]:
        """Yield (what, start, end) of each part that takes time."""
        parts = (
            ("receive", self.asked, self.arrived), ("wait", self.arrived, self.begun), ("train", self.begun, self.computed),
            ("wait", self.computed, self.sent), ("send", self.sent, self.answered),
        )  # fmt: skip
        yield from (part for part in parts if part[2] > part[1])


@dataclass(frozen=True)
class Work:
    """One client's part in a call.

    Attributes:
        down: Bytes of the task on the wire: header, then each chunk.
        compute_s: Processor time of the client step on this machine.
        up: Bytes of the answer on the wire.
    """

    down: Sequence[int]
    compute_s: float
    up: Sequence[int]


class VirtualClock:
    """Seconds of a run: calls advance it by what they would take, and the server's processor time counts as it is spent.

    It stands still until `start`.

    Args:
        network: Links and speeds of the clients.
        elapsed_s: Seconds of the run before it was resumed.
    """

    def __init__(self, network: VirtualNetwork, elapsed_s: float = 0.0) -> None:
        self.network = network
        self._now_s, self._epoch_s = elapsed_s, time.time() - elapsed_s
        self._processor_s: float | None = None

    def start(self) -> None:
        """Count the processor time of this thread from now on."""
        self._processor_s = time.thread_time()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        if self._processor_s is not None:
            spent_s = time.thread_time()
            self._now_s += spent_s - self._processor_s
            self._processor_s = spent_s
        return self._now_s

    def time(self) -> float:
        """Return now as seconds since the epoch, as if the run had begun when this clock was made."""
        return self.epoch(self.now())

    def epoch(self, seconds: float) -> float:
        """Convert seconds of the run to seconds since the epoch."""
        return self._epoch_s + seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the processor time that is spent inside."""
        self.now()
        self._processor_s = None
        try:
            yield
        finally:
            self.start()

    def advance(self, until_s: float) -> None:
        """Move to a later time."""
        self._now_s = max(self.now(), until_s)


def trips(
    start_s: float, work: Mapping[int, Work], network: VirtualNetwork, deadline_s: float | None = None
) -> dict[int, Trip]:
    """Compute when each client gets its task, computes and answers.

    Args:
        start_s: Second of the run at which the server sends the tasks.
        work: Sizes and processor times by client.
        network: Links and speeds.
        deadline_s: `local.deadline_s`: answers leave at multiples of it after the task has arrived.

    Returns:
        Times by client.
    """
    arrived = {client: arrival_s(network.links[client], own.down, "down", start_s) for client, own in work.items()}
    free: list[float] | None = None if network.cores is None else [0.0] * network.cores
    found = {}
    for client in sorted(work, key=lambda client: (arrived[client], client)):
        begun = arrived[client] if free is None else max(arrived[client], heapq.heappop(free))
        computed = begun + work[client].compute_s * network.compute_factors.get(client, 1.0)
        if free is not None:
            heapq.heappush(free, computed)
        sent = computed
        if deadline_s is not None:
            sent = arrived[client] + deadline_s * max(1, math.ceil((computed - arrived[client]) / deadline_s))
        answered = arrival_s(network.links[client], work[client].up, "up", sent)
        found[client] = Trip(start_s, arrived[client], begun, computed, sent, answered)
    return found


def arrival_s(link: Schedule, parts: Sequence[int], direction: Direction, start_s: float) -> float:
    """Compute when a message has arrived.

    Up to `WINDOW` chunks are under way unconfirmed; a longer message waits for confirmations, which take the way back.

    Args:
        link: The client's link.
        parts: Bytes of the header, then of each chunk.
        direction: "up" or "down".
        start_s: Second of the run at which it is sent; the link carries nothing else.

    Returns:
        Second of the run.
    """
    first, chunks = parts[0], parts[1:]
    if len(chunks) <= WINDOW:
        return start_s + link.transfer_time(sum(parts), direction, start_s)
    sent_s = link.sent_at(first, direction, start_s)
    confirmed: list[float] = []
    for index in range(0, len(chunks), CREDIT_CHUNKS):
        group = index // CREDIT_CHUNKS
        ready_s = sent_s if group < 2 else max(sent_s, confirmed[group - 2])
        sent_s = link.sent_at(sum(chunks[index : index + CREDIT_CHUNKS]), direction, ready_s)
        confirmed.append(sent_s + 2 * link.link_at(sent_s).latency_s)
    return sent_s + link.transfer_time(0, direction, sent_s) + link.link_at(sent_s).retransmission_s(sum(parts), direction)
