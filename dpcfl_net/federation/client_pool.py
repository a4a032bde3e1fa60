"""Bounded pool of connected clients with LRU eviction."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Literal

Word = Literal["start", "stop"]
BYE_AGAIN_S = 1.0
INSIST_S = 10.0  # a client that stays so long after a goodbye is reported to the launcher, which can end it
STAYS_S = 60.0  # after its first goodbye; a launcher has ended every process of a host that obeys it by then


class ClientPool:
    """Pool of at most `bound` clients; it opens no socket and starts no process.

    A client in the pool is connecting (started, or disconnected during a task), connected, or leaving. A client that still connects
    STAYS_S after a goodbye, though it was not started again, holds no place: it could else keep others from theirs for ever.

    Args:
        bound: Most clients in the pool.
        tell: Sends "start" and a client id to the launcher, and "stop" when the client need not run any more.
        bye: Sends a goodbye to a connected client; repeated until it has left, since a reset connection loses messages.
        clock: Returns seconds.

    Attributes:
        started: Number of client starts so far.
    """

    def __init__(
        self,
        bound: int,
        tell: Callable[[Word, int], None],
        bye: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bound, self._tell, self._bye, self._clock = bound, tell, bye, clock
        self._connected: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._connecting: set[int] = set()
        self._leaving: dict[int, float] = {}  # client to the time of its last goodbye
        self._overdue: dict[int, float] = {}  # leaving client to the time when the launcher is asked to end it
        self._told_at: dict[int, float] = {}  # client to the time of its first goodbye since it was started
        self.started = 0

    @property
    def free(self) -> int:
        """Number of free places."""
        return self.bound - len(self._connected) - len(self._connecting) - self._leaving_with_place

    def here(self, client: int) -> bool:
        """Return True if a client is connected, so that it can get a task.

        Args:
            client: Client id.
        """
        return client in self._connected

    def in_turn(self, clients: Iterable[int]) -> list[int]:
        """Sort clients for a call: connected clients first, since they need no start.

        Args:
            clients: Client ids.
        """
        return sorted(clients, key=lambda client: (client not in self._connected, client))

    def admit(self, queue: Collection[int], busy: Collection[int]) -> list[int]:
        """Admit queued clients to the pool, and start them if they are not connected.

        If the pool is full, idle clients are evicted: connected ones without a task that are not in the queue. A client without a
        place that is still connected is asked over this connection.

        Args:
            queue: Clients to admit, in order.
            busy: Clients with a task.

        Returns:
            The clients of the queue that are in the pool now.
        """
        admitted, free = [], self.free
        for client in queue:
            if client in self._leaving and not self._stays(client):
                continue
            if client not in self._connected and client not in self._connecting:
                if free <= 0:  # below 0: clients of an earlier server connected unasked, and have not left yet
                    continue
                free -= 1
                if client in self._leaving:
                    del self._leaving[client]
                    self._overdue.pop(client, None)
                    self._connected[client] = None
                else:
                    self._start_client(client)
            admitted.append(client)
        waiting = len(queue) - len(admitted) - self._leaving_with_place
        if waiting > 0:
            queued = set(queue)
            idle = [client for client in self._connected if client not in busy and client not in queued]
            for client in idle[:waiting]:
                self._evict(client)
        return admitted

    def joined(self, client: int) -> None:
        """Note that a client has connected; an unexpected client gets a goodbye.

        Args:
            client: Client id.
        """
        if client in self._connecting:
            self._connecting.discard(client)
            self._connected[client] = None
        elif client not in self._connected:
            self._evict(client)

    def left(self, client: int, busy: bool) -> None:
        """Note that a client's connection has ended.

        Args:
            client: Client id.
            busy: True if the client has a task: the pool waits for it to connect again.
        """
        was_connected = client in self._connected
        self._connected.pop(client, None)
        self._leaving.pop(client, None)
        self._overdue.pop(client, None)
        if was_connected and busy:
            self._connecting.add(client)
        else:
            self._tell("stop", client)

    def done(self, client: int) -> None:
        """Note that a client has answered and is idle now.

        Args:
            client: Client id.
        """
        if client in self._connected:
            self._connected.move_to_end(client)

    def give_up(self, client: int) -> None:
        """Free the place of a client that did not connect.

        Args:
            client: Client id.
        """
        if client in self._connecting:
            self._connecting.discard(client)
            self._tell("stop", client)

    def tend(self) -> None:
        """Repeat goodbyes, and ask the launcher to end clients that stay; to be called about every second."""
        now = self._clock()
        for client in [client for client, limit in self._overdue.items() if limit <= now]:
            del self._overdue[client]
            self._tell("stop", client)
        for client, last_bye in list(self._leaving.items()):
            if now - last_bye >= BYE_AGAIN_S:
                self._leaving[client] = now
                self._bye(client)

    @property
    def _leaving_with_place(self) -> int:
        return sum(not self._stays(client) for client in self._leaving)

    def _stays(self, client: int) -> bool:
        """Return True if a client was told to leave long ago and was not started since."""
        return self._clock() - self._told_at.get(client, math.inf) >= STAYS_S

    def _start_client(self, client: int) -> None:
        self._told_at.pop(client, None)
        self._connecting.add(client)
        self.started += 1
        self._tell("start", client)

    def _evict(self, client: int) -> None:
        self._connected.pop(client, None)
        self._leaving[client] = self._clock()
        self._told_at.setdefault(client, self._leaving[client])
        self._overdue.setdefault(client, self._leaving[client] + INSIST_S)
        self._bye(client)
