"""Compressed forms of models (float16, bfloat16) and of updates (int8, top-k); every function is deterministic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.tensors import finite

BLOCK = 1024  # coordinates that share one scale of int8
STEPS = 127  # int8: steps from zero to the largest magnitude of a block
HALF = {"float16": "f2", "bfloat16": "b2"}  # form -> code of its dtype
_LIMITS = {"float16": 65504.0, "bfloat16": 3.3895314e38}
_SHRINK = 1 - 2.0**-20  # covers the rounding of scales to float32
_MOST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0))  # STEPS of it do not round to infinity


def to_half(model: np.ndarray, form: str) -> np.ndarray:
    """Round float32 numbers to the nearest of a 16-bit form, ties to even.

    Args:
        model: float32 array of any shape.
        form: "float16" or "bfloat16".

    Returns:
        float16 numbers, or the bits of bfloat16 numbers as uint16; of the same shape.

    Raises:
        ValueError: If a number is not finite or becomes infinite by rounding.
    """
    if form == "float16":
        with np.errstate(over="ignore"):
            rounded = model.astype("<f2")
    else:
        bits = np.ascontiguousarray(model, "<f4").view("<u4")
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2").reshape(model.shape)
    if not finite(model) or not finite(rounded):
        largest = float(np.abs(model).max())
        raise ValueError(f"a model holds {largest:.6g}: {form} ends at {_LIMITS[form]:.6g}")
    return rounded


def from_half(rounded: np.ndarray) -> np.ndarray:
    """Convert the result of `to_half` to float32, exactly."""
    if rounded.dtype.kind == "f":
        return rounded.astype("<f4")
    return (rounded.astype("<u4") << 16).view("<f4")


def blocks(size: int) -> int:
    """Return the number of scales of an int8 update of `size` coordinates."""
    return -(-size // BLOCK)


def to_int8(update: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round an update to 255 levels in each block of `BLOCK` coordinates, to the nearest, ties to even.

    The decoded update is never longer than the update, so that a norm bound that holds before encoding holds after it.

    Args:
        update: (n,) float32.

    Returns:
        Levels, (n,) int8, and scales, (blocks,) float32. The scale of a block that is not finite is not finite; a finite update
        decodes to finite numbers.
    """
    padded = np.zeros(blocks(update.size) * BLOCK)
    padded[: update.size] = update
    rows = padded.reshape(-1, BLOCK)
    scales = np.abs(rows).max(axis=1, initial=0.0) / STEPS
    usable = np.isfinite(scales) & (scales > 0)
    levels = np.zeros(rows.shape)
    np.divide(rows, scales[:, None], out=levels, where=usable[:, None])
    np.rint(levels, out=levels)
    before, after = _norm(rows[usable]), _norm(levels[usable] * scales[usable, None])
    if after > before * _SHRINK:
        scales[usable] *= before * _SHRINK / after
    scales[usable] = np.minimum(scales[usable], _MOST_SCALE)
    return levels.astype(np.int8).reshape(-1)[: update.size], scales.astype("<f4")


def from_int8(levels: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode the result of `to_int8`, (n,) float32.

    Raises:
        Refused: "encoding", if a scale is negative, a level is outside -127..127, or a decoded number is not finite.
    """
    if (scales < 0).any():
        raise Refused("encoding", "a scale is negative")
    if (levels < -STEPS).any():
        raise Refused("encoding", f"a level is outside -{STEPS}..{STEPS}")
    with np.errstate(over="ignore", invalid="ignore"):
        decoded: np.ndarray = levels * np.repeat(scales, BLOCK)[: levels.size]
    if not finite(decoded):
        raise Refused("encoding", "a decoded number is not finite")
    return decoded


def kept(size: int, fraction: float) -> int:
    """Return the number of coordinates that top-k keeps of `size`; at least one if there are any."""
    return min(size, max(1, math.ceil(Fraction(str(fraction)) * size)))  # in binary, 0.1 * 30 is slightly above 3


def to_top_k(update: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Select the coordinates of largest magnitude; of equal ones the first.

    Args:
        update: (n,) float32; a NaN counts as infinite.
        count: Number of coordinates.

    Returns:
        Indices, (count,) int32, ascending, and values, (count,) float32.
    """
    magnitude = np.abs(update)
    magnitude[np.isnan(magnitude)] = np.inf
    if not count:
        return np.zeros(0, "<i4"), np.zeros(0, "<f4")
    least = np.partition(magnitude, magnitude.size - count)[magnitude.size - count]
    above = np.flatnonzero(magnitude > least)
    ties = np.flatnonzero(magnitude == least)[: count - above.size]
    indices = np.sort(np.concatenate([above, ties]))
    return indices.astype("<i4"), update[indices].astype("<f4")


def from_top_k(indices: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Decode the result of `to_top_k`.

    Args:
        indices: (count,) int32.
        values: (count,) float32.
        size: n.

    Returns:
        (n,) float32, zero elsewhere.

    Raises:
        Refused: "encoding", if the indices are not strictly increasing or outside the update.
    """
    if indices.size and not (int(indices[0]) >= 0 and int(indices[-1]) < size and (indices[1:] > indices[:-1]).all()):
        raise Refused("encoding", f"indices must be strictly increasing within 0..{size - 1}")
    decoded = np.zeros(size, "<f4")
    decoded[indices] = values
    return decoded


def _norm(values: np.ndarray) -> float:
    """Euclidean norm of finite float64 numbers."""
    return math.sqrt(math.fsum(np.einsum("ij,ij->i", values, values).tolist()))
