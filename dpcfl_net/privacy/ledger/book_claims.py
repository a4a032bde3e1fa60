"""Lines of the record book: the privacy budget claim of one client in one job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.events.base import Event, read_event

Events = tuple[Event, ...]


@dataclass(frozen=True)
class Budget:
    """Upper bound on epsilon at `delta` of all runs together, for each record (or client)."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class PrivacyBudgetClaim:
    """The whole plan of one client in one job.

    Attributes:
        job: Hash of the signed protocol.
        client: Client id.
        unit: What is protected, "sample" or "client".
        adjacency: "zero-out" or "replace-one".
        events: Events of the plan.
        records: sha256 of the client's record digests, sorted; filled in by the book.
        budget: Budget under which the job was entered; filled in by the book.
    """

    job: str
    client: int
    unit: str
    adjacency: Adjacency
    events: Events
    records: str = ""
    budget: Budget | None = None


def claim_line(claim: PrivacyBudgetClaim, number: int, prev: str) -> bytes:
    """Encode a claim.

    Args:
        claim: The claim.
        number: Number of the line, from 0.
        prev: Hash of the line before.

    Returns:
        Canonical JSON and a newline.
    """
    budget = {} if claim.budget is None else {"budget": [claim.budget.epsilon, claim.budget.delta]}
    return canonical_json({
        "sequence": number, "prev": prev, "job": claim.job, "client": claim.client, "unit": claim.unit,
        "adjacency": claim.adjacency, "events": [event.as_json() for event in claim.events], "records": claim.records, **budget,
    }) + b"\n"  # fmt: skip


def read_claim(fields: dict[str, Any]) -> PrivacyBudgetClaim:
    """Decode a claim.

    Args:
        fields: The decoded line.

    Returns:
        The claim.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has another type.
        KeyError: If a field is missing.
    """
    events, budget = tuple(read_event(event) for event in fields["events"]), fields.get("budget")
    return PrivacyBudgetClaim(
        fields["job"], fields["client"], fields["unit"], fields["adjacency"], events, fields["records"],
        None if budget is None else Budget(*budget),
    )  # fmt: skip
