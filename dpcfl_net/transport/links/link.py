"""Link of one client: rates, delay, jitter, packet loss, resets and duty cycle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown

Direction = Literal["up", "down"]  # up: from the client to the server
MSS_BYTES = 1460  # payload of one TCP packet on Ethernet
MOST_S, MOST_BPS = 1_000_000.0, 1e12
MOST_LATENCY_S, MOST_LOSS, MOST_RESETS_PER_HOUR = 60.0, 0.5, 36_000.0


@dataclass(frozen=True)
class Link:
    """Constant properties of the path between one client and the server.

    TCP repairs packet loss, so a lost packet does not lose data here: it bounds the rate (`rate_bps`), and a message whose
    packets were lost arrives one round trip later (`retransmission_s`).

    Attributes:
        latency_s: Propagation delay of one direction, without the time that the bits need at the link's rate.
        jitter_s: The delay of a chunk is uniform in latency_s - jitter_s to latency_s + jitter_s; the order is kept.
        up_bps: Rate from the client to the server in bits per second; None: unlimited.
        down_bps: Rate from the server to the client in bits per second; None: unlimited.
        loss: Fraction of packets lost, in each direction.
        resets_per_hour: Expected number of resets of one connection per hour, at random times.
        on_s: Seconds that the link is on in each cycle, which starts at second 0 of the run; None: always on.
        off_s: Seconds that the link is off after `on_s`.

    Raises:
        ConfigError: Names field, value and allowed values.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    up_bps: float | None = None
    down_bps: float | None = None
    loss: float = 0.0
    resets_per_hour: float = 0.0
    on_s: float | None = None
    off_s: float = 0.0

    def __post_init__(self) -> None:
        _require("latency_s", self.latency_s, 0, MOST_LATENCY_S)
        _require("jitter_s", self.jitter_s, 0, self.latency_s, f"0 to latency_s, {self.latency_s:g}")
        _require("loss", self.loss, 0, MOST_LOSS)
        _require("resets_per_hour", self.resets_per_hour, 0, MOST_RESETS_PER_HOUR)
        _require("off_s", self.off_s, 0, MOST_S)
        for name in ("up_bps", "down_bps"):
            if getattr(self, name) is not None:
                _require(name, getattr(self, name), 1, MOST_BPS, f"1 to {MOST_BPS:g}, or null for an unlimited rate")
        if self.on_s is not None:
            _require("on_s", self.on_s, 0.001, MOST_S, f"0.001 to {MOST_S:g}, or null for a link that is always on")
        if self.off_s and self.on_s is None:
            raise ConfigError(f"off_s is {self.off_s:g}: needs on_s, the seconds that the link is on before")

    def rate_bps(self, direction: Direction) -> float:
        """Return the effective rate in bits per second while the link is on; inf if nothing bounds it.

        Source: Mathis et al. 1997, with one packet acknowledged at a time: TCP sends at most MSS / RTT * sqrt(3/2) / sqrt(loss).
        """
        nominal = self.up_bps if direction == "up" else self.down_bps
        return min(math.inf if nominal is None else nominal, self.loss_bound_bps)

    @property
    def loss_bound_bps(self) -> float:
        """Largest rate of TCP under this loss and round trip; inf without loss or without delay."""
        if not self.loss or not self.latency_s:
            return math.inf
        return MSS_BYTES * 8 / (2 * self.latency_s) * math.sqrt(1.5 / self.loss)

    def lost(self, size_bytes: int) -> float:
        """Return the probability that at least one packet of `size_bytes` is lost."""
        return 1 - (1 - self.loss) ** -(-size_bytes // MSS_BYTES) if self.loss else 0.0

    def retransmission_s(self, size_bytes: int, direction: Direction) -> float:
        """Return the expected delay of the last byte of a message by retransmissions, in seconds.

        A lost packet arrives one round trip R late, and all bytes behind it wait. So a packet lost `a` seconds before the end of
        sending delays the end by R - a, and the expected delay is the integral over a in [0, R] of the probability that a packet
        of the last `a` seconds was lost.
        """
        round_trip_s = 2 * self.latency_s
        if not self.loss or not round_trip_s or not size_bytes:
            return 0.0
        packets, keep = -(-size_bytes // MSS_BYTES), 1 - self.loss
        packets_per_s = self.rate_bps(direction) / (8 * MSS_BYTES)
        sending_s = min(round_trip_s, (packets - 1) / packets_per_s)
        decay = -math.log(keep) * packets_per_s
        all_kept_s = keep * -math.expm1(-decay * sending_s) / decay + (round_trip_s - sending_s) * keep**packets
        return round_trip_s - all_kept_s

    def on_before_s(self, time_s: float) -> float:
        """Return the seconds that the link was on between second 0 and `time_s`."""
        if self.on_s is None:
            return time_s
        cycles, phase_s = divmod(time_s, self.on_s + self.off_s)
        return cycles * self.on_s + min(phase_s, self.on_s)

    def on_after(self, start_s: float, needed_s: float) -> float:
        """Return the time when the link has been on for `needed_s` seconds since `start_s`; with 0 the next time it is on."""
        if self.on_s is None:
            return start_s + needed_s
        cycle_s = self.on_s + self.off_s
        if not needed_s:
            cycles, phase_s = divmod(start_s, cycle_s)
            return start_s if phase_s < self.on_s else (cycles + 1) * cycle_s
        total_s = self.on_before_s(start_s) + needed_s
        cycles = max(0, math.ceil(total_s / self.on_s) - 1)
        return max(start_s, cycles * cycle_s + total_s - cycles * self.on_s)


def _require(name: str, value: float, least: float, most: float, allowed: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:  # False for nan, too
        raise ConfigError(f"{name} is {shown(value)}: must be {allowed or f'{least:g} to {most:g}'}")
