"""Gradient inversion: searches for a record whose gradient has the direction of the recorded one (Geiping et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from dpcfl_net.core.signed_settings import ModelTemplate

STEPS = 600
RATE = 0.1  # initial learning rate of Adam; inputs have a standard deviation of about 1
STARTS = 3
MATCHED = 5e-3  # cosine distance below which a record counts as found; a search that ends above it is stuck

# Initial and final weight of total variation. A smooth start keeps the search out of poor minima. With noise in the gradient a
# smooth end is better too: at epsilon 8, final weights of 1e-4, .01, .1, 1 gave 9.2, 10.9, 11.6, 11.7 dB on MNIST; with less
# noise .1 was better than 1.
VARIATION, VARIATION_UNDER_NOISE = (0.3, 1e-4), (0.1, 0.1)

Gradients = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Inverted:
    """Reconstructed records.

    Attributes:
        records: Model inputs, (k, *input shape) float32.
        distance: 1 - cosine similarity to the recorded gradients, (k,).
    """

    records: np.ndarray
    distance: np.ndarray


def record_gradients(template: ModelTemplate, models: np.ndarray) -> Gradients:
    """Per-record gradients of cross-entropy, each record at a different model.

    Args:
        template: Model architecture.
        models: Parameters, (n, p).

    Returns:
        Function of x (n, *input shape) and y (n,) to gradients (n, p): row i is the gradient of record i at models[i].
        It is differentiable in x, so that x can be fitted to given gradients.
    """
    from dpcfl_net.training.models import module_of

    module = module_of(template)
    stacked = _by_name(module, torch.from_numpy(np.array(models, np.float32)))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, parameters, (x[None],)), y[None])

    each = vmap(grad(loss))
    return lambda x, y: torch.cat([part.flatten(1) for part in each(stacked, x, y).values()], 1)


def invert(template: ModelTemplate, models: np.ndarray, gradients: np.ndarray, labels: np.ndarray, *, noisy: bool) -> Inverted:
    """Reconstruct k records from their gradients.

    Minimises cosine distance (mean over r rounds) plus total variation with Adam on the sign of the gradient. The loss depends
    on the direction of the gradient only, so clipping does not protect. A stuck search is restarted. With noise, the distance
    does not show whether a search is stuck, so there is one start.

    Args:
        template: Model architecture.
        models: Models at which the gradients were taken, (k, r, p).
        gradients: Recorded gradients, (k, r, p).
        labels: Labels of the records, (k,).
        noisy: True if the gradients contain noise.

    Returns:
        Records and their cosine distances.

    Source: Jonas Geiping, Hartmut Bauermeister, Hannah Droege, Michael Moeller, "Inverting gradients: how easy is it to break
    privacy in federated learning?", NeurIPS 2020, equation 4.
    """
    torch.set_num_threads(1)
    best = _search(template, models, gradients, labels, noisy, 0)
    for start in range(1, 1 if noisy else STARTS):
        stuck = np.flatnonzero(best.distance > MATCHED)
        if not len(stuck):
            break
        again = _search(template, models[stuck], gradients[stuck], labels[stuck], noisy, start)
        better = again.distance < best.distance[stuck]
        best.records[stuck[better]] = again.records[better]
        best.distance[stuck[better]] = again.distance[better]
    return best


def _search(
    template: ModelTemplate, models: np.ndarray, gradients: np.ndarray, labels: np.ndarray, noisy: bool, seed: int
) -> Inverted:
    k, r, p = gradients.shape
    gradients_of = record_gradients(template, models.reshape(k * r, p))
    target = torch.from_numpy(np.array(gradients, np.float32).reshape(k * r, p))
    y = torch.from_numpy(labels.astype(np.int64)).repeat_interleave(r)
    x = torch.randn((k, *template.input_shape), generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimiser = torch.optim.Adam([x], RATE)
    first, last = VARIATION_UNDER_NOISE if noisy else VARIATION
    distance = torch.empty(k)
    for step in range(STEPS):
        done = step / STEPS
        optimiser.param_groups[0]["lr"] = RATE * ((1 + math.cos(math.pi * done)) / 2 + 1e-3)
        current = gradients_of(x.repeat_interleave(r, 0), y)
        distance = 1 - functional.cosine_similarity(current, target, dim=1).view(k, r).mean(1)
        cost = (distance + first * (last / first) ** done * variation(x)).sum()
        (slope,) = torch.autograd.grad(cost, [x])
        x.grad = slope.sign()
        optimiser.step()
    return Inverted(x.detach().numpy(), distance.detach().numpy())


def variation(x: torch.Tensor) -> torch.Tensor:
    """Anisotropic total variation, (k,): mean absolute difference of adjacent pixels of images (k, C, H, W)."""
    return x.diff(dim=3).abs().mean((1, 2, 3)) + x.diff(dim=2).abs().mean((1, 2, 3))


def psnr(pictures: np.ndarray, originals: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio.

    Args:
        pictures: Images, (k, C, H, W), values in [0, 1].
        originals: Reference images, same shape.

    Returns:
        dB, (k,); at most 100, for equal images.
    """
    error = ((pictures.astype(np.float64) - originals) ** 2).mean(axis=(1, 2, 3))
    decibels: np.ndarray = -10 * np.log10(np.maximum(error, 1e-10))
    return decibels


def _by_name(module: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split flat parameters (n, p) into named parameters of the module, (n, *shape) each."""
    parts, at = {}, 0
    for name, parameter in module.named_parameters():
        parts[name] = rows[:, at : at + parameter.numel()].reshape(len(rows), *parameter.shape)
        at += parameter.numel()
    return parts
