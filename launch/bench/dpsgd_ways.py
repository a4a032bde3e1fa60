"""DP-SGD by dpcfl and by Opacus, and plain SGD: functions that run steps or an epoch on the same random records."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dpcfl_net.launch.bench.options import Options

SHAPES = {"cnn": (1, 28, 28), "resnet18": (3, 32, 32)}
CLIP, NOISE, RATE = 1.0, 1.0, 0.005
Steps = Callable[[int], Any]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, without torch's warning that images need no gradient."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            yield
    finally:
        torch.set_num_threads(threads)


class Records:
    """Random images in memory, and the model that reads them.

    Args:
        model: A model of `SHAPES`.
        count: Number of records.
    """

    def __init__(self, model: str, count: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.model = model
        self.x = torch.rand(count, *SHAPES[model], generator=generator)
        self.y = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def build(self) -> Any:
        """Build the model."""
        from dpcfl_net.training import models

        return models.build(self.model, SHAPES[self.model], 10)

    def batch(self, rows: np.ndarray, size: int) -> tuple[Any, Any]:
        """See `dpcfl_net.training.dpsgd.Records`."""
        import torch

        index = torch.from_numpy(rows)
        x, y = torch.zeros(size, *SHAPES[self.model]), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self.x[index], self.y[index]
        return x, y


def steps(data: Records, batch: int, options: Options) -> dict[str, Steps]:
    """Return functions that run a number of steps.

    "dpcfl" is `Trainer.train`: Poisson sampling, padded batches, AES-CTR noise in float64. "opacus" is Opacus' hooks on
    Poisson batches without padding, with torch's noise. "plain" is SGD without privacy on batches of the expected size.

    Args:
        data: The records.
        batch: Expected batch size.
        options: Options of the benchmark.
    """
    opacus = {"opacus": _opacus(data, batch)} if options.uses("opacus") else {}
    return {"dpcfl": dpcfl(data, batch), **opacus, "plain": _plain(data, batch)}


def variants(data: Records, batch: int) -> dict[str, Steps]:
    """Return functions that run steps in other ways: plain SGD in channels_last, and DP-SGD in bfloat16 where the processor has it.

    Args:
        data: The records.
        batch: Expected batch size.
    """
    from dpcfl_net.training.precision import missing

    in_bfloat16 = {} if missing() else {"dpcfl, bfloat16": dpcfl(data, batch, "bfloat16")}
    return {**in_bfloat16, "plain, channels_last": _plain(data, batch, channels_last=True)}


def epochs(data: Records, batch: int, options: Options) -> dict[str, Callable[[], Any]]:
    """Return functions that run an epoch, Opacus and plain SGD with their loaders; arguments as for `steps`."""
    opacus = {"opacus": _opacus_epoch(data, batch)} if options.uses("opacus") else {}
    return {"dpcfl": partial(dpcfl(data, batch), len(data) // batch), **opacus, "plain": _plain_epoch(data, batch)}


def dpcfl(data: Records, batch: int, precision: str = "float32") -> Steps:
    """Return a function that runs steps of `Trainer.train`."""
    from dpcfl_net.privacy.slots import DPSGDSlot
    from dpcfl_net.training import models
    from dpcfl_net.training.dpsgd import Trainer

    trainer = Trainer(data.build(), clip=CLIP, learning_rate=RATE, batch_size=batch, precision=precision)
    theta = models.initial(data.model, SHAPES[data.model], 10, 0)
    return lambda steps: trainer.train(theta, data, DPSGDSlot("train", batch / len(data), steps), NOISE, b"a key of a bench")


def _opacus_parts(data: Records, batch: int, poisson: bool) -> tuple[Any, Any, Any]:
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


def _opacus(data: Records, batch: int) -> Steps:
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


def _plain(data: Records, batch: int, channels_last: bool = False) -> Steps:
    import torch
    import torch.nn.functional as F

    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = data.build().to(memory_format=layout)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def run(steps: int) -> None:
        for step in range(steps):
            begin = step * batch % (len(data) - batch)
            optimizer.zero_grad()
            x = data.x[begin : begin + batch].to(memory_format=layout)
            F.cross_entropy(module(x), data.y[begin : begin + batch]).backward()
            optimizer.step()

    return run


def _opacus_epoch(data: Records, batch: int) -> Callable[[], Any]:
    import torch.nn.functional as F

    module, optimizer, loader = _opacus_parts(data, batch, poisson=True)

    def run() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            if len(x):
                F.cross_entropy(module(x), y).backward()
            optimizer.step()

    return run


def _plain_epoch(data: Records, batch: int) -> Callable[[], Any]:
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
