"""Can DP-SGD train this network? Its parameters, its rows on their own, and the engine's gradients against autograd's."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.errors import ConfigError
from dpcfl_net.privacy.dpsgd import Evaluator, Trainer, flatten

RECORDS = 3
_LOGITS, _GRADIENTS = 1e-5, 1e-3  # what rounding may change: of the largest logit, of a gradient's norm


def check(module: nn.Module, input_shape: tuple[int, ...], classes: int, by_record: bool = True) -> None:
    """ConfigError with every reason found why clipping record by record would fail, or bound nothing, on `module`.

    by_record False: why evaluating it would, for what is protected a client at a time. Tried on three made-up records of `input_shape`, at the values that the parameters have. It finds mistakes, not malice:
    code that waits for a certain record can mix others in.
    """
    problems = _parameters(module)
    if problems:
        raise ConfigError(problems)
    # Either names BatchNorm, Dropout and buffers.
    trainer = Trainer(module, clip=1e9, learning_rate=1.0, batch_size=RECORDS) if by_record else None
    if trainer is None:
        Evaluator(module)
    made_up = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, *input_shape, generator=made_up)
    y = torch.arange(RECORDS) % classes
    try:
        problem = _logits(copy.deepcopy(module), x, classes)
        if problem is None and trainer is not None:
            problem = _gradients(copy.deepcopy(module), trainer, x, y)
    except Exception as error:
        shape = tuple(x.shape)
        raise ConfigError(f"training it on a batch of shape {shape} raised {type(error).__name__}: {error}") from error
    if problem:
        raise ConfigError(problem)


def _parameters(module: nn.Module) -> list[str]:
    found = []
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            found.append(f"parameter {name!r} has no shape yet: give lazy layers their sizes")
        elif parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            found.append(f"parameter {name!r} is {parameter.dtype} on {parameter.device}: must be torch.float32 on the CPU")
        elif not parameter.requires_grad:
            found.append(f"parameter {name!r} is frozen (requires_grad is False): every parameter is trained and sent")
    return found if found or any(True for _ in module.parameters()) else ["it has no parameters to train"]


@torch.no_grad()
def _logits(module: nn.Module, x: torch.Tensor, classes: int) -> str | None:
    evaluated = module.eval()(x)
    wanted = (RECORDS, classes)
    if not isinstance(evaluated, torch.Tensor) or tuple(evaluated.shape) != wanted or evaluated.dtype != torch.float32:
        got = f"{evaluated.dtype} {tuple(evaluated.shape)}" if isinstance(evaluated, torch.Tensor) else type(evaluated).__name__
        return f"its logits for {RECORDS} records must be float32 {wanted}, got {got}"
    if not evaluated.isfinite().all():
        return "its logits are not finite"
    module.train()
    with torch.random.fork_rng(devices=[]):
        trained, again = module(x), module(x)
    alone = torch.cat([module(row[None]) for row in x])
    bound = _LOGITS * max(1.0, evaluated.abs().max().item())
    if not _close(trained, again, bound):
        return (
            "it gives other logits for the same records a second time: what it draws does not come from the task's private key"
        )
    if not _close(trained, evaluated, bound):
        return "its logits in training are not those in evaluation: dropout or normalisation over the batch inside forward?"
    if not _close(trained, alone, bound):
        return "a record's logits change with the other records of its batch, so no record's gradient can be clipped"
    return None


def _close(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= bound).all())


class _Few:
    """The made-up records, as the engine takes them."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._y)

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.zeros(size, *self._x.shape[1:]), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self._x[rows], self._y[rows]
        return x, y


def _gradients(module: nn.Module, trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> str | None:
    """The engine's sum for each record, and for all together, against autograd on one record at a time."""
    names, parameters = zip(*module.train().named_parameters(), strict=True)
    true = []
    for row, label in zip(x, y, strict=True):
        loss = F.cross_entropy(module(row[None]), label[None])
        each = torch.autograd.grad(loss, parameters, allow_unused=True)
        unused = [name for name, gradient in zip(names, each, strict=True) if gradient is None]
        if unused:
            return f"its logits do not depend on the parameters {', '.join(unused)}: remove them"
        true.append(torch.cat([gradient.reshape(-1) for gradient in each]).double().numpy())
    theta, data = flatten(module), _Few(x, y)
    for rows in [[k] for k in range(RECORDS)] + [list(range(RECORDS))]:
        expected = np.sum([true[k] for k in rows], axis=0)
        off = np.linalg.norm(trainer.clipped_sum(theta, data, np.array(rows)) - expected)
        if not off <= _GRADIENTS * np.linalg.norm(expected) + 1e-6:
            return (
                f"the {trainer.path} engine's per-record gradients of it are not autograd's: does a layer get its input "
                "in a shape whose first side is not the batch?"
            )
    return None
