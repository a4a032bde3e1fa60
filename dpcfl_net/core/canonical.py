"""Canonical JSON: one byte string per value, for hashes and signatures."""

from __future__ import annotations

import json
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
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
