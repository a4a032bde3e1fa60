"""What a model is tried on before it meets data: made-up records and parameter values."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

RECORDS = 3


def records(module: nn.Module, input_shape: tuple[int, ...], count: int) -> torch.Tensor:
    """(count, *input_shape) float32: normal numbers, or codes where `module` takes nothing else.

    With embeddings half of the codes are those that may be treated apart (first, last, padding), and the second record is of
    normal numbers if the model takes these too.
    """
    draw = torch.Generator().manual_seed(0)
    shape = (count, *input_shape)
    x = torch.randn(shape, generator=draw)
    plain = _takes(module, x[:1])
    tables = [child for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag))]
    if tables:
        coded = _codes(tables, shape, draw)
        return torch.cat([coded[:1], x[1:2], coded[2:]]) if plain else coded
    coded = (x > 0).float()
    return coded if not plain and _takes(module, coded[:1]) else x


def _codes(tables: list[nn.Embedding | nn.EmbeddingBag], shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    codes = min(table.num_embeddings for table in tables)
    padding = {table.padding_idx for table in tables if table.padding_idx is not None}
    apart = torch.tensor(sorted({0, codes - 1} | {code for code in padding if code < codes}))
    chosen = apart[torch.randint(len(apart), shape, generator=draw)]
    return torch.where(torch.rand(shape, generator=draw) < 0.5, chosen, torch.randint(codes, shape, generator=draw)).float()


@torch.no_grad()
def _takes(module: nn.Module, x: torch.Tensor) -> bool:
    try:
        copy.deepcopy(module).eval()(x)
    except Exception:
        return False
    return True


def values(module: nn.Module, sign: int = 1) -> torch.Tensor:
    """A parameter vector without a zero, (p,) float32; sign 1 or -1 gives one draw and that of the opposite signs.

    What starts at zero (a last layer, a scale, a gate) hides what is behind it until the first step. The draw keeps a signal
    at its size from layer to layer (He et al. 2015), so that neither rectifiers nor softmax saturate; vectors, which are
    biases and scales, move by 0.5. A gate that is shut at one sign is open at the other.
    """
    draw = torch.Generator().manual_seed(1)
    found = []
    for parameter in module.parameters():
        value = parameter.detach().cpu()
        noise = torch.randn(value.shape, generator=draw)
        if value.dim() >= 2:
            found.append(noise.mul_(sign * min(0.5, math.sqrt(2 * value.shape[0] / max(1, value.numel())))))
        else:
            found.append(value + 0.5 * sign * noise)
    return torch.cat([value.reshape(-1) for value in found])
