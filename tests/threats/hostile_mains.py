"""Main functions of two modified processes for tests: a coordinator without checks, and a hostile worker."""

from __future__ import annotations

import sys
from typing import Any

from dpcfl_net.runtime.specs import CoordinatorSpec, WorkerSpec

STEPS = "hostile-steps"  # file of the run folder: client, steps


def careless_coordinator(spec: CoordinatorSpec) -> None:
    """Run `run_coordinator` without the checks of norms and of non-finite numbers."""
    from dpcfl_net.core import tensors
    from dpcfl_net.federation import release_check
    from dpcfl_net.runtime.coordinator import run_coordinator
    from dpcfl_net.transport.payload import Assembly

    def unchecked(self: Assembly) -> dict[str, Any]:
        return tensors.split([list(row) for row in self.header.tensors], self._buffer)

    release_check.check_release = lambda *about: None
    Assembly.tensors = unchecked
    run_coordinator(spec)


def worker_or_worse(spec: WorkerSpec) -> None:
    """Run `run_worker`, or the hostile worker for the client that the folder's STEPS names."""
    from dpcfl_net.adversaries import hostile_worker
    from dpcfl_net.runtime.worker import run_worker

    client, steps = (spec.job / STEPS).read_text().split()
    if spec.client != int(client):
        run_worker(spec)
    elif code := hostile_worker.main(
        [str(spec.job), "--client", client, "--connect", spec.connect, "--keys", str(spec.keys), "--steps", steps]
    ):
        sys.exit(code)
