"""Cluster choices of a recorded run, and the experimenter's ground truth for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.job_files import Job, client_records
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.privacy.slots import SelectionSlot, UnprotectedSlot
from dpcfl_net.results.recorded_messages import decoded_messages, transcript_of, why_no_tensors
from dpcfl_net.results.summary import read_run_job


@dataclass(frozen=True)
class History:
    """Choices of one client.

    Attributes:
        client: Number of the client.
        rounds: Round of each choice.
        choices: Cluster named in each round.
        models: Hash of the models that each choice was made from.
        eta: Epsilon of the mechanism per record of this client; None if choices are raw.
    """

    client: int
    rounds: list[int]
    choices: list[int]
    models: list[str]
    eta: float | None


@dataclass(frozen=True)
class Recording:
    """All choices of a run, as the server received them.

    Attributes:
        folder: Run folder.
        job: The run's job.
        histories: Choices by client.
        models: Cluster models by hash, (M, p) each.
    """

    folder: Path
    job: Job
    histories: list[History]
    models: dict[str, np.ndarray]

    @cached_property
    def etas(self) -> list[float]:
        """Epsilon of the mechanism per record, of each client; empty if choices are raw."""
        return [history.eta for history in self.histories if history.eta is not None]

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
    path = transcript_of(folder)
    asked: dict[str, str] = {}
    models: dict[str, np.ndarray] = {}
    released: dict[tuple[int, int], tuple[int, str]] = {}
    requested = False
    for record, header, tensors in decoded_messages(path, algorithm):
        requested = requested or header.task in asking
        if header.task not in asking or (header.chunks and tensors is None):
            continue
        if header.kind == "TASK" and tensors is not None:
            asked[header.id] = header.blake3
            models.setdefault(header.blake3, tensors["models"])
        elif record.client is not None and header.code == "release" and tensors is not None and header.parent in asked:
            client, hashed = record.client, asked[header.parent]
            if 0 <= int(tensors["choice"]) < len(models[hashed]):  # a malicious client may name any number
                released.setdefault((client, header.round), (int(tensors["choice"]), hashed))
    if not released:
        why = why_no_tensors(folder) if requested else "no client was asked for one"
        raise ConfigError(f"{folder}: no choice of a cluster by algorithm {job.protocol.algorithm} is in the transcript: {why}")
    charges = {name for step in asking.values() for name in step}
    etas = {client: _eta(job, client, charges) for client in {client for client, _ in released}}
    return Recording(folder, job, _by_client(released, etas), models)


def _eta(job: Job, client: int, charges: set[str]) -> float | None:
    """Epsilon per record of a client's choices, which `privacy.epsilon_by_client` makes its own; None if they are raw."""
    chosen = [slot for slot in job.algorithm.plan(job.protocol.client(client)) if slot.name in charges]
    eta = next((slot.eta for slot in chosen if isinstance(slot, SelectionSlot)), None)
    if eta is None and not any(isinstance(slot, UnprotectedSlot) for slot in chosen):
        raise ConfigError(f"the plan of {job.protocol.algorithm} for client {client} holds no selection mechanism")
    return eta


def _by_client(released: Mapping[tuple[int, int], tuple[int, str]], etas: Mapping[int, float | None]) -> list[History]:
    histories = []
    for client in sorted({client for client, _ in released}):
        rounds = sorted(t for i, t in released if i == client)
        answers = [released[client, t] for t in rounds]
        choices, models = [choice for choice, _ in answers], [hashed for _, hashed in answers]
        histories.append(History(client, rounds, choices, models, etas[client]))
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

    from dpcfl_net.federation.engine import Engine

    torch.set_num_threads(1)
    engine, by_client = Engine.of(recording.job.protocol), []
    for history in recording.histories:
        data = client_records(recording.job, history.client, root, "train")
        by_model = {hashed: np.full(recording.clusters, -np.inf) for hashed in dict.fromkeys(history.models)}
        for hashed, scores in by_model.items():
            models = recording.models[hashed]
            if history.eta is None:
                scores[: len(models)] = -engine.sgd.mean_losses(models, data)
            else:
                scores[: len(models)] = engine.evaluator.count_correct(models, data)
        by_client.append(np.stack([by_model[hashed] for hashed in history.models]))
    return by_client
