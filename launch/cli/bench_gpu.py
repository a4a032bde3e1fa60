"""Benchmark of many workers that share a GPU against one process that runs all clients."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError, DataMissing, RunFailed
from dpcfl_net.data.datasets import Images, load
from dpcfl_net.data.records import ClientData
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.bench.sizes import MIB
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import Child, start_of, stop, worker_environment
from dpcfl_net.launch.placement.fork_server import FIRST_FREE
from dpcfl_net.training import devices
from dpcfl_net.training.compute_semaphore import ComputeSemaphore
from dpcfl_net.training.devices import Device
from dpcfl_net.training.nvidia_smi import memory_by_process

CLIP, NOISE, RATE, BATCH = 1.0, 1.0, 0.01, 32
TIMEOUT_S, SAMPLE_S = 1800.0, 0.5
OUTPUT = Path("/dev/stderr")


@dataclass(frozen=True)
class Load:
    """The measured load: in each round every client runs some DP-SGD steps.

    Attributes:
        clients: Number of clients.
        model: Name of the model.
        data: Name of the data set.
        records: Records per client.
        steps: DP-SGD steps per client and round.
        rounds: Measured rounds.
    """

    clients: int = 21
    model: str = "resnet18"
    data: str = "cifar10"
    records: int = 800
    steps: int = 4
    rounds: int = 3


@dataclass(frozen=True)
class ProcessSpec:
    """Specification of a measured process.

    Attributes:
        load: The load.
        clients: Clients that the process runs.
        device: Its device.
        leases: Folder of the compute slots.
        by_lease: True if it acquires a slot for each client and then releases the GPU, as a worker does.
    """

    load: Load
    clients: tuple[int, ...]
    device: Device
    leases: Path
    by_lease: bool


def gpu(slots: int = 1) -> dict[str, Any]:
    """Measure on the first visible GPU and print the results.

    Args:
        slots: Workers that compute at a time.

    Returns:
        The results, as `measure`.

    Raises:
        ConfigError: Without a GPU that torch can use.
    """
    gpus = devices.visible_gpus()
    if not gpus:
        raise ConfigError("bench gpu needs a GPU: nvidia-smi names none here, or is not installed")
    (device,) = devices.assign(RuntimeSettings(device="cuda:0", slots_per_gpu=slots), 1, gpus)
    return measure(device, Load())


def measure(device: Device, load: Load) -> dict[str, Any]:
    """Measure on a device and print the results.

    Args:
        device: The device.
        load: The load.

    Returns:
        Results of one process ("one") and of many workers ("many"), and the ratio of their records per second.

    Raises:
        RunFailed: If a process fails or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="dpcfl-gpu-") as folder:
        leases = Path(folder) / (device.uuid or "cpu")
        all_in_one = [ProcessSpec(load, tuple(range(load.clients)), device, leases, False)]
        one_each = [ProcessSpec(load, (k,), device, leases, True) for k in range(load.clients)]
        one, many = _measure(all_in_one), _measure(one_each)
    found = {"device": device.uuid or "cpu", "data": many["data"], "one": one, "many": many}
    found["ratio"] = many["records_per_second"] / one["records_per_second"]
    _print_results(load, device, found)
    return found


def _measure(specs: list[ProcessSpec]) -> dict[str, Any]:
    """Start the processes, run one client each to warm up, then measure the rounds."""
    with _started(specs) as pipes:
        ready = [_receive(pipe) for pipe in pipes]
        idle = _memory([report["pid"] for report in ready])
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send_bytes(b"go")
        busy: dict[int, int] = {}
        while len(wait(pipes, timeout=0)) < len(pipes):  # the reports are read below
            for pid, used in memory_by_process().items():
                busy[pid] = max(used, busy.get(pid, 0))
            if time.monotonic() > begin + TIMEOUT_S:
                raise RunFailed(f"the measured rounds took more than {TIMEOUT_S:.0f} s")
            time.sleep(SAMPLE_S)
        reports = [_receive(pipe) for pipe in pipes]
    seconds = max(report["until"] for report in reports) - begin  # the monotonic clock is the same in all processes
    return {
        "data": ready[0]["data"],
        "path": ready[0]["path"],
        "seconds": seconds,
        "records_per_second": sum(report["records"] for report in reports) / seconds,
        "idle_mib": idle,
        "busy_mib": _mib([busy[report["pid"]] for report in ready if report["pid"] in busy]),
        "kept_mib": max(report["kept"] for report in reports) / MIB,
        "peak_mib": max(report["peak"] for report in reports) / MIB,
    }


@contextmanager
def _started(specs: list[ProcessSpec]) -> Iterator[list[Connection]]:
    """Start the processes and yield a pipe to each; end all at the end."""
    processes: list[Child] = []
    pipes: list[Connection] = []
    try:
        for spec in specs:
            near, far = multiprocessing.Pipe()
            pipes.append(near)
            start = start_of("dpcfl_net.launch.cli.bench_gpu:run_process", spec, worker_environment())
            with far:
                processes.append(parents.fork_worker("measured process", start, OUTPUT, [far.fileno()]))
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        stop(processes, patience_s=5)


def _receive(pipe: Connection) -> dict[str, Any]:
    if not pipe.poll(TIMEOUT_S):
        raise RunFailed(f"a measured process sent nothing for {TIMEOUT_S:.0f} s")
    try:
        report: dict[str, Any] = json.loads(pipe.recv_bytes())
    except EOFError:
        raise RunFailed("a measured process failed; see its output above") from None
    return report


def run_process(spec: ProcessSpec) -> None:
    """Main function of a measured process.

    Args:
        spec: What it measures.
    """
    import torch

    pipe = Connection(FIRST_FREE)
    torch.set_num_threads(1)
    devices.use(spec.device)
    work = _Work(spec)
    work.turn(spec.clients[0])
    pipe.send_bytes(json.dumps({"pid": os.getpid(), "data": work.data, "path": work.path}).encode())
    pipe.recv_bytes()
    work.reset_peak()
    done = sum(work.turn(client) for _ in range(spec.load.rounds) for client in spec.clients)
    pipe.send_bytes(json.dumps({"records": done, "until": time.monotonic(), **work.memory()}).encode())


class _Work:
    """The clients of one process: the trainer, and compute slots if `spec.by_lease`."""

    def __init__(self, spec: ProcessSpec) -> None:
        from dpcfl_net.training import models
        from dpcfl_net.training.dpsgd import Trainer

        self._spec, self._load = spec, spec.load
        images, self.data = _images(spec.load.data)
        shape, classes = images.input_shape, images.classes
        self._records = {
            client: ClientData(images, "train", (client * spec.load.records + np.arange(spec.load.records)) % images.sizes[0])
            for client in spec.clients
        }
        self._theta = models.initial(spec.load.model, shape, classes, 0)
        module = models.build(spec.load.model, shape, classes)
        self._trainer = Trainer(module, clip=CLIP, learning_rate=RATE, batch_size=BATCH)
        self.path = self._trainer.path
        self._slots = ComputeSemaphore(spec.leases, spec.device.slots_per_gpu)

    def turn(self, client: int) -> float:
        """Run the steps of one client, in a compute slot if `by_lease`; return the expected number of records."""
        if not self._spec.by_lease:
            return self._steps(client)
        with self._slots.hold():
            try:
                return self._steps(client)
            finally:
                devices.release()

    def _steps(self, client: int) -> float:
        from dpcfl_net.privacy.slots import DPSGDSlot

        slot = DPSGDSlot("train", BATCH / self._load.records, self._load.steps)
        self._trainer.train(self._theta, self._records[client], slot, NOISE, b"a key of a bench %d" % client)
        return BATCH * self._load.steps

    def reset_peak(self) -> None:
        if self._spec.device.uuid is not None:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Return the bytes that torch's allocator holds now and held at most, without the CUDA context."""
        if self._spec.device.uuid is None:
            return {"kept": 0, "peak": 0}
        import torch

        return {"kept": torch.cuda.memory_reserved(), "peak": torch.cuda.max_memory_reserved()}


def _images(name: str) -> tuple[Images, str]:
    """Load a data set; random images of CIFAR-10's shape if it is missing."""
    try:
        return load(name), name
    except DataMissing:
        draw = np.random.default_rng(0)
        x = draw.integers(0, 256, (2000, 3, 32, 32), np.uint8)
        y = draw.integers(0, 10, 2000).astype(np.uint8)
        return Images(
            x, y, x[:1], y[:1], 10, 0.5, 0.5, None, "random"
        ), f"random images in the shape of {name}, which is missing"


def _memory(pids: list[int]) -> float | None:
    memory = memory_by_process()
    return _mib([memory[pid] for pid in pids if pid in memory])


def _mib(sizes: list[int]) -> float | None:
    return statistics.median(sizes) / MIB if sizes else None


def _print_results(load: Load, device: Device, found: dict[str, Any]) -> None:
    one, many = found["one"], found["many"]
    print(
        f"{load.clients} clients, {load.model} ({many['path']} path), data {found['data']}: {load.rounds} rounds of {load.steps} "
        f"DP-SGD steps at expected batch size {BATCH}, on {found['device']}, {device.slots_per_gpu} computing at a time"
    )
    for title, row in (("one process with all clients", one), (f"{load.clients} workers that share the GPU", many)):
        print(f"{title}: {row['records_per_second']:.1f} records/s, {row['seconds']:.1f} s")
        print(
            f"  GPU memory of a process by nvidia-smi: idle {_format(row['idle_mib'])}, at most {_format(row['busy_mib'])}; "
            f"by torch's allocator: at the end {row['kept_mib']:.0f} MiB, at most {row['peak_mib']:.0f} MiB"
        )
    print(f"ratio of records/s, workers to one process: {found['ratio']:.2f}")


def _format(mib: float | None) -> str:
    return "unknown" if mib is None else f"{mib:.0f} MiB"
