"""Checks of models as flat vectors, so that NumPy and torch broadcast none of another shape."""

from __future__ import annotations

from typing import Any

import numpy as np


def require_model(name: str, model: Any, parameters: int) -> None:
    """Check that a model is one vector of all its parameters, (p,).

    Args:
        name: Name of the model in the message.
        model: NumPy array or torch tensor.
        parameters: p.

    Raises:
        ValueError: If it has another shape.
    """
    if np.shape(model) != (parameters,):
        raise ValueError(f"{name} has shape {_text(model)}: must be ({parameters},), a number for each parameter of the model")


def require_models(models: Any, parameters: int) -> None:
    """Check that models are the rows of a matrix, (M, p) with M at least 1.

    Args:
        models: NumPy array or torch tensor.
        parameters: p.

    Raises:
        ValueError: If they have another shape.
    """
    shape = np.shape(models)
    if len(shape) != 2 or not shape[0] or shape[1] != parameters:
        raise ValueError(f"models have shape {_text(models)}: must be (M, {parameters}), a row for each of M models")


def _text(model: Any) -> str:
    return str(tuple(np.shape(model)))
