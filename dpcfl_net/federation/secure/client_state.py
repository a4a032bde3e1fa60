"""State of a client between the stages of a secure sum, and checks of arrays from outside."""

from __future__ import annotations

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.federation.secure.terms import Terms

Arrays = dict[str, np.ndarray]
State = dict[str, np.ndarray]


def begun(terms: Terms, round: int, stage: int = 1) -> State:
    """Return the state that every stage has.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        stage: Number of the last answered stage, 1 to 5.

    Returns:
        "secure stage": (2,) int64, round and stage; "secure group": (n,) int64, client ids.
    """
    return {"secure stage": np.array([round, stage], np.int64), "secure group": np.array(terms.group, np.int64)}


def check_stage(terms: Terms, round: int, state: State, allowed: tuple[int, ...]) -> None:
    """Refuse a stage that does not follow the client's state.

    Args:
        terms: Terms of the sum.
        round: Round of the request.
        state: The client's state of secure sums.
        allowed: Stages after which the request may come.

    Raises:
        Refused: "secure-stage".
    """
    if "secure stage" not in state or "secure group" not in state:
        raise Refused("secure-stage", "this client has not sent keys for a secure sum")
    at, stage = state["secure stage"].tolist()
    if at != round:
        raise Refused("secure-stage", f"this client's keys are for round {at}, the request is for round {round}")
    if tuple(state["secure group"].tolist()) != terms.group:
        raise Refused("secure-stage", "this client's keys are for another group")
    if stage not in allowed:
        raise Refused("secure-stage", f"stage {stage} was answered last, the request must follow stage {allowed[0]}")


def check_flags(array: np.ndarray, count: int) -> None:
    """Refuse an array other than (count,) uint8 of 0 and 1.

    Raises:
        Refused: "secure-stage".
    """
    if array.dtype != np.uint8 or array.shape != (count,) or bool((array > 1).any()):
        raise Refused("secure-stage", f"a list of clients must be {count} numbers, each 0 or 1")


def checked_rows(array: np.ndarray, count: int, size: int) -> np.ndarray:
    """Return an array; refuse any other than (count, size) uint8.

    Raises:
        Refused: "secure-stage".
    """
    if array.dtype != np.uint8 or array.shape != (count, size):
        raise Refused("secure-stage", f"rows must be {count} of {size} bytes, got {array.dtype} {list(array.shape)}")
    return array
