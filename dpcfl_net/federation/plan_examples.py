"""Clients with equal plans."""

from __future__ import annotations

from collections.abc import Hashable

from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.federation.capabilities import ClientSide


def plan_key(algorithm: ClientSide, entry: ClientEntry) -> Hashable:
    """Return a key that only clients with equal plans share.

    The plans of this package's algorithms depend on these public facts only; a plugin's plan may depend on the client's id.

    Args:
        algorithm: The job's algorithm.
        entry: The client's roster entry.
    """
    spans = None if entry.rounds is None else tuple(entry.rounds)
    own = entry.id if is_plugin(algorithm.protocol.algorithm) else None
    return own, entry.records, entry.validation_records, entry.noise_multiplier, entry.epsilon, spans


def plan_examples(algorithm: ClientSide) -> list[ClientEntry]:
    """List clients whose plans are all the plans of a job: one of each key.

    Args:
        algorithm: The job's algorithm.
    """
    return [*{plan_key(algorithm, entry): entry for entry in algorithm.protocol.roster}.values()]
