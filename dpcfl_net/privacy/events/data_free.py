"""Messages that a client computes without its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from dpcfl_net.privacy.events.base import Composable, Event


@dataclass(frozen=True)
class DataFree(Event):
    """A message computed without the client's records, such as a key; it costs nothing."""

    rank: ClassVar[int] = 98

    @property
    def weight(self) -> float:
        """See `Event`."""
        return 0.0

    def counted(self) -> Self | None:
        """None: there is nothing to account."""
        return None

    @classmethod
    def composed(cls, events: Sequence[Any]) -> list[Composable]:
        """Nothing: there are no losses to compose."""
        return []
