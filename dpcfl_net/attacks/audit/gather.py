"""Reads an audited run task by task and scores every canary in both views.

Views: every step, as the accountant assumes that a server sees it; and the data that the real server received. Scores: the
likelihood; differences of two clients and of two rounds, in which shared noise cancels; and sums minus the noise, if it is
derived from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dpcfl_net.attacks.audit import scores
from dpcfl_net.attacks.audit.record import Record, Training

MAX_DISCREPANCY = 0.05  # between taped sums and release, in units of the clip norm, beside the rounding of parameters
EVERY_STEP, SERVER = VIEWS = ("every step", "the server's view")
LIKELIHOOD, TWO_ROUNDS = "likelihood", "difference of two rounds"
ROUNDINGS = 8.0  # deviations of the rounding that a difference may have
TWO_CLIENTS, SEED = "difference of two clients", "less the seed's noise"


@dataclass(frozen=True)
class Scores:
    """One score of n canaries in one view. The last three are set for the likelihood only, `totals` unless a canary that is out sends.

    Attributes:
        view: Name of the view.
        kind: Name of the score.
        values: Scores, (n,).
        bits: True for each canary that is in, (n,) bool.
        totals: Sums over the run, divided by the deviation of the stated noise, (n,).
        squares: Sums of squares, divided by the variance of the stated noise, (n,).
        sums: Number of squares in each, (n,).
    """

    view: str
    kind: str
    values: np.ndarray
    bits: np.ndarray
    totals: np.ndarray | None = None
    squares: np.ndarray | None = None
    sums: np.ndarray | None = None


class Gatherer:
    """Collects the scores of all audited clients' canaries.

    Args:
        record: The audited run.
        why_unseen: Reason why the server's view is not scored; empty if it is.

    Attributes:
        discrepancy: Largest difference between the sum of taped steps and the release, in units of the clip norm.
        rounding: Largest difference that rounding the parameters explains, in units of the clip norm.

    Raises:
        ConfigError: If a tape or the transcript does not match the run.
    """

    def __init__(self, record: Record, why_unseen: str) -> None:
        self._record, self._why_unseen, clients = record, why_unseen, record.audit.clients
        self._seed, self._pairs = record.job.experiment.noise, list(zip(clients[::2], clients[1::2], strict=False))
        self._sums = {(view, client): _Sums.none(record.audit.canaries) for view in VIEWS for client in clients}
        self._pair_scores = {(view, pair): scores.PairScores(record.audit.canaries) for view in VIEWS for pair in self._pairs}
        self._compared: set[str] = set()
        self._unpaired = self._unopened = 0
        self.discrepancy = self.rounding = 0.0
        for trainings in self._tasks():
            self._read(trainings)

    @property
    def scores(self) -> list[Scores]:
        """Every score that the run allows."""
        views = [view for view in VIEWS if any(self._sums[view, client].variance for client in self._record.audit.clients)]
        if self._record.only_sums:  # both views are the same
            views = [view for view in views if view == SERVER]
        every = [self._likelihood(view) for view in views]
        every += [Scores(view, TWO_ROUNDS, self._joined(view, "rounds"), self._bits()) for view in views]
        every += [self._differences(view) for view in VIEWS if view in self._compared]
        if self._seed is not None:
            every += [Scores(view, SEED, self._joined(view, "seed"), self._bits()) for view in views]
        return every

    @property
    def notes(self) -> list[str]:
        """Sentences on scores that are missing, with the reason, and on the source of the seed."""
        record, notes = self._record, []
        if self._why_unseen:
            notes.append(f"The real server's view is not measured: {self._why_unseen}.")
        if len(record.audit.clients) == 1 and not record.only_sums:
            fix = "" if record.secure else " (audit.client=all)"
            notes.append(f"One client is audited: noise that clients share is not detected{fix}.")
        if self._unpaired:
            notes.append(f"{self._unpaired} tasks of two clients differ in noise or sampling, or one is missing: not compared.")
        if self._unopened:
            notes.append(
                f"{self._unopened} secure sums were charged and not opened with the audited vector: they show nothing."
            )
        if self.rounding > MAX_DISCREPANCY:
            notes.append(
                f"The parameters are rounded to float32, and local.lr is so small that differences of up to {self.rounding:.2g} clip "
                "norms between a release and its taped steps are not seen."
            )
        if self._seed is not None:
            notes.append("All noise is derived from the noise seed in the experiment: it was computed again and subtracted.")
        return notes

    def _tasks(self) -> Iterator[dict[int, Training]]:
        """Trainings of one round and kind, by client."""
        tasks: dict[tuple[int, str], dict[int, Training]] = {}
        for client in self._record.audit.clients:
            for training in self._record.trainings(client):
                tasks.setdefault((training.round, training.kind), {})[client] = training
        yield from (tasks[key] for key in sorted(tasks))

    def _read(self, trainings: dict[int, Training]) -> None:
        observed = {client: self._observed(training) for client, training in trainings.items()}
        for client, training in trainings.items():
            noise = None if self._seed is None or not observed[client] else self._record.noise(training, self._seed)
            self._unopened += training.secure and not observed[client]
            for view, values in observed[client].items():
                self._sums[view, client].add(values, training, noise)
            if len(observed[client]) == len(VIEWS):
                taped, released = (observed[client][view].sum(0) for view in VIEWS)
                self.discrepancy = max(self.discrepancy, float(np.abs(taped - released).max()))
                self.rounding = max(self.rounding, ROUNDINGS * self._record.rounding(training))
        for pair in self._pairs:
            self._compare(pair, [trainings[client] for client in pair if client in trainings], observed)

    def _observed(self, training: Training) -> dict[str, np.ndarray]:
        """Sums of one task in each view: (steps, m) and (1, m), float64."""
        steps = self._record.steps(training)
        rounds = None if self._why_unseen else self._record.rounds(training)
        views = {EVERY_STEP: steps, SERVER: None if rounds is None else rounds[None]}
        return {view: values.astype(np.float64) for view, values in views.items() if values is not None}

    def _compare(self, pair: tuple[int, int], trainings: list[Training], observed: dict[int, dict[str, np.ndarray]]) -> None:
        if len({(training.slot, training.noise) for training in trainings}) != 1 or len(trainings) < 2:
            self._unpaired += 1
            return
        for view in VIEWS:
            if all(view in observed[client] for client in pair):
                first, second = (observed[client][view] for client in pair)
                slot = trainings[0].slot
                self._pair_scores[view, pair].add(first, second, slot.steps // len(first), slot.rate)
                self._compared.add(view)

    def _likelihood(self, view: str) -> Scores:
        sums = {name: self._joined(view, name) for name in ("totals", "squares", "sums")}
        return Scores(view, LIKELIHOOD, self._joined(view, "likelihood"), self._bits(), **sums)

    def _differences(self, view: str) -> Scores:
        values = np.concatenate([self._pair_scores[view, pair].scores for pair in self._pairs])
        return Scores(view, TWO_CLIENTS, values, np.concatenate([self._record.bits(first) for first, _ in self._pairs]))

    def _joined(self, view: str, what: str) -> np.ndarray:
        return np.concatenate([getattr(self._sums[view, client], what) for client in self._record.audit.clients])

    def _bits(self) -> np.ndarray:
        return np.concatenate([self._record.bits(client) for client in self._record.audit.clients])


def agree(discrepancy: float, rounding: float) -> bool:
    """Return True if every release is the sum of its taped steps.

    Args:
        discrepancy: As of `Gatherer`.
        rounding: As of `Gatherer`.
    """
    return discrepancy <= MAX_DISCREPANCY + rounding


def gathered(record: Record) -> Gatherer:
    """Collect the scores; the server's view of steps that are not of this package counts only if their updates are sums of steps.

    Args:
        record: The audited run.

    Raises:
        ConfigError: As `Gatherer`.
    """
    gatherer = Gatherer(record, record.why_unseen)
    if agree(gatherer.discrepancy, gatherer.rounding) or not record.own_steps:
        return gatherer
    why = f"updates of {record.protocol.algorithm} are off by {gatherer.discrepancy:.3g} clip norms from the sum of their steps"
    return Gatherer(record, why)


@dataclass
class _Sums:
    """Running sums of one client in one view, (m,) each; `variance` is that of the noise in `plain`."""

    likelihood: np.ndarray
    seed: np.ndarray
    plain: np.ndarray
    squares: np.ndarray
    sums: np.ndarray
    rounds: np.ndarray
    variance: float = 0.0
    before: tuple[Training, np.ndarray] | None = None  # unpaired round

    @classmethod
    def none(cls, canaries: int) -> _Sums:
        return cls(*np.zeros((6, canaries)))

    @property
    def totals(self) -> np.ndarray:
        return self.plain / math.sqrt(self.variance or 1.0)

    def add(self, values: np.ndarray, training: Training, noise: np.ndarray | None) -> None:
        """Add one task: `values` (r, m) are sums of equal numbers of steps, `noise` is (steps, m)."""
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
        """Pair rounds with equal sampling; each round is in one difference only."""
        if self.before is None or self.before[0].slot != training.slot:
            self.before = training, values
            return
        steps = training.slot.steps // len(values)
        self.rounds += scores.round_differences(values, self.before[1], steps, training.slot.rate)
        self.before = None


def _scored(values: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Scores (m,) of sums (r, m)."""
    each = scores.likelihood(values.ravel(), steps, rate, scores.noise_deviation(values, steps, rate))
    return np.asarray(each.reshape(values.shape).sum(0))
