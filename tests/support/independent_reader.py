"""Verifies ledgers and transcript of a run folder from docs/reference alone; imports nothing of the package.

python tests/support/independent_reader.py RUN
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
from blake3 import blake3
from independent_ledger import JsonMap, Report, canonical, check_ledger, read_journal, sha256
from independent_signatures import Message, check_signatures, signed


def verify(folder: Path) -> Report:
    """Run steps 1 to 8 of "Verify a run" in docs/reference/run-folder.md."""
    report = Report()
    protocol = check_job(folder, report)
    job = sha256((folder / "protocol.json").read_bytes())
    debits: dict[str, list[JsonMap]] = {}
    for ledger in sorted((folder / "ledgers").iterdir()):
        try:
            debits[ledger.name] = check_ledger(ledger, job, protocol["run"], report)
        except (ValueError, KeyError, TypeError) as problem:
            report.problems.append(f"{ledger.name}: {problem}")
    path = folder / "transcript.msgpack"
    if path.exists():
        try:
            check_messages(list(merged(records(path, report))), folder, protocol, debits, report)
        except (ValueError, KeyError, TypeError) as problem:
            report.problems.append(f"transcript: {problem}")
    else:
        report.notes.append("no transcript")
    return report


def check_job(folder: Path, report: Report) -> JsonMap:
    """Step 1: signatures, canonical form, and the hash of the experiment."""
    key = (folder / "operator.pub").read_text().strip()
    parts = {name: (folder / name).read_bytes() for name in ("protocol.json", "experiment.json")}
    for name, data in parts.items():
        if not signed(key, data, bytes.fromhex((folder / f"{name}.sig").read_text())):
            report.problems.append(f"{name}: the signature is not the operator's")
        if canonical(json.loads(data)) != data:
            report.problems.append(f"{name}: not in canonical form")
    protocol: JsonMap = json.loads(parts["protocol.json"])
    roster = (folder / "roster.jsonl").read_bytes()
    if protocol["roster"] != {"clients": roster.count(b"\n"), "sha256": sha256(roster)}:
        report.problems.append("roster.jsonl: not the roster that protocol.json names")
    clients = [json.loads(line) for line in roster.splitlines()]
    if [client["id"] for client in clients] != [*range(len(clients))] or any(
        canonical(client) + b"\n" != line for client, line in zip(clients, roster.splitlines(keepends=True), strict=True)
    ):
        report.problems.append("roster.jsonl: not in canonical form")
    if protocol["experiment_hash"] != sha256(parts["experiment.json"]):
        report.problems.append("experiment.json: not the experiment that protocol.json names")
    return protocol


def records(path: Path, report: Report) -> Iterator[Message]:
    """Step 5: the chain of the transcript; yields each record as a separate message."""
    digest = hashlib.sha256(b"dpcfl-transcript-1").digest()
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_bin_len=1 << 24)
        for number, (body, stated) in enumerate(unpacker):
            digest = hashlib.sha256(digest + body).digest()
            if digest != stated:
                raise ValueError(f"record {number} was changed: its digest does not fit")
            at, _, direction, peer, header, payload = msgpack.unpackb(body)
            if at != number:
                raise ValueError(f"record {number} has number {at}")
            report.records += 1
            yield Message(number, direction, peer, msgpack.unpackb(header), payload)
        if unpacker.tell() < path.stat().st_size:
            report.notes.append("the last record of the transcript is truncated")


def merged(found: Iterator[Message]) -> Iterator[Message]:
    """Merge the chunks of each message, in order of completion."""
    open_: dict[tuple[str, str], tuple[Message, list[bytes | None]]] = {}
    for record in found:
        channel = record.direction, record.peer
        if record.header["kind"] != "CHUNK":
            if record.header.get("chunks"):
                open_[channel] = (record, [])
            else:
                yield record
            continue
        first, chunks = open_.get(channel, (record, []))
        if record.header["parent"] != first.header["id"] or record.header.get("index", 0) != len(chunks):
            continue
        chunks.append(record.payload)
        if len(chunks) == first.header["chunks"]:
            del open_[channel]
            first.payload = None if None in chunks else b"".join(chunk for chunk in chunks if chunk is not None)
            yield first


def check_messages(
    messages: list[Message], folder: Path, protocol: JsonMap, debits: dict[str, list[JsonMap]], report: Report
) -> None:
    """Steps 5 to 8: each release against its task, the client's debit and its stored answer."""
    check_payloads(messages, report)
    job = sha256((folder / "protocol.json").read_bytes())
    tasks: dict[tuple[str, str], Message] = {}
    hashes: dict[tuple[int, int, str], str] = {}
    for message in messages:
        header = message.header
        if message.direction == "down" and (header["run"], header["job"]) != (protocol["run"], job):
            report.problems.append(f"transcript: record {message.number} belongs to another run or job")
        if message.direction == "down" and header["kind"] == "TASK":
            tasks[message.peer, header["id"]] = message
        if message.direction == "up" and header["kind"] == "RESULT" and header.get("code") == "release":
            client, task = int(message.peer.removeprefix("client ")), tasks.get((message.peer, header["parent"]))
            key = (client, header["round"], header["task"])
            report.releases.add(key)
            if hashes.setdefault(key, header.get("blake3", "")) != header.get("blake3", ""):
                report.problems.append(f"transcript: client {client} sent two releases of round {key[1]} {key[2]}")
            ledger = f"client_{client:04d}"
            if ledger in debits:
                report.problems += check_release(job, key, task, header, debits[ledger], folder / "ledgers" / ledger)
    check_debits(job, tasks, debits, report)
    if protocol["privacy"]["trust"] == "secure-aggregation":
        check_signatures(messages, folder, job, report)


def check_debits(job: str, tasks: dict[tuple[str, str], Message], debits: dict[str, list[JsonMap]], report: Report) -> None:
    """Step 6: each debit against the tasks that its client was sent."""
    shown: dict[tuple[str, int, str], set[str]] = {}
    for (peer, _), task in tasks.items():
        t, name = task.header["round"], task.header["task"]
        shown.setdefault((peer, t, name), set()).add(request_id(job, int(peer.removeprefix("client ")), t, name, task))
    for ledger in sorted(debits.keys() - {"curator"}):
        client = int(ledger.removeprefix("client_"))
        for line in debits[ledger]:
            found = shown.get((f"client {client}", line["round"], line["kind"]), set())
            where = f"client {client}, round {line['round']} {line['kind']}"
            if not found:
                report.problems.append(f"{where}: charged for a task that the transcript does not show")
            elif line["id"] not in found:
                report.problems.append(f"{where}: charged for another task than the transcript shows")


def request_id(job: str, client: int, t: int, name: str, task: Message) -> str:
    content = task.header.get("blake3") or payload_hash()
    return sha256(canonical([job, client, t, name, task.header.get("tensors", []), content]))


def check_payloads(messages: list[Message], report: Report) -> None:
    """Step 5: payloads against the hashes in their headers; of an answer the last copy before its first acknowledgement."""
    used: list[Message] = []
    answers: dict[tuple[str, str], Message] = {}
    acknowledged: set[tuple[str, str]] = set()
    for message in messages:
        if message.direction == "up":
            answers[message.peer, message.header["id"]] = message
            continue
        used.append(message)
        answer = message.peer, message.header.get("parent", "")
        if message.header["kind"] == "ACK" and answer not in acknowledged:
            acknowledged.add(answer)
            used += [answers[answer]] if answer in answers else []
    for message in used:
        if message.payload is not None and payload_hash(message.payload) != message.header["blake3"]:
            report.problems.append(
                f"transcript: the payload of record {message.number} is not the one that its header announces"
            )


def check_release(
    job: str, key: tuple[int, int, str], task: Message | None, result: JsonMap, debits: list[JsonMap], ledger: Path
) -> list[str]:
    """Steps 6 and 7: one sentence for each problem of a release."""
    client, t, name = key
    where = f"client {client}, round {t} {name}"
    found = [debit for debit in debits if (debit["round"], debit["kind"]) == (t, name)]
    if not found:
        return [f"{where}: released without a debit"]
    if task is None:
        return [f"{where}: the transcript holds no task for this release"]
    if request_id(job, client, t, name, task) != found[0]["id"]:
        return [f"{where}: charged for another task than the transcript shows"]
    stated, rows = result.get("blake3") or payload_hash(), result.get("tensors", [])
    for path in sorted((ledger / "releases").glob("*.answer")) if (ledger / "releases").is_dir() else []:
        answer = json.loads(path.open("rb").readline())
        if answer["id"] == found[0]["id"]:
            if answer["status"] != "release" or answer["release"][3] != stated:
                return [f"{where}: the release in the transcript is not the one that the client stored"]
            return []
    if (ledger / "journal").exists():
        mark = read_journal((ledger / "journal").read_bytes()).marks.get(found[0]["sequence"])
        size = sum(row[3] for row in rows)
        head = b"\x92" + msgpack.packb(rows) + bin_head(size)
        seal = [len(head) + size, size, sha256(head), stated]
        if mark is not None and sha256(canonical(["release", "", "", seal])) != mark:
            return [f"{where}: the release in the transcript is not the one that the client's journal marks"]
    return []


def payload_hash(*parts: bytes) -> str:
    return blake3(b"".join(parts)).hexdigest()


def bin_head(size: int) -> bytes:
    """The msgpack head of `size` binary bytes."""
    code, width = (0xC4, 1) if size < 1 << 8 else (0xC5, 2) if size < 1 << 16 else (0xC6, 4)
    return bytes([code]) + size.to_bytes(width, "big")


if __name__ == "__main__":
    read = verify(Path(sys.argv[1]))
    for ledger, t, name, event in read.events:
        print(f"{ledger} round {t} {name}: {json.dumps(event)}")
    print(f"{read.records} records, {len(read.releases)} releases, {read.signatures} signatures; {'; '.join(read.notes)}")
    print("\n".join(f"PROBLEM {problem}" for problem in read.problems) or "the run holds")
    sys.exit(bool(read.problems))
