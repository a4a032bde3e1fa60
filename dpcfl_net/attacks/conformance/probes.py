"""Crafted records: each row is the gradient of one record, so that what each record does to a release is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.privacy.canaries import GAIN

UNCLIPPED = 0.99  # norm, in clip norms, of gradients that clipping leaves as they are
SMALL, GIANT = 0.5, 1e4
_MOST_COLUMNS, _FEWEST_COLUMNS = 512, 64
_SPREAD = 4  # coordinates of a spread-out gradient among single ones
_FIRST = 2  # coordinate that `halves` does not use


def columns(claim: Claim) -> int:
    """Number of columns of all records."""
    return min(max(claim.records, _FEWEST_COLUMNS), _MOST_COLUMNS)


def halves(claim: Claim) -> np.ndarray:
    """The first half of the records moves coordinate 0, the second half coordinate 1; nothing moves the others."""
    records = np.zeros((claim.records, columns(claim)), dtype=np.float32)
    half = claim.records // 2
    records[:half, 0] = records[half:, 1] = UNCLIPPED * claim.clip
    return records


def sizes(claim: Claim, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Small, giant and spread-out giant gradients, a third of the records each.

    Spread-out ones have half of the coordinates, from the first to the last, so that clipping each of several tensors, or each
    coordinate to a small value, does not pass for clipping all of them together. Noise beside them is measured on the other half.

    Returns:
        The records, and the direction of each third, (3, d).
    """
    width = columns(claim)
    directions = np.zeros((3, width))
    directions[0, _FIRST] = directions[1, _FIRST + 1] = 1.0
    dense = np.arange(width - 1, _FIRST + 1, -2)
    directions[2, dense] = (2 * rng.integers(0, 2, len(dense)) - 1) / np.sqrt(len(dense))
    norms = np.array([SMALL, GIANT, GIANT]) * claim.clip
    kinds = np.arange(claim.records) % 3
    return (norms[kinds, None] * directions[kinds]).astype(np.float32), directions


@dataclass(frozen=True)
class Singles:
    """Records that share no coordinate.

    Attributes:
        records: All records, (n, d) float32; those without a coordinate are zero.
        columns: Coordinates of each record that has some, as lists.
        free: Coordinates that no record moves.
    """

    records: np.ndarray
    columns: list[np.ndarray]
    free: np.ndarray


def singles(claim: Claim) -> Singles:
    """Small, giant and spread-out giant gradients on separate coordinates; those of one spread-out gradient are far apart."""
    width = columns(claim)
    records, owned, place = np.zeros((claim.records, width), dtype=np.float32), [], 0
    pattern = [(_SPREAD, GIANT), (1, SMALL), (1, GIANT), (1, SMALL), (1, GIANT)]
    count = min((width - width // 8) // sum(size for size, _ in pattern) * len(pattern), claim.records)
    order = _far_apart(width)
    for number, row in enumerate(np.linspace(0, claim.records - 1, count).astype(int)):
        size, norm = pattern[number % len(pattern)]
        owned.append(order[place : place + size])
        records[row, owned[-1]] = norm * claim.clip / np.sqrt(size)
        place += size
    return Singles(records, owned, np.flatnonzero(~records.any(axis=0)))


def _far_apart(width: int) -> np.ndarray:
    """Coordinates of which each _SPREAD in a row lie in different parts of the model; the first of them at both its ends."""
    part = np.arange(width // _SPREAD)
    starts = [part + len(part) * number for number in range(_SPREAD - 1)]
    return np.stack([*starts, width - 1 - part], axis=1).ravel()


@dataclass(frozen=True)
class CanaryProbe:
    """Canaries, each in or out by a fair coin.

    Attributes:
        records: All records, (n, d) float32.
        bits: True for each canary that is in, (m,); canary j moves coordinate j. One that is out is a row of zeros, or under
            replace-one the opposite record.
        unclipped: True for each canary whose gradient is below the clip norm, (m,).
    """

    records: np.ndarray
    bits: np.ndarray
    unclipped: np.ndarray


def canaries(claim: Claim, rng: np.random.Generator) -> CanaryProbe:
    """Draw the coins and make the records."""
    width = columns(claim)
    count = min(claim.records, width)
    bits, unclipped = rng.integers(0, 2, count).astype(bool), np.arange(count) % 2 == 1
    values = np.where(unclipped, UNCLIPPED, GAIN) * np.where(bits, 1.0, -1.0 if claim.pair == "replace-one" else 0.0)
    records = np.zeros((claim.records, width), dtype=np.float32)
    records[np.linspace(0, claim.records - 1, count).astype(int), np.arange(count)] = values * claim.clip
    return CanaryProbe(records, bits, unclipped)
