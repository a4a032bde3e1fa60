"""Evaluation of a round's models: on the clients' records, on the central test set, and as clients report it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.types import Assignment
from dpcfl_net.data.central import central_slice
from dpcfl_net.data.datasets import Images
from dpcfl_net.data.partition import open_rows
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.data.slices import Slice, Split
from dpcfl_net.experiment.job_files import Job, partition
from dpcfl_net.experiment.statement import observer_assigns
from dpcfl_net.transport.observer_notes import Models, Personal

# The observer waits for figures of personal models until the server has finished so many later rounds, and some seconds more:
# rounds may be short, and a client that starts again connects to the observer after it has answered tasks.
GIVEN_UP, GIVEN_UP_S = 2, 10.0


@dataclass
class RoundFigures:
    """Figures of one round.

    Attributes:
        assignment: Cluster of each client, or None.
        accuracy: Accuracy of each client.
        loss: Mean loss of each client.
        central: Accuracy and loss on the central test set; None without one.
        reported: Clients whose figures are of a personal model that they reported; None if the sample of a round is not secret.
    """

    assignment: Assignment
    accuracy: dict[int, float] = field(default_factory=dict)
    loss: dict[int, float | None] = field(default_factory=dict)
    central: tuple[float, float] | None = None
    reported: list[int] | None = None


class TestSetEvaluator:
    """Evaluates published models on the clients' test records (`data.evaluate`) and on the central test set.

    Records are read on first use. With `data.evaluate: validation` no test record is evaluated, central ones included.

    Args:
        job: The job.
        root: Folder of the data sets; None: the usual one.
    """

    def __init__(self, job: Job, root: str | None) -> None:
        self._job, self._root, self._rows_for = job, root, job.algorithm.capabilities.rows_for

    @cached_property
    def _evaluator(self) -> Any:
        from dpcfl_net.training.dpsgd import Evaluator
        from dpcfl_net.training.models import module_of

        template = self._job.protocol.model
        return Evaluator(module_of(template), template.task, tuple(template.input_shape))

    @cached_property
    def _initial_model(self) -> np.ndarray:
        from dpcfl_net.training.models import initial_of

        return initial_of(self._job.protocol.model)

    @cached_property
    def _partition(self) -> tuple[DataSettings, Images, list[Slice]]:
        """Settings, data set, and the slice of each client."""
        settings, images, planned = partition(self._job.experiment, self._root)
        return settings, images, [planned[k] for k in self._job.experiment.slices]

    def evaluate(self, note: Models) -> RoundFigures:
        """Evaluate each client's test records on the models of its cluster.

        Args:
            note: Models and assignment of a round. A client without a cluster counts as one of the first; see `clusters_of`.

        Returns:
            The figures of all clients.
        """
        settings, _, _ = self._partition
        found = self.clusters_of(note)
        entry = RoundFigures(found)
        used: dict[tuple[int, ...], list[int]] = {}
        for client, cluster in enumerate(found):
            used.setdefault(self._rows_for(client, cluster), []).append(client)
        for rows, clients in used.items():
            self._add(entry, note.models, rows, clients)
        if settings.evaluate == "test" and settings.central_test is not None:
            entry.central = self._on_central_records(note.models, used, settings.central_test)
        return entry

    def clusters_of(self, note: Models) -> Assignment:
        """Return the cluster of each client; if the server names none, the one with the least training loss, or still none.

        No noise hides this loss, and a malicious server may name none: it is read only where the privacy statement says so.
        """
        found = list(note.assignment)
        unnamed = all(cluster is None for cluster in found)
        return self._by_loss(note.models) if unnamed and observer_assigns(self._job.algorithm) else found

    def _on_central_records(
        self, models: np.ndarray, used: Mapping[tuple[int, ...], Sequence[int]], count: int
    ) -> tuple[float, float]:
        """Mean accuracy and loss over clients, each with its model and the transformation of its true cluster."""
        totals, seed, (_, images, slices) = np.zeros(2), self._job.experiment.partition_seed, self._partition
        for rows, clients in used.items():
            chosen, base_model = _picked(models, rows)
            alike: dict[tuple[Any, ...], list[Slice]] = {}
            for piece in (slices[client] for client in clients):
                alike.setdefault((piece.source, *piece.transformation.values()), []).append(piece)
            for members in alike.values():
                data, _ = open_rows(images, [central_slice(images, members[0], count, seed)], "test")
                totals += len(members) * np.array(self._evaluator.accuracy_and_loss(chosen, data, base_model))
        accuracy, loss = totals / len(slices)
        return float(accuracy), float(loss)

    def fill(self, figures: PersonalFigures) -> RoundFigures:
        """Complete the figures of personal models.

        A client that was never drawn still uses the server's model, and one that has not joined yet the initial model.

        Args:
            figures: Figures that clients reported.

        Returns:
            The figures of all clients.
        """
        entry = RoundFigures([None] * figures.clients, dict(figures.accuracy), dict(figures.loss), reported=figures.reported)
        undrawn = [client for client in range(figures.clients) if client not in entry.accuracy]
        if undrawn:
            models = self._initial_model[None] if figures.models is None else figures.models
            self._add(entry, models, (0,), undrawn)
        return entry

    def _add(self, entry: RoundFigures, models: np.ndarray, rows: tuple[int, ...], clients: Iterable[int]) -> None:
        """Add the figures of clients on the records that the run evaluates."""
        settings, _, _ = self._partition
        for client, (losses, correct) in self._evaluate_clients(models, rows, clients, settings.evaluate):
            entry.accuracy[client], entry.loss[client] = float(correct.mean()), float(losses.mean())

    def _by_loss(self, models: np.ndarray) -> Assignment:
        """Assign each client to the cluster whose model has the least loss on its training records."""
        clients = range(len(self._job.experiment.slices))
        clusters = len(models) - self._job.algorithm.capabilities.shared_models
        if clusters == 1:
            return [0] * len(clients)
        losses = np.full((len(clients), clusters), np.inf)
        for cluster in range(clusters):
            for client, (each, _) in self._evaluate_clients(models, self._rows_for(0, cluster), clients, "train"):
                losses[client, cluster] = each.mean()
        return [int(row.argmin()) for row in losses]

    def _evaluate_clients(
        self, models: np.ndarray, rows: tuple[int, ...], clients: Iterable[int], part: Split
    ) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
        """Yield (client, (losses, correct)) over each client's records; clients of one true cluster are evaluated together."""
        _, images, slices = self._partition
        groups: dict[int, list[int]] = {}
        for client in clients:
            groups.setdefault(slices[client].cluster, []).append(client)
        chosen, base_model = _picked(models, rows)
        for members in groups.values():
            data, splits = open_rows(images, [slices[client] for client in members], part)
            losses, correct = self._evaluator.each(chosen, data, base_model)
            yield from zip(members, zip(np.split(losses, splits), np.split(correct, splits), strict=True), strict=True)


def _picked(models: np.ndarray, rows: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray | None]:
    """Model of a client, and the base model whose outputs are added, if any."""
    return models[rows[-1]], models[rows[0]] if len(rows) > 1 else None


class PersonalFigures:
    """Accuracy and loss of personal models as reported; a client without a report keeps its figures.

    A round is complete when all its clients have reported. Reports of clients that are lost never come: a round is given up
    GIVEN_UP_S after the server has finished GIVEN_UP later ones.

    Args:
        algorithm: The job's algorithm.
        clients: Number of clients.
        now: Clock, seconds.
    """

    def __init__(self, algorithm: Algorithm, clients: int, now: Callable[[], float]) -> None:
        self.clients = clients
        self.accuracy: dict[int, float] = {}
        self.loss: dict[int, float | None] = {}
        self.models: np.ndarray | None = None
        self._protocol = algorithm.protocol
        privacy = algorithm.protocol.privacy
        self._sampled = privacy.central  # the server names the clients of a round
        self._secret = privacy.central or privacy.secure  # clients that were never drawn have no personal model
        self._published: dict[int, Models] = {}
        self._reports: dict[int, dict[int, Personal]] = {}
        self._missing: dict[int, set[int]] = {}  # clients without a report, by round; computed once, since each client reports
        self._newest = self._done = 0  # newest round of the server, and last round with figures
        self._now, self._given_up = now, 0
        self._later: deque[tuple[float, int]] = deque()  # when a round and those before it are given up

    def take(self, note: Models | Personal) -> Iterator[tuple[int, PersonalFigures]]:
        """Add a message.

        Args:
            note: Models of a round, or the figures of one client.

        Yields:
            (round, self) for each round that the message completes, in order.
        """
        if isinstance(note, Models):
            if note.round > self._newest:
                self._newest = note.round
                self._later.append((self._now() + GIVEN_UP_S, note.round - GIVEN_UP))
            if self._secret and note.round > self._done:
                self._published[note.round] = note
                self._missing.pop(note.round, None)
        elif note.round > self._done and self._counts(note):
            self._reports.setdefault(note.round, {})[note.client] = note
            self._missing.get(note.round, set()).discard(note.client)
        yield from self.overdue()

    def overdue(self) -> Iterator[tuple[int, PersonalFigures]]:
        """Give up the rounds for which it has waited long enough.

        Yields:
            As `take`.
        """
        while self._later and self._later[0][0] <= self._now():
            self._given_up = self._later.popleft()[1]
        yield from self._rounds(self._given_up)

    def _counts(self, note: Personal) -> bool:
        """Return True for a report that completes its round: by a client that is there, and with figures unless samples are secret."""
        return (self._secret or note.accuracy is not None) and self._protocol.client(note.client).is_there(note.round)

    def resume(self, line: Mapping[str, Any]) -> None:
        """Continue from the last figures of an earlier observer.

        Args:
            line: Its last line in metrics.jsonl.
        """
        reported = line.get("reported", []) if self._secret else range(self.clients)
        self.accuracy = {client: line["accuracy_by_client"][client] for client in reported}
        self.loss = {client: line["loss_by_client"][client] for client in reported}
        self._done = line["round"]

    @property
    def reported(self) -> list[int] | None:
        """Clients that have reported a personal model, if samples are secret; the others still use the server's model."""
        return sorted(self.accuracy) if self._secret else None

    def rest(self) -> Iterator[tuple[int, PersonalFigures]]:
        """Give up the rounds that are not complete.

        Yields:
            As `take`.
        """
        yield from self._rounds(self._protocol.rounds)

    def unreported(self, t: int) -> list[int]:
        """List the clients of a round that have not reported it yet; none if they are unknown or the round is over.

        Args:
            t: Round.
        """
        return sorted(self._missing_in(t) or ()) if t > self._done else []

    def _rounds(self, given_up: int) -> Iterator[tuple[int, PersonalFigures]]:
        """Yield rounds in order up to the first that is neither complete nor given up."""
        for t in sorted(self._published if self._secret else self._reports):
            if t > given_up and self._missing_in(t) != set():
                return
            # Models of an earlier round are lost if a server started again before it sent them.
            for earlier in sorted(other for other in self._reports if other <= t):
                self._count(self._reports.pop(earlier).values())
            self._missing = {other: clients for other, clients in self._missing.items() if other > t}
            models = self._published.pop(t, None)
            self.models = models.models if models is not None else self.models
            self._done = t
            # Which reports an unnamed round lacks is unknown; those of the last one are the newest.
            if not self._sampled or (models is not None and models.clients is not None) or t == self._protocol.rounds:
                yield t, self

    def _count(self, reports: Iterable[Personal]) -> None:
        for personal in reports:
            if personal.accuracy is not None:
                self.accuracy[personal.client], self.loss[personal.client] = personal.accuracy, personal.loss

    def _missing_in(self, t: int) -> set[int] | None:
        """Clients of a round that have not reported it; None if a server that was started again does not name its clients."""
        if t not in self._missing and (expected := self._expected(t)) is not None:
            self._missing[t] = expected - self._reports.get(t, {}).keys()
        return self._missing.get(t)

    def _expected(self, t: int) -> set[int] | None:
        """Clients that report a round; None if the server has not named them."""
        if not self._sampled:
            return self._there(t)
        published = self._published.get(t)
        return None if published is None or published.clients is None else set(published.clients)

    def _there(self, t: int) -> set[int]:
        """Clients whose schedule has them in a round."""
        if not self._protocol.has_schedule:
            return set(self._protocol.clients)
        return {entry.id for entry in self._protocol.roster if entry.is_there(t)}
