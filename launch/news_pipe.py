"""Pipe by which the launcher, or the agent of a host, tells a server process which peers do not come back."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue


class NewsPipe:
    """The sending end of the pipe.

    A pipe holds about 8,000 lost clients, and a server process reads it only between calls. A thread does the waiting, since a sender
    that waits reads no commands of that process, which may then wait, too.

    Attributes:
        receiver: The other end, to be closed here once the server process has it.
    """

    def __init__(self) -> None:
        self.receiver, sender = multiprocessing.Pipe(duplex=False)
        self._news: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._send, args=(sender,), name="news", daemon=True).start()

    def tell(self, gone: int | str) -> None:
        """Send a lost client or aggregator, or the observer that has ended; returns at once.

        Args:
            gone: Client id, number of the aggregator, or name of the observer.
        """
        self._news.put(str(gone).encode())

    def close(self) -> None:
        """Close the pipe once all news are sent or the server process has ended; may be called twice."""
        self._news.put(None)

    def _send(self, pipe: Connection) -> None:
        with pipe, contextlib.suppress(BrokenPipeError):  # the process has ended; a restarted one is told again
            while (news := self._news.get()) is not None:
                pipe.send_bytes(news)
