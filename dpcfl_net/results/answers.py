"""Checks of the transcript: messages hold the bytes that they announce, and releases are those that the clients answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dpcfl_net.core.payload_hash import NOTHING, payload_hash
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.ledger.release_store import answers, digest_of_release
from dpcfl_net.transport.messages import Header, WireError, decode
from dpcfl_net.transport.transcript import Record, merged


def other_than_announced(records: Iterable[Record]) -> tuple[int, list[str]]:
    """Find messages whose kept bytes do not have the hash in their header.

    A client's answer may arrive damaged: the coordinator refuses it, and the client sends it again. It is a problem only if the
    coordinator acknowledged it: the last complete copy before the first acknowledgement is the one that was used.

    Args:
        records: The transcript's records.

    Returns:
        Number of damaged answers that were not accepted, and one sentence per problem. Messages whose payloads were not kept are
        not compared.
    """
    problems: list[str] = []
    damaged: dict[tuple[str, str], Record] = {}  # last copies of answers, by peer and message id
    settled: set[tuple[str, str]] = set()
    refused = 0
    for record, header, chunks in merged(_decoded(records)):
        if record.direction == "down" and header.kind == "ACK":
            key = record.peer, header.parent
            if key not in settled and key in damaged:
                problems.append(_changed(damaged.pop(key), "RESULT"))
                refused -= 1
            settled.add(key)
        if header.kind not in ("TASK", "RESULT") or None in chunks:
            continue
        key = record.peer, header.id
        fits = payload_hash(*(chunk or b"" for chunk in chunks)) == (header.blake3 or NOTHING)
        if record.direction == "down":
            problems += [] if fits else [_changed(record, header.kind)]
        elif key not in settled:
            damaged.pop(key, None)
            if not fits:
                damaged[key] = record
                refused += 1
    return refused, problems


def _changed(record: Record, kind: str) -> str:
    return f"the bytes of record {record.number} ({kind}, {record.peer}) are not those of its header"


def other_than_answered(
    records: Iterable[Record], charged: Mapping[int, list[Entry]], folders: Mapping[int, Path]
) -> tuple[int, int, list[str]]:
    """Compare releases in a transcript with the answers that the clients keep of their last rounds.

    Args:
        records: The transcript's records.
        charged: Charges by client.
        folders: Ledger folder of each client. Copies from other hosts keep no answers.

    Returns:
        Number of compared releases, that of all releases, and one sentence per problem.
    """
    kept = {client: answers(folders[client], lines) for client, lines in charged.items() if client in folders}
    debits = {(client, e.round, e.kind): e.sequence for client, lines in charged.items() for e in lines if e.type == "debit"}
    first: dict[tuple[int, int, str], Header] = {}
    problems: dict[str, None] = {}
    compared = 0
    for record, header in _decoded(records):
        client = record.client
        if client is None or record.direction != "up" or header.kind != "RESULT" or header.code != "release":
            continue
        key = (client, header.round, header.task)
        where = f"client {client}, round {header.round} {header.task}"
        if first.setdefault(key, header).blake3 != header.blake3:
            problems[f"{where}: two different releases"] = None
        answer = kept.get(client, {}).get(debits.get(key, -1))
        if answer is None:
            continue
        compared += 1
        if answer != digest_of_release([list(row) for row in header.tensors], header.blake3 or NOTHING):
            problems[f"{where}: the release is not the one that the client answered"] = None
    return compared, len(first), list(problems)


def _decoded(records: Iterable[Record]) -> Iterator[tuple[Record, Header]]:
    """Records of clients with their headers; without those that are no messages, which `split_models.given` reports."""
    for record in records:
        if record.client is not None:
            try:
                yield record, decode(record.header)
            except WireError:
                continue
