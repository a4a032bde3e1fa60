"""Crafts finite weights under which one known record alone overflows."""

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

# Powers of two scale without rounding. Far above the noise added to a weight in a few steps, far below overflow.
EARLIER_SCALE, GATE_SCALE = 2.0**10, 2.0**20
OUTPUT_WEIGHT = 1e36  # times the output of the open gate, about GATE_SCALE / 10, this exceeds the largest float32, 3.4e38
RIDGE = 1e-3


@dataclass(frozen=True)
class GateUnit:
    """Hidden unit that is active for one record: its score w @ (input - centre) exceeds the threshold for no other record.

    Attributes:
        w: Weights, (d,).
        centre: Mean input of the other records, (d,).
        runner_up: Highest score of any other record that the server knows; the record itself has score 1.
    """

    w: torch.Tensor
    centre: torch.Tensor
    runner_up: float

    @property
    def threshold(self) -> float:
        """Closer to the record's score than to the runner-up's, since clients hold similar records unknown to the server."""
        return (3 + self.runner_up) / 4


def overflowing(module: nn.Module, theta: np.ndarray, record: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """Turn one hidden unit of a model into a gate that only one record opens.

    The gate's output is multiplied beyond the float32 range, so that the loss of the record is NaN. For all other records the
    network computes the same outputs as before, without that unit. The gate is in the last hidden layer; its weights are the
    linear discriminant of the layer's inputs.

    Args:
        module: Sequential of Conv2d, ReLU, MaxPool2d, Flatten and Linear, with a hidden layer and biases.
        theta: Parameters, (p,) float32.
        record: The known record as the model's input, (1, *input shape).
        others: Public records of the same kind, (n, *input shape).

    Returns:
        The crafted parameters, (p,) float32, all finite.

    Raises:
        ConfigError: If the network has no such layer, or the gate cannot separate the record from the others.
    """
    module = copy.deepcopy(module)
    fill(list(module.parameters()), torch.from_numpy(theta))
    earlier, hidden, last = _layers(module)
    with torch.no_grad():
        gate = _gate(_unit_inputs(hidden, earlier(record)), _unit_inputs(hidden, earlier(others)))
        if gate.runner_up > 0.95:
            raise ConfigError(
                f"the record is too similar to others for this network: another has {gate.runner_up:.2f} of its score"
            )
        weighted = [layer for layer in earlier if isinstance(layer, nn.Conv2d | nn.Linear)]
        for layer in weighted[:1]:
            layer.weight.mul_(EARLIER_SCALE)
        for layer in weighted:
            _bias(layer).mul_(EARLIER_SCALE)
        scale = EARLIER_SCALE if weighted else 1.0
        hidden.weight.div_(scale)
        hidden.weight[0] = (GATE_SCALE / scale * gate.w).view_as(hidden.weight[0])
        _bias(hidden)[0] = -GATE_SCALE * (gate.w @ gate.centre + gate.threshold)
        outgoing = slice(0, last.in_features // hidden.weight.shape[0])
        last.weight[:, outgoing] = 0
        last.weight[0, outgoing] = OUTPUT_WEIGHT
    return flatten(module)


def _layers(module: nn.Module) -> tuple[nn.Sequential, nn.Conv2d | nn.Linear, nn.Linear]:
    """Layers before the last hidden layer, that layer, and the output layer; only ReLU and pooling lie between the last two."""
    layers = list(module.children()) if type(module) is nn.Sequential else []
    at = [k for k, layer in enumerate(layers) if isinstance(layer, nn.Conv2d | nn.Linear)]
    supported = {type(layer) for layer in layers} <= {nn.Conv2d, nn.Linear, nn.ReLU, nn.MaxPool2d, nn.Flatten}
    rectified = len(at) > 1 and any(isinstance(layer, nn.ReLU) for layer in layers[at[-2] :])
    if supported and rectified and at[-1] == len(layers) - 1:
        hidden, last = layers[at[-2]], layers[-1]
        if isinstance(hidden, nn.Conv2d | nn.Linear) and isinstance(last, nn.Linear):
            return nn.Sequential(*layers[: at[-2]]), hidden, last
    raise ConfigError("weights are crafted for a Sequential of Conv2d, ReLU, MaxPool2d, Flatten, Linear with a hidden layer")


def _bias(layer: nn.Conv2d | nn.Linear) -> torch.Tensor:
    if layer.bias is None:
        raise ConfigError("weights are crafted for layers with biases")
    return layer.bias


def _unit_inputs(layer: nn.Conv2d | nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """Inputs of one unit at each position, (n, positions, d) float64."""
    if isinstance(layer, nn.Linear):
        return inputs[:, None].double()
    assert not isinstance(layer.padding, str)
    patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).double()


def _gate(record: torch.Tensor, others: torch.Tensor) -> GateUnit:
    """Fisher discriminant of the record's patches against all patches of the others, at the best-separated position."""
    pooled = others.flatten(0, 1)
    centre = pooled.mean(0)
    covariance = (pooled - centre).T @ (pooled - centre) / len(pooled)
    covariance += RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=covariance.dtype)
    patches = record[0] - centre
    directions = torch.linalg.solve(covariance, patches.T).T
    directions /= (directions * patches).sum(1, keepdim=True)
    runners_up = ((pooled - centre) @ directions.T).amax(0)
    best = int(runners_up.argmin())
    return GateUnit(directions[best], centre, float(runners_up[best]))
