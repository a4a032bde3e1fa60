"""Secure sums of a recorded run, opened from the messages of its transcript as the server opened them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.federation.capabilities import ClientSide, client_steps
from dpcfl_net.federation.secure.client_side import context_of
from dpcfl_net.federation.secure.job_terms import Identities, terms_of
from dpcfl_net.federation.secure.server_stages import Aborted, ServerRound, Tasks
from dpcfl_net.federation.secure.stages import KEYS, MASKING, SHARES, SURVIVORS, UNMASK
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.transport import transcript

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class OpenedSum:
    """The noisy sum of one cluster in one round, as the server learnt it.

    Attributes:
        code: Code of the sum.
        survivors: Clients whose vectors and shares of the noise are in the sum.
        total: The sum, (d,) float64.
    """

    code: SumCode
    survivors: tuple[int, ...]
    total: np.ndarray


@dataclass
class _Round:
    """Messages of one round: the tasks of the audited client by kind, and the releases of all clients by kind."""

    number: int
    tasks: dict[str, Arrays] = field(default_factory=dict)
    releases: dict[str, dict[int, Arrays]] = field(default_factory=dict)


def opened_sums(algorithm: ClientSide, client: int, path: Path) -> dict[int, OpenedSum]:
    """Open every secure sum that a client's vector is in.

    Args:
        algorithm: The job's algorithm.
        client: The client.
        path: The full transcript of the run.

    Returns:
        Round to sum; rounds whose sum was aborted, or that the client dropped out of, are missing.

    Raises:
        ConfigError: If the transcript is not full.
        Refused: "transcript-broken" if the transcript was changed.
    """
    masked = next(kind for kind, step in client_steps(algorithm).items() if set(MASKING) <= set(step.takes))
    kinds, name = {KEYS.kind, SHARES.kind, masked, SURVIVORS.kind, UNMASK.kind}, f"client {client}"
    found: dict[int, OpenedSum] = {}
    current = _Round(0)

    def finish() -> None:
        if UNMASK.kind in current.tasks and (opened := _opened(algorithm, client, masked, current)) is not None:
            found[current.number] = opened

    for record, header, arrays in transcript.messages(path):
        task = (record.direction, header.kind) == ("down", "TASK") and record.peer == name
        release = record.client is not None and (record.direction, header.kind, header.code) == ("up", "RESULT", "release")
        if header.task not in kinds or not (task or release):
            continue
        if arrays is None:
            raise ConfigError(f"the transcript holds no tensors of {header.task} in round {header.round}: was it kept in full?")
        if header.round != current.number:
            finish()
            current = _Round(header.round)
        if task:
            current.tasks[header.task] = arrays
        elif record.client is not None:
            current.releases.setdefault(header.task, {})[record.client] = arrays
    finish()
    return found


def _opened(algorithm: ClientSide, client: int, masked: str, messages: _Round) -> OpenedSum | None:
    """The sum of one round; None if it was aborted, does not hold the client's vector, or was begun twice with other clients.

    The lists in the tasks say whose answers the server took: an answer that came late is in the transcript too.
    """
    tasks, protocol = messages.tasks, algorithm.protocol
    group = tuple(int(other) for other in tasks[KEYS.kind]["group"])
    code = algorithm.secure_code(len(group))
    assert code is not None, "clients were asked for a sum"
    server = ServerRound(terms_of(protocol, group), messages.number, Identities(protocol), code.d)
    survivors = tasks[UNMASK.kind]["survivors"]
    everyone = np.ones(len(group))
    stages: list[tuple[str, Callable[[], Tasks], Callable[[int, Arrays], bool], np.ndarray]] = [
        (KEYS.kind, server.keys_tasks, server.add_keys, tasks[SHARES.kind]["present"]),
        (SHARES.kind, server.shares_tasks, server.add_boxes, tasks[masked]["present"]),
        (masked, server.masked_tasks, server.add_masked, survivors),
        (SURVIVORS.kind, server.survivors_tasks, server.add_signature, everyone),
        (UNMASK.kind, server.unmask_tasks, server.add_shares, everyone),
    ]
    try:
        for kind, ask, take, listed in stages:
            if not _as_sent(tasks.get(kind, {}), ask().get(client, {})):
                return None
            releases = messages.releases.get(kind, {})
            for other, flag in zip(group, listed, strict=True):
                if flag and other in releases:
                    take(other, releases[other])
        total = code.decode(server.unmask(context_of(tasks[masked])))
    except Aborted:
        return None
    return OpenedSum(code, server.survivors, total) if client in server.survivors else None


def _as_sent(sent: Arrays, again: Arrays) -> bool:
    """True if a task lists the clients that the server listed."""
    return all(np.array_equal(sent[name], again.get(name, ())) for name in ("group", "present", "survivors") if name in sent)
