"""`dpcfl bench`: speed and memory on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import MOST_CLIENTS


def bench(
    what: Annotated[
        str,
        typer.Argument(help="dpsgd: speed of DP-SGD; live: a thousand clients on this machine; gpu: 21 workers on one GPU"),
    ] = "dpsgd",
    clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="live: number of clients")] = 1000,
    sampled: Annotated[
        int, typer.Option(min=1, max=MOST_CLIENTS, help="live: clients per round, and largest number of connected clients")
    ] = 100,
    per_worker: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="live: clients per process")] = 1,
    model: Annotated[str, typer.Option(help="dpsgd: cnn or resnet18")] = "cnn",
    slots_per_gpu: Annotated[int, typer.Option(min=1, max=1_000, help="gpu: workers that compute at the same time")] = 1,
) -> None:
    """Measure speed and memory on this machine.

    dpsgd: DP-SGD against Opacus and plain SGD. live: a run of many clients. gpu: workers that share a GPU.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import bench_dpsgd, bench_gpu, bench_live

    if what not in ("dpsgd", "live", "gpu"):
        raise ConfigError(f"unknown benchmark {what!r}: must be dpsgd, live or gpu")
    if what == "live":
        bench_live.live(clients, sampled, group=per_worker)
    elif what == "gpu":
        bench_gpu.gpu(slots_per_gpu)
    elif model == "resnet18":
        bench_dpsgd.dpsgd(reps=3, batches=(16, 64), epoch=False, model=model)
    else:
        bench_dpsgd.dpsgd(model=model)
