"""A run in one separate process: all roles and clients, without messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.cost_estimate import evaluation_interval
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.network_settings import compute_factors, links_of
from dpcfl_net.federation.virtual_clock import VirtualNetwork
from dpcfl_net.launch.interrupts import TICK_S, Interrupts
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import Child, start_of, stop, worker_environment
from dpcfl_net.launch.placement.local import STOP_S
from dpcfl_net.launch.placement.placements import worker_terms
from dpcfl_net.runtime.specs import OneProcessSpec


@dataclass
class OneProcessRun:
    """A run in one separate process (see `run_kinds.Run`)."""

    folder: Path
    config: Config

    def __post_init__(self) -> None:
        self._files = RunFolder(self.folder)
        self._files.logs.mkdir(exist_ok=True)
        self._child: Child | None = None

    def warm(self) -> None:
        parents.warm()

    def start(self, job: Job, interrupts: Interrupts) -> None:
        parents.warm().wait_until_loaded(interrupts.check)
        spec = one_process_spec(self.folder, self.config, job)
        start = start_of("dpcfl_net.runtime.one_process:run_in_one_process", spec, worker_environment())
        self._child = parents.fork_role("in-process", start, self._files.log("in-process"))

    def watch(self, tick: Callable[[], None], interrupts: Interrupts) -> None:
        assert self._child is not None
        while self._child.sentinel not in wait([self._child.sentinel, interrupts.fileno()], timeout=TICK_S):
            interrupts.check()
            tick()
        interrupts.check()
        if code := self._child.wait():
            raise self._child.failure(code)

    def finish(self) -> None:
        """There are no workers."""

    def stop(self) -> None:
        if self._child is not None:
            stop([self._child], STOP_S)
            self._child = None

    def devices(self) -> dict[str, int]:
        return {"cpu": 1}

    def processes(self) -> int:
        return 1


def one_process_spec(folder: Path, config: Config, job: Job) -> OneProcessSpec:
    """Return the arguments of a run in one process.

    Args:
        folder: The run folder.
        config: The configuration of the run.
        job: The job.
    """
    files = RunFolder(folder)
    return OneProcessSpec(
        folder, read_operator_key(files.operator_key), files.ledgers, worker_terms(config), config.data.root,
        config.output.keep_checkpoints, config.runtime.quorum,
        evaluation_interval(job, config.data.root, config.output.evaluate_every), virtual_network(config),
    )  # fmt: skip


def virtual_network(config: Config) -> VirtualNetwork | None:
    """Return links and speeds of the clients for a run in virtual time.

    Args:
        config: The configuration of the run.

    Returns:
        The network; None for a run in real time.
    """
    network = config.network
    if network.clock != "virtual":
        return None
    links, factors = dict(enumerate(links_of(network, config.data.clients))), compute_factors(network, config.data.clients)
    return VirtualNetwork(links, network.cores, factors, config.runtime.round_timeout_s)
