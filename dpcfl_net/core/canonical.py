"""Canonical JSON: one byte string per value, for hashes and signatures."""

from __future__ import annotations

import json
import math
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Encode a value as canonical JSON.

    Args:
        value: JSON data: mappings with string keys, sequences, strings, finite numbers, Booleans and None.

    Returns:
        ASCII bytes with sorted keys, no spaces and the shortest decimal form of every number.

    Raises:
        ValueError: If the value holds NaN or infinity.
        TypeError: If the value is not JSON data.
    """
    return _ENCODER.encode(value).encode()


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None.

    Args:
        value: Mappings, lists, tuples, numpy arrays and numbers, and plain values.

    Returns:
        A copy with lists for tuples and arrays, and Python's numbers for those of numpy.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
