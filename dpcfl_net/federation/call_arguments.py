"""Arguments of calls as an algorithm's server half gives them: the client step, the tensors of its tasks, and its quorum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.files import shown
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.asynchronous import Participation


def step_of(method: Any) -> ClientStep:
    """Return the client step that a method of an algorithm is.

    Args:
        method: A bound method, as `self.train`.

    Raises:
        RunFailed: If it is not marked by `on_client`, or not bound.
    """
    step = getattr(method, "client_step", None)
    if isinstance(step, ClientStep) and hasattr(method, "__self__"):
        return step
    name = getattr(method, "__qualname__", type(method).__name__)
    raise RunFailed(
        f"{name} is no client step: must be a method of the algorithm with @on_client(charges=..., takes=..., gives=...), such as "
        "self.train"
    )


def arguments_problem(common: Any, each: Any, quorum: Any, clients: Sequence[int]) -> str:
    """Say which argument of a call is not what it takes.

    Args:
        common: Tensors for all clients, or None.
        each: Client to its separate tensors, or None.
        quorum: Fraction of the asked clients, or None.
        clients: Client ids of the roster.

    Returns:
        A sentence; empty if all are right.
    """
    if quorum is not None and (isinstance(quorum, bool) or not isinstance(quorum, Real) or not 0 <= float(quorum) <= 1):
        return f"quorum is {shown(quorum)}: must be a number from 0 to 1, or None for that of the run"
    parts = {} if common is None else {"common": common}
    if isinstance(each, Mapping):
        if unknown := set(each) - set(clients):
            return f"each has client {shown(next(iter(unknown)))}: must be one of 0 to {len(clients) - 1}"
        parts |= {f"each[{client}]": tensors for client, tensors in each.items()}
    elif each is not None:
        parts["each"] = each
    for name, tensors in parts.items():
        if not isinstance(tensors, Mapping):
            return f"{name} is of type {type(tensors).__name__}: must be a mapping"
        for key, value in tensors.items():
            if not isinstance(value, np.ndarray | np.generic):
                return f"{name} has {key!r} of type {type(value).__name__}: must be a NumPy array"
    return ""


def work_problem(work: Any, clients: Sequence[int]) -> str:
    """Say why a client cannot be given a task.

    Args:
        work: The task.
        clients: Client ids of the roster.

    Returns:
        A sentence; empty if it can.
    """
    if not isinstance(work, Participation):
        return f"work is of type {type(work).__name__}: must be a Participation"
    return "" if work.client in clients else f"work is for client {shown(work.client)}: must be one of 0 to {len(clients) - 1}"


def sums_problem(step: ClientStep, rows: Mapping[int, int] | None, asked: Iterable[int]) -> str:
    """Say why the updates of a client step cannot be added up.

    Args:
        step: The client step.
        rows: Row of each client's model; None: clients choose.
        asked: Clients that are asked.

    Returns:
        A sentence; empty if they can.
    """
    needed = ["update"] if rows is not None else ["update", "choice"]
    if lacking := [name for name in needed if name not in step.gives]:
        return f"client step {step.kind!r} gives no {lacking[0]!r}: add_up needs {' and '.join(needed)}"
    without = [client for client in asked if rows is not None and client not in rows]
    return f"rows has no row of client {without[0]}, which is asked" if without else ""
