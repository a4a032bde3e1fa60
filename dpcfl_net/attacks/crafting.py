"""Finite weights under which one record alone overflows: what a server that knows the record can make of a usual network."""

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

# Powers of two change no other digit. Far above what noise adds to a weight in a few steps, far below overflow.
EARLIER, GATE = 2.0**10, 2.0**20
LAST = 1e36  # times what the gate lets through, about GATE / 10, it passes the largest float32, 3.4e38
RIDGE = 1e-3


@dataclass(frozen=True)
class Gate:
    """w (d,) and threshold: of all that the layer's unit is shown, w @ (shown - centre) passes it for the record alone.

    apart: the highest score of any other record that the server knows; the record itself has 1.
    """

    w: torch.Tensor
    centre: torch.Tensor
    apart: float

    @property
    def threshold(self) -> float:
        """Nearer to the record than to the highest of the others: there are more like them than the server knows."""
        return (3 + self.apart) / 4


def overflowing(module: nn.Module, theta: np.ndarray, record: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """`theta` (p,) float32 with one hidden unit turned into a gate: open for `record`, shut for records like `others`.

    What passes the gate is multiplied beyond float32, so that the record's loss is not a number; all other records go through
    a network that computes what it did, without that unit. The gate stands in the last hidden layer, and its weights are the
    linear discriminant of what that layer is shown. module: Sequential; record (1, ...), others (n, ...): as models are fed.
    ConfigError for a network without such a layer, or a record that it cannot tell from the others.
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
    """All before the last hidden layer, that layer, and the output layer, which sees it through rectifiers and pooling alone."""
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
    """(n, places, d) float64: what one unit of the layer multiplies with its weights, at each place."""
    if isinstance(layer, nn.Linear):
        return inputs[:, None].double()
    assert not isinstance(layer.padding, str)
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).double()


def _gate(record: torch.Tensor, others: torch.Tensor) -> Gate:
    """The direction and the place where the record is farthest from everybody's everything: Fisher's discriminant."""
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
