"""Gradient inversion: search for a record whose gradient matches the recorded one (Geiping et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from dpcfl_net.core.protocol import ModelTemplate

STEPS = 600
RATE = 0.1  # initial learning rate; inputs have a deviation of about one
STARTS = 3
MATCHED = 5e-3  # cosine distance below which a search has converged; above, it is stuck

# Weights of total variation at the start and at the end. A smooth start keeps the search out of poor minima. Where noise is in
# the gradient a smooth end wins too: at epsilon 8 a last weight of 1e-4, .01, .1, 1 gave 9.2, 10.9, 11.6, 11.7 dB on MNIST, and
# with less noise .1 was better than 1.
VARIATION, VARIATION_UNDER_NOISE = (0.3, 1e-4), (0.1, 0.1)

Gradients = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Found:
    """Records found by a search.

    Attributes:
        records: (k, *input shape) float32, as the model is fed.
        distance: (k,), 1 - cosine similarity to the recorded gradients.
    """

    records: np.ndarray
    distance: np.ndarray


def record_gradients(template: ModelTemplate, models: np.ndarray) -> Gradients:
    """Return a function from records x (n, *input shape) and labels y (n,) to per-record gradients (n, p), differentiable in x.

    Args:
        template: The model.
        models: (n, p); row i is the model of record i.
    """
    from dpcfl_net.training.models import build

    module = build(template.name, tuple(template.input_shape), template.classes)
    stacked = _by_name(module, torch.from_numpy(np.array(models, np.float32)))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(module, parameters, (x[None],)), y[None])

    each = vmap(grad(loss))
    return lambda x, y: torch.cat([part.flatten(1) for part in each(stacked, x, y).values()], 1)


def invert(
    template: ModelTemplate, models: np.ndarray, gradients: np.ndarray, labels: np.ndarray, *, noisy: bool, seed: int = 0
) -> Found:
    """Search for records that match recorded gradients.

    Minimises the mean cosine distance over r rounds plus total variation, by Adam on the sign of the gradient. Clipping does not
    change the direction, so it hides nothing. A search that is stuck is restarted; with noise the distance does not show this, and
    there is one start.

    Args:
        template: The model.
        models: (k, r, p) float32; models of each record.
        gradients: (k, r, p) float32; recorded gradients.
        labels: (k,) labels.
        noisy: Whether the gradients hold noise.
        seed: Seed of the starts.

    Returns:
        The k best records.

    Source: Geiping, Bauermeister, Droege, Moeller, "Inverting gradients: how easy is it to break privacy in federated learning?",
    NeurIPS 2020, equation 4.
    """
    torch.set_num_threads(1)
    best = _search(template, models, gradients, labels, noisy, seed)
    for start in range(1, 1 if noisy else STARTS):
        stuck = np.flatnonzero(best.distance > MATCHED)
        if not len(stuck):
            break
        again = _search(template, models[stuck], gradients[stuck], labels[stuck], noisy, seed + start)
        better = again.distance < best.distance[stuck]
        best.records[stuck[better]] = again.records[better]
        best.distance[stuck[better]] = again.distance[better]
    return best


def _search(
    template: ModelTemplate, models: np.ndarray, gradients: np.ndarray, labels: np.ndarray, noisy: bool, seed: int
) -> Found:
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
        own = gradients_of(x.repeat_interleave(r, 0), y)
        distance = 1 - functional.cosine_similarity(own, target, dim=1).view(k, r).mean(1)
        cost = (distance + first * (last / first) ** done * variation(x)).sum()
        (slope,) = torch.autograd.grad(cost, [x])
        x.grad = slope.sign()
        optimiser.step()
    return Found(x.detach().numpy(), distance.detach().numpy())


def variation(x: torch.Tensor) -> torch.Tensor:
    """Return the total variation of images (k, C, H, W), (k,): mean absolute difference of neighbours, horizontal plus vertical."""
    return x.diff(dim=3).abs().mean((1, 2, 3)) + x.diff(dim=2).abs().mean((1, 2, 3))


def psnr(pictures: np.ndarray, originals: np.ndarray) -> np.ndarray:
    """Compute the peak signal-to-noise ratio.

    Args:
        pictures: (k, C, H, W), values in [0, 1].
        originals: Same shape.

    Returns:
        (k,) in dB, at most 100.
    """
    error = ((pictures.astype(np.float64) - originals) ** 2).mean(axis=(1, 2, 3))
    found: np.ndarray = -10 * np.log10(np.maximum(error, 1e-10))
    return found


def _by_name(module: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split (n, p) rows into the parameters of the module, (n, *shape) each."""
    parts, at = {}, 0
    for name, parameter in module.named_parameters():
        parts[name] = rows[:, at : at + parameter.numel()].reshape(len(rows), *parameter.shape)
        at += parameter.numel()
    return parts
