"""Gaussian noise on the public grid, drawn where the sum is: ChaCha20 words, Box and Muller's method, one rounding to the grid.

The released number of a coordinate is a whole number of grid steps, k = rint(total / grid + 2^20 x) with x of `box_muller.py`, times
the grid: a function of k and of public numbers. The grid is not left, since |k| stays far below 2^53, where float64 has every whole
number: |x| < 11.6, and |total| / grid is at most the number of records * 2^20 / noise multiplier.

Distance from the exact mechanism (the same with a real Gaussian and real arithmetic; keystream: 256 secret bits). Before it is rounded
to k, a coordinate is off by at most e = 2^-53 (10 r + |x| + 2 |total| / deviation) deviations: box_muller.py, and one rounding each
of the quotient and of the sum. So P(k) is that of the exact mechanism times 1 + d, |d| <= 2 E[e | k] 2^20, and E[d^2] <=
2^-64 (484 + 8 (total / deviation)^2). All coordinates of a step together: E[sum d^2] <= S = 2^-64 (484 p + 8 |total|^2 / deviation^2),
where |total| is a norm, at most the number of records * clip. The Renyi divergence of order a is at most a S / 2 in either direction
(a < 2^20). T steps compose adaptively to a T S / 2, so that epsilon grows by at most 2 sqrt(2 T S ln(1 / d0)) + T S outside of
probability d0. The steps of u in box_muller.py add less than 2^-68 to E[d^2] where u > 2^-80; a smaller u has probability 2^-80.
"""

from __future__ import annotations

import torch

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.privacy import box_muller, chacha20
from dpcfl_net.privacy.mechanisms import GRID_BITS
from dpcfl_net.privacy.randomness import derive

_PAIRS = 3  # of a block of 16 words; the last word is not used
PER_BLOCK = 2 * _PAIRS
# Blocks of one pass: few, for the caches and the memory of other workers; many, for the time of starting each operation.
_PASS = {"cpu": 2**14, "cuda": 2**18}
# Section 2.3.2 of RFC 8439.
_KNOWN_KEY, _KNOWN_NONCE = bytes(range(32)), bytes.fromhex("000000090000004a00000000")
_KNOWN_BLOCK = bytes.fromhex(
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)
_checked: set[str] = set()


class DeviceNoise:
    """Noise of one task's steps, keyed by its secret; each step has its own nonce.

    Args:
        key: Secret of at least 16 bytes.
        device: Device of the sums.

    Raises:
        ValueError: If the key is too short.
        RunFailed: If the device computes other bits than a CPU.
    """

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._key, self._device, self._step = derive(key, "stream", "noise on a device"), device, 0
        check(device)

    @torch.no_grad()
    def add(self, total: torch.Tensor, deviation: float) -> torch.Tensor:
        """Add the next step's noise to a sum and round to the grid.

        Args:
            total: The sum, (p,) float64 on the device.
            deviation: Standard deviation of the noise.

        Returns:
            total + N(0, deviation^2) in each coordinate, rounded to multiples of deviation * 2^-20, (p,) float64.
        """
        nonce = self._step.to_bytes(12, "little")
        self._step += 1
        # A tensor: a GPU would multiply by the rounded inverse of a number.
        grid = torch.tensor(deviation * 2.0**-GRID_BITS, dtype=torch.float64, device=self._device)
        noisy = total / grid
        count = _PASS.get(self._device.type, _PASS["cpu"])
        for number, part in enumerate(noisy.split(PER_BLOCK * count)):
            noise = _normals(self._key, nonce, number * count, -(-len(part) // PER_BLOCK), self._device)
            part.add_(noise[: len(part)].mul_(2.0**GRID_BITS))
        return noisy.round_().mul_(grid)


def check(device: torch.device) -> None:
    """Compare a device with RFC 8439's example and with this CPU, bit for bit; once per process.

    Args:
        device: The device.

    Raises:
        RunFailed: If a bit differs.
    """
    if device.type in _checked:
        return
    block = chacha20.blocks(_KNOWN_KEY, _KNOWN_NONCE, 1, 1, device)
    here, there = (_normals(_KNOWN_KEY, _KNOWN_NONCE, 0, 2**12, each) for each in (torch.device("cpu"), device))
    if block.cpu().numpy().astype("<i4").tobytes() != _KNOWN_BLOCK or not torch.equal(here, there.cpu()):
        raise RunFailed(
            f"the device {device} computes other bits of noise than the CPU: its integer or float64 operations differ"
        )
    _checked.add(device.type)


def _normals(key: bytes, nonce: bytes, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers of consecutive blocks, six each, in the order of the blocks, float64."""
    words = chacha20.blocks(key, nonce, first, count, device)[: box_muller.WORDS * _PAIRS]
    return box_muller.normals(words.view(box_muller.WORDS, _PAIRS, count)).permute(2, 0, 1).reshape(-1)
