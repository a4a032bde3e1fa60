"""Deferred import of torchvision, also beside a torch without torchvision's compiled operators."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_kept: list[Any] = []


def torchvision() -> Any:
    """Import torchvision; define its missing operators first if torch lacks them."""
    try:
        return importlib.import_module("torchvision")
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
