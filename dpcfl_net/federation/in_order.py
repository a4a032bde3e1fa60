"""Answers of a call in client order: an early answer waits in memory, and a window bounds how many can wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
Take = Callable[[int, Arrays], None]
LEAST_WINDOW = 64  # clients
WINDOW_BYTES = 1 << 30


def window(parameters: int) -> int:
    """Return the most clients of a streamed call that may be asked ahead of the first without an answer.

    So at most WINDOW_BYTES of updates wait in memory, or LEAST_WINDOW updates of a large model.

    Args:
        parameters: Number of parameters p.
    """
    return max(LEAST_WINDOW, WINDOW_BYTES // (4 * parameters))


class InOrder:
    """Passes answers on in client order.

    Args:
        asked: Clients of the call.
        take: Receives client and answer, in client order.
        window: Most clients ahead of the first open one that `admits` lets in; None: no limit.

    Attributes:
        count: Answers so far, passed on or waiting.
    """

    def __init__(self, asked: Iterable[int], take: Take, window: int | None = None) -> None:
        self._turns = sorted(asked)
        self._position = {client: k for k, client in enumerate(self._turns)}
        self._take, self._window, self._next = take, window, 0
        self._early: dict[int, Arrays] = {}
        self._closed: set[int] = set()
        self.count = 0

    @property
    def head(self) -> int | None:
        """First client that is still open; None if all are closed."""
        return self._turns[self._next] if self._next < len(self._turns) else None

    def admits(self, client: int) -> bool:
        """Return True if a client is within the window, so that it may be asked.

        Args:
            client: Client id.
        """
        return self._window is None or self._position[client] < self._next + self._window

    def put(self, client: int, answer: Arrays) -> None:
        """Pass an answer on when its turn comes.

        Args:
            client: Client id; a closed one is an error.
            answer: Its tensors.
        """
        if client in self._closed or self._position[client] < self._next:
            raise ValueError(f"client {client} is closed, or has answered already")
        self.count += 1
        self._early[client] = answer
        self._drain()

    def close(self, client: int) -> None:
        """Wait no longer for a client.

        Args:
            client: Client id.
        """
        self._closed.add(client)
        self._drain()

    def end(self) -> None:
        """Pass on all answers that wait; clients without an answer are closed."""
        self._closed.update(client for client in self._turns[self._next :] if client not in self._early)
        self._drain()

    def _drain(self) -> None:
        while (client := self.head) is not None and (client in self._early or client in self._closed):
            self._next += 1
            if client in self._early:
                self._take(client, self._early.pop(client))
