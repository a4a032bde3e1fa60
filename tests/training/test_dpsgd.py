"""Clipped sums of the DP-SGD engine: exact gradients, rigorous clipping, removal by selection, rows on their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from records import Images, small, start
from torch import nn
from torch.func import functional_call, grad, vmap

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy import clipping
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.training.fast_path import FastPath
from dpcfl_net.training.gradient_engines import PATHS, set_processor_flags
from dpcfl_net.training.layers import fast_layers
from dpcfl_net.training.models import flatten
from dpcfl_net.training.sgd import PlainSGD

torch.set_num_threads(1)


def per_record(module: nn.Module, theta: np.ndarray, data: Images, rows: np.ndarray) -> torch.Tensor:
    """Reference: (n, p) float64 gradients by torch.func."""
    values, at = {}, 0
    for name, p in module.named_parameters():
        values[name] = torch.from_numpy(theta[at : at + p.numel()]).view_as(p).double()
        at += p.numel()

    def loss(q: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(module, q, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(values, data.x[rows].double(), data.y[rows])
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


def clipped(gradients: torch.Tensor, clip: float) -> np.ndarray:
    return ((clip / gradients.norm(dim=1)).clamp(max=1) @ gradients).numpy()


def odd() -> nn.Module:
    """Strides, uneven padding, no biases, wide pooling: what the fast path takes beyond the named models."""
    return nn.Sequential(
        nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), nn.MaxPool2d(3, 2, 1), nn.ReLU(),
        nn.Conv2d(6, 6, 5, stride=(1, 2), padding=2), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=2, dilation=2, bias=False),
        nn.Flatten(), nn.Linear(4 * 4 * 2, 7), nn.ReLU(), nn.Linear(7, 10, bias=False),
    )  # fmt: skip


def wide() -> nn.Module:
    """Overlapping pools on both sides of a convolution whose rows are computed in groups, and a rectifier after flattening."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Conv2d(16, 5, 3, padding=1), nn.MaxPool2d(3, 2, 1),
        nn.Flatten(), nn.ReLU(), nn.Linear(5 * 6 * 5, 10),
    )  # fmt: skip


CASES = {
    "cnn": (lambda: models.build("cnn", (1, 28, 28), 10), (1, 28, 28)),
    "digits-cnn": (lambda: models.build("digits-cnn", (1, 8, 8), 10), (1, 8, 8)),
    "cifar-cnn": (lambda: models.build("cifar-cnn", (3, 32, 32), 10), (3, 32, 32)),
    "linear": (lambda: models.build("linear", (1, 8, 8), 10), (1, 8, 8)),
    "odd": (odd, (2, 13, 9)),
    "wide": (wide, (1, 12, 10)),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_clipped_sums_equal_vmap_of_grad_in_float64(name: str, path: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    module = make()
    data, rows, theta = Images(12, shape), np.array([11, 0, 3, 4, 7, 8, 2]), flatten(module).astype(np.float64)
    gradients = per_record(module, theta, data, rows)
    # Where clipping acts, norms are inflated on purpose, by up to 3e-12 in float64.
    for clip, tolerance in ((1e6, 1e-14), (float(gradients.norm(dim=1).median()), 5e-12)):
        expected = clipped(gradients, clip)
        trainer = Trainer(module, clip=clip, learning_rate=0.1, batch_size=2, path=path)
        assert trainer.path == path
        # Several pieces, the last one padded.
        assert len(rows) % trainer.slots
        got = trainer.clipped_sum(theta, data, rows)
        assert np.abs(got - expected).max() < tolerance * np.abs(expected).max()
        single = trainer.clipped_sum(theta.astype(np.float32), data, rows)
        assert np.abs(single - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e4, 1e12])
def test_no_record_counts_for_more_than_clip_whatever_its_scale(path: str, scale: float) -> None:
    trainer, data = small(clip=0.3, path=path), Images(30)
    theta = start()
    theta[-1290:] *= scale
    for row in range(30):
        norm = np.linalg.norm(trainer.clipped_sum(theta, data, np.array([row])))
        assert norm <= 0.3
        if scale == 1e4:
            assert norm == 0 or norm > 0.29


@pytest.mark.parametrize("clip", [1e-6, 1.0])
@pytest.mark.parametrize(("signal", "side"), [(1e20, 1e25), (1e-12, 3e37)])
def test_factors_below_the_normal_numbers_do_not_round_a_record_up(clip: float, signal: float, side: float) -> None:
    """Denormal numbers have few bits: a factor, or its product with a signal, could round up to twice its value. GPUs keep them."""
    signals = torch.tensor([[signal, -signal]]) * torch.linspace(0.5, 1.5, 100)[:, None]
    for each in (signals * clip if signal < 1 else signals).split(1):
        part = clipping.Outer(each.clone(), torch.tensor([[side, 0.0, 0.0]]), 0, False)
        assert clipping.clipped_sum([part], torch.tensor([True]), clip, torch.empty(6)).double().norm() <= clip


def test_a_model_crafted_for_tiny_factors_gives_a_record_no_more_than_clip() -> None:
    """Inputs of 1e25 and signals of 1e20 in the second layer, though its outputs are 1, since its weights are 0."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 2, bias=False))
    engine = FastPath(fast_layers(module, (1,)))
    theta = torch.tensor([1e25, 0.0, 1.0, 1e20, -1e20])
    for x in torch.linspace(0.2, 2, 100):
        logits, parts = engine.gradients(theta, x.view(1, 1), torch.tensor([1]))
        assert logits.isfinite().all()
        assert clipping.clipped_sum(parts, torch.tensor([True]), 1.0, torch.empty(5)).double().norm() <= 1


@pytest.mark.parametrize("terms", [1, 511, 512, 513, 12_800])
def test_squared_norms_are_upper_bounds_and_tight(terms: int) -> None:
    rng = np.random.default_rng(terms)
    flat = [np.full(terms, value) for value in (0.1, 1e-20, 1e15)]
    rows = np.stack([rng.normal(size=terms), np.linspace(1e-6, 1, terms) ** 8, *flat])
    values = torch.from_numpy(rows.astype(np.float32))
    exact = np.array([math.fsum(float(v) ** 2 for v in row) for row in values])
    bound = clipping.Rows(values.clone(), 0).squared_norms().numpy()
    assert (bound >= exact).all()
    assert (bound <= exact * 1.0002 + terms * 2e-38).all()


def test_shorter_formats_that_a_model_has_turned_on_are_off_in_a_step() -> None:
    convolutions = torch.backends.mkldnn.conv
    convolutions.fp32_precision = "bf16"
    torch.set_float32_matmul_precision("medium")
    set_processor_flags()
    assert convolutions.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_the_reserve_covers_rounding_in_the_sum() -> None:
    rng = np.random.default_rng(0)
    slots, m = 40, 2000
    for _ in range(50):
        base = rng.normal(size=(slots, m)) * 10.0 ** rng.integers(-3, 4, size=(slots, 1))
        sums = []
        for drop in (False, True):
            usable = torch.ones(slots, dtype=torch.bool)
            usable[17] = not drop
            part = clipping.Rows(torch.from_numpy(base.astype(np.float32)), 0)
            sums.append(clipping.clipped_sum([part], usable, 1.0, torch.empty(m)).double().numpy())
        assert np.linalg.norm(sums[0] - sums[1]) <= 1.0
    assert clipping.reserved_clip(1.0, slots, torch.float32) > 0.999


def overflowing(how: str) -> tuple[np.ndarray, Images]:
    """Finite weights under which record 5 alone overflows: its one pixel of 2 lets the first channel pass 5e37, not 0.

    Then "inf": the next layer multiplies that by 1e4; "nan": it meets inf - inf; "norm": only the squared norm overflows.
    """
    data, theta = Images(12, seed=1), start()
    data.x[5, 0, 4, 4] = 2
    data.y[5] = 7
    first, biases = theta[:144].reshape(16, 9), theta[144:160]
    second, dense = theta[160:4768].reshape(32, 16, 9), theta[4800:6080].reshape(10, 128)
    first[0] = 0
    first[0, 4] = 1e38
    biases[0] = -1.5e38
    second[:, 0] = 0
    second[0, 0, 4] = 1e-12 if how == "norm" else 1e4
    if how == "nan":
        second[1, 0, 4] = 1e4
        dense[0, :4], dense[0, 4:8] = 1, -1
    return theta, data


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["inf", "nan", "norm"])
def test_a_record_that_overflows_is_dropped_bit_for_bit(path: str, how: str) -> None:
    theta, data = overflowing(how)
    trainer = small(path=path, batch_size=16)
    others = np.array([0, 1, 2, 3, 4, 6, 7])
    control = trainer.clipped_sum(theta, data, others)
    assert np.isfinite(control).all()
    assert np.abs(control).max() > 0
    # Last: what follows is padding either way. In the middle: the same slot emptied by another kind of defect.
    assert np.array_equal(trainer.clipped_sum(theta, data, np.append(others, 5)), control)
    middle = trainer.clipped_sum(theta, data, np.insert(others, 3, 5))
    data.x[5] = torch.nan
    assert np.array_equal(trainer.clipped_sum(theta, data, np.insert(others, 3, 5)), middle)
    np.testing.assert_allclose(middle, control, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["inf", "nan", "norm"])
def test_the_overflow_is_real_with_selection_off(how: str) -> None:
    theta, data = overflowing(how)
    engine = FastPath(fast_layers(models.build("digits-cnn", (1, 8, 8), 10)) or [])
    logits, parts = engine.gradients(torch.from_numpy(theta), data.x, data.y)
    finite = torch.isfinite(torch.stack([part.squared_norms() for part in parts])).all(0)
    assert finite.tolist() == [row != 5 for row in range(12)]
    assert bool(torch.isfinite(logits[5]).all()) == (how == "norm")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("clip", "learning_rate", "batch_size") for value in (float("nan"), "8", None, True, 0, -1)]
    + [("clip", 0.9e-9), ("clip", 1.1e9), ("batch_size", 2.5), ("batch_size", float("inf")), ("learning_rate", float("inf"))],
)
def test_a_trainer_names_a_setting_that_is_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must .*, got {value!r}"):
        Trainer(CASES["linear"][0](), **{"clip": 1.0, "learning_rate": 0.1, "batch_size": 8, name: value})


def test_training_refuses_an_empty_batch_and_noise_that_is_none_before_it_reads_data() -> None:
    trainer, data, slot = small(), Images(16), DPSGDSlot("train", 0.5, 1)
    with pytest.raises(ValueError, match=r"the expected batch is empty: 0 records at rate 0\.5"):
        trainer.train(start(), Images(0), slot, 1.0, bytes(32))
    for noise_multiplier in (math.nan, math.inf, -1.0, 0.0):
        with pytest.raises(ValueError, match="noise_multiplier must be "):
            trainer.train(start(), data, slot, noise_multiplier, bytes(32))
    assert data.sizes == []


@pytest.mark.parametrize("room", [0, -1, 2.5, "3", True])
def test_a_room_holds_records(room: Any) -> None:
    trainer, data, theta = small(), Images(16), start()
    for use in (
        lambda: trainer.train(theta, data, DPSGDSlot("train", 0.5, 1), 1.0, bytes(32), room=room),
        lambda: trainer.clipped_sum(theta, data, np.arange(3), room=room),
        lambda: trainer.check_batches((1, 8, 8), room=room),
    ):
        with pytest.raises(ValueError, match=f"room must be a whole number of 1 or more, .*, got {room!r}"):
            use()


@pytest.mark.parametrize("kind", ["float16", "int64", "bool", "complex64"])
def test_clipped_sums_are_of_float32_or_float64(kind: str) -> None:
    with pytest.raises(ValueError, match=f"the model is of {kind}: must be of float32 or float64"):
        small().clipped_sum(start().astype(kind), Images(16), np.arange(3))


def test_a_mean_loss_needs_a_record() -> None:
    sgd = PlainSGD(models.build("digits-cnn", (1, 8, 8), 10), epochs=1, batch_size=8, lr=0.1)
    with pytest.raises(ValueError, match="no records to compute a mean loss on"):
        sgd.mean_losses(start()[None], Images(0))


def test_a_record_with_infinite_loss_is_dropped_though_its_gradient_is_finite() -> None:
    data, theta = Images(4), np.zeros(650, dtype=np.float32)
    weights = theta[:640].reshape(10, 64)
    weights[0], weights[1] = 5e36, -5e36
    data.x[:3] = 0
    data.x[3] = 1
    data.y[:] = 1
    trainer = Trainer(models.build("linear", (1, 8, 8), 10), clip=1.0, learning_rate=0.1, batch_size=8)
    logits, parts = trainer._engine.gradients(torch.from_numpy(theta), data.x, data.y)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(parts[0].squared_norms()).all()
    assert not torch.isfinite(F.cross_entropy(logits[3:], data.y[3:]))
    assert np.array_equal(trainer.clipped_sum(theta, data, np.arange(4)), trainer.clipped_sum(theta, data, np.arange(3)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["cnn", "digits-cnn"])
def test_rows_do_not_depend_on_their_neighbours(name: str, path: str) -> None:
    make, shape = CASES[name]
    trainer = Trainer(make(), clip=1.0, learning_rate=0.1, batch_size=8, path=path)
    theta = torch.from_numpy(start(name, shape))
    x, y = Images(trainer.slots, shape, seed=2).batch(np.arange(trainer.slots), trainer.slots)
    other, other_y = Images(trainer.slots, shape, seed=3).batch(np.arange(trainer.slots), trainer.slots)
    other[1] = torch.inf
    for row in (0, 3, trainer.slots - 1):
        mixed, mixed_y = other.clone(), other_y.clone()
        mixed[row], mixed_y[row] = x[row], y[row]
        logits, parts = trainer._engine.gradients(theta, x, y)
        logits_mixed, parts_mixed = trainer._engine.gradients(theta, mixed, mixed_y)
        assert torch.equal(logits[row], logits_mixed[row])
        for a, b in zip(parts, parts_mixed, strict=True):
            for field in ("values", "signals", "inputs"):
                if hasattr(a, field):
                    assert torch.equal(getattr(a, field)[row], getattr(b, field)[row])
