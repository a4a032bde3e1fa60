"""A torch mode in which new layers keep the values that their memory happens to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

_DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_)  # which some functions of torch.nn.init call without asking the mode


class Uninitialised(TorchFunctionMode):
    """Inside the `with` block, functions of `torch.nn.init` draw nothing and most do nothing.

    Layers on the device "meta" would do the same, but moving them to the CPU imports sympy (0.3 s).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the tensor of an initialisation unchanged; call all other functions."""
        given = kwargs or {}
        if getattr(func, "__module__", None) == init.__name__ or func in _DRAWS:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
