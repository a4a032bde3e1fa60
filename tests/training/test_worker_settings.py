"""Code in a caller's process computes as in a worker, whatever the caller has set."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, scaled_dot_product_attention

from dpcfl_net.training.worker_settings import as_in_a_worker


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def gradients(function, *shape: int) -> torch.Tensor:
    x = numbers(*shape).requires_grad_()
    return torch.autograd.grad(function(x).square().sum(), x)[0]


def attention() -> torch.Tensor:
    return gradients(lambda x: scaled_dot_product_attention(x, x, x, is_causal=True), 4, 4, 80, 16)


def convolution() -> torch.Tensor:
    return gradients(lambda x: conv2d(x, numbers(16, 8, 3, 3)), 8, 8, 20, 20)


@pytest.mark.parametrize("compute", [attention, convolution])
def test_torch_takes_the_same_kernels_as_in_a_worker(compute):
    with as_in_a_worker():
        usual = compute()
    torch.backends.mkldnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            assert not torch.equal(compute(), usual)  # so these settings do choose other kernels
            with as_in_a_worker():
                other = compute()
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert not torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = True
    assert torch.equal(other, usual)


def test_numpy_reacts_to_floating_point_errors_as_in_a_worker():
    """With `np.seterr(all="raise")` in a notebook, a run ended at the first number that underflows."""
    with np.errstate(all="raise"):
        before = np.geterr()
        with as_in_a_worker():
            assert np.exp(np.float64(-1e4)) == 0
            assert np.geterr() == {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
        assert np.geterr() == before


def test_the_settings_do_not_import_the_compiler_of_torch():
    """It takes more than a second and 70 MiB, of every run in the process of its caller."""
    code = (
        "import sys; from dpcfl_net.training.worker_settings import as_in_a_worker\nwith as_in_a_worker(): pass\n"
        "print({'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("warns", [False, True])
def test_deterministic_algorithms_are_off_inside_and_as_before_afterwards(warns):
    def state():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    torch.use_deterministic_algorithms(True, warn_only=warns)
    try:
        with as_in_a_worker():
            assert state() == (False, False)
        assert state() == (True, warns)
    finally:
        torch.use_deterministic_algorithms(False)
    with as_in_a_worker():
        torch.use_deterministic_algorithms(True)  # as an own model may
    assert state() == (False, False)
