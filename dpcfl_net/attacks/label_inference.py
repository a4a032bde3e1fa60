"""Label inference: number of a client's records with each label, from the gradient of the last layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dpcfl_net.attacks.inversion import record_gradients
from dpcfl_net.attacks.updates import Update
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import ModelTemplate, Protocol

STAND_INS = 128  # random records that replace the unknown data


@dataclass(frozen=True)
class LastLayer:
    """Position of the last linear layer in the flat parameters: weight (classes, width) at `at`, then the bias."""

    classes: int
    width: int
    at: int
    bias: bool

    def rows(self, gradient: np.ndarray) -> np.ndarray:
        """Return weights and bias of each class, (classes, width + 1), from a gradient (p,); 0 without a bias."""
        end = self.at + self.classes * self.width
        weight = gradient[self.at : end].reshape(self.classes, self.width)
        bias = gradient[end:] if self.bias else np.zeros(self.classes)
        return np.concatenate([weight, bias[:, None]], axis=1)


def last_layer(template: ModelTemplate) -> LastLayer:
    """Find the last linear layer.

    Raises:
        ConfigError: If the parameters do not end in a linear layer with as many outputs as classes, at least two.
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
    """Infers labels from the updates of one job's clients, with the protocol and without data."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol, self._layer = protocol, last_layer(protocol.model)
        self._known: dict[bytes, StandIns] = {}

    def counts(self, updates: list[Update]) -> np.ndarray:
        """Estimate how many of one client's N records have each label.

        The gradient of cross-entropy at the last layer is the mean over records of (p - y) [features, 1], with probabilities p and one-hot
        label y. For one record only the row of its label is negative. For more records y is estimated as p minus the gradient, with p
        from random records. Rows are projected on [0, 1] or, with noise or without a bias, on [features, 1] of random records, which
        averages noise out.

        Args:
            updates: The client's updates.

        Returns:
            (classes,) float64 that sums to N.

        Source: Zhao, Mopuri, Bilen, "iDLG: improved deep leakage from gradients", 2020, section 2.
        """
        layer, records = self._layer, self._protocol.client(updates[0].client).records
        evidence = np.zeros(layer.classes)
        for update in updates:
            known = self._stand_ins(update, scaled=update.noisy and records > 1)
            alone = np.append(np.zeros(layer.width), 1.0)
            direction = np.append(known.features, layer.bias) if update.noisy or not layer.bias else alone
            rows = layer.rows(update.gradient(self._protocol.local).astype(np.float64))
            mean = rows @ direction / max(direction @ direction, 1e-12) / known.left
            evidence += ((known.probabilities if records > 1 else 0) - mean) / len(updates)
        if records == 1:
            return np.eye(layer.classes)[evidence.argmax()]
        shares = np.maximum(evidence, 0)
        return records * (shares / shares.sum() if shares.any() else np.full(layer.classes, 1 / layer.classes))

    def _stand_ins(self, update: Update, scaled: bool) -> StandIns:
        key = update.model.tobytes() + bytes([scaled])
        if key not in self._known:
            self._known[key] = stand_ins(self._protocol, update.model, self._layer.classes, scaled)
        return self._known[key]


@dataclass(frozen=True, eq=False)
class StandIns:
    """Statistics of random records at one model.

    Mean features (width,), mean probabilities (classes,), and the factor by which clipping scales a gradient.
    """

    features: np.ndarray
    probabilities: np.ndarray
    left: float


def stand_ins(protocol: Protocol, model: np.ndarray, classes: int, scaled: bool) -> StandIns:
    """Evaluate standard normal records, in pairs x and -x, so that the features of a linear model have mean zero.

    Args:
        protocol: The signed protocol.
        model: (p,) float32.
        classes: Number of classes.
        scaled: Whether to measure the effect of clipping; else the factor is 1.

    Raises:
        ConfigError: If the module has no linear layer.
    """
    from dpcfl_net.training.models import build

    template = protocol.model
    module = build(template.name, tuple(template.input_shape), template.classes)
    heads = [child for child in module.modules() if isinstance(child, nn.Linear) and child.out_features == classes]
    if not heads:
        raise ConfigError(f"model {template.name!r}: no torch.nn.Linear of {classes} outputs, labels cannot be read")
    seen: list[torch.Tensor] = []
    heads[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    half = torch.randn((STAND_INS // 2, *template.input_shape), generator=torch.Generator().manual_seed(0))
    x = torch.cat([half, -half])
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(model, np.float32)), module.parameters())
        probabilities = module(x).softmax(1)
    left = 1.0
    if scaled:
        lengths = record_gradients(template, np.tile(model, (STAND_INS, 1)))(x, torch.arange(STAND_INS) % classes).norm(dim=1)
        left = float((protocol.local.clip / lengths).clamp(max=1).mean())
    return StandIns(seen[0].mean(0).double().numpy(), probabilities.mean(0).double().numpy(), left)
