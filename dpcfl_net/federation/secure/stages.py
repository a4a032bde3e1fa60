"""Stages of a secure sum as client steps: names, slots, and tensors on the wire.

The masked vector itself is released by a step of the algorithm, which takes `MASKING` and gives `MASKED`.
"""

from __future__ import annotations

from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.types import ClientStep, TensorSpec
from dpcfl_net.federation.secure.keys import BOX_BYTES, KEYS_BYTES, SIGNATURE_BYTES
from dpcfl_net.federation.secure.shamir import SHARE_BYTES
from dpcfl_net.privacy.slots import SecureSlot, Slot, StageSlot

GROUP_SIDES = ("group", "holders", "witnesses")
_FLAGS = TensorSpec("u1", ("group",))  # 1 for each client of the group that has answered, else 0
_BOXES = TensorSpec("u1", ("holders", BOX_BYTES))

MASKED_NAME = "masked"  # of the tensor that the server adds
MASKED = TensorSpec("u4", ("masked",))
MASKING = {"present": _FLAGS, "boxes": _BOXES}


def _stage(kind: str, takes: dict[str, TensorSpec], gives: dict[str, TensorSpec]) -> ClientStep:
    return ClientStep(kind, (kind,), takes, gives)


KEYS = _stage("secure_keys", {"group": TensorSpec("i8", ("group",))}, {"keys": TensorSpec("u1", (KEYS_BYTES,))})
SHARES = _stage("secure_shares", {"keys": TensorSpec("u1", ("holders", KEYS_BYTES)), "present": _FLAGS}, {"boxes": _BOXES})
SURVIVORS = _stage("secure_survivors", {"survivors": _FLAGS}, {"signature": TensorSpec("u1", (SIGNATURE_BYTES,))})
UNMASK = _stage(
    "secure_unmask",
    {"survivors": _FLAGS, "signatures": TensorSpec("u1", ("witnesses", SIGNATURE_BYTES))},
    {"shares": TensorSpec("u1", ("holders", SHARE_BYTES))},
)
STAGES = {step.kind: step for step in (KEYS, SHARES, SURVIVORS, UNMASK)}


def secure_rounds(slot: SecureSlot, rounds: int) -> list[Slot]:
    """List the slots of secure sums: the masked release of each round, and its stages, which cost nothing.

    Args:
        slot: Slot of a masked release.
        rounds: Number of sums.
    """
    return [slot, *(StageSlot(kind) for kind in STAGES)] * rounds


def answer_interval_s(protocol: Protocol, kind: str) -> float | None:
    """Return the interval of a task's answer times: an answer is sent a multiple of it after its task, or after the answer before.

    Stages are computed without records. At client level their duration may depend on earlier secret coins, since a client's
    ledger holds a state once the client was in.

    Args:
        protocol: The signed protocol.
        kind: Name of the client step.

    Returns:
        Seconds; None if answers are sent at once.
    """
    if kind not in STAGES:
        return protocol.local.deadline_s
    terms = protocol.privacy.secure_aggregation
    return terms.stage_deadline_s if terms is not None and protocol.privacy.unit == "client" else None
