"""Options of asynchronous rounds."""

from __future__ import annotations

from math import ceil
from typing import Any, ClassVar

from pydantic import Field

from dpcfl_net.algorithms.base import Options
from dpcfl_net.federation.capabilities import Setting


class Asynchronous(Options):
    """Options of asynchronous rounds; `rounds` of the configuration counts the server's versions."""

    buffer: int = Field(ge=1, description="K: participations that end before the server forms its next model version")
    participations: int | None = Field(
        default=None, ge=1,
        description="most participations of a client, its privacy plan; null: enough to fill all buffers without the slowest K - 1 clients",
    )  # fmt: skip
    concurrency: int | None = Field(default=None, ge=1, description="most clients at work at once; null: all")
    staleness: float = Field(
        default=0.5, ge=0, le=10, description="a: an update that is s versions old has the weight (1 + s)^-a"
    )
    max_staleness: int | None = Field(default=None, ge=0, description="older updates are not used; null: all are used")
    server_lr: float = Field(default=1.0, gt=0, le=1e6, description="learning rate of the server for the weighted mean update")
    durations: list[float] | None = Field(
        default=None,
        description="runs in one process: mean virtual seconds of a participation, by client; null: 1 s each",
    )

    def planned(self, clients: int, rounds: int, synchronous: int = 0) -> int:
        """Return the largest number of participations of a client.

        Args:
            clients: Number of clients.
            rounds: Versions of the run.
            synchronous: Largest number of versions that synchronous rounds form.
        """
        if self.participations is not None:
            return self.participations
        return min(rounds, synchronous + ceil(self.buffer * (rounds - synchronous) / max(1, clients - self.buffer + 1)))

    def weight(self, staleness: int) -> float:
        """Return the weight of an update, (1 + s)^-a; 0 if it is too old.

        Args:
            staleness: Versions that were formed since its client was given the task, s.
        """
        too_old = self.max_staleness is not None and staleness > self.max_staleness
        return 0.0 if too_old else (1 + staleness) ** -self.staleness

    def problems(self, setting: Setting, synchronous: int = 0) -> list[str]:
        """List the problems of these options in a setting; see `Algorithm.problems`.

        Args:
            setting: The setting.
            synchronous: Largest number of versions that synchronous rounds form.
        """
        n, rounds, name = setting.clients, setting.rounds, "algorithm.asynchronous"
        if setting.privacy.secure:
            return [f"{name}: must be null with privacy.trust secure-aggregation, whose sums need a round"]
        if self.buffer > n:
            return [f"{name}.buffer is {self.buffer}: must be at most the number of clients, {n}"]
        problems, most = [], self.planned(n, rounds, synchronous)
        # With fewer synchronous rounds the buffers take more participations, but each client has as many more left for them.
        least = synchronous + ceil(self.buffer * (rounds - synchronous) / n)
        if not least <= most <= rounds:
            first = f"up to {synchronous} rounds are synchronous and the other " if synchronous else ""
            left, allowed = rounds - synchronous, str(rounds) if least == rounds else f"{least} to {rounds}"
            rest = "1 round takes" if left == 1 else f"{left} rounds take"
            why = f"since {first}{rest} {self.buffer} participations{' each' if left > 1 else ''}, at most one a round from each client"
            problems.append(f"{name}.participations is {most}: must be {allowed}, {why}")
        if self.concurrency is not None and not self.buffer <= self.concurrency <= n:
            problems.append(f"{name}.concurrency is {self.concurrency}: must be from the buffer, {self.buffer}, to {n} clients")
        if self.durations is not None and (len(self.durations) != n or min(self.durations) <= 0):
            problems.append(f"{name}.durations is {self.durations}: must be {n} numbers above 0, one for each client")
        return problems


class MayBeAsynchronous(Options):
    """Options of an algorithm that can run asynchronously."""

    added: ClassVar[tuple[str, ...]] = ("asynchronous",)
    asynchronous: Asynchronous | None = Field(
        default=None,
        description="rounds that do not wait for slow clients; null: synchronous rounds",
    )


def asynchronous_of(options: Any) -> Asynchronous | None:
    """Return the asynchronous options; None for synchronous rounds, and for options that cannot have them.

    Args:
        options: Validated options of an algorithm.
    """
    return getattr(options, "asynchronous", None)
