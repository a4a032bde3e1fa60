"""Entry point of a coordinator or observer process; imports only what the role needs.

Arguments: a title and "module:function". The argument of the function arrives as one line of JSON on standard input. The
process exits when standard input ends: the launcher has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)


def main() -> None:
    """Import the role, wait for its specification and run it; does not return."""
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
        os._exit(0)  # the launcher ended before it sent a specification
    threading.Thread(target=_exit_with_launcher, name="launcher watch", daemon=True).start()
    run(title, function, TypeAdapter(kind).validate_json(line))


def _exit_with_launcher() -> None:
    """Exit when the launcher ends, also by SIGKILL; checkpoints stay consistent."""
    sys.stdin.buffer.read()
    os._exit(4)
