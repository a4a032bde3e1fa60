"""Networks that the deep path supports, decided from their traced graph alone: every operation must treat each record alone."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from dpcfl_net.training.layers import is_hooked
from dpcfl_net.training.sequences import CausalAttention, Codes, Positions

# "image": (n, channels, height, width); "vector": (n, d); "sequence": (n, places, d); "codes": (n, places) int64.
_OF_INPUT = {3: "image", 2: "sequence", 1: "vector"}
# Layers of this package that fx shall not look into: kinds of input and output.
_LEAVES = {Codes: ("vector", "codes"), Positions: ("sequence", "sequence"), CausalAttention: ("sequence", "sequence")}
_ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Dropout, nn.Dropout2d,
)  # fmt: skip
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_PAIRS = (operator.add, operator.iadd, torch.add, operator.mul, torch.mul)
_FUNCTIONS = (F.relu, torch.relu, torch.relu_, torch.tanh, torch.sigmoid, F.silu, F.gelu)
_METHODS = {
    "mean": torch.mean,
    "flatten": torch.flatten,
    "relu": torch.relu,
    "relu_": torch.relu_,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def supported(module: nn.Module, input_shape: tuple[int, ...] | None) -> bool:
    """Decide whether the deep path can train a model.

    The layers with parameters must be Conv2d with zero padding, GroupNorm on images, Linear and LayerNorm on vectors or sequences,
    and Embedding, each called once, and their parameters must not be used elsewhere. All other operations must be known to leave
    the records of a batch apart.

    Args:
        module: The model.
        input_shape: Shape of one record; None: a row of codes if the model has a layer `Codes`, else an image.
    """
    layers = [child for child in module.modules() if any(True for _ in child.parameters(recurse=False))]
    known = all(_weighted(layer) for layer in layers)
    shared = len(set(module.parameters())) != sum(1 for layer in layers for _ in layer.parameters(recurse=False))
    if not layers or not known or shared or any(map(is_hooked, module.modules())):
        return False
    try:
        graph = _Tracer().trace(copy.deepcopy(module).train())
    except Exception:
        # Code that branches on its input cannot be traced; other engines try such a model on synthetic records.
        return False
    return _read(graph, module, input_shape, len(layers))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in _LEAVES or super().is_leaf_module(m, module_qualified_name)


def _read(graph: fx.Graph, module: nn.Module, input_shape: tuple[int, ...] | None, layers: int) -> bool:
    kinds: dict[fx.Node, str | None] = {}
    called: list[str] = []
    for node in graph.nodes:
        given = [kinds.get(other) for other in node.all_input_nodes]
        if node.op == "output":
            return given == ["vector"] and node.args == tuple(node.all_input_nodes) and len(called) == layers
        if not node.users or (node.op == "placeholder" and kinds):
            return False
        if node.op == "placeholder":
            kinds[node] = _OF_INPUT.get(_dimensions(module) if input_shape is None else len(input_shape))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            # A second call would add to the gradient of the first before its norm is taken.
            if node.target in called:
                return False
            called += [str(node.target)] if _weighted(layer) else []
            kinds[node] = _after(layer, given) if len(node.args) == 1 and not node.kwargs else None
        elif node.op == "call_function":
            kinds[node] = _result(node.target, node, given)
        elif node.op == "call_method":
            kinds[node] = _result(_METHODS.get(str(node.target)), node, given)
        if kinds.get(node) is None:
            return False
    return False


def _dimensions(module: nn.Module) -> int:
    """Dimensions of a record of which no shape is known."""
    return 1 if any(type(child) is Codes for child in module.modules()) else 3


def _weighted(layer: nn.Module) -> tuple[str, ...]:
    """Kinds of input of a supported layer with parameters; empty for others. Subclasses may compute something else."""
    if type(layer) is nn.Conv2d:
        return ("image",) if layer.padding_mode == "zeros" and not isinstance(layer.padding, str) else ()
    if type(layer) is nn.GroupNorm:
        return ("image",) if layer.affine and layer.bias is not None else ()
    if type(layer) is nn.LayerNorm:
        whole = len(layer.normalized_shape) == 1 and layer.elementwise_affine and layer.bias is not None
        return ("vector", "sequence") if whole else ()
    if type(layer) is nn.Embedding:
        plain = layer.padding_idx is None and layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return ("codes",) if plain else ()
    return ("vector", "sequence") if type(layer) is nn.Linear else ()


def _after(layer: nn.Module, given: list[str | None]) -> str | None:
    """Kind of a layer's output; None if the layer is not supported."""
    if len(given) != 1:
        return None
    if accepted := _weighted(layer):
        kind = "sequence" if given == ["codes"] else given[0]
        return kind if given[0] in accepted else None
    if type(layer) in _LEAVES:
        before, after = _LEAVES[type(layer)]
        return after if given == [before] else None
    if given == ["codes"]:
        return None
    if type(layer) is nn.Flatten:
        return "vector" if (layer.start_dim, layer.end_dim) == (1, -1) else None
    if type(layer) in _POOLS:
        return "image" if given == ["image"] and not getattr(layer, "return_indices", False) else None
    return given[0] if type(layer) in _ELEMENTWISE else None


def _result(function: Any, node: fx.Node, given: list[str | None]) -> str | None:
    """Kind of a function's result; None if the function is not supported."""
    if function in _PAIRS:
        if "codes" in given:
            return None
        alike = len(node.args) == 2 and all(isinstance(each, fx.Node) for each in node.args) and not node.kwargs
        return given[0] if alike and len(set(given)) == 1 else None
    if function is torch.flatten:
        return "vector" if given != ["codes"] and list(node.args[1:]) == [1] and not node.kwargs else None
    if function is operator.getitem:
        # One place of a sequence.
        place = node.args[1]
        of_place = isinstance(place, tuple) and len(place) == 2 and place[0] == slice(None) and type(place[1]) is int
        return "vector" if given == ["sequence"] and of_place else None
    if function is torch.mean:
        return "vector" if given == ["sequence"] and list(node.args[1:]) == [1] and not node.kwargs else None
    if function is F.adaptive_avg_pool2d:
        return "image" if given == ["image"] else None
    return given[0] if function in _FUNCTIONS and len(given) == 1 and given != ["codes"] else None
