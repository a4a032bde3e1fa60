"""DP-SGD steps as on a GPU, on CPU tensors: same batches and sums as on the CPU, noise from the device's generator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from records import KEY, Images, small, start

from dpcfl_net.privacy.device_noise import DeviceNoise
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import devices
from dpcfl_net.training.device_steps import noisy
from dpcfl_net.training.devices import Device

torch.set_num_threads(1)


@pytest.fixture
def on_device(monkeypatch):
    """Let this process take the way of a GPU, on CPU tensors."""
    monkeypatch.setattr(devices, "_current", Device("GPU-aaaaaaaa"))
    monkeypatch.setattr(devices, "torch_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(devices, "strict_arithmetic", lambda: None)


def test_without_noise_the_steps_are_those_of_the_cpu(request):
    data, theta, slot = Images(60), start(), DPSGDSlot("train", 0.2, 4)
    proximal = 0.3, np.zeros_like(theta)
    here, event = small().train(theta, data, slot, 1e-9, KEY, proximal)
    rows = list(data.rows)
    request.getfixturevalue("on_device")
    data.rows.clear()
    before = theta.copy()
    there, same = small().train(theta, data, slot, 1e-9, KEY, proximal)
    assert event == same
    assert [row for batch in rows for row in batch] == [row for batch in data.rows for row in batch]
    assert np.array_equal(theta, before)
    assert there.dtype == np.float32
    np.testing.assert_allclose(there, here, atol=1e-6)
    assert np.abs(here - theta).max() > 0.01


def noise_of(steps: int, key: bytes = KEY) -> np.ndarray:
    """The movement of a model whose records are all removed, in deviations of one step's noise."""
    data, trainer = Images(10), small(clip=0.5, learning_rate=1.0)
    data.x[:] = torch.nan
    trained, _ = trainer.train(np.zeros(6090, np.float32), data, DPSGDSlot("train", 1, steps), 3.0, key)
    return -trained * 10 / (0.5 * 3.0)


def test_noise_has_its_deviation_and_is_fresh_in_each_step(on_device):
    one, again, two, other = noise_of(1), noise_of(1), noise_of(2), noise_of(1, KEY[::-1])
    assert np.array_equal(one, again)
    size = one.size
    assert abs(one.std() - 1) < 6 / math.sqrt(2 * size)
    assert abs((two - one).std() - 1) < 6 / math.sqrt(2 * size)
    for second in (two - one, other):
        assert abs(np.corrcoef(one, second)[0, 1]) < 6 / math.sqrt(size)
    steps = one * 2.0**20
    assert np.abs(steps - np.rint(steps))[np.abs(steps) < 2**18].max() < 0.1


def test_the_noise_is_not_that_of_the_cpu(request):
    here = noise_of(1)
    request.getfixturevalue("on_device")
    assert abs(np.corrcoef(here, noise_of(1))[0, 1]) < 6 / math.sqrt(here.size)


def test_a_tap_sees_each_noisy_sum(on_device):
    seen: list[np.ndarray] = []
    data = Images(10)
    data.x[:] = torch.nan
    trainer = small(clip=0.5)
    trainer.tap = lambda values: seen.append(values.copy())
    trainer.train(start(), data, DPSGDSlot("train", 1, 2), 3.0, KEY)
    source = DeviceNoise(KEY, torch.device("cpu"))
    for values in seen:
        assert values.dtype == np.float32
        assert np.array_equal(values, source.add(torch.zeros(6090, dtype=torch.float64), 1.5).float().numpy())
    assert len(seen) == 2


def test_a_whole_update_is_noised_on_the_device(on_device):
    value = np.linspace(-1, 1, 5000)
    found = noisy(value, 0.25, KEY)
    assert np.array_equal(found, DeviceNoise(KEY, torch.device("cpu")).add(torch.from_numpy(value), 0.25).numpy())
    assert abs((found - value).std() / 0.25 - 1) < 6 / math.sqrt(2 * 5000)
