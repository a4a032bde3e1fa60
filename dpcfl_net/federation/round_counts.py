"""Counts of one round over all its calls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction


def answers_needed(quorum: float, asked: int) -> int:
    """Compute the number of answers that a quorum needs, for example 7 for 0.28 of 25.

    Args:
        quorum: Fraction of the asked clients, in decimal as the configuration gives it.
        asked: Number of clients that are asked.
    """
    return math.ceil(Fraction(str(quorum)) * asked)  # in binary, 0.28 * 25 is slightly above 7


@dataclass
class RoundCounts:
    """Counts of clients over all calls of a round.

    Attributes:
        round: The round.
        away: Clients that the availability schedule names as away; they are not asked.
        answered: Clients that answered a call.
        missing: Clients that did not answer a call in time.
        late: Clients whose answer to an earlier call arrived in this round, once per answer; it is set aside.
        paused_s: Seconds that the round waited below its quorum.
    """

    round: int
    away: list[int] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    paused_s: float = 0.0

    def add_call(self, asked: Iterable[int], answered: Iterable[int]) -> None:
        """Count one call.

        Args:
            asked: Clients that were asked.
            answered: Clients that answered.
        """
        found = set(answered)
        self.answered |= found
        self.missing |= set(asked) - found
