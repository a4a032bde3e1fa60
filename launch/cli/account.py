"""`dpcfl account` without a file: epsilon or noise of plain DP-SGD and of client-level DP, from the numbers of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import ADJACENCIES, Adjacency
from dpcfl_net.privacy.accounting.accountant import ACCOUNTANTS, Accountant, calibrate, epsilon
from dpcfl_net.privacy.events.allocated_gaussian import MOST_BATCHES, AllocatedGaussian
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.results.number_format import at_most, counted

MOST_STEPS = 1_000_000_000
RECORD, CLIENT = "record", "client"
SAMPLINGS = ("poisson", "allocation")
GIVE_A_UNIT = "give --records (privacy of one record of a client) or --clients (privacy of one client)"
_TITLES = {"poisson": "Poisson sampling", "allocation": "random allocation", "fixed": "samples of fixed size"}
_OVER_CLIP = "deviation of the noise over the clip norm"
_OVER_TWICE = "deviation of the noise over twice the clip norm, by which a replaced client moves a sum"


@dataclass(frozen=True)
class Question:
    """Numbers of a run, as the options of the command.

    Attributes:
        epsilon: Target epsilon; None: `noise_multiplier` is given.
        noise_multiplier: z; None: `epsilon` is given. Deviation of the noise over the clip norm; with samples of fixed size, for
            replacement of a client, over twice the clip norm.
        delta: Target delta.
        records: Records of a client; None: client level.
        batch: Expected batch size.
        epochs: Local epochs of a round.
        sampling: "poisson" or "allocation" at record level; None: Poisson.
        clients: Number of clients; None: record level.
        per_round: Clients of a round; None: all.
        rounds: Number of rounds; None: one at record level.
        adjacency: Adjacency of the target epsilon.
        accountant: "pld" or "rdp".
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    records: int | None = None
    batch: int | None = None
    epochs: int | None = None
    sampling: str | None = None
    clients: int | None = None
    per_round: int | None = None
    rounds: int | None = None
    adjacency: str = "zero-out"
    accountant: str = "pld"

    def problems(self) -> list[str]:
        """Return a sentence for each option that is missing, out of range, or that another one contradicts."""
        return [*self._target_problems(), *self._unit_problems(), *self._range_problems()]

    def _target_problems(self) -> list[str]:
        found = []
        if (self.epsilon is None) == (self.noise_multiplier is None):
            found.append("give --epsilon (finds the noise multiplier) or --noise-multiplier (finds epsilon), one of the two")
        if self.delta is None:
            found.append("--delta is missing: a number above 0 and below 1, for example 1e-5")
        for option, value, allowed in (
            ("--adjacency", self.adjacency, ADJACENCIES),
            ("--accountant", self.accountant, ACCOUNTANTS),
        ):
            if value not in allowed:
                found.append(f"{option} is {value!r}: must be {' or '.join(allowed)}")
        if self.sampling not in (None, *SAMPLINGS):
            found.append(f"--sampling is {self.sampling!r}: must be {' or '.join(SAMPLINGS)}")
        return found

    def _unit_problems(self) -> list[str]:
        by_record = {"--records": self.records, "--batch": self.batch, "--epochs": self.epochs, "--sampling": self.sampling}
        given = [option for option, value in by_record.items() if value is not None]
        if self.clients is not None and self.records is not None:
            return [GIVE_A_UNIT + ", one of the two"]
        if self.clients is not None:
            found = [
                f"{option} belongs to --records, privacy of a record; --clients is for privacy of a client" for option in given
            ]
            return found if self.rounds is not None else [*found, "--clients needs --rounds"]
        if self.records is None:
            return [GIVE_A_UNIT]
        found = [] if self.per_round is None else ["--per-round belongs to --clients: the clients that a round samples"]
        found += [] if self.batch is not None else ["--records needs --batch, the expected size of a batch"]
        if self.epochs is None and self.rounds is None:
            found.append("--records needs --epochs, or --rounds with one epoch each")
        return found

    def _range_problems(self) -> list[str]:
        found = []
        if self.records is not None and self.batch is not None and self.batch > self.records:
            found.append(f"--batch is {self.batch}: must be at most --records, {self.records}")
        if self.sampling == "allocation" and not found and math.ceil((self.records or 1) / (self.batch or 1)) > MOST_BATCHES:
            found.append(f"--sampling allocation counts at most {MOST_BATCHES:,} batches in an epoch")
        if self.clients is not None and self.per_round is not None and self.per_round > self.clients:
            found.append(f"--per-round is {self.per_round}: must be at most --clients, {self.clients}")
        if not found and (self.epochs or 1) * (self.rounds or 1) * (self.records or 1) > MOST_STEPS * (self.batch or 1):
            found.append(f"more than {MOST_STEPS:,} steps, the largest number that is counted")
        return found


@dataclass(frozen=True)
class Training:
    """The mechanism that a question describes.

    Attributes:
        unit: RECORD or CLIENT, the protected unit.
        sampled: Members of a sample (expected number unless `fixed`).
        population: Number of members.
        steps: Number of noisy sums.
        described: How the steps come about.
        sampling: "poisson"; "allocation"; "fixed", samples of exactly `sampled` members, which have epsilon under replacement only.
    """

    unit: str
    sampled: int
    population: int
    steps: int
    described: str
    sampling: str = "poisson"

    @classmethod
    def of(cls, asked: Question) -> Training:
        """Count the steps of a question without problems, as the plans of the algorithms do."""
        if asked.clients is not None:
            assert asked.rounds is not None
            # A trusted server samples a fixed number for replacement, as `algorithm.sampling: auto` does.
            sampling = "fixed" if asked.adjacency == "replace-one" else "poisson"
            sampled, described = asked.per_round or asked.clients, counted(asked.rounds, "round")
            return cls(CLIENT, sampled, asked.clients, asked.rounds, described, sampling)
        assert asked.records is not None
        assert asked.batch is not None
        epochs, rounds, each = asked.epochs or 1, asked.rounds or 1, math.ceil(asked.records / asked.batch)
        described = f"{counted(epochs, 'epoch')} of {each:,}"
        if asked.rounds is not None:
            described = f"{counted(rounds, 'round')} of {described}"
        return cls(RECORD, asked.batch, asked.records, rounds * epochs * each, described, asked.sampling or "poisson")

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return math.ceil(self.population / self.sampled)

    @property
    def sensitivity(self) -> int:
        """Sensitivity of a sum in clip norms, to which the noise multiplier is relative: 2 for a replaced member of a fixed sample."""
        return 2 if self.sampling == "fixed" else 1

    @property
    def rate(self) -> float:
        """Probability that a given member is in a sample."""
        return 1 / self.batches if self.sampling == "allocation" else self.sampled / self.population

    def events(self, noise_multiplier: float) -> list[Event]:
        """Return what the accountant sees."""
        if self.sampling == "allocation":
            return [AllocatedGaussian(noise_multiplier, self.batches, self.steps // self.batches)]
        if self.sampling == "fixed":
            return [FixedSizeGaussian(noise_multiplier, self.sampled, self.population, self.steps)]
        return [SampledGaussian(noise_multiplier, self.rate, self.steps)]


def answer(asked: Question) -> dict[str, Any]:
    """Compute noise multiplier and epsilon.

    Args:
        asked: The question.

    Returns:
        unit, adjacency, accountant, delta, target_epsilon (None if not given), noise_multiplier, noise_over_clip (deviation of the noise
        over the clip norm), sampling, sampling_rate, sampled, population, steps, epsilon_zero_out and epsilon_replace_one (None without
        a guarantee), and notes.

    Raises:
        ConfigError: With every problem of the question.
    """
    if problems := asked.problems():
        raise ConfigError(problems)
    training, notes = Training.of(asked), []
    delta, accountant = float(asked.delta or 0), _accountant(asked)
    adjacency: Adjacency = "replace-one" if asked.adjacency == "replace-one" else "zero-out"
    try:
        noise = asked.noise_multiplier
        if noise is None:
            noise = calibrate(training.events, float(asked.epsilon or 0), delta, adjacency, accountant)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    spent: dict[str, float | None] = {}
    for other in ADJACENCIES:
        spent[other], note = _spent(training.events, noise, delta, other, accountant)
        notes += [note] if note else []
    if spent[adjacency] is None:
        raise ConfigError(notes)
    if delta >= 1 / training.population:
        notes.append(
            f"delta is not below 1/{training.population:,}: it allows a few {training.unit}s to be revealed completely"
        )
    return {
        "unit": training.unit, "adjacency": adjacency, "accountant": accountant, "delta": delta, "target_epsilon": asked.epsilon,
        "noise_multiplier": noise, "noise_over_clip": noise * training.sensitivity, "sampling": training.sampling, "sampling_rate": training.rate,
        "sampled": training.sampled, "population": training.population, "steps": training.steps, "steps_described": training.described,
        "epsilon_zero_out": spent["zero-out"], "epsilon_replace_one": spent["replace-one"], "notes": notes,
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """Format an answer as a table.

    Args:
        found: From `answer`.
    """
    unit, sampled = found["unit"], f"{found['sampled']:,} of {found['population']:,} {found['unit']}s"
    if found["sampling"] == "allocation":
        sampled = f"1 of {counted(round(1 / found['sampling_rate']), 'batch', 'es')} of each epoch"
    mechanism = "DP-SGD" if unit == RECORD else "noisy sums of clipped updates"
    kind, over = _TITLES[found["sampling"]], _OVER_TWICE if found["sampling"] == "fixed" else _OVER_CLIP
    rows = [
        ("protected unit", f"one {unit}; {mechanism}, {kind}"),
        ("noise multiplier", f"{found['noise_multiplier']:.7g} ({over})"),
        ("sampling rate", f"{found['sampling_rate']:.6g} ({sampled})"),
        ("steps", f"{found['steps']:,} ({found['steps_described']})"),
    ]
    for title, key in (("epsilon, zero-out", "epsilon_zero_out"), ("epsilon, replace-one", "epsilon_replace_one")):
        if (value := found[key]) is not None:
            shown = "inf: no guarantee" if math.isinf(value) else at_most(value, 6)
            rows.append((title, f"{shown} at delta {at_most(found['delta'], 6)} ({found['accountant']})"))
    width = max(len(title) for title, _ in rows)
    return [*(f"{title:{width}}  {text}" for title, text in rows), *(f"note: {note}" for note in found["notes"])]


def _spent(
    events: Callable[[float], list[Event]], noise: float, delta: float, adjacency: Adjacency, accountant: Accountant
) -> tuple[float | None, str]:
    """Epsilon, or None and why the accountant has none."""
    try:
        return epsilon(events(noise), delta, adjacency, accountant), ""
    except ValueError as error:
        return None, f"no epsilon under {adjacency}: {error}"


def _accountant(asked: Question) -> Accountant:
    return "rdp" if asked.accountant == "rdp" else "pld"
