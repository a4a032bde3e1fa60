"""Layers without parameters for sequences of codes, and a small transformer made of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.core.errors import ConfigError

WIDTH, HEADS, BLOCKS, HIDDEN = 64, 4, 2, 256  # of char-transformer


class Codes(nn.Module):
    """Whole float32 numbers (n, places) to codes: no record may raise an error, so invalid ones are clamped.

    Args:
        count: Number of codes.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return codes, (n, places) int64."""
        return x.nan_to_num().clamp(0, self.count - 1).long()


class Positions(nn.Module):
    """Adds the sines and cosines of Vaswani et al. 2017 to a sequence, (n, places, even width)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, as x."""
        steps = torch.arange(x.shape[2] // 2, device=x.device, dtype=x.dtype)
        angles = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] * torch.exp(
            -math.log(1e4) * 2 / x.shape[2] * steps
        )
        return x + torch.cat([angles.sin(), angles.cos()], 1)


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each place to itself and earlier ones.

    Args:
        heads: Number of heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, places, d) from queries, keys and values side by side, (n, places, 3 d)."""
        query, key, value = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in x.chunk(3, 2))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Transformer block with normalisation before attention and perceptron (Xiong et al. 2020).

    Args:
        width: Width of the sequence.
        heads: Number of heads.
        hidden: Width inside the perceptron.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Sequential(nn.Linear(width, 3 * width), CausalAttention(heads), nn.Linear(width, width))
        self.perceptron = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sequence as x, (n, places, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


def char_transformer(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a network from rows of character codes to the next character's logits.

    Args:
        shape: Shape of one record, (places,).
        classes: Number of characters.

    Raises:
        ConfigError: For another shape.
    """
    if len(shape) != 1:
        raise ConfigError(f"model.name is 'char-transformer': takes a row of character codes (d,), got {shape}")

    class CharTransformer(nn.Module):
        """Codes as whole float32 numbers (n, d) to the next character's logits (n, classes)."""

        def __init__(self) -> None:
            super().__init__()
            self.codes, self.embedding, self.positions = Codes(classes), nn.Embedding(classes, WIDTH), Positions()
            self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, HIDDEN) for _ in range(BLOCKS)))
            self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.blocks(self.positions(self.embedding(self.codes(x))))
            return self.output(self.norm(h[:, -1]))

    return CharTransformer()
