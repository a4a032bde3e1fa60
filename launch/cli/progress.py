"""Progress of a run, read incrementally from the growing files of its folder."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpcfl_net.clustering.metrics import minority
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.launch.cli.phases import Workers
from dpcfl_net.launch.preparation import read_step
from dpcfl_net.results.number_format import counted, number, percent, spent_of
from dpcfl_net.results.round_tables import RoundTables
from dpcfl_net.results.run_files import JsonLine, JsonlTail, listed, mapping, numbers, read_mapping, whole
from dpcfl_net.results.run_view import (
    in_one_process,
    largest,
    letter,
    roster_size,
    sizes,
    true_clusters,
)

ENDED, DEAD = ("finished", "interrupted", "failed"), "dead"  # states in run.json, and that of a run whose processes are gone
ALL_CLIENTS = "all clients"  # the row of a run whose true clusters are unknown
NAMED, GROUPS = 10, 12
RECENT = 10  # rounds whose mean time is the expected time of a round
LAG_S = 3.0  # rounds of small models end faster than their evaluation
PAUSE_SLACK_S = 600.0  # a pause lasts longer while a client computes; a crash in it leaves no end
Row = tuple[str, int, float | None, float | None]


@dataclass(frozen=True)
class Truth:
    """What the display needs of the true clusters.

    Attributes:
        sizes: Clients by true cluster; empty if unknown.
        minority: The smallest true cluster; None if there is none.
    """

    sizes: dict[int, int]
    minority: int | None


@dataclass
class ProgressView:
    """Progress of a run at one time.

    Attributes:
        name: Name of the configuration.
        algorithm: Name of the algorithm.
        state: State in run.json; `dead` if it says `running` and no process is left.
        round: Last finished round.
        rounds: Rounds of the run; None if unknown.
        epsilon_spent: Epsilon spent so far; None if not written yet.
        epsilon_round: Round of `epsilon_spent`; it may lag behind `round`. None: the whole run, or not written yet.
        epsilon: Epsilon of the run; None if it is infinite or not stated.
        epsilon_stated: True if run.json states an epsilon.
        insecure: True if the stated epsilon does not hold.
        steps: Name and seconds of each step of the preparation that has ended.
        started: Start of the run, in seconds since the Unix epoch.
        clock_zero: Time from which elapsed seconds count: `started`, later by the seconds in which a resumed run was stopped.
        wall_s: Duration of a run that has ended, in seconds; None while it runs.
        seconds_left: Expected remaining seconds.
        clusters: For each true cluster, or for all clients: label, clients, accuracy in [0, 1], change since the previous round.
        grouping: Sizes of the server's clusters.
        workers: Phase of each client's worker; empty if all clients run in one process.
        pause: Message of the pause below the quorum that the run is in; empty if it is in none.
        warnings: All warnings so far. A client without an answer in several rounds in a row is in the first of them only.
        from_launcher: The newest of the launcher's, as about a client that is lost; empty if there was none.
        lines: One line per finished round so far.
        last_line: Round of the last of them; 0 without any.
    """

    name: str = ""
    algorithm: str = ""
    state: str = "running"
    round: int = 0
    rounds: int | None = None
    epsilon_spent: float | None = None
    epsilon_round: int | None = None
    epsilon: float | None = None
    epsilon_stated: bool = False
    insecure: bool = False
    steps: list[tuple[str, float]] = field(default_factory=list)
    started: float | None = None
    clock_zero: float | None = None
    wall_s: float | None = None
    seconds_left: float | None = None
    clusters: list[Row] = field(default_factory=list)
    grouping: str = ""
    workers: list[str] = field(default_factory=list)
    pause: str = ""
    warnings: list[str] = field(default_factory=list)
    from_launcher: str = ""
    lines: list[str] = field(default_factory=list)
    last_line: int = 0

    @property
    def epsilon_text(self) -> str:
        """Epsilon as `spent_of`; empty if none is stated."""
        return spent_of(self.epsilon, self.epsilon_spent, self.epsilon_round, self.round) if self.epsilon_stated else ""


def tail_progress(folder: Path | str) -> ProgressView:
    """Read the progress of a run. Repeated calls read only new lines.

    Args:
        folder: The run folder.
    """
    return _tail(Path(folder).absolute()).view()


@lru_cache(maxsize=8)
def _tail(folder: Path) -> ProgressTail:
    return ProgressTail(folder)


class ProgressTail:
    """Follows one run folder.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = files = RunFolder(folder)
        self._tails = {
            path.stem: JsonlTail(path) for path in (files.metrics, files.clusters, files.messages, files.spans, files.warnings)
        }
        self._mappings: dict[Path, tuple[tuple[int, int], JsonLine]] = {}
        self._truth: tuple[JsonLine, Truth] | None = None  # of this experiment.json; it has an entry for each client
        self._tables = RoundTables()
        self._workers = Workers()
        self._steps: list[tuple[str, float]] = []
        self._started: float | None = None
        self._lines: list[str] = []
        self._last_line = 0  # round of the last of them
        self._warnings: list[str] = []
        self._from_launcher = ""
        self._missing: set[int | None] = set()  # clients without an answer in the last round
        self._pause: tuple[str, float] = "", 0.0  # message, and the time at which it ends in any case

    @property
    def size(self) -> int:
        """Bytes of lines read so far; it grows while the run writes."""
        return sum(tail.offset for tail in self._tails.values())

    def view(self, *, dead: bool = False) -> ProgressView:
        """Read new lines and return the progress.

        Args:
            dead: No process of the run is left. A state `running` then becomes `dead`, and no line waits for more figures.
        """
        files = self._files
        run, protocol, experiment = (self._mapping(path) for path in (files.run, files.protocol, files.experiment))
        self._read()
        privacy = mapping(run, "privacy")
        # The end of a run also counts the charges of the round that it stopped in, which no line of metrics.jsonl has.
        whole_run = number(privacy.get("epsilon_spent")) if run.get("state") in ENDED else None
        spent = self._spent_after(max(self._tables.spent, default=0)) if whole_run is None else whole_run
        config = self._mapping(files.config)
        rounds = whole(protocol.get("rounds")) or whole(config.get("rounds"))
        view = ProgressView(
            name=str(run.get("name") or protocol.get("name") or self.folder.name),
            algorithm=str(run.get("algorithm") or protocol.get("algorithm") or ""),
            state=DEAD if dead and run.get("state") not in ENDED else str(run.get("state") or "running"),
            round=max(self._tables.served, default=0),
            rounds=rounds,
            epsilon=number(privacy.get("epsilon")),
            epsilon_stated="epsilon" in privacy,
            epsilon_spent=number(privacy.get("epsilon_spent")) if spent is None else spent,
            epsilon_round=max(self._tables.spent, default=None) if whole_run is None else None,
            insecure=bool(privacy.get("insecure")),
            steps=list(self._steps),
            started=self._started,
            clock_zero=self._clock_zero(run),
            wall_s=number(run.get("wall_s")) if run.get("state") in ENDED else None,
            pause=self._pause[0] if time.time() < self._pause[1] else "",
            warnings=list(self._warnings),
            from_launcher=self._from_launcher,
        )
        truth = self._true_clusters(experiment)
        clients = sum(truth.sizes.values()) or roster_size(protocol)
        view.clusters, view.grouping = self._rows(truth, clients), self._groups(view.round)
        view.workers = [] if in_one_process(config) else self._workers.phases(clients)
        view.seconds_left = self._left(view)
        self._finish_rounds(view)
        view.lines, view.last_line = list(self._lines), self._last_line
        return view

    def _read(self) -> None:
        metrics = self._tails["metrics"].new()
        self._tables.add_metrics(metrics)
        clusters = self._tails["clusters"].new()
        self._tables.add_clusters(clusters)
        messages, spans = self._tails["messages"].new(), self._tails["spans"].new()
        self._workers.follow(messages, spans)
        self._steps += [step for span in spans if (step := read_step(span)) is not None]
        times = [found for line in [*metrics, *messages] if (found := number(line.get("time"))) is not None]
        if times:
            self._started = min([*times, *([self._started] if self._started is not None else [])])
        if any(line.get("view") == "server" for line in metrics):
            self._pause = "", 0.0
        self._warn(metrics, clusters)

    def _warn(self, metrics: list[JsonLine], clusters: list[JsonLine]) -> None:
        """Add the warnings of new lines of several files in the order of their times."""
        found: list[tuple[float, str]] = []
        for line in metrics:
            time_, at = number(line.get("time")) or 0.0, line.get("round")
            if line.get("view") != "server":
                continue
            if missing := listed(line, "missing"):
                self._workers.miss(missing, time_)
            if new := [client for client in missing if whole(client) not in self._missing]:
                found.append((time_, f"round {at}: no answer from client {_named(new)}"))
            self._missing = set(map(whole, missing))
            if late := listed(line, "late"):
                what = "answer to an earlier round, set aside"
                found.append((time_, f"round {at}: late {what}, from client {_named(late)}"))
        ends = {whole(line.get("round")): number(line.get("time")) or 0.0 for line in metrics if line.get("view") == "server"}
        found += [(ends.get(whole(line.get("round")), math.inf), text) for line in clusters if (text := _aborted(line))]
        # Other warnings of the coordinator are in its log; those of the launcher are about lost and restarted workers.
        for line in self._tails["warnings"].new():
            time_ = number(line.get("time")) or 0.0
            if line.get("view") in ("launcher", "pause"):
                found.append((time_, str(line.get("text"))))
            if line.get("view") == "launcher":
                self._from_launcher = str(line.get("text"))
            if line.get("view") == "pause":
                seconds = number(line.get("seconds")) or 0.0
                self._pause = str(line.get("text")), time_ + seconds + PAUSE_SLACK_S if seconds else 0.0
        self._warnings += [text for _, text in sorted(found, key=lambda pair: pair[0])]

    def _mapping(self, path: Path) -> JsonLine:
        try:
            with path.open("rb") as file:  # on a network file system only opening a file makes its attributes current
                stat = os.fstat(file.fileno())
        except FileNotFoundError:
            return {}
        stamp = (stat.st_mtime_ns, stat.st_size)
        known = self._mappings.get(path)
        if known is None or known[0] != stamp:
            # A file that is being written reads as empty; its time stamp changes until the next call.
            known = self._mappings[path] = (stamp, read_mapping(path, []))
        return known[1]

    def _clock_zero(self, run: JsonLine) -> float | None:
        if self._started is None or run.get("state") != "running" or (before := number(run.get("wall_s"))) is None:
            return self._started
        # A launcher writes this state when it starts or resumes a run, with the seconds that the run had taken by then.
        written = self._mappings[self._files.run][0][0] / 1e9
        return max(self._started, written - before)

    def _true_clusters(self, experiment: JsonLine) -> Truth:
        if self._truth is None or self._truth[0] is not experiment:
            true = true_clusters(experiment)
            self._truth = experiment, Truth(sizes(true), minority(true))
        return self._truth[1]

    def _rows(self, truth: Truth, clients: int) -> list[Row]:
        lines = [self._tables.observed[at] for at in sorted(self._tables.observed)[-2:]]
        if not truth.sizes:
            return [_row(ALL_CLIENTS, clients, [number(line.get("accuracy_mean")) for line in lines])] if lines else []
        by_cluster = [numbers(line, "accuracy_by_cluster") for line in lines]
        return [
            _row(
                letter(cluster) + (" minority" if cluster == truth.minority else ""),
                count,
                [row[index] if index < len(row) else None for row in by_cluster],
            )
            for index, (cluster, count) in enumerate(truth.sizes.items())
        ]

    def _groups(self, at: int) -> str:
        for earlier in sorted((other for other in self._tables.grouping if other <= at), reverse=True):
            counts = self._sizes(earlier)
            if len(counts) > GROUPS:
                return f"{len(counts)} of {min(counts)} to {max(counts)}"
            if len(counts) == 1:  # the number alone would be read as that of the clusters
                return f"1 ({counted(counts[0], 'client')})"
            if counts:
                return "/".join(map(str, sorted(counts)))
        return ""

    def _sizes(self, at: int) -> list[int]:
        """Sizes of the server's clusters after a round; empty if it had none."""
        sizes = listed(mapping(self._tables.grouping[at], "diagnostics"), "sizes")
        counts = [count for size in sizes if (count := whole(size)) is not None]
        return counts if any(counts) else []

    def _spent_after(self, at: int) -> float | None:
        return largest(self._tables.spent.get(at, []))

    def _left(self, view: ProgressView) -> float | None:
        # In virtual time `seconds` are virtual, and `wall_s` are the real ones.
        lines = [self._tables.served[at] for at in sorted(self._tables.served)[-RECENT:]]
        recent = [number(line.get("wall_s", line.get("seconds"))) for line in lines]
        known = [seconds for seconds in recent if seconds is not None]
        return sum(known) / len(known) * max(view.rounds - view.round, 0) if known and view.rounds else None

    def _finish_rounds(self, view: ProgressView) -> None:
        ended = view.state != "running"
        for at in sorted(at for at in self._tables.served if at > self._last_line):
            # The observer lags behind the server: the line of a round waits two rounds, and at least LAG_S, for its accuracy, and not
            # for one that is left out (output.evaluate_every), which shows once a later round has its own.
            age = time.time() - (number(self._tables.served[at].get("time")) or 0.0)  # negative in virtual time
            if max(self._tables.observed, default=0) < at and not ended and (view.round < at + 2 or 0 <= age < LAG_S):
                break
            self._lines.append(self._line(at, view))
            self._last_line = at
        self._forget(self._last_line - RECENT)

    def _forget(self, before: int) -> None:
        """Drop the figures of rounds that have their line, but for the newest ones that are still shown."""
        tables = self._tables
        last_sizes = max((at for at in tables.grouping if at < before and self._sizes(at)), default=before)
        shown = {"observed": sorted(tables.observed)[-2:], "grouping": [last_sizes], "spent": [max(tables.spent, default=0)]}
        for name, table in vars(tables).items():
            for at in [at for at in table if at < before and at not in shown.get(name, ())]:
                del table[at]

    def _line(self, at: int, view: ProgressView) -> str:
        seen, seconds = self._tables.observed.get(at, {}), number(self._tables.served[at].get("seconds"))
        least, groups = number(seen.get("accuracy_minority")), self._groups(at)
        parts = [f"round {at}/{view.rounds}" if view.rounds else f"round {at}"]
        if number(seen.get("accuracy_mean")) is not None:
            beside = "" if least is None else f" (minority {percent(least)})"
            parts.append(f"accuracy {percent(seen['accuracy_mean'])}{beside}")
        if number(seen.get("accuracy_central")) is not None:
            parts.append(f"central {percent(seen['accuracy_central'])}")
        if groups:
            parts.append(f"clusters {groups}")
        if text := replace(view, epsilon_spent=self._spent_after(at), epsilon_round=None).epsilon_text:
            parts.append(f"epsilon {text}")
        if seconds is not None:
            parts.append(f"{seconds:.1f} s")
        return "  ".join(parts)


def _aborted(line: JsonLine) -> str:
    """Warning that secure sums of a round were aborted; empty if they were not."""
    shown = mapping(line, "diagnostics")
    said = shown.get("secure sum", shown.get("secure sums", "ok"))
    return "" if said == "ok" else f"round {line.get('round')}: no secure sum, models stay: {said}"


def _named(clients: list[Any]) -> str:
    """Client ids, the first `NAMED` of them."""
    more = f" and {len(clients) - NAMED} more" if len(clients) > NAMED else ""
    return ", ".join(map(str, clients[:NAMED])) + more


def _row(label: str, clients: int, accuracies: list[float | None]) -> Row:
    now, before = ([None, None, *accuracies])[:-3:-1]
    return label, clients, now, now - before if now is not None and before is not None else None
