"""Lines of metrics.jsonl and clusters.jsonl by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dpcfl_net.results.number_format import number
from dpcfl_net.results.run_files import JsonLine, listed, numbers, whole


@dataclass
class RoundTables:
    """Tables by round; several lines of a round are merged.

    Attributes:
        served: Metrics of the server by round.
        observed: Metrics of the observer by round.
        spent: Epsilon by client after each round.
        grouping: The server's assignment by round.
        agreement: The observer's comparison of the assignment with the true clusters, by round.
    """

    served: dict[int, JsonLine] = field(default_factory=dict)
    observed: dict[int, JsonLine] = field(default_factory=dict)
    spent: dict[int, list[float | None]] = field(default_factory=dict)
    grouping: dict[int, JsonLine] = field(default_factory=dict)
    agreement: dict[int, JsonLine] = field(default_factory=dict)

    def add_metrics(self, lines: Iterable[JsonLine]) -> None:
        """Add lines of metrics.jsonl."""
        for line in lines:
            at = whole(line.get("round"))
            if at is None:
                continue
            if line.get("view") == "observer":
                self.observed[at] = {
                    **self.observed.get(at, {}),
                    **line,
                }  # `dpcfl compare --fairness` adds a line to the last round
            elif "epsilon_spent_by_client" in line:
                self.spent[at] = numbers(line, "epsilon_spent_by_client")
            else:
                self.served[at] = _repeated(self.served[at], line) if at in self.served else line

    def add_clusters(self, lines: Iterable[JsonLine]) -> None:
        """Add lines of clusters.jsonl."""
        for line in lines:
            at = whole(line.get("round"))
            if at is not None:
                table = self.agreement if line.get("view") == "observer" else self.grouping
                if "assignment" in line:
                    line["assignment"] = [whole(cluster) for cluster in listed(line, "assignment")]
                table[at] = {**table.get(at, {}), **line}  # labels and recovery of one round are separate lines


def _repeated(first: JsonLine, again: JsonLine) -> JsonLine:
    """Merge two lines of one round: a resumed run writes its last round again, and may repeat rounds.

    Bytes and seconds of both count. Without an answer the second line only holds what was sent and received to resume the run.
    """
    sums: JsonLine = {}
    for key in ("bytes_up", "bytes_down"):
        sums[key] = (whole(first.get(key)) or 0) + (whole(again.get(key)) or 0)
    for key in ("seconds", "paused_s"):
        sums[key] = (number(first.get(key)) or 0.0) + (number(again.get(key)) or 0.0)
    return {**(again if whole(again.get("answered")) else first), **sums}
