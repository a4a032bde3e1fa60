"""The coordinator process: the untrusted server, which reads the protocol and the messages of its clients."""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.job_reader import read_signed_protocol
from dpcfl_net.core.protocol import Protocol, check_runnable
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.runlog import Lines
from dpcfl_net.core.signing import read_secret_file
from dpcfl_net.core.tensors import norm, surely_within
from dpcfl_net.core.types import ClientStep, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.call_limits import CallLimits, LauncherLink
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.central_dp import CentralDPServer
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.network import NetworkFederation
from dpcfl_net.federation.network_asynchronous import AsynchronousNetworkFederation
from dpcfl_net.federation.pause import Pause, PauseListener
from dpcfl_net.federation.tree import TreeFederation, tree_endpoint_arguments
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.specs import CoordinatorSpec
from dpcfl_net.training import memory
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import Fault, FaultInjector, Link, MessageLog, ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR, OBSERVER
from dpcfl_net.transport.observer_outbox import ObserverOutbox
from dpcfl_net.transport.transcript import Transcript

_log = logging.getLogger(__name__)

LOGGED = {"HELLO", "WELCOME", "TASK", "RESULT", "ERROR", "BYE"}


def drive(algorithm: Algorithm, fed: Federation, checkpoints: Checkpoints, on_round: Callable[[int, State], None]) -> State:
    """Run the algorithm from the newest checkpoint, or from the start, to its last round.

    Args:
        algorithm: The algorithm.
        fed: Federation of its clients.
        checkpoints: Checkpoints of the run.
        on_round: Called with the round and its state after each checkpoint, and once for the round that a resumed run
            starts from.

    Returns:
        The state after the last round.

    Raises:
        RunFailed: If fewer clients than the quorum answer, or all checkpoints are damaged.
    """
    found = checkpoints.newest()
    if found is None:
        done, state = 0, algorithm.start(fed)
    else:
        done, state = found
        on_round(done, state)
    try:
        for t in range(done + 1, algorithm.protocol.rounds + 1):
            fed.round = t
            state = algorithm.round(state, t, fed)
            checkpoints.write(t, state)
            if fed.missing:  # they may answer a repetition, and the next round would then begin from another model
                checkpoints.flush()
            on_round(t, state)
    finally:
        checkpoints.flush()  # also after an error: the run may be resumed in this process
    return state


def run_coordinator(spec: CoordinatorSpec) -> None:
    """Listen, wait for the clients, run every round, and say goodbye to the clients.

    Args:
        spec: Arguments of the process.

    Raises:
        ConfigError: As `check_runnable`.
        Refused: If the protocol is invalid or not signed by the operator.
        RunFailed: If fewer clients than the quorum join or answer.
    """
    memory.keep_freed()
    protocol = read_signed_protocol(spec.protocol, spec.operator_key)
    check_runnable(protocol)
    algorithm = algorithm_of(protocol)
    files, records = RunFolder(spec.folder), Records(spec.folder, protocol, algorithm)
    transcript = Transcript(files.transcript, spec.transcript)
    pair = keys.read_pair(spec.keys, COORDINATOR, protocol.coordinator_key)
    steps, encoding = client_steps(algorithm), MessageEncoding(algorithm)
    peers: dict[str, Any] = {
        "clients": {entry.id: entry.public_key for entry in protocol.roster},
        "result_template": lambda task: encoding.release_template(steps[task]),
        "check": lambda client, task, tensors: check_release(algorithm, steps[task], client, tensors),
    }
    if protocol.aggregators:
        peers = tree_endpoint_arguments(algorithm)
    endpoint = ServerEndpoint(
        spec.bind,
        Link.of(protocol, pair),
        **peers,
        # Messages of clients are logged where they are received.
        log=MessageLog(
            lambda failure: _log.warning("refused: %s", failure), None if protocol.aggregators else records.message, transcript
        ),
        faults=None if spec.faults is None else FaultInjector(spec.faults, records.fault),
    )
    central_server = CentralDPServer.of(algorithm, files.ledgers, _noise_seed(spec.keys, protocol), durable=spec.durable)
    news, outbox = LauncherNews(open_pipe(spec.lost)), None
    if spec.observer:
        link = Link.of(protocol, pair, protocol.observer_key)
        outbox = ObserverOutbox(spec.observer, link, sender=COORDINATOR, ended=news.observer_has_ended)
    abort = True
    try:
        write_atomically(files.address(COORDINATOR), endpoint.address)
        loading = threading.Thread(target=importlib.import_module, args=("torch",), name="torch")
        loading.start()  # the first model needs torch; it loads while clients start and join
        limits = CallLimits(spec.quorum, spec.round_timeout_s, spec.join_timeout_s, spec.max_live, spec.pause_s)
        fed: NetworkFederation | TreeFederation
        launcher = LauncherLink(command_sender(open_pipe(spec.commands, readable=False)), news.lost_clients)
        pauses = PauseListener(records.pause, records.resume)
        if protocol.aggregators:
            fed = TreeFederation(algorithm, endpoint, limits, LauncherLink(lost=news.lost_clients), records.warn)
        else:
            fed = AsynchronousNetworkFederation(protocol, endpoint, limits, launcher, records.warn, pauses)
        fed.central_server = central_server
        checkpoints = Checkpoints(files.checkpoints, spec.keep_checkpoints, records.warn, durable=spec.durable)
        first = max(checkpoints.rounds(), default=0) + 1
        fed.join(first)
        loading.join()
        records.joined(first)

        def on_round(t: int, state: State) -> None:
            records.round(t, state, fed)
            if outbox is not None:
                shown = central_server.shown if central_server is not None else {}
                outbox.models(t, state.assignment, state.models, **shown)

        drive(algorithm, fed, checkpoints, on_round)
        if outbox is not None:
            outbox.end(protocol.rounds)
        fed.goodbye()
        abort = False
    finally:
        endpoint.close(abort=abort)
        if outbox is not None:
            outbox.close()
        if central_server is not None:
            central_server.close()
        transcript.close()


def _noise_seed(folder: Path, protocol: Protocol) -> bytes | None:
    """Noise seed of a trusted server in a run with seeded noise; no other process gets it."""
    if (protocol.privacy.noise, protocol.privacy.trust) != ("seeded", "trusted-server"):
        return None
    return bytes.fromhex(read_secret_file(keys.secret_path(folder, COORDINATOR).with_name(keys.NOISE_SEED)))


def open_pipe(descriptor: int | None, *, readable: bool = True) -> Connection | None:
    """Open one end of an inherited pipe.

    Args:
        descriptor: Its descriptor; None: no pipe.
        readable: True for the receiving end.
    """
    return None if descriptor is None else Connection(descriptor, readable=readable, writable=not readable)


def command_sender(commands: Connection | None) -> Callable[[str, int], None] | None:
    """Return a function that sends start and stop commands to the launcher.

    The commands are text, since the launcher must not unpickle bytes of an untrusted server.

    Args:
        commands: Pipe to the launcher; None: no launcher.
    """
    return None if commands is None else lambda word, client: commands.send_bytes(f"{word} {client}".encode())


class LauncherNews:
    """Messages of the launcher about processes that do not come back.

    Args:
        pipe: Pipe from the launcher; None: no launcher.
    """

    def __init__(self, pipe: Connection | None) -> None:
        self._pipe, self._lost, self._observer_ended = pipe, list[int](), False

    def lost_clients(self) -> list[int]:
        """Return the clients, or aggregators, that the launcher gave up, or that have left, since the last call."""
        self._read()
        found, self._lost = self._lost, []
        return found

    def observer_has_ended(self) -> bool:
        """Return True if the observer has measured the last round and ended."""
        self._read()
        return self._observer_ended

    def _read(self) -> None:
        try:
            while self._pipe is not None and self._pipe.poll():
                word = self._pipe.recv_bytes(64)
                if word == OBSERVER.encode():
                    self._observer_ended = True
                else:
                    self._lost.append(int(word))
        except EOFError:  # the launcher has ended, and this run ends with it
            self._pipe = None


def check_release(algorithm: Algorithm, step: ClientStep, client: int, tensors: dict[str, np.ndarray]) -> None:
    """Refuse a release that does not decode, or has a tensor whose decoded norm exceeds its bound.

    So no client can move a model at will.

    Args:
        algorithm: The job's algorithm.
        step: The client step.
        client: Client id.
        tensors: Tensors of the release as they crossed the wire.

    Raises:
        Refused: "encoding", as `MessageEncoding.decode_release`; "norm", if the L2 norm of a tensor exceeds its `max_norm`.
    """
    decoded = MessageEncoding(algorithm).decode_release(step, tensors)
    for name, spec in step.gives.items():
        if spec.max_norm is None:
            continue
        bound = spec.max_norm(algorithm, algorithm.protocol.client(client))
        if bound == math.inf or surely_within(decoded[name], bound):
            continue
        length = norm(decoded[name])
        if length > bound:
            raise Refused("norm", f"{name} norm {length:.3g} is over the bound {bound:.3g}")


class Records:
    """Files in which the server records its view of a run.

    Args:
        folder: Run folder.
        protocol: The signed protocol.
        algorithm: The job's algorithm.
        virtual_time: Clock of a run in virtual time, in seconds since the epoch; None: the real time.
    """

    def __init__(
        self, folder: Path, protocol: Protocol, algorithm: Algorithm, virtual_time: Callable[[], float] | None = None
    ) -> None:
        self.protocol, self.algorithm = protocol, algorithm
        self._virtual, self._clock = virtual_time is not None, virtual_time or time.time
        self._files = files = RunFolder(folder)
        files.addresses.mkdir(parents=True, exist_ok=True)
        self._messages = Lines(files.messages)
        self._metrics, self._clusters = Lines(files.metrics), Lines(files.clusters)
        self._spans, self._warnings = Lines(files.spans), Lines(files.warnings)
        self._round_start, self._wall_start = self._clock(), time.time()
        self._bytes, self._started = (0, 0), 0

    def warn(self, text: str) -> None:
        """Log a warning and record it."""
        _log.warning("%s", text)
        self._warnings.write({"time": time.time(), "text": text})

    def pause(self, pause: Pause) -> None:
        """Record the begin of a pause below the quorum."""
        _log.warning("%s", pause.text)
        self._warnings.write({"view": "pause", "time": time.time(), "text": pause.text, "seconds": pause.seconds})

    def resume(self, pause: Pause, seconds: float) -> None:
        """Record the end of a pause after some seconds."""
        now, what = time.time(), f"round {pause.round}" if pause.round else "joining"
        text = f"{what}: the pause ended after {seconds:.0f} s"
        _log.info("%s", text)
        self._warnings.write({"view": "pause", "time": now, "text": text, "seconds": 0})
        self._spans.write({"who": "coordinator", "what": "pause", "round": pause.round, "start": now - seconds, "end": now})

    def close(self) -> None:
        """Close the files."""
        for lines in (self._messages, self._metrics, self._clusters, self._spans, self._warnings):
            lines.close()

    def message(self, line: dict[str, Any]) -> None:
        """Record the header of a message, if its kind is logged."""
        if line.get("kind") in LOGGED:
            self._messages.write(line)

    def fault(self, fault: Fault) -> None:
        """Record an injected fault as a span of its client."""
        now = time.time()
        self._spans.write({
            "who": f"client {fault.message.client}", "what": f"fault {fault.what}", "round": fault.message.round, "start": now,
            "end": now + fault.seconds, "fault": fault.text,
        })  # fmt: skip

    def span(self, who: str, what: str, t: int, start: float, end: float) -> None:
        """Record a period of work of one process in round t, in seconds since the epoch."""
        self._spans.write({"who": who, "what": what, "round": t, "start": start, "end": end})

    def joined(self, t: int) -> None:
        """Record that the clients have joined before round t."""
        self._round_start, self._wall_start = self._clock(), time.time()
        begins = f"round {t} begins" if t <= self.protocol.rounds else "all rounds are done"
        _log.info("%d clients in the roster; %s", len(self.protocol.roster), begins)

    def round(self, t: int, state: State, fed: Federation) -> None:
        """Record the figures of a round.

        Args:
            t: Round.
            state: State after the round.
            fed: The federation, for traffic and missing clients.
        """
        now, wall, counts = self._clock(), time.time(), fed.counts
        up, down = (total - before for total, before in zip(fed.traffic, self._bytes, strict=True))
        self._bytes = fed.traffic
        _log.info(
            "round %d of %d done in %.2f s: %d bytes to the server, %d from it",
            t,
            self.protocol.rounds,
            now - self._round_start,
            up,
            down,
        )
        assignment = list(state.assignment)
        if self.protocol.has_schedule:
            entries = zip(self.protocol.roster, assignment, strict=True)
            assignment = [m if entry.rounds_there(1, t) else None for entry, m in entries]
        clusters = max((m + 1 for m in state.assignment if m is not None), default=0)
        clusters = clusters if self.algorithm.capabilities.model_per_client else len(state.models)
        default_figures = {"phase": "single", "sizes": [assignment.count(m) for m in range(clusters)]}
        arrays = {name: value for name, value in state.diagnostics.items() if isinstance(value, Mapping)}
        figures = {name: value for name, value in state.diagnostics.items() if name not in arrays}
        self._metrics.write(
            {"view": "server", "round": t, "time": wall, "seconds": now - self._round_start, "bytes_up": up, "bytes_down": down,
             "answered": fed.answered, "missing": fed.missing, "away": counts.away, "late": counts.late, "paused_s": counts.paused_s,
             "live": fed.live, "started": fed.started - self._started,
             **({"clock": "virtual", "wall_s": wall - self._wall_start} if self._virtual else {})}
        )  # fmt: skip
        self._started = fed.started
        self._clusters.write(
            {
                "view": "server",
                "round": t,
                "assignment": assignment,
                "clusters": clusters,
                "diagnostics": default_figures | figures,
            }
        )
        self.span("coordinator", "wait", t, self._round_start, now)
        for name, group in arrays.items():
            np.savez(self._files.path / f"{name}.npz", **group)
        self._round_start, self._wall_start = now, time.time()
