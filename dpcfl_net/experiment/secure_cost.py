"""Work of secure sums: messages and bytes of their five stages, from the protocol alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.federation.secure.job_terms import terms_of
from dpcfl_net.federation.secure.keys import BOX_BYTES, KEYS_BYTES, SIGNATURE_BYTES
from dpcfl_net.federation.secure.shamir import SHARE_BYTES
from dpcfl_net.federation.secure.stages import STAGES
from dpcfl_net.federation.secure.terms import Terms
from dpcfl_net.privacy.slots import SecureSlot

WORD_BYTES = 4


@dataclass(frozen=True)
class SecureWork:
    """Expected work of a job's secure sums, all clients together; zeros without them.

    Attributes:
        releases: Masked vectors.
        tasks: Tasks of the other stages.
        bytes_up: Bytes to the server, masked vectors included.
        bytes_down: Bytes from the server, without models.
    """

    releases: float = 0.0
    tasks: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0


def secure_work(algorithm: Algorithm) -> SecureWork:
    """Estimate the work of a job's secure sums if all clients answer; clusters are taken as equally large.

    Args:
        algorithm: The job's algorithm.
    """
    protocol, able = algorithm.protocol, algorithm.capabilities
    if not protocol.privacy.secure:
        return SecureWork()
    group = algorithm.secure_group(1)
    members = protocol.clients if group is None else list(group)
    clusters = able.max_models if protocol.oracle is None else len(set(protocol.oracle))
    sums = 1 if group is not None else clusters
    terms = terms_of(protocol, tuple(members[: max(1, math.ceil(len(members) / sums))]))
    code = algorithm.secure_code(terms.n)
    size = protocol.model.parameters if code is None else code.d
    each = sum(isinstance(slot, SecureSlot) for entry in protocol.roster for slot in algorithm.plan(entry))
    releases = able.expected_releases if able.plain_sgd else float(each)
    up, down = stage_bytes(terms)
    return SecureWork(releases, releases * len(STAGES), releases * (up + WORD_BYTES * size), releases * down)


def stage_bytes(terms: Terms) -> tuple[float, float]:
    """Count the bytes of tensors that a client sends and gets in one sum, without its vector and the model.

    Args:
        terms: Terms of the sum.
    """
    n, holders, witnesses = terms.n, terms.holder_count, len(terms.witnesses)
    boxes = holders * BOX_BYTES
    up = KEYS_BYTES + boxes + SIGNATURE_BYTES * witnesses / n + holders * SHARE_BYTES
    down = 8 * n + (holders * KEYS_BYTES + n) + (boxes + n) + n * witnesses / n + (n + SIGNATURE_BYTES * witnesses)
    return up, down
