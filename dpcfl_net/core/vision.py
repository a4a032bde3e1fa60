"""Lazy import of torchvision, which is heavy and fails on a torch without its operators."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dpcfl_net.core.errors import ConfigError

_kept: list[Any] = []


def torchvision() -> Any:
    """Import torchvision, also where torch has no compiled torchvision operators.

    Returns:
        The module.

    Raises:
        ConfigError: If torchvision is not installed.
        RuntimeError: If its build does not fit the installed torch.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ConfigError(
            "torchvision is not installed: pip install 'torchvision>=0.28', of the release that fits torch"
        ) from None
    except RuntimeError as error:
        if not lacks_operators(error):
            raise
    import torch

    for module in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[module]
    # torchvision registers shapes for these two operators at import; a CPU-only torch lacks their definitions.
    # The definitions live as long as the library object.
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
    return importlib.import_module("torchvision")


def lacks_operators(error: Exception) -> bool:
    """Return True if an import of torchvision failed for a missing operator, which `torchvision` defines."""
    return isinstance(error, RuntimeError) and "torchvision::nms" in str(error)
