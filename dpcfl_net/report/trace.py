"""A run as Chrome trace events, which Perfetto and chrome://tracing open: spans of processes, rounds and messages.

Format: Trace Event Format, JSON object form (Google, 2016).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import replacing, write_all
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import given_path, writing
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.report.trace_messages import arrows_of
from dpcfl_net.report.trace_spans import COORDINATOR, LAUNCHER, OBSERVER, Slice, is_round, lanes, process_order, slices_of
from dpcfl_net.results.number_format import number
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import JsonLine, JsonlTail, mapping
from dpcfl_net.results.run_view import RunView, read_run

Event = dict[str, Any]
MESSAGES, WARNINGS = 1000, 1001  # tracks of instants, behind the lanes of a process
ABOUT = ("peer", "direction", "round", "task", "bytes")  # facts of a message


def write_trace(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write a run as Chrome trace event JSON.

    Each process and client is a process of the trace. Times are those of the report's timeline: the clock of each host, or the
    virtual clock of the run.

    Args:
        folder: The run folder, also of a run in progress.
        out: The file, compressed if its name ends in .gz; None: trace.json in the run folder.

    Returns:
        The file.

    Raises:
        ConfigError: If the folder holds no run, the run has recorded no times, or the file cannot be written.
        OSError: If the disk is full.
    """
    view, path = read_run(folder), given_path(out, "out") if out is not None else RunFolder(folder).trace
    events = list(trace_events(view))
    if not any(event["ph"] != "M" for event in events):
        raise ConfigError(f"{folder} has recorded no times yet: {RunFolder(folder).spans.name} and "
                          f"{RunFolder(folder).messages.name} are missing or empty")  # fmt: skip
    with writing(path), replacing(path) as file:
        packed = gzip.GzipFile(fileobj=file, mode="wb", mtime=0) if path.suffix == ".gz" else None
        with packed or nullcontext() as target:
            for part in _document(view, events):
                if target is None:
                    write_all(file.fileno(), part.encode())
                else:
                    target.write(part.encode())
    return path


def trace_events(view: RunView) -> Iterator[Event]:
    """Yield the events of a run: names of tracks first, then slices, arrows, instants and counters.

    Args:
        view: The run.
    """
    slices = slices_of(view)
    warnings = [] if view.virtual else JsonlTail(RunFolder(view.folder).warnings).new()  # their times are real
    timed = [line for line in view.messages if number(line.get("time")) is not None]
    times = [*(one.start for one in slices), *(line["time"] for line in timed)]
    trace = _Trace.of(slices, min(times, default=0.0))
    yield from trace.names(has_messages=bool(timed), has_warnings=bool(warnings))
    yield from trace.slices()
    for number_, arrow in enumerate(arrows_of(timed, slices)):
        flow = {"cat": "message", "name": arrow.kind, "id": number_}
        yield {"ph": "s", **trace.place(arrow.source), "ts": trace.us(arrow.sent), **flow}
        yield {"ph": "f", "bp": "e", **trace.place(arrow.target), "ts": trace.us(arrow.received), **flow}
    for line in timed:
        yield trace.instant(
            COORDINATOR, MESSAGES, line["time"], str(line.get("kind")), {key: line[key] for key in ABOUT if key in line}
        )
    for line in warnings:
        if (at := number(line.get("time"))) is not None:
            yield trace.instant(COORDINATOR, WARNINGS, at, "warning", {"text": str(line.get("text"))})
    yield from _counters(view, trace, [one for one in slices if is_round(one)])


@dataclass(frozen=True)
class _Trace:
    """Tracks of a trace.

    Attributes:
        origin: Time 0 of the trace, in seconds since the epoch.
        pids: Process id of each process.
        tracks: Lanes of each process.
        tids: Process and lane of each slice, by identity.
    """

    origin: float
    pids: dict[str, int]
    tracks: dict[str, list[list[Slice]]]
    tids: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, slices: list[Slice], origin: float) -> _Trace:
        by_process: defaultdict[str, list[Slice]] = defaultdict(list)
        for one in slices:
            by_process[one.who].append(one)
        names = sorted({*by_process, COORDINATOR, OBSERVER}, key=process_order)
        pids = {who: number_ for number_, who in enumerate(names, 1)}
        tracks = {who: lanes(by_process[who]) for who in names}
        tids = {id(one): (pids[who], lane) for who, own in tracks.items() for lane, found in enumerate(own, 1) for one in found}
        return cls(origin, pids, tracks, tids)

    def us(self, time: float) -> int:
        """Convert seconds since the epoch to microseconds of the trace."""
        return max(0, round(1e6 * (time - self.origin)))

    def place(self, one: Slice) -> Event:
        pid, tid = self.tids[id(one)]
        return {"pid": pid, "tid": tid}

    def names(self, *, has_messages: bool, has_warnings: bool) -> Iterator[Event]:
        for who, pid in self.pids.items():
            yield _named("process_name", pid, 0, name=who)
            yield _named("process_sort_index", pid, 0, sort_index=pid)
            for lane in range(1, len(self.tracks[who]) + 1):
                yield _named("thread_name", pid, lane, name=who if lane == 1 else f"{who} ({lane})")
        if has_messages:
            yield _named("thread_name", self.pids[COORDINATOR], MESSAGES, name="messages")
        if has_warnings:
            yield _named("thread_name", self.pids[COORDINATOR], WARNINGS, name="warnings")

    def slices(self) -> Iterator[Event]:
        for own in self.tracks.values():
            for one in (one for lane in own for one in lane):
                start, end = self.us(one.start), self.us(one.end)
                category = "fault" if "fault" in one.args else "preparation" if one.who == LAUNCHER else "span"
                yield {
                    "ph": "X", **self.place(one), "ts": start, "dur": end - start, "name": one.name, "cat": category,
                    "args": {"round": one.round, **one.args},
                }  # fmt: skip

    def instant(self, who: str, tid: int, time: float, name: str, args: Event) -> Event:
        where = {"pid": self.pids[who], "tid": tid, "ts": self.us(time)}
        return {"ph": "i", "s": "t", **where, "name": name, "cat": "message" if tid == MESSAGES else "warning", "args": args}


def _named(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": args}


def _counter(trace: _Trace, who: str, at: float, name: str, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "pid": trace.pids[who], "tid": 0, "ts": trace.us(at), "name": name, "args": values}


def _counters(view: RunView, trace: _Trace, rounds: list[Slice]) -> Iterator[Event]:
    """Curves, whose values hold until the next one: bytes of the server during a round, accuracies of the observer after it."""
    for one in sorted(rounds, key=lambda one: one.end):
        served, seen = view.served.get(one.round, {}), view.observed.get(one.round, {})
        if sizes := _numbers(served, {"bytes_up": "up", "bytes_down": "down"}):
            yield _counter(trace, COORDINATOR, one.start, "bytes", sizes)
        if shares := _numbers(seen, {"accuracy_mean": "mean", "accuracy_worst": "worst", "accuracy_central": "central"}):
            yield _counter(trace, OBSERVER, one.end, "accuracy", shares)
    if rounds:
        end = max(one.end for one in rounds)
        yield _counter(trace, COORDINATOR, end, "bytes", {"up": 0, "down": 0})


def _numbers(line: JsonLine, keys: Mapping[str, str]) -> dict[str, float]:
    """Fields that are numbers, under shorter names."""
    return {short: value for key, short in keys.items() if (value := number(line.get(key))) is not None}


def _document(view: RunView, events: list[Event]) -> Iterator[str]:
    """The JSON text in parts."""
    about = {
        "run": view.name, "algorithm": view.algorithm, "state": view.state, "clock": "virtual" if view.virtual else "real",
        "privacy": statement(mapping(view.run, "privacy")).headline,
    }  # fmt: skip
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    for number_, event in enumerate(events):
        yield (",\n" if number_ else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"
