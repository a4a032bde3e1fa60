"""Settings of torch and NumPy in a worker process, for code that runs in the process of a caller who may have set others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def as_in_a_worker() -> Iterator[None]:
    """Use the settings of a worker process and restore those of torch, NumPy and BLAS afterwards.

    A worker has one thread, the CPU, float32 in full precision, gradients, no autocast, torch's usual choice of kernels, and
    NumPy's usual reaction to floating-point errors. Under other settings a run would have other bits, or fail.
    """
    import numpy as np
    import torch
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(threadpool_limits(1))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            if torch.is_autocast_enabled("cpu"):
                stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(_numbers_restored(torch))
            stack.enter_context(_usual_kernels(torch))
            stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            yield
    finally:  # last: limiting BLAS also limits the OpenMP threads that torch computes with
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _numbers_restored(torch: Any) -> Iterator[None]:
    """Restore the default type, flushing of denormals and the precision of products of float32 numbers."""
    dtype, flushes = torch.get_default_dtype(), _flushes_denormals(torch)
    backends = torch.backends
    parts = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn, backends.cuda.matmul]
    each = [part.fp32_precision for part in parts]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the switches of the parts were set to what has no name here
        precision = None
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_flush_denormal(flushes)
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for part, value in zip(parts, each, strict=True):
            part.fp32_precision = value


@contextlib.contextmanager
def _usual_kernels(torch: Any) -> Iterator[None]:
    """Let torch choose its kernels as in a new process, and restore the caller's choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = _deterministic(torch)
    one_dnn = torch.backends.mkldnn.enabled
    attention = [
        SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION,
    ]  # fmt: skip
    try:
        _set_deterministic(torch, (False, False))
        torch.backends.mkldnn.enabled = True
        with sdpa_kernel(attention):
            yield
    finally:
        _set_deterministic(torch, before)
        torch.backends.mkldnn.enabled = one_dnn


def _deterministic(torch: Any) -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(torch: Any, wanted: tuple[bool, bool]) -> None:
    # torch's function imports its compiler, which takes more than a second and 70 MiB.
    if _deterministic(torch) != wanted:
        torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])


def _flushes_denormals(torch: Any) -> bool:
    """Return whether torch flushes denormal numbers in this thread; torch has no function for that."""
    return float(torch.tensor([1e-310], dtype=torch.float64).mul(1.0)) == 0.0
