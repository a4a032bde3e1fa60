"""Gradients of an embedding, clipped without a row for each record and code of the vocabulary.

A record's gradient is the sum of its places' signals in the rows of their codes. Places with the same code collide, so their
signals are added up first, in the first of these places (`values`); the others become zero. The result holds the numbers of the
gradient that are not zero, so its norm is the gradient's. In the sum over slots each entry of the table receives one number from
a record, and zeros, which add without rounding: the proof of clipping.py applies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpcfl_net.privacy.clipping import Rows


@dataclass
class Lookups:
    """Gradients of an embedding's table.

    Attributes:
        values: Gradients of the rows, (slots, places, d), each code of a record once (`merged`); overwritten by `add_clipped`.
        codes: Row of each place, (slots, places) int64.
        at: Index of the first parameter of the table.
        rows: Rows of the table.
    """

    values: torch.Tensor
    codes: torch.Tensor
    at: int
    rows: int

    def squared_norms(self) -> torch.Tensor:
        """See `GradientBlock`."""
        return Rows(self.values.flatten(1), self.at).squared_norms()

    def squared_rounding(self, most: int) -> None:
        """See `GradientBlock`."""

    def add_clipped(self, factors: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> None:
        """See `GradientBlock`."""
        bits = self.values.view(keep.dtype)
        bits &= keep[:, None, None]
        self.values *= factors[:, None, None]
        self._write(out[self.at : self.at + self.rows * self.values.shape[2]], self.values, self.codes)

    def gradient(self, slot: int) -> tuple[int, torch.Tensor]:
        """See `GradientBlock`."""
        place = self.values.new_empty(self.rows * self.values.shape[2])
        self._write(place, self.values[slot], self.codes[slot])
        return self.at, place

    def widen(self, dtype: torch.dtype) -> None:
        """See `GradientBlock`."""
        self.values = self.values.to(dtype)

    def _write(self, place: torch.Tensor, values: torch.Tensor, codes: torch.Tensor) -> None:
        table = place.zero_().view(self.rows, -1)
        table.index_add_(0, codes.reshape(-1), values.reshape(-1, values.shape[-1]))


def merged(signals: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Add up the signals of a record's places with the same code, at the first of these places; the others become zero.

    Args:
        signals: Gradients of the outputs, (slots, places, d).
        codes: Code of each place, (slots, places).

    Returns:
        The sums, (slots, places, d).
    """
    same = codes[:, :, None] == codes[:, None, :]
    first = torch.tril(same, -1).any(2).logical_not_()
    return torch.bmm((same & first[:, :, None]).to(signals.dtype), signals)
