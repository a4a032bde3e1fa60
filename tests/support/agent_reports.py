"""An agent in this process: it gets commands, and what it reports is returned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dpcfl_net.launch.placement.agent import Agent
from dpcfl_net.launch.placement.messages import Message, read_report


def reports_of(
    folder: Path,
    *commands: Message,
    found: list[Message] | None = None,
    ends: Callable[[Callable[[], None]], None] | None = None,
) -> list[Message]:
    """Give commands to an agent of a run folder; return its reports once its input has ended, and add them to `found`.

    Args:
        folder: The run folder on the host.
        commands: The commands.
        found: The reports, also if the agent raises.
        ends: Called with a function that ends the input; None: it ends after the commands.
    """
    read, write = os.pipe()
    out, reports = os.pipe()
    os.write(write, b"".join(command.line() for command in commands))
    if ends is None:
        os.close(write)
    else:
        ends(lambda: os.close(write))
    try:
        Agent(folder, read, reports).serve()
    finally:
        os.close(reports)
        os.close(read)
        with os.fdopen(out, "rb") as lines:
            found = [] if found is None else found
            found += [read_report(line.rstrip(b"\n")) for line in lines]
    return found
