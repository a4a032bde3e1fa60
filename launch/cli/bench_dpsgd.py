"""Benchmark of DP-SGD against Opacus and plain SGD, in one thread."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError

SHAPES = {"cnn": (1, 28, 28), "resnet18": (3, 32, 32)}
_RECORDS = {"cnn": 8000, "resnet18": 1000}
_LEAST_STEPS = {"cnn": 4, "resnet18": 2}
CLIP, NOISE, RATE = 1.0, 1.0, 0.005


def dpsgd(
    reps: int = 7, batches: Sequence[int] = (32, 64, 256), seconds: float = 0.4, epoch: bool = True, model: str = "cnn"
) -> list[dict[str, Any]]:
    """Measure steps and an epoch of DP-SGD on a model, and print a table.

    "dpcfl" is `Trainer.train`: Poisson sampling, padded batches, AES-CTR noise in float64. "opacus" is Opacus' hooks on
    Poisson batches without padding, with torch's noise. "plain" is SGD without privacy on batches of the expected size.
    All three use the allocator setting of training/memory.py.

    Args:
        reps: Interleaved repetitions.
        batches: Expected batch sizes.
        seconds: Processor seconds per repetition of a batch size.
        epoch: Also measure an epoch.
        model: "cnn" (28,938 parameters) or "resnet18" (11,181,642).

    Returns:
        The rows: medians of processor time in milliseconds per step or epoch, and medians of the ratios to dpcfl within a
        repetition; above 1, dpcfl is faster. Processor time depends less on other processes than elapsed time.

    Raises:
        ConfigError: For another model.
    """
    import torch

    if model not in SHAPES:
        raise ConfigError(f"unknown model {model!r} of a benchmark, known: {', '.join(SHAPES)}")
    data = _Records(model)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # torch warns about Opacus' hooks because images need no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            rows = [_steps(data, batch, reps, seconds) for batch in batches]
            if epoch:
                rows.append(_epoch(data, max(1, reps // 2)))
    finally:
        torch.set_num_threads(threads)
    print(_TITLE.format(model=model, parameters=data.parameters, records=len(data)))
    print(" " * 14 + "".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS))
    for row in rows:
        print(f"{row['case']:<14}" + "".join(f"{row[key]:>{width}.{digits}f}" for _, key, width, digits in _COLUMNS))
    return rows


_TITLE = """\
DP-SGD on {model} ({parameters:,} parameters), one thread: milliseconds of processor time, medians of interleaved repetitions.
batch N: a step at expected batch size N. epoch of 32s: an epoch of {records:,} records, with the loaders of opacus and torch.
dpcfl: Poisson batches, padded, AES-CTR noise in float64. opacus: its hooks on Poisson batches, torch's noise.
plain: SGD without privacy on batches of the expected size. speed-up: their time / time of dpcfl; above 1, dpcfl is faster.
"""
_COLUMNS = (
    ("dpcfl", "dpcfl_ms", 10, 2),
    ("opacus", "opacus_ms", 10, 2),
    ("plain", "plain_ms", 10, 2),
    ("speed-up on opacus", "times_opacus", 21, 2),
    ("on plain", "times_plain", 11, 2),
)


class _Records:
    """Random images in memory, and the model that reads them."""

    def __init__(self, model: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.model, count = model, _RECORDS[model]
        self.x = torch.rand(count, *SHAPES[model], generator=generator)
        self.y = torch.randint(0, 10, (count,), generator=generator)
        self.parameters = sum(parameter.numel() for parameter in self.build().parameters())

    def __len__(self) -> int:
        return len(self.y)

    def build(self) -> Any:
        from dpcfl_net.training import models

        return models.build(self.model, SHAPES[self.model], 10)

    def batch(self, rows: np.ndarray, size: int) -> tuple[Any, Any]:
        import torch

        index = torch.from_numpy(rows)
        x, y = torch.zeros(size, *SHAPES[self.model]), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self.x[index], self.y[index]
        return x, y


def _steps(data: _Records, batch: int, reps: int, seconds: float) -> dict[str, Any]:
    ways = {"dpcfl": _ours(data, batch), "opacus": _opacus(data, batch), "plain": _plain(data, batch)}
    counts, few = {}, _LEAST_STEPS[data.model]
    for name, run in ways.items():
        run(few)
        begin = time.process_time()
        run(few)
        counts[name] = max(few, int(few * seconds / (time.process_time() - begin)))
    times = _interleave({name: partial(run, counts[name]) for name, run in ways.items()}, reps)
    return _row(f"batch {batch}", {name: [t / counts[name] for t in times[name]] for name in ways})


def _epoch(data: _Records, reps: int) -> dict[str, Any]:
    steps = len(data) // 32
    ours = _ours(data, 32)
    ways = {"dpcfl": lambda: ours(steps), "opacus": _opacus_epoch(data, 32), "plain": _plain_epoch(data, 32)}
    return _row("epoch of 32s", _interleave(ways, reps))


def _interleave(ways: dict[str, Callable[[], Any]], reps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(reps):
        for name, run in ways.items():
            begin = time.process_time()
            run()
            times[name].append(time.process_time() - begin)
    return times


def _row(case: str, times: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case}
    for name, values in times.items():
        row[f"{name}_ms"] = statistics.median(values) * 1e3
        row[f"times_{name}"] = statistics.median(v / t for v, t in zip(values, times["dpcfl"], strict=True))
    return row


def _ours(data: _Records, batch: int) -> Callable[[int], Any]:
    from dpcfl_net.privacy.slots import DPSGDSlot
    from dpcfl_net.training import models
    from dpcfl_net.training.dpsgd import Trainer

    trainer = Trainer(data.build(), clip=CLIP, learning_rate=RATE, batch_size=batch)
    theta = models.initial(data.model, SHAPES[data.model], 10, 0)
    return lambda steps: trainer.train(theta, data, DPSGDSlot("train", batch / len(data), steps), NOISE, b"a key of a bench")


def _opacus_parts(data: _Records, batch: int, poisson: bool) -> tuple[Any, Any, Any]:
    import torch
    from opacus import PrivacyEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = data.build()
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.x, data.y), batch_size=batch)
        return PrivacyEngine(accountant="rdp").make_private(
            module=module, optimizer=optimizer, data_loader=loader,
            noise_multiplier=NOISE, max_grad_norm=CLIP, poisson_sampling=poisson,
        )  # fmt: skip


def _opacus(data: _Records, batch: int) -> Callable[[int], Any]:
    import torch
    import torch.nn.functional as F

    module, optimizer, _ = _opacus_parts(data, batch, poisson=False)
    optimizer.step_hook = None

    def run(steps: int) -> None:
        draw = np.random.default_rng(0)
        for _ in range(steps):
            rows = torch.from_numpy(np.flatnonzero(draw.random(len(data)) < batch / len(data)))
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            optimizer.step()

    return run


def _plain(data: _Records, batch: int) -> Callable[[int], Any]:
    import torch
    import torch.nn.functional as F

    module = data.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def run(steps: int) -> None:
        for step in range(steps):
            begin = step * batch % (len(data) - batch)
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[begin : begin + batch]), data.y[begin : begin + batch]).backward()
            optimizer.step()

    return run


def _opacus_epoch(data: _Records, batch: int) -> Callable[[], Any]:
    import torch.nn.functional as F

    module, optimizer, loader = _opacus_parts(data, batch, poisson=True)

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            if len(x):
                F.cross_entropy(module(x), y).backward()
            optimizer.step()

    return run


def _plain_epoch(data: _Records, batch: int) -> Callable[[], Any]:
    import torch
    import torch.nn.functional as F

    module = data.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.x, data.y), batch_size=batch, shuffle=True)

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()

    return run
