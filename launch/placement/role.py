"""What a coordinator or an observer that the launcher starts runs first; imports nothing but what the role itself needs.

Arguments: a title, and "module:function". The function's specification comes as one line of JSON on standard input, which
stays open: its end means that the launcher is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)


def main() -> None:
    """Import the role, wait for its specification, run it; does not return."""
    import importlib
    import typing

    from pydantic import TypeAdapter

    from dpcfl_net.algorithms.base import registry
    from dpcfl_net.launch.placement.child import run

    title, target = sys.argv[1:]
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    registry()
    (kind,) = [hint for argument, hint in typing.get_type_hints(function).items() if argument != "return"]
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)  # the launcher left before there was anything to do
    threading.Thread(target=_die_with_the_launcher, name="watch", daemon=True).start()
    run(title, function, TypeAdapter(kind).validate_json(line))


def _die_with_the_launcher() -> None:
    """Nobody outlives the launcher, however it ended; the checkpoints are written for that."""
    sys.stdin.buffer.read()
    os._exit(4)
