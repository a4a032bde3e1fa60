"""Choice of the engine for a model's per-record gradients: the fastest one that computes them correctly."""

from __future__ import annotations

import textwrap
import warnings
from functools import partial

import numpy as np
import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training import deep_layers, devices, gradient_errors, layer_rules, synthetic
from dpcfl_net.training.deep_path import DeepPath
from dpcfl_net.training.engine import GradientEngine
from dpcfl_net.training.fast_path import FastPath
from dpcfl_net.training.layers import fast_layers
from dpcfl_net.training.opacus_path import OpacusPath
from dpcfl_net.training.vmap_path import VmapPath

PATHS = ("fast", "deep", "opacus", "vmap")


def choose(module: nn.Module, path: str, input_shape: tuple[int, ...] | None) -> tuple[str, GradientEngine]:
    """Choose the engine of a model.

    Args:
        module: The model.
        path: "fast", "deep", "opacus" or "vmap"; "auto" takes the fast path where possible, then the deep path, then the first
            of Opacus and vmap whose gradients equal autograd's on synthetic records.
        input_shape: Shape of one record; with None, "auto" takes Opacus without a comparison where the first two do not apply.

    Returns:
        Name of the engine, and the engine.

    Raises:
        ConfigError: If the name is unknown or no engine can train the model.
    """
    if path not in ("auto", *PATHS):
        raise ConfigError(f"unknown path {path!r}, known: auto, {', '.join(PATHS)}")
    set_processor_flags()
    layers = fast_layers(module, input_shape) if path in ("auto", "fast") else None
    if layers is not None:
        return "fast", FastPath(layers)
    if path == "fast":
        raise ConfigError("the fast path takes a Sequential of Conv2d (one group), ReLU, MaxPool2d, Flatten, with Linear last")
    if path in ("auto", "deep") and deep_layers.supported(module, input_shape):
        return "deep", DeepPath(module)
    if path == "deep":
        raise ConfigError(
            "the deep path takes Conv2d with zero padding, GroupNorm, Linear, LayerNorm and Embedding, each called once, with "
            "activations, pooling, flattening and sums between them"
        )
    if path == "vmap":
        return path, VmapPath(module)
    if path == "opacus" or input_shape is None:
        return "opacus", OpacusPath(module)
    return _first_right(module, input_shape)


def set_processor_flags() -> None:
    """Set the flags of the calling thread that every engine needs."""
    # Before numpy 2.4, the limits of a type that are first read while denormals are flushed come with a warning.
    for kind in (np.float32, np.float64):
        np.finfo(kind)
    # Denormals make time depend on data; both settings are per thread or may be changed by other code.
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("highest")
    for part in (torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn):  # type: ignore[attr-defined]
        part.fp32_precision = "ieee"
    devices.strict_arithmetic()


def _first_right(module: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, GradientEngine]:
    if problems := layer_rules.problems(module, by_record=True):
        raise ConfigError(problems)
    reasons = []
    x = synthetic.records(module, input_shape, synthetic.RECORDS)
    with warnings.catch_warnings():
        # The warnings of Opacus and torch are covered by the comparison or the error below.
        warnings.simplefilter("ignore")
        true = gradient_errors.truth(module, synthetic.parameters(module), x)
        for name, kind in (("opacus", OpacusPath), ("vmap", VmapPath)):
            try:
                engine: GradientEngine = kind(module)
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
