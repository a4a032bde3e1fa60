"""Who is connected where not all clients may be at once: a bounded number of places, and the longest idle makes room."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Literal

Word = Literal["start", "stop"]
BYE_AGAIN_S = 1.0
INSIST_S = 10.0  # after so long somebody who was told to go is reported to whoever starts clients, who can end it


class ClientPool:
    """Places for at most `bound` clients; the others are away. It opens no socket and starts no process.

    A client in a place is coming (started, or lost from sight while it had a task), here, or leaving. tell("start", client)
    goes to whoever starts clients, tell("stop", client) once a client need not run any more; bye(client) tells a connected
    client to go, and is repeated until it has gone: a goodbye is lost when a connection is reset.
    """

    def __init__(
        self,
        bound: int,
        tell: Callable[[Word, int], None],
        bye: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bound, self._tell, self._bye, self._clock = bound, tell, bye, clock
        self._here: OrderedDict[int, None] = OrderedDict()  # the longest idle first
        self._coming: set[int] = set()
        self._leaving: dict[int, float] = {}  # when it was last told to go
        self._overdue: dict[int, float] = {}  # of those leaving, when to insist
        self.started = 0

    @property
    def free(self) -> int:
        """Places that nobody holds."""
        return self.bound - len(self._here) - len(self._coming) - len(self._leaving)

    def here(self, client: int) -> bool:
        """Whether the client is connected and may be given a task."""
        return client in self._here

    def in_turn(self, clients: Iterable[int]) -> list[int]:
        """The order to ask clients in: who is here need not be started."""
        return sorted(clients, key=lambda client: (client not in self._here, client))

    def admit(self, queue: Collection[int], busy: Collection[int]) -> list[int]:
        """Those of `queue` who have a place now, started into a free one if need be.

        For the others room is made among those who are here, neither queue nor have a task (`busy`).
        """
        admitted, free = [], self.free
        for client in queue:
            if client in self._leaving:
                continue
            if client not in self._here and client not in self._coming:
                if not free:
                    continue
                free -= 1
                self._start_client(client)
            admitted.append(client)
        wanting = len(queue) - len(admitted) - len(self._leaving)
        if wanting > 0:
            queued = set(queue)
            idle = [client for client in self._here if client not in busy and client not in queued]
            for client in idle[:wanting]:
                self._send_away(client)
        return admitted

    def joined(self, client: int) -> None:
        """The client is connected; one that nobody awaits is told to go again."""
        if client in self._coming:
            self._coming.discard(client)
            self._here[client] = None
        elif client not in self._here:
            self._send_away(client)

    def left(self, client: int, busy: bool) -> None:
        """The client's connection has ended; with a task (`busy`) it is awaited again, without one it is away."""
        was_here = client in self._here
        self._here.pop(client, None)
        self._leaving.pop(client, None)
        self._overdue.pop(client, None)
        if was_here and busy:
            self._coming.add(client)
        else:
            self._tell("stop", client)

    def done(self, client: int) -> None:
        """The client has answered, and is idle from now on."""
        if client in self._here:
            self._here.move_to_end(client)

    def give_up(self, client: int) -> None:
        """The client did not come: its place is free."""
        if client in self._coming:
            self._coming.discard(client)
            self._tell("stop", client)

    def tend(self) -> None:
        """Repeat goodbyes that seem to have been lost, and insist in the end; to be called every second or so."""
        now = self._clock()
        for client in [client for client, limit in self._overdue.items() if limit <= now]:
            del self._overdue[client]
            self._tell("stop", client)
        for client, told in list(self._leaving.items()):
            if now - told >= BYE_AGAIN_S:
                self._leaving[client] = now
                self._bye(client)

    def _start_client(self, client: int) -> None:
        self._coming.add(client)
        self.started += 1
        self._tell("start", client)

    def _send_away(self, client: int) -> None:
        self._here.pop(client, None)
        self._leaving[client] = self._clock()
        self._overdue.setdefault(client, self._leaving[client] + INSIST_S)
        self._bye(client)
