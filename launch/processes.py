"""The processes of a run: coordinator and observer here, workers wherever their launcher puts them; watched, and stopped for good."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dpcfl_net.config import Config
from dpcfl_net.coordinator import CoordinatorSpec, run_coordinator
from dpcfl_net.errors import RunFailed
from dpcfl_net.experiment import COORDINATOR, OBSERVER
from dpcfl_net.job import PROTOCOL
from dpcfl_net.observer import ObserverSpec, run_observer
from dpcfl_net.one_process import OneProcessSpec, run_in_one_process
from dpcfl_net.runlog import Lines
from launch.child import Child, stop
from launch.crew import Crew
from launch.local import STOP_S, forkserver
from launch.sites import Site


def worker_processes(config: Config, clients: int) -> int:
    """The most worker processes that are there at once; none where all is done in one process."""
    runtime = config.runtime
    if runtime.federation == "in-process":
        return 0
    size = runtime.clients_per_worker
    return min(clients, runtime.max_live_workers) if size == 1 else -(-clients // size)


@dataclass
class FederationRun:
    """The processes of one run folder; `site` says where its workers are."""

    folder: Path
    config: Config
    clients: int
    operator_key: str
    site: Site
    children: dict[str, Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = forkserver()
        os.environ["DPCFL_PRELOAD_JOB"] = json.dumps(
            {"folder": str(self.folder), "operator_key": self.operator_key, "data_root": self.config.data.root}
        )
        shutil.rmtree(self.folder / "addresses", ignore_errors=True)  # of the processes before a resume
        for name in ("logs", "addresses"):
            (self.folder / name).mkdir(exist_ok=True)
        self._crew: Crew | None = None
        self._summons: Connection | None = None
        self._losses: Connection | None = None
        self._warnings = Lines(self.folder / "warnings.jsonl")

    def start(self) -> None:
        """Observer and coordinator, then every worker, unless they are more than may be connected at once."""
        runtime, keys = self.config.runtime, self.folder / "keys"
        self._spawn(
            OBSERVER, run_observer,
            ObserverSpec(
                self.folder, self.operator_key, self.site.bind(OBSERVER), keys, self.folder, self.config.data.root,
                self.config.output.evaluate_every,
            ),
        )  # fmt: skip
        observer = self._address(OBSERVER)
        self._summons, theirs = multiprocessing.Pipe(duplex=False)
        told, self._losses = multiprocessing.Pipe(duplex=False)
        self._spawn(
            COORDINATOR,
            run_coordinator,
            CoordinatorSpec(
                self.folder / PROTOCOL,
                self.operator_key,
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
                theirs,
                told,
            ),
        )
        theirs.close()
        told.close()
        launcher = self.site.launcher(
            self.folder, self.config, self.operator_key, self.site.reached(self._address(COORDINATOR)), self.site.reached(observer)
        )  # fmt: skip
        self._crew = Crew(
            launcher, self.clients, size=runtime.clients_per_worker, most=runtime.max_live_workers,
            max_restarts=runtime.max_restarts, must_all=runtime.quorum == 1, report=self._report, lose=self._lose,
        )  # fmt: skip
        if self.clients <= runtime.max_live_workers:
            self._crew.summon(range(self.clients))

    def watch(self, tick: Callable[[], None], interval_s: float = 0.3) -> None:
        """Call `tick` until coordinator and observer are done; restart crashed workers; RunFailed when it cannot go on."""
        assert self._crew is not None
        ticked = 0.0
        while self.children:
            self._crew.tend()
            self._attend(max(0.0, ticked + interval_s - time.monotonic()))
            if time.monotonic() - ticked >= interval_s:
                tick()
                ticked = time.monotonic()

    def _attend(self, patience_s: float) -> None:
        """Wait for news for so long: a summons, or the end of a process."""
        assert self._crew is not None
        roles = {child.process.sentinel: child for child in self.children.values()}
        summons = [self._summons] if self._summons is not None else []
        for source in wait([*roles, *self._crew.sentinels, *summons], timeout=patience_s):
            if source is self._summons:
                self._hear()
            elif source in roles:
                child = roles[source]
                del self.children[child.title]
                if code := child.take_exit():
                    raise child.failure(code)
            else:
                self._crew.ended(source)

    def _hear(self) -> None:
        """Every word that the coordinator has said; after the last one it is gone."""
        assert self._crew is not None
        assert self._summons is not None
        try:
            while self._summons.poll():
                self._crew.hear(self._summons.recv_bytes(64))
        except (EOFError, OSError):  # it has ended, or said what no coordinator says
            self._summons.close()
            self._summons = None

    def finish(self) -> None:
        """After the coordinator's goodbye: let the workers leave by themselves."""
        assert self._crew is not None
        self._crew.finish()
        deadline = time.monotonic() + STOP_S
        while self._crew.sentinels and time.monotonic() < deadline:
            for sentinel in wait(self._crew.sentinels, timeout=0.1):
                self._crew.ended(sentinel)

    def stop(self) -> None:
        """Ask, then insist: no process of this run outlives it."""
        self.site.close()
        stop([child.process for child in self.children.values() if child.process is not None], STOP_S)
        for pipe in (self._summons, self._losses):
            if pipe is not None:
                pipe.close()
        self._warnings.close()

    def _lose(self, client: int) -> None:
        assert self._losses is not None
        with contextlib.suppress(BrokenPipeError):  # a coordinator that has just ended needs to know of nobody
            self._losses.send_bytes(str(client).encode())

    def _report(self, text: str) -> None:
        self._warnings.write({"view": "launcher", "time": time.time(), "text": text})

    def _spawn(self, title: str, main: Callable[[Any], None], spec: Any) -> None:
        log = self.folder / "logs" / f"{title}.log"
        self.children[title] = Child(title, main, spec, log)
        self.children[title].launch(self._context)

    def _address(self, name: str) -> str:
        path, child = self.folder / "addresses" / name, self.children[name]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists():
                return path.read_text()
            if not child.process.is_alive():
                raise child.failure(child.process.exitcode)
            time.sleep(0.02)
        raise RunFailed(f"the {name} did not say where it listens within 60 s; see {child.log}")


@dataclass
class OneProcessRun:
    """A run without workers: one process for everybody, watched and stopped as the many are."""

    folder: Path
    config: Config
    operator_key: str

    def __post_init__(self) -> None:
        (self.folder / "logs").mkdir(exist_ok=True)
        ledger, output = self.config.ledger, self.config.output
        spec = OneProcessSpec(
            self.folder, self.operator_key, self.folder / "ledgers" if ledger.root is None else Path(ledger.root).expanduser(),
            ledger.budget, self.config.data.root, output.keep_checkpoints, self.config.runtime.quorum, output.evaluate_every,
        )  # fmt: skip
        self._child = Child("in-process", run_in_one_process, spec, self.folder / "logs" / "in-process.log")

    def start(self) -> None:
        """Start the process."""
        self._child.launch(forkserver())

    def watch(self, tick: Callable[[], None], interval_s: float = 0.3) -> None:
        """Call `tick` until it has ended; RunFailed if it failed."""
        while not wait([self._child.process.sentinel], timeout=interval_s):
            tick()
        if code := self._child.take_exit():
            raise self._child.failure(code)

    def finish(self) -> None:
        """Nobody else is there."""

    def stop(self) -> None:
        """End it if it runs still."""
        if self._child.process is not None:
            stop([self._child.process], STOP_S)
