"""Link of one client over time: its constant link, with steps of a trace over it. One formula for relay and virtual clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.transport.links.link import Direction, Link


@dataclass(frozen=True)
class Step:
    """One row of a trace: values from `from_s` to before `to_s`, in seconds of the run.

    Attributes:
        from_s: Start.
        to_s: End.
        up_bps: Rate from the client to the server; 0: off; None: as the client's link.
        down_bps: Rate from the server to the client; 0: off; None: as the client's link.
        latency_s: Propagation delay of one direction; None: as the client's link.
    """

    from_s: float
    to_s: float
    up_bps: float | None = None
    down_bps: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class Schedule:
    """Link of one client at any time of the run.

    Attributes:
        link: The link wherever no step applies; its duty cycle also applies within steps.
        steps: Sorted, without overlap; gaps are allowed.

    Raises:
        ConfigError: If steps overlap or are not sorted.
    """

    link: Link = field(default_factory=Link)
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        edges = [edge for step in self.steps for edge in (step.from_s, step.to_s)]
        if edges != sorted(edges):
            raise ConfigError("steps of a link must be sorted by from_s and must not overlap")

    @cached_property
    def _pieces(self) -> tuple[list[float], list[tuple[Link, bool, bool]]]:
        """Start of each piece of time with constant properties; its link, and whether up and down are off."""
        starts, pieces = [0.0], [(self.link, False, False)]
        for step in self.steps:
            values = {
                name: getattr(step, name) for name in ("up_bps", "down_bps", "latency_s") if getattr(step, name) is not None
            }
            latency_s = values.get("latency_s", self.link.latency_s)
            rates = {name: value for name, value in values.items() if value}
            link = replace(self.link, **{**rates, "latency_s": latency_s, "jitter_s": min(self.link.jitter_s, latency_s)})
            if starts[-1] == step.from_s:  # no gap before it
                starts.pop(), pieces.pop()
            starts += [step.from_s, step.to_s]
            pieces += [(link, step.up_bps == 0, step.down_bps == 0), (self.link, False, False)]
        return starts, pieces

    def link_at(self, time_s: float) -> Link:
        """Return the link at a time; its rates are those of the constant link while a step turns it off."""
        starts, pieces = self._pieces
        return pieces[max(0, bisect_right(starts, time_s) - 1)][0]

    def sent_at(self, size_bytes: int, direction: Direction, start_s: float) -> float:
        """Compute when the last byte has left the bottleneck of the path.

        Args:
            size_bytes: Bytes that are ready at `start_s`, when the bottleneck is free.
            direction: "up" or "down".
            start_s: Seconds since the start of the run.

        Returns:
            Seconds since the start of the run; without bytes, the next time that the link is on.
        """
        starts, pieces = self._pieces
        time_s, left_bits = start_s, 8.0 * size_bytes
        for index in range(max(0, bisect_right(starts, start_s) - 1), len(pieces)):
            link, *off = pieces[index]
            end_s = starts[index + 1] if index + 1 < len(starts) else math.inf
            if not off[direction == "down"]:
                rate_bps = link.rate_bps(direction)
                needed_s = left_bits / rate_bps
                sent_s = link.on_after(time_s, needed_s)
                if sent_s < end_s or (needed_s and sent_s == end_s):
                    return sent_s
                if rate_bps < math.inf:
                    left_bits = max(0.0, left_bits - rate_bps * (link.on_before_s(end_s) - link.on_before_s(time_s)))
            time_s = end_s
        raise AssertionError("the piece after the last step has no end")

    def transfer_time(self, size_bytes: int, direction: Direction, start_s: float = 0.0) -> float:
        """Compute the expected time of a transfer over a connection that is open.

        Args:
            size_bytes: Size of the message.
            direction: "up" or "down".
            start_s: Seconds since the start of the run.

        Returns:
            Seconds from `start_s` until the last byte has arrived: waiting for the link to be on, sending at its rate,
            propagation, and the expected delay by retransmissions.
        """
        sent_s = self.sent_at(size_bytes, direction, start_s)
        link = self.link_at(sent_s)
        return sent_s - start_s + link.latency_s + link.retransmission_s(size_bytes, direction)

    def off_before_s(self, time_s: float) -> float:
        """Return the seconds until `time_s` in which at least one direction was off."""
        starts, pieces = self._pieces
        on_s = 0.0
        for start_s, end_s, (link, *off) in zip(starts, [*starts[1:], math.inf], pieces, strict=True):
            if start_s < time_s and not any(off):
                on_s += link.on_before_s(min(end_s, time_s)) - link.on_before_s(start_s)
        return time_s - on_s

    def most_bps(self, direction: Direction) -> float:
        """Return the largest effective rate of any time in bits per second; inf if nothing bounds it."""
        return max(link.rate_bps(direction) for link, *_ in self._pieces[1])

    def most_latency_s(self) -> float:
        """Return the largest propagation delay of any time in seconds."""
        return max(link.latency_s for link, *_ in self._pieces[1])
