"""Log of one end of the wire: counts of failures, a row per message, and the transcript."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from dpcfl_net.transport.messages import Header, WireError, plain
from dpcfl_net.transport.transcript import Transcript

QUIET = ("CHUNK", "CREDIT", "HEARTBEAT")  # kinds left out of the message log
CLIENT_PREFIX = "client-"  # marks the code of a client's ERROR, which the client chooses
CODES = 128  # distinct codes; further ones from clients are counted together

Row = dict[str, Any]


def refusal(failure: Mapping[str, Any]) -> str:
    """Describe a broken message, as `MessageLog.on_failure` gets it, in a line of the log."""
    return plain(f"refused a message of {failure['peer']}: {failure['code']}: {failure['reason']}")


class MessageLog:
    """Counts and forwards failures, messages and transcript records.

    Args:
        on_failure: Called with {"time", "peer", "code", "reason"} for each broken message.
        on_messages: Called in `tick` with the rows for messages.jsonl since the last call, one per message, if there are any;
            chunks count with their message, credits and heartbeats are left out.
        transcript: Records the bytes of each message.

    Attributes:
        failures: Number of broken messages by code.
    """

    def __init__(
        self,
        on_failure: Callable[[Row], None] | None = None,
        on_messages: Callable[[list[Row]], None] | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._on_failure, self._on_messages, self._transcript = on_failure, on_messages, transcript
        self._rows: list[Row] = []

    def failed(self, name: str, error: WireError) -> None:
        """Count and report a broken message of a peer."""
        known = not error.code.startswith(CLIENT_PREFIX) or error.code in self.failures or len(self.failures) < CODES
        self.failures[error.code if known else f"{CLIENT_PREFIX}other"] += 1
        if self._on_failure is not None:
            self._on_failure({"time": time.time(), "peer": name, "code": error.code, "reason": error.reason})

    def message(self, direction: str, name: str, header: Header, size: int) -> None:
        """Report one message to `on_messages`, with the next `tick`.

        Args:
            direction: "up" to the coordinator or "down" from it.
            name: Name of the peer.
            header: The header.
            size: Bytes of header and payload.
        """
        if self._on_messages is not None and header.kind not in QUIET:
            about = {"time": time.time(), "direction": direction, "peer": name, "kind": header.kind}
            task = {"task": header.task} if header.task else {}
            self._rows.append({**about, **task, "round": header.round, "bytes": size, "id": header.id})

    def crossed(self, direction: str, name: str, data: bytes | memoryview, chunk: memoryview | None) -> None:
        """Record one message in the transcript.

        Args:
            direction: "up" to the coordinator or "down" from it.
            name: Name of the peer.
            data: Bytes of the header.
            chunk: Its chunk; None without one.
        """
        if self._transcript is not None:
            self._transcript.record(direction, name, bytes(data), chunk)

    def tick(self) -> None:
        """Pass the rows of messages on, and write the transcript's buffer if due; call it after each exchange of messages."""
        if self._rows and self._on_messages is not None:
            rows, self._rows = self._rows, []
            self._on_messages(rows)
        if self._transcript is not None:
            self._transcript.flush_if_due()

    def flush_transcript(self) -> None:
        """Write the transcript's buffer."""
        if self._transcript is not None:
            self._transcript.flush()
