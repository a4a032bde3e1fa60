"""Check of what a round returned, above all models and assignment: where the server stores them, and where the observer receives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.tensors import finite
from dpcfl_net.core.types import State


def checked(algorithm: Algorithm, state: Any) -> State:
    """Return the state if models and assignment fit the job and what the algorithm declares.

    Observer, clients and checkpoints rely on that: a negative cluster would count as the last model, and a longer row would be
    evaluated by its first p numbers. A model that is not finite would end the next round, for clients refuse it, but after the last
    round it would pass for one that learnt nothing.

    Args:
        algorithm: The algorithm.
        state: What its `start` or `round` returned.

    Raises:
        RunFailed: With what is wrong and what must be returned.
    """
    name = type(algorithm).__name__
    if not isinstance(state, State):
        raise RunFailed(f"{name} returned {type(state).__name__}: must return a State")
    if problem := _of_models(algorithm, state.models) or misfit(algorithm, state) or _of_diagnostics(state.diagnostics):
        raise RunFailed(f"{name} has {problem}")
    return state


def misfit(algorithm: Algorithm, state: State) -> str | None:
    """Say why the number of models or the assignment does not fit the job; None if both do.

    Args:
        algorithm: The algorithm.
        state: Its state after a round, with finite models of p parameters and no more of them than the job allows.
    """
    least = _fewest(algorithm)
    if len(state.models) < least:
        return f"{len(state.models)} rows in State.models: must be at least {least}, those that clients use"
    return _of_assignment(algorithm, state)


def _of_models(algorithm: Algorithm, models: Any) -> str | None:
    most, p = algorithm.capabilities.published_models, algorithm.protocol.model.parameters
    kind = f"{models.dtype} {models.shape}" if isinstance(models, np.ndarray) else type(models).__name__
    if not isinstance(models, np.ndarray) or models.dtype != np.float32 or models.ndim != 2 or models.shape[1] != p:
        return f"{kind} as State.models: must be float32 (M, {p}), one row for each model"
    if len(models) > most:
        return (
            f"{len(models)} rows in State.models: Capabilities.published_models, here {most}, must be at least {len(models)}, "
            "and max_models as well if a task holds all of them"
        )
    bad = next((row for row, model in enumerate(models) if not finite(model)), None)
    return None if bad is None else f"a NaN or an infinity in row {bad} of State.models: clients refuse such a model"


def _of_diagnostics(diagnostics: Any) -> str | None:
    if not isinstance(diagnostics, Mapping):
        return f"{type(diagnostics).__name__} as State.diagnostics: must be a dict of values by name"
    for name, value in diagnostics.items():
        if isinstance(value, Mapping) and (name != Path(name).name or name.startswith(".") or "\0" in name):
            return (
                f"a mapping under the name {name!r} in State.diagnostics: it is written to the file NAME.npz of the run folder, so that "
                "NAME must be a file name without '/'"
            )
    return None


def _fewest(algorithm: Algorithm) -> int:
    """Number of models without which a client has none to be evaluated on."""
    able, protocol = algorithm.capabilities, algorithm.protocol
    if able.personal and protocol.privacy.trust == "untrusted-server":
        return 0
    return able.shared_models + (len(protocol.clients) if able.model_per_client else 1)


def _of_assignment(algorithm: Algorithm, state: State) -> str | None:
    found, clients, able = state.assignment, len(algorithm.protocol.clients), algorithm.capabilities
    kinds = {type(cluster) for cluster in found} if isinstance(found, list) else {type(found)}
    if not isinstance(found, list) or not kinds <= {int, type(None)}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        return f"{names} in State.assignment: must be a list with an int or None for each client"
    if len(found) != clients:
        return f"{len(found)} entries in State.assignment: must be one for each of {clients} clients"
    models, named = len(state.models) - able.shared_models, [cluster for cluster in found if cluster is not None]
    # Of personal models, rows are not those of clusters.
    wrong = min(named) if min(named, default=0) < 0 else max(named, default=-1)
    if named and (wrong < 0 or (wrong >= models and not (able.personal or able.model_per_client))):
        return f"the cluster {wrong} in State.assignment: State.models has {models}, numbered from 0"
    return None
