"""Properties of the DP-SGD engine on the device of its process. `python gpu_checks.py CHECK[,CHECK...] [UUID]` runs them in a process of
their own: on a GPU one at a time, since a process has one device, for good.

Without a UUID everything is on the CPU: that tries the checks themselves.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from records import KEY, Images, small, start
from test_dpsgd import (
    test_a_record_that_overflows_is_dropped_bit_for_bit as overflow,
)
from test_dpsgd import (
    test_no_record_counts_for_more_than_clip_whatever_its_scale as bounded,
)

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.privacy.device_noise import DeviceNoise
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import devices, models
from dpcfl_net.training.devices import Device
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.training.gradient_engines import PATHS
from dpcfl_net.training.sgd import PlainSGD

ROWS = np.array([11, 0, 3, 4, 7, 8, 2, 19, 21, 5, 6, 12, 13, 14, 15])


def near_cpu(device: Device) -> None:
    """Clipped sums, losses and plain SGD equal those of the CPU up to rounding."""
    data, theta, shape = Images(30), start(), (1, 8, 8)
    how = {"epochs": 2, "batch_size": 8, "lr": 0.1, "momentum": 0.5}

    def results() -> list[np.ndarray]:
        found = [small(path=path, clip=0.3).clipped_sum(theta, data, ROWS) for path in PATHS]
        module = models.build("digits-cnn", shape, 10)
        found.append(Evaluator(module).each(theta, data)[0])
        sgd = PlainSGD(module, **how)
        found.append(sgd.train(theta, data, np.random.default_rng(0), proximal=(0.1, theta), base_model=theta))
        return [*found, sgd.mean_losses(np.stack([theta, theta / 2]), data)]

    expected = results()
    devices.use(device)
    for here, there in zip(expected, results(), strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-3, atol=1e-4 * np.abs(here).max())


def repeats(device: Device) -> None:
    """The same key gives the same bits, also with another trainer."""
    devices.use(device)
    data, slot = Images(60), DPSGDSlot("train", 0.2, 5)
    for path in PATHS:
        found = [small(path=path).train(start(), data, slot, 1.0, KEY)[0].tobytes() for _ in range(3)]
        assert len(set(found)) == 1, path


def noise(device: Device) -> None:
    """Noise has the bits of the CPU."""
    total = torch.from_numpy(np.random.default_rng(0).normal(size=200_000))
    expected = DeviceNoise(KEY, torch.device("cpu")).add(total, 0.7)
    devices.use(device)
    there = devices.torch_device()
    assert torch.equal(DeviceNoise(KEY, there).add(total.to(there), 0.7).cpu(), expected)


def removes(device: Device) -> None:
    """A record that overflows has no effect on any bit; no record contributes more than the clip norm."""
    devices.use(device)
    for path in PATHS:
        for how in ("inf", "nan", "norm"):
            overflow(path, how)
        for scale in (1e-12, 1.0, 1e4, 1e12):
            bounded(path, scale)


def neighbours(device: Device) -> None:
    """A record's gradients do not depend on the other records of its batch in any bit."""
    devices.use(device)
    for path in PATHS:
        trainer = small(path=path)
        theta, n = torch.from_numpy(start()).to(devices.torch_device()), trainer.slots
        (x, y), (mixed, mixed_y) = (Images(n, seed=seed).batch(np.arange(n), n) for seed in (2, 3))
        mixed[1] = torch.inf
        mixed[3], mixed_y[3] = x[3], y[3]
        pairs = [
            trainer._engine.gradients(theta, a.to(theta.device), b.to(theta.device)) for a, b in ((x, y), (mixed, mixed_y))
        ]
        (logits, parts), (logits_mixed, parts_mixed) = pairs
        assert torch.equal(logits[3], logits_mixed[3])
        for a, b in zip(parts, parts_mixed, strict=True):
            for field in ("values", "signals", "inputs"):
                if hasattr(a, field):
                    assert torch.equal(getattr(a, field)[3], getattr(b, field)[3])


def slots(device: Device) -> None:
    """A record's clipped gradient has the same bits in every slot of a batch."""
    devices.use(device)
    data = Images(4, seed=1)
    data.x[1:] = torch.nan
    for path in PATHS:
        trainer = small(path=path)
        orders = [[1] * place + [0] + [2] * (trainer.slots - place - 1) for place in range(trainer.slots)]
        assert len({trainer.clipped_sum(start(), data, np.array(rows)).tobytes() for rows in orders}) == 1, path


def gives_back(device: Device) -> None:
    """After `release` torch's allocator holds no memory after any computation; the same objects work in the next lease."""
    devices.use(device)
    data, theta = Images(30), start()
    trainers, module = [small(path=path) for path in PATHS], models.build("digits-cnn", (1, 8, 8), 10)
    sgd = PlainSGD(module, epochs=1, batch_size=8, lr=0.1)
    found = []
    for _ in range(2):
        sums = [trainer.clipped_sum(theta, data, ROWS).tobytes() for trainer in trainers]
        found.append([*sums, sgd.train(theta, data, np.random.default_rng(0)).tobytes()])
        if device.uuid is not None:
            assert torch.cuda.memory_reserved() > 0
        devices.release()
        if device.uuid is not None:
            assert torch.cuda.memory_reserved() == 0
    assert found[0] == found[1]


def capped(device: Device) -> None:
    """An allocation beyond the process's share fails; after CUDA has started no other GPU can be chosen."""
    devices.use(Device(device.uuid, memory_fraction=0.01))
    if device.uuid is None:
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.empty(total // 400, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(total // 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("the cap does not hold")
    try:
        devices.use(device)
    except RunFailed:
        return
    raise AssertionError("CUDA was started, and another device was taken")


def resnet(device: Device) -> None:
    """ResNet-18 through Opacus: every kernel that it needs is deterministic; otherwise this raises."""
    devices.use(device)
    theta, data = models.initial("resnet18", (3, 32, 32), 10, 0), Images(6, (3, 32, 32))
    trainer = Trainer(models.build("resnet18", (3, 32, 32), 10), clip=1.0, learning_rate=0.1, batch_size=2)
    first, second = (trainer.clipped_sum(theta, data, np.arange(6)) for _ in range(2))
    assert np.array_equal(first, second)
    assert 0 < np.linalg.norm(first) <= 6


CHECKS = {check.__name__: check for check in (near_cpu, repeats, noise, removes, neighbours, slots, gives_back, capped, resnet)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        CHECKS[name](Device(sys.argv[2] if len(sys.argv) > 2 else None))
