"""NaN oracle on a recorded run: infers whether the batches of an update contained a known record.

The server sent weights under which the loss of one record is NaN (nan_probe.py). If such a record enters the clipped sum, the
update is not finite for any noise: one exact bit per update, which epsilon does not cover.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.attacks.nan_probe import NanProbe, NanProbeOnOpacus
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.federation.capabilities import client_steps
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
    """One recorded update.

    Attributes:
        client: Number of the client.
        round: Round of the update.
        finite: True if the update is finite.
        present: Ground truth: True if the record was in one of the update's batches.
    """

    client: int
    round: int
    finite: bool
    present: bool

    @property
    def right(self) -> bool:
        """True if the guess "not finite, so present" is correct."""
        return self.finite != self.present


def attack(run: Path) -> AttackResult:
    """Read every update in a run's transcript and score the answers with the ground truth.

    The ground truth is drawn again from the noise seed of the experiment.

    Args:
        run: Run folder.

    Returns:
        The result; `facts` holds the counts.

    Raises:
        ConfigError: If the run has no crafted weights, no seeded noise, no full transcript, or no update.
        DataMissing: If the data set is not available.
    """
    job = read_run_job(run)
    if not isinstance(job.algorithm, NanProbe):
        raise ConfigError(
            f"{run} is of {job.protocol.algorithm}, whose server sends no crafted weights: record one with "
            "dpcfl run threats/nan_oracle"
        )
    if job.experiment.noise_seed is None:
        raise ConfigError(f"{run} has privacy.noise 'os', so the records of its batches are not known: record it with 'seeded'")
    settings = configuration.load(RunFolder(run).config)
    if settings.output.transcript != "full":
        raise ConfigError(f"{run} has output.transcript {settings.output.transcript!r}: only a full one holds the updates")
    held = {entry.id: positions(job, entry.id, settings.data.root) for entry in job.protocol.roster}
    truth = {client: presence(job, client, own) for client, own in held.items()}
    readings = [Reading(client, t, finite, truth[client][t - 1]) for (client, t), finite in sorted(updates(run).items())]
    if not readings:
        raise ConfigError(f"{run} holds no update yet")
    return result(job, readings, [client for client, own in held.items() if len(own)])


def updates(run: Path) -> dict[tuple[int, int], bool]:
    """True for each received update that is finite, by (client, round)."""
    found = {}
    for record, header, tensors in transcript.messages(RunFolder(run).transcript):
        is_update = (record.direction, header.kind, header.code, header.task) == ("up", "RESULT", "release", KIND)
        if is_update and record.client is not None:
            found[record.client, header.round] = tensors is not None
    return found


def positions(job: Job, client: int, root: str | None) -> np.ndarray:
    """Find the known record among a client's records.

    Args:
        job: The run's job.
        client: Number of the client.
        root: Folder of the data sets.

    Returns:
        Its index, (1,) int64, or (0,) if the client does not hold it unchanged.
    """
    options = job.algorithm.options
    settings, piece = client_slice(job, client, root)
    if settings.dataset != options.dataset or piece.quarter_turns or piece.features is not None:
        return np.empty(0, np.int64)
    return np.flatnonzero(piece.train_rows == options.row)


def presence(job: Job, client: int, held: np.ndarray) -> list[bool]:
    """Draw a client's batches again from the noise seed.

    Args:
        job: The job of a seeded run.
        client: Number of the client.
        held: Indices of the known record.

    Returns:
        True for each round with one of `held` in its batches.
    """
    from dpcfl_net.training.batches import drawn_rows

    entry, charges = job.protocol.client(client), client_steps(job.algorithm)[KIND].charges
    slot = next(slot for slot in job.algorithm.plan(entry) if isinstance(slot, DPSGDSlot))
    seed, present = bytes.fromhex(job.experiment.noise_seed or ""), []
    for t in range(1, job.protocol.rounds + 1):
        key = slot_key(seeded_key(seed, client, t, KIND, charges), slot.name)
        batches = stream(key, "batches")
        drawn = list(drawn_rows(entry.records, slot, batches))
        present.append(bool(np.isin(held, np.concatenate(drawn)).any()))
    return present


def _conclusion(undefended: bool, not_finite: int, wrong: int) -> str:
    """Say what the answers show: of clients that clip as Opacus does, or of clients that remove such a record."""
    if undefended:
        exact = "each update reveals one exact bit" if not wrong else f"each update reveals one bit, wrong in {wrong} of them"
        return f"The clients clip as Opacus 1.6 does: {exact}, which epsilon does not cover."
    removed = "The clients remove such a record by selection before clipping"
    if not_finite:
        return f"{removed}, so that every update should be finite: THIS DEFENCE DID NOT HOLD."
    return f"{removed}, so there is nothing to read."


def result(job: Job, readings: list[Reading], holders: list[int]) -> AttackResult:
    """Summarise the readings as sentences and a table with a row per client."""
    options, undefended = job.algorithm.options, isinstance(job.algorithm, NanProbeOnOpacus)
    present = sum(reading.present for reading in readings)
    not_finite = sum(not reading.finite for reading in readings)
    right = sum(reading.right for reading in readings)
    baseline = max(present, len(readings) - present)
    detected = sum(reading.present and not reading.finite for reading in readings)
    sentences = [
        f"The server knew row {options.row} of {options.dataset} and sent {len(job.protocol.roster)} clients in every round "
        "finite weights under which that record's loss is NaN.",
        f"Of {len(readings)} recorded updates {present} were trained on batches with the record. Not finite: {not_finite}, "
        f"of which {detected} were trained with it and {not_finite - detected} without.",
        f"The guess 'not finite, so present' is right {right} times; the more common answer alone {baseline} times.",
        _conclusion(undefended, not_finite, len(readings) - right),
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
        headline=f"{right} of {len(readings)} answers correct ({baseline} by the more common answer): {not_finite} updates not "
        f"finite, {present} with the record",
        sentences=sentences,
        columns=["client", "holds it", "updates", "with the record", "not finite", "read correctly"],
        rows=rows,
        facts={
            "undefended": undefended, "updates": len(readings), "present": present, "not_finite": not_finite, "right": right,
            "blind": baseline, "true_positives": detected, "false_positives": not_finite - detected, "holders": holders,
        },
    )  # fmt: skip
