"""An agent in this process: it gets commands, and what it reports is returned."""

from __future__ import annotations

import os
from pathlib import Path

from dpcfl_net.launch.placement.agent import Agent
from dpcfl_net.launch.placement.messages import Message, read_report


def reports_of(folder: Path, *commands: Message, found: list[Message] | None = None) -> list[Message]:
    """Give commands to an agent of a run folder; return its reports once its input has ended, and add them to `found`."""
    read, write = os.pipe()
    out, reports = os.pipe()
    os.write(write, b"".join(command.line() for command in commands))
    os.close(write)
    try:
        Agent(folder, read, reports).serve()
    finally:
        os.close(reports)
        os.close(read)
        with os.fdopen(out, "rb") as lines:
            found = [] if found is None else found
            found += [read_report(line.rstrip(b"\n")) for line in lines]
    return found
