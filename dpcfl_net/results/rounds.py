"""Metrics of one round as a frozen record, of a running or ended run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.cost_estimate import is_evaluated
from dpcfl_net.results.number_format import number
from dpcfl_net.results.round_tables import RoundTables
from dpcfl_net.results.run_files import JsonLine, JsonlTail, listed, numbers, whole
from dpcfl_net.results.run_view import RunView, largest


@dataclass(frozen=True)
class RoundMetrics:
    """Metrics of one round. Accuracies are shares in [0, 1]; None where a figure was not measured.

    Attributes:
        round: Number of the round, from 1.
        rounds: Rounds of the whole run.
        accuracy: Mean test accuracy over clients, measured by the observer.
        accuracy_worst: Accuracy of the worst client.
        accuracy_minority: Mean accuracy in the smallest true cluster.
        accuracy_central: Accuracy on the central test set (`data.central_test`), the mean over the clients' models.
        accuracy_by_cluster: Mean accuracy by true cluster.
        accuracy_by_client: Accuracy by client.
        loss: Mean test loss over clients.
        assignment: Cluster of each client at the server; None for a client without one.
        clusters: Number of clusters that the server keeps.
        ari: Adjusted Rand index of the server's clusters against the true ones.
        epsilon_spent: Largest epsilon that a client has spent, None if one is infinite; not computed in every round, but always
            at the end.
        missing: Clients that did not answer in time.
        late: Clients whose answer to an earlier round arrived in this round.
        away: Clients that were away by schedule.
        paused_s: Seconds that the round waited below its quorum.
        seconds: Duration of the round; virtual seconds with `network.clock: virtual`.
        bytes_up: Bytes from the clients.
        bytes_down: Bytes to the clients.
        time: End of the round at the server, in seconds since the epoch.
    """

    round: int
    rounds: int
    accuracy: float | None = None
    accuracy_worst: float | None = None
    accuracy_minority: float | None = None
    accuracy_central: float | None = None
    accuracy_by_cluster: tuple[float | None, ...] = ()
    accuracy_by_client: tuple[float | None, ...] = ()
    loss: float | None = None
    assignment: tuple[int | None, ...] = ()
    clusters: int | None = None
    ari: float | None = None
    epsilon_spent: float | None = None
    missing: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    paused_s: float = 0.0
    seconds: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    time: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert to a plain dictionary."""
        return asdict(self)


FIGURES = tuple(name for name, one in RoundMetrics.__dataclass_fields__.items() if one.type in ("float", "float | None"))


def _metrics_of(tables: RoundTables, t: int, rounds: int) -> RoundMetrics:
    """Return the metrics of round t; `rounds` is the length of the run."""
    served, seen, group = tables.served.get(t, {}), tables.observed.get(t, {}), tables.grouping.get(t, {})
    return RoundMetrics(
        round=t,
        rounds=rounds,
        accuracy=number(seen.get("accuracy_mean")),
        accuracy_worst=number(seen.get("accuracy_worst")),
        accuracy_minority=number(seen.get("accuracy_minority")),
        accuracy_central=number(seen.get("accuracy_central")),
        accuracy_by_cluster=tuple(numbers(seen, "accuracy_by_cluster")),
        accuracy_by_client=tuple(numbers(seen, "accuracy_by_client")),
        loss=number(seen.get("loss_mean")),
        assignment=tuple(map(whole, listed(group, "assignment"))),
        clusters=whole(group.get("clusters")),
        ari=number(tables.agreement.get(t, {}).get("ari")),
        epsilon_spent=largest(tables.spent.get(t, [])),
        missing=_clients(served, "missing"),
        late=_clients(served, "late"),
        away=_clients(served, "away"),
        paused_s=number(served.get("paused_s")) or 0.0,
        seconds=number(served.get("seconds")),
        bytes_up=whole(served.get("bytes_up")) or 0,
        bytes_down=whole(served.get("bytes_down")) or 0,
        time=number(served.get("time")),
    )


def rounds_of(view: RunView) -> list[RoundMetrics]:
    """Return the metrics of every round of a run so far, in order."""
    return [_metrics_of(view, t, view.rounds or 0) for t in sorted(view.served)]


def _clients(line: JsonLine, name: str) -> tuple[int, ...]:
    return tuple(client for item in listed(line, name) if (client := whole(item)) is not None)


class RoundTail:
    """Reads the rounds of a growing run folder in order, each once.

    Args:
        folder: The run folder.
        rounds: Rounds of the whole run.
        evaluate_every: Interval of the observer's evaluations in rounds; it also evaluates the last round.

    Attributes:
        late_epsilons: Epsilons that the last call of `new` read of rounds that an earlier call had returned, by round.
    """

    def __init__(self, folder: Path, rounds: int, evaluate_every: int = 1) -> None:
        self._rounds, self._every = rounds, evaluate_every
        self._files = JsonlTail(RunFolder(folder).metrics), JsonlTail(RunFolder(folder).clusters)
        self._tables = RoundTables()
        self._next = 1
        self.late_epsilons: dict[int, float] = {}

    def new(self, *, ended: bool = False) -> list[RoundMetrics]:
        """Return the rounds completed since the last call.

        Args:
            ended: True if all processes of the run have ended, so that no further figure can arrive.

        Returns:
            Metrics in order of rounds. A round is complete when the server and, if it evaluates that round, the observer have
            written it, or when two later rounds exist.
        """
        (metrics, clusters), tables = self._files, self._tables
        tables.add_metrics(metrics.new())
        tables.add_clusters(clusters.new())
        late = {t: largest(spent) for t, spent in tables.spent.items() if t < self._next}
        self.late_epsilons = {t: epsilon for t, epsilon in late.items() if epsilon is not None}
        found = []
        # The server writes rounds in order: one without a line has lost it in a crash of the machine.
        for t in sorted(t for t in tables.served if t >= self._next):
            if not (ended or self._complete(t)):
                break
            found.append(_metrics_of(tables, t, self._rounds))
            self._next = t + 1
        self._forget()
        return found

    def _forget(self) -> None:
        """Drop the lines of rounds that were returned: they hold figures of every client."""
        for table in vars(self._tables).values():
            for t in [t for t in table if t < self._next]:
                del table[t]

    def _complete(self, t: int) -> bool:
        return not is_evaluated(t, self._every, self._rounds) or t in self._tables.observed or t + 2 in self._tables.served


def unmeasured_rounds(folder: Path, rounds: int, every: int) -> list[int]:
    """Return the rounds of a finished run that should have been evaluated and have no accuracy.

    Args:
        folder: The run folder.
        rounds: Rounds of the job.
        every: Interval of evaluations.
    """
    measured = {line["round"] for line in runlog.each(RunFolder(folder).metrics) if "accuracy_by_client" in line}
    return [t for t in range(1, rounds + 1) if is_evaluated(t, every, rounds) and t not in measured]
