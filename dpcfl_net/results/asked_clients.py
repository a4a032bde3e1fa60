"""Clients that got a task, by the messages that the server of a run recorded."""

from __future__ import annotations

from pathlib import Path

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.results.round_times import client_of
from dpcfl_net.results.run_files import whole
from dpcfl_net.transport import transcript
from dpcfl_net.transport.messages import WireError, decode


def last_tasks(folder: Path) -> dict[int, int]:
    """Read the round of the last task of each client that got one from messages.jsonl.

    Args:
        folder: Run folder.
    """
    found: dict[int, int] = {}
    for line in runlog.each(RunFolder(folder).messages):
        if line.get("kind") == "TASK" and (client := client_of(line.get("peer"))) is not None:
            found[client] = max(found.get(client, 0), whole(line.get("round")) or 0)
    return found


def asked_clients(folder: Path) -> set[int] | None:
    """Return the clients that got a task by messages.jsonl or the transcript; None if neither holds a task.

    Args:
        folder: Folder of a run without aggregators, whose server sends its tasks to them.
    """
    return {*last_tasks(folder), *_asked_by_transcript(RunFolder(folder).transcript)} or None


def _asked_by_transcript(path: Path) -> set[int]:
    """Clients with a task in a transcript; empty if it is missing or was changed, which `dpcfl verify` reports."""
    try:
        return {client for record in transcript.read(path) if (client := record.client) is not None and _is_task(record)}
    except DpcflError:
        return set()


def _is_task(record: transcript.Record) -> bool:
    """True if a record is a task, or may be one: it is no message of this protocol."""
    try:
        return record.direction == "down" and decode(record.header).kind == "TASK"
    except WireError:
        return True
