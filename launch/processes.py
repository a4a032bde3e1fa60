"""A run with a process per role: starts, watches and stops coordinator, observer, relay, aggregators and workers."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGTERM
from typing import Any

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import DpcflError, RunFailed
from dpcfl_net.core.failed_clients import NO_RESTART
from dpcfl_net.core.files import reason
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.runlog import Lines
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.cost_estimate import evaluation_interval
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.launch.aggregators import Aggregators
from dpcfl_net.launch.chaos import Chaos
from dpcfl_net.launch.coordinator_pipes import CoordinatorPipes
from dpcfl_net.launch.interrupts import TICK_S, Interrupts
from dpcfl_net.launch.links import RELAY, Links, require_netem
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.base import LOST, Addresses, Role
from dpcfl_net.launch.placement.child import role_environment, start_of, stop
from dpcfl_net.launch.placement.fork_server import COORDINATOR_MAIN, FIRST_FREE
from dpcfl_net.launch.placement.local import STOP_S
from dpcfl_net.launch.placement.placements import LocalPlacement, Placement
from dpcfl_net.launch.placement.worker_pool import PoolLimits, WorkerPool
from dpcfl_net.launch.restarts import Restarts
from dpcfl_net.results.rounds import unmeasured_rounds
from dpcfl_net.runtime.specs import CoordinatorSpec, ObserverSpec
from dpcfl_net.training.compute_semaphore import host_folder
from dpcfl_net.transport import loopback
from dpcfl_net.transport.keys import COORDINATOR, OBSERVER

_log = logging.getLogger(__name__)

NAMED_ROUNDS = 10  # of those without accuracy
LISTEN_S = 120.0  # for a process to listen; an aggregator's libraries may load from a network file system
# Main function of each role.
MAINS = {
    COORDINATOR: COORDINATOR_MAIN,
    OBSERVER: "dpcfl_net.runtime.observer:run_observer",
    RELAY: "dpcfl_net.transport.links.relay:run_relay",
}


@dataclass
class FederationRun:
    """Coordinator and observer on this machine, workers on the hosts of the placement (see `run_kinds.Run`)."""

    folder: Path
    config: Config
    placement: Placement
    chaos: Chaos | None = None
    children: dict[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._files = RunFolder(self.folder)
        shutil.rmtree(self._files.addresses, ignore_errors=True)  # of a previous start
        for folder in (self._files.logs, self._files.addresses):
            folder.mkdir(exist_ok=True)
        self._operator_key = self._observer = ""
        self._observer_is_lost = self._observer_tried_again = False
        self._evaluate_every = 1
        self._links: Links | None = None
        self._aggregators: Aggregators | None = None
        self._lost_aggregators: list[int] = []  # numbers of those that do not run again
        self._pool: WorkerPool | None = None
        self._pipes = CoordinatorPipes()
        self._restarts = Restarts(self.config.runtime.max_restarts)
        self._warnings = Lines(self._files.warnings)

    def warm(self) -> None:
        require_netem(self.config)
        if isinstance(self.placement, LocalPlacement):  # without these all workers fail, one restart after another
            host_folder()
            try:
                loopback.connect()
            except OSError as error:
                raise RunFailed(
                    f"no process of this machine can connect over 127.0.0.1 ({reason(error)}): {loopback.REPAIR}"
                ) from None
        parents.warm()

    def start(self, job: Job, interrupts: Interrupts) -> None:
        """Start observer, coordinator, and all workers if they may all be connected at a time."""
        parents.warm().wait_until_loaded(interrupts.check)
        self._operator_key = read_operator_key(self._files.operator_key)
        self._evaluate_every = evaluation_interval(job, self.config.data.root, self.config.output.evaluate_every)
        runtime, clients = self.config.runtime, len(job.protocol.roster)
        if self.config.network.how != "off":
            self._links = Links(self._files, self.config, job)
        if job.protocol.aggregators:
            groups = [entry.clients for entry in job.protocol.aggregators]
            self._aggregators = self.placement.aggregators(self._files, runtime, groups)
        self._start_observer(self._bind(OBSERVER))
        self.placement.preload((self.folder, self._operator_key, self.config.data.root))
        self._observer = self._address(OBSERVER, interrupts)
        self._start_coordinator(self._bind(COORDINATOR))
        addresses = self._addresses(interrupts)
        launcher = self.placement.launcher(self.folder, self.config, self._operator_key, addresses)
        self._pool = WorkerPool(
            launcher,
            clients,
            PoolLimits(runtime.clients_per_worker, runtime.max_live_workers, runtime.max_restarts, runtime.quorum == 1),
            report=self._report,
            on_lost=self._pipes.tell if self._aggregators is None else self._aggregators.tell,
        )
        if clients <= runtime.max_live_workers:
            self._pool.start_worker(range(clients))

    def _bind(self, role: str) -> str:
        own = self._links.bind if self._links is not None else None
        return own or self.placement.bind(role)

    def _addresses(self, interrupts: Interrupts) -> Addresses:
        """Wait until coordinator and relay listen, and return the addresses for workers."""
        coordinator, observer = self._address(COORDINATOR, interrupts), self.placement.reachable_address(self._observer)
        relayed: dict[int, str] = {}
        if self._links is not None and self._links.relayed:
            self._start_relay(coordinator)
            self._address(RELAY, interrupts)
            relayed = {client: self.placement.reachable_address(at) for client, at in self._links.addresses().items()}
        if self._aggregators is not None:
            for title in self._aggregators.groups:
                self.children[title] = self._aggregators.start(title)
            for title in self._aggregators.groups:
                self._address(title, interrupts)
            relayed = self._aggregators.addresses()
        namespaces = self._links.namespaces if self._links is not None else {}
        return Addresses(self.placement.reachable_address(coordinator), observer, relayed, namespaces)

    def _start_relay(self, coordinator: str) -> None:
        assert self._links is not None
        spec = self._links.relay_spec(coordinator, self.placement.bind(COORDINATOR), self.placement.first_relay_port())
        self._fork(RELAY, spec, role_environment())

    def _start_observer(self, bind: str, *, after_the_end: bool = False) -> None:
        spec = ObserverSpec(
            self.folder, self._operator_key, bind, self._files.keys, self.folder, self.config.data.root,
            self._evaluate_every, after_the_end,
        )  # fmt: skip
        self._fork(OBSERVER, spec, role_environment(("DPCFL_DATA", "XDG_CACHE_HOME")))

    def _start_coordinator(self, bind: str) -> None:
        runtime, output = self.config.runtime, self.config.output
        listens = OBSERVER in self._expected()  # False for a restart after it has measured the last round, or is lost
        spec = CoordinatorSpec(
            self._files.protocol,
            self._operator_key,
            bind,
            self._observer if listens else None,
            self._files.keys,
            self.folder,
            transcript=output.transcript,
            keep_checkpoints=output.keep_checkpoints,
            quorum=runtime.quorum,
            round_timeout_s=runtime.round_timeout_s,
            join_timeout_s=runtime.join_timeout_s,
            pause_s=runtime.pause_s,
            max_live=runtime.max_live_workers,
            commands=FIRST_FREE,
            lost=FIRST_FREE + 1,
            faults=None if self.chaos is None else self.chaos.message_faults,
            durable=runtime.durable,
            keep_releases=self.config.audit.canaries > 0,
        )
        with self._pipes.renewed() as descriptors:
            self._fork(COORDINATOR, spec, role_environment(), descriptors)

    def _expected(self) -> set[str]:
        """Return the processes that run or will start again, without workers."""
        return {*self.children, *self._restarts.scheduled}

    def watch(self, tick: Callable[[], None], interrupts: Interrupts) -> None:
        """Watch the run, and restart processes that crashed."""
        assert self._pool is not None
        ticked = 0.0
        while {COORDINATOR, OBSERVER} & self._expected():
            self._pool.update()
            self._restart_roles()
            timeout_s = max(0.0, ticked + TICK_S - time.monotonic())
            if self.chaos is not None:
                self.chaos.tick()
                timeout_s = min(timeout_s, self.chaos.interval_s)
            self._wait(timeout_s, interrupts)
            if time.monotonic() - ticked >= TICK_S:
                tick()
                ticked = time.monotonic()

    def _wait(self, timeout_s: float, interrupts: Interrupts) -> None:
        """Wait for a signal, a command of the coordinator or the end of a process, and handle it."""
        assert self._pool is not None
        roles = {child.sentinel: child for child in self.children.values()}
        commands = [self._pipes.commands] if self._pipes.commands is not None else []
        ready = wait([*roles, *self._pool.sentinels, *commands, interrupts.fileno()], timeout=timeout_s)
        interrupts.check()  # first: a signal to the process group also ends other processes, which is not a failure
        for source in ready:
            if source == self._pipes.commands:
                self._pipes.read_commands(self._pool.handle_command)
            elif source in roles:
                self._ended(roles[source])
            elif source != interrupts.fileno():
                self._pool.ended(source)

    def _ended(self, child: Role) -> None:
        """Handle the end of a process that is no worker: it is done, starts again, or the run fails or continues without it."""
        assert self._pool is not None
        title, code = child.title, child.wait()
        error = child.failure(code)
        del self.children[title]
        child.close()
        crashed = code is None or code < 0 or code == LOST or (title != COORDINATOR and code not in (0, *NO_RESTART))
        if not code:
            if title == COORDINATOR:
                self._pool.finish()
                if self._observer_is_lost:
                    self._try_last_round()
            elif title == OBSERVER and COORDINATOR in self.children:
                self._pipes.tell(OBSERVER)
        elif not crashed:
            raise error
        elif (count := self._restarts.schedule(title)) is not None:
            self._report(f"{error}; restarted ({count} of at most {self._restarts.most} restarts)")
        elif title == OBSERVER:
            self._observer_is_lost = True
            if COORDINATOR in self._expected():
                self._pipes.tell(OBSERVER)
                self._report(f"{error}; the run continues without it: no accuracy is measured before the end")
            else:
                self._report(f"{error}; no restarts are left")
                self._try_last_round()
        elif self._aggregators is not None and title in self._aggregators.groups and self.config.runtime.quorum < 1:
            self._lose_aggregator(self._aggregators, title, error)
        else:
            raise error

    def _try_last_round(self) -> None:
        """Start the observer once more for the last round, which has a checkpoint: a full disk may have room again."""
        if not self._observer_tried_again:
            self._observer_tried_again = True
            self._start_observer(self._files.address(OBSERVER).read_text(), after_the_end=True)

    def _lose_aggregator(self, aggregators: Aggregators, title: str, error: DpcflError) -> None:
        """Continue without an aggregator: its clients are missing from every later round, and their workers end."""
        assert self._pool is not None
        group = aggregators.groups[title]
        self._report(f"{error}; lost for the rest of the run, with its clients {group[0]} to {group[-1]}")
        self._lost_aggregators.append(aggregators.number(title))
        self._pipes.tell(self._lost_aggregators[-1])  # it checks the quorum
        self._pool.stop_worker(group)

    def _restart_roles(self) -> None:
        """Start roles again whose time has come, at their previous addresses; the others connect to them again."""
        assert self._pool is not None
        for title in self._restarts.due():
            self._restarts.begin(title)
            if title == RELAY:
                self._start_relay(self._files.address(COORDINATOR).read_text())
                continue
            if self._aggregators is not None and title in self._aggregators.groups:
                self.children[title] = self._aggregators.start(title)
                self._aggregators.tell_again(title, self._pool.lost())
                continue
            address = self._files.address(title).read_text()
            if title == OBSERVER:
                self._start_observer(address, after_the_end=COORDINATOR not in self._expected())
                continue
            self._start_coordinator(address)
            # Aggregators know their lost clients.
            for peer in self._pool.lost() if self._aggregators is None else self._lost_aggregators:
                self._pipes.tell(peer)

    def finish(self) -> None:
        assert self._pool is not None
        clock = AwakeClock()
        deadline = clock.now() + STOP_S
        while self._pool.sentinels and clock.now() < deadline:
            for sentinel in wait(self._pool.sentinels, timeout=0.1):
                self._pool.ended(sentinel)
        for child in self.children.values():  # aggregators, whose last records a host still has to send
            child.wait(max(0.0, deadline - clock.now()))
        self._close_placement()  # hosts send the last lines of their ledgers
        if unmeasured := unmeasured_rounds(self.folder, self.config.rounds, self._evaluate_every):
            self._report(_unmeasured(unmeasured, self.config.rounds, self._files.log(OBSERVER)), unmeasured=unmeasured)

    def stop(self) -> None:
        for child in self.children.values():
            child.signal(SIGTERM)
        with ExitStack() as stack:  # from the last to the first, each also after an error of another
            stack.callback(self._warnings.close)
            if self._aggregators is not None:
                stack.callback(self._aggregators.close)
            if self._links is not None:
                stack.callback(self._links.close)
            stack.callback(self._pipes.close)
            stack.callback(self.children.clear)
            stack.callback(stop, [*self.children.values()], STOP_S)
            self._close_placement()

    def _close_placement(self) -> None:
        for text in self.placement.close():
            self._report(text)

    def devices(self) -> dict[str, int]:
        return self.placement.devices()

    def processes(self) -> int:
        clients = self.config.data.client_count
        return self.config.runtime.worker_processes(clients) + 2 + len(self.config.runtime.groups(clients))

    def _report(self, text: str, **more: Any) -> None:
        _log.info("%s", text)
        self._warnings.write({"view": "launcher", "time": time.time(), "text": text, **more})

    def _fork(self, title: str, spec: Any, environment: dict[str, str], descriptors: Sequence[int] = ()) -> None:
        start = start_of(MAINS[title], spec, environment)
        self.children[title] = parents.fork_role(title, start, self._files.log(title), descriptors)

    def _address(self, name: str, interrupts: Interrupts) -> str:
        """Wait for the address on which a process listens."""
        path, child = self._files.address(name), self.children[name]
        clock = AwakeClock()  # after a pause of the whole run the process still has its time
        deadline = clock.now() + LISTEN_S
        while clock.now() < deadline:
            if path.exists():
                return path.read_text()
            interrupts.check()
            if (code := child.wait(0.02)) is not None:
                raise child.failure(code)
        raise RunFailed(f"{name} did not listen within {LISTEN_S:g} s (log: {self._files.log(name)})")


def _unmeasured(rounds: list[int], last: int, log: Path) -> str:
    """Say which rounds have no accuracy."""
    more = f" and {len(rounds) - NAMED_ROUNDS} more" if len(rounds) > NAMED_ROUNDS else ""
    named = f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds[:NAMED_ROUNDS]))}{more}"
    final = ", and the run has no final accuracy" if last in rounds else ""
    return (
        f"no accuracy of {named}{final}: the run was stopped first, or the observer did not measure it or could not record it "
        f"(log: {log})"
    )
