"""The NaN oracle on a recorded run: was the record in the batches of this update? Answered without noise, unless it is removed.

The server sent weights under which one record's loss is not a number (nan_probe.py). Where such a record goes into the clipped
sum, the update is not finite, whatever the noise: one exact bit an update, which no epsilon counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.attacks.nan_probe import NanProbe, NanProbeOnOpacus
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.federation.client import slot_key
from dpcfl_net.federation.gate import seeded_key
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import read_run_job
from dpcfl_net.transport import transcript

NAME = "nan-oracle"
KIND = "train"


@dataclass(frozen=True)
class Reading:
    """One recorded update: whether it was finite, and whether the record was in one of its batches, as only the experimenter knows."""

    client: int
    round: int
    finite: bool
    present: bool

    @property
    def right(self) -> bool:
        """Whether "not finite: it was there" is the truth."""
        return self.finite != self.present


def attack(run: Path) -> AttackResult:
    """Read every update of the run's transcript and hold the answers against the truth, out of the experiment's seed.

    ConfigError for a run that cannot be read so: no crafted weights, no full transcript, or batches that nobody can know again.
    """
    job = read_run_job(run)
    if not isinstance(job.algorithm, NanProbe):
        raise ConfigError(
            f"{run} is of {job.protocol.algorithm}, whose server sends no crafted weights: record one with "
            "dpcfl run configs/threats/nan_oracle.yaml"
        )
    if job.experiment.noise_seed is None:
        raise ConfigError(
            f"{run} has privacy.noise 'os', so nobody knows which records its batches held: record it with 'seeded'"
        )
    settings = configuration.load(run / "config.yaml")
    if settings.output.transcript != "full":
        raise ConfigError(f"{run} has output.transcript {settings.output.transcript!r}: the updates are in a full one alone")
    held = {entry.id: positions(job, entry.id, settings.data.root) for entry in job.protocol.roster}
    truth = {client: presence(job, client, own) for client, own in held.items()}
    readings = [Reading(client, t, finite, truth[client][t - 1]) for (client, t), finite in sorted(updates(run).items())]
    if not readings:
        raise ConfigError(f"{run} holds no update yet")
    return result(job, readings, [client for client, own in held.items() if len(own)])


def updates(run: Path) -> dict[tuple[int, int], bool]:
    """(client, round) of every update that the server was sent, and whether it is finite."""
    found = {}
    for record, header, tensors in transcript.messages(run / "transcript.msgpack"):
        if (record.direction, header.kind, header.code, header.task) == ("up", "RESULT", "release", KIND):
            found[int(record.peer.removeprefix("client ")), header.round] = tensors is not None
    return found


def positions(job: Job, client: int, root: str | None) -> np.ndarray:
    """Where among the client's records the one is that the server knows, as it knows it: none or one whole number."""
    options = job.algorithm.options
    settings, piece = client_slice(job, client, root)
    if settings.dataset != options.dataset or piece.quarter_turns:
        return np.empty(0, np.int64)
    return np.flatnonzero(piece.train_rows == options.row)


def presence(job: Job, client: int, held: np.ndarray) -> list[bool]:
    """For each round whether one of the records `held` was in its batches: drawn again from the keys of a seeded run."""
    from dpcfl_net.training.dpsgd import poisson_rows

    entry, bundle = job.protocol.client(client), job.algorithm.client_steps()[KIND].bundle
    slot = next(slot for slot in job.algorithm.plan(entry) if isinstance(slot, DPSGDSlot))
    seed, found = bytes.fromhex(job.experiment.noise_seed or ""), []
    for t in range(1, job.protocol.rounds + 1):
        key = slot_key(seeded_key(seed, client, t, KIND, bundle), slot.name)
        batches = stream(key, "batches")
        drawn = [poisson_rows(entry.records, slot.rate, batches) for _ in range(slot.steps)]
        found.append(bool(np.isin(held, np.concatenate(drawn)).any()))
    return found


def result(job: Job, readings: list[Reading], holders: list[int]) -> AttackResult:
    """What the readings say, in words and as a table of clients."""
    options, undefended = job.algorithm.options, isinstance(job.algorithm, NanProbeOnOpacus)
    present = sum(reading.present for reading in readings)
    strange = sum(not reading.finite for reading in readings)
    right = sum(reading.right for reading in readings)
    blind = max(present, len(readings) - present)
    caught = sum(reading.present and not reading.finite for reading in readings)
    sentences = [
        f"The server knew row {options.row} of {options.dataset} and sent {len(job.protocol.roster)} clients, round after round, "
        "finite weights under which that record's loss is not a number.",
        f"Of {len(readings)} recorded updates {present} were trained on batches with the record. Not finite: {strange}, "
        f"of which {caught} were trained with it and {strange - caught} without.",
        f"Read as 'not finite: it was there', the answer is right {right} times; the commoner answer, always given, {blind} times.",
        "The clients clip as Opacus 1.6 does: these are exact bits, and no epsilon counts them."
        if undefended
        else "The clients take such a record out by selection before they clip: there is nothing to read.",
    ]
    rows = []
    for client in sorted({reading.client for reading in readings}):
        own = [reading for reading in readings if reading.client == client]
        rows.append([
            str(client), "yes" if client in holders else "no", str(len(own)), str(sum(reading.present for reading in own)),
            str(sum(not reading.finite for reading in own)), f"{sum(reading.right for reading in own)}/{len(own)}",
        ])  # fmt: skip
    return AttackResult(
        name=NAME,
        title="The NaN oracle: is a known record in a client's batches?",
        headline=f"{right} of {len(readings)} answers right ({blind} without looking): {strange} updates not finite, {present} with the record",
        sentences=sentences,
        columns=["client", "holds it", "updates", "with the record", "not finite", "read right"],
        rows=rows,
        facts={
            "undefended": undefended, "updates": len(readings), "present": present, "not_finite": strange, "right": right,
            "blind": blind, "true_positives": caught, "false_positives": strange - caught, "holders": holders,
        },
    )  # fmt: skip
