"""Asynchronous calls of client steps: open tasks, their outcomes in order of arrival, and a buffer of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.federation.round_counts import RoundCounts

if TYPE_CHECKING:
    from dpcfl_net.federation.base import Federation


@dataclass(frozen=True)
class Participation:
    """One task of an asynchronous run.

    Attributes:
        client: Client id.
        participation: Number of the client's participation, from 1; the round of its request, so that the n-th participation
            fills the client's n-th slots.
        kind: Name of the client step.
        tensors: Tensors of the task.
        ends: Virtual time of the answer in a run in one process, seconds; unused over the network.
    """

    client: int
    participation: int
    kind: str
    tensors: Mapping[str, np.ndarray]
    ends: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """End of a participation.

    Attributes:
        client: Client id.
        release: The release; None if there is none and never will be.
        lost: True if a crash lost the answer; it is charged.
        at: Virtual time of the answer, seconds; None over the network.
    """

    client: int
    release: Mapping[str, np.ndarray] | None
    lost: bool = False
    at: float | None = None


def gather(fed: Federation, count: int, among: Collection[int] | None = None) -> list[Outcome]:
    """Collect the next outcomes of open tasks; sets the federation's `counts` and `lost`.

    Args:
        fed: The federation.
        count: Number of outcomes; at least so many tasks must be open.
        among: Take the outcomes of these clients only; None: of any client.

    Returns:
        The outcomes in client order, so that the sum of their updates does not depend on the order of arrival.

    Raises:
        RunFailed: If fewer of them than the quorum are answers; an answer that a crash lost counts.
    """
    found = sorted((fed.next_outcome(among) for _ in range(count)), key=lambda outcome: outcome.client)
    fed.lost = [outcome.client for outcome in found if outcome.lost]
    fed.counts = replace(RoundCounts(fed.round), late=fed.counts.late if fed.counts.round == fed.round else [])
    fed.counts.add_call(
        [outcome.client for outcome in found], [outcome.client for outcome in found if outcome.release is not None]
    )
    needed, answered = int(np.ceil(fed.quorum * count)), len(fed.counts.answered) + len(fed.lost)
    if answered < needed:
        raise RunFailed(
            f"round {fed.round}: {answered} of {count} buffered participations were answered, the quorum is "
            f"{needed} (runtime.quorum is {fed.quorum:g}; with a lower one the run continues without the others)"
        )
    return found
