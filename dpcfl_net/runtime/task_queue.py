"""Queue from a thread that receives messages to the thread that computes: at most one task waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque

from dpcfl_net.transport.endpoint import ClientEvent

_log = logging.getLogger(__name__)


class TaskQueue:
    """Events of one endpoint for the thread that computes.

    A later task, an error or the end takes the place of a task that waits, which is neither computed nor charged. So a server that
    sends task after task fills the memory of one.
    """

    def __init__(self) -> None:
        self._events: deque[ClientEvent | BaseException | None] = deque()
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[None] = queue.SimpleQueue()  # one item for each event; written in C, unlike a Condition

    def put(self, event: ClientEvent | BaseException | None) -> None:
        """Append an event.

        Args:
            event: A task, the receipt of a result, an error, or None for the end.
        """
        with self._lock:
            waiting = next((k for k, known in enumerate(self._events) if _is(known, "task")), None)
            if waiting is None or _is(event, "sent"):
                self._events.append(event)
                self._ready.put(None)
            else:
                _log.info("a task was replaced before it began; it is not charged")
                self._events[waiting] = event

    def get(self, timeout_s: float | None = None) -> ClientEvent | BaseException | None:
        """Remove and return the oldest event.

        Args:
            timeout_s: Longest wait in seconds; None: no limit.

        Raises:
            queue.Empty: After `timeout_s` seconds without an event.
        """
        self._ready.get(timeout=timeout_s)
        with self._lock:
            return self._events.popleft()

    def __len__(self) -> int:
        return len(self._events)


def _is(event: ClientEvent | BaseException | None, kind: str) -> bool:
    return isinstance(event, ClientEvent) and event.kind == kind
