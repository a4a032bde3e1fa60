"""The DP-SGD engine: exact gradients, rigorous clipping, removal by selection, sampling, noise, evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from dpcfl_net import models
from dpcfl_net.errors import ConfigError
from dpcfl_net.privacy import clipping, dpsgd
from dpcfl_net.privacy.dpsgd import Evaluator, Trainer, flatten
from dpcfl_net.privacy.fast_path import FastPath, plan
from dpcfl_net.types import DPSGDSlot, SampledGaussian

KEY = b"sixteen bytes ok"
torch.set_num_threads(1)


class Images:
    """Records in memory, padded on request; remembers the shapes and rows that were asked for."""

    def __init__(self, n: int, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.x = torch.from_numpy(rng.random((n, *shape), dtype=np.float32))
        self.y = torch.from_numpy(rng.integers(0, classes, n))
        self.sizes: list[int] = []
        self.rows: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(size)
        self.rows.append(rows.tolist())
        x, y = torch.zeros(size, *self.x.shape[1:]), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self.x[rows], self.y[rows]
        return x, y


def small(**changes: object) -> Trainer:
    settings = {"clip": 1.0, "learning_rate": 0.1, "batch_size": 8, "path": "auto"} | changes
    return Trainer(models.build("digits-cnn", (1, 8, 8), 10), **settings)


def start(name: str = "digits-cnn", shape: tuple[int, ...] = (1, 8, 8)) -> np.ndarray:
    return models.initial(name, shape, 10, 0)


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
        nn.Conv2d(6, 5, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=2, dilation=2, bias=False),
        nn.Flatten(), nn.Linear(4 * 2 * 2, 7), nn.ReLU(), nn.Linear(7, 10, bias=False),
    )  # fmt: skip


CASES = {
    "cnn": (lambda: models.build("cnn", (1, 28, 28), 10), (1, 28, 28)),
    "digits-cnn": (lambda: models.build("digits-cnn", (1, 8, 8), 10), (1, 8, 8)),
    "cifar-cnn": (lambda: models.build("cifar-cnn", (3, 32, 32), 10), (3, 32, 32)),
    "linear": (lambda: models.build("linear", (1, 8, 8), 10), (1, 8, 8)),
    "odd": (odd, (2, 13, 9)),
}


@pytest.mark.parametrize("path", ["fast", "opacus"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Full backward hook")
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_resnet18_goes_through_opacus_and_equals_vmap_of_grad() -> None:
    module = models.build("resnet18", (3, 32, 32), 10)
    data, theta = Images(3, (3, 32, 32)), models.initial("resnet18", (3, 32, 32), 10, 0).astype(np.float64)
    gradients = per_record(module, theta, data, np.arange(3))
    trainer = Trainer(module, clip=float(gradients.norm(dim=1).median()), learning_rate=0.1, batch_size=1)
    assert trainer.path == "opacus"
    expected = clipped(gradients, trainer.clip)
    assert np.abs(trainer.clipped_sum(theta, data, np.arange(3)) - expected).max() < 1e-9 * np.abs(expected).max()


@pytest.mark.parametrize("path", ["fast", "opacus"])
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


@pytest.mark.parametrize("terms", [1, 511, 512, 513, 12_800])
def test_squared_norms_are_upper_bounds_and_tight(terms: int) -> None:
    rng = np.random.default_rng(terms)
    rows = np.stack([rng.normal(size=terms), np.full(terms, 0.1), np.full(terms, 1e-20), np.linspace(1e-6, 1, terms) ** 8, np.full(terms, 1e15)])
    values = torch.from_numpy(rows.astype(np.float32))
    exact = np.array([math.fsum(float(v) ** 2 for v in row) for row in values])
    bound = clipping.Rows(values.clone(), 0).squared_norms().numpy()
    assert (bound >= exact).all()
    assert (bound <= exact * 1.0002 + terms * 2e-38).all()


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
            sums.append(clipping.clipped_sum([part], usable, 1.0, m, torch.float32).double().numpy())
        assert np.linalg.norm(sums[0] - sums[1]) <= 1.0
    assert clipping.reserved_clip(1.0, slots, torch.float32) > 0.999


def overflowing(how: str) -> tuple[np.ndarray, Images]:
    """Finite weights under which record 5 alone overflows: its one pixel of 2 lets the first channel pass 5e37 instead of 0.

    Then "inf": the next layer multiplies that by 1e4; "nan": it meets inf - inf; "norm": all stays finite but for the squared norm.
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


@pytest.mark.parametrize("path", ["fast", "opacus"])
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
    engine = FastPath(plan(models.build("digits-cnn", (1, 8, 8), 10)) or [])
    logits, parts = engine.gradients(torch.from_numpy(theta), data.x, data.y)
    finite = torch.isfinite(torch.stack([part.squared_norms() for part in parts])).all(0)
    assert finite.tolist() == [row != 5 for row in range(12)]
    assert bool(torch.isfinite(logits[5]).all()) == (how == "norm")


def test_training_on_overflowing_records_stays_finite_with_the_same_noise() -> None:
    theta, data = overflowing("inf")
    slot = DPSGDSlot("train", 1, 1)
    trainer = small(clip=0.01)
    with_it, _ = trainer.train(theta, data, slot, 1.0, KEY)
    data.x[5] = torch.nan
    without, _ = trainer.train(theta, data, slot, 1.0, KEY)
    assert np.isfinite(with_it).all()
    assert np.array_equal(with_it, without)


@pytest.mark.parametrize("path", ["fast", "opacus"])
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


def test_every_physical_batch_has_one_shape() -> None:
    trainer, data = small(), Images(100)
    trainer.train(start(), data, DPSGDSlot("train", 0.08, 30), 1.0, KEY)
    trainer.train(start(), data, DPSGDSlot("train", 1, 1), 1.0, KEY)
    assert set(data.sizes) == {trainer.slots}


def test_a_full_batch_uses_every_record_once() -> None:
    data = Images(50)
    small().train(start(), data, DPSGDSlot("first", 1, 2), 1.0, KEY)
    assert [row for rows in data.rows for row in rows] == [*range(50), *range(50)]


def test_poisson_batches_are_independent_coins() -> None:
    rng = dpsgd.stream(KEY, "batches")
    draws = [dpsgd.poisson_rows(400, 0.1, rng) for _ in range(2000)]
    sizes = np.array([len(d) for d in draws])
    deviation = math.sqrt(400 * 0.1 * 0.9)
    assert abs(sizes.mean() - 40) < 6 * deviation / math.sqrt(2000)
    assert abs(sizes.var() / deviation**2 - 1) < 6 * math.sqrt(2 / 2000)
    each = np.bincount(np.concatenate(draws), minlength=400)
    assert np.abs(each - 200).max() < 7 * math.sqrt(2000 * 0.09)
    assert all((np.diff(d) > 0).all() for d in draws)


def test_empty_batches_are_noise_only_steps() -> None:
    data = Images(4)
    theta, event = small(batch_size=1).train(start(), data, DPSGDSlot("train", 1e-6, 3), 1.0, KEY)
    assert data.rows == []
    assert not np.array_equal(theta, start())
    assert event == SampledGaussian(1.0, 1e-6, 3)


@pytest.mark.parametrize("path", ["fast", "opacus"])
def test_a_step_is_the_sum_plus_noise_over_the_expected_batch(path: str) -> None:
    data, theta = Images(60), start()
    trainer = small(clip=0.5, learning_rate=0.25, path=path)
    tiny, event = trainer.train(theta, data, DPSGDSlot("train", 0.2, 1), 1e-9, KEY)
    rows = np.concatenate([np.array(r, dtype=np.int64) for r in data.rows])
    assert 0 < len(rows) < 60
    expected = theta - 0.25 * trainer.clipped_sum(theta, data, rows) / (0.2 * 60)
    np.testing.assert_allclose(tiny, expected, atol=2e-7)
    assert event == SampledGaussian(1e-9, 0.2, 1)


def test_noise_has_the_stated_deviation_whatever_torch_is_seeded_with() -> None:
    data, theta, trainer = Images(10), np.zeros(6090, dtype=np.float32), small(clip=0.5, learning_rate=1.0)
    data.x[:] = torch.nan  # every record is removed: what remains is the noise
    slot = DPSGDSlot("train", 1, 1)
    torch.manual_seed(0)
    first, _ = trainer.train(theta, data, slot, 3.0, KEY)
    torch.manual_seed(1)
    again, _ = trainer.train(theta, data, slot, 3.0, KEY)
    other, _ = trainer.train(theta, data, slot, 3.0, KEY[::-1])
    assert np.array_equal(first, again)
    noise = -first * 10 / (0.5 * 3.0)
    assert abs(noise.std() - 1) < 6 / math.sqrt(2 * 6090)
    assert abs(np.corrcoef(first, other)[0, 1]) < 6 / math.sqrt(6090)
    grid = noise * 2.0**20
    assert np.abs(grid - np.rint(grid))[np.abs(grid) < 2**18].max() < 0.1


def test_steps_draw_fresh_noise() -> None:
    data, trainer = Images(10), small(learning_rate=1.0)
    data.x[:] = torch.nan
    zero = np.zeros(6090, dtype=np.float32)
    one, _ = trainer.train(zero, data, DPSGDSlot("train", 1, 1), 1.0, KEY)
    two, _ = trainer.train(zero, data, DPSGDSlot("train", 1, 2), 1.0, KEY)
    second = two - one
    assert abs(second.std() / one.std() - 1) < 0.1
    assert abs(np.corrcoef(one, second)[0, 1]) < 6 / math.sqrt(6090)


def test_the_same_task_gives_the_same_bits_and_leaves_theta_alone() -> None:
    theta, data = start(), Images(60)
    before = theta.copy()
    slot = DPSGDSlot("train", 0.2, 5)
    a, _ = small().train(theta, data, slot, 1.0, KEY)
    b, _ = small().train(theta, data, slot, 1.0, KEY)
    assert np.array_equal(a, b)
    assert a.dtype == np.float32
    assert np.array_equal(theta, before)


def test_a_pull_acts_after_the_noise_and_without_one_changes_nothing() -> None:
    theta, data, slot = start(), Images(60), DPSGDSlot("train", 0.2, 1)
    trainer = small()
    free, _ = trainer.train(theta, data, slot, 1.0, KEY)
    centre = np.zeros_like(theta)
    zero, _ = trainer.train(theta, data, slot, 1.0, KEY, pull=(0.0, centre))
    pulled, _ = trainer.train(theta, data, slot, 1.0, KEY, pull=(0.5, centre))
    assert np.array_equal(free, zero)
    np.testing.assert_allclose(free - pulled, 0.1 * 0.5 * theta, atol=1e-6)


def test_training_learns() -> None:
    data = Images(300)
    data.x += 3 * torch.nn.functional.one_hot(data.y, 64).view(-1, 1, 8, 8)
    trained, _ = small(learning_rate=0.5, batch_size=32).train(start(), data, DPSGDSlot("train", 0.1, 150), 0.5, KEY)
    before, _ = Evaluator(models.build("digits-cnn", (1, 8, 8), 10)).accuracy_and_loss(start(), data)
    after, _ = Evaluator(models.build("digits-cnn", (1, 8, 8), 10)).accuracy_and_loss(trained, data)
    assert before < 0.3
    assert after > 0.6


@pytest.mark.parametrize(
    ("layer", "word"),
    [(nn.BatchNorm2d(4), "BatchNorm2d"), (nn.Dropout(0.5), "Dropout"), (nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d")],
)
def test_layers_without_per_record_gradients_are_named(layer: nn.Module, word: str) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(4 * 36, 10))
    with pytest.raises(ConfigError, match=f"'1'.*{word}"):
        Trainer(module, clip=1.0, learning_rate=0.1, batch_size=8)


@pytest.mark.parametrize("changes", [{"clip": 0.0}, {"clip": math.nan}, {"learning_rate": -1.0}, {"batch_size": 0}, {"path": "slow"}])
def test_settings_out_of_range_are_configuration_errors(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        small(**changes)


def test_the_fast_path_refuses_what_it_cannot_do() -> None:
    grouped = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4 * 36, 10))
    with pytest.raises(ConfigError, match="fast path"):
        Trainer(grouped, clip=1.0, learning_rate=0.1, batch_size=8, path="fast")
    assert Trainer(grouped, clip=1.0, learning_rate=0.1, batch_size=8).path == "opacus"


@pytest.mark.parametrize(("theta", "rate", "noise"), [(np.zeros(5, np.float32), 1, 1.0), (start(), 0.0, 1.0), (start(), 1, 0.0)])
def test_bad_tasks_are_refused_before_data_is_touched(theta: np.ndarray, rate: float, noise: float) -> None:
    data = Images(10)
    with pytest.raises(ValueError):
        small().train(theta, data, DPSGDSlot("train", rate, 1), noise, KEY)
    assert data.rows == []


def reference(module: nn.Module, theta: np.ndarray, data: Images) -> torch.Tensor:
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta), module.parameters())
    with torch.no_grad():
        return module(data.x)


@pytest.mark.parametrize("n", [1, 128, 200])
def test_evaluation_equals_the_plain_model_and_uses_one_shape(n: int) -> None:
    data, theta, module = Images(n), start(), models.build("digits-cnn", (1, 8, 8), 10)
    logits = reference(module, theta, data)
    evaluator = Evaluator(module)
    correct = int((logits.argmax(1) == data.y).sum())
    assert evaluator.count_correct(theta, data) == correct
    accuracy, loss = evaluator.accuracy_and_loss(theta, data)
    assert accuracy == pytest.approx(correct / n)
    assert loss == pytest.approx(float(F.cross_entropy(logits, data.y)), rel=1e-5)
    assert set(data.sizes) == {dpsgd.EVALUATION_SLOTS}


def test_ties_go_to_the_smallest_index_and_non_finite_logits_are_wrong() -> None:
    module = models.build("linear", (1, 8, 8), 10)
    data = Images(20)
    data.y[:] = torch.arange(20) % 2
    flat = np.zeros(650, dtype=np.float32)
    assert Evaluator(module).count_correct(flat, data) == 10
    data.x[0] = torch.nan
    assert Evaluator(module).count_correct(flat, data) == 9
    assert Evaluator(module).accuracy_and_loss(flat, data) == (9 / 20, math.inf)


def test_evaluating_nothing_is_an_error_for_rates_and_zero_for_counts() -> None:
    module, data = models.build("linear", (1, 8, 8), 10), Images(0)
    assert Evaluator(module).count_correct(np.zeros(650, dtype=np.float32), data) == 0
    with pytest.raises(ValueError, match="no records"):
        Evaluator(module).accuracy_and_loss(np.zeros(650, dtype=np.float32), data)
