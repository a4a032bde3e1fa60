"""Synthetic records and parameter values, on which a model is checked before it sees data."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

RECORDS = 3


def records(module: nn.Module, input_shape: tuple[int, ...], count: int) -> torch.Tensor:
    """Draw synthetic inputs that a model accepts.

    Args:
        module: The model.
        input_shape: Shape of one record.
        count: Number of records.

    Returns:
        (count, *input_shape) float32: normal numbers, or codes if `module` accepts nothing else. For a model with embeddings
        half of the codes are those that are often treated differently (first, last, padding), and the second record is of
        normal numbers if the model accepts these too. The first record ends with padding.
    """
    draw = torch.Generator().manual_seed(0)
    shape = (count, *input_shape)
    x = torch.randn(shape, generator=draw)
    plain = _takes(module, x[:1])
    tables = [child for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag))]
    if tables:
        coded = _codes(tables, shape, draw)
        x = torch.cat([coded[:1], x[1:2], coded[2:]]) if plain else coded
    elif not plain and _takes(module, (coded := (x > 0).float())[:1]):
        x = coded
    _pad_end(x[0], min(_padding(tables), default=0))
    return x


def _pad_end(record: torch.Tensor, padding: int) -> None:
    """Make padding of the last third of the last two dimensions, and of nothing else.

    A model may treat a shorter record differently beside longer ones, or beside one with padding between other numbers.
    """
    record[record == padding] = abs(padding - 1)  # a code that a table of two has
    for axis in range(max(-2, -record.dim()), 0):
        third = record.shape[axis] // 3
        record.narrow(axis, record.shape[axis] - third, third).fill_(padding)


def _padding(tables: list[nn.Embedding | nn.EmbeddingBag]) -> set[int]:
    """Codes of padding that all tables have."""
    codes = min((table.num_embeddings for table in tables), default=0)
    return {code for table in tables if (code := table.padding_idx) is not None and code < codes}


def _codes(tables: list[nn.Embedding | nn.EmbeddingBag], shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    codes = min(table.num_embeddings for table in tables)
    apart = torch.tensor(sorted({0, codes - 1} | _padding(tables)))
    chosen = apart[torch.randint(len(apart), shape, generator=draw)]
    return torch.where(torch.rand(shape, generator=draw) < 0.5, chosen, torch.randint(codes, shape, generator=draw)).float()


@torch.no_grad()
def _takes(module: nn.Module, x: torch.Tensor) -> bool:
    try:
        copy.deepcopy(module).eval()(x)
    except Exception:
        return False
    return True


def parameters(module: nn.Module, sign: int = 1) -> torch.Tensor:
    """Draw a parameter vector without a zero.

    Parameters that are initialised to zero (a last layer, a scale, a gate) hide the layers behind them until the first step.
    The draw preserves the size of a signal from layer to layer (He et al. 2015), so that neither rectifiers nor softmax
    saturate; vectors, which are biases and scales, move by 0.5. A gate that is closed at one sign is open at the other.

    Args:
        module: The model.
        sign: 1 for one draw, -1 for the draw of opposite signs.

    Returns:
        (p,) float32.
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
