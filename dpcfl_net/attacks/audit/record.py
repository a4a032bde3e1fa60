"""What a recorded run holds of its canaries: every step as the client's tap saw it, every round as the server saw it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import PROTOCOL, Protocol, digest
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.job_files import Audit, Job, read_job
from dpcfl_net.federation.canary_client import taped
from dpcfl_net.federation.client import slot_key
from dpcfl_net.federation.gate import seeded_key
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.ledger.ledger import read_ledger
from dpcfl_net.privacy.mechanisms import gaussian_on_grid
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import DPSGDSlot, Slot
from dpcfl_net.results.summary import ledger_folder
from dpcfl_net.transport import transcript


@dataclass(frozen=True)
class Training:
    """One client's DP-SGD of one task, as its ledger was charged for it."""

    client: int
    round: int
    kind: str
    bundle: tuple[str, ...]
    slot: DPSGDSlot
    noise: float  # z, of each step, in units of clip


class Record:
    """The canaries of a run folder. ConfigError if it was not audited, Refused if job or bits are not what was signed."""

    def __init__(self, folder: Path) -> None:
        if not (folder / PROTOCOL).exists():
            raise ConfigError(f"{folder} is not a run folder: it holds no {PROTOCOL}")
        self.folder = folder
        self.job: Job = read_job(folder, read_operator_key(folder / "operator.pub"))
        if self.job.experiment.audit is None:
            raise ConfigError(
                f"{folder} was not audited: its job has no canaries; record one with dpcfl run configs/threats/audit_epsilon5.yaml"
            )
        self.audit: Audit = self.job.experiment.audit
        self.protocol: Protocol = self.job.protocol
        self.canaries = self.audit.in_model(self.protocol.model.parameters)
        self.algorithm = self.job.algorithm

    def bits(self, client: int) -> np.ndarray:
        """(m,) bool: which canaries are in."""
        return self.canaries.bits(client)

    def trainings(self, client: int) -> list[Training]:
        """Every DP-SGD that the client's ledger paid for, in order."""
        slots, noise, found = self._slots(client), self._noise(client), []
        for line in self._charges(client):
            own = [slot for name in line.slots if isinstance(slot := slots[name], DPSGDSlot)]
            if len(own) > 1:
                raise ConfigError(
                    f"{self.protocol.algorithm} runs DP-SGD twice in one task: the taps do not tell which is which"
                )
            if own:
                found.append(Training(client, line.round, line.kind, tuple(line.slots), own[0], noise))
        return found

    def events(self, client: int) -> list[Event]:
        """All that the client's ledger was charged, as zero-out sees it."""
        slots, noise = self._slots(client), self._noise(client)
        return [slots[name].event(noise, "zero-out") for line in self._charges(client) for name in line.slots]

    def _slots(self, client: int) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.algorithm.plan(self.protocol.client(client))}

    def _noise(self, client: int) -> float:
        noise = self.protocol.client(client).noise_multiplier
        assert noise is not None, "a plan with DP-SGD has a noise multiplier"
        return noise

    def _charges(self, client: int) -> Iterator[Entry]:
        own = digest(self.protocol)
        return (line for line in read_ledger(ledger_folder(self.folder, client)) if line.job == own and line.events)

    def steps(self, training: Training) -> np.ndarray | None:
        """(steps, m): each step's noisy sum along each canary, in units of clip; None where nothing was taped (a crash)."""
        sums = taped(ledger_folder(self.folder, training.client), training.round, training.kind)
        if sums is not None and sums.shape != (training.slot.steps, self.audit.canaries):
            raise ConfigError(f"the tape of client {training.client}, round {training.round} has the shape {sums.shape}")
        return sums

    @property
    def why_unseen(self) -> str:
        """Why the server's view has nothing to read; empty if it has."""
        if isinstance(self.algorithm, FromModel):
            return ""
        return f"{self.protocol.algorithm} sends the server no plain sum of steps"

    def rounds(self, training: Training) -> np.ndarray | None:
        """(m,): the sum over the task's steps along each canary, from the update that the server received; None if it did not."""
        return self._updates.get((training.client, training.round, training.kind))

    @cached_property
    def _updates(self) -> dict[tuple[int, int, str], np.ndarray]:
        found = {}
        wanted = {(t.client, t.round, t.kind): t for client in self.audit.clients for t in self.trainings(client)}
        for record, header, arrays in transcript.messages(self.folder / "transcript.msgpack"):
            if (record.direction, header.kind, header.code) != ("up", "RESULT", "release"):
                continue
            key = (int(record.peer.removeprefix("client ")), header.round, header.task)
            if key not in wanted or key in found:
                continue
            if arrays is None or "update" not in arrays:
                raise ConfigError(f"the transcript holds no update of client {key[0]}, round {key[1]}: was it kept in full?")
            found[key] = self._unscaled(wanted[key], arrays["update"])
        return found

    def _unscaled(self, training: Training, update: np.ndarray) -> np.ndarray:
        """A step moves the model by -lr / (q N) times its noisy sum: (p,) to (m,), in units of clip."""
        local, records = self.protocol.local, self.protocol.client(training.client).records
        return -self.canaries.project(update) * training.slot.rate * records / (local.lr * local.clip)

    def noise(self, training: Training, seed: bytes) -> np.ndarray:
        """(steps, m): what a task's noise was along each canary, for who knows what all noise comes from; in units of clip."""
        clip, nothing = self.protocol.local.clip, np.zeros(self.protocol.model.parameters)
        key = slot_key(seeded_key(seed, training.client, training.round, training.kind, training.bundle), training.slot.name)
        draws = stream(key, "noise")
        noises = (gaussian_on_grid(nothing, training.noise * clip, draws) for _ in range(training.slot.steps))
        return np.stack([self.canaries.project(noise) / clip for noise in noises])
