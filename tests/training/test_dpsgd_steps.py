"""DP-SGD steps and evaluation: sampling, noise, events, settings."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from records import KEY, Images, small, start
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import batches, dpsgd, models
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.training.dpsgd_steps import Sums

torch.set_num_threads(1)


def test_a_full_batch_uses_every_record_once() -> None:
    data = Images(50)
    small().train(start(), data, DPSGDSlot("first", 1, 2), 1.0, KEY)
    assert [row for rows in data.rows for row in rows] == [*range(50), *range(50)]


def test_poisson_batches_are_independent_coins() -> None:
    rng = dpsgd.stream(KEY, "batches")
    draws = [batches.poisson_rows(400, 0.1, rng) for _ in range(2000)]
    sizes = np.array([len(d) for d in draws])
    deviation = math.sqrt(400 * 0.1 * 0.9)
    assert abs(sizes.mean() - 40) < 6 * deviation / math.sqrt(2000)
    assert abs(sizes.var() / deviation**2 - 1) < 6 * math.sqrt(2 / 2000)
    each = np.bincount(np.concatenate(draws), minlength=400)
    assert np.abs(each - 200).max() < 7 * math.sqrt(2000 * 0.09)
    assert all((np.diff(d) > 0).all() for d in draws)


def test_an_allocation_puts_each_record_into_one_batch_of_an_epoch_uniformly_and_independently() -> None:
    rng, records, t, epochs = dpsgd.stream(KEY, "batches"), 60, 8, 3000
    places = np.empty((epochs, records), dtype=int)
    for epoch in places:
        drawn = batches.allocated_rows(records, t, rng)
        assert len(drawn) == t
        assert np.array_equal(np.sort(np.concatenate(drawn)), np.arange(records))
        for batch, rows in enumerate(drawn):
            epoch[rows] = batch
    # Six deviations each: of a record's uniform place, of a pair of records, and of a record in successive epochs.
    counts = np.stack([np.bincount(column, minlength=t) for column in places.T])
    assert np.abs(counts - epochs / t).max() < 6 * math.sqrt(epochs / t * (1 - 1 / t))
    for one, other in ((places[:, 0::2], places[:, 1::2]), (places[:-1], places[1:])):
        n, together = one.size, int((one == other).sum())
        assert abs(together - n / t) < 6 * math.sqrt(n / t * (1 - 1 / t))


def test_an_allocated_slot_trains_on_whole_epochs_and_records_them() -> None:
    data, slot = Images(50), DPSGDSlot("train", 1 / 5, 15, "allocation")
    _, event = small().train(start(), data, slot, 1.0, KEY)
    assert event == slot.event(1.0) == AllocatedGaussian(1.0, 5, 3)
    rows = [row for rows in data.rows for row in rows]
    assert np.array_equal(np.bincount(rows), np.full(50, 3))
    assert slot.ran(1.0, 6) == AllocatedGaussian(1.0, 5, 2)  # an epoch that began counts as a whole
    with pytest.raises(ValueError, match="whole epochs"):
        DPSGDSlot("train", 1 / 5, 14, "allocation")
    assert DPSGDSlot("train", 1.0, 2, "allocation").event(1.0) == SampledGaussian(1.0, 1.0, 2)


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


def test_the_sum_of_a_step_holds_nothing_of_the_steps_before() -> None:
    """Steps share memory. A record that counted again in each later step would exceed the clip norm."""
    data, theta, trainer = Images(60), start(), small(clip=0.5, learning_rate=0.25)
    sums = Sums(theta.copy())
    first, again, empty = (trainer._sum(sums, data, np.arange(count), None).numpy().copy() for count in (60, 60, 0))
    assert len(data.sizes) > 2 * 2  # several physical batches in a step
    assert np.array_equal(first, again)
    assert not empty.any()
    single = [trainer.clipped_sum(theta, data, np.arange(at, at + 10)) for at in range(0, 60, 10)]
    np.testing.assert_allclose(first, sum(single), atol=1e-5)
    trained, _ = trainer.train(theta, data, DPSGDSlot("train", 1.0, 3), 1e-9, KEY)
    for _ in range(3):
        theta = (theta - 0.25 * trainer.clipped_sum(theta, data, np.arange(60)) / 60).astype(np.float32)
    np.testing.assert_allclose(trained, theta, atol=1e-6)


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
    zero, _ = trainer.train(theta, data, slot, 1.0, KEY, proximal=(0.0, centre))
    pulled, _ = trainer.train(theta, data, slot, 1.0, KEY, proximal=(0.5, centre))
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
    [
        (nn.BatchNorm2d(4), "BatchNorm2d"),
        (nn.Dropout(0.5), "Dropout"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d"),
    ],
)
def test_layers_without_per_record_gradients_are_named(layer: nn.Module, word: str) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(4 * 36, 10))
    with pytest.raises(ConfigError, match=f"'1'.*{word}"):
        Trainer(module, clip=1.0, learning_rate=0.1, batch_size=8)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 10)), "input_shape.*shapes cannot be multiplied"),
        (nn.Sequential(nn.Linear(8, 10)), r"input_shape.*the shape \(1, 8, 10\), must be \(classes,\)"),
    ],
)
def test_records_that_a_model_of_unknown_input_shape_does_not_take_are_a_configuration_error(module, words) -> None:
    """It ended in an error of torch; with input_shape the model is refused before."""
    trainer = Trainer(module, clip=1.0, learning_rate=0.1, batch_size=8)
    with pytest.raises(ConfigError, match=words):
        trainer.clipped_sum(np.zeros(trainer.parameters, np.float32), Images(8), np.arange(8))


@pytest.mark.parametrize(
    "changes",
    [{"clip": 0.0}, {"clip": math.nan}, {"learning_rate": -1.0}, {"batch_size": 0}, {"path": "slow"}, {"task": "regression"}],
)
def test_settings_out_of_range_are_configuration_errors(changes: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        small(**changes)


def test_the_fast_path_refuses_what_it_cannot_do() -> None:
    grouped = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4 * 36, 10))
    with pytest.raises(ConfigError, match="fast path"):
        Trainer(grouped, clip=1.0, learning_rate=0.1, batch_size=8, path="fast")
    assert Trainer(grouped, clip=1.0, learning_rate=0.1, batch_size=8).path == "deep"


@pytest.mark.parametrize(
    ("theta", "rate", "noise"), [(np.zeros(5, np.float32), 1, 1.0), (start(), 0.0, 1.0), (start(), 1, 0.0)]
)
def test_bad_tasks_are_refused_before_data_is_touched(theta: np.ndarray, rate: float, noise: float) -> None:
    data = Images(10)
    with pytest.raises(ValueError):
        small().train(theta, data, DPSGDSlot("train", rate, 1), noise, KEY)
    assert data.rows == []


def reference(module: nn.Module, theta: np.ndarray, data: Images) -> torch.Tensor:
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta), module.parameters())
    with torch.no_grad():
        return module(data.x)


@pytest.mark.parametrize("n", [1, 64, 200])
def test_evaluation_equals_the_plain_model_and_uses_one_shape(n: int) -> None:
    data, theta, module = Images(n), start(), models.build("digits-cnn", (1, 8, 8), 10)
    logits = reference(module, theta, data)
    evaluator = Evaluator(module)
    correct = int((logits.argmax(1) == data.y).sum())
    accuracy, loss = evaluator.accuracy_and_loss(theta, data)
    assert accuracy == pytest.approx(correct / n)
    assert loss == pytest.approx(float(F.cross_entropy(logits, data.y)), rel=1e-5)
    assert set(data.sizes) == {dpsgd.EVALUATION_SLOTS["fast"]}


@pytest.mark.parametrize(("name", "shape"), [("digits-cnn", (1, 8, 8)), ("linear", (1, 8, 8)), ("char-lstm", (5,))])
def test_counts_of_several_models_are_those_of_each_and_use_one_shape(name: str, shape: tuple[int, ...]) -> None:
    data, evaluator = Images(70, shape), Evaluator(models.build(name, shape, 10), input_shape=shape)
    data.x = data.x.abs() if name == "char-lstm" else data.x
    thetas = np.stack([models.initial(name, shape, 10, seed) for seed in range(5)])
    each = [int(evaluator.each(theta, data)[1].sum()) for theta in thetas]
    data.sizes.clear()
    assert evaluator.count_correct(thetas, data) == each
    # Four models together, then the fifth.
    assert evaluator.path == "plain" or data.sizes == 2 * 3 * [dpsgd.COUNT_SLOTS]


def test_ties_go_to_the_smallest_index_and_non_finite_logits_are_wrong() -> None:
    module = models.build("linear", (1, 8, 8), 10)
    data = Images(20)
    data.y[:] = torch.arange(20) % 2
    flat = np.zeros(650, dtype=np.float32)
    assert Evaluator(module).count_correct(flat[None], data) == [10]
    data.x[0] = torch.nan
    assert Evaluator(module).count_correct(flat[None], data) == [9]
    assert Evaluator(module).accuracy_and_loss(flat, data) == (9 / 20, math.inf)


def test_evaluating_nothing_is_an_error_for_rates_and_zero_for_counts() -> None:
    module, data = models.build("linear", (1, 8, 8), 10), Images(0)
    assert Evaluator(module).count_correct(np.zeros((2, 650), dtype=np.float32), data) == [0, 0]
    with pytest.raises(ValueError, match="no records"):
        Evaluator(module).accuracy_and_loss(np.zeros(650, dtype=np.float32), data)


FAULTS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from records import KEY, Images, start
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.privacy.slots import DPSGDSlot

trainer = Trainer(models.build("cnn", (1, 28, 28), 10), clip=1.0, learning_rate=0.1, batch_size=32)
data, theta = Images(320, (1, 28, 28)), start("cnn", (1, 28, 28))
trainer.train(theta, data, DPSGDSlot("train", 0.1, 5), 1.0, KEY)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
trainer.train(theta, data, DPSGDSlot("train", 0.1, 40), 1.0, KEY)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 40)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults of glibc's allocator")
def test_steps_do_not_hand_their_memory_back_and_forth() -> None:
    # In a process of its own: glibc's thresholds also move with what other tests have freed.
    command = [sys.executable, "-W", "ignore", "-c", FAULTS, str(ROOT / "tests" / "support")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    faults = float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout)
    assert faults < 700
