"""Finite weights under which a single known record overflows, as a malicious server can craft them for a usual network."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training.models import flatten
from dpcfl_net.training.plain_path import fill

# A power of two, so that scaling is exact: far above the noise added to a weight in a few steps, far below overflow.
EARLIER, GATE = 2.0**10, 2.0**20
LAST = 1e36  # times what the gate lets through, about GATE / 10, it passes the largest float32, 3.4e38
RIDGE = 1e-3


@dataclass(frozen=True)
class Gate:
    """A hidden unit that passes only the known record.

    A layer input x passes if w @ (x - centre) exceeds the threshold; the record itself scores 1.

    Attributes:
        w: (d,) weights.
        centre: (d,) offset.
        apart: Highest score of any other known record.
    """

    w: torch.Tensor
    centre: torch.Tensor
    apart: float

    @property
    def threshold(self) -> float:
        """Nearer to the record than to the highest other score, since there are more records than the server knows."""
        return (3 + self.apart) / 4


def overflowing(module: nn.Module, theta: np.ndarray, record: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """Turn one hidden unit into a gate that is open for one record and closed for others.

    The gate's output is multiplied beyond float32, so the record's loss is not a number. Other records see the network without that
    unit. The gate is in the last hidden layer; its weights are the linear discriminant of that layer's inputs.

    Args:
        module: Sequential network.
        theta: (p,) float32 parameters.
        record: (1, ...) known record, as the model is fed.
        others: (n, ...) other known records.

    Returns:
        (p,) float32 crafted parameters.

    Raises:
        ConfigError: If the network has no such layer, or the layer does not separate the record from the others.
    """
    module = copy.deepcopy(module)
    fill(list(module.parameters()), torch.from_numpy(theta))
    earlier, hidden, last = _layers(module)
    with torch.no_grad():
        gate = _gate(_shown(hidden, earlier(record)), _shown(hidden, earlier(others)))
        if gate.apart > 0.95:
            raise ConfigError(f"the record is too much like others for this network: {gate.apart:.2f} of its score")
        before = _weighted(earlier)
        for layer in before[:1]:
            layer.weight.mul_(EARLIER)
        for layer in before:
            _bias(layer).mul_(EARLIER)
        scale = EARLIER if before else 1.0
        hidden.weight.div_(scale)
        hidden.weight[0] = (GATE / scale * gate.w).view_as(hidden.weight[0])
        _bias(hidden)[0] = -GATE * (gate.w @ gate.centre + gate.threshold)
        own = slice(0, last.in_features // hidden.weight.shape[0])
        last.weight[:, own] = 0
        last.weight[0, own] = LAST
    return flatten(module)


def _layers(module: nn.Module) -> tuple[nn.Sequential, nn.Conv2d | nn.Linear, nn.Linear]:
    """Layers before the last hidden layer, that layer, and the output layer; between the last two only rectifiers and pooling."""
    found = list(module.children()) if type(module) is nn.Sequential else []
    at = [k for k, layer in enumerate(found) if isinstance(layer, nn.Conv2d | nn.Linear)]
    known = {type(layer) for layer in found} <= {nn.Conv2d, nn.Linear, nn.ReLU, nn.MaxPool2d, nn.Flatten}
    if known and len(at) > 1 and at[-1] == len(found) - 1 and any(isinstance(layer, nn.ReLU) for layer in found[at[-2] :]):
        hidden, last = found[at[-2]], found[-1]
        if isinstance(hidden, nn.Conv2d | nn.Linear) and isinstance(last, nn.Linear):
            return nn.Sequential(*found[: at[-2]]), hidden, last
    raise ConfigError("weights are crafted for a Sequential of Conv2d, ReLU, MaxPool2d, Flatten, Linear with a hidden layer")


def _weighted(layers: nn.Sequential) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Conv2d | nn.Linear)]


def _bias(layer: nn.Conv2d | nn.Linear) -> torch.Tensor:
    if layer.bias is None:
        raise ConfigError("weights are crafted for layers with biases")
    return layer.bias


def _shown(layer: nn.Conv2d | nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """(n, places, d) float64: inputs of one unit at each place."""
    if isinstance(layer, nn.Linear):
        return inputs[:, None].double()
    assert not isinstance(layer.padding, str)
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).double()


def _gate(record: torch.Tensor, others: torch.Tensor) -> Gate:
    """Place and direction with the largest Fisher discriminant of the record against all others."""
    everything = others.flatten(0, 1)
    centre = everything.mean(0)
    spread = (everything - centre).T @ (everything - centre) / len(everything)
    spread += RIDGE * spread.diagonal().mean() * torch.eye(len(spread), dtype=spread.dtype)
    own = record[0] - centre
    directions = torch.linalg.solve(spread, own.T).T
    directions /= (directions * own).sum(1, keepdim=True)
    apart = ((everything - centre) @ directions.T).amax(0)
    best = int(apart.argmin())
    return Gate(directions[best], centre, float(apart[best]))
