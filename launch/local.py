"""All processes of a run on this machine: forked from one preloaded parent, watched, restarted, and stopped for good."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net.config import Config
from dpcfl_net.coordinator import CoordinatorSpec, run_coordinator
from dpcfl_net.errors import DpcflError, RunFailed
from dpcfl_net.experiment import COORDINATOR, OBSERVER
from dpcfl_net.job import PROTOCOL
from dpcfl_net.observer import ObserverSpec, run_observer
from dpcfl_net.worker import WorkerSpec, run_worker

BIND = "tcp://127.0.0.1:*"
STOP_S = 4.0


def compute_slots(config: Config) -> int:
    """Workers that compute at once: as the configuration says, else one per core that this process may use."""
    slots = config.runtime.slots
    return len(os.sched_getaffinity(0)) if slots == "auto" else slots


def entry(title: str, log: Path, main: Callable[[Any], None], spec: Any) -> None:
    """What a forked child runs: its own log, its own title, its own random state, no inherited signal habits."""
    import setproctitle

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and tells everybody in order
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    setproctitle.setproctitle(f"dpcfl {title}")
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(target=_die_with, args=(starter.sentinel,), name="watch", daemon=True).start()
    code = 0
    try:
        main(spec)
    except DpcflError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    os._exit(code)  # forked children skip the parent's exit handlers


def _die_with(sentinel: int) -> None:
    """Nobody outlives the launcher, however it ended; the ledger and the checkpoints are written for that."""
    wait([sentinel])
    os._exit(4)


@dataclass
class Child:
    """One process of the run and how to start it again."""

    title: str
    main: Callable[[Any], None]
    spec: Any
    log: Path
    process: Any = None
    restarts: int = 0


@dataclass
class LocalRun:
    """The processes of one run folder."""

    folder: Path
    config: Config
    clients: int
    operator_key: str
    children: dict[str, Child] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = "1"  # before the parent of all workers starts
        os.environ.setdefault("MALLOC_ARENA_MAX", "2")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["launch.preload"])
        shutil.rmtree(self.folder / "addresses", ignore_errors=True)  # of the processes before a resume
        for name in ("logs", "addresses"):
            (self.folder / name).mkdir(exist_ok=True)

    def start(self) -> None:
        """Observer, coordinator, then every worker."""
        runtime, keys = self.config.runtime, self.folder / "keys"
        self._spawn(
            OBSERVER, run_observer, ObserverSpec(self.folder, self.operator_key, BIND, keys, self.folder, self.config.data.root)
        )
        observer = self._address(OBSERVER)
        self._spawn(
            COORDINATOR,
            run_coordinator,
            CoordinatorSpec(
                self.folder / PROTOCOL,
                self.operator_key,
                BIND,
                observer,
                keys,
                self.folder,
                self.config.output.transcript,
                self.config.output.keep_checkpoints,
                runtime.quorum,
                runtime.round_timeout_s,
                runtime.join_timeout_s,
            ),
        )
        address = self._address(COORDINATOR)
        slots = compute_slots(self.config)
        ledgers = self.folder / "ledgers" if self.config.ledger.root is None else Path(self.config.ledger.root).expanduser()
        for client in range(self.clients):
            self._spawn(
                f"client {client}",
                run_worker,
                WorkerSpec(
                    self.folder,
                    client,
                    address,
                    observer,
                    keys,
                    self.operator_key,
                    ledgers,
                    self.config.ledger.budget,
                    self.config.data.root,
                    (self.folder / "addresses" / "slots", slots),
                    runtime.orphan_timeout_s,
                ),
            )

    def watch(self, tick: Callable[[], None], interval_s: float = 0.3) -> None:
        """Call `tick` until coordinator and observer are done; restart crashed workers; RunFailed when it cannot go on."""
        while True:
            alive = [c.process.sentinel for c in self.children.values() if c.process.is_alive()]
            wait(alive, timeout=interval_s)
            tick()
            coordinator, observer = self.children[COORDINATOR].process, self.children[OBSERVER].process
            for child in list(self.children.values()):
                if child.process.is_alive() or child.process.exitcode == 0 or child.title in self.lost:
                    continue
                self._crashed(child)
            if coordinator.exitcode == 0 and observer.exitcode == 0:
                return

    def finish(self) -> None:
        """After the coordinator's goodbye: let the workers leave by themselves."""
        deadline = time.monotonic() + STOP_S
        while any(c.process.is_alive() for c in self.children.values()) and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self) -> None:
        """Ask, then insist: no process of this run outlives it."""
        processes = [c.process for c in self.children.values() if c.process is not None and c.process.pid is not None]
        for process in processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in processes:
            process.join(timeout=max(0.05, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by title."""
        return {title: child.process.pid for title, child in self.children.items()}

    def _spawn(self, title: str, main: Callable[[Any], None], spec: Any) -> None:
        log = self.folder / "logs" / f"{title.replace(' ', '_')}.log"
        child = Child(title, main, spec, log)
        self.children[title] = child
        self._launch(child)

    def _launch(self, child: Child) -> None:
        child.process = self._context.Process(
            target=entry, args=(child.title, child.log, child.main, child.spec), name=child.title
        )
        child.process.start()

    def _crashed(self, child: Child) -> None:
        code = child.process.exitcode
        if child.title in (COORDINATOR, OBSERVER):
            raise _failure(child, code)
        if code not in (2, 3) and child.restarts < self.config.runtime.max_restarts:
            child.restarts += 1
            self._launch(child)
        elif self.config.runtime.quorum < 1:
            self.lost.append(child.title)  # the quorum decides, in the coordinator, whether the run can go on
        else:
            raise _failure(child, code)

    def _address(self, name: str) -> str:
        path, process = self.folder / "addresses" / name, self.children[name].process
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists():
                return path.read_text()
            if not process.is_alive():
                raise _failure(self.children[name], process.exitcode)
            time.sleep(0.02)
        raise RunFailed(f"the {name} did not say where it listens within 60 s; see {self.children[name].log}")


def _failure(child: Child, code: int | None) -> DpcflError:
    lines = child.log.read_text().strip().splitlines() if child.log.exists() else []
    last = lines[-1] if lines else "no message"
    error = RunFailed(f"{child.title} ended with code {code}: {last} (log: {child.log})")
    if code in (2, 3):
        error.exit_code = code
    return error
