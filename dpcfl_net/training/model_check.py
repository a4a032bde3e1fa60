"""Check of whether DP-SGD can train a model: its parameters, independence of records, and per-record gradients.

Clipping bounds nothing if a record changes the gradient of another. The check tests this and finds mistakes, not malice: code
that reacts to one particular record or parameter value can mix records unnoticed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training import gradient_errors, layer_rules, memory, synthetic
from dpcfl_net.training.dpsgd import Evaluator
from dpcfl_net.training.engine import GradientEngine
from dpcfl_net.training.gradient_engines import choose
from dpcfl_net.training.gradient_errors import GRADIENT_BOUND
from dpcfl_net.training.layers import fast_layers
from dpcfl_net.training.physical_batches import slots_for
from dpcfl_net.training.plain_path import fill
from dpcfl_net.training.synthetic import RECORDS

# Relative to the largest logit. On real models rounding in float32 stays below 4e-6, while mixing records (a mean, a sum, an
# order along the batch) moves logits by 0.1 and more at `synthetic.parameters`. A change below the bound passes: it moves gradients
# by about as little.
_LOGITS_BOUND = 1e-4
_LOGITS_FLOOR = 1e-3  # smaller logits are compared absolutely: a last layer may start at zero
_BESIDE_BOUND, _BESIDE_FLOOR = 1e-3, 1e-30  # of numbers of a record beside another one, relative and absolute
_LARGEST, _SMALL = 3e38, 1e-12  # a weight may be as large; size of records beside one that overflows
_GRADIENT_NUMBERS = 2**26  # per call of an engine: 256 MiB in float32, less than a run needs
_MIXED = (
    "a record's {} with the other records of its batch, so no record's gradient can be clipped: does forward take a "
    "mean, a sum or a shape over the first dimension?"
)


@dataclass(frozen=True)
class ModelCheck:
    """Result of a check that passed.

    Attributes:
        path: Engine that trains the model; None if only evaluation was checked.
        logits_error: Largest relative error of the logits.
        gradient_error: Largest relative error of the gradients (`gradient_errors.by_record`); None if only evaluation was
            checked.
    """

    path: str | None
    logits_error: float
    gradient_error: float | None


def check(
    module: nn.Module, input_shape: tuple[int, ...], classes: int, by_record: bool = True, batch_size: int = 32,
    path: str = "auto", span: tuple[float, float] | None = None,
) -> ModelCheck:  # fmt: skip
    """Check a model on synthetic records at its own and two other parameter values (`synthetic.parameters`).

    Args:
        module: The model.
        input_shape: Shape of one record.
        classes: Number of logits.
        by_record: False checks only evaluation, for client-level protection.
        batch_size: Expected batch, as for `Trainer`.
        path: Engine, as for `gradient_engines.choose`.
        span: Smallest and largest number that a record may hold, as the model gets it; None: records are not tried at both ends.

    Returns:
        Engine and errors.

    Raises:
        ConfigError: With the reasons why per-record clipping would fail or bound nothing, also under weights of which a record
            at the ends of `span` overflows, or the error that such a record raises: the server would see that its client stops.
    """
    if problems := _parameters(module) or layer_rules.problems(module, by_record):
        raise ConfigError(problems)
    with warnings.catch_warnings():
        # The warnings of torch and Opacus are covered by the checks below.
        warnings.simplefilter("ignore")
        _copied(module)
        fast_layers(module, input_shape)
        x = synthetic.records(module, input_shape, max(RECORDS, slots_for(batch_size)))
        memory.keep_freed()
        try:
            found = _checked(module, x, classes, by_record, path)
            if span is not None:
                _ends(module, input_shape, span)
                if found.path not in (None, "fast"):  # its layers treat each record alone, whatever the weights
                    _apart(module, input_shape, span, path)
            return found
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"training it {_where(module, x, error)}") from error
        finally:
            memory.give_back_freed()


def _checked(module: nn.Module, x: torch.Tensor, classes: int, by_record: bool, path: str) -> ModelCheck:
    built = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    draws = [synthetic.parameters(module), synthetic.parameters(module, -1), built]
    # The first draw is tried in the physical shape; three records and an empty slot show the rest.
    few = torch.cat([x[:RECORDS], torch.zeros_like(x[:1])])
    logits_error = max(_logits(module, theta, batch, classes) for theta, batch in zip(draws, (x, few, few), strict=True))
    if not by_record:
        Evaluator(module, input_shape=tuple(x.shape[1:]))
        return ModelCheck(None, logits_error, None)
    name, engine = choose(module, path, tuple(x.shape[1:]))
    full = x[: max(RECORDS, _GRADIENT_NUMBERS // len(built))]
    tried = zip(draws, (full, few, few), strict=True)
    error = max(_gradients(module, theta, batch, name, engine) for theta, batch in tried)
    return ModelCheck(name, logits_error, error)


def _gradients(module: nn.Module, theta: torch.Tensor, x: torch.Tensor, name: str, engine: GradientEngine) -> float:
    """Largest relative error; ConfigError for gradients that are missing, mix records, or differ from autograd's."""
    true = gradient_errors.truth(module, theta, x[:RECORDS])
    if true.unused:
        raise ConfigError(f"its logits do not depend on the parameters {', '.join(true.unused)}: remove them")
    if not gradient_errors.in_doubt(gradient_errors.together, true) <= GRADIENT_BOUND:
        raise ConfigError(_MIXED.format("gradient changes"))
    error = gradient_errors.in_doubt(partial(gradient_errors.by_record, engine, x[RECORDS:]), true)
    if not error <= GRADIENT_BOUND:
        raise ConfigError(
            f"the {name} engine's per-record gradients of it are not autograd's (off by {error:.0e} of their norm): does a "
            "layer get its input in a shape whose first side is not the batch?"
        )
    return error


def _parameters(module: nn.Module) -> list[str]:
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        return ["it has TorchScript parts, whose steps cannot be followed: return the module before torch.jit"]
    found = [
        f"layer {name!r} has a state of its own (get_extra_state), which is neither trained nor sent: remove it"
        for name, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
    ]
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            found.append(f"parameter {name!r} has no shape yet: give lazy layers their sizes")
        elif parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            found.append(f"parameter {name!r} is {parameter.dtype} on {parameter.device}: must be torch.float32 on the CPU")
        elif not parameter.requires_grad:
            found.append(f"parameter {name!r} is frozen (requires_grad is False): every parameter is trained and sent")
        elif parameter.is_inference():
            found.append(f"parameter {name!r} was built in torch.inference_mode, which no step can change: build it outside")
        elif not parameter.is_contiguous():
            found.append(f"parameter {name!r} is not contiguous: build it without memory_format, and transpose it in forward")
    return found if found or any(True for _ in module.parameters()) else ["it has no parameters to train"]


@torch.no_grad()
def _ends(module: nn.Module, input_shape: tuple[int, ...], span: tuple[float, float]) -> None:
    """Refuse a model that raises on records of the smallest and the largest number; whatever it returns is clipped.

    A server may send weights that overflow: an error on what is not finite would tell it which client has such a record.
    """
    module = copy.deepcopy(module)
    for weights, scale in (("", 1.0), (" with weights of 1e30", 1e30)):
        fill(list(module.parameters()), scale * synthetic.parameters(module))
        for numbers, x in _at_ends(input_shape, span).items():
            for training in (True, False):
                try:
                    module.train(training)(x)
                except Exception as error:
                    raise ConfigError(
                        f"a record of the numbers {numbers}, which the data set's type allows, raises{weights} {type(error).__name__}: "
                        f"{error}; the server would see that a client with such a record stops: clamp codes, as "
                        "dpcfl_net.training.sequences.Codes does, and let numbers that are not finite pass"
                    ) from error


def _at_ends(input_shape: tuple[int, ...], span: tuple[float, float]) -> dict[str, torch.Tensor]:
    """Records of the smallest number, of the largest, and of both, (1, ...) each, by their numbers."""
    low, high = (torch.full((1, *input_shape), end) for end in span)
    mixed = torch.where(torch.arange(low.numel()).view_as(low) % 2 == 0, low, high)
    return {f"{span[0]:g}": low, f"{span[1]:g}": high, f"{span[0]:g} and {span[1]:g}": mixed}


@torch.no_grad()
def _apart(module: nn.Module, input_shape: tuple[int, ...], span: tuple[float, float], path: str) -> None:
    """Refuse a model in which a record with large activations changes the logits or gradients of the others.

    A guard against overflow that acts on the whole batch does: a server may send weights under which one record sets it off.
    """
    x = synthetic.records(module, input_shape, RECORDS)
    others = _SMALL * torch.cat([x[:1], -x[:1]])  # which do not set it off themselves
    name, engine = choose(module, path, input_shape)
    forwards = [copy.deepcopy(module).train(training) for training in (True, False)]
    labels = torch.zeros(len(others) + 1, dtype=torch.int64)

    def computed(theta: torch.Tensor, last: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        batch, found = torch.cat([others, last]), []
        for forward in forwards:
            fill(list(forward.parameters()), theta)
            found.append(("logits change", forward(batch)))
        if name == "opacus":  # vmap computes each record alone, and the deep path knows every operation
            found += [("gradient changes", part.squared_norms()) for part in engine.gradients(theta, batch, labels)[1]]
        return [(what, values[: len(others)]) for what, values in found]

    for weights, theta in _large_weights(module):
        alone = computed(theta, torch.zeros_like(x[:1]))
        for numbers, last in _at_ends(input_shape, span).items():
            where = f"with weights {weights}, which a server may send, beside a record of the numbers {numbers}"
            advice = "decide for each record alone, as torch.where does, and let numbers that are not finite pass"
            try:
                beside = computed(theta, last)
            except Exception as error:
                raise ConfigError(f"training it raises {type(error).__name__} {where}: {error}; {advice}") from error
            for (what, before), (_, after) in zip(alone, beside, strict=True):
                if not torch.allclose(before, after, rtol=_BESIDE_BOUND, atol=_BESIDE_FLOOR, equal_nan=True):
                    raise ConfigError(f"{_MIXED.format(what)} It does so {where}: {advice}")


def _large_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, (p,), under which large records have large activations and small ones small: biases are zero."""
    parameters = dict(module.named_parameters())
    drawn = synthetic.parameters(module).split([parameter.numel() for parameter in parameters.values()])

    def whole(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parts = []
        for (name, parameter), values in zip(parameters.items(), drawn, strict=True):
            kept = torch.zeros_like(values) if name.endswith("bias") else values
            parts.append(change(values) if parameter.dim() > 1 else kept)
        return torch.cat(parts)

    for scale in (1.0, 1e12, 1e24, 1e36):  # in steps of 1 / _SMALL
        yield f"of about {scale:g}", whole(partial(torch.mul, scale))
    yield f"of {_LARGEST:g}", whole(partial(torch.full_like, fill_value=_LARGEST))


@torch.no_grad()
def _logits(module: nn.Module, theta: torch.Tensor, x: torch.Tensor, classes: int) -> float:
    """Largest relative error; ConfigError for outputs that are not logits, random, or mix records."""
    module = copy.deepcopy(module).eval()
    fill(list(module.parameters()), theta)
    few = x[:RECORDS]
    evaluated = module(few)
    _check_form(evaluated, classes)
    module.train()
    with torch.random.fork_rng(devices=[]):
        trained, again = module(few), module(few)
    same = (
        "it gives other logits for the same records a second time: forward draws random numbers (F.dropout?), which only the "
        "task's private key may, keeps state between calls, or changes its input in place (x -= 1); remove that"
    )
    mode = "its logits in training differ from those in evaluation: dropout or normalisation over the batch inside forward?"
    errors = [_logits_error(again, trained, same), _logits_error(trained, evaluated, mode)]
    mixed = _MIXED.format("logits change")
    errors += _with_others(module, x, trained, mixed)
    # A TransformerEncoder computes a whole batch in another way if no record has padding between other codes.
    nested = f"{mixed} It does so in evaluation only: give nn.TransformerEncoder enable_nested_tensor=False"
    return max(errors + _with_others(module.eval(), x, evaluated, nested))


def _with_others(module: nn.Module, x: torch.Tensor, expected: torch.Tensor, mixed: str) -> list[float]:
    """Errors of the first records' logits alone and in one batch with the rest of `x`."""
    together = module(x)
    if len(together) != len(x):
        raise ConfigError(mixed)
    alone = torch.cat([module(row[None]) for row in x[:RECORDS]])
    return [_logits_error(logits, expected, mixed) for logits in (alone, together[:RECORDS])]


def _check_form(logits: object, classes: int) -> None:
    wanted = (RECORDS, classes)
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(f"its logits for {RECORDS} records must be float32 {wanted}, got {type(logits).__name__}")
    if tuple(logits.shape) != wanted or logits.dtype != torch.float32:
        raise ConfigError(
            f"its logits for {RECORDS} records must be float32 {wanted}, got {logits.dtype} {tuple(logits.shape)}"
        )
    if not logits.isfinite().all():
        raise ConfigError("its logits are not finite")


def _logits_error(found: torch.Tensor, expected: torch.Tensor, problem: str) -> float:
    if found.shape != expected.shape:
        raise ConfigError(problem)
    error = float((found - expected).abs().max()) / max(float(expected.abs().max()), _LOGITS_FLOOR)
    if not error <= _LOGITS_BOUND:
        raise ConfigError(problem)
    return error


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        advice = "torch.nn.utils.weight_norm? Use torch.nn.utils.parametrizations.weight_norm"
        raise ConfigError(f"it cannot be copied, which raised {type(error).__name__}: {error} ({advice})") from error


@torch.no_grad()
def _where(module: nn.Module, x: torch.Tensor, error: Exception) -> str:
    """Batch and layer that raised, if a forward pass did."""
    module, entered = copy.deepcopy(module).train(), []
    for name, child in module.named_modules():
        child.register_forward_pre_hook(lambda child, given, name=name: entered.append((name, child, given)))
        child.register_forward_hook(lambda *_: entered.__delitem__(-1))
    for batch in (x[:RECORDS], x[:1], x):
        entered.clear()
        try:
            module(batch)
        except Exception:
            return f"on a batch of shape {tuple(batch.shape)} raised {type(error).__name__}: {error}{_layer(*entered[-1])}"
    return f"raised {type(error).__name__}: {error}"


def _layer(name: str, child: nn.Module, given: tuple[Any, ...]) -> str:
    if not name:
        return ""
    kind = type(child).__name__ if any(True for _ in child.children()) else repr(child)
    shapes = ", ".join(str(tuple(value.shape)) for value in given if isinstance(value, torch.Tensor))
    return f", in layer {name!r} ({kind}), whose input has the shape {shapes}"
