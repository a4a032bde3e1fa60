"""Infers clients' clusters from repeated private selections: measured, predicted and bounded accuracy of the server's guess."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.attacks.recorded_messages import decoded_messages
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.privacy.slots import SelectionSlot, UnprotectedSlot
from dpcfl_net.report.figures import axis, colour, spec
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import read_run_job

REPETITIONS = 4000  # simulated runs of every client's choices for each predicted probability
SHOWN = (1, 2, 5, 10, 20, 50, 100)  # numbers of choices with a row in the table

# ---- theory


@lru_cache(maxsize=256)
def right_after(epsilon: float, clusters: int, rounds: int) -> tuple[float, ...]:
    """Compute the probability of guessing a secret cluster after 1..rounds choices that name it as often as epsilon allows.

    A choice names the secret cluster with the largest probability that epsilon allows, p = e^epsilon / (e^epsilon + clusters
    - 1), and each other cluster with equal probability: the exponential mechanism with scores that are epsilon apart. With a uniform
    prior, the best guess is the cluster named most often, with ties broken uniformly.

    The result is exact. The secret cluster is named n ~ Binomial(t, p) times. It wins with probability
    sum_a P(a of the others fewer than n times, the rest at most n times) / clusters, averaged over the order of breaking ties.

    Args:
        epsilon: Epsilon of one choice, >= 0.
        clusters: Number of clusters, >= 1.
        rounds: Number of choices, >= 0.

    Returns:
        Probability after each number of choices, of length `rounds`.

    Raises:
        ValueError: If an argument is out of range.
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
    """P(n votes win, ties broken uniformly, against `others` that share r votes uniformly), (rounds + 1,) over r."""
    chance = np.zeros(rounds + 1)
    fewer = np.eye(1, rounds + 1)[0]  # each of the first `a` others has fewer than n votes
    for a in range(others + 1):
        level = fewer
        for c in range(a + 1, others + 1):
            level = _with_another(level, c, n)
        chance += level / (others + 1)
        fewer = _with_another(fewer, a + 1, n - 1)
    return chance


def _with_another(chance: np.ndarray, c: int, most: int) -> np.ndarray:
    """Extend P(c - 1 clusters share r votes within their limits) to c, the new one with at most `most`; r = 0..len - 1."""
    own = _shares(c, len(chance))[:, : max(0, most + 1)]
    r, i = np.indices(own.shape)
    extended: np.ndarray = (own * chance[r - i]).sum(axis=1)  # own is 0 where i > r
    return extended


@lru_cache(maxsize=128)
def _shares(c: int, size: int) -> np.ndarray:
    """Binomial(i; r, 1 / c) at [r, i] for r, i < size: number of votes, of r, for one of c clusters."""
    from scipy.stats import binom

    draws = np.arange(size)
    shares: np.ndarray = binom.pmf(draws[None, :], draws[:, None], 1 / c)
    return shares


# ---- the server's guess


def votes_after(choices: Sequence[int], clusters: int) -> np.ndarray:
    """Count how often each cluster was named in the first 1..T choices.

    Args:
        choices: Named clusters, of length T.
        clusters: Number of clusters.

    Returns:
        Counts, (T, clusters) int64.
    """
    return np.cumsum(np.eye(clusters, dtype=np.int64)[np.asarray(choices, np.int64)], axis=0)


def posterior(votes: np.ndarray, epsilon: float) -> np.ndarray:
    """Posterior over clusters, proportional to e^(epsilon votes).

    Assumes a uniform prior, and choices that name the secret cluster e^epsilon times as often as each other one.

    Args:
        votes: Counts, (..., clusters).
        epsilon: Epsilon of one choice.

    Returns:
        Probabilities, (..., clusters).
    """
    weights = np.exp(epsilon * (votes - votes.max(axis=-1, keepdims=True)))
    probabilities: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def credit(votes: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Probability that the cluster named most often, ties broken uniformly, is the true one.

    Args:
        votes: Counts, (..., clusters).
        truth: True clusters, (...).

    Returns:
        Probabilities, (...).
    """
    winners = votes == votes.max(axis=-1, keepdims=True)
    hit = np.take_along_axis(winners, truth[..., None], axis=-1)[..., 0]
    return hit / winners.sum(axis=-1)


def predicted(scores: np.ndarray, eta: float, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate the probability of a correct guess for the exponential mechanism on given scores, over REPETITIONS draws.

    Args:
        scores: Scores of each choice, (T, clusters).
        eta: Epsilon per unit of score.
        truth: Best cluster of each choice, (T,).
        rng: Random generator.

    Returns:
        Probability after each number of choices, (T,).
    """
    noise = rng.gumbel(size=(REPETITIONS, *scores.shape))
    named = np.argmax(eta * (scores - scores.max(axis=1, keepdims=True)) + noise, axis=2)
    votes = np.cumsum(named[..., None] == np.arange(scores.shape[1]), axis=1)
    probability: np.ndarray = credit(votes, np.broadcast_to(truth, named.shape)).mean(axis=0)
    return probability


# ---- a recorded run


@dataclass(frozen=True)
class History:
    """Choices of one client.

    Attributes:
        client: Number of the client.
        rounds: Round of each choice.
        choices: Cluster named in each round.
        models: Hash of the models that each choice was made from.
    """

    client: int
    rounds: list[int]
    choices: list[int]
    models: list[str]


@dataclass(frozen=True)
class Recording:
    """All choices of a run, as the server received them.

    Attributes:
        folder: Run folder.
        job: The run's job.
        histories: Choices by client.
        models: Cluster models by hash, (M, p) each.
        eta: Epsilon of the mechanism per record; None if choices are raw.
    """

    folder: Path
    job: Job
    histories: list[History]
    models: dict[str, np.ndarray]
    eta: float | None

    @cached_property
    def clusters(self) -> int:
        """Number of models to choose from, M."""
        return max(len(models) for models in self.models.values())

    @property
    def name(self) -> str:
        return f"{self.job.protocol.name} ({self.job.protocol.algorithm})"


def read_choices(folder: Path) -> Recording:
    """Read every released choice from the transcript of a run.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: If there is no full transcript, or no choice in it.
    """
    job = read_run_job(folder)
    algorithm = job.algorithm
    asking = {name: step.charges for name, step in client_steps(algorithm).items() if "choice" in step.gives}
    path = RunFolder(folder).transcript
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name}: record the run with output.transcript=full")
    asked: dict[str, str] = {}
    models: dict[str, np.ndarray] = {}
    released: dict[tuple[int, int], tuple[int, str]] = {}
    for record, header, tensors in decoded_messages(path, algorithm):
        if header.task not in asking or (header.chunks and tensors is None):
            continue
        if header.kind == "TASK" and tensors is not None:
            asked[header.id] = header.sha256
            models.setdefault(header.sha256, tensors["models"])
        elif header.code == "release" and tensors is not None and header.parent in asked:
            client, hashed = int(record.peer.removeprefix("client ")), asked[header.parent]
            if 0 <= int(tensors["choice"]) < len(models[hashed]):  # a malicious client may name any number
                released.setdefault((client, header.round), (int(tensors["choice"]), hashed))
    if not released:
        why = "it has no such client step" if not asking else "the transcript must be full: output.transcript=full"
        raise ConfigError(f"{folder} holds no choice of a cluster by algorithm {job.protocol.algorithm}: {why}")
    slots = {slot.name: slot for entry in job.protocol.roster for slot in algorithm.plan(entry)}
    chosen = [slots[name] for charges in asking.values() for name in charges if name in slots]
    eta = next((slot.eta for slot in chosen if isinstance(slot, SelectionSlot)), None)
    if eta is None and not any(isinstance(slot, UnprotectedSlot) for slot in chosen):
        raise ConfigError(f"{folder}: the plan of {job.protocol.algorithm} holds no selection mechanism")
    return Recording(folder, job, _by_client(released), models, eta)


def _by_client(released: Mapping[tuple[int, int], tuple[int, str]]) -> list[History]:
    histories = []
    for client in sorted({client for client, _ in released}):
        rounds = sorted(t for i, t in released if i == client)
        answers = [released[client, t] for t in rounds]
        histories.append(History(client, rounds, [choice for choice, _ in answers], [hashed for _, hashed in answers]))
    return histories


def true_scores(recording: Recording, root: str | None = None) -> list[np.ndarray]:
    """Score the models of every choice on the client's own records.

    This is the experimenter's ground truth, unknown to the server. Scores are those of the client: the number of correctly
    classified records or, for raw choices, the negative mean loss.

    Args:
        recording: Choices of a run.
        root: Folder of the data sets.

    Returns:
        Scores of each client, (T, M) float64; -inf for a model that did not exist.

    Raises:
        DataMissing: If the data set is not available.
    """
    import torch

    from dpcfl_net.data.partition import open_client
    from dpcfl_net.federation.client import Engine

    torch.set_num_threads(1)
    engine, by_client = Engine.of(recording.job.protocol), []
    for history in recording.histories:
        data = open_client(*client_slice(recording.job, history.client, root), root)
        by_model = {hashed: np.full(recording.clusters, -np.inf) for hashed in dict.fromkeys(history.models)}
        for hashed, scores in by_model.items():
            models = recording.models[hashed]
            if recording.eta is None:
                scores[: len(models)] = -engine.sgd.mean_losses(models, data)
            else:
                scores[: len(models)] = [engine.evaluator.count_correct(model, data) for model in models]
        by_client.append(np.stack([by_model[hashed] for hashed in history.models]))
    return by_client


@dataclass(frozen=True)
class Curves:
    """Probability of a correct guess after 1..T choices, averaged over clients.

    Attributes:
        clients: Number of clients with that many choices.
        measured: In this run.
        predicted: Of the mechanism on the clients' scores; 1 for raw choices.
        at_most: Bound for epsilon = eta N, where all records of a client decide; 1 for raw choices.
        one_record: Bound for epsilon = eta, where one record decides; 1 for raw choices.
        agreement: Adjusted Rand index between all guesses and the true clusters.
    """

    clients: list[int]
    measured: list[float]
    predicted: list[float]
    at_most: list[float]
    one_record: list[float]
    agreement: list[float]


def curves(recording: Recording, scores: Sequence[np.ndarray], seed: int = 0) -> Curves:
    """Attack every client of a recording.

    Args:
        recording: Choices of a run.
        scores: Ground truth from `true_scores`.
        seed: Seed of the simulation behind `predicted`.
    """
    from dpcfl_net.clustering.metrics import adjusted_rand_index

    k, eta, rng = recording.clusters, recording.eta, np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {"measured": [], "predicted": [], "at_most": [], "one_record": []}
    guesses: list[np.ndarray] = []
    for history, own in zip(recording.histories, scores, strict=True):
        truth, length = own.argmax(axis=1), len(history.choices)
        votes = _votes(recording, history)
        rows["measured"].append(list(credit(votes, truth)))
        rows["predicted"].append(np.ones(length) if eta is None else predicted(own, eta, truth, rng))
        records = recording.job.protocol.client(history.client).records
        rows["at_most"].append(np.ones(length) if eta is None else right_after(eta * records, k, length))
        rows["one_record"].append(np.ones(length) if eta is None else right_after(eta, k, length))
        guesses.append(votes.argmax(axis=1))
    lengths = [len(history.choices) for history in recording.histories]
    steps = range(max(lengths))
    true = [recording.job.experiment.true_clusters[history.client] for history in recording.histories]
    agreement = [
        adjusted_rand_index(true, [int(guess[min(t, n - 1)]) for guess, n in zip(guesses, lengths, strict=True)]) for t in steps
    ]
    means = {name: [float(np.mean([row[t] for row in each if t < len(row)])) for t in steps] for name, each in rows.items()}
    return Curves([sum(n > t for n in lengths) for t in steps], **means, agreement=agreement)


def _votes(recording: Recording, history: History) -> np.ndarray:
    """Votes for the guess after each choice: all choices so far or, for raw choices, only the latest."""
    if recording.eta is None:
        return np.eye(recording.clusters, dtype=np.int64)[history.choices]
    return votes_after(history.choices, recording.clusters)


# ---- the result


def attack(folder: Path, against: Path | None = None, root: str | None = None) -> AttackResult:
    """Attack a recorded run and, for comparison, a second one.

    Args:
        folder: Run folder.
        against: Second run folder.
        root: Folder of the data sets.

    Returns:
        The result with a table and a figure.

    Raises:
        ConfigError: As `read_choices`.
        DataMissing: If the data set, the ground truth, is not available.
    """
    recording = read_choices(folder)
    scores = true_scores(recording, root)
    own = curves(recording, scores)
    other = None if against is None else read_choices(against)
    theirs = None if other is None else curves(other, true_scores(other, root))
    sentences = _sentences(recording, own)
    if other is not None and theirs is not None:
        sentences.append(f"{other.name}, for comparison: {_measured(other, theirs)}.")
    columns, rows = _table(recording, own, other, theirs)
    return AttackResult(
        name="selections",
        title="What cluster choices reveal to the server",
        headline=f"{recording.name}: {_measured(recording, own)}; by chance {1 / recording.clusters:.0%}.",
        sentences=sentences,
        columns=columns,
        rows=rows,
        figure=_figure(recording, own, other, theirs),
        caption="Guess: the model that a client named most often. Correct: the model that is best on the client's own records.",
        facts={
            "run": recording.name, "eta": recording.eta, "clusters": recording.clusters, **vars(own),
            "clients_seen": _clients(recording, scores),
            "against": None if other is None or theirs is None else {"run": other.name, "eta": other.eta, **vars(theirs)},
        },
    )  # fmt: skip


def _measured(recording: Recording, result: Curves) -> str:
    count, how = len(result.measured), "raw" if recording.eta is None else "private"
    after = f"after one {how} choice each"
    if count > 1:
        after += f", of {result.measured[-1]:.0%} after {count}"
    return f"the server correctly guesses the nearest model of {result.measured[0]:.0%} of the clients {after}"


def _sentences(recording: Recording, own: Curves) -> list[str]:
    count, eta = len(own.measured), recording.eta
    agreement = (
        f"Guesses against the true clusters: adjusted Rand index {own.agreement[0]:.2f} after one choice and "
        f"{own.agreement[-1]:.2f} after {count} (1: the same partition, 0: chance)."
    )
    updates = "Information about clusters in the updates themselves is not counted here."
    if eta is None:
        return ["Each choice is sent raw, so it is the answer for its round.", agreement, updates]
    records = [recording.job.protocol.client(history.client).records for history in recording.histories]
    many = f"{min(records)}" if min(records) == max(records) else f"{min(records)} to {max(records)}"
    return [
        f"Each choice is made by the exponential mechanism with eta = {eta:.4g} per record. This protects one record: a "
        f"secret that one record decides is guessed correctly with probability at most {own.one_record[-1]:.2f} after {count} choices.",
        f"A client's cluster is not such a secret, since all its {many} records contribute to it. Its bound is that of epsilon "
        f"{eta * min(records):.4g} per choice: {own.at_most[0]:.2f} after one and {own.at_most[-1]:.2f} after {count}. "
        f"Expected from the clients' real scores: {own.predicted[0]:.2f} and {own.predicted[-1]:.2f}.",
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
    layout = {"xaxis": axis("choices per client"), "yaxis": axis("guessed correctly", range=[0, 1.03])}
    return spec(traces, 360, **layout)


def _trace(name: str, y: Sequence[float], line: dict[str, Any], mode: str = "lines") -> dict[str, Any]:
    x = list(range(1, len(y) + 1))
    shown = f"{name}, %{{x}} choices: %{{y:.3f}}<extra></extra>"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": list(y), "line": line, "hovertemplate": shown}


def _clients(recording: Recording, scores: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Machine-readable facts of each client: its choices, the server's posterior, and the ground truth."""
    clients = []
    for history, own in zip(recording.histories, scores, strict=True):
        records = recording.job.protocol.client(history.client).records
        votes = _votes(recording, history)[-1]
        epsilon = math.inf if recording.eta is None else recording.eta * records
        belief = votes.astype(float) if math.isinf(epsilon) else posterior(votes, epsilon)
        clients.append({
            "client": history.client, "true_cluster": recording.job.experiment.true_clusters[history.client],
            "choices": history.choices, "named": dict(sorted(Counter(history.choices).items())),
            "posterior": [float(value) for value in belief], "nearest": [int(best) for best in own.argmax(axis=1)],
        })  # fmt: skip
    return clients
