"""Sums of clipped client updates in blocks, before noise; updates are added one by one and none is kept."""

from __future__ import annotations

import numpy as np

from dpcfl_net.privacy.client_level import COUNT_SCALE, block_norm
from dpcfl_net.privacy.mechanisms import check_bound, shortened

Contribution = list[tuple[int, np.ndarray]]  # (block, vector) for each part of one client's update


class ClippedSums:
    """Sums over clients in each block, for `CentralContext.noisy_total`.

    Args:
        shape: (blocks, p).
        clip: Clip norm C of all parts of one client together.
        counted: True if clients are counted, by a coordinate of clip * COUNT_SCALE beside the sums; the noise then covers the
            longer vector.

    Raises:
        ValueError: If the clip norm is out of range (`mechanisms.check_bound`).
    """

    # Read-only from outside: the noise is scaled to `unit`, and covers only what `add` has clipped.

    def __init__(self, shape: tuple[int, int], clip: float, *, counted: bool = False) -> None:
        check_bound("clip", clip)
        self._width, self._clip, self._counted = shape[1], clip, counted
        self._total = np.zeros((shape[0], shape[1] + counted))
        self._clients: set[int] = set()

    @property
    def total(self) -> np.ndarray:
        """Sums, and the counts' column if clients are counted, float64; a read-only view."""
        view = self._total.view()
        view.flags.writeable = False
        return view

    @property
    def clip(self) -> float:
        """Clip norm C of all parts of one client together."""
        return self._clip

    @property
    def unit(self) -> float:
        """Largest L2 norm of what one client adds."""
        return block_norm(self._clip) if self._counted else self._clip

    @property
    def clients(self) -> frozenset[int]:
        """Clients whose updates were added."""
        return frozenset(self._clients)

    def add(self, client: int, parts: Contribution, counted_in: int | None = None, weight: float = 1.0) -> None:
        """Clip one client's update and add it; an update that is not finite counts as zeros.

        Args:
            client: Client id.
            parts: (block, vector) of each part of the update; a vector is (p,).
            counted_in: Block in which the client is counted, if clients are counted.
            weight: Factor of the clipped update, from 0 to 1.

        Raises:
            ValueError: If the client was added before, two parts have one block, or a part has another shape than (p,), since the
                noise covers one update of norm C of each client, if the weight is out of range, or if clients are counted and
                `counted_in` is no block.
        """
        if client in self._clients:
            raise ValueError(f"client {client} was added before")
        if not 0 <= weight <= 1:
            raise ValueError(f"weight must lie in [0, 1], got {weight!r}")
        blocks = [range(len(self._total))[block] for block, _ in parts]
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"two parts are in one block, got {blocks}: their sum may be longer than the clip norm")
        # One number would be added to every coordinate of its block.
        if wrong := [vector.shape for _, vector in parts if vector.shape != (self._width,)]:
            raise ValueError(f"each part must have the shape ({self._width},), got {wrong[0]}")
        if self._counted and counted_in not in range(len(self._total)):
            raise ValueError(
                f"counted_in must be a block, 0 to {len(self._total) - 1}, since clients are counted, got {counted_in!r}"
            )
        self._clients.add(client)
        vectors = shortened([vector for _, vector in parts], self._clip)
        for (block, _), vector in zip(parts, vectors, strict=False):
            self._total[block, : self._width] += vector if weight == 1 else weight * vector
        if self._counted:
            self._total[counted_in, self._width] += self._clip * COUNT_SCALE

    def split(self, noisy: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Split the noisy total.

        Args:
            noisy: As `total`, with noise.

        Returns:
            Sums, (blocks, p) float32, and counts, (blocks,) float64, or None if clients are not counted.
        """
        if not self._counted:
            return noisy.astype(np.float32), None
        return noisy[:, : self._width].astype(np.float32), noisy[:, self._width] / (self._clip * COUNT_SCALE)
