"""The updates of a recorded run as its server has them: the model that went down, what came back, and how it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import LocalTraining
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot
from dpcfl_net.transport import transcript
from dpcfl_net.transport.messages import Header

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Update:
    """What one client answered in one round. model: (p,), what it trained from; change: (p,), what it sent; both float32.

    steps: local steps that the change is the sum of. noisy: whether the client added noise, by the signed plan.
    """

    client: int
    round: int
    model: np.ndarray
    change: np.ndarray
    steps: int
    noisy: bool

    def gradient(self, local: LocalTraining) -> np.ndarray:
        """(p,) float32, the mean gradient of the steps, exact for one: change = - lr * (gradients + weight decay * model)."""
        return -self.change / np.float32(local.lr * self.steps) - np.float32(local.weight_decay) * self.model


def read_updates(folder: Path, job: Job, rounds: int) -> dict[int, list[Update]]:
    """The updates of the first `rounds` rounds, by client and in order; ConfigError if the transcript holds none.

    An update counts if it is of the whole model and the server knows from which model it was trained.
    """
    path = folder / "transcript.msgpack"
    if not path.exists():
        raise ConfigError(f"{folder} has no transcript.msgpack: record the run with output.transcript=full")
    asked: dict[str, Tensors] = {}
    models: dict[str, Tensors] = {}
    found: dict[tuple[int, int], Update] = {}
    for client, header, tensors in _early(path, rounds):
        if header.kind == "TASK":
            # The same model goes to many clients: one copy is kept of each.
            asked[header.id] = models.setdefault(header.sha256, tensors)
        elif header.code == "release" and header.parent in asked:
            update = _update(job, client, header, asked[header.parent], tensors)
            if update is not None:
                found.setdefault((header.round, client), update)
    if not found:
        why = "it must be full (output.transcript=full), and the algorithm one whose clients send updates of a model they are sent"
        raise ConfigError(f"{folder}: no update of {job.protocol.algorithm} can be read from the transcript: {why}")
    clients = sorted({client for _, client in found})
    return {client: [found[key] for key in sorted(found) if key[1] == client] for client in clients}


def _early(path: Path, rounds: int) -> Iterator[tuple[int, Header, Tensors]]:
    """Tasks and results of the first rounds whose tensors were kept."""
    for record, header, tensors in transcript.messages(path):
        if header.kind in ("TASK", "RESULT") and header.round <= rounds and header.tensors and tensors is not None:
            yield int(record.peer.removeprefix("client ")), header, tensors


def _update(job: Job, client: int, header: Header, sent: Tensors, back: Tensors) -> Update | None:
    model, change = _trained_from(sent, back), back.get("update")
    if model is None or change is None or change.shape != model.shape or not np.isfinite(change).all():
        return None
    entry, local = job.protocol.client(client), job.protocol.local
    slots = {slot.name: slot for slot in job.algorithm.plan(entry)}
    bundle = [slots[name] for name in job.algorithm.client_steps()[header.task].bundle]
    steps = [slot.steps for slot in bundle if isinstance(slot, DPSGDSlot)]
    plain = local.epochs * -(-entry.records // local.batch_size)
    noisy = any(isinstance(slot, DPSGDSlot | GaussianSlot) for slot in bundle)
    return Update(client, header.round, model, change, steps[0] if steps else plain, noisy)


def _trained_from(sent: Tensors, back: Tensors) -> np.ndarray | None:
    """The model that a client trained: the only one it was sent, or the one that it says it chose."""
    if "model" in sent:
        return sent["model"]
    named = back.get("choice", back.get("label"))
    if "models" not in sent or named is None or not 0 <= int(named) < len(sent["models"]):
        return None
    chosen: np.ndarray = sent["models"][int(named)]
    return chosen
