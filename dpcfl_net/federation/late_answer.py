"""Late answers: the warning that states one, and its reader."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WARNING = re.compile(
    r"client (\d+) answered round (\d+) \(([^:)]+): ([^)]*)\) after its deadline, in round (\d+): the answer is set aside"
)


@dataclass(frozen=True)
class LateAnswer:
    """An answer that came after its deadline and was set aside.

    Attributes:
        client: Client id.
        round: Round of the task.
        task: Name of the task.
        status: Status of the answer.
        arrived: Round in which it arrived.
        blake3: Hash of its payload; empty without one.
    """

    client: int
    round: int
    task: str
    status: str
    arrived: int
    blake3: str = ""

    def __str__(self) -> str:
        stated = f" blake3 {self.blake3}" if self.blake3 else ""
        return (
            f"client {self.client} answered round {self.round} ({self.task}: {self.status}) after its deadline, in round {self.arrived}: "
            f"the answer is set aside{stated}"
        )

    @classmethod
    def read(cls, warning: str) -> LateAnswer | None:
        """Read a line of warnings.jsonl; None for another warning.

        Args:
            warning: Text of the warning.
        """
        found = _WARNING.match(warning)
        if found is None:
            return None
        client, number, task, status, arrived = found.groups()
        _, _, blake3 = warning.partition(" blake3 ")
        return cls(int(client), int(number), task, status, int(arrived), blake3)
