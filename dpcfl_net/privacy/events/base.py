"""Base classes of privacy events, their interface to the accountants, and the registry of event types by name."""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses


@dataclass(frozen=True)
class LossSpread:
    """Size of a mechanism's privacy losses, from which the accountant chooses its grid.

    Attributes:
        variance: Approximate variance of the sum of all losses.
        releases: Number of distributions that are composed.
        extent: Width of the range of one loss.
        min_interval: Smallest grid interval that the precision of the divergences allows.
    """

    variance: float
    releases: int
    extent: float
    min_interval: float = 0.0


class Composable(Protocol):
    """Unit of composition: all runs of one mechanism with one set of parameters. Hashable and immutable.

    Attributes:
        doubles: True if its sensitivity under "replace-one" is twice that under "zero-out".
    """

    @property
    def doubles(self) -> bool: ...

    def floor(self) -> Composable | None:
        """The part whose cost no noise reduces; None if the cost goes to 0 as the noise grows."""

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """Raise ValueError if `accountant` has no bound for this mechanism under `adjacency`."""

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """Privacy loss distributions on a grid of `interval`, each with the number of times that it is composed.

        A distribution is a tuple: one for each direction of the adjacency, or a single one for both.
        """

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Renyi divergences (len(orders),) of all runs together."""

    def total_variation(self, adjacency: Adjacency) -> float:
        """Upper bound on delta at epsilon 0."""

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """Size of the losses."""

    def closed_form(self, delta: float, adjacency: Adjacency) -> float | None:
        """Exact epsilon at `delta` if nothing else is composed; None if it has no closed form."""


class Event(ABC):
    """One or more runs of a privacy mechanism. Subclasses are frozen dataclasses; their fields are the recorded format.

    Attributes:
        rank: Position of the type in sums, since floating-point addition depends on the order; ties are ordered by name.
        runs_field: Field that counts the runs; None if the number of runs does not matter.
        maxima: Largest value of a field in a document of `dpcfl account`. Larger ones overflow or take minutes.
    """

    rank: ClassVar[int] = 50
    runs_field: ClassVar[str | None] = None
    maxima: ClassVar[Mapping[str, float]] = {}

    @property
    def runs(self) -> int:
        """Number of runs."""
        return 1 if self.runs_field is None else int(getattr(self, self.runs_field))

    def with_runs(self, runs: int) -> Self:
        """The same mechanism, run `runs` times."""
        return self if self.runs_field is None else replace(self, **{self.runs_field: runs})  # type: ignore[type-var]

    @property
    def unprotected(self) -> str:
        """Reason why the event has no guarantee; empty if it has one."""
        return ""

    @property
    @abstractmethod
    def weight(self) -> float:
        """Approximate cost, mu^2 of the Gaussian-DP limit (Bu, Dong, Long, Su 2020), to rank events; not an accountant."""

    def counted(self) -> Self | None:
        """The event with its parameters within the accountant's limits; None if it releases nothing."""
        return self if self.runs else None

    def search_start(self) -> Event:
        """An event with a Renyi bound and a similar cost, from which the search for a noise multiplier starts."""
        return self

    @classmethod
    @abstractmethod
    def composed(cls, events: Sequence[Any]) -> list[Composable]:
        """Composable objects for all events of this type (different parameters), in a fixed order."""

    def as_json(self) -> dict[str, Any]:
        """The event in ledgers, record books and accountant queries: its fields and its type name."""
        return {"type": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}  # type: ignore[arg-type]


class Mechanism(Event):
    """An event that implements `Composable`.

    Attributes:
        noisy: True if its cost goes to 0 as the noise grows, False if it has no noise.
    """

    noisy: ClassVar[bool] = True
    doubles: ClassVar[bool] = False

    def floor(self) -> Composable | None:
        """See `Composable`."""
        return None if self.noisy else self

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """Every adjacency and accountant is supported."""

    def closed_form(self, delta: float, adjacency: Adjacency) -> float | None:
        """No closed form."""
        return None

    @abstractmethod
    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`."""

    @abstractmethod
    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`."""

    @abstractmethod
    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""

    @abstractmethod
    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""

    @classmethod
    def composed(cls, events: Sequence[Any]) -> list[Composable]:
        """Every event, sorted by its parameters."""
        return sorted(events, key=astuple)


@cache
def event_types() -> dict[str, type[Event]]:
    """Every event type by name, from all files of this package, ordered by `rank` and name."""
    package = importlib.import_module("dpcfl_net.privacy.events")
    modules = [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    types = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    events = [kind for kind in types if issubclass(kind, Event) and not kind.__abstractmethods__]
    return {kind.__name__: kind for kind in sorted(events, key=lambda kind: (kind.rank, kind.__name__))}


def read_event(value: Mapping[str, Any]) -> Event:
    """Inverse of `Event.as_json`.

    Raises:
        KeyError, TypeError, ValueError: If `value` is not an event.
    """
    values = dict(value)
    return event_types()[values.pop("type")](**values)


def merge(counted: Mapping[Event, int]) -> list[Event]:
    """Merge equal mechanisms, each with its number of runs, in order of first appearance."""
    totals: dict[Event, int] = {}
    for event, times in counted.items():
        one = event.with_runs(1)
        totals[one] = totals.get(one, 0) + event.runs * times
    return [one.with_runs(runs) for one, runs in totals.items() if runs]


def check_number(name: str, value: float) -> float:
    """Return `value`; ValueError with `name` if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}{_converted(value, 'float')}")
    return value


def check_count(name: str, value: int) -> None:
    """ValueError with `name` if `value` is not a whole number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {value!r}{_converted(value, 'int')}")


def _converted(value: Any, kind: str) -> str:
    """Advice for numbers of NumPy, which have no exact text in a signed job."""
    return f": write {kind}(...) around it" if isinstance(value, np.number) else ""
