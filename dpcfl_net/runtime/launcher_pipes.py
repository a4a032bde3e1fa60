"""A server process's ends of its pipes to the launcher: start and stop commands, and news of processes that do not come back."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection

from dpcfl_net.transport.keys import OBSERVER


def open_pipe(descriptor: int | None) -> Connection | None:
    """Open the receiving end of an inherited pipe.

    Args:
        descriptor: Its descriptor; None: no pipe.
    """
    return None if descriptor is None else Connection(descriptor, writable=False)


def command_sender(descriptor: int | None) -> Callable[[str, int], None] | None:
    """Return a function that sends start and stop commands to the launcher.

    The commands are lines of text, since the launcher must not unpickle bytes of an untrusted server. It does not wait for the end of
    a line, as it would for that of a message of a `Connection`.

    Args:
        descriptor: Descriptor of a pipe to the launcher; None: no launcher.
    """
    if descriptor is None:
        return None

    def send(word: str, client: int) -> None:
        os.write(descriptor, f"{word} {client}\n".encode())  # whole, since a pipe takes so few bytes at once

    return send


class LauncherNews:
    """Messages of the launcher about processes that do not come back.

    Args:
        pipe: Pipe from the launcher; None: no launcher.
    """

    def __init__(self, pipe: Connection | None) -> None:
        self._pipe, self._lost, self._observer_ended = pipe, list[int](), False

    def lost_clients(self) -> list[int]:
        """Return the clients, or aggregators, that the launcher gave up, or that have left, since the last call."""
        self._read()
        found, self._lost = self._lost, []
        return found

    def observer_has_ended(self) -> bool:
        """Return True if the observer has measured the last round and ended, or is lost."""
        self._read()
        return self._observer_ended

    def _read(self) -> None:
        try:
            while self._pipe is not None and self._pipe.poll():
                word = self._pipe.recv_bytes(64)
                if word == OBSERVER.encode():
                    self._observer_ended = True
                else:
                    self._lost.append(int(word))
        except EOFError:  # the launcher has ended, and this run ends with it
            self._pipe = None
