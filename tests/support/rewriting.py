"""Changes to the files of a finished run, as an attacker would make them: transcripts and ledgers with chains that fit again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from independent_ledger import canonical, sha256

Body = list[Any]  # number, time, direction, peer, header, payload


def read_bodies(folder: Path) -> list[Body]:
    """Read the bodies of a transcript, with decoded headers."""
    with (folder / "transcript.msgpack").open("rb") as file:
        bodies = [msgpack.unpackb(body) for body, _ in msgpack.Unpacker(file)]
    return [[*body[:4], msgpack.unpackb(body[4]), body[5]] for body in bodies]


def write_bodies(folder: Path, bodies: list[Body]) -> None:
    """Write a transcript whose chain and numbers fit."""
    digest, content = hashlib.sha256(b"dpcfl-transcript-1").digest(), b""
    for number, body in enumerate(bodies):
        packed = msgpack.packb([number, *body[1:4], msgpack.packb(body[4]), body[5]])
        digest = hashlib.sha256(digest + packed).digest()
        content += msgpack.packb([packed, digest])
    (folder / "transcript.msgpack").write_bytes(content)


def rewrite_transcript(folder: Path, change: Callable[[list[Body]], None]) -> None:
    """Change the bodies of a transcript and compute its chain again."""
    bodies = read_bodies(folder)
    change(bodies)
    write_bodies(folder, bodies)


def results(bodies: list[Body], client: int, round: int) -> tuple[Body, Body]:
    """The RESULT of a client in a round, and its only chunk."""
    peer = f"client {client}"
    (result,) = [b for b in bodies if b[3] == peer and b[4]["kind"] == "RESULT" and b[4].get("round") == round]
    (chunk,) = [b for b in bodies if b[4]["kind"] == "CHUNK" and b[4].get("parent") == result[4]["id"]]
    return result, chunk


def rewrite_ledger(folder: Path, owner: int | str, change: Callable[[list[dict[str, Any]]], None], *, counter: bool) -> None:
    """Change the lines of a ledger and compute its chain again.

    Args:
        folder: Run folder.
        owner: Client id, or the name of another owner's folder.
        change: Changes the decoded lines.
        counter: Put a matching counter in place of the journal, as in a copy from another host.
    """
    ledger = folder / "ledgers" / (owner if isinstance(owner, str) else f"client_{owner:04d}")
    lines = [json.loads(line) for line in (ledger / "ledger.jsonl").read_bytes().splitlines()]
    change(lines)
    previous, content = "0" * 64, b""
    for number, line in enumerate(lines):
        packed = canonical({**line, "sequence": number, "prev": previous}) + b"\n"
        previous, content = sha256(packed), content + packed
    (ledger / "ledger.jsonl").write_bytes(content)
    if counter:
        (ledger / "journal").unlink()
        (ledger / "counter").write_text(f"{len(lines) - 1} {previous}\n")
