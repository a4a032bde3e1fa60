"""Part of the privacy statement about a trusted server: what it receives, and what it publishes."""

from __future__ import annotations

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.federation.capabilities import Capabilities, client_steps
from dpcfl_net.federation.plan_examples import plan_examples
from dpcfl_net.privacy.slots import CentralSlot, LabelledCentralSlot, LabelSlot, RawSlot, Slot

SERVER_SEES = "the server: it is trusted and receives {}"
PUBLISHED = "the server's publications of each round: {}"
PUBLISHED_FROM_BUFFERS = "the server's publications of each version: {}; at most {} participations of each client"
OWN_PUBLISHED = "other noisy values of its central steps: {}"
OWN_RAW = "other raw values that clients send: {}"


def published(algorithm: Algorithm) -> str:
    """Name what the trusted server of a job publishes, which epsilon covers."""
    able = algorithm.capabilities
    said = [*able.published]
    if is_plugin(algorithm.protocol.algorithm) and able.published == Capabilities.published:
        parts = dict.fromkeys(name for slot in algorithm.central_plan() for name in _parts(slot))
        said += [OWN_PUBLISHED.format(", ".join(parts))] if parts else []
    if able.participations:
        return PUBLISHED_FROM_BUFFERS.format("; ".join(said), able.participations)
    return PUBLISHED.format("; ".join(said))


def server_sees(algorithm: Algorithm) -> str:
    """Name what the trusted server of a job receives without noise."""
    able = algorithm.capabilities
    said = [*able.sent_raw]
    if is_plugin(algorithm.protocol.algorithm) and able.sent_raw == Capabilities.sent_raw:
        charged = {
            slot.name for entry in plan_examples(algorithm) for slot in algorithm.plan(entry) if isinstance(slot, RawSlot)
        }
        steps = [step for step in client_steps(algorithm).values() if charged.issuperset(step.charges)]
        others = dict.fromkeys(name for step in steps for name, spec in step.gives.items() if not spec.is_update)
        said += [OWN_RAW.format(", ".join(others))] if others else []
    return SERVER_SEES.format("; ".join(said))


def _parts(slot: Slot) -> list[str]:
    """Names of a slot's releases besides the sums."""
    if isinstance(slot, LabelSlot):
        return [slot.name]
    if not isinstance(slot, CentralSlot):
        return []
    labels = ["labels"] if isinstance(slot, LabelledCentralSlot) else []
    return labels + [name for name, _ in slot.parts if name != "sums"]
