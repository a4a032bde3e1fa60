"""The limit on open files: raised as far as the system allows, and never lowered."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "allowed", "after"),
    [(64, 256, 100, 100, 100), (64, 80, 100, 80, 80), (128, 256, 100, 128, 128)],
)
def test_a_process_raises_its_own_limit(soft, hard, wanted, allowed, after):
    code = (
        "import resource; from dpcfl_net.core import open_files; "
        f"print(open_files.allow({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(allowed), str(after), str(hard)]
