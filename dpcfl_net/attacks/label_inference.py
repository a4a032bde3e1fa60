"""Label inference: counts a client's labels from the gradient of the last layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dpcfl_net.attacks.inversion import record_gradients
from dpcfl_net.attacks.updates import Update
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import ModelTemplate

STAND_INS = 128  # random records from which a server without data estimates features, probabilities and clipping


@dataclass(frozen=True)
class LastLayer:
    """Position of the last linear layer in the flat parameters.

    Attributes:
        classes: Number of outputs.
        width: Number of inputs.
        at: Index of the first weight; the weights (classes, width) come first, then the bias.
        bias: True if the layer has a bias.
    """

    classes: int
    width: int
    at: int
    bias: bool

    def rows(self, gradient: np.ndarray) -> np.ndarray:
        """Gradient of each class's weights and bias (0 without one), (classes, width + 1), from a flat gradient (p,)."""
        end = self.at + self.classes * self.width
        weight = gradient[self.at : end].reshape(self.classes, self.width)
        bias = gradient[end:] if self.bias else np.zeros(self.classes)
        return np.concatenate([weight, bias[:, None]], axis=1)


def last_layer(template: ModelTemplate) -> LastLayer:
    """Locate the last linear layer of a classifier.

    Raises:
        ConfigError: If the parameters do not end in a linear layer with one output per class, for at least two classes.
    """
    shapes, classes = [list(shape) for _, shape in template.layout], template.classes
    bias = len(shapes) > 1 and shapes[-1] == [classes]
    weight = shapes[-2] if bias else shapes[-1]
    if template.task != "classification" or classes < 2 or len(weight) != 2 or weight[0] != classes:
        raise ConfigError(
            f"model {template.name!r} of {classes} outputs: labels are read from the gradient of a last linear layer of classes, "
            "which it does not have"
        )
    return LastLayer(classes, weight[1], template.parameters - classes * (weight[1] + bias), bias)


class LabelReader:
    """Infers label counts from the updates of one job's clients, from the signed protocol alone."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol, self._layer = protocol, last_layer(protocol.model)
        self._cached: dict[bytes, StandIns] = {}

    def counts(self, updates: list[Update]) -> np.ndarray:
        """Estimate how many of one client's N records have each label.

        The gradient of cross-entropy at the last layer is the mean over records of (p - y) [features, 1]; p are the
        probabilities, y is the one-hot label. With one record, only the row of its label is negative. With more, y is p minus
        the row; p is estimated from random records. Rows are projected on [0, 1]. With noise in the gradient, or without a
        bias, they are projected on [features, 1] of random records, which averages the noise.

        Args:
            updates: Updates of one client, at least one.

        Returns:
            Counts, (classes,) float64, with sum N.

        Source: Bo Zhao, Konda Reddy Mopuri, Hakan Bilen, "iDLG: improved deep leakage from gradients", 2020, section 2.
        """
        layer, records = self._layer, self._protocol.client(updates[0].client).records
        evidence = np.zeros(layer.classes)
        for update in updates:
            estimate = self._stand_ins(update, scaled=update.noisy and records > 1)
            bias_only = np.append(np.zeros(layer.width), 1.0)
            direction = np.append(estimate.features, layer.bias) if update.noisy or not layer.bias else bias_only
            rows = layer.rows(update.gradient(self._protocol.local).astype(np.float64))
            mean = rows @ direction / max(direction @ direction, 1e-12) / estimate.clip_factor
            evidence += ((estimate.probabilities if records > 1 else 0) - mean) / len(updates)
        if records == 1:
            return np.eye(layer.classes)[evidence.argmax()]
        shares = np.maximum(evidence, 0)
        return records * (shares / shares.sum() if shares.any() else np.full(layer.classes, 1 / layer.classes))

    def _stand_ins(self, update: Update, scaled: bool) -> StandIns:
        key = update.model.tobytes() + bytes([scaled])
        if key not in self._cached:
            self._cached[key] = stand_ins(self._protocol, update.model, self._layer.classes, scaled)
        return self._cached[key]


@dataclass(frozen=True, eq=False)
class StandIns:
    """Averages over random records at one model.

    Attributes:
        features: Mean inputs of the last layer, (width,).
        probabilities: Mean probabilities, (classes,).
        clip_factor: Mean factor by which clipping scales a gradient.
    """

    features: np.ndarray
    probabilities: np.ndarray
    clip_factor: float


def stand_ins(protocol: Protocol, model: np.ndarray, classes: int, scaled: bool) -> StandIns:
    """Average features, probabilities and clip factor over standard normal records.

    Each record is paired with its negative, so that the mean feature of a linear model is zero.

    Args:
        protocol: The signed protocol: model and clip norm.
        model: Parameters, (p,).
        classes: Number of outputs of the last layer.
        scaled: True to estimate the clip factor; otherwise it is 1.

    Raises:
        ConfigError: If the module has no torch.nn.Linear with `classes` outputs.
    """
    from dpcfl_net.training.models import module_of

    template = protocol.model
    module = module_of(template, model)
    heads = [child for child in module.modules() if isinstance(child, nn.Linear) and child.out_features == classes]
    if not heads:
        raise ConfigError(f"model {template.name!r}: no torch.nn.Linear of {classes} outputs, labels cannot be read")
    features: list[torch.Tensor] = []
    heads[-1].register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    half = torch.randn((STAND_INS // 2, *template.input_shape), generator=torch.Generator().manual_seed(0))
    x = torch.cat([half, -half])
    with torch.no_grad():
        probabilities = module(x).softmax(1)
    clip_factor = 1.0
    if scaled:
        norms = record_gradients(template, np.tile(model, (STAND_INS, 1)))(x, torch.arange(STAND_INS) % classes).norm(dim=1)
        clip_factor = float((protocol.local.clip / norms).clamp(max=1).mean())
    return StandIns(features[0].mean(0).double().numpy(), probabilities.mean(0).double().numpy(), clip_factor)
