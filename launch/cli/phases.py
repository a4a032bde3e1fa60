"""Phase of each worker of a run, from its messages and timings."""

from __future__ import annotations

from typing import Any

from dpcfl_net.results.number_format import number
from dpcfl_net.results.round_times import client_of
from dpcfl_net.results.run_files import JsonLine, whole

WAITING, TRAINING, SENDING, GONE, AWAY = "waiting", "training", "sending", "gone", "away"


class Workers:
    """Phase of each worker, from messages and timings. AWAY: not connected and not needed."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._trained: dict[int, int] = {}
        self._heard: dict[int, tuple[float, str]] = {}
        self._missed: dict[int, float] = {}
        self._stopped: set[int] = set()

    def follow(self, messages: list[JsonLine], spans: list[JsonLine]) -> None:
        """Process new lines of messages.jsonl and spans.jsonl."""
        for line in messages:
            client, at, kind = client_of(line.get("peer")), whole(line.get("round")) or 0, str(line.get("kind"))
            if client is None:
                continue
            if line.get("direction") == "up":
                self._heard[client] = (number(line.get("time")) or 0.0, kind)
            if kind == "BYE" and line.get("direction") == "down":
                self._stopped.add(client)
            elif kind == "HELLO":
                self._stopped.discard(client)
            if kind == "TASK":
                self._asked[client] = max(at, self._asked.get(client, 0))
            elif kind == "RESULT":
                self._answered[client] = max(at, self._answered.get(client, 0))
        for line in spans:
            client, at = client_of(line.get("who")), whole(line.get("round")) or 0
            if client is not None and line.get("what") == "train":
                self._trained[client] = max(at, self._trained.get(client, 0))

    def miss(self, clients: list[Any], time: float) -> None:
        """Mark clients whose answer the server did not receive in time; a later message unmarks a client.

        Args:
            clients: Client ids.
            time: Seconds since the Unix epoch.
        """
        for client in map(whole, clients):
            if client is not None:
                self._missed[client] = time

    def phases(self, clients: int) -> list[str]:
        """Return the phase of each client, in client order."""
        found = [AWAY] * max(clients, max(self._asked, default=-1) + 1)
        for client in (self._asked.keys() | self._heard.keys()) - self._stopped:  # of a large roster, few are connected
            if client < len(found):
                found[client] = self._phase(client)
        return found

    def _phase(self, client: int) -> str:
        asked = self._asked.get(client, 0)
        heard, kind = self._heard.get(client, (0.0, ""))
        if kind == "BYE" or self._missed.get(client, 0.0) > heard:
            return GONE
        if asked <= self._answered.get(client, 0):
            return WAITING
        return SENDING if self._trained.get(client, 0) >= asked else TRAINING
