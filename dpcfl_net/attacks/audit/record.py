"""Canaries of a recorded run: every step as recorded by the client's tap, every round and secure sum as received by the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dpcfl_net import algorithms
from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.attacks.audit.opened_sums import OpenedSum, opened_sums
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.core.types import ClientStep
from dpcfl_net.experiment.job_files import Audit, Job, read_job
from dpcfl_net.federation.canary_client import taped
from dpcfl_net.federation.capabilities import client_steps, update_tensor
from dpcfl_net.federation.client import slot_key
from dpcfl_net.federation.gate import seeded_key
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.mechanisms import gaussian_on_grid
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.slots import DPSGDSlot, SecureSlot, Slot
from dpcfl_net.results.epsilon_spent import charges, ledger_folder
from dpcfl_net.transport import transcript


@dataclass(frozen=True)
class Training:
    """DP-SGD of one client in one task, as charged to its ledger.

    Attributes:
        client: Number of the client.
        round: Round of the task.
        kind: Kind of the task.
        charges: Names of the slots charged for the task.
        slot: The DP-SGD slot; for a secure sum, that of its one step.
        noise: Noise multiplier z of each step, in units of the clip norm.
        secure: True if the step is a secure sum over the client's cluster.
    """

    client: int
    round: int
    kind: str
    charges: tuple[str, ...]
    slot: DPSGDSlot
    noise: float
    secure: bool = False


PACKAGED = f"{algorithms.__name__}."
SECURE_SUMS = (
    "A secure sum is audited as the server learnt it: the sum of the client's cluster, opened from the transcript, with the shares of "
    "the noise of all clients in it. The claim counts T - C shares (threshold less colluders). With more survivors the noise is larger "
    "than the claim counts (noise/stated above 1), and the bound is lower. The other clients' slots were empty."
)


def audited_job(folder: Path) -> Job:
    """Read the job of an audited run.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: If the run was not audited.
        Refused: If the job or the canaries are not those that were signed.
    """
    files = RunFolder(folder)
    files.require(files.protocol)
    job = read_job(folder, read_operator_key(files.operator_key))
    if job.experiment.audit is None:
        raise ConfigError(
            f"{folder} was not audited: its job has no canaries; record one with dpcfl run threats/audit_epsilon5"
        )
    return job


def _sends_update(step: ClientStep) -> bool:
    """Return True if the release of a step has an update of all parameters."""
    name = update_tensor(step)
    return name is not None and step.gives[name].shape == ("p",)


class Record:
    """Canaries, ledgers and updates of an audited run.

    Args:
        folder: Run folder.
        job: The signed job, with an audit.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        assert self.job.experiment.audit is not None
        self.audit: Audit = self.job.experiment.audit
        self.protocol: Protocol = self.job.protocol
        self.canaries = self.audit.in_model(self.protocol.model.parameters)
        self.algorithm = self.job.algorithm

    @property
    def epsilon(self) -> float:
        """Target epsilon of the audited clients, all of which have the same."""
        return max(self.protocol.epsilon_of(self.protocol.client(client)) for client in self.audit.clients)

    @property
    def subject(self) -> str:
        """Sentence on what was audited."""
        clients, canaries = self.audit.clients, self.audit.canaries
        audited = f"client {clients[0]}" if len(clients) == 1 else f"{len(clients)} clients"
        slots = sorted({self.protocol.client(client).records for client in clients})
        ins = int(sum(self.bits(client).sum() for client in clients))
        return (
            f"The records of {audited} were canaries, not data: {canaries} in {' or '.join(map(str, slots))} slots each, {ins} of "
            f"{canaries * len(clients)} in, the rest and all other slots empty. The accuracy of this run is meaningless."
        )

    @property
    def remarks(self) -> list[str]:
        """More sentences."""
        return [SECURE_SUMS] if self.secure else []

    def bits(self, client: int) -> np.ndarray:
        """True for each of the client's canaries that is in, (m,) bool."""
        return self.canaries.bits(client)

    def trainings(self, client: int) -> list[Training]:
        """Read every DP-SGD that the client's ledger was charged for, in order.

        Args:
            client: Number of the client.

        Raises:
            ConfigError: If one task runs DP-SGD twice.
            LedgerError: If the ledger is broken.
        """
        slots, noise, found = self._slots(client), self._noise(client), []
        for line in self._charges(client):
            own = [slot for name in line.slots if isinstance(slot := slots[name], DPSGDSlot | SecureSlot)]
            if len(own) > 1:
                raise ConfigError(
                    f"{self.protocol.algorithm} runs DP-SGD twice in one task: the taps do not distinguish the two"
                )
            for slot in own:
                step = slot if isinstance(slot, DPSGDSlot) else DPSGDSlot(slot.name, slot.rate, 1)
                secure = isinstance(slot, SecureSlot)
                found.append(Training(client, line.round, line.kind, tuple(line.slots), step, noise, secure))
        return found

    def events(self, client: int) -> list[Event]:
        """Events of all charges in the client's ledger, under zero-out adjacency."""
        slots, noise = self._slots(client), self._noise(client)
        return [slots[name].event(noise, "zero-out") for line in self._charges(client) for name in line.slots]

    def _slots(self, client: int) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.algorithm.plan(self.protocol.client(client))}

    def _noise(self, client: int) -> float:
        noise = self.protocol.client(client).noise_multiplier
        assert noise is not None, "a plan with DP-SGD has a noise multiplier"
        return noise

    def _charges(self, client: int) -> list[Entry]:
        return charges(ledger_folder(self.folder, client), self.protocol)

    def steps(self, training: Training) -> np.ndarray | None:
        """Read the taped sums of one task; a secure sum is one step that the server sees, so that none is taped.

        Args:
            training: The task.

        Returns:
            Noisy sum of each step along each canary, (steps, m), in units of the clip norm; None without a tape (a crash), or if
            the secure sum was aborted.

        Raises:
            ConfigError: If the tape has another shape.
        """
        if training.secure:
            total = self.rounds(training)
            return None if total is None else total[None]
        sums = taped(ledger_folder(self.folder, training.client), training.round, training.kind)
        if sums is not None and sums.shape != (training.slot.steps, self.audit.canaries):
            raise ConfigError(f"the tape of client {training.client}, round {training.round} has the shape {sums.shape}")
        return sums

    @property
    def why_unseen(self) -> str:
        """Reason why the server's view cannot be scored; empty if it can, or if only the tapes tell (`own_steps`)."""
        if isinstance(self.algorithm, FromModel) or (self.own_steps and all(map(_sends_update, self._steps))):
            return ""
        return f"{self.protocol.algorithm} sends the server no plain sum of steps"

    @property
    def own_steps(self) -> bool:
        """True if a client step with DP-SGD is not of this package: its update may be more than the sum of the steps."""
        return any(not getattr(type(self.algorithm), step.kind).__module__.startswith(PACKAGED) for step in self._steps)

    @cached_property
    def _steps(self) -> list[ClientStep]:
        """The client steps that ran DP-SGD."""
        kinds = {training.kind for client in self.audit.clients for training in self.trainings(client) if not training.secure}
        return [step for kind, step in client_steps(self.algorithm).items() if kind in kinds]

    def rounds(self, training: Training) -> np.ndarray | None:
        """Read one task's sums from the update that the server received, or from the secure sum that it opened.

        Args:
            training: The task.

        Returns:
            Sum over the steps along each canary, (m,), in units of the clip norm; None if the server received no update, or
            opened no sum with the client's vector.

        Raises:
            ConfigError: If the transcript is not full.
        """
        if training.secure:
            opened = self.sums.get(training.round)
            return None if opened is None else self.canaries.project(opened.total) / self.protocol.local.clip
        return self._updates.get((training.client, training.round, training.kind))

    @property
    def secure(self) -> bool:
        """True if the run has secure sums."""
        return self.protocol.privacy.secure

    @property
    def only_sums(self) -> bool:
        """True if every audited training is a secure sum, so that the server sees every step."""
        return self.secure and all(training.secure for client in self.audit.clients for training in self.trainings(client))

    @cached_property
    def sums(self) -> dict[int, OpenedSum]:
        """The secure sums that hold the audited client's vector, by round."""
        (client,) = self.audit.clients
        return opened_sums(self.algorithm, client, RunFolder(self.folder).transcript)

    def rounding(self, training: Training) -> float:
        """Deviation that float32 parameters give the sum of one task, in units of the clip norm; large for small learning rates.

        Each step rounds every parameter by at most half a unit in its last place; roundings are taken as independent.
        """
        units = 2.0**-23 * self._largest_parameter * math.sqrt((training.slot.steps + 2) / 12)
        return units * self._steps_per_update(training)

    @cached_property
    def _largest_parameter(self) -> float:
        """Largest magnitude in the models that were sent and in the updates that came back."""
        messages = transcript.messages(RunFolder(self.folder).transcript)
        arrays = (array for _, _, tensors in messages for array in (tensors or {}).values())
        return max((float(np.abs(array).max(initial=0.0)) for array in arrays if array.dtype.kind == "f"), default=0.0)

    @cached_property
    def _updates(self) -> dict[tuple[int, int, str], np.ndarray]:
        found = {}
        names = {kind: update_tensor(step) for kind, step in client_steps(self.algorithm).items()}
        wanted = {
            (t.client, t.round, t.kind): t for client in self.audit.clients for t in self.trainings(client) if not t.secure
        }
        for record, header, arrays in transcript.messages(RunFolder(self.folder).transcript):
            if (record.direction, header.kind, header.code) != ("up", "RESULT", "release"):
                continue
            key = (-1 if record.client is None else record.client, header.round, header.task)
            if key not in wanted or key in found:
                continue
            update = None if arrays is None else arrays.get(names[header.task] or "")
            if update is None:
                raise ConfigError(f"the transcript holds no update of client {key[0]}, round {key[1]}: was it kept in full?")
            found[key] = self._unscaled(wanted[key], update)
        return found

    def _unscaled(self, training: Training, update: np.ndarray) -> np.ndarray:
        """Convert an update (p,) to sums (m,) in units of the clip norm; a step adds -lr / (q N) times its noisy sum."""
        return -self.canaries.project(update) * self._steps_per_update(training)

    def _steps_per_update(self, training: Training) -> float:
        local, records = self.protocol.local, self.protocol.client(training.client).records
        return training.slot.rate * records / (local.lr * local.clip)

    def noise(self, training: Training, seed: bytes) -> np.ndarray:
        """Compute a task's noise again from the noise seed.

        Args:
            training: The task; if it is a secure sum, the sum was opened.
            seed: Noise seed of the run.

        Returns:
            Noise of each step along each canary, (steps, m), in units of the clip norm.
        """
        if training.secure:
            return self._noise_of_sum(training, seed)
        clip, nothing = self.protocol.local.clip, np.zeros(self.protocol.model.parameters)
        key = slot_key(seeded_key(seed, training.client, training.round, training.kind, training.charges), training.slot.name)
        draws = NormalStream(key, "noise")
        noises = (gaussian_on_grid(nothing, training.noise * clip, draws) for _ in range(training.slot.steps))
        return np.stack([self.canaries.project(noise) / clip for noise in noises])

    def _noise_of_sum(self, training: Training, seed: bytes) -> np.ndarray:
        """All survivors' shares of a secure sum's noise, as `noise`."""
        opened = self.sums[training.round]
        keys = [seeded_key(seed, client, training.round, training.kind, training.charges) for client in opened.survivors]
        shares = np.sum([opened.code.noise_share(slot_key(key, training.slot.name)) for key in keys], axis=0)
        return self.canaries.project(shares / opened.code.scale)[None]
