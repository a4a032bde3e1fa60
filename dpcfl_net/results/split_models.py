"""Checks of the transcript: clients of one cluster received equal models, and each client was charged for the task shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.payload_hash import NOTHING
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.gate import request_id
from dpcfl_net.federation.secure.client_side import context_of
from dpcfl_net.federation.secure.stages import MASKING, STAGES
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.transport.messages import Header, WireError, decode
from dpcfl_net.transport.transcript import Record, merged, tensors_of


@dataclass(frozen=True)
class Given:
    """Tasks in a transcript.

    Attributes:
        tasks: (client, task header) of every task.
        released: (client, task header) of every task answered with a release.
        odd: Numbers of records from the server that are no messages of this protocol.
        contexts: (client, message id) of each masked step whose bytes were kept, to the hash of its models.
    """

    tasks: list[tuple[int, Header]]
    released: list[tuple[int, Header]]
    odd: list[int]
    contexts: dict[tuple[int, str], str] = field(default_factory=dict)

    def models(self) -> list[tuple[int, Header, str]]:
        """List the tasks whose models can be compared, with a hash of them.

        Tasks of secure sums hold messages for one client besides: their stages hold no models, and of a masked step the hash needs
        the bytes.
        """
        found = []
        for client, header in self.tasks:
            secure = header.task in STAGES or _is_masked(header)
            if models := self.contexts.get((client, header.id), "") if secure else header.blake3:
                found.append((client, header, models))
        return found

    @property
    def without_bytes(self) -> int:
        """Number of masked steps whose models cannot be compared, since their bytes were not kept."""
        return sum(_is_masked(header) and (client, header.id) not in self.contexts for client, header in self.tasks)


def given(records: Iterable[Record]) -> Given:
    """Collect the tasks of a transcript; headers hold the hash of the model, except for masked steps."""
    records = list(records)
    found = Given([], [], [], _contexts(records))
    asked: dict[tuple[int, str], Header] = {}
    for record in records:
        client = record.client
        if client is None:
            continue
        try:
            header = decode(record.header)
        except WireError:
            if record.direction == "down":
                found.odd.append(record.number)
            continue
        if record.direction == "down" and header.kind == "TASK":
            asked[client, header.id] = header
            found.tasks.append((client, header))
        elif record.direction == "up" and header.kind == "RESULT" and header.code == "release":
            found.released.append((client, asked.get((client, header.parent), header)))
    return found


def split_models(found: Given, protocol: Protocol, clusters: Path) -> list[str]:
    """Find rounds in which clients that share a model were given different models.

    Checks against the signed job (number of models per round, tasks that carry all models) and against the server's own assignments:
    models are given by those before the round, or by those of its choices, which are the ones after the round.
    An algorithm with one model per client has no shared models. In an asynchronous run the tasks after the last synchronous round
    are participations, which may start from any version.

    Args:
        found: Tasks of the transcript.
        protocol: The signed protocol.
        clusters: File clusters.jsonl; may be missing.

    Returns:
        One sentence per problem.

    Raises:
        ConfigError: If `clusters` is damaged.
    """
    algorithm = algorithm_of(protocol)
    groups = _groups(clusters, protocol)
    last = _last_synchronous(found) if algorithm.capabilities.asynchronous else protocol.rounds
    sent = _by_task(found, last)
    problems = [f"record {number} of the transcript is no message of this protocol" for number in found.odd]
    for (number, task), models in sorted(sent.items()):
        where = f"round {number} {task}"
        problems += [f"{where}: client {client} was given {len(own)} models" for client, own in models.items() if len(own) > 1]
        distinct = {blake3: client for client, own in sorted(models.items(), reverse=True) for blake3 in own}
        most = _most_models(algorithm, task)
        if len(distinct) > most:
            who = " and ".join(str(client) for client in sorted(distinct.values())[:2])
            problems.append(f"{where}: {len(distinct)} different models where the job has {most}, clients {who} among them")
        if not algorithm.capabilities.model_per_client:
            problems += _within_groups(where, models, _possible(groups, number))
    if algorithm.capabilities.asynchronous:
        frozen = groups[max(groups)] if groups else {}
        later = [(client, header) for client, header in found.tasks if header.round > last]
        problems += _more_than_versions(later, protocol.rounds - last, frozen)
    return problems


def rounds_not_compared(found: Given, protocol: Protocol, clusters: Path) -> list[int]:
    """List the rounds with several models of which `split_models` compares the number alone, for want of assignments.

    The newest round is none of them while the server has not written its assignments, as of a run that was interrupted.

    Args:
        found: Tasks of the transcript.
        protocol: The signed protocol.
        clusters: File clusters.jsonl; may be missing.
    """
    algorithm = algorithm_of(protocol)
    if algorithm.capabilities.model_per_client:
        return []
    groups = _groups(clusters, protocol)
    sent = _by_task(found, _last_synchronous(found) if algorithm.capabilities.asynchronous else protocol.rounds)
    several = sorted({t for (t, _), models in sent.items() if len(set().union(*models.values())) > 1})
    newest = max((t for t, _ in sent), default=0)
    return [t for t in several if not _possible(groups, t) and not (t == newest and (t == 1 or t - 1 in groups))]


def other_than_charged(found: Given, protocol: Protocol, charged: Mapping[int, list[Entry]]) -> list[str]:
    """Find charges for another task than the transcript shows, or for none, and releases of another task than was charged.

    The id of a debit is a hash of the task including its model, so a rewritten transcript does not match the ledgers. A debit
    without an answer counts too: otherwise a server could hide a model by hiding the answer to it. A task is on file before it
    leaves.

    Args:
        found: Tasks of the transcript.
        protocol: The signed protocol.
        charged: Debits by client.

    Returns:
        One sentence per problem.
    """
    debits = [(client, line) for client, lines in charged.items() for line in lines]
    ids, job = {(client, line.round, line.kind): line.id for client, line in debits}, digest(protocol)
    shown: dict[tuple[int, int, str], set[str]] = {}
    for client, task in found.tasks:
        shown.setdefault((client, task.round, task.task), set()).add(_request(job, client, task))
    problems: dict[str, None] = {}
    for client, task in found.released:
        request = _request(job, client, task)
        if ids.get((client, task.round, task.task), request) != request:
            problems[_other_task(client, task.round, task.task)] = None
    for client, line in debits:
        tasks = shown.get((client, line.round, line.kind), set())
        if not tasks:
            problems[
                f"client {client} was charged in round {line.round} for a {line.kind} that the transcript does not show"
            ] = None
        elif line.id not in tasks:
            problems[_other_task(client, line.round, line.kind)] = None
    return list(problems)


def _by_task(found: Given, last: int) -> dict[tuple[int, str], dict[int, set[str]]]:
    """Hashes of the models of each client, by round up to the last one and kind of task."""
    sent: dict[tuple[int, str], dict[int, set[str]]] = {}
    for client, header, hashed in found.models():
        if header.round <= last:
            sent.setdefault((header.round, header.task), {}).setdefault(client, set()).add(hashed)
    return sent


def _is_masked(header: Header) -> bool:
    """True for the task of a masked step."""
    return set(MASKING) <= {name for name, *_ in header.tensors}


def _contexts(records: Iterable[Record]) -> dict[tuple[int, str], str]:
    """Hash of the models of each masked step whose bytes were kept, by client and message id."""
    found: dict[tuple[int, str], str] = {}
    for record, header, chunks in merged(_tasks(records)):
        tensors = tensors_of(header, chunks) if _is_masked(header) else None
        if record.client is not None and tensors is not None:
            found[record.client, header.id] = context_of(tensors).hex()
    return found


def _tasks(records: Iterable[Record]) -> Iterator[tuple[Record, Header]]:
    """Records of tasks and their chunks."""
    for record in records:
        if record.direction == "down" and record.client is not None:
            try:
                header = decode(record.header)
            except WireError:
                continue
            if header.kind in ("TASK", "CHUNK"):
                yield record, header


def _request(job: str, client: int, task: Header) -> str:
    rows = [[name, dtype, list(shape), size] for name, dtype, shape, size in task.tensors]
    return request_id(job, client, task.round, task.task, rows, task.blake3 or NOTHING)


def _other_task(client: int, round: int, kind: str) -> str:
    return f"client {client} was charged in round {round} for another {kind} than the transcript shows"


def _most_models(algorithm: Algorithm, task: str) -> int:
    """Largest number of distinct payloads of a round's tasks of one kind; 1 if each task carries all models."""
    step = client_steps(algorithm).get(task)
    whole = step is None or any("M" in spec.shape for spec in step.takes.values())
    return 1 if whole else algorithm.capabilities.published_models


def _last_synchronous(found: Given) -> int:
    """Last synchronous round of an asynchronous run: participations train, so every other task belongs to such a round."""
    return max((header.round for _, header in found.tasks if header.task != "train"), default=0)


def _more_than_versions(tasks: list[tuple[int, Header]], versions: int, cluster: Mapping[int, int]) -> list[str]:
    """Find a cluster that was given more models than there are versions, and clients that were given two for one participation.

    A participation may start from any version, but a model that is not a version adds one.
    """
    by_cluster: dict[int, set[str]] = {}
    by_task: dict[tuple[int, int, str], set[str]] = {}
    for client, header in tasks:
        by_cluster.setdefault(cluster.get(client, 0), set()).add(header.blake3)
        by_task.setdefault((client, header.round, header.task), set()).add(header.blake3)
    problems = [
        f"cluster {m}: its clients were given {len(models)} different models, the run has {versions} versions"
        for m, models in sorted(by_cluster.items())
        if len(models) > versions
    ]
    problems += [
        f"participation {number} {task}: client {client} was given {len(models)} models"
        for (client, number, task), models in sorted(by_task.items())
        if len(models) > 1
    ]
    return problems


def _groups(path: Path, protocol: Protocol) -> dict[int, dict[int, int]]:
    """Cluster of each client by round, as the server wrote it."""
    clients = [entry.id for entry in protocol.roster]
    found: dict[int, dict[int, int]] = {}
    for line in runlog.read(path):
        if line["view"] != "server":
            continue
        if len(assigned := line.get("assignment", [])) != len(clients):
            raise ConfigError(f"{path} is damaged: round {line['round']} assigns {len(assigned)} of {len(clients)} clients")
        if odd := [m for m in assigned if m is not None and type(m) is not int]:
            raise ConfigError(
                f"{path} is damaged: round {line['round']} assigns a client to {shown(odd[0])}, must be a number or null"
            )
        found[line["round"]] = {c: m for c, m in zip(clients, assigned, strict=True) if m is not None}
    return found


def _possible(groups: Mapping[int, dict[int, int]], number: int) -> list[dict[int, int]]:
    """Assignments by which a round's models may have been given; none if a line of the file is missing."""
    rounds = [number, number - 1] if number > 1 else [number]
    return [groups[each] for each in rounds] if all(each in groups for each in rounds) else []


def _within_groups(where: str, models: Mapping[int, set[str]], possible: Iterable[Mapping[int, int]]) -> list[str]:
    """Find clients of one cluster with different models; none if one of the possible assignments explains all models."""
    found = [_split(where, models, cluster) for cluster in possible]
    return found[0] if found and all(found) else []


def _split(where: str, models: Mapping[int, set[str]], cluster: Mapping[int, int]) -> list[str]:
    first: dict[int, int] = {}
    problems = []
    for client in sorted(models.keys() & cluster.keys()):
        other = first.setdefault(cluster[client], client)
        if models[client] != models[other]:
            problems.append(f"{where}: clients {other} and {client} of cluster {cluster[client]} were given different models")
    return problems
