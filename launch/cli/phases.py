"""Phase of each worker of a run, from its messages and timings."""

from __future__ import annotations

import sys
from typing import Any

from dpcfl_net.results.number_format import number
from dpcfl_net.results.round_times import client_of
from dpcfl_net.results.run_files import JsonLine, whole

WAITING, TRAINING, SENDING, GONE, AWAY = "waiting", "training", "sending", "gone", "away"


class Workers:
    """Phase of each worker, from messages and timings. AWAY: not connected and not needed."""

    def __init__(self) -> None:
        # Newest round of each client with one, and in it the tasks sent, those answered, and the steps computed.
        self._asked: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._answered: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._trained: dict[int, tuple[int, int]] = {}
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
            if kind in ("TASK", "RESULT"):
                table = self._asked if kind == "TASK" else self._answered
                task, (before, tasks) = sys.intern(str(line.get("task"))), table.get(client, (0, ()))
                if at > before or (at == before and task not in tasks):
                    table[client] = at, (task, *(tasks if at == before else ()))
        for line in spans:
            client, at = client_of(line.get("who")), whole(line.get("round")) or 0
            if client is not None and line.get("what") == "train":
                before, count = self._trained.get(client, (0, 0))
                if at >= before:
                    self._trained[client] = at, 1 + (count if at == before else 0)

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
        asked, tasks = self._asked.get(client, (0, ()))
        answered, answers = self._answered.get(client, (0, ()))
        heard, kind = self._heard.get(client, (0.0, ""))
        if kind == "BYE" or self._missed.get(client, 0.0) > heard:
            return GONE
        if asked < answered or not asked or (asked == answered and {*tasks} <= {*answers}):
            return WAITING
        return SENDING if self._trained.get(client, (0, 0)) >= (asked, len(tasks)) else TRAINING
