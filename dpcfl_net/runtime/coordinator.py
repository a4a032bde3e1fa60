"""The coordinator process: the untrusted server, which reads the protocol and the messages of its clients."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core import open_files
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.job_reader import read_signed_protocol
from dpcfl_net.core.protocol import Protocol, check_runnable
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_secret_file
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.call_limits import CallLimits, LauncherLink
from dpcfl_net.federation.central_dp import CentralDPServer
from dpcfl_net.federation.network import NetworkFederation
from dpcfl_net.federation.network_asynchronous import AsynchronousNetworkFederation
from dpcfl_net.federation.pause import PauseListener
from dpcfl_net.federation.release_check import client_endpoint_arguments
from dpcfl_net.federation.tree import TreeFederation, tree_endpoint_arguments
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.launcher_pipes import LauncherNews, command_sender, open_pipe
from dpcfl_net.runtime.server_records import ServerRecords
from dpcfl_net.runtime.specs import CoordinatorSpec
from dpcfl_net.runtime.state_check import checked
from dpcfl_net.training import memory
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import FaultInjector, Link, MessageLog, ServerEndpoint
from dpcfl_net.transport.keys import COORDINATOR
from dpcfl_net.transport.message_log import refusal
from dpcfl_net.transport.observer_outbox import ObserverOutbox
from dpcfl_net.transport.transcript import Mode, Transcript

_log = logging.getLogger(__name__)


def drive(
    algorithm: Algorithm,
    fed: Federation,
    checkpoints: Checkpoints,
    on_round: Callable[[int, State], None],
    on_resumed: Callable[[int, State], None] | None = None,
) -> State:
    """Run the algorithm from the newest checkpoint, or from the start, to its last round.

    Args:
        algorithm: The algorithm.
        fed: Federation of its clients.
        checkpoints: Checkpoints of the run.
        on_round: Called with the round and its state after each checkpoint.
        on_resumed: Called once with the round that a resumed run starts from, which a crash may have left without its record;
            None: `on_round`.

    Returns:
        The state after the last round.

    Raises:
        RunFailed: If fewer clients than the quorum answer, all checkpoints are damaged, or the algorithm returns a state that does
            not fit the job (`state_check`) or cannot be stored.
    """
    found = checkpoints.resume()
    if found is None:
        done, state = 0, checked(algorithm, algorithm.start(fed))
    else:
        done, state = found
        (on_resumed or on_round)(done, state)
    try:
        for t in range(done + 1, algorithm.protocol.rounds + 1):
            fed.round = t
            state = checked(algorithm, algorithm.round(state, t, fed))
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
        ConfigError: As `check_runnable`, or if a transcript is wanted of a job with aggregators.
        Refused: If the protocol is invalid or not signed by the operator.
        RunFailed: If fewer clients than the quorum join or answer.
    """
    memory.keep_freed()
    protocol = read_signed_protocol(spec.protocol, spec.operator_key)
    check_runnable(protocol)
    mode = _transcript_mode(spec.transcript, protocol)
    algorithm, files = algorithm_of(protocol), RunFolder(spec.folder)
    open_files.allow(open_files.files_for(len(protocol.roster)))
    pair = keys.read_pair(spec.keys, COORDINATOR, protocol.coordinator_key)
    news = LauncherNews(open_pipe(spec.lost))
    with ExitStack() as stack:
        records = stack.enter_context(closing(ServerRecords(spec.folder, protocol, algorithm)))
        transcript = stack.enter_context(closing(Transcript(files.transcript, mode)))
        central_server = CentralDPServer.of(
            algorithm, files.ledgers, _noise_seed(spec.keys, protocol), durable=spec.durable,
            keep=spec.keep_releases,
        )  # fmt: skip
        if central_server is not None:
            stack.enter_context(closing(central_server))
        outbox = _outbox(spec, protocol, pair, news)
        if outbox is not None:
            stack.enter_context(closing(outbox))
        endpoint = stack.enter_context(_endpoint(spec, algorithm, pair, records, transcript))
        write_atomically(files.address(COORDINATOR), endpoint.address)
        _log.info("listening at %s", endpoint.address)
        loading = threading.Thread(target=importlib.import_module, args=("torch",), name="torch")
        loading.start()  # the first model needs torch; it loads while clients start and join
        fed = _federation(spec, algorithm, endpoint, records, news)
        fed.central_server = central_server
        checkpoints = Checkpoints(files.checkpoints, spec.keep_checkpoints, records.warn, durable=spec.durable)
        first = max(checkpoints.rounds(), default=0) + 1
        fed.join(first)
        loading.join()
        records.joined(first)

        def on_round(t: int, state: State, *, resumed: bool = False) -> None:
            records.round(t, state, fed, resumed=resumed)
            if outbox is not None:
                shown = central_server.shown if central_server is not None else {}
                outbox.models(t, state.assignment, state.models, **shown)

        drive(algorithm, fed, checkpoints, on_round, partial(on_round, resumed=True))
        if outbox is not None:
            outbox.end(protocol.rounds)
        fed.goodbye()


def _transcript_mode(asked: Mode | None, protocol: Protocol) -> Mode:
    """Choose the content of the transcript; ConfigError if the job has aggregators, so that none is possible."""
    if asked not in (None, "off") and protocol.aggregators:
        raise ConfigError(
            f"transcript is {asked!r}: must be 'off' for a job with aggregators, whose messages are not those of clients"
        )
    return asked or ("off" if protocol.aggregators else "headers")


def _noise_seed(folder: Path, protocol: Protocol) -> bytes | None:
    """Noise seed of a trusted server in a run with seeded noise; no other process gets it."""
    if (protocol.privacy.noise, protocol.privacy.trust) != ("seeded", "trusted-server"):
        return None
    return bytes.fromhex(read_secret_file(keys.secret_path(folder, COORDINATOR).with_name(keys.NOISE_SEED)))


def _outbox(spec: CoordinatorSpec, protocol: Protocol, pair: tuple[str, str], news: LauncherNews) -> ObserverOutbox | None:
    """Connect to the observer; None without one."""
    if not spec.observer:
        return None
    link = Link.of(protocol, pair, protocol.observer_key)
    return ObserverOutbox(spec.observer, link, sender=COORDINATOR, ended=news.observer_has_ended)


def _endpoint(
    spec: CoordinatorSpec, algorithm: Algorithm, pair: tuple[str, str], records: ServerRecords, transcript: Transcript
) -> ServerEndpoint:
    """Listen for the clients, or for the aggregators of a job that has some."""
    protocol = algorithm.protocol
    if protocol.aggregators:
        # Messages of clients are logged where they are received.
        peers, on_messages = tree_endpoint_arguments(algorithm), None
    else:
        peers, on_messages = client_endpoint_arguments(algorithm, protocol.clients), records.messages
    return ServerEndpoint(
        spec.bind,
        Link.of(protocol, pair),
        **peers,
        log=MessageLog(lambda failure: _log.warning("%s", refusal(failure)), on_messages, transcript),
        faults=None if spec.faults is None else FaultInjector(spec.faults, records.fault),
    )


def _federation(
    spec: CoordinatorSpec, algorithm: Algorithm, endpoint: ServerEndpoint, records: ServerRecords, news: LauncherNews
) -> NetworkFederation | TreeFederation:
    """Build the federation of the peers that connect to the endpoint."""
    limits = CallLimits(spec.quorum, spec.round_timeout_s, spec.join_timeout_s, spec.max_live, spec.pause_s)
    if algorithm.protocol.aggregators:
        return TreeFederation(algorithm, endpoint, limits, LauncherLink(lost=news.lost_clients), records.warn)
    launcher = LauncherLink(command_sender(spec.commands), news.lost_clients)
    pauses = PauseListener(records.pause, records.resume)
    return AsynchronousNetworkFederation(algorithm.protocol, endpoint, limits, launcher, records.warn, pauses)
