"""Reads an audited run task by task and scores every canary in two views.

The views: every single step, as the accountant assumes, and the release that the real server received. The scores: likelihood;
differences of two clients and of two rounds, in which common noise cancels; and sums without the noise, for seeded noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpcfl_net.attacks.audit import scores
from dpcfl_net.attacks.audit.record import Record, Training

EVERY_STEP, SERVER = VIEWS = ("every step", "the server's view")
LIKELIHOOD, ROUNDS = "likelihood", "difference of two rounds"
APART, SEED = "difference of two clients", "less the seed's noise"


@dataclass(frozen=True)
class Scores:
    """One score of n canaries in one view; totals, squares and sums are of the likelihood only.

    `totals` (n,): sums over the run, in deviations of the stated noise. `squares` (n,): sums of squares, in variances of the stated
    noise, of `sums` (n,) values each.
    """

    view: str
    kind: str
    values: np.ndarray
    bits: np.ndarray
    totals: np.ndarray | None = None
    squares: np.ndarray | None = None
    sums: np.ndarray | None = None


class Gatherer:
    """Collects scores of all audited clients' canaries. `stray`: largest difference of taped steps and releases."""

    def __init__(self, record: Record) -> None:
        self._record, clients = record, record.audit.clients
        self._seed, self._pairs = record.job.experiment.noise, list(zip(clients[::2], clients[1::2], strict=False))
        self._sums = {(view, client): _Sums.none(record.audit.canaries) for view in VIEWS for client in clients}
        self._apart = {(view, pair): scores.Apart(record.audit.canaries) for view in VIEWS for pair in self._pairs}
        self._compared: set[str] = set()
        self._unpaired = 0
        self.stray = 0.0
        for trainings in self._tasks():
            self._read(trainings)

    @property
    def scores(self) -> list[Scores]:
        """Return every score that the run allows."""
        seen = [view for view in VIEWS if any(self._sums[view, client].variance for client in self._record.audit.clients)]
        found = [self._likelihood(view) for view in seen]
        found += [Scores(view, ROUNDS, self._joined(view, "rounds"), self._bits()) for view in seen]
        found += [self._differences(view) for view in VIEWS if view in self._compared]
        if self._seed is not None:
            found += [Scores(view, SEED, self._joined(view, "seed"), self._bits()) for view in seen]
        return found

    @property
    def notes(self) -> list[str]:
        """Return sentences on what could not be scored, and on the origin of the seed."""
        record, notes = self._record, []
        if record.why_unseen:
            notes.append(f"What the real server sees is not measured: {record.why_unseen}.")
        if len(record.audit.clients) == 1:
            notes.append("One client is audited: noise that clients share would not be noticed (audit.client=all).")
        if self._unpaired:
            notes.append(f"{self._unpaired} tasks of two clients differ in noise or sampling, or lack one: not compared.")
        if self._seed is not None:
            notes.append(
                "All noise comes from the noise seed, which the experiment names: it was computed again and subtracted."
            )
        return notes

    def _tasks(self) -> Iterator[dict[int, Training]]:
        """Trainings of one round and kind, by client."""
        tasks: dict[tuple[int, str], dict[int, Training]] = {}
        for client in self._record.audit.clients:
            for training in self._record.trainings(client):
                tasks.setdefault((training.round, training.kind), {})[client] = training
        yield from (tasks[key] for key in sorted(tasks))

    def _read(self, trainings: dict[int, Training]) -> None:
        seen = {client: self._seen(training) for client, training in trainings.items()}
        for client, training in trainings.items():
            noise = None if self._seed is None else self._record.noise(training, self._seed)
            for view, values in seen[client].items():
                self._sums[view, client].add(values, training, noise)
            if len(seen[client]) == len(VIEWS):
                taped, released = (seen[client][view].sum(0) for view in VIEWS)
                self.stray = max(self.stray, float(np.abs(taped - released).max()))
        for pair in self._pairs:
            self._compare(pair, [trainings[client] for client in pair if client in trainings], seen)

    def _seen(self, training: Training) -> dict[str, np.ndarray]:
        """Sums of a task in each view: (steps, m) and (1, m), float64."""
        steps = self._record.steps(training)
        rounds = None if self._record.why_unseen else self._record.rounds(training)
        found = {EVERY_STEP: steps, SERVER: None if rounds is None else rounds[None]}
        return {view: values.astype(np.float64) for view, values in found.items() if values is not None}

    def _compare(self, pair: tuple[int, int], trainings: list[Training], seen: dict[int, dict[str, np.ndarray]]) -> None:
        if len({(training.slot, training.noise) for training in trainings}) != 1 or len(trainings) < 2:
            self._unpaired += 1
            return
        for view in VIEWS:
            if all(view in seen[client] for client in pair):
                first, second = (seen[client][view] for client in pair)
                slot = trainings[0].slot
                self._apart[view, pair].add(first, second, slot.steps // len(first), slot.rate)
                self._compared.add(view)

    def _likelihood(self, view: str) -> Scores:
        seen = {name: self._joined(view, name) for name in ("totals", "squares", "sums")}
        return Scores(view, LIKELIHOOD, self._joined(view, "likelihood"), self._bits(), **seen)

    def _differences(self, view: str) -> Scores:
        values = np.concatenate([self._apart[view, pair].scores for pair in self._pairs])
        return Scores(view, APART, values, np.concatenate([self._record.bits(first) for first, _ in self._pairs]))

    def _joined(self, view: str, what: str) -> np.ndarray:
        return np.concatenate([getattr(self._sums[view, client], what) for client in self._record.audit.clients])

    def _bits(self) -> np.ndarray:
        return np.concatenate([self._record.bits(client) for client in self._record.audit.clients])


@dataclass
class _Sums:
    """Running sums of one client in one view, (m,) each."""

    likelihood: np.ndarray
    seed: np.ndarray
    plain: np.ndarray
    squares: np.ndarray
    sums: np.ndarray
    rounds: np.ndarray
    variance: float = 0.0
    before: tuple[Training, np.ndarray] | None = None  # round that waits for its pair

    @classmethod
    def none(cls, canaries: int) -> _Sums:
        return cls(*np.zeros((6, canaries)))

    @property
    def totals(self) -> np.ndarray:
        return self.plain / math.sqrt(self.variance or 1.0)

    def add(self, values: np.ndarray, training: Training, noise: np.ndarray | None) -> None:
        """Add sums (r, m) over equally many steps; noise (steps, m)."""
        steps, rate = training.slot.steps // len(values), training.slot.rate
        self.likelihood += _scored(values, steps, rate)
        self.plain += values.sum(0)
        self.squares += (values**2).sum(0) / (steps * training.noise**2)
        self.sums += len(values)
        self.variance += training.slot.steps * training.noise**2
        self._compare(training, values)
        if noise is not None:
            self.seed += _scored(values - noise.reshape(len(values), steps, -1).sum(1), steps, rate)

    def _compare(self, training: Training, values: np.ndarray) -> None:
        """Compare pairs of rounds with equal sampling; each round is in one pair at most."""
        if self.before is None or self.before[0].slot != training.slot:
            self.before = training, values
            return
        steps = training.slot.steps // len(values)
        self.rounds += scores.over_time(values, self.before[1], steps, training.slot.rate)
        self.before = None


def _scored(values: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Convert sums (r, m) to scores (m,)."""
    each = scores.likelihood(values.ravel(), steps, rate, scores.measured(values, steps, rate))
    return np.asarray(each.reshape(values.shape).sum(0))
