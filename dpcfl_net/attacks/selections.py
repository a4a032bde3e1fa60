"""What repeated cluster choices tell the server: guesses at clients' clusters, measured, predicted and bounded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.privacy.slots import SelectionSlot, UnprotectedSlot
from dpcfl_net.report.figures import axis, colour, spec
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import read_run_job
from dpcfl_net.transport import transcript

REPETITIONS = 4000  # simulated runs of every client's choices behind each predicted figure
SHOWN = (1, 2, 5, 10, 20, 50, 100)  # after how many choices the table has a row

# ---- theory


@lru_cache(maxsize=256)
def right_after(epsilon: float, clusters: int, rounds: int) -> tuple[float, ...]:
    """The chance to guess a secret cluster right after 1..rounds choices, each of which names it as often as epsilon allows.

    Every choice names the secret one of `clusters` with probability p = e^epsilon / (e^epsilon + clusters - 1), any other with
    equal ones: the exponential mechanism where the secret decides scores that are epsilon apart. With all clusters alike
    beforehand the likeliest one is the one that was named most often; a tie is broken by a fair draw. Exact: the secret was
    named n times with Binomial(t, p), and sum_a P(a of the others less often than n, the rest at most n times) / clusters is
    the chance to win with n, averaged over the order in which a tie would be broken.
    Raises ValueError for a negative or undefined epsilon, for no cluster, for a number of rounds below 0.
    """
    if not epsilon >= 0 or clusters < 1 or rounds < 0:
        raise ValueError(f"epsilon >= 0, clusters >= 1 and rounds >= 0, got {epsilon!r}, {clusters!r} and {rounds!r}")
    from scipy.stats import binom

    draws = np.arange(rounds + 1)
    named = binom.pmf(draws[None, :], draws[:, None], 1 / (1 + (clusters - 1) * math.exp(-epsilon)))  # [t, n]
    right = np.zeros(rounds + 1)
    for n in draws:
        right[n:] += named[n:, n] * _wins(int(n), clusters - 1, rounds)[: rounds + 1 - n]
    return tuple(float(value) for value in right[1:])


def _wins(n: int, others: int, rounds: int) -> np.ndarray:
    """The chance that n votes win a fair tie-break against `others` who share r votes evenly at random: (rounds + 1,) over r."""
    chance = np.zeros(rounds + 1)
    fewer = np.eye(1, rounds + 1)[0]  # of the first `a` others each has less than n
    for a in range(others + 1):
        level = fewer
        for c in range(a + 1, others + 1):
            level = _with_another(level, c, n)
        chance += level / (others + 1)
        fewer = _with_another(fewer, a + 1, n - 1)
    return chance


def _with_another(chance: np.ndarray, c: int, most: int) -> np.ndarray:
    """From "c - 1 share r votes, all within their limits" to c, the new one with at most `most`; r = 0..len - 1."""
    own = _shares(c, len(chance))[:, : max(0, most + 1)]
    r, i = np.indices(own.shape)
    found: np.ndarray = (own * chance[r - i]).sum(axis=1)  # own is 0 where i > r
    return found


@lru_cache(maxsize=128)
def _shares(c: int, size: int) -> np.ndarray:
    """Binomial(i; r, 1 / c) at [r, i] for r, i < size: how many of r votes one of c gets."""
    from scipy.stats import binom

    draws = np.arange(size)
    found: np.ndarray = binom.pmf(draws[None, :], draws[:, None], 1 / c)
    return found


# ---- the server's guess


def votes_after(choices: Sequence[int], clusters: int) -> np.ndarray:
    """How often each cluster was named in the first 1..T choices, (T, clusters)."""
    return np.cumsum(np.eye(clusters, dtype=np.int64)[np.asarray(choices, np.int64)], axis=0)


def posterior(votes: np.ndarray, epsilon: float) -> np.ndarray:
    """What to believe of each cluster if choices name the secret one e^epsilon times as often as others: e^(epsilon votes)."""
    weights = np.exp(epsilon * (votes - votes.max(axis=-1, keepdims=True)))
    found: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return found


def credit(votes: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The chance that the cluster named most often, a tie broken by a fair draw, is the true one; over (..., clusters) votes."""
    winners = votes == votes.max(axis=-1, keepdims=True)
    hit = np.take_along_axis(winners, truth[..., None], axis=-1)[..., 0]
    return hit / winners.sum(axis=-1)


def predicted(scores: np.ndarray, eta: float, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The guess's chance after each of T choices by the exponential mechanism on (T, clusters) scores, over REPETITIONS draws."""
    noise = rng.gumbel(size=(REPETITIONS, *scores.shape))
    named = np.argmax(eta * (scores - scores.max(axis=1, keepdims=True)) + noise, axis=2)
    votes = np.cumsum(named[..., None] == np.arange(scores.shape[1]), axis=1)
    found: np.ndarray = credit(votes, np.broadcast_to(truth, named.shape)).mean(axis=0)
    return found


# ---- a recorded run


@dataclass(frozen=True)
class Seen:
    """What one client told, choice by choice, and which models it was asked about (by the hash of their bytes)."""

    client: int
    rounds: list[int]
    choices: list[int]
    models: list[str]


@dataclass(frozen=True)
class Recording:
    """All choices of a run, as the server has them, and the mechanism that made them; eta None: sent as they are."""

    folder: Path
    job: Job
    seen: list[Seen]
    models: dict[str, np.ndarray]
    eta: float | None

    @cached_property
    def clusters(self) -> int:
        """Models to choose from, M."""
        return max(len(models) for models in self.models.values())

    @property
    def name(self) -> str:
        return f"{self.job.protocol.name} ({self.job.protocol.algorithm})"


def read_choices(folder: Path) -> Recording:
    """Every released choice in the transcript of a run; ConfigError if there is no full transcript or no choice in it."""
    job = read_run_job(folder)
    algorithm = job.algorithm
    asking = {name: half.bundle for name, half in algorithm.client_steps().items() if "choice" in half.gives}
    path = folder / "transcript.msgpack"
    if not path.exists():
        raise ConfigError(f"{folder} has no transcript.msgpack: record the run with output.transcript=full")
    asked: dict[str, str] = {}
    models: dict[str, np.ndarray] = {}
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for record, header, tensors in transcript.messages(path):
        if header.task not in asking or (header.chunks and tensors is None):
            continue
        if header.kind == "TASK" and tensors is not None:
            asked[header.id] = header.sha256
            models.setdefault(header.sha256, tensors["models"])
        elif header.code == "release" and tensors is not None and header.parent in asked:
            client, hashed = int(record.peer.removeprefix("client ")), asked[header.parent]
            if 0 <= int(tensors["choice"]) < len(models[hashed]):  # a hostile client names what it likes
                found.setdefault((client, header.round), (int(tensors["choice"]), hashed))
    if not found:
        why = "it never asks for one" if not asking else "the transcript must be full: output.transcript=full"
        raise ConfigError(f"{folder} holds no choice of a cluster by algorithm {job.protocol.algorithm}: {why}")
    slots = {slot.name: slot for entry in job.protocol.roster for slot in algorithm.plan(entry)}
    chosen = [slots[name] for bundle in asking.values() for name in bundle if name in slots]
    eta = next((slot.eta for slot in chosen if isinstance(slot, SelectionSlot)), None)
    if eta is None and not any(isinstance(slot, UnprotectedSlot) for slot in chosen):
        raise ConfigError(f"{folder}: the plan of {job.protocol.algorithm} holds no mechanism that chooses")
    return Recording(folder, job, _by_client(found), models, eta)


def _by_client(found: Mapping[tuple[int, int], tuple[int, str]]) -> list[Seen]:
    seen = []
    for client in sorted({client for client, _ in found}):
        rounds = sorted(t for who, t in found if who == client)
        told = [found[client, t] for t in rounds]
        seen.append(Seen(client, rounds, [choice for choice, _ in told], [hashed for _, hashed in told]))
    return seen


def true_scores(recording: Recording, root: str | None = None) -> list[np.ndarray]:
    """For each client (T, M) float64: how good each model it was asked about really is on its own records.

    The experimenter's knowledge, never the server's: the records themselves, scored as the client scores them, by the count
    of those that are right or, where choices are raw, by the mean loss, negative. -inf for a model that was not there.
    """
    import torch

    from dpcfl_net.data.partition import open_client
    from dpcfl_net.federation.client import Engine

    torch.set_num_threads(1)
    engine, found = Engine.of(recording.job.protocol), []
    for seen in recording.seen:
        data = open_client(*client_slice(recording.job, seen.client, root), root)
        known = {hashed: np.full(recording.clusters, -np.inf) for hashed in dict.fromkeys(seen.models)}
        for hashed, scores in known.items():
            models = recording.models[hashed]
            if recording.eta is None:
                scores[: len(models)] = -engine.sgd.mean_losses(models, data)
            else:
                scores[: len(models)] = [engine.evaluator.count_correct(model, data) for model in models]
        found.append(np.stack([known[hashed] for hashed in seen.models]))
    return found


@dataclass(frozen=True)
class Curves:
    """Over the first 1..T choices of each client: how many clients made so many, and the guess's chances, averaged over them.

    measured: of this run; predicted: of the mechanism on these clients' scores; at_most: theory for epsilon = eta N, all
    records of a client against it; one_record: theory for epsilon = eta. agreement: adjusted Rand index between all guesses
    and the true clusters. Raw choices: predicted and bounds are 1.
    """

    clients: list[int]
    measured: list[float]
    predicted: list[float]
    at_most: list[float]
    one_record: list[float]
    agreement: list[float]


def curves(recording: Recording, scores: Sequence[np.ndarray], seed: int = 0) -> Curves:
    """The attack on every client of a recording."""
    from dpcfl_net.clustering.metrics import adjusted_rand_index

    k, eta, rng = recording.clusters, recording.eta, np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {"measured": [], "predicted": [], "at_most": [], "one_record": []}
    guesses: list[np.ndarray] = []
    for seen, own in zip(recording.seen, scores, strict=True):
        truth, length = own.argmax(axis=1), len(seen.choices)
        votes = _votes(recording, seen)
        rows["measured"].append(list(credit(votes, truth)))
        rows["predicted"].append(np.ones(length) if eta is None else predicted(own, eta, truth, rng))
        records = recording.job.protocol.client(seen.client).records
        rows["at_most"].append(np.ones(length) if eta is None else right_after(eta * records, k, length))
        rows["one_record"].append(np.ones(length) if eta is None else right_after(eta, k, length))
        guesses.append(votes.argmax(axis=1))
    lengths = [len(seen.choices) for seen in recording.seen]
    steps = range(max(lengths))
    true = [recording.job.experiment.true_clusters[seen.client] for seen in recording.seen]
    agreement = [
        adjusted_rand_index(true, [int(guess[min(t, n - 1)]) for guess, n in zip(guesses, lengths, strict=True)]) for t in steps
    ]
    means = {name: [float(np.mean([row[t] for row in found if t < len(row)])) for t in steps] for name, found in rows.items()}
    return Curves([sum(n > t for n in lengths) for t in steps], **means, agreement=agreement)


def _votes(recording: Recording, seen: Seen) -> np.ndarray:
    """What the guess rests on after each choice: all choices so far or, where each is the truth of its round, the latest."""
    if recording.eta is None:
        return np.eye(recording.clusters, dtype=np.int64)[seen.choices]
    return votes_after(seen.choices, recording.clusters)


# ---- the result


def attack(folder: Path, against: Path | None = None, root: str | None = None) -> AttackResult:
    """The attack on a recorded run and, for comparison, on a second one; ConfigError as `read_choices`, DataMissing."""
    recording = read_choices(folder)
    scores = true_scores(recording, root)
    own = curves(recording, scores)
    other = None if against is None else read_choices(against)
    theirs = None if other is None else curves(other, true_scores(other, root))
    sentences = _sentences(recording, own)
    if other is not None and theirs is not None:
        sentences.append(f"{other.name}, beside it: {_measured(other, theirs)}.")
    columns, rows = _table(recording, own, other, theirs)
    return AttackResult(
        name="selections",
        title="What cluster choices tell the server",
        headline=f"{recording.name}: {_measured(recording, own)}; by chance {1 / recording.clusters:.0%}.",
        sentences=sentences,
        columns=columns,
        rows=rows,
        figure=_figure(recording, own, other, theirs),
        caption="Guess: the model that a client named most often. Right: the model that is best on the client's own records.",
        facts={
            "run": recording.name, "eta": recording.eta, "clusters": recording.clusters, **vars(own),
            "clients_seen": _clients(recording, scores),
            "against": None if other is None or theirs is None else {"run": other.name, "eta": other.eta, **vars(theirs)},
        },
    )  # fmt: skip


def _measured(recording: Recording, found: Curves) -> str:
    count, how = len(found.measured), "raw" if recording.eta is None else "private"
    after = f"after one {how} choice each"
    if count > 1:
        after += f", of {found.measured[-1]:.0%} after {count}"
    return f"the server guesses the nearest model of {found.measured[0]:.0%} of the clients right {after}"


def _sentences(recording: Recording, own: Curves) -> list[str]:
    count, eta = len(own.measured), recording.eta
    agreement = (
        f"Guesses against the true clusters: adjusted Rand index {own.agreement[0]:.2f} after one choice and "
        f"{own.agreement[-1]:.2f} after {count} (1: the same partition, 0: chance)."
    )
    updates = "What the updates themselves tell of a client's cluster is not counted here."
    if eta is None:
        return ["Each choice is sent as it is: it is the answer, for its own round.", agreement, updates]
    records = [recording.job.protocol.client(seen.client).records for seen in recording.seen]
    many = f"{min(records)}" if min(records) == max(records) else f"{min(records)} to {max(records)}"
    return [
        f"Each choice is made by the exponential mechanism with eta = {eta:.4g} per record. That protects one record: a secret that "
        f"one record decides is guessed right at most with probability {own.one_record[-1]:.2f} after {count} choices.",
        f"A client's cluster is no such secret, since all its {many} records speak for it together: the bound for it is that of "
        f"epsilon {eta * min(records):.4g} a choice, {own.at_most[0]:.2f} after one and {own.at_most[-1]:.2f} after {count}. "
        f"From the clients' real scores {own.predicted[0]:.2f} and {own.predicted[-1]:.2f} are expected.",
        agreement,
        updates,
    ]


def _table(
    recording: Recording, own: Curves, other: Recording | None, theirs: Curves | None
) -> tuple[list[str], list[list[str]]]:
    columns = ["choices", "measured", "expected from the scores", "at most (epsilon = eta N)", "one record (epsilon = eta)"]
    lines = [own.measured, own.predicted, own.at_most, own.one_record]
    if other is not None and theirs is not None:
        columns.append(f"measured, {other.name}")
        lines.append(theirs.measured)
    last = max(len(line) for line in lines)
    steps = sorted({*(t for t in SHOWN if t < last), last})
    return columns, [[str(t), *(f"{line[t - 1]:.3f}" if t <= len(line) else "-" for line in lines)] for t in steps]


def _figure(recording: Recording, own: Curves, other: Recording | None, theirs: Curves | None) -> dict[str, Any]:
    traces = [_trace(f"measured, {recording.name}", own.measured, {"color": colour(0), "width": 2}, "lines+markers")]
    if recording.eta is not None:
        traces += [
            _trace("expected from the scores", own.predicted, {"color": colour(0), "dash": "dot"}),
            _trace("theory, at most: all records of a client", own.at_most, {"color": colour(1), "dash": "dash"}),
            _trace("theory, at most: one record", own.one_record, {"color": colour(2), "dash": "dash"}),
        ]
    if other is not None and theirs is not None:
        traces.append(_trace(f"measured, {other.name}", theirs.measured, {"color": colour(3), "width": 2}, "lines+markers"))
    longest = max(len(trace["x"]) for trace in traces)
    traces.append(_trace("chance", [1 / recording.clusters] * longest, {"color": "@ink", "width": 1}))
    layout = {"xaxis": axis("choices seen of each client"), "yaxis": axis("guessed right", range=[0, 1.03])}
    return spec(traces, 360, **layout)


def _trace(name: str, y: Sequence[float], line: dict[str, Any], mode: str = "lines") -> dict[str, Any]:
    x = list(range(1, len(y) + 1))
    shown = f"{name}, %{{x}} choices: %{{y:.3f}}<extra></extra>"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": list(y), "line": line, "hovertemplate": shown}


def _clients(recording: Recording, scores: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Each client for programs: what it named, what the server believes of it at most, and the truth."""
    found = []
    for seen, own in zip(recording.seen, scores, strict=True):
        records = recording.job.protocol.client(seen.client).records
        votes = _votes(recording, seen)[-1]
        epsilon = math.inf if recording.eta is None else recording.eta * records
        belief = votes.astype(float) if math.isinf(epsilon) else posterior(votes, epsilon)
        found.append({
            "client": seen.client, "true_cluster": recording.job.experiment.true_clusters[seen.client],
            "choices": seen.choices, "named": dict(sorted(Counter(seen.choices).items())),
            "posterior": [float(value) for value in belief], "nearest": [int(best) for best in own.argmax(axis=1)],
        })  # fmt: skip
    return found
