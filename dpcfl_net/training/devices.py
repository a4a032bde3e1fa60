"""Devices: GPU assignment to workers, binding of a process to its GPU, and release of GPU memory after a lease."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.training.nvidia_smi import VISIBLE, Gpu, mig_slices, named, visible_gpus

if TYPE_CHECKING:
    import torch

__all__ = [
    "CPU", "Device", "Gpu", "assign", "deal", "lend", "out_of_memory", "release", "repeatable", "strict_arithmetic", "torch_device", "use",
    "visible_gpus",
]  # fmt: skip

# Read when CUDA starts. The proof in privacy/clipping.py is about IEEE arithmetic of the stated width, so nothing in the
# environment may turn on tensor cores' shorter formats; the workspace is what makes cuBLAS repeat its bits.
_CUDA_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVIDIA_TF32_OVERRIDE": "0",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
    "CUBLAS_EMULATE_DOUBLE_PRECISION": "0",
}


@dataclass(frozen=True)
class Device:
    """Device of one worker.

    Attributes:
        uuid: UUID of a GPU or a MIG slice; None: CPU.
        memory_fraction: Fraction of the GPU's memory that this process may allocate; None: no limit.
        slots_per_gpu: Workers that may compute on the GPU at the same time.
    """

    uuid: str | None = None
    memory_fraction: float | None = None
    slots_per_gpu: int = 1


CPU = Device()


class Settings(Protocol):
    """Device settings of the configuration's `runtime` section."""

    device: str
    gpus: list[str]
    gpu_placement: Literal["round-robin", "free-memory"]
    slots_per_gpu: int
    gpu_memory_fraction: float | None


class Movable(Protocol):
    """A module or another holder of tensors."""

    def to(self, device: torch.device) -> Any:
        """Move the tensors to a device."""


_current = CPU
_lent: list[Movable] = []


def assign(settings: Settings, workers: int, gpus: Sequence[Gpu]) -> list[Device]:
    """Assign a device to each worker.

    "auto" takes all GPUs if there are any and torch is built with CUDA, else the CPU; "cuda" takes all GPUs, "cuda:N" the N-th
    only, and `settings.gpus` those listed. "round-robin" takes the GPUs in turn; "free-memory" takes the GPU with most free
    memory per assigned worker.

    Args:
        settings: Device settings.
        workers: Number of workers.
        gpus: Available GPUs (`visible_gpus`).

    Returns:
        One device per worker.

    Raises:
        ConfigError: For a requested GPU that is absent, a torch without CUDA, or "free-memory" where free memory is unknown.
    """
    chosen = _chosen(settings, list(gpus))
    if not chosen:
        return [CPU] * workers
    by_memory = settings.gpu_placement == "free-memory"
    dealt = _by_free_memory(chosen, workers) if by_memory else [chosen[worker % len(chosen)] for worker in range(workers)]
    return [Device(gpu.uuid, settings.gpu_memory_fraction, settings.slots_per_gpu) for gpu in dealt]


def deal(settings: Settings, workers: int) -> list[Device]:
    """Call `assign` with the GPUs of this machine, which are queried only if the settings may use them.

    Args:
        settings: Device settings.
        workers: Number of workers.

    Raises:
        ConfigError: As `assign` and `visible_gpus`.
        RunFailed: As `visible_gpus`.
    """
    return assign(settings, workers, [] if settings.device == "cpu" else visible_gpus())


def _chosen(settings: Settings, gpus: list[Gpu]) -> list[Gpu]:
    device = settings.device
    if device == "cpu" or (device == "auto" and not settings.gpus and not (gpus and _cuda_build())):
        return []
    if settings.gpus:
        asked, chosen = f"runtime.gpus is {settings.gpus}", [_given(uuid, gpus) for uuid in settings.gpus]
    else:
        asked, chosen = f"runtime.device is {device!r}", _numbered(device, gpus)
    if not _cuda_build():
        raise ConfigError(f"{asked}: the installed torch is built without CUDA; install a CUDA build, or use cpu")
    return chosen


def _numbered(device: str, gpus: list[Gpu]) -> list[Gpu]:
    match = re.fullmatch(r"cuda:([0-9]+)", device)
    chosen = gpus if match is None else gpus[int(match[1]) : int(match[1]) + 1]
    if device != "auto" and not chosen:
        raise ConfigError(f"runtime.device is {device!r}: no such GPU here; {_there(gpus)}")
    return chosen


def _given(uuid: str, gpus: list[Gpu]) -> Gpu:
    """GPU that the user lists; a MIG slice is accepted unless nvidia-smi lists other slices."""
    slices = mig_slices() if uuid.startswith("MIG-") else []
    if slices is None:
        return Gpu(uuid, "MIG", 0, 0)
    gpu = named([*gpus, *(one for one in slices if one not in gpus)], uuid)
    if gpu is None:
        raise ConfigError(f"runtime.gpus holds {uuid!r}: no such GPU here, or several; {_there([*gpus, *slices])}")
    return gpu


def _there(gpus: Sequence[Gpu]) -> str:
    where = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
    return f"visible: {', '.join(f'{gpu.uuid} ({gpu.name})' for gpu in gpus) or 'none'}{where}"


def _by_free_memory(gpus: list[Gpu], workers: int) -> list[Gpu]:
    unknown = [gpu.uuid for gpu in gpus if not gpu.total]
    if unknown:
        raise ConfigError(
            f"runtime.gpu_placement is 'free-memory': free memory is unknown for {', '.join(unknown)}; use 'round-robin'"
        )
    taken = [0] * len(gpus)
    dealt = []
    for _ in range(workers):
        best = max(range(len(gpus)), key=lambda i: gpus[i].free / (taken[i] + 1))
        taken[best] += 1
        dealt.append(gpus[best])
    return dealt


def _cuda_build() -> bool:
    import torch

    return torch.version.cuda is not None


def use(device: Device) -> None:
    """Bind this process to a device; must come before CUDA is started.

    A process on the CPU sees no GPU. On a GPU, float32 is IEEE float32 and only deterministic kernels may run; others raise.

    CUDA starts without the GPU: one that is full, belongs to another process or is of a kind that torch has no kernels for fails
    at the first kernel. So some noise is computed here, before a task is charged.

    Args:
        device: The device.

    Raises:
        RunFailed: If CUDA was started already, here or before a fork, or cannot compute on the GPU, or if the GPU computes other
            bits of noise than the CPU.
    """
    global _current
    import torch

    if device.uuid is None:
        os.environ[VISIBLE] = ""
        _current = device
        return
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        raise RunFailed(
            f"GPU {device.uuid} cannot be chosen: CUDA was started here, or in the process that this was forked from"
        )
    from dpcfl_net.privacy import device_noise

    os.environ |= {VISIBLE: device.uuid} | _CUDA_ENVIRONMENT
    try:
        torch.cuda.init()
        if device.memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(device.memory_fraction, 0)
        device_noise.check(torch.device("cuda"))
        torch.cuda.empty_cache()
    except (RuntimeError, AssertionError) as problem:  # an AssertionError from a torch that is built without CUDA
        raise RunFailed(f"GPU {device.uuid} cannot be used: {problem}") from problem
    _current = device
    strict_arithmetic()


def torch_device() -> torch.device:
    """Return the torch device of this process: the CPU unless `use` chose a GPU."""
    import torch

    return torch.device("cpu" if _current.uuid is None else "cuda")


def repeatable() -> bool:
    """Return True if every other process computes the same bits, as on the CPU."""
    return _current.uuid is None


def strict_arithmetic() -> None:
    """On a GPU, set float32 without TF32 and deterministic kernels again, in case a user's model changed them; no effect on the
    CPU.
    """
    if _current.uuid is None:
        return
    import torch

    backends: Any = torch.backends
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = False
    if hasattr(backends, "fp32_precision"):  # from torch 2.9 on, where it overrules the older switches
        for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            part.fp32_precision = "ieee"
    backends.cudnn.benchmark, backends.cudnn.deterministic = False, True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


def out_of_memory(error: RuntimeError) -> str:
    """Explain an error of torch that is about the GPU's memory; empty for other errors.

    Args:
        error: The error of a computation.
    """
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    return (
        f"GPU {_current.uuid} has too little memory for this task: lower runtime.slots_per_gpu or local.batch_size, or raise "
        f"runtime.gpu_memory_fraction if it is set ({error})"
    )


def lend(thing: Movable) -> torch.device:
    """Move an object that keeps tensors between tasks to this process's device until `release`; no effect on the CPU.

    Args:
        thing: The object.

    Returns:
        The device.
    """
    device = torch_device()
    if _current.uuid is not None and not any(thing is other for other in _lent):
        thing.to(device)
        _lent.append(thing)
    return device


def release() -> None:
    """End a lease: move lent objects back to the CPU and free all GPU memory but the CUDA context; no effect on the CPU."""
    if _current.uuid is None:
        return
    import torch

    torch.cuda.synchronize()
    while _lent:
        _lent.pop().to(torch.device("cpu"))
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
