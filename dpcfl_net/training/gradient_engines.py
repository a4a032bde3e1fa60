"""Which engine computes a model's per-record gradients: the fastest one that gets them right."""

from __future__ import annotations

import textwrap
import warnings
from functools import partial
from typing import Protocol

import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy import clipping, synthetic
from dpcfl_net.training import devices, gradient_errors, layer_rules
from dpcfl_net.training.fast_path import FastPath
from dpcfl_net.training.layers import plan
from dpcfl_net.training.opacus_path import OpacusPath
from dpcfl_net.training.vmap_path import VmapPath


class Forward(Protocol):
    """One way to run a model."""

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(n, classes)."""


class Engine(Forward, Protocol):
    """One way to compute per-record gradients."""

    def gradients(
        self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, list[clipping.GradientBlock]]:
        """Logits, and parts whose gradients together are each record's."""


def choose(module: nn.Module, path: str, input_shape: tuple[int, ...] | None) -> tuple[str, Engine]:
    """The engine of a model, and its name.

    path: "fast", "opacus" and "vmap" insist; "auto" takes the fast path where it can, else the first of Opacus and vmap that
    gives the gradients of autograd on made-up records. input_shape: of a record; if None "auto" does not try Opacus but
    takes it. Raises ConfigError naming what no engine can do.
    """
    if path not in ("auto", "fast", "opacus", "vmap"):
        raise ConfigError(f"unknown path {path!r}, known: auto, fast, opacus, vmap")
    processor()
    layers = plan(module, input_shape) if path in ("auto", "fast") else None
    if layers is not None:
        return "fast", FastPath(layers)
    if path == "fast":
        raise ConfigError("the fast path takes a Sequential of Conv2d (one group), ReLU, MaxPool2d, Flatten, with Linear last")
    if path == "vmap":
        return path, VmapPath(module)
    if path == "opacus" or input_shape is None:
        return "opacus", OpacusPath(module)
    return _first_right(module, input_shape)


def processor() -> None:
    """Settings of the calling thread that every engine counts on."""
    # Denormals slow arithmetic down by what is in the data; both settings belong to a thread or can be changed by others.
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("highest")
    devices.strict_arithmetic()


def _first_right(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, Engine]:
    if problems := layer_rules.problems(module, by_record=True):
        raise ConfigError(problems)
    reasons = []
    x = synthetic.records(module, input_shape, synthetic.RECORDS)
    with warnings.catch_warnings():
        # What Opacus and torch remark on here is either tried below or told in the error.
        warnings.simplefilter("ignore")
        true = gradient_errors.truth(module, synthetic.parameters(module), x)
        for name, kind in (("opacus", OpacusPath), ("vmap", VmapPath)):
            try:
                engine: Engine = kind(module)
                error = gradient_errors.in_doubt(partial(gradient_errors.by_record, engine, x[:0]), true)
            except Exception as problem:
                said = textwrap.shorten(str(problem), 120, placeholder=" ...")
                reasons.append(f"{name} raised {type(problem).__name__}: {said}")
                continue
            if error <= gradient_errors.GRADIENT_BOUND:
                return name, engine
            reasons.append(f"those of {name} are off by {error:.0e} of their norm")
    raise ConfigError(
        f"no engine gives the model's per-record gradients ({'; '.join(reasons)}): does forward branch on a tensor's value or "
        "loop over records? Use torch.where and whole batches"
    )
