"""Real models: which the engine takes, with what gradient error, and which it refuses with what advice.

`pytest tests/training/test_real_models.py -rP` prints a row for each, `-m "slow or not slow"` with the largest ones.
"""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from real_models import ATTACKS, CLASSES, REFUSED, TAKEN, Case, packed, zeroed
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training import model_check, models, synthetic
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.training.opacus_path import OpacusPath
from dpcfl_net.training.sgd import PlainSGD

torch.set_num_threads(1)
ERROR = 1e-4  # of a record's gradient, in L2, in float32


class Given:
    """Records as the engine takes them."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.zeros(size, *self.x.shape[1:]), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self.x[rows], self.y[rows]
        return x, y


def moved(module: nn.Module) -> torch.Tensor:
    """Parameter values some way from the first ones, none of them zero."""
    draw = torch.Generator().manual_seed(5)
    return torch.cat(
        [
            (
                p.detach() + torch.randn(p.shape, generator=draw) / math.sqrt(max(9, p[0].numel() if p.dim() > 1 else 9))
            ).flatten()
            for p in module.parameters()
        ]
    )


def alone(module: nn.Module, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """(p,) by autograd on one record."""
    torch.nn.utils.vector_to_parameters(theta, module.parameters())
    module.zero_grad()
    F.cross_entropy(module.train()(x[None]), y[None]).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()]).double().numpy()


def largest_error(module: nn.Module, shape: tuple[int, ...]) -> float:
    """Of three records' gradients from `Trainer` one at a time, and of their sum from one batch: the largest, relative in L2."""
    data = Given(synthetic.records(module, shape, 3), torch.tensor([1, 0, CLASSES - 1]))
    theta = moved(module)
    trainer = Trainer(module, clip=1e9, learning_rate=1.0, batch_size=2, input_shape=shape)
    true = [alone(module, theta, x, y) for x, y in zip(data.x, data.y, strict=True)]
    errors = []
    for rows in ([0], [1], [2], [0, 1, 2]):
        expected = np.sum([true[row] for row in rows], axis=0)
        found = trainer.clipped_sum(theta.numpy(), data, np.array(rows))
        errors.append(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return float(max(errors))


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def cases(group: dict[str, Case]) -> list:
    return [pytest.param(name, id=name, marks=[pytest.mark.slow] * case.slow) for name, case in group.items()]


@pytest.mark.parametrize("name", cases(TAKEN))
def test_it_is_taken_and_its_gradients_are_autograds(name: str) -> None:
    case = TAKEN[name]
    module = built(case)
    start = time.perf_counter()
    report = model_check.check(module, case.shape, CLASSES)
    seconds = time.perf_counter() - start
    error = largest_error(module, case.shape)
    print(
        f"{name:36} taken    {report.path:6}  error {error:.0e}  {sum(p.numel() for p in module.parameters()):9,}  {seconds:4.1f} s"
    )
    assert report.path == case.path
    assert error <= ERROR
    assert report.gradient_error <= ERROR


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", cases(REFUSED | ATTACKS))
def test_it_is_refused_with_the_reason_and_nothing_else_is_said(name: str, capfd: pytest.CaptureFixture) -> None:
    case = (REFUSED | ATTACKS)[name]
    module = built(case)
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        with pytest.raises(ConfigError) as caught:
            model_check.check(module, case.shape, CLASSES)
    said = capfd.readouterr()
    (problem,) = caught.value.problems
    print(f"{name:36} refused  {problem}")
    assert [word for word in case.words if word not in problem] == []
    assert (said.out, said.err, remarks) == ("", "", [])


@pytest.mark.parametrize("name", [name for name in ATTACKS if "gradient" not in name])
def test_what_mixes_records_is_not_evaluated_either(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_check.check(built(ATTACKS[name]), ATTACKS[name].shape, CLASSES, by_record=False)
    assert ATTACKS[name].words[0] in str(caught.value)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_what_dp_sgd_cannot_train_may_be_evaluated_and_trained_plainly(name: str) -> None:
    report = model_check.check(built(REFUSED[name]), REFUSED[name].shape, CLASSES, by_record=False)
    assert (report.path, report.gradient_error) == (None, None)
    assert report.logits_error <= ERROR


def gradient_of_last(module: nn.Module, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(p,): Opacus' gradient of the last record of a batch."""
    with torch.no_grad():
        _, parts = OpacusPath(module).gradients(theta, x, torch.arange(len(x)) % CLASSES)
    return torch.cat([part.values[-1].flatten() for part in parts])


@pytest.mark.parametrize(
    "name", ["gain and head from zero", "batch mean behind LayerScale 0", "cumulative sum along the batch"]
)
def test_the_attack_is_real_and_its_first_values_hide_it(name: str) -> None:
    # The last record of a batch is watched: of a cumulative sum it sees all others.
    draw, module = torch.Generator().manual_seed(0), built(ATTACKS[name])
    x = torch.randn(8, 12, generator=draw)
    other = torch.cat([torch.randn(7, 12, generator=draw), x[7:]])
    first = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    hidden = [gradient_of_last(module, first, batch) for batch in (x, other)]
    assert torch.equal(*hidden)
    shown = [gradient_of_last(module, moved(module), batch) for batch in (x, other)]
    assert float((shown[0] - shown[1]).norm()) > 0.05 * float(shown[0].norm())


def test_a_zero_head_hides_what_an_engine_gets_wrong_at_the_first_values() -> None:
    module = TAKEN["circular padding"].build()
    zeroed(module[-1])
    with pytest.raises(ConfigError, match="not autograd's"):
        model_check.check(module, (3, 8, 8), CLASSES, path="opacus")
    assert model_check.check(module, (3, 8, 8), CLASSES).path == "vmap"


def test_an_engine_that_orders_records_by_their_length_is_not_taken() -> None:
    # Small batches: sorting more than 16 equal lengths changes the order too.
    with pytest.raises(ConfigError, match=r"no engine gives .* \(those of opacus are off by"):
        model_check.check(packed(), (12,), CLASSES, batch_size=8)


@pytest.mark.parametrize("name", ["opacus", "vmap"])
def test_an_engine_that_is_asked_for_is_taken(name: str) -> None:
    module = built(TAKEN["LayerNorm, GroupNorm"])
    report = model_check.check(module, (3, 8, 8), CLASSES, path=name)
    assert report.path == name
    assert report.gradient_error <= ERROR


NAMED = {"char-lstm": (9,), "char-transformer": (9,), "linear": (12,), "resnet18": (3, 16, 16)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet18")) for name in models.NAMES])
def test_models_by_name_pass_the_check(name: str) -> None:
    shape = NAMED.get(name, (3, 12, 12))
    module = models.build(name, shape, CLASSES)
    if name == "char-lstm":
        assert model_check.check(module, shape, CLASSES, by_record=False).path is None
        return
    report = model_check.check(module, shape, CLASSES)
    # A worker takes the engine of a model by name without trying it.
    assert report.path == Trainer(module, clip=1.0, learning_rate=0.1, batch_size=8).path
    assert report.gradient_error <= ERROR


@pytest.mark.parametrize("name", ["MLP on a sequence (rank 3)", "MLP on images (rank 4)"])
def test_a_linear_layer_on_rows_is_evaluated_and_trained_plainly_as_torch_does(name: str) -> None:
    module, shape = built(TAKEN[name]), TAKEN[name].shape
    data = Given(synthetic.records(module, shape, 20), torch.arange(20) % CLASSES)
    theta = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
    with torch.no_grad():
        expected = F.cross_entropy(module(data.x), data.y, reduction="none").numpy()
    evaluator = Evaluator(module, input_shape=shape)
    assert evaluator.path == "plain"
    np.testing.assert_allclose(evaluator.each(theta, data)[0], expected, rtol=1e-5)
    sgd = PlainSGD(module, epochs=1, batch_size=8, lr=0.1, input_shape=shape)
    np.testing.assert_allclose(sgd.mean_losses(np.stack([theta, theta]), data), expected.mean(), rtol=1e-5)
