"""Updates of a recorded run as the server received them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.secure_statement import has_single_releases
from dpcfl_net.federation.capabilities import client_steps, update_tensor
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot
from dpcfl_net.results.recorded_messages import decoded_messages, transcript_of, why_no_tensors
from dpcfl_net.transport.messages import Header

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Update:
    """Update of one client in one round.

    Attributes:
        client: Number of the client.
        round: Round of the update.
        model: Parameters that training started from, (p,) float32.
        change: Released update, (p,) float32.
        steps: Number of local steps.
        noisy: True if the client added noise, according to the signed plan.
    """

    client: int
    round: int
    model: np.ndarray
    change: np.ndarray
    steps: int
    noisy: bool

    def gradient(self, local: LocalTraining) -> np.ndarray:
        """Mean gradient of the steps, (p,) float32; exact for one step.

        Args:
            local: Local training of the protocol: change = - lr * (gradients + weight decay * model).
        """
        return -self.change / np.float32(local.lr * self.steps) - np.float32(local.weight_decay) * self.model


def read_updates(folder: Path, job: Job, rounds: int) -> dict[int, list[Update]]:
    """Read updates from the transcript of a run.

    Only updates of the whole model count, and only if the server knows the model that training started from.

    Args:
        folder: Run folder.
        job: The run's job.
        rounds: Number of rounds to read, from the first.

    Returns:
        Updates by client, in order of rounds.

    Raises:
        ConfigError: If there is no transcript, or no such update in it.
    """
    path = transcript_of(folder)
    asked: dict[str, Tensors] = {}
    models: dict[str, Tensors] = {}
    updates: dict[tuple[int, int], Update] = {}
    for client, header, tensors in _early(path, job, rounds):
        if header.kind == "TASK":
            # Many clients get the same model: keep one copy of each.
            asked[header.id] = models.setdefault(header.blake3, tensors)
        elif header.code == "release" and header.parent in asked:
            update = _update(job, client, header, asked[header.parent], tensors)
            if update is not None:
                updates.setdefault((header.round, client), update)
    if not updates:
        why = _without_updates(folder, job, is_full=bool(asked))
        raise ConfigError(f"{folder}: no update of {job.protocol.algorithm} can be read from the transcript: {why}")
    clients = sorted({client for _, client in updates})
    return {client: [updates[key] for key in sorted(updates) if key[1] == client] for client in clients}


def _without_updates(folder: Path, job: Job, *, is_full: bool) -> str:
    if job.protocol.privacy.secure and not has_single_releases(job.algorithm):
        return "its clients send masked vectors, of which the server learns sums only"
    return "its clients send no update of a model that they received" if is_full else why_no_tensors(folder)


def _early(path: Path, job: Job, rounds: int) -> Iterator[tuple[int, Header, Tensors]]:
    """Tasks and results of the first rounds that still have their tensors."""
    for record, header, tensors in decoded_messages(path, job.algorithm):
        client = record.client
        if client is None or header.round > rounds or header.kind not in ("TASK", "RESULT"):
            continue
        if header.tensors and tensors is not None:
            yield client, header, tensors


def _update(job: Job, client: int, header: Header, sent: Tensors, back: Tensors) -> Update | None:
    step = client_steps(job.algorithm)[header.task]
    model, change = _trained_from(sent, back), back.get(update_tensor(step) or "")
    if model is None or change is None or change.shape != model.shape or not np.isfinite(change).all():
        return None
    entry, local = job.protocol.client(client), job.protocol.local
    slots = {slot.name: slot for slot in job.algorithm.plan(entry)}
    charged = [slots[name] for name in step.charges]
    steps = [slot.steps for slot in charged if isinstance(slot, DPSGDSlot)]
    plain = local.epochs * -(-entry.records // local.batch_size)
    noisy = any(isinstance(slot, DPSGDSlot | GaussianSlot) for slot in charged)
    return Update(client, header.round, model, change, steps[0] if steps else plain, noisy)


def _trained_from(sent: Tensors, back: Tensors) -> np.ndarray | None:
    """The model that training started from: the only one sent, or the one that the client names."""
    if "model" in sent:
        return sent["model"]
    named = back.get("choice", back.get("label"))
    if "models" not in sent or named is None or not 0 <= int(named) < len(sent["models"]):
        return None
    chosen: np.ndarray = sent["models"][int(named)]
    return chosen
