"""Benchmark of DP-SGD against Opacus and plain SGD, in one thread."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

RECORDS = 8000
SHAPE = (1, 28, 28)
CLIP, NOISE, RATE = 1.0, 1.0, 0.005


def dpsgd(
    reps: int = 7, batches: Sequence[int] = (32, 64, 256), seconds: float = 0.4, epoch: bool = True
) -> list[dict[str, Any]]:
    """Measure steps and an epoch of DP-SGD on the CNN with 28,938 parameters, and print a table.

    "dpcfl" is `Trainer.train`: Poisson sampling, padded batches, AES-CTR noise in float64. "opacus" is Opacus' hooks on
    Poisson batches without padding, with torch's noise. "plain" is SGD without privacy on batches of the expected size.
    All three use the allocator setting of training/memory.py.

    Args:
        reps: Interleaved repetitions.
        batches: Expected batch sizes.
        seconds: Processor seconds per repetition of a batch size.
        epoch: Also measure an epoch.

    Returns:
        The rows: medians of processor time in milliseconds per step or epoch, and medians of the ratios to dpcfl within a
        repetition; above 1, dpcfl is faster. Processor time depends less on other processes than elapsed time.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # torch warns about Opacus' hooks because images need no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            rows = [_steps(batch, reps, seconds) for batch in batches]
            if epoch:
                rows.append(_epoch(max(1, reps // 2)))
    finally:
        torch.set_num_threads(threads)
    print(_TITLE)
    print(" " * 14 + "".join(f"{title:>{width}}" for title, _, width, _ in _COLUMNS))
    for row in rows:
        print(f"{row['case']:<14}" + "".join(f"{row[key]:>{width}.{digits}f}" for _, key, width, digits in _COLUMNS))
    return rows


_TITLE = """\
DP-SGD on a CNN of 28,938 parameters, one thread: milliseconds of processor time, medians of interleaved repetitions.
batch N: a step at expected batch size N. epoch of 32s: an epoch of 8,000 records, with the loaders of opacus and torch.
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
    """Random images in memory."""

    def __init__(self) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(RECORDS, *SHAPE, generator=generator)
        self.y = torch.randint(0, 10, (RECORDS,), generator=generator)

    def __len__(self) -> int:
        return RECORDS

    def batch(self, rows: np.ndarray, size: int) -> tuple[Any, Any]:
        import torch

        index = torch.from_numpy(rows)
        x, y = torch.zeros(size, *SHAPE), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self.x[index], self.y[index]
        return x, y


def _steps(batch: int, reps: int, seconds: float) -> dict[str, Any]:
    data = _Records()
    ways = {"dpcfl": _ours(data, batch), "opacus": _opacus(data, batch), "plain": _plain(data, batch)}
    counts = {}
    for name, run in ways.items():
        run(4)
        begin = time.process_time()
        run(4)
        counts[name] = max(4, int(4 * seconds / (time.process_time() - begin)))
    times = _interleave({name: partial(run, counts[name]) for name, run in ways.items()}, reps)
    return _row(f"batch {batch}", {name: [t / counts[name] for t in times[name]] for name in ways})


def _epoch(reps: int) -> dict[str, Any]:
    data = _Records()
    steps = RECORDS // 32
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

    trainer = Trainer(models.build("cnn", SHAPE, 10), clip=CLIP, learning_rate=RATE, batch_size=batch)
    theta = models.initial("cnn", SHAPE, 10, 0)
    return lambda steps: trainer.train(theta, data, DPSGDSlot("train", batch / RECORDS, steps), NOISE, b"a key of a bench")


def _opacus_parts(data: _Records, batch: int, poisson: bool) -> tuple[Any, Any, Any]:
    import torch
    from opacus import PrivacyEngine

    from dpcfl_net.training import models

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = models.build("cnn", SHAPE, 10)
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
            rows = torch.from_numpy(np.flatnonzero(draw.random(RECORDS) < batch / RECORDS))
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            optimizer.step()

    return run


def _plain(data: _Records, batch: int) -> Callable[[int], Any]:
    import torch
    import torch.nn.functional as F

    from dpcfl_net.training import models

    module = models.build("cnn", SHAPE, 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def run(steps: int) -> None:
        for step in range(steps):
            begin = step * batch % (RECORDS - batch)
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

    from dpcfl_net.training import models

    module = models.build("cnn", SHAPE, 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data.x, data.y), batch_size=batch, shuffle=True)

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()

    return run
