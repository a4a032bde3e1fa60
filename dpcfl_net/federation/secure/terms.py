"""Terms of a secure sum, from public facts: its clients, their neighbours and witnesses, and thresholds."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from dpcfl_net.core.signed_settings import PrivacyTarget
from dpcfl_net.federation.secure.graph import cannot_split, eigenvalue, regular_graph
from dpcfl_net.federation.secure.keys import message

COMPLETE = 64  # clients up to which all are neighbours
WITNESSES = 96  # of 1,000 clients, of whom 30 % drop out at random, fewer than half of them are left with probability 1.2e-5
LEAST_NEIGHBOURS = 64
_DROP_OUT = Fraction(3, 10)  # for which the number of neighbours is chosen
_FAILURE = Fraction(1, 10**4)  # probability that such a sum is aborted


@dataclass(frozen=True)
class Settings:
    """Settings of all secure sums of a job.

    Attributes:
        threshold: Fraction of the clients that must answer; at least 2/3.
        colluders: Clients of a sum that may act together, with the server or without it.
        neighbours: Neighbours of each client above 64 clients, even; None chooses them for 30 % of drop-outs.
    """

    threshold: float = 2 / 3
    colluders: int = 0
    neighbours: int | None = None


def settings_of(privacy: PrivacyTarget) -> Settings:
    """Read the settings of a privacy target whose trust is secure-aggregation."""
    assert privacy.secure_aggregation is not None
    return Settings(**privacy.secure_aggregation.model_dump(exclude={"stage_deadline_s"}))


@dataclass(frozen=True)
class Terms:
    """Terms of one secure sum. A client's position is its index in the group.

    Attributes:
        job: Hash of the job, hex.
        group: Client ids, ascending.
        settings: Settings of the job.
    """

    job: str
    group: tuple[int, ...]
    settings: Settings = Settings()
    _positions: Mapping[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.group or any(a >= b for a, b in zip(self.group, self.group[1:], strict=False)):
            raise ValueError("a group is client ids in ascending order, at least one")
        object.__setattr__(self, "_positions", {client: at for at, client in enumerate(self.group)})

    @staticmethod
    @lru_cache(maxsize=64)
    def of(job: str, group: tuple[int, ...], settings: Settings) -> Terms:
        """Return the terms; those of the last groups are kept, with their graphs."""
        return Terms(job, group, settings)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.group)

    @property
    def survivors_needed(self) -> int:
        """Clients that must send their vector and stay to the end (T)."""
        return survivors_needed(self.n, self.settings)

    @property
    def honest(self) -> int:
        """Honest clients among the survivors, at least; their shares of the noise count."""
        return self.survivors_needed - self.settings.colluders

    @cached_property
    def holder_positions(self) -> np.ndarray:
        """(n, K) int64: positions of the holders of each client's secrets, itself among them, ascending."""
        return _holders(self.n, neighbours_of(self.n, self.settings))

    @property
    def holder_count(self) -> int:
        """Holders of each client's secrets (K)."""
        return int(self.holder_positions.shape[1])

    @property
    def share_threshold(self) -> int:
        """Shares that determine a secret (t). Both secrets of a client would need 2 t > K + C shares: each honest holder gives one."""
        return _majority(self.holder_count, self.settings.colluders)

    @cached_property
    def witnesses(self) -> tuple[int, ...]:
        """Clients that sign the list of survivors, ascending."""
        count = min(self.n, WITNESSES + 4 * self.settings.colluders)
        drawn = sorted(self.group, key=lambda client: hashlib.sha256(message("witness", self.job, self.n, client)).digest())
        return tuple(sorted(drawn[:count]))

    @property
    def witnesses_needed(self) -> int:
        """Signatures that a list of survivors needs; two different lists cannot both have so many."""
        return _majority(len(self.witnesses), self.settings.colluders)

    @cached_property
    def group_digest(self) -> bytes:
        """Hash of the group, 32 bytes."""
        return hashlib.sha256(message("group", *self.group)).digest()

    def __contains__(self, client: int) -> bool:
        return client in self._positions

    def position(self, client: int) -> int:
        """Return the index of a client in the group."""
        return self._positions[client]

    def holders(self, client: int) -> tuple[int, ...]:
        """Return the holders of a client's secrets, ascending: the client and its neighbours; it holds theirs, too."""
        return tuple(self.group[at] for at in self.holder_positions[self._positions[client]].tolist())

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return the clients that share a mask with a client, ascending."""
        return tuple(other for other in self.holders(client) if other != client)

    def rows_at_holders(self, client: int) -> tuple[int, ...]:
        """Return the row of a client in the list of each of its holders, in the order of `holders`."""
        at = self._positions[client]
        lists = self.holder_positions[self.holder_positions[at]]
        return tuple((lists < at).sum(axis=1).tolist())

    def holders_among(self, flags: np.ndarray) -> np.ndarray:
        """Count the flagged holders of each client.

        Args:
            flags: (n,) 0 or 1.

        Returns:
            (n,) int64.
        """
        return flags.astype(np.int64)[self.holder_positions].sum(axis=1)


def survivors_needed(n: int, settings: Settings) -> int:
    """Compute how many of `n` clients must answer."""
    return max(2 * n // 3 + 1, math.ceil(Fraction(settings.threshold).limit_denominator(10**6) * n))


def neighbours_of(n: int, settings: Settings) -> int:
    """Compute the number of neighbours of each of `n` clients."""
    if n <= COMPLETE:
        return n - 1
    return min(n - 1, settings.neighbours or _usual_neighbours(n, settings.colluders))


@lru_cache(maxsize=256)
def problems(n: int, settings: Settings) -> tuple[str, ...]:
    """Find why clients cannot form a secure sum.

    Args:
        n: Number of clients.
        settings: Settings of the job.

    Returns:
        One sentence for each problem: field, value and allowed values.
    """
    needed, colluders, name = survivors_needed(n, settings), settings.colluders, "privacy.secure_aggregation"
    if not 0 <= colluders < needed:
        return (
            f"{name}.colluders is {colluders}: of {n} clients {needed} must answer, one of them honest; "
            f"must be from 0 to {needed - 1}",
        )
    if not 0 < settings.threshold <= 1:
        return (f"{name}.threshold is {settings.threshold}, must be above 0 and at most 1",)
    chosen = settings.neighbours
    if chosen is not None and (chosen < LEAST_NEIGHBOURS or chosen % 2):
        return (f"{name}.neighbours is {chosen}, must be even and at least {LEAST_NEIGHBOURS}",)
    degree = neighbours_of(n, settings)
    if degree < n - 1 and not _is_certified(n, degree, colluders):
        return (
            f"{name}.neighbours is {degree}: with {colluders} colluders and {n} clients the server could learn sums of "
            f"fewer clients; needs more neighbours or fewer colluders",
        )
    return ()


def _majority(count: int, colluders: int) -> int:
    return (count + colluders) // 2 + 1


@lru_cache(maxsize=32)
def _holders(n: int, degree: int) -> np.ndarray:
    own = np.arange(n)[:, None]
    if degree == n - 1:
        found = np.broadcast_to(own.T, (n, n))
    else:
        found = np.sort(np.concatenate((regular_graph(n, degree), own), axis=1), axis=1)
        found.flags.writeable = False
    return found


@lru_cache(maxsize=256)
def _usual_neighbours(n: int, colluders: int) -> int:
    """Smallest even number for which drop-outs seldom abort a sum and, as far as is known without the graph, it has a certificate."""
    degrees = range(LEAST_NEIGHBOURS, n - 1, 2)
    at = bisect_left(degrees, True, key=lambda degree: _is_enough(n, degree, colluders))
    return degrees[at] if at < len(degrees) else n - 1


def _is_enough(n: int, degree: int, colluders: int) -> bool:
    threshold = _majority(degree + 1, colluders)
    expected = 2.2 * math.sqrt(degree - 1)  # of the eigenvalue; random graphs have little more than 2 in place of 2.2
    return cannot_split(n, degree, expected, threshold - 1 - colluders) and _seldom_fails(n, degree + 1, threshold)


def _seldom_fails(n: int, holders: int, threshold: int) -> bool:
    """True if all clients have enough holders left, in exact numbers: all machines must agree on the graph."""
    left = n - math.floor(_DROP_OUT * n)
    too_few = sum(math.comb(holders, kept) * math.comb(n - holders, left - kept) for kept in range(min(threshold, left + 1)))
    return n * too_few < _FAILURE * math.comb(n, left)


def _is_certified(n: int, degree: int, colluders: int) -> bool:
    honest_neighbours = _majority(degree + 1, colluders) - 1 - colluders
    if honest_neighbours < 1:
        return False
    return cannot_split(n, degree, eigenvalue(regular_graph(n, degree)), honest_neighbours)
