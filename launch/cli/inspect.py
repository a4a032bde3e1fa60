"""`dpcfl inspect`: the messages of a run that its server sent and received."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.secure_statement import has_single_releases
from dpcfl_net.federation.late_answer import LateAnswer
from dpcfl_net.results import summary
from dpcfl_net.results.recorded_messages import transcript_of

TRUST = {
    "untrusted-server": "The server is not trusted. These messages are all that it received; each client's privacy gate released them.",
    "trusted-server": "The server is trusted: it sees these messages without noise. Only what it publishes is noisy. "
    "This transcript holds raw updates: keep it private.",
    "secure-aggregation": "The server is not trusted. These messages are all that it received: masked vectors, of which it learned sums over clients only.",
}  # fmt: skip
WITH_SINGLE_RELEASES = (
    "The server is not trusted. These messages are all that it received: in secure sums masked vectors, of which it learned sums over clients "
    "only, and in other rounds what each client's privacy gate released."
)


@dataclass(frozen=True)
class Selection:
    """Which messages to show.

    Attributes:
        client: Only this client; None: all.
        round: Only this round; None: all.
        limit: Largest number of messages.
    """

    client: int | None
    round: int | None
    limit: int


def inspect(folder: Path, chosen: Selection) -> dict[str, Any]:
    """Read the transcript of a run.

    Args:
        folder: The run folder.
        chosen: Which messages to show.

    Returns:
        trust, single_releases (True if the server received releases of single clients besides secure sums), unprotected (reasons),
        messages (number, time, direction, client, round, kind, task, bytes, tensors, code, late), left_out (number of messages beyond the
        limit) and cut (True if a crash cut the last message).

    Raises:
        ConfigError: If the folder has no transcript.
    """
    from dpcfl_net.transport import transcript

    job, path = summary.read_run_job(folder), transcript_of(folder, "headers")
    protocol: Protocol = job.protocol
    if chosen.client is not None and chosen.client >= len(protocol.roster):
        raise ConfigError(f"--client is {chosen.client}: must be 0 to {len(protocol.roster) - 1}")
    if chosen.round is not None and chosen.round > protocol.rounds:
        raise ConfigError(f"--round is {chosen.round}: must be 0 to {protocol.rounds}")
    late, left_out = _late_answers(RunFolder(folder)), 0
    messages: list[dict[str, Any]] = []
    reader = transcript.read(path)
    for record in reader:
        found = _message(record, late)
        if found is None or chosen.client not in (None, found["client"]) or chosen.round not in (None, found["round"]):
            continue
        if len(messages) < chosen.limit:
            messages.append(found)
        else:
            left_out += 1
    return {
        "trust": protocol.privacy.trust, "single_releases": protocol.privacy.secure and has_single_releases(job.algorithm),
        "unprotected": list(protocol.unprotected), "messages": messages, "left_out": left_out, "cut": bool(reader.cut),
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """Format the messages as a table.

    Args:
        found: From `inspect`.
    """
    out = [WITH_SINGLE_RELEASES if found["single_releases"] else TRUST[found["trust"]]]
    if found["unprotected"]:
        out.append(f"Without any privacy guarantee: {'; '.join(found['unprotected'])}")
    out.append("   #  time      client  to      round  kind       task                 bytes  content")
    out += [_line(message) for message in found["messages"]] or ["no message matches"]
    if found["left_out"]:
        out.append(f"{found['left_out']} more messages; use --limit, --client and --round to select")
    if found["cut"]:
        out.append("the last message is incomplete because of a crash")
    return out


def _message(record: Any, late: dict[tuple[str, int, str], float]) -> dict[str, Any] | None:
    """Fields of a message; None for a chunk of another one."""
    from dpcfl_net.transport.transcript import header_of

    header, peer = header_of(record), record.peer.removeprefix("client ")
    if header.kind == "CHUNK":
        return None
    is_answer = record.direction == "up" and header.kind == "RESULT"
    return {
        "number": record.number,
        "time": record.time,
        "direction": record.direction,
        "client": int(peer) if peer.isdecimal() else peer,
        "round": header.round,
        "kind": header.kind,
        "task": header.task,
        "bytes": len(record.header) + header.size,
        "tensors": [{"name": name, "dtype": dtype, "shape": list(shape)} for name, dtype, shape, _ in header.tensors],
        "code": header.code,
        "late": is_answer and record.time <= late.get((peer, header.round, header.task), 0),
    }


def _line(message: dict[str, Any]) -> str:
    to = "server" if message["direction"] == "up" else "client"
    tensors = ", ".join(f"{one['name']} {one['dtype']}{one['shape']}" for one in message["tensors"])
    clock = time.strftime("%H:%M:%S", time.localtime(message["time"]))
    content = (tensors or message["code"]) + (" (late: set aside)" if message["late"] else "")
    return (
        f"{message['number']:>4}  {clock}  {message['client']:>6}  {to}  {message['round']:>5}  {message['kind']:<9}  "
        f"{message['task']:<18} {message['bytes']:>7}  {content}"
    ).rstrip()


def _late_answers(files: RunFolder) -> dict[tuple[str, int, str], float]:
    """Time of the last warning about each late answer, by client, round and task."""
    lines = runlog.read(files.warnings) if files.warnings.exists() else []
    found = [(line["time"], answer) for line in lines if (answer := LateAnswer.read(line["text"])) is not None]
    return {(str(answer.client), answer.round, answer.task): at for at, answer in found}
