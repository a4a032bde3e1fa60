"""Checks of a release where it is received: by the coordinator, or by the aggregator of the client's group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.tensors import norm, surely_within
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.capabilities import ClientSide, client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding

ReleaseCheck: TypeAlias = Callable[[int, str, dict[str, np.ndarray]], None]


def client_endpoint_arguments(algorithm: ClientSide, clients: Iterable[int]) -> dict[str, Any]:
    """Return the arguments of a server's endpoint that concern its peers, the clients.

    Args:
        algorithm: The job's algorithm.
        clients: Ids of the clients that may connect.
    """
    steps, encoding = client_steps(algorithm), MessageEncoding(algorithm)
    return {
        "clients": {client: algorithm.protocol.client(client).public_key for client in clients},
        "result_template": {task: encoding.release_template(step) for task, step in steps.items()}.__getitem__,
        "check": release_check(algorithm),
    }


def release_check(algorithm: ClientSide) -> ReleaseCheck:
    """Return the server's check of a release: called with client, name of the client step, and tensors as `check_release`.

    Args:
        algorithm: The job's algorithm.
    """
    steps = client_steps(algorithm)
    return lambda client, task, tensors: check_release(algorithm, steps[task], client, tensors)


def check_release(algorithm: ClientSide, step: ClientStep, client: int, tensors: dict[str, np.ndarray]) -> None:
    """Refuse a release that does not decode, or has a tensor whose decoded norm exceeds its bound.

    So no client can move a model, or a sum over all clients, at will.

    Args:
        algorithm: The job's algorithm.
        step: The client step.
        client: Client id.
        tensors: Tensors of the release as they crossed the wire.

    Raises:
        Refused: "encoding", as `MessageEncoding.decode_release`; "norm", if the L2 norm of a tensor exceeds its `max_norm`.
    """
    decoded = MessageEncoding(algorithm).decode_release(step, tensors)
    for name, spec in step.gives.items():
        if spec.max_norm is None:
            continue
        bound = spec.max_norm(algorithm, algorithm.protocol.client(client))
        if bound == math.inf or surely_within(decoded[name], bound):
            continue
        length = norm(decoded[name])
        if length > bound:
            raise Refused("norm", f"{name} norm {length:.3g} is over the bound {bound:.3g}")
