"""Infers clients' clusters from repeated private selections: measured, predicted and bounded accuracy of the server's guess."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.attacks.recorded_choices import History, Recording, read_choices, true_scores
from dpcfl_net.attacks.selection_guess import credit, posterior, predicted, right_after, votes_after
from dpcfl_net.report.figures import axis, colour, spec
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import data_root

SHOWN = (1, 2, 5, 10, 20, 50, 100)  # numbers of choices with a row in the table


@dataclass(frozen=True)
class Curves:
    """Probability of a correct guess after 1..T choices, averaged over clients.

    Attributes:
        clients: Number of clients with that many choices.
        measured: In this run.
        predicted: Of the mechanism on the clients' scores; 1 for raw choices.
        at_most: Bound of this guess for epsilon = eta N, where all records of a client decide; 1 for raw choices.
        one_record: Bound of this guess for epsilon = eta, where one record decides; 1 for raw choices.
        agreement: Adjusted Rand index between all guesses and the true clusters.
    """

    clients: list[int]
    measured: list[float]
    predicted: list[float]
    at_most: list[float]
    one_record: list[float]
    agreement: list[float]


def curves(recording: Recording, scores: Sequence[np.ndarray]) -> Curves:
    """Attack every client of a recording.

    Args:
        recording: Choices of a run.
        scores: Ground truth from `true_scores`.
    """
    from dpcfl_net.clustering.metrics import adjusted_rand_index

    k, rng = recording.clusters, np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"measured": [], "predicted": [], "at_most": [], "one_record": []}
    guesses: list[np.ndarray] = []
    for history, own in zip(recording.histories, scores, strict=True):
        truth, length, eta = own.argmax(axis=1), len(history.choices), history.eta
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
    if history.eta is None:
        return np.eye(recording.clusters, dtype=np.int64)[history.choices]
    return votes_after(history.choices, recording.clusters)


def attack(folder: Path, against: Path | None = None, root: Path | str | None = None) -> AttackResult:
    """Attack a recorded run and, for comparison, a second one.

    Args:
        folder: Run folder.
        against: Second run folder.
        root: Folder of the data sets; None: that of the run.

    Returns:
        The result with a table and a figure.

    Raises:
        ConfigError: As `read_choices`.
        DataMissing: If the data set, the ground truth, is not available.
    """
    recording = read_choices(folder)
    scores = true_scores(recording, data_root(folder, root))
    own = curves(recording, scores)
    second: tuple[Recording, Curves] | None = None
    sentences = _sentences(recording, own)
    if against is not None:
        other = read_choices(against)
        second = other, curves(other, true_scores(other, data_root(against, root)))
        sentences.append(f"{other.name}, for comparison: {_measured(*second)}.")
    columns, rows = _table(own, second)
    return AttackResult(
        name="selections",
        title="What cluster choices reveal to the server",
        headline=f"{recording.name}: {_measured(recording, own)}; by chance {1 / recording.clusters:.0%}.",
        sentences=sentences,
        columns=columns,
        rows=rows,
        figure=_figure(recording, own, second),
        caption="Guess: the model that a client named most often. Correct: the model that is best on the client's own records.",
        facts={
            **_facts(recording, own), "clusters": recording.clusters, "clients_seen": _clients(recording, scores),
            "against": None if second is None else _facts(*second),
        },
    )  # fmt: skip


def _facts(recording: Recording, result: Curves) -> dict[str, Any]:
    return {"run": recording.name, "eta": max(recording.etas, default=None), **vars(result)}


def _measured(recording: Recording, result: Curves) -> str:
    count, how = len(result.measured), "private" if recording.etas else "raw"
    after = f"after one {how} choice each"
    if count > 1:
        after += f", of {result.measured[-1]:.0%} after {count}"
    if result.clients[-1] < result.clients[0]:
        after += f" ({result.clients[-1]} of {result.clients[0]} clients chose so often)"
    return f"the server correctly guesses the nearest model of {result.measured[0]:.0%} of the clients {after}"


def _sentences(recording: Recording, own: Curves) -> list[str]:
    count = len(own.measured)
    found = _first_and_last(own.agreement)
    agreement = f"Guesses against the true clusters: adjusted Rand index {found} (1: the same partition, 0: chance)."
    updates = "Information about clusters in the updates themselves is not counted here."
    if not recording.etas:
        return ["Each choice is sent raw, so it is the answer for its round.", agreement, updates]
    records = [recording.job.protocol.client(history.client).records for history in recording.histories]
    epsilons = [eta * many for eta, many in zip(recording.etas, records, strict=True)]
    one_record, equal = right_after(max(recording.etas), recording.clusters, count)[-1], min(epsilons) == max(epsilons)
    return [
        f"Each choice is made by the exponential mechanism with eta = {_range(recording.etas)} per record. This protects one record: a "
        f"secret that one record decides is guessed correctly with probability at most {one_record:.2f} after "
        f"{'one choice' if count == 1 else f'{count} choices, by counting them: a server that crafts the models may do better'}.",
        f"A client's cluster is not such a secret, since all its {_range(records, 'd')} records contribute to it. Its bound is that of epsilon "
        f"{_range(epsilons)} per choice: {_first_and_last(own.at_most)}"
        f"{'' if equal else ', means over the clients'}. "
        f"Expected from the clients' real scores: {_first_and_last(own.predicted)}.",
        agreement,
        updates,
    ]


def _first_and_last(values: Sequence[float]) -> str:
    """The values after one choice and after all of them."""
    first = f"{values[0]:.2f} after one choice"
    return first if len(values) == 1 else f"{first} and {values[-1]:.2f} after {len(values)}"


def _range(values: Sequence[float], form: str = ".4g") -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _table(own: Curves, second: tuple[Recording, Curves] | None) -> tuple[list[str], list[list[str]]]:
    columns = ["choices", "measured", "expected from the scores", "at most (epsilon = eta N)", "one record (epsilon = eta)"]
    lines = [own.measured, own.predicted, own.at_most, own.one_record]
    if second is not None:
        columns.append(f"measured, {second[0].name}")
        lines.append(second[1].measured)
    last = max(len(line) for line in lines)
    steps = sorted({*(t for t in SHOWN if t < last), last})
    return columns, [[str(t), *(f"{line[t - 1]:.3f}" if t <= len(line) else "-" for line in lines)] for t in steps]


def _figure(recording: Recording, own: Curves, second: tuple[Recording, Curves] | None) -> dict[str, Any]:
    traces = [_trace(f"measured, {recording.name}", own.measured, {"color": colour(0), "width": 2}, "lines+markers")]
    if recording.etas:
        traces += [
            _trace("expected from the scores", own.predicted, {"color": colour(0), "dash": "dot"}),
            _trace("theory, at most: all records of a client", own.at_most, {"color": colour(1), "dash": "dash"}),
            _trace("theory, at most: one record", own.one_record, {"color": colour(2), "dash": "dash"}),
        ]
    if second is not None:
        other, theirs = second
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
        epsilon = math.inf if history.eta is None else history.eta * records
        belief = votes.astype(float) if math.isinf(epsilon) else posterior(votes, epsilon)
        clients.append({
            "client": history.client, "true_cluster": recording.job.experiment.true_clusters[history.client],
            "eta": history.eta, "choices": history.choices, "named": dict(sorted(Counter(history.choices).items())),
            "posterior": [float(value) for value in belief], "nearest": [int(best) for best in own.argmax(axis=1)],
        })  # fmt: skip
    return clients
