"""Pipes between launcher and coordinator: its commands to start and stop clients, and news of what is lost."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from dpcfl_net.launch.news_pipe import NewsPipe

LONGEST_COMMAND = 64  # bytes


class CoordinatorPipes:
    """The launcher's ends of both pipes; a coordinator that restarts gets new ones.

    Attributes:
        commands: Pipe of the commands; None before the first start, and after its end.
    """

    def __init__(self) -> None:
        self.commands: Connection | None = None
        self._losses: NewsPipe | None = None

    @contextlib.contextmanager
    def renewed(self) -> Iterator[tuple[int, int]]:
        """Open new pipes.

        Yields:
            Descriptors of the coordinator's ends, of commands and of losses; they are closed here at the end of the context.
        """
        self.close()
        self.commands, commands_end = multiprocessing.Pipe(duplex=False)
        self._losses = NewsPipe()
        with commands_end, self._losses.receiver as losses_end:
            yield commands_end.fileno(), losses_end.fileno()

    def read_commands(self, handle: Callable[[bytes], None]) -> None:
        """Read all commands that the coordinator has sent.

        Args:
            handle: Executes a command.
        """
        assert self.commands is not None
        try:
            while self.commands.poll():
                handle(self.commands.recv_bytes(LONGEST_COMMAND))
        except (EOFError, OSError):  # it has ended, or sent a message that is too long
            self.commands.close()
            self.commands = None

    def tell(self, gone: int | str) -> None:
        """Send a lost client or aggregator, or the observer that has ended, to the coordinator.

        Args:
            gone: Client id, number of the aggregator, or name of the observer.
        """
        assert self._losses is not None
        self._losses.tell(gone)

    def close(self) -> None:
        """Close the pipes; may be called twice."""
        for pipe in (self.commands, self._losses):
            if pipe is not None:
                pipe.close()
