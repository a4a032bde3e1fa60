"""Fuzz target of compressed updates."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np

from dpcfl_net.adversaries.fuzz_readers import attempt, require
from dpcfl_net.transport import encodings


class Encodings:
    """Compressed updates whose levels, scales, indices and values are arbitrary, mostly near those of an honest client."""

    name, share = "encodings", 0.05

    def run(self, rng: Random, counts: Counter[str]) -> int:
        size = rng.choice((1, 2, 7, 1024, 1025, 2100))
        draws = np.random.default_rng(rng.randrange(1 << 32))
        update = draws.standard_normal(size).astype("<f4")
        if rng.random() < 0.5:
            levels, scales = encodings.to_int8(update)
            _spoil(rng, levels, (-128, 127))
            _spoil(rng, scales, (-1.0, 3e38, -0.0))
            decoded = attempt(lambda: encodings.from_int8(levels, scales), counts, (levels, scales))
            fits = (scales >= 0).all() and (levels > -128).all()
        else:
            indices, values = encodings.to_top_k(update, rng.randint(1, size))
            _spoil(rng, indices, (-1, 0, size - 1, size, 2**31 - 1))
            _spoil(rng, values, (0.0, 3e38))
            decoded = attempt(lambda: encodings.from_top_k(indices, values, size), counts, (indices, values))
            listed = indices.tolist()
            fits = listed == sorted({index for index in listed if 0 <= index < size})
        require(decoded is None or fits, "a compressed update that no client sends was accepted", size)
        require(
            decoded is None or (decoded.shape == (size,) and decoded.dtype == np.float32 and np.isfinite(decoded).all()),
            "a compressed update decodes to something else than finite float32 numbers",
            size,
        )
        return 1


def _spoil(rng: Random, array: np.ndarray, values: tuple[float, ...]) -> None:
    """Replace one number, half of the times."""
    if rng.random() < 0.5:
        array[rng.randrange(array.size)] = rng.choice(values)
