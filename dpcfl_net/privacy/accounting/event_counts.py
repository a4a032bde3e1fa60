"""Number of runs of each mechanism: the input of every accountant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.events.base import Composable, Event, event_types


@dataclass(frozen=True)
class MergedEvents:
    """Input of the accountants: equal for equal mechanisms in any order and grouping.

    Attributes:
        mechanisms: Composed mechanisms, each once, in a fixed order.
        unprotected: True if an event has no guarantee.
    """

    mechanisms: tuple[Composable, ...]
    unprotected: bool


@dataclass
class EventCounts:
    """Counts the runs of each mechanism; events that release nothing are left out."""

    _runs: Counter[Event] = field(default_factory=Counter)

    def add(self, events: Iterable[Event]) -> EventCounts:
        """Count events.

        Args:
            events: Events in any order.

        Returns:
            This object.

        Raises:
            ValueError: If one of them is not an event.
        """
        for event in events:
            if not isinstance(event, Event):
                *others, last = event_types()
                raise ValueError(f"events must be {', '.join(others)} or {last}, got {event!r}")
            counted = event.counted()
            if counted is not None:
                self._runs[counted.with_runs(1)] += counted.runs
        return self

    def merged(self) -> MergedEvents:
        """Everything counted so far."""
        groups: dict[type[Event], list[Event]] = {}
        for event, runs in self._runs.items():
            groups.setdefault(type(event), []).append(event.with_runs(runs))
        ordered = sorted(groups, key=lambda kind: (kind.rank, kind.__name__))
        mechanisms = tuple(mechanism for kind in ordered for mechanism in kind.composed(groups[kind]))
        return MergedEvents(mechanisms, any(event.unprotected for event in self._runs))

    def checked(self, adjacency: Adjacency, accountant: str) -> MergedEvents:
        """Everything counted so far; ValueError if the accountant has no bound for a mechanism under the adjacency."""
        found = self.merged()
        for mechanism in found.mechanisms:
            mechanism.check(adjacency, accountant)
        return found
