"""What an end of the wire keeps of its traffic: failures counted and told, a row per message, the transcript."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from dpcfl_net.transport.messages import Header, WireError
from dpcfl_net.transport.transcript import Transcript

QUIET = ("CHUNK", "CREDIT", "HEARTBEAT")  # kinds left out of the message log
TOLD = "client-"  # before a code that a client's ERROR brings, which is of the client's own choice
CODES = 128  # so many codes are told apart before all further ones that clients bring are counted together

Listen = Callable[[dict[str, Any]], None] | None


class MessageLog:
    """Passes on to whoever listens; `failures` counts broken rules by code in any case."""

    def __init__(self, on_failure: Listen, on_message: Listen = None, transcript: Transcript | None = None) -> None:
        self.failures: Counter[str] = Counter()
        self._on_failure, self._on_message, self._transcript = on_failure, on_message, transcript

    def failed(self, name: str, error: WireError) -> None:
        known = not error.code.startswith(TOLD) or error.code in self.failures or len(self.failures) < CODES
        self.failures[error.code if known else f"{TOLD}other"] += 1
        if self._on_failure is not None:
            self._on_failure({"time": time.time(), "peer": name, "code": error.code, "reason": error.reason})

    def message(self, direction: str, name: str, header: Header, size: int) -> None:
        """A row for messages.jsonl; `size` in bytes, header and payload."""
        if self._on_message is not None and header.kind not in QUIET:
            about = {"time": time.time(), "direction": direction, "peer": name, "kind": header.kind}
            self._on_message({**about, "round": header.round, "bytes": size, "id": header.id})

    def crossed(self, direction: str, name: str, data: bytes | memoryview, chunk: memoryview | None) -> None:
        """One message as it crossed, for the transcript."""
        if self._transcript is not None:
            self._transcript.record(direction, name, bytes(data), chunk)

    def tick(self, flush: bool = False) -> None:
        if self._transcript is not None:
            if flush:
                self._transcript.flush()
            else:
                self._transcript.flush_if_due()
