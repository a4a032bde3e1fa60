"""Pipes between launcher and coordinator: its commands to start and stop clients, and news of what is lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from io import FileIO

from dpcfl_net.launch.news_pipe import NewsPipe

MOST_READ = 64 << 10  # bytes between looks at signals and other processes: an untrusted server may never stop sending
LONGEST_COMMAND = 64  # bytes


class CoordinatorPipes:
    """The launcher's ends of both pipes; a coordinator that restarts gets new ones."""

    def __init__(self) -> None:
        self._commands: FileIO | None = None
        self._unread = b""  # begin of a command
        self._losses: NewsPipe | None = None

    @property
    def commands(self) -> int | None:
        """Descriptor from which commands are read; None before the first start, and after the end of the commands."""
        return None if self._commands is None else self._commands.fileno()

    @contextlib.contextmanager
    def renewed(self) -> Iterator[tuple[int, int]]:
        """Open new pipes.

        Yields:
            Descriptors of the coordinator's ends, of commands and of losses; they are closed here at the end of the context.
        """
        self.close()
        receiver, commands_end = os.pipe()
        os.set_blocking(receiver, False)
        self._commands, self._unread, self._losses = FileIO(receiver), b"", NewsPipe()
        with FileIO(commands_end, "w"), self._losses.receiver as losses_end:
            yield commands_end, losses_end.fileno()

    def read_commands(self, handle: Callable[[bytes], None]) -> None:
        """Read commands that the coordinator has sent, without waiting for the rest of one; no more are read after one that is too long.

        Args:
            handle: Executes a command.
        """
        assert self._commands is not None
        if (received := self._commands.read(MOST_READ)) is None:
            return
        *commands, self._unread = (self._unread + received).split(b"\n")
        for command in commands:
            if len(command) <= LONGEST_COMMAND:
                handle(command)
        if not received or max(map(len, [*commands, self._unread])) > LONGEST_COMMAND:
            self._commands.close()
            self._commands = None

    def tell(self, gone: int | str) -> None:
        """Send a lost client or aggregator, or the observer that has ended, to the coordinator.

        Args:
            gone: Client id, number of the aggregator, or name of the observer.
        """
        assert self._losses is not None
        self._losses.tell(gone)

    def close(self) -> None:
        """Close the pipes; may be called twice."""
        for pipe in (self._commands, self._losses):
            if pipe is not None:
                pipe.close()
