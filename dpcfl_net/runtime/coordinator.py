"""The coordinator process: the untrusted server. Started with the protocol alone; what it knows is what it was sent."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.protocol import Protocol, digest, read_signed_protocol
from dpcfl_net.core.runlog import Lines, say, write_atomically
from dpcfl_net.core.signing import read_secret_file
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.central_dp import CentralDPServer
from dpcfl_net.federation.network import NetworkFederation
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR
from dpcfl_net.transport.messages import resolve
from dpcfl_net.transport.observer_link import ObserverOutbox
from dpcfl_net.transport.transcript import Mode, Transcript

LOGGED = {"HELLO", "WELCOME", "TASK", "RESULT", "ERROR", "BYE"}


@dataclass(frozen=True)
class CoordinatorSpec:
    """Everything the coordinator is started with; no experiment, no data, no seed but its own."""

    protocol: Path
    operator_key: str
    bind: str
    observer: str | None
    keys: Path
    folder: Path
    transcript: Mode = "headers"
    keep_checkpoints: int = 2
    quorum: float = 1.0
    round_timeout_s: float = 600
    join_timeout_s: float = 120
    max_live: int | None = None  # most clients connected at once; None: all are, and nobody is started
    commands: int | None = None  # descriptor of a pipe to the launcher: whom to start
    lost: int | None = None  # of one from the launcher: who cannot be started again


def drive(algorithm: Algorithm, fed: Federation, checkpoints: Checkpoints, on_round: Callable[[int, State], None]) -> State:
    """Start or go on from the newest checkpoint, and run the server half to its last round.

    on_round(t, state) is called after the checkpoint of round t, and once for the round that a resumed run starts from.
    """
    found = checkpoints.newest()
    if found is None:
        done, state = 0, algorithm.start(fed)
    else:
        done, state = found
        on_round(done, state)
    for t in range(done + 1, algorithm.protocol.rounds + 1):
        fed.round = t
        state = algorithm.round(state, t, fed)
        checkpoints.write(t, state)
        on_round(t, state)
    return state


def run_coordinator(spec: CoordinatorSpec) -> None:
    """Bind, wait for the clients, run every round, say goodbye. RunFailed when the quorum is lost."""
    protocol = read_signed_protocol(spec.protocol, spec.operator_key)
    algorithm = algorithm_of(protocol)
    records = Records(spec.folder, protocol, algorithm)
    transcript = Transcript(spec.folder / "transcript.msgpack", spec.transcript)
    own = keys.read_pair(spec.keys, COORDINATOR, protocol.coordinator_key)
    client_steps = algorithm.client_steps()
    endpoint = ServerEndpoint(
        spec.bind,
        run=protocol.run,
        job=digest(protocol),
        clients={entry.id: entry.public_key for entry in protocol.roster},
        result_template=lambda task: resolve(client_steps[task].gives, algorithm.dims),
        security=protocol.security,
        keys=own,
        check=lambda client, task, tensors: check_release(algorithm, client, tensors),
        on_message=records.message,
        on_failure=lambda failure: say(f"refused: {failure}"),
        transcript=transcript,
    )
    curator = CentralDPServer.of(algorithm, spec.folder / "ledgers", _noise_seed(spec.keys, protocol))
    outbox = None
    if spec.observer:
        outbox = ObserverOutbox(
            spec.observer, run=protocol.run, job=digest(protocol), security=protocol.security,
            server_key=protocol.observer_key, keys=own, sender=COORDINATOR,
        )  # fmt: skip
    abort = True
    try:
        write_atomically(spec.folder / "addresses" / COORDINATOR, endpoint.address)
        loading = threading.Thread(target=importlib.import_module, args=("torch",), name="torch")
        loading.start()  # the first model needs it; clients are started and join meanwhile
        fed = NetworkFederation(
            protocol, endpoint, quorum=spec.quorum, timeout_s=spec.round_timeout_s, join_timeout_s=spec.join_timeout_s,
            max_live=spec.max_live, tell=teller(_pipe(spec.commands, readable=False)), lost=lost_ones(_pipe(spec.lost)),
            warn=records.warn,
        )  # fmt: skip
        fed.curator = curator
        fed.join()
        loading.join()
        records.joined()

        def on_round(t: int, state: State) -> None:
            records.round(t, state, fed)
            if outbox is not None:
                diagnostics = curator.diagnostics if curator is not None else {}
                outbox.models(t, algorithm.describe(state)["phase"], state.assignment, state.models, **diagnostics)

        drive(algorithm, fed, Checkpoints(spec.folder / "checkpoints", spec.keep_checkpoints, records.warn), on_round)
        if outbox is not None:
            outbox.end(protocol.rounds)
        fed.goodbye()
        abort = False
    finally:
        endpoint.close(abort=abort)
        if outbox is not None:
            outbox.close()
        if curator is not None:
            curator.close()
        transcript.close()


def _noise_seed(folder: Path, protocol: Protocol) -> bytes | None:
    """What a trusted server's noise comes from in a run with seeded noise; it stands in no part of the job that others have."""
    if (protocol.privacy.noise, protocol.privacy.trust) != ("seeded", "trusted-server"):
        return None
    return bytes.fromhex(read_secret_file(keys.secret_path(folder, COORDINATOR).with_name(keys.NOISE_SEED)))


def _pipe(descriptor: int | None, *, readable: bool = True) -> Connection | None:
    """One end of a pipe that was inherited."""
    return None if descriptor is None else Connection(descriptor, readable=readable, writable=not readable)


def teller(commands: Connection | None) -> Callable[[str, int], None] | None:
    """How to tell the launcher whom to start and who may go; plain words, since it trusts nothing that a server sends."""
    return None if commands is None else lambda word, client: commands.send_bytes(f"{word} {client}".encode())


def lost_ones(pipe: Connection | None) -> Callable[[], list[int]]:
    """What the launcher has said since it was last asked, of clients that it has given up."""

    def learn() -> list[int]:
        found = []
        try:
            while pipe is not None and pipe.poll():
                found.append(int(pipe.recv_bytes(64)))
        except EOFError:  # the launcher has ended, and everybody ends with it
            return found
        return found

    return learn


def check_release(algorithm: Algorithm, client: int, tensors: dict[str, np.ndarray]) -> None:
    """Refuse an update longer than an honest one can be: one client must not move a model at will."""
    update = tensors.get("update")
    if update is None:
        return
    bound = algorithm.max_update_norm(algorithm.protocol.client(client))
    norm = float(np.linalg.norm(update.astype(np.float64)))
    if norm > bound:
        raise Refused("norm", f"update norm {norm:.3g} is over the bound {bound:.3g}")


class Records:
    """What the server writes down: its own view, which is all it has."""

    def __init__(self, folder: Path, protocol: Protocol, algorithm: Algorithm) -> None:
        self.folder, self.protocol, self.algorithm = folder, protocol, algorithm
        (self.folder / "addresses").mkdir(parents=True, exist_ok=True)
        self._messages = Lines(self.folder / "messages.jsonl")
        self._metrics, self._clusters = Lines(self.folder / "metrics.jsonl"), Lines(self.folder / "clusters.jsonl")
        self._spans, self._warnings = Lines(self.folder / "spans.jsonl"), Lines(self.folder / "warnings.jsonl")
        self._round_start = time.time()
        self._bytes, self._started = (0, 0), 0

    def warn(self, text: str) -> None:
        say(text)
        self._warnings.write({"time": time.time(), "text": text})

    def close(self) -> None:
        """Close the files."""
        for lines in (self._messages, self._metrics, self._clusters, self._spans, self._warnings):
            lines.close()

    def message(self, line: dict[str, Any]) -> None:
        if line.get("kind") in LOGGED:
            self._messages.write(line)

    def joined(self) -> None:
        self._round_start = time.time()
        say(f"{len(self.protocol.roster)} clients in the roster; round 1 begins")

    def round(self, t: int, state: State, fed: Federation) -> None:
        now, missing = time.time(), fed.missing
        up, down = (total - before for total, before in zip(fed.traffic, self._bytes, strict=True))
        self._bytes = fed.traffic
        view = self.algorithm.describe(state)
        clusters = max((m + 1 for m in state.assignment if m is not None), default=0)
        clusters = clusters if self.algorithm.model_per_client else len(state.models)
        sizes = view.get("sizes") or [sum(1 for a in state.assignment if a == m) for m in range(clusters)]
        self._metrics.write(
            {"view": "server", "round": t, "time": now, "seconds": now - self._round_start, "bytes_up": up, "bytes_down": down,
             "answered": fed.answered, "missing": missing,
             "live": fed.live, "started": fed.started - self._started}
        )  # fmt: skip
        self._started = fed.started
        self._clusters.write(
            {"view": "server", "round": t, "phase": view["phase"], "assignment": state.assignment, "sizes": sizes,
             "mss": view.get("mss"), "mss_plain": view.get("mss_plain"), "mpo": view.get("mpo"), "clusters": clusters,
             **view.get("more", {})}
        )  # fmt: skip
        self._spans.write({"who": "coordinator", "what": "wait", "round": t, "start": self._round_start, "end": now})
        picture = self.algorithm.first_round(state)
        if t == 1 and picture is not None:
            np.savez(self.folder / "first_round.npz", **picture)
        self._round_start = now
