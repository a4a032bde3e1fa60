"""Time of a run: seconds until an accuracy, time of each client, and which clients held up the rounds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dpcfl_net.results.number_format import number
from dpcfl_net.results.run_files import JsonLine, whole

WORK = ("train", "receive", "send", "wait")  # of a client, in spans.jsonl
TARGET_SHARE = 0.95  # of the best accuracy of the worst run: the target if none is given


@dataclass(frozen=True)
class Point:
    """Mean accuracy after a round.

    Attributes:
        round: The round.
        seconds: Seconds from the start of round 1 to the end of this round, virtual ones in virtual time.
        accuracy: Mean accuracy over clients, 0 to 1.
    """

    round: int
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class HeldUp:
    """Delays by one client, whose answer to a call of a client step came last.

    Attributes:
        client: Client id.
        times: Number of calls in which it was last.
        total_s: Seconds from the last answer but one to its own, over these calls.
        most_s: The longest of them.
    """

    client: int
    times: int
    total_s: float
    most_s: float


def elapsed_by_round(lines: Iterable[JsonLine]) -> dict[int, float]:
    """Add up the seconds of the rounds.

    A resumed run may repeat rounds; their time counts, and a round ends when it ended first.

    Args:
        lines: Lines of metrics.jsonl.

    Returns:
        Seconds from the start of round 1 to the end of each round.
    """
    found: dict[int, float] = {}
    total = 0.0
    for line in lines:
        at, seconds = whole(line.get("round")), number(line.get("seconds"))
        if at is not None and seconds is not None and line.get("view") == "server":
            total += seconds
            found.setdefault(at, total)
    return found


def accuracy_curve(elapsed: Mapping[int, float], observed: Mapping[int, JsonLine]) -> list[Point]:
    """Join the seconds of the rounds with the mean accuracies that the observer measured.

    Args:
        elapsed: Seconds by round.
        observed: Lines of the observer by round.
    """
    return [
        Point(at, elapsed[at], accuracy)
        for at, line in sorted(observed.items())
        if at in elapsed and (accuracy := number(line.get("accuracy_mean"))) is not None and 0 <= accuracy <= 1
    ]


def first_reached(curve: Iterable[Point], target: float) -> Point | None:
    """Find the first point with at least the target accuracy."""
    return next((point for point in curve if point.accuracy >= target), None)


def usual_target(curves: Iterable[Sequence[Point]]) -> float | None:
    """Choose a target that every run reached: 95 % of the least best accuracy, in whole percent.

    Args:
        curves: Curve of each run; empty ones do not count.

    Returns:
        The target, 0 to 1; None without a curve.
    """
    best = [max(point.accuracy for point in curve) for curve in curves if curve]
    return math.floor(100 * TARGET_SHARE * min(best)) / 100 if best else None


def client_times(spans: Iterable[JsonLine], total_s: float) -> dict[int, dict[str, float]]:
    """Add up the spans of each client.

    Args:
        spans: Lines of spans.jsonl.
        total_s: Seconds of all rounds.

    Returns:
        Client to the seconds of each kind of work, and `idle`: the rest of the rounds.
    """
    found: dict[int, dict[str, float]] = {}
    for span in spans:
        client, what = client_of(span.get("who")), span.get("what")
        start, end = number(span.get("start")), number(span.get("end"))
        if client is not None and what in WORK and start is not None and end is not None and end > start:
            own = found.setdefault(client, dict.fromkeys(WORK, 0.0))
            own[what] += end - start
    return {client: {**own, "idle": max(0.0, total_s - sum(own.values()))} for client, own in sorted(found.items())}


def stragglers(messages: Sequence[JsonLine]) -> tuple[int, list[HeldUp]]:
    """Find the last answer of each call of a client step.

    Args:
        messages: Lines of messages.jsonl.

    Returns:
        Number of calls with at least two answers; the clients whose answer came last, those with the most seconds first.
    """
    counts: Counter[int] = Counter()
    waits: defaultdict[int, list[float]] = defaultdict(list)
    calls = [answers for answers in _calls(messages) if len(answers) > 1]
    for answers in calls:
        (before, _), (last, client) = sorted((time, client) for client, time in answers.items())[-2:]
        counts[client] += 1
        waits[client].append(last - before)
    held = [HeldUp(client, counts[client], sum(waits[client]), max(waits[client])) for client in counts]
    return len(calls), sorted(held, key=lambda one: (-one.total_s, one.client))


def _calls(messages: Sequence[JsonLine]) -> list[dict[int, float]]:
    """Time of each answer by client, for each call: a call begins when a client gets a task after it has answered one."""
    calls: list[dict[int, float]] = []
    asked: set[int] = set()
    key = -1
    for line in sorted(messages, key=_order):
        client, at, time = client_of(line.get("peer")), whole(line.get("round")), number(line.get("time"))
        if client is None or at is None or time is None:
            continue
        if line.get("kind") == "TASK":
            answered_before = bool(calls) and client in calls[-1]
            if at != key or answered_before:
                calls.append({})
                asked, key = set(), at
            asked.add(client)
        elif line.get("kind") == "RESULT" and client in asked and at == key:
            calls[-1].setdefault(client, time)
    return calls


def _order(line: JsonLine) -> tuple[int, float]:
    return whole(line.get("round")) or 0, number(line.get("time")) or 0.0


def client_of(name: object) -> int | None:
    """Return the client id in the name of a process, such as "client 3"; None for others."""
    role, _, tail = name.partition(" ") if isinstance(name, str) else ("", "", "")
    return int(tail) if role == "client" and tail.isascii() and tail.isdecimal() and len(tail) < 10 else None


def bytes_by_kind(messages: Iterable[JsonLine], served: Iterable[JsonLine]) -> dict[str, tuple[int, int, int]]:
    """Add up bytes by kind of message.

    Args:
        messages: Lines of messages.jsonl.
        served: Lines of the server in metrics.jsonl.

    Returns:
        Kind to (messages, bytes from the clients, bytes to them) of tasks and results; `control` is the rest of the traffic:
        headers of chunks, confirmations, heartbeats, handshakes. Empty without counted bytes. Messages of a round that has not
        ended are left out, since the server counts bytes at the end of a round.
    """
    lines = list(served)
    done = max((whole(line.get("round")) or 0 for line in lines), default=0)
    counts: Counter[str] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for line in messages:
        kind = str(line.get("kind"))
        if kind in ("TASK", "RESULT") and (whole(line.get("round")) or 0) <= done:
            counts[kind] += 1
            total[kind, str(line.get("direction"))] += int(number(line.get("bytes")) or 0)
    up, down = (sum(int(number(line.get(key)) or 0) for line in lines) for key in ("bytes_up", "bytes_down"))
    if not counts or not up + down:
        return {}
    found = {kind: (counts[kind], total[kind, "up"], total[kind, "down"]) for kind in ("TASK", "RESULT") if kind in counts}
    rest_up, rest_down = (
        max(0, all_bytes - sum(total[kind, side] for kind in counts)) for all_bytes, side in ((up, "up"), (down, "down"))
    )
    return {**found, "control": (0, rest_up, rest_down)}
