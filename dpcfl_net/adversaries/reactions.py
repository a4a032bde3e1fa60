"""Answers of clients to a malicious server, and their reactions to its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dpcfl_net.adversaries.malicious_steps import Tensors

Said = Literal["release", "refused", "stale", "lost", "unusable", "gone", "silence"]


@dataclass(frozen=True)
class Heard:
    """Answer of one client to a task.

    Attributes:
        answer: Status, as in `Reaction`.
        code: Code of a refusal.
        reason: Reason of a refusal, in the client's words.
        tensors: Tensors of a release.
    """

    answer: Said
    code: str = ""
    reason: str = ""
    tensors: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Reaction:
    """Reaction of one client to one step.

    Attributes:
        step: Name of the step.
        client: Client id.
        round: Requested round.
        task: Name of the task.
        answer: Status of the answer; "unusable": an invalid release, "gone": the worker left, "silence": no answer.
        code: Code of a refusal.
        reason: Reason of a refusal, in the client's words.
        blake3: Hash of a release's tensors.
        repeated: True if the client sent these bytes before.
        charges: Charges in the client's ledger before and after; None if it is not available.
        holds: True if the attack failed: no new bytes and no charge, unless the plan pays for the step.
    """

    step: str
    client: int
    round: int
    task: str
    answer: Said
    code: str
    reason: str
    blake3: str
    repeated: bool
    charges: tuple[int, int] | None
    holds: bool

    def __str__(self) -> str:
        """Format the reaction as one line."""
        got = f"{self.blake3[:12]}{' as before' if self.repeated else ''}" if self.blake3 else f"{self.code} {self.reason}"
        spent = "" if self.charges is None else f"charges {self.charges[0]} -> {self.charges[1]}"
        asked = f"round {self.round} {self.task}"
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"{self.step:18} client {self.client:<4} {asked:24} {self.answer:8} {spent:18} {verdict:14} {got}".rstrip()
