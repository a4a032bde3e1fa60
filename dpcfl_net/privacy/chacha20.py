"""ChaCha20 keystream (RFC 8439) by integer operations on torch tensors, the same bits on every device."""

from __future__ import annotations

import torch

KEY_BYTES = 32
BLOCK_WORDS = 16
_CONSTANTS = b"expand 32-byte k"
_LARGEST_COUNTER = 2**32


def blocks(key: bytes, nonce: bytes, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Compute consecutive blocks of the keystream.

    A counter-based cipher: any block is computed without the ones before it, so bits do not depend on how the work is cut.

    Args:
        key: Secret of 32 bytes.
        nonce: 12 bytes; one key never uses a nonce for two purposes.
        first: Counter of the first block.
        count: Number of blocks.
        device: Device of the result.

    Returns:
        Words, (16, count) int32: column b has the sixteen words of block first + b, as 32 bits in two's complement.

    Raises:
        ValueError: If key, nonce or counter have a wrong size.

    Source: Bernstein 2008; Nir and Langley 2018 (RFC 8439).
    """
    if len(key) != KEY_BYTES or len(nonce) != 12:
        raise ValueError(f"ChaCha20 takes a key of {KEY_BYTES} and a nonce of 12 bytes, got {len(key)} and {len(nonce)}")
    if first < 0 or count < 0 or first + count > _LARGEST_COUNTER:
        raise ValueError(f"blocks {first} to {first + count} do not fit a counter of 32 bits: use another nonce")
    start = torch.empty(BLOCK_WORDS, count, dtype=torch.int32, device=device)
    start[:4] = _column(_CONSTANTS, device)
    start[4:12] = _column(key, device)
    # The counter wraps to negative numbers as 32 bits do.
    start[12] = torch.arange(first, first + count, dtype=torch.int64, device=device).to(torch.int32)
    start[13:] = _column(nonce, device)
    rows = start.clone()
    spare = torch.empty(4, count, dtype=torch.int32, device=device)
    # Four rows of four words: each quarter round works on a whole row of columns, then of diagonals.
    a, b, c, d = rows.view(4, 4, count).unbind(0)
    for _ in range(10):
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_rounds(a, b, c, d, spare)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(start)


def _column(values: bytes, device: torch.device) -> torch.Tensor:
    words = [int.from_bytes(values[i : i + 4], "little", signed=True) for i in range(0, len(values), 4)]
    return torch.tensor(words, dtype=torch.int32, device=device)[:, None]


def _quarter_rounds(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, spare: torch.Tensor) -> None:
    a.add_(b)
    _rotate(d.bitwise_xor_(a), 16, spare)
    c.add_(d)
    _rotate(b.bitwise_xor_(c), 12, spare)
    a.add_(b)
    _rotate(d.bitwise_xor_(a), 8, spare)
    c.add_(d)
    _rotate(b.bitwise_xor_(c), 7, spare)


def _rotate(words: torch.Tensor, bits: int, spare: torch.Tensor) -> None:
    """Rotate left in place; a right shift of int32 copies the sign, so its upper bits are cleared."""
    torch.bitwise_right_shift(words, 32 - bits, out=spare)
    spare.bitwise_and_((1 << bits) - 1)
    words.bitwise_left_shift_(bits).bitwise_or_(spare)
