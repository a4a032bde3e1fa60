"""Processes on other hosts, as the launcher sees them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.files import reason
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.launch.placement.base import ClientRange, failure
from dpcfl_net.launch.placement.messages import GroupCommand, Message, SendSignal, SignalAggregator

_log = logging.getLogger(__name__)

Send = Callable[[Message], None]


class RemoteProcess:
    """A process that an agent started (see `base.Process`).

    Args:
        log: File for the end of its log.
    """

    def __init__(self, log: Path) -> None:
        self.reason = ""
        self.log_path, self._has_ended = log, threading.Event()
        self._code: int | None = None
        self._read, self._write = os.pipe()

    @property
    def sentinel(self) -> int:
        return self._read

    def wait(self, timeout_s: float | None = None) -> int | None:
        self._has_ended.wait(timeout_s)
        return self._code

    def close(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def ended(self, code: int, log: str) -> None:
        """Record its end; the agent's thread calls this once.

        Args:
            code: Exit code.
            log: End of its log.
        """
        self.reason = log  # its agent adds the message of a failure
        try:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(log if log.endswith("\n") or not log else log + "\n")
        except OSError as error:  # a full disk: the launcher must hear of the end all the same
            _log.warning("%s: %s", self.log_path, reason(error))
        self._code = code
        self._has_ended.set()
        os.close(self._write)


class RemoteHandle(RemoteProcess):
    """A worker that an agent started (see `base.Handle`).

    Args:
        send: Sends a command to the agent.
        process: Clients of the worker.
        log: As `RemoteProcess`.
    """

    def __init__(self, send: Send, process: ClientRange, log: Path) -> None:
        super().__init__(log)
        self._send, self.process = send, process

    def signal(self, number: int) -> None:
        self._send(SendSignal(first=self.process.clients[0], number=number))

    def send_command(self, command: str) -> None:
        self._send(GroupCommand(first=self.process.clients[0], word=command))

    def finish(self) -> None:
        if self.process.group:
            self.send_command("end")


class RemoteAggregator(RemoteProcess):
    """The aggregator of a host, which its agent started (see `base.Role`).

    Args:
        send: Sends a command to the agent.
        title: Name of the process.
        files: The run folder, for its log, its address and its records.
    """

    def __init__(self, send: Send, title: str, files: RunFolder) -> None:
        super().__init__(files.log(title))
        self._send, self._files, self.title = send, files, title

    def signal(self, number: int) -> None:
        self._send(SignalAggregator(number=number))

    def failure(self, code: int | None) -> DpcflError:
        return failure(self.title, code, self.log_path, self.reason)

    def listens(self, address: str) -> None:
        """Record the address on its host.

        Args:
            address: The address.
        """
        write_atomically(self._files.address(self.title), address)

    def record(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Add its records to those of the run.

        Args:
            name: "messages" or "warnings", the file of the run folder.
            lines: The records.
        """
        runlog.append(self._files.warnings if name == "warnings" else self._files.messages, *lines)
