"""Releases without a guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dpcfl_net.privacy.events.base import Composable, Event


@dataclass(frozen=True)
class Unprotected(Event):
    """A release without a guarantee: every composition with it has epsilon = inf.

    Args:
        reason: Why it has none.

    Raises:
        ValueError: If the reason is not text.
    """

    reason: str

    rank: ClassVar[int] = 99

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise ValueError(f"reason must be text, got {self.reason!r}")

    @property
    def unprotected(self) -> str:
        """See `Event`."""
        return self.reason or "a release without a guarantee"

    @property
    def weight(self) -> float:
        """See `Event`."""
        return math.inf

    @classmethod
    def composed(cls, events: Sequence[Any]) -> list[Composable]:
        """Nothing: there are no losses to compose."""
        return []
