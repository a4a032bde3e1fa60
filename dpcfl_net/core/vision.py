"""The one door to torchvision, opened when it is needed: it is heavy, and stumbles over a torch without its operators."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_kept: list[Any] = []


def torchvision() -> Any:
    """The torchvision module, also where torch has no compiled torchvision operators."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not lacks_operators(error):
            raise
    import torch

    for module in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[module]
    # torchvision registers shapes for these two operators at import; a CPU-only torch lacks their definitions.
    # The library object must stay alive, else the definitions go with it.
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
    return importlib.import_module("torchvision")


def lacks_operators(error: Exception) -> bool:
    """Whether importing torchvision failed for the reason that `torchvision` mends; it then succeeds anywhere."""
    return isinstance(error, RuntimeError) and "torchvision::nms" in str(error)
