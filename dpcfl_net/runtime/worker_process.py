"""A process that runs client steps: its network, device and threads, and its turns to compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from dpcfl_net.core import buffers
from dpcfl_net.core.cores import usable_cores
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.runtime.specs import WorkerSpec
from dpcfl_net.training import devices, memory
from dpcfl_net.training.compute_semaphore import ComputeSemaphore, cpu_folder, host_folder
from dpcfl_net.transport.links.netem import enter

Turns = Callable[[], contextlib.AbstractContextManager[Any]]


def prepare_process(spec: WorkerSpec) -> None:
    """Prepare a new process: enter its network, select its device, use one thread, and seed torch.

    Args:
        spec: Arguments of the process.

    Raises:
        RunFailed: If the network namespace or the device cannot be used.
    """
    import torch

    if spec.namespace is not None:
        enter(spec.namespace)  # before the first socket and thread of ZeroMQ
    devices.use(spec.device)
    if torch.get_num_threads() != 1:  # a forked process has inherited it; to set it again takes 0.5 MiB
        torch.set_num_threads(1)
    memory.keep_freed()
    # Of 21 workers with 11 million parameters free buffers would hold 0.9 GiB, to save a tenth of a round without training.
    buffers.keep_at_most(0)
    # Forked siblings share the parent's seed, from which no noise comes. torch.manual_seed would also search for GPUs, which
    # takes milliseconds.
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(7), "big"))


def turns(spec: WorkerSpec) -> Turns:
    """Return a function that makes a context in which this process may compute.

    Args:
        spec: Arguments of the process.

    Returns:
        The function; its context waits for a slot of a core or of the GPU and holds it. It raises RunFailed if the GPU's memory is
        too small for the computation.
    """
    device = spec.device
    limit = ComputeSemaphore(*spec.slots) if spec.slots and device.uuid is None else None
    if device.uuid is not None:
        shared = ComputeSemaphore(host_folder() / device.uuid, device.slots_per_gpu, stand_ins=False)
    else:
        shared = ComputeSemaphore(cpu_folder(), max(usable_cores(), spec.slots[1] if spec.slots else 1))

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        with limit.hold() if limit else contextlib.nullcontext(), shared.hold():
            try:
                yield
            except RuntimeError as error:
                if why := devices.out_of_memory(error):
                    raise RunFailed(why) from error
                raise
            finally:
                devices.release()

    return turn
