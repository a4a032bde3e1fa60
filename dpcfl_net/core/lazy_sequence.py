"""Sequences whose items are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Item = TypeVar("Item", covariant=True)


class LazySequence(Sequence[Item]):
    """Base class with indices and slices as of a list; a subclass defines its length and how to make one item."""

    @abstractmethod
    def _item(self, position: int) -> Item:
        """Make the item at a position from 0 to n - 1."""

    @overload
    def __getitem__(self, position: int) -> Item: ...

    @overload
    def __getitem__(self, position: slice) -> list[Item]: ...

    def __getitem__(self, position: int | slice) -> Item | list[Item]:
        chosen = range(len(self))[position]
        return [self._item(k) for k in chosen] if isinstance(chosen, range) else self._item(chosen)
