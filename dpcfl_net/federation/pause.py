"""A pause of a run below its quorum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pause:
    """A run waits for clients to return.

    Attributes:
        round: Round that waits; 0 while clients join.
        text: Message for the user.
        seconds: Longest duration.
    """

    round: int
    text: str
    seconds: float


@dataclass(frozen=True)
class PauseListener:
    """Receives the beginning and the end of pauses.

    Attributes:
        begin: Called with the pause.
        end: Called with the pause and its duration in seconds.
    """

    begin: Callable[[Pause], None] = lambda pause: None
    end: Callable[[Pause, float], None] = lambda pause, seconds: None


UNHEARD = PauseListener()


def below_quorum(round: int, answered: int, asked: int, needed: int, limit_s: float) -> Pause:
    """Describe the pause of a round.

    Args:
        round: The round.
        answered: Number of answers so far.
        asked: Number of clients that were asked.
        needed: Number of answers that the quorum needs.
        limit_s: Longest duration in seconds.
    """
    state = f"round {round}: {answered} of {asked} clients answered, the quorum is {needed}"
    return Pause(round, f"{state}: paused, waiting up to {limit_s:g} s for clients to return", limit_s)
