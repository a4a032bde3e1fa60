"""Membership inference across rounds (FedMIA): which records a client trained on, from all clients' recorded updates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from dpcfl_net.attacks.membership_page import page
from dpcfl_net.attacks.membership_scores import REFERENCES, Scored, curve, log_tail
from dpcfl_net.attacks.updates import Update, read_updates
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.data.records import ClientData
from dpcfl_net.experiment.job_files import Job, client_records
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import data_root, read_run_job

RECORDS = 100  # candidate members of each client by default, and as many non-members
CHUNK = 64  # records whose gradients are held at once

Measure = Literal["cosine", "loss"]
Gradients = Callable[[torch.Tensor, torch.Tensor], np.ndarray]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Records whose membership in one client's training data is inferred.

    Attributes:
        x: Model inputs, (n, *input shape) float32.
        y: Labels, (n,) int64.
        members: Number of members; they come first.
    """

    x: torch.Tensor
    y: torch.Tensor
    members: int


def attack(folder: Path, measure: Measure = "cosine", records: int = RECORDS, root: Path | str | None = None) -> AttackResult:
    """Infer the membership of records of every client of a run.

    For each round and record, the server measures the record against the target's update: cosine similarity between the record's
    gradient and the update, or the negative loss of the record after the update. The same measure against the updates of the
    clients that started from the same model shows its distribution for non-members ("all for one"). The log-likelihood ratios
    of all rounds are added. Members are training records of the target, non-members test records with the same
    transformation, which no client trained on; only the experimenter knows which is which.

    Args:
        folder: Run folder.
        measure: "cosine" or "loss".
        records: Largest number of members, and of non-members, of each client.
        root: Folder of the data sets; None: that of the run.

    Returns:
        The result with AUC, true positive rates at low false positive rates, and a ROC curve.

    Raises:
        ConfigError: If there is no full transcript, the model is not a classifier, or no round has enough clients that started
            from one model.
        DataMissing: If the data set, the ground truth, is not available.

    Source: Zhu, Li, Gu, Yao, Fan, Han, "FedMIA: an effective membership inference attack exploiting 'all for one' principle in
    federated learning", CVPR 2025.
    """
    job = read_run_job(folder)
    protocol = job.protocol
    if protocol.model.task != "classification":
        raise ConfigError(f"model {protocol.model.name!r} of task {protocol.model.task}: must be a classifier")
    torch.set_num_threads(1)
    updates = read_updates(folder, job, protocol.rounds)
    candidates = candidates_of(job, list(updates), records, data_root(folder, root))
    found, rounds = totals(protocol, updates, candidates, measure)
    if not found:
        why = f"must be at least {REFERENCES + 1} that started from one model"
        raise ConfigError(f"{folder}: no round has updates of enough clients: {why}")
    scored = split(found, candidates)
    return page(protocol, curve(scored), scored, rounds, replace_one_epsilon(job, found), measure)


def candidates_of(job: Job, clients: list[int], records: int, root: str | None) -> dict[int, Candidates]:
    """Load members and non-members of each client from the experimenter's ground truth.

    Both are drawn at random: with label skew, records are ordered by label, and the first ones of two sets of different size
    have different labels, which the updates show. The attack would be scored on labels instead of membership.

    Args:
        job: The run's job.
        clients: Numbers of the clients.
        records: Largest number of members, and of non-members, of each client.
        root: Folder of the data sets.

    Raises:
        DataMissing: If the data set is not available.
    """
    found = {}
    for client in clients:
        rng = np.random.default_rng([client, records])
        inside = _drawn(client_records(job, client, root, "train"), records, rng)
        outside = _drawn(client_records(job, client, root, "test"), records, rng)
        found[client] = Candidates(torch.cat([inside[0], outside[0]]), torch.cat([inside[1], outside[1]]), len(inside[1]))
    return found


def _drawn(data: ClientData, records: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rng.permutation(len(data))[:records]
    return data.batch(rows, len(rows))


def totals(
    protocol: Protocol, updates: Mapping[int, list[Update]], candidates: Mapping[int, Candidates], measure: Measure
) -> tuple[dict[int, np.ndarray], int]:
    """Add up the log-likelihood ratios of each client's candidates over rounds.

    Args:
        protocol: Protocol of the run.
        updates: Updates by client, in order of rounds.
        candidates: Records of each client.
        measure: "cosine" or "loss".

    Returns:
        Client to its sums, (n,), for clients with a round that has enough others; and the number of rounds used.
    """
    found: dict[int, np.ndarray] = {}
    rounds: set[int] = set()
    for together in _from_one_model(updates):
        rounds |= {update.round for update in together}
        own = [candidates[update.client] for update in together]
        ends = np.cumsum([len(each.y) for each in own])[:-1]
        values = _measured(
            protocol, torch.cat([each.x for each in own]), torch.cat([each.y for each in own]), together, measure
        )
        for place, (target, scores) in enumerate(zip(together, np.split(values, ends, axis=1), strict=True)):
            tail = log_tail(scores[place], np.delete(scores, place, axis=0))
            found[target.client] = found.get(target.client, 0.0) + tail
    return found, len(rounds)


def _from_one_model(updates: Mapping[int, list[Update]]) -> Iterator[list[Update]]:
    """Groups of updates that started from one model, one of each client, each of enough clients.

    They may have different rounds: those of an asynchronous run count the participations of a client.
    """
    groups: dict[tuple[bytes, int], list[Update]] = defaultdict(list)
    for own in updates.values():
        earlier = Counter[bytes]()
        for update in own:
            start = update.model.tobytes()
            groups[start, earlier[start]].append(update)
            earlier[start] += 1
    for together in sorted(groups.values(), key=lambda group: min(update.round for update in group)):
        if len(together) > REFERENCES:
            yield together


def _measured(protocol: Protocol, x: torch.Tensor, y: torch.Tensor, together: list[Update], measure: Measure) -> np.ndarray:
    """Measure of each record (columns) against each update (rows); larger for members."""
    if measure == "loss":
        return np.stack([-_losses(protocol.model, update.model + update.change, x, y) for update in together])
    directions = np.stack([update.gradient(protocol.local) for update in together]).astype(np.float64)
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), 1e-30)
    gradients, parts = _gradients(protocol.model, together[0].model), []
    for records, labels in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        rows = gradients(records, labels)
        parts.append(directions @ (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)).T)
    return np.concatenate(parts, axis=1)


def _gradients(template: ModelTemplate, model: np.ndarray) -> Gradients:
    """Function of x (n, *input shape) and y (n,) to the gradients of cross-entropy at one model, (n, p) float64."""
    from dpcfl_net.training.models import module_of

    module = module_of(template, model)
    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(module, weights, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    return lambda x, y: torch.cat([part.flatten(1) for part in each(parameters, x, y).values()], 1).double().numpy()


def _losses(template: ModelTemplate, model: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    from dpcfl_net.training.models import module_of

    with torch.no_grad():
        losses = cross_entropy(module_of(template, model)(x), y, reduction="none")
    return losses.double().numpy()


def split(found: Mapping[int, np.ndarray], candidates: Mapping[int, Candidates]) -> list[Scored]:
    """Split the sums of each client into those of members and of non-members.

    Args:
        found: Sums of `totals`.
        candidates: Records of each client.
    """
    return [Scored(i, found[i][: candidates[i].members], found[i][candidates[i].members :]) for i in sorted(found)]


def replace_one_epsilon(job: Job, clients: Iterable[int]) -> float:
    """Compute the largest epsilon of clients under replace-one adjacency, which limits this attack.

    A client without the record holds another one in its place, so that members and non-members differ by a replacement.

    Args:
        job: The run's job.
        clients: Numbers of the clients.

    Returns:
        Epsilon of the whole plan; inf if a release has no guarantee against the server.
    """
    plans = {}
    for client in clients:
        entry = job.protocol.client(client)
        events = [slot.event(entry.noise_multiplier, "replace-one") for slot in job.algorithm.plan(entry)]
        plans[repr(events)] = events
    return max(epsilon(events, job.protocol.accounted_delta, "replace-one") for events in plans.values())
