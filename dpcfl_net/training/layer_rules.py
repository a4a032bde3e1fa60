"""Layer types that a model must not have, each with its replacement."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

# Layers of torchvision and timm, which need not be installed, by name, with the attribute of their probability.
_STOCHASTIC_DEPTH = {"StochasticDepth": "p", "DropPath": "drop_prob"}
_NORM_LAYER = "torchvision's models take norm_layer=lambda channels: nn.GroupNorm(math.gcd(32, channels), channels)"


def problems(module: nn.Module, by_record: bool) -> list[str]:
    """List the kinds of layers that mix records, draw random numbers or keep state outside the parameters.

    Args:
        module: The model.
        by_record: Include layers for which no engine has per-record gradients.

    Returns:
        One sentence for each kind of layer and problem.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name, child in module.named_modules():
        kind = type(child).__name__
        subject = f"layer {name!r} ({kind})" if name else f"the model itself ({kind})"
        for problem, advice in _rules(child, by_record):
            found.setdefault((kind, problem), []).append(f"{subject} {problem}: {advice}")
    # A ResNet-50 has 53 BatchNorms: one sentence for all.
    return [first if not others else f"{first} ({1 + len(others)} such layers)" for first, *others in found.values()]


def _rules(child: nn.Module, by_record: bool) -> list[tuple[str, str]]:
    """(problem, advice) of one layer."""
    if isinstance(child, _BatchNorm):
        advice = f"use {_group_norm(child)}; {_NORM_LAYER}"
        return [("mixes the records of a batch, so no record's gradient can be clipped", advice)]
    found = []
    if advice := _random(child):
        found.append(("draws from torch's generator, not from the task's private key", advice))
    if any(True for _ in child.buffers(recurse=False)):
        advice = "set track_running_stats=False" if isinstance(child, _InstanceNorm) else "compute constants inside forward"
        found.append(("keeps buffers that training may change outside the clipped sum", advice))
    if by_record and isinstance(child, nn.RNNBase):
        advice = f"use opacus.layers.DP{type(child).__name__}, which takes the same arguments"
        found.append(("runs in one fused kernel, which gives no per-record gradients", advice))
    return found


def _group_norm(layer: _BatchNorm) -> str:
    # A vector has one value per channel: groups of one channel would normalise it to zero.
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(32, layer.num_features)
    return f"nn.GroupNorm({groups}, {layer.num_features})"


def _random(child: nn.Module) -> str:
    """Advice about a layer that draws random numbers; empty for others."""
    if isinstance(child, (_DropoutNd, nn.AlphaDropout)) and child.p > 0:
        return "remove it, or set its probability to 0"
    if isinstance(child, (nn.RNNBase, nn.MultiheadAttention)) and child.dropout > 0:
        return "set dropout=0.0"
    if isinstance(child, nn.RReLU):
        return "use nn.LeakyReLU"
    probability = _STOCHASTIC_DEPTH.get(type(child).__name__)
    if probability and getattr(child, probability, None):
        return "set its probability to 0 (stochastic_depth_prob=0.0 in torchvision's models)"
    return ""
