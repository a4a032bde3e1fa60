"""Reads a run folder, also of a running or crashed run."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dpcfl_net.core import runlog
from dpcfl_net.core.files import MOST_BYTES
from dpcfl_net.core.run_folder import RunFolder, no_run
from dpcfl_net.data.settings import OWNED
from dpcfl_net.results.number_format import counted, number
from dpcfl_net.results.round_tables import RoundTables
from dpcfl_net.results.round_times import elapsed_by_round
from dpcfl_net.results.run_files import JsonLine, JsonlTail, listed, mapping, read_mapping, whole

# Errors of damaged npz files besides OSError, ValueError and KeyError.
NO_ARRAYS = (EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class FirstRound:
    """Clustering of the first round's updates, in their first two principal components.

    Attributes:
        clients: (n,), client of each update: those that answered.
        coordinates: (n, 2), updates.
        posteriors: (n, M), responsibilities.
        labels: (n,), cluster of each update.
        centres: (M, 2).
        deviations: (M,), in the coordinates' unit.
        candidates: (k,), numbers of clusters that were tried.
        scores: (k,), separation of each candidate: effective MSS, or with space pca2 the uncorrected one.
        mss: Effective MSS of the chosen mixture.
        mss_plain: MSS of the chosen mixture without correction.
        mpo: Maximum pairwise overlap of the chosen mixture.
        clusters: Chosen number of clusters.
        alone: Clients whose updates resemble no other and are alone in a cluster.
        outliers: Clients whose updates resemble no other and are in a cluster of others.
        unverified: Clients whose updates may resemble no other, hidden by noise.
    """

    clients: list[int]
    coordinates: list[list[float]]
    posteriors: list[list[float]]
    labels: list[int]
    centres: list[list[float]]
    deviations: list[float]
    candidates: list[int]
    scores: list[float]
    mss: float | None
    mss_plain: float | None
    mpo: float | None
    clusters: int
    alone: list[int] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)
    unverified: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class RunView(RoundTables):
    """Content of a run folder.

    Attributes:
        folder: Run folder.
        run: run.json.
        config: config.yaml.
        protocol: protocol.json.
        experiment: experiment.json.
        elapsed: Seconds from the start of round 1 to the end of each round.
        messages: Lines of messages.jsonl.
        spans: Lines of spans.jsonl.
        first_round: Clustering of the first round; None if the run has none.
        warnings: Warnings of coordinator, observer and launcher, except those on rounds without accuracy.
        notes: Sentences on damaged files, and on rounds without accuracy.
    """

    folder: Path
    run: JsonLine = field(default_factory=dict)
    config: JsonLine = field(default_factory=dict)
    protocol: JsonLine = field(default_factory=dict)
    experiment: JsonLine = field(default_factory=dict)
    elapsed: dict[int, float] = field(default_factory=dict)
    messages: list[JsonLine] = field(default_factory=list)
    spans: list[JsonLine] = field(default_factory=list)
    first_round: FirstRound | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _truth: tuple[JsonLine, list[int]] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return str(self.run.get("name") or self.protocol.get("name") or self.config.get("name") or self.folder.name)

    @property
    def algorithm(self) -> str:
        chosen = self.config.get("algorithm")
        configured = chosen.get("name") if isinstance(chosen, dict) else None
        return str(self.run.get("algorithm") or self.protocol.get("algorithm") or configured or "unknown algorithm")

    @property
    def state(self) -> str:
        """running, finished, failed or interrupted; `unknown` without run.json."""
        return str(self.run.get("state") or "unknown")

    @property
    def one_process(self) -> bool:
        """True if all clients ran in the calling process, so that no message was sent."""
        return in_one_process(self.config)

    @property
    def named_clients(self) -> bool:
        """True if the data set has names for the clients, which no file of the run holds."""
        return mapping(self.config, "data").get("partition") in OWNED

    @property
    def evaluated(self) -> str:
        """Part of the clients' data on which the observer measured accuracy: test, or validation, as in trials of `dpcfl tune`."""
        return "validation" if mapping(self.config, "data").get("evaluate") == "validation" else "test"

    @property
    def virtual(self) -> bool:
        """True if the times are those of a virtual clock."""
        return any(line.get("clock") == "virtual" for line in self.served.values())

    @property
    def rounds(self) -> int | None:
        """Number of rounds of the job; None if unknown."""
        return whole(self.protocol.get("rounds")) or whole(self.config.get("rounds"))

    @property
    def true_clusters(self) -> list[int]:
        """True cluster of each client in client order; empty if unknown."""
        if self._truth is None or self._truth[0] is not self.experiment:  # figures ask for every client
            self._truth = self.experiment, true_clusters(self.experiment)
        return self._truth[1]

    @property
    def clients(self) -> int:
        """Number of clients."""
        tables: list[Sequence[object]] = [self.true_clusters]
        tables += [listed(line, "assignment") for line in self.grouping.values()]
        tables += [listed(line, "accuracy_by_client") for line in self.observed.values()]
        return max(roster_size(self.protocol), *map(len, tables))


def in_one_process(config: JsonLine) -> bool:
    """True if all clients of a resolved configuration run in the calling process, without workers and messages."""
    return mapping(config, "runtime").get("federation") == "in-process"


def roster_size(protocol: JsonLine) -> int:
    """Return the number of clients that protocol.json names, of any format; 0 if it names none."""
    return whole(mapping(protocol, "roster").get("clients")) or len(listed(protocol, "roster"))


def record_counts(view: RunView) -> list[int]:
    """Read the number of training records of each client that the roster names, of any format of a job."""
    entries = listed(view.protocol, "roster") or runlog.each(RunFolder(view.folder).roster)
    counts = [whole(entry.get("records")) for entry in entries if isinstance(entry, Mapping)]
    return [count for count in counts if count is not None]


def is_run(folder: Path | str) -> bool:
    """Return True if a folder holds a file of a run."""
    return any(path.is_file() for path in _known(RunFolder(folder)))


def _known(files: RunFolder) -> tuple[Path, ...]:
    return files.run, files.protocol, files.config, files.metrics


def read_run(folder: Path | str) -> RunView:
    """Read a run folder; missing files stay empty, damaged files are named in `notes`.

    Raises:
        ConfigError: If the folder does not exist or holds no file of a run.
    """
    files = RunFolder(folder)
    if not is_run(folder):
        raise no_run(folder, f"it holds none of {', '.join(path.name for path in _known(files))}")
    view = RunView(folder=files.path)
    view.run, view.protocol = read_mapping(files.run, view.notes), read_mapping(files.protocol, view.notes)
    view.experiment, view.config = read_mapping(files.experiment, view.notes), read_mapping(files.config, view.notes)
    metrics = _lines(files.metrics, view.notes)
    view.add_metrics(metrics)
    view.elapsed = elapsed_by_round(metrics)
    view.add_clusters(_lines(files.clusters, view.notes))
    view.messages, view.spans = _lines(files.messages, view.notes), _lines(files.spans, view.notes)
    view.first_round = _first_round(files.first_round, view.notes)
    for line in _lines(files.warnings, view.notes):
        (view.notes if listed(line, "unmeasured") else view.warnings).append(str(line.get("text")))
    return view


def read_unfinished(folder: Path | str, state: str) -> RunView:
    """Read a run folder whose run.json may be that of its start: takes final figures, bytes and seconds from the rounds so far.

    Args:
        folder: Run folder.
        state: State of the run (see `run_files.actual_state`).

    Raises:
        ConfigError: As `read_run`.
    """
    view = read_run(folder)
    view.run["state"] = state
    if state == "finished" or number(mapping(view.run, "final").get("accuracy_mean")) is not None:
        return view
    view.run.pop("final", None)
    for key in ("bytes_up", "bytes_down"):
        view.run[key] = sum(whole(line.get(key)) or 0 for line in view.served.values())
    view.run["wall_s"] = max(view.elapsed.values(), default=None)
    return view


def largest(spent: Sequence[float | None]) -> float | None:
    """Return the largest epsilon of the clients; None if that of one is not finite, or none is known.

    Args:
        spent: Epsilon by client; None: not finite.
    """
    finite = [value for value in spent if value is not None]
    return max(finite) if finite and len(finite) == len(spent) else None


def true_clusters(experiment: JsonLine) -> list[int]:
    """Return the true cluster of each client from experiment.json; empty if unknown or not a whole number.

    Label skew, speaking roles, and clients that the records name make one cluster, which does not say how clients differ.
    """
    found = [whole(item) for item in listed(experiment, "true_clusters")]
    partition = mapping(experiment, "data").get("partition", "equal")
    if None in found or (len(set(found)) == 1 and partition != "equal"):
        return []
    return [item for item in found if item is not None]


def sizes(clusters: Sequence[int]) -> dict[int, int]:
    """Count clients by true cluster, sorted by cluster."""
    return dict(sorted(Counter(clusters).items()))


def letter(cluster: int) -> str:
    """Name a true cluster A, B, ..., to distinguish it from the server's numbered clusters."""
    return chr(ord("A") + cluster) if 0 <= cluster < 26 else f"#{cluster}"


def _lines(path: Path, notes: list[str]) -> list[JsonLine]:
    tail = JsonlTail(path)
    lines = tail.new()
    if tail.damaged:
        notes.append(f"{path.name}: {counted(tail.damaged, 'damaged line')} left out")
    if tail.partial:
        notes.append(f"{path.name} ends within a line: the run is still writing, or was interrupted")
    return lines


def _first_round(path: Path, notes: list[str]) -> FirstRound | None:
    import numpy as np

    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if sum(member.file_size for member in arrays.zip.infolist()) > MOST_BYTES:
                raise ValueError("a small file may unpack to more than the memory")
            found = {name: arrays[name] for name in arrays}
        coordinates = found["coordinates"].astype(float).reshape(-1, 2)
        count, clients = int(found["clusters"]), len(coordinates)
        labels = found["labels"].astype(int).reshape(clients)
        lonely = np.bincount(labels)[labels] == 1
        # Runs before the test for outliers have no such arrays.
        outliers, unverified = (
            found.get(name, np.zeros(clients)).astype(bool).reshape(clients) for name in ("outliers", "unverified")
        )
        # An algorithm of the user's own may leave the clients out: then all answered.
        ids = found.get("clients", np.arange(clients)).astype(int).reshape(clients)
        return FirstRound(
            ids.tolist(),
            coordinates.tolist(),
            found["posteriors"].astype(float).reshape(clients, -1).tolist(),
            labels.tolist(),
            found["centres"].astype(float).reshape(-1, 2).tolist(),
            found["deviations"].astype(float).reshape(-1).tolist(),
            found["candidates"].astype(int).reshape(-1).tolist(),
            found["scores"].astype(float).reshape(-1).tolist(),
            number(float(found["mss"])),
            number(float(found["mss_plain"])),
            number(float(found["mpo"])),
            count,
            ids[outliers & lonely].tolist(),
            ids[outliers & ~lonely].tolist(),
            ids[unverified].tolist(),
        )
    except (*NO_ARRAYS, OSError, ValueError, KeyError, TypeError, OverflowError):
        notes.append(f"{path.name} is damaged and was left out")
        return None
