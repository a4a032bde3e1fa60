"""Precision of local steps: where bfloat16 can be used, and that float32 is float32."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.training import devices

if TYPE_CHECKING:
    from torch import nn

    from dpcfl_net.training.engine import GradientEngine

INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
PATHS = ("fast", "deep")  # engines whose passes were checked in bfloat16
# With a mode other than "strict" oneDNN may round float32 numbers to shorter formats. It reads them once in a process.
MATH_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


def missing() -> str:
    """Explain why this process cannot compute in bfloat16; empty if it can."""
    import torch

    if not devices.repeatable():
        return "bfloat16 steps were checked on processors only, and this worker computes on a GPU"
    found = torch.cpu.get_capabilities()
    if any(found.get(name, False) for name in INSTRUCTIONS):
        return ""
    return f"this processor has none of the instructions {', '.join(INSTRUCTIONS)}"


def hold_to_processor(protocol: Protocol) -> None:
    """Refuse a job whose precision this process does not have: the proof in privacy/clipping.py is about IEEE arithmetic.

    Args:
        protocol: The signed protocol.

    Raises:
        Refused: "precision", with the reason.
    """
    precision = protocol.local.precision
    if precision != "float32" and (reason := missing()):
        raise Refused("precision", f"the job's local.precision is {precision!r}: {reason}; it must be 'float32' here")
    for name in MATH_MODES:
        if (mode := os.environ.get(name, "strict")).lower() != "strict":
            raise Refused(
                "precision", f"{name} is {mode!r}, which may shorten float32 numbers: unset it, or set it to 'STRICT'"
            )


def in_precision(engine: GradientEngine, module: nn.Module, path: str, precision: str) -> GradientEngine:
    """Return the engine with its passes in a precision.

    Args:
        engine: The engine.
        module: The model.
        path: Its name, as for `gradient_engines.choose`.
        precision: "float32" or "bfloat16".

    Raises:
        ConfigError: If the precision is unknown, or bfloat16 cannot be used with this model, engine or processor.
    """
    if precision == "float32":
        return engine
    if precision != "bfloat16":
        raise ConfigError(f"local.precision is {precision!r}: must be 'float32' or 'bfloat16'")
    if path not in PATHS:
        raise ConfigError(
            f"local.precision is 'bfloat16': works with models of the {' and '.join(PATHS)} engines, this model uses {path}"
        )
    if any(type(layer).__name__ == "Embedding" for layer in module.modules()):
        raise ConfigError("local.precision is 'bfloat16': it cannot hold the codes that an Embedding reads; use 'float32'")
    if reason := missing():
        raise ConfigError(f"local.precision is 'bfloat16': {reason}; use 'float32'")
    from dpcfl_net.training.bfloat16 import Bfloat16Engine

    return Bfloat16Engine(engine)
