"""The processes of a run: coordinator and observer here, workers wherever their launcher puts them; watched, and stopped for good."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIGTERM
from typing import Any, Protocol

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.runlog import Lines
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.config import Config
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.placement.child import Child, stop
from dpcfl_net.launch.placement.interpreter import Interpreter
from dpcfl_net.launch.placement.local import STOP_S, forkserver
from dpcfl_net.launch.placement.placements import Placement, terms_of
from dpcfl_net.launch.placement.worker_pool import WorkerPool
from dpcfl_net.runtime.coordinator import CoordinatorSpec
from dpcfl_net.runtime.observer import ObserverSpec
from dpcfl_net.runtime.worker_spec import OneProcessSpec
from dpcfl_net.transport.keys import COORDINATOR, OBSERVER


def worker_processes(config: Config, clients: int) -> int:
    """The most worker processes that are there at once; none where all is done in one process."""
    runtime = config.runtime
    if runtime.federation == "in-process":
        return 0
    size = runtime.clients_per_worker
    return min(clients, runtime.max_live_workers) if size == 1 else -(-clients // size)


# Up to so many clients each worker reads the job in less time than their parent would be waited for.
SMALL_ROSTER = 100
# What the processes of these names run, as `Interpreter` takes it.
MAINS = {COORDINATOR: "dpcfl_net.runtime.coordinator:run_coordinator", OBSERVER: "dpcfl_net.runtime.observer:run_observer"}


class Run(Protocol):
    """The processes of one run folder, from the first to the last."""

    def warm(self) -> None:
        """Start what can load its libraries before there is a job."""

    def start(self, job: Job, interrupts: Interrupts) -> None:
        """Start the run of a job that lies in the folder; KeyboardInterrupt as `Interrupts.check`."""

    def watch(self, tick: Callable[[], None], interrupts: Interrupts, interval_s: float = 0.3) -> None:
        """Call `tick` until coordinator and observer are done; RunFailed when it cannot go on, KeyboardInterrupt as above."""

    def finish(self) -> None:
        """After the last round: let who is still there leave."""

    def stop(self) -> None:
        """Ask, then insist: no process of this run outlives it."""

    def devices(self) -> dict[str, int]:
        """How many worker processes compute on what."""

    def processes(self) -> int:
        """The most processes that are there at once."""


def run_of(folder: Path, config: Config, site: Placement, calling_process: bool = False) -> Run:
    """The processes that a configuration asks for; calling_process: none of them, all is done in this one."""
    if calling_process:
        from dpcfl_net.launch.calling_process import CallingProcessRun

        return CallingProcessRun(folder, config)
    if config.runtime.federation == "in-process":
        return OneProcessRun(folder, config)
    return FederationRun(folder, config, site)


@dataclass
class FederationRun:
    """Coordinator and observer here, each a fresh interpreter; workers where `site` has them."""

    folder: Path
    config: Config
    site: Placement
    children: dict[str, Interpreter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._files = RunFolder(self.folder)
        shutil.rmtree(self._files.addresses, ignore_errors=True)  # of the processes before a resume
        for folder in (self._files.logs, self._files.addresses):
            folder.mkdir(exist_ok=True)
        self._pool: WorkerPool | None = None
        self._commands: Connection | None
        self._losses: Connection | None
        self._commands, self._telling = multiprocessing.Pipe(duplex=False)
        self._told, self._losses = multiprocessing.Pipe(duplex=False)
        self._warnings = Lines(self._files.warnings)

    def warm(self) -> None:
        """See `Run`."""
        pipes = (self._telling.fileno(), self._told.fileno())
        self._spawn(COORDINATOR, pass_fds=pipes)
        self._spawn(OBSERVER, extra=("DPCFL_DATA", "XDG_CACHE_HOME"))
        if sum(self.config.data.clients) <= SMALL_ROSTER:
            self.site.preload()

    def start(self, job: Job, interrupts: Interrupts) -> None:
        """See `Run`: observer and coordinator, then every worker, unless they are more than may be connected at once."""
        runtime, keys, operator_key = self.config.runtime, self._files.keys, read_operator_key(self._files.operator_key)
        clients = len(job.protocol.roster)
        self.children[OBSERVER].start(
            ObserverSpec(
                self.folder, operator_key, self.site.bind(OBSERVER), keys, self.folder, self.config.data.root,
                self.config.output.evaluate_every,
            )
        )  # fmt: skip
        self.site.preload((self.folder, operator_key, self.config.data.root))  # unless it runs already
        observer = self._address(OBSERVER, interrupts)
        self.children[COORDINATOR].start(
            CoordinatorSpec(
                self._files.protocol,
                operator_key,
                self.site.bind(COORDINATOR),
                observer,
                keys,
                self.folder,
                self.config.output.transcript,
                self.config.output.keep_checkpoints,
                runtime.quorum,
                runtime.round_timeout_s,
                runtime.join_timeout_s,
                runtime.max_live_workers,
                self._telling.fileno(),
                self._told.fileno(),
            )
        )
        connect = self.site.reached(self._address(COORDINATOR, interrupts))
        self._telling.close()
        self._told.close()
        launcher = self.site.launcher(self.folder, self.config, operator_key, connect, self.site.reached(observer))
        self._pool = WorkerPool(
            launcher, clients, size=runtime.clients_per_worker, most=runtime.max_live_workers,
            max_restarts=runtime.max_restarts, must_all=runtime.quorum == 1, report=self._report, lose=self._lose,
        )  # fmt: skip
        if clients <= runtime.max_live_workers:
            self._pool.start_worker(range(clients))

    def watch(self, tick: Callable[[], None], interrupts: Interrupts, interval_s: float = 0.3) -> None:
        """See `Run`; restarts crashed workers."""
        assert self._pool is not None
        ticked = 0.0
        while self.children:
            self._pool.tend()
            self._attend(max(0.0, ticked + interval_s - time.monotonic()), interrupts)
            if time.monotonic() - ticked >= interval_s:
                tick()
                ticked = time.monotonic()

    def _attend(self, patience_s: float, interrupts: Interrupts) -> None:
        """Wait for news for so long: a signal, a start command, or the end of a process."""
        assert self._pool is not None
        roles = {child.sentinel: child for child in self.children.values()}
        commands = [self._commands] if self._commands is not None else []
        found = wait([*roles, *self._pool.sentinels, *commands, interrupts.fileno()], timeout=patience_s)
        interrupts.check()  # first: a signal to all processes ends some of them, which is no failure then
        for source in found:
            if source is self._commands:
                self._hear()
            elif source in roles:
                self._ended(roles[source])
            elif source != interrupts.fileno():
                self._pool.ended(source)

    def _ended(self, child: Interpreter) -> None:
        if code := child.wait():
            raise child.failure(code)
        del self.children[child.title]
        child.close()
        if child.title == COORDINATOR:
            assert self._pool is not None
            self._pool.finish()

    def _hear(self) -> None:
        """Every word that the coordinator has said; after the last one it is gone."""
        assert self._pool is not None
        assert self._commands is not None
        try:
            while self._commands.poll():
                self._pool.hear(self._commands.recv_bytes(64))
        except (EOFError, OSError):  # it has ended, or said what no coordinator says
            self._commands.close()
            self._commands = None

    def finish(self) -> None:
        """See `Run`: after the coordinator's goodbye."""
        assert self._pool is not None
        deadline = time.monotonic() + STOP_S
        while self._pool.sentinels and time.monotonic() < deadline:
            for sentinel in wait(self._pool.sentinels, timeout=0.1):
                self._pool.ended(sentinel)

    def stop(self) -> None:
        """See `Run`."""
        for child in self.children.values():
            child.signal(SIGTERM)
        self.site.close()
        stop([*self.children.values()], STOP_S)
        self.children.clear()
        for pipe in (self._commands, self._losses, self._telling, self._told):
            if pipe is not None:
                pipe.close()
        self._warnings.close()

    def devices(self) -> dict[str, int]:
        """See `Run`."""
        return self.site.devices()

    def processes(self) -> int:
        """See `Run`."""
        return worker_processes(self.config, sum(self.config.data.clients)) + 2

    def _lose(self, client: int) -> None:
        assert self._losses is not None
        with contextlib.suppress(BrokenPipeError):  # a coordinator that has just ended needs to know of nobody
            self._losses.send_bytes(str(client).encode())

    def _report(self, text: str) -> None:
        self._warnings.write({"view": "launcher", "time": time.time(), "text": text})

    def _spawn(self, title: str, **how: Any) -> None:
        self.children[title] = Interpreter(title, MAINS[title], self._files.log(title), **how)

    def _address(self, name: str, interrupts: Interrupts) -> str:
        path, child = self._files.address(name), self.children[name]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists():
                return path.read_text()
            interrupts.check()
            if (code := child.wait(0.02)) is not None:
                raise child.failure(code)
        raise RunFailed(f"the {name} did not say where it listens within 60 s; see {child.log}")


@dataclass
class OneProcessRun:
    """A run without workers: one process for everybody, watched and stopped as the many are."""

    folder: Path
    config: Config

    def __post_init__(self) -> None:
        self._files = RunFolder(self.folder)
        self._files.logs.mkdir(exist_ok=True)
        self._child: Child | None = None

    def warm(self) -> None:
        """See `Run`: there is nothing to load before the job."""

    def start(self, job: Job, interrupts: Interrupts) -> None:
        """See `Run`."""
        spec = one_process_spec(self.folder, self.config)
        self._child = Child("in-process", serve_in_one_process, spec, self._files.log("in-process"))
        self._child.launch(forkserver())

    def watch(self, tick: Callable[[], None], interrupts: Interrupts, interval_s: float = 0.3) -> None:
        """See `Run`."""
        assert self._child is not None
        while self._child.sentinel not in wait([self._child.sentinel, interrupts.fileno()], timeout=interval_s):
            interrupts.check()
            tick()
        interrupts.check()
        if code := self._child.wait():
            raise self._child.failure(code)

    def finish(self) -> None:
        """See `Run`: nobody else is there."""

    def stop(self) -> None:
        """See `Run`."""
        if self._child is not None:
            stop([self._child], STOP_S)
            self._child = None

    def devices(self) -> dict[str, int]:
        """See `Run`."""
        return {"cpu": 1}

    def processes(self) -> int:
        """See `Run`."""
        return 1


def one_process_spec(folder: Path, config: Config) -> OneProcessSpec:
    """Collect what a run in one process starts with, from its folder and configuration."""
    files = RunFolder(folder)
    return OneProcessSpec(
        folder, read_operator_key(files.operator_key), files.ledgers, terms_of(config), config.data.root,
        config.output.keep_checkpoints, config.runtime.quorum, config.output.evaluate_every,
    )  # fmt: skip


def serve_in_one_process(spec: OneProcessSpec) -> None:
    """What the one process runs; the launcher itself need not load what computes."""
    from dpcfl_net.runtime.one_process import run_in_one_process

    run_in_one_process(spec)
