"""Sizes of physical batches follow the coins of sampling alone, and a record's clipped gradient has the same bits in all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from records import KEY, Images, small, start
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy import clipping
from dpcfl_net.privacy.clipping import GradientBlock, Rows
from dpcfl_net.privacy.gram_clipping import PlaceSums
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import dpsgd, models, synthetic
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.training.engine import GradientEngine
from dpcfl_net.training.gradient_engines import choose
from dpcfl_net.training.physical_batches import LARGEST, likely_sizes, sizes, slots_for, unit

torch.set_num_threads(1)


def test_sizes_hold_the_drawn_records_with_less_than_a_unit_to_spare() -> None:
    for batch in (1, 4, 32, 64, 100, 256):
        slots = slots_for(batch)
        assert slots <= LARGEST
        for drawn in range(500):
            found = sizes(drawn, slots)
            assert drawn <= sum(found) < drawn + unit(slots)
            assert all(0 < size <= slots and size % unit(slots) == 0 for size in found)


def test_likely_sizes_are_those_of_most_draws() -> None:
    for records, rate in ((64, 0.5), (1000, 0.032), (300, 0.5), (10, 1.0)):
        slots = slots_for(round(records * rate))
        found = likely_sizes(records, rate, slots)
        assert found[0] in sizes(round(records * rate), slots)
        drawn = np.random.default_rng(0).binomial(records, rate, 2000)
        covered = np.mean([set(sizes(int(count), slots)) <= set(found) for count in drawn])
        assert covered > 0.92  # 0.95 less five standard deviations
    assert min(likely_sizes(1000, 0.032, slots_for(32))) > unit(slots_for(32))  # batches of a few records are rare
    assert likely_sizes(0, 0.5, 8) == []


def test_sizes_follow_the_coins_and_not_the_records() -> None:
    trainer, worlds = small(), [Images(100, seed=0), Images(100, seed=1)]
    worlds[1].x[7] = torch.nan
    for data in worlds:
        trainer.train(start(), data, DPSGDSlot("train", 0.08, 30), 1.0, KEY)
        trainer.train(start(), data, DPSGDSlot("train", 1, 1), 1.0, KEY)
    assert worlds[0].sizes == worlds[1].sizes
    assert len(set(worlds[0].sizes)) > 2


CASES = [("cnn", "fast"), ("digits-cnn", "fast"), ("digits-cnn", "opacus"), ("digits-cnn", "vmap"), ("resnet18", "deep")]
SHAPES = {"cnn": (1, 28, 28), "digits-cnn": (1, 8, 8), "resnet18": (3, 8, 8)}


@pytest.mark.parametrize(("name", "path"), CASES)
def test_a_gradient_has_the_same_bits_in_every_size_and_slot_that_is_used(name: str, path: str) -> None:
    shape, batch = SHAPES[name], 4 if name == "resnet18" else 24
    trainer = Trainer(models.build(name, shape, 10), clip=1.0, learning_rate=0.1, batch_size=batch, path=path)
    data, theta = Images(trainer.slots, shape, seed=5), start(name, shape)
    found = set()
    for drawn in [*range(1, trainer.slots, 3), trainer.slots]:
        trainer.clipped_sum(theta, data, np.arange(drawn))
        found.add(data.sizes[-1])  # a size before it was tried and had other bits on this processor
    used = sorted(found)
    blocks = {size: _gradients(trainer._engine, theta, data, np.arange(size) % 5) for size in used}
    for size in used:
        for here, largest in zip(blocks[size], blocks[used[-1]], strict=True):
            assert torch.equal(here, largest[torch.arange(size) % 5])


def _gradients(engine: GradientEngine, theta: np.ndarray, data: Images, rows: np.ndarray) -> list[torch.Tensor]:
    with torch.no_grad():
        logits, parts = engine.gradients(torch.from_numpy(theta), data.x[rows], data.y[rows])
    fields = [getattr(part, field) for part in parts for field in ("values", "signals", "inputs") if hasattr(part, field)]
    return [logits, *fields, *(part.squared_norms() for part in parts)]


class Shifting:
    """An engine whose gradients change in one bit at some sizes, as if a library took another kernel there."""

    def __init__(self, engine: GradientEngine, at: set[int]) -> None:
        self._engine, self._at = engine, at

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._engine.logits(theta, x)

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        logits, parts = self._engine.gradients(theta, x, y)
        if len(x) in self._at:
            rows = next(part for part in parts if isinstance(part, Rows))
            rows.values *= 1 + torch.finfo(torch.float32).eps
        return logits, parts


def test_sizes_at_which_bits_differ_are_not_used() -> None:
    module = models.build("digits-cnn", (1, 8, 8), 10)
    engine = Shifting(choose(module, "fast", (1, 8, 8))[1], {4, 12, 16})
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=16, path=engine)
    data = Images(40)
    for drawn, expected in ((3, 8), (8, 8), (9, 20), (16, 20), (20, 20)):
        data.sizes.clear()
        trainer.clipped_sum(start(), data, np.arange(drawn))
        assert data.sizes[-1] == expected
    engine = Shifting(choose(module, "fast", (1, 8, 8))[1], {trainer.slots - unit(trainer.slots)})
    Trainer(module, clip=1.0, learning_rate=0.1, batch_size=16, path=engine).clipped_sum(start(), data, np.arange(18))
    assert data.sizes[-1] == trainer.slots == 24


def test_a_skeleton_with_any_values_takes_the_sizes_of_a_model_that_is_initialised() -> None:
    """Memory that held a NaN made every comparison fail: all batches had the largest size."""
    data, sizes_used = Images(24), []
    for value in (0.1, torch.nan, 3e38):
        module = models.build("digits-cnn", (1, 8, 8), 10)
        for parameter in module.parameters():
            parameter.data.fill_(value)
        trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=24)
        sizes_used.append([])
        for drawn in (1, 10, 22):
            trainer.clipped_sum(start(), data, np.arange(drawn))
            sizes_used[-1].append(data.sizes[-1])
    assert sizes_used[0] == sizes_used[1] == sizes_used[2]
    assert sizes_used[0][0] < trainer.slots


class Alternating(Shifting):
    """An engine whose gradients differ in some slots at some sizes."""

    def __init__(self, engine: GradientEngine, at: set[int], slots: slice = slice(1, None, 2)) -> None:
        super().__init__(engine, at)
        self._slots = slots

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        logits, parts = self._engine.gradients(theta, x, y)
        if len(x) in self._at:
            rows = next(part for part in parts if isinstance(part, Rows))
            rows.values[self._slots] *= 1 + torch.finfo(torch.float32).eps
        return logits, parts


@pytest.mark.parametrize(
    ("room", "at", "slots", "used", "tried"),
    [
        (None, {4, 8, 12}, slice(1, None, 2), 16, "8 to 88"), (None, {4, 8, 12}, slice(3, 4), 16, "8 to 88"),
        (8, {4, 8, 12}, slice(1, None, 2), 16, "8 to 88"), (20, {20}, slice(1, None, 2), 24, "20 to 100"),
    ],
)  # fmt: skip
def test_a_largest_batch_whose_slots_differ_is_not_used(
    room: int | None, at: set[int], slots: slice, used: int, tried: str
) -> None:
    module, data = models.build("digits-cnn", (1, 8, 8), 10), Images(40)
    engine = choose(module, "fast", (1, 8, 8))[1]
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=4, path=Alternating(engine, at, slots))
    assert trainer.slots == 8
    for drawn in (1, 8):
        trainer.clipped_sum(start(), data, np.arange(drawn), room=room)
        assert data.sizes[-1] == used
    everywhere = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=4, path=Alternating(engine, set(range(200)), slots))
    with pytest.raises(ConfigError, match=f"from {tried} that were tried: the sum would show where a record lies"):
        everywhere.clipped_sum(start(), data, np.arange(4), room=room)
    with pytest.raises(ConfigError, match="from 8 to 88 " if room is None else "from 45 to 124 "):
        everywhere.check_batches((1, 8, 8), room=None if room is None else 90)  # of two pieces


def test_on_a_gpu_the_slots_of_the_only_size_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not, although a coin of sampling moves records by one slot there, too. The weights are those of another device."""
    monkeypatch.setattr(dpsgd, "devices", SimpleNamespace(torch_device=lambda: torch.device("meta")))
    module, weights = models.build("digits-cnn", (1, 8, 8), 10), torch.from_numpy(start()).to("meta")
    engine = choose(module, "fast", (1, 8, 8))[1]
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=4, path=Alternating(engine, {4, 8, 12}))
    (size, rows), *others = trainer._batches(np.arange(12), None)
    assert (size, [len(each) for _, each in others]) == (8, [4])
    assert len(trainer._batch(Images(40), rows, size, weights, None)[0]) == 16


@pytest.mark.parametrize("width", [(784, 64, 2), (345, 75, 2), (68, 3, 98), (64, 2)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_record_of_a_narrow_model_has_the_same_bits_in_every_slot(width: tuple[int, ...], batch_size: int) -> None:
    """With MKL on an Intel processor, products with two or three outputs round otherwise in every second of 4, 8 or 12 slots."""
    layers = [layer for sides in itertools.pairwise(width) for layer in (nn.Linear(*sides), nn.ReLU())]
    module = nn.Sequential(nn.Flatten(), *layers[:-1])
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=batch_size)
    data, theta = Images(4, (1, 1, width[0]), width[-1], seed=1), synthetic.parameters(module).numpy()
    data.x[1:] = torch.nan
    orders = ([0], [0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3], [1, 2, 3, 0])
    assert len({trainer.clipped_sum(theta, data, np.array(rows)).tobytes() for rows in orders}) == 1


def _rows(slots: int) -> Rows:
    values = torch.zeros(slots, 700)
    values[0] = torch.randn(700, generator=torch.Generator().manual_seed(1))
    return Rows(values, 0)


def _sums(slots: int) -> PlaceSums:
    draw = torch.Generator().manual_seed(2)
    signals, inputs = torch.zeros(slots, 8, 20), torch.zeros(slots, 8, 35)
    signals[0], inputs[0] = torch.randn(8, 20, generator=draw), torch.randn(8, 35, generator=draw)
    # Gradients that cancel, so that the bound of rounding decides the factor.
    signals[0, 4:], inputs[0, 4:] = signals[0, :4], -inputs[0, :4]
    return PlaceSums(signals, inputs, 0, (20, 35), ())


@pytest.mark.parametrize("make", [_rows, _sums])
def test_clip_factors_do_not_show_the_size_of_the_batch(make: Callable[[int], GradientBlock]) -> None:
    found = []
    for slots in (4, 16, 40):
        usable = torch.arange(slots) < 1
        found.append(clipping.clipped_sum([make(slots)], usable, 1.0, torch.empty(700), most=40).numpy().tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("path", ["fast", "vmap"])
def test_a_step_clips_a_record_alike_in_batches_of_every_size(path: str) -> None:
    """All other records are removed, so that the sum is that of record 0, with the reserve of the largest batch."""
    trainer, data = small(path=path, batch_size=24), Images(24, seed=3)
    data.x[1:] = torch.nan
    sums, sizes_used = [], set()
    for drawn in (1, 10, 22):
        sums.append(trainer.clipped_sum(start(), data, np.arange(drawn)))
        sizes_used.add(data.sizes[-1])
    assert len(sizes_used) == 3
    assert np.abs(sums[0]).max() > 0
    assert len({each.tobytes() for each in sums}) == 1
