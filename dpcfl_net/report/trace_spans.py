"""Slices of a trace: spans of processes and rounds of the coordinator, on lanes where they nest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dpcfl_net.results.number_format import number
from dpcfl_net.results.run_files import JsonLine, whole
from dpcfl_net.results.run_view import RunView

COORDINATOR, OBSERVER, LAUNCHER = "coordinator", "observer", "launcher"
ROUND = "wait"  # span of the coordinator over a whole round
FIRST = {LAUNCHER: 0, COORDINATOR: 1, OBSERVER: 2}  # order of processes; clients follow


@dataclass(frozen=True)
class Slice:
    """A period of one process.

    Attributes:
        who: Name of the process.
        name: What it does.
        start: Seconds since the epoch.
        end: Seconds since the epoch, at least `start`.
        round: Round that it belongs to.
        args: Further facts.
    """

    who: str
    name: str
    start: float
    end: float
    round: int
    args: dict[str, Any] = field(default_factory=dict)


def slices_of(view: RunView) -> list[Slice]:
    """Return the spans of all processes; the coordinator's rounds carry the figures of their round.

    Spans that are damaged are left out. Without a span, the time of a round follows from metrics.jsonl.
    """
    found = [one for span in view.spans if (one := _slice(view, span)) is not None]
    timed = {one.round for one in found if is_round(one)}
    return [*found, *(one for t in sorted(view.served) if t not in timed and (one := _from_metrics(view, t)) is not None)]


def is_round(one: Slice) -> bool:
    """Return True for a round of the coordinator."""
    return one.who == COORDINATOR and one.name.startswith("round ")


def _slice(view: RunView, span: JsonLine) -> Slice | None:
    who, what, t = span.get("who"), span.get("what"), whole(span.get("round"))
    start, end = number(span.get("start")), number(span.get("end"))
    if not isinstance(who, str) or not isinstance(what, str) or t is None or start is None or end is None or end < start:
        return None
    if (who, what) == (COORDINATOR, ROUND):
        return Slice(who, f"round {t}", start, end, t, _figures(view, t))
    return Slice(who, what, start, end, t, {"fault": span["fault"]} if "fault" in span else {})


def _from_metrics(view: RunView, t: int) -> Slice | None:
    end, seconds = number(view.served[t].get("time")), number(view.served[t].get("seconds"))
    if view.virtual or end is None or seconds is None or seconds < 0:  # `time` is real, `seconds` are virtual
        return None
    return Slice(COORDINATOR, f"round {t}", end - seconds, end, t, _figures(view, t))


def _figures(view: RunView, t: int) -> dict[str, Any]:
    served, seen = view.served.get(t, {}), view.observed.get(t, {})
    server: dict[str, Any] = {
        key: served[key] for key in ("bytes_up", "bytes_down", "answered", "missing", "late", "away") if key in served
    }
    observer = {f"observer {key}": seen[key] for key in ("accuracy_mean", "accuracy_worst", "accuracy_central") if key in seen}
    return {**server, **observer}


def process_order(who: str) -> tuple[int, str, int, str]:
    """Sort key of process names: launcher, coordinator, observer, then roles by number."""
    role, _, tail = who.partition(" ")
    return FIRST.get(who, len(FIRST)), role, int(tail) if tail.isascii() and tail.isdecimal() else 0, who


def lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute the slices of one process over lanes, so that two slices of a lane nest or do not overlap.

    Returns:
        Lanes in order of use; a slice follows those that contain it.
    """
    found: list[list[Slice]] = []
    open_: list[list[Slice]] = []  # in each lane: the slices around the last one
    for one in sorted(slices, key=lambda one: (one.start, -one.end)):
        for lane, around in zip(found, open_, strict=True):
            while around and around[-1].end <= one.start:
                around.pop()
            if not around or one.end <= around[-1].end:
                lane.append(one)
                around.append(one)
                break
        else:
            found.append([one])
            open_.append([one])
    return found


class Periods:
    """Finds the slice at a time.

    Args:
        slices: Slices that do not overlap.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self._slices = sorted(slices, key=lambda one: one.start)
        self._starts = [one.start for one in self._slices]

    def at(self, time: float) -> Slice | None:
        """Return the slice that holds a time; None between slices."""
        index = bisect_right(self._starts, time) - 1
        return self._slices[index] if index >= 0 and time <= self._slices[index].end else None

    def __iter__(self) -> Iterator[Slice]:
        return iter(self._slices)
