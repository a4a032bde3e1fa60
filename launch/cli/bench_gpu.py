"""Many workers on one GPU by leases against one process that does all clients in turn: records a second, memory of each."""

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
from dpcfl_net.experiment.config import RuntimeSettings
from dpcfl_net.training import devices
from dpcfl_net.training.compute_semaphore import ComputeSemaphore
from dpcfl_net.training.devices import Device
from dpcfl_net.training.nvidia_smi import memory_by_process

CLIP, NOISE, RATE, BATCH = 1.0, 1.0, 0.01, 32
PATIENCE_S, LOOK_S = 1800.0, 0.5
MIB = 2**20


@dataclass(frozen=True)
class Load:
    """What is measured: `rounds` rounds in which each of `clients` does `steps` DP-SGD steps on `records` own records."""

    clients: int = 21
    model: str = "resnet18"
    data: str = "cifar10"
    records: int = 800
    steps: int = 4
    rounds: int = 3


@dataclass(frozen=True)
class Seat:
    """What one measured process is started with: the clients that it does, its device, the folder of the leases."""

    load: Load
    clients: range
    device: Device
    leases: Path
    by_lease: bool  # asks for a lease each turn, as a worker does, and gives the GPU back after it


def gpu(slots: int = 1, load: Load | None = None) -> dict[str, Any]:
    """Measure on the first visible GPU, print the figures and return them; ConfigError without a GPU that torch can use."""
    gpus = devices.visible_gpus()
    if not gpus:
        raise ConfigError("bench gpu needs a GPU: nvidia-smi names none here, or is not installed")
    (device,) = devices.assign(RuntimeSettings(device="cuda:0", slots_per_gpu=slots), 1, gpus)
    return measure(device, load or Load())


def measure(device: Device, load: Load) -> dict[str, Any]:
    """The same on any device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpcfl_net.launch.placement.preload"])
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="dpcfl-gpu-") as folder:
        leases = Path(folder) / (device.uuid or "cpu")
        alone = [Seat(load, range(load.clients), device, leases, False)]
        each = [Seat(load, range(k, k + 1), device, leases, True) for k in range(load.clients)]
        one, many = _race(context, alone), _race(context, each)
    found = {"device": device.uuid or "cpu", "data": many["data"], "one": one, "many": many}
    found["ratio"] = many["records_per_second"] / one["records_per_second"]
    _say(load, device, found)
    return found


def _race(context: Any, seats: list[Seat]) -> dict[str, Any]:
    """Start one process for each seat, let all do one turn to warm up, then the measured rounds."""
    with _started(context, seats) as pipes:
        ready = [_hear(pipe) for pipe in pipes]
        idle = _memory([said["pid"] for said in ready])
        begin = time.monotonic()
        for pipe in pipes:
            pipe.send_bytes(b"go")
        busy: dict[int, int] = {}
        while len(wait(pipes, timeout=0)) < len(pipes):  # the last word of each is read below
            for pid, used in memory_by_process().items():
                busy[pid] = max(used, busy.get(pid, 0))
            if time.monotonic() > begin + PATIENCE_S:
                raise RunFailed(f"the measured rounds took more than {PATIENCE_S:.0f} s")
            time.sleep(LOOK_S)
        reports = [_hear(pipe) for pipe in pipes]
    seconds = max(report["until"] for report in reports) - begin  # one clock for all processes of a machine
    return {
        "data": ready[0]["data"],
        "path": ready[0]["path"],
        "seconds": seconds,
        "records_per_second": sum(report["records"] for report in reports) / seconds,
        "idle_mib": idle,
        "busy_mib": _mib([busy[said["pid"]] for said in ready if said["pid"] in busy]),
        "kept_mib": max(report["kept"] for report in reports) / MIB,
        "peak_mib": max(report["peak"] for report in reports) / MIB,
    }


@contextmanager
def _started(context: Any, seats: list[Seat]) -> Iterator[list[Connection]]:
    """A pipe to a process for each seat; none of them outlives this."""
    processes, pipes = [], []
    try:
        for seat in seats:
            ours, theirs = context.Pipe()
            process = context.Process(target=_sit, args=(seat, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _hear(pipe: Connection) -> dict[str, Any]:
    if not pipe.poll(PATIENCE_S):
        raise RunFailed(f"a measured process said nothing for {PATIENCE_S:.0f} s")
    try:
        said: dict[str, Any] = json.loads(pipe.recv_bytes())
    except EOFError:
        raise RunFailed("a measured process ended before it was done; its words are above") from None
    return said


def _sit(seat: Seat, pipe: Connection) -> None:
    """One measured process."""
    import torch

    torch.set_num_threads(1)
    devices.use(seat.device)
    work = _Work(seat)
    work.turn(seat.clients[0])
    pipe.send_bytes(json.dumps({"pid": os.getpid(), "data": work.data, "path": work.path}).encode())
    pipe.recv_bytes()
    work.reset_peak()
    done = sum(work.turn(client) for _ in range(seat.load.rounds) for client in seat.clients)
    pipe.send_bytes(json.dumps({"records": done, "until": time.monotonic(), **work.memory()}).encode())


class _Work:
    """The clients of one process: the product's trainer, and its leases where `seat.by_lease`."""

    def __init__(self, seat: Seat) -> None:
        from dpcfl_net.training import models
        from dpcfl_net.training.dpsgd import Trainer

        self._seat, self._load = seat, seat.load
        images, self.data = _images(seat.load.data)
        shape, classes = images.input_shape, images.classes
        self._records = {
            client: ClientData(images, "train", (client * seat.load.records + np.arange(seat.load.records)) % images.sizes[0])
            for client in seat.clients
        }
        self._theta = models.initial(seat.load.model, shape, classes, 0)
        module = models.build(seat.load.model, shape, classes)
        self._trainer = Trainer(module, clip=CLIP, learning_rate=RATE, batch_size=BATCH)
        self.path = self._trainer.path
        self._slots = ComputeSemaphore(seat.leases, seat.device.slots_per_gpu)

    def turn(self, client: int) -> float:
        """One client's steps, in a lease of its own if there are leases; gives the expected number of records."""
        if not self._seat.by_lease:
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
        if self._seat.device.uuid is not None:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Bytes that torch's allocator holds now, and held at most: without the context."""
        if self._seat.device.uuid is None:
            return {"kept": 0, "peak": 0}
        import torch

        return {"kept": torch.cuda.memory_reserved(), "peak": torch.cuda.max_memory_reserved()}


def _images(name: str) -> tuple[Images, str]:
    """The set `name`, or made-up images of CIFAR-10's shape where it is not there."""
    try:
        return load(name), name
    except DataMissing:
        draw = np.random.default_rng(0)
        x = draw.integers(0, 256, (2000, 3, 32, 32), np.uint8)
        y = draw.integers(0, 10, 2000).astype(np.uint8)
        return Images(x, y, x[:1], y[:1], 10, 0.5, 0.5, None, "made up"), f"made up in the shape of {name}, which is not here"


def _memory(pids: list[int]) -> float | None:
    told = memory_by_process()
    return _mib([told[pid] for pid in pids if pid in told])


def _mib(sizes: list[int]) -> float | None:
    return statistics.median(sizes) / MIB if sizes else None


def _say(load: Load, device: Device, found: dict[str, Any]) -> None:
    one, many = found["one"], found["many"]
    print(
        f"{load.clients} clients, {load.model} ({many['path']} path), data {found['data']}: {load.rounds} rounds of {load.steps} "
        f"DP-SGD steps at an expected batch of {BATCH}, on {found['device']}, {device.slots_per_gpu} computing at once"
    )
    for title, row in (("one process, all clients in turn", one), (f"{load.clients} workers by leases", many)):
        print(f"{title}: {row['records_per_second']:.1f} records/s, {row['seconds']:.1f} s")
        print(
            f"  GPU memory of a process by nvidia-smi: idle {_told(row['idle_mib'])}, at most {_told(row['busy_mib'])}; "
            f"by torch's allocator: at the end {row['kept_mib']:.0f} MiB, at most {row['peak_mib']:.0f} MiB"
        )
    print(f"workers by leases over one process: {found['ratio']:.2f}")


def _told(mib: float | None) -> str:
    return "not told" if mib is None else f"{mib:.0f} MiB"
