"""Reconstruction of clients' labels and images from recorded runs, compared with the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.attacks.inversion import MATCHED, Found, invert, psnr
from dpcfl_net.attacks.label_inference import LabelReader
from dpcfl_net.attacks.pictures import Row, grid
from dpcfl_net.attacks.updates import Update, read_updates
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.datasets import Images
from dpcfl_net.data.partition import DataSettings, Slice, open_client, open_set, plan_slices
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.claim import SEEDED
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import read_run_job

ROUNDS = 2  # rounds used if updates hold noise; without noise one is enough
RECORDS, SHOWN = 6, 6  # default number of images to search; most that are drawn

CAPTION = (
    "PSNR under each image, against the original; runs are matched by record. Images: cosine distance and total variation "
    "(Geiping, Bauermeister, Droege, Moeller 2020). Labels, the share that is read right: the last layer's gradient (Zhao, "
    "Mopuri, Bilen 2020)."
)


@dataclass(frozen=True, eq=False)
class Recording:
    """Job of a run, and the updates of its first rounds by slice, since client ids are permuted and differ between runs."""

    job: Job
    updates: dict[int, list[Update]]
    noisy: bool

    @property
    def name(self) -> str:
        return self.job.protocol.name

    @property
    def gets(self) -> str:
        """What the server receives, as text."""
        if not self.noisy:
            return "updates as they are"
        protocol = self.job.protocol
        if protocol.unprotected == [SEEDED]:
            return f"noisy updates of epsilon {protocol.privacy.epsilon:g}, if the noise were secret"
        return f"noisy updates of epsilon {'inf' if protocol.unprotected else f'{protocol.privacy.epsilon:g}'}"


@dataclass(frozen=True, eq=False)
class Truth:
    """Data set, all slices and true labels by slice; known to the experimenter only."""

    images: Images
    slices: list[Slice]
    labels: list[np.ndarray]

    def originals(self, slices: list[int]) -> np.ndarray:
        """Return the single record of each slice as its client sees it, (k, C, H, W) in [0, 1]."""
        found = [self.images.train_x[self.slices[k].train_rows[0]] for k in slices]
        return np.stack([_seen(x, self.slices[k]) for x, k in zip(found, slices, strict=True)])

    def mean_images(self, slices: list[int]) -> np.ndarray:
        """Return the mean test image as each client sees it: the guess of an attacker that knows only the data set."""
        mean = self.images.test_x.mean(axis=0)
        return np.stack([_seen(mean, self.slices[k]) for k in slices])

    def pictures(self, records: np.ndarray) -> np.ndarray:
        """Convert records from model inputs to values in [0, 1]."""
        found: np.ndarray = np.clip(records * self.images.std + self.images.mean, 0, 1)
        return found


@dataclass(frozen=True, eq=False)
class ReconstructionResult:
    """Result for one run.

    Share of all clients' records with a correct label; pictures, PSNR and distance of k images if images were searched.
    """

    recording: Recording
    labels: float
    pictures: np.ndarray | None = None
    psnr: np.ndarray | None = None
    distance: np.ndarray | None = None

    @property
    def stuck(self) -> int:
        """Number of stuck searches, among those whose distance shows it."""
        return 0 if self.recording.noisy or self.distance is None else int((self.distance > MATCHED).sum())


def attack(folder: Path, against: Path | None = None, records: int = RECORDS, root: str | None = None) -> AttackResult:
    """Infer the labels of every client and search images of clients with one record, for one run or two side by side.

    The search uses transcript and protocol only.

    Args:
        folder: Run folder.
        against: Run folder to compare with, or None.
        records: Number of images to search.
        root: Data folder; None for the default.

    Raises:
        ConfigError: If there is no full transcript, the runs have different data, the model has no last linear layer, or `records`
            is out of range.
        DataMissing: If the data set is not here.
    """
    recordings = [read_recording(path) for path in (folder, against) if path is not None]
    _same_data(recordings)
    slices = sorted(set.intersection(*(set(recording.updates) for recording in recordings)))
    if not 1 <= records <= len(slices):
        raise ConfigError(f"records is {records}: must lie in 1..{len(slices)}, the clients whose updates were recorded")
    truth = read_truth(recordings[0].job, root)
    why = next((why for recording in recordings if (why := no_image(recording)) is not None), None)
    outcomes = [_outcome(recording, truth, slices, [] if why else slices[:records]) for recording in recordings]
    return result(outcomes, truth, slices, slices[:records], why)


def read_recording(folder: Path) -> Recording:
    """Read the updates that the attack uses; ConfigError as `read_updates`."""
    job = read_run_job(folder)
    found = read_updates(folder, job, ROUNDS)
    noisy = any(update.noisy for own in found.values() for update in own)
    used = {job.experiment.slices[client]: own[: ROUNDS if noisy else 1] for client, own in found.items()}
    return Recording(job, used, noisy)


def read_truth(job: Job, root: str | None) -> Truth:
    """Load the data of a job; DataMissing if it is not here."""
    settings = DataSettings.model_validate(job.experiment.data)
    images = open_set(settings, root)
    slices = plan_slices(settings, images, job.experiment.partition_seed)
    return Truth(images, slices, [open_client(settings, piece, root).labels() for piece in slices])


def no_image(recording: Recording) -> str | None:
    """Return why images cannot be searched in a run, or None; an update must be one step on one record, an image."""
    protocol = recording.job.protocol
    most = max(entry.records for entry in protocol.roster)
    steps = max(update.steps for own in recording.updates.values() for update in own)
    shape = protocol.model.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        return f"records of shape {tuple(shape)} are no images"
    return (
        None if most == steps == 1 else f"an update of {recording.name} is of {most} records and {steps} steps, not one of each"
    )


def reconstruct(recording: Recording, slices: list[int]) -> Found:
    """Infer labels and search images, with the server's knowledge only; rows in the order of `slices`."""
    protocol, reader = recording.job.protocol, LabelReader(recording.job.protocol)
    own = [recording.updates[k] for k in slices]
    rounds = min(map(len, own))
    models = np.stack([[update.model for update in updates[:rounds]] for updates in own])
    gradients = np.stack([[update.gradient(protocol.local) for update in updates[:rounds]] for updates in own])
    labels = np.array([reader.counts(updates).argmax() for updates in own])
    return invert(protocol.model, models, gradients, labels, noisy=recording.noisy)


def _outcome(recording: Recording, truth: Truth, slices: list[int], tried: list[int]) -> ReconstructionResult:
    reader = LabelReader(recording.job.protocol)
    labels = float(np.mean([_right(truth.labels[k], reader.counts(recording.updates[k])) for k in slices]))
    if not tried:
        return ReconstructionResult(recording, labels)
    found = reconstruct(recording, tried)
    shown = truth.pictures(found.records)
    return ReconstructionResult(recording, labels, shown, psnr(shown, truth.originals(tried)), found.distance)


def _right(labels: np.ndarray, counts: np.ndarray) -> float:
    """Share of a client's records whose labels are in the estimated counts."""
    return float(np.minimum(np.bincount(labels, minlength=len(counts)), counts).sum() / len(labels))


def _seen(image: np.ndarray, piece: Slice) -> np.ndarray:
    found: np.ndarray = np.rot90(image, piece.quarter_turns, axes=(1, 2)) / 255
    return found


def _same_data(recordings: list[Recording]) -> None:
    parts = [recording.job.experiment for recording in recordings]
    for name in ("data", "partition_seed"):
        values = [getattr(part, name) for part in parts]
        if any(value != values[0] for value in values):
            raise ConfigError(f"the runs differ in {name}, so no record is in both: {values[0]} and {values[-1]}")


# ---- the result


def result(
    outcomes: list[ReconstructionResult], truth: Truth, slices: list[int], tried: list[int], why: str | None
) -> AttackResult:
    """Build the result: sentences, a table and, if images were searched, a grid."""
    classes = outcomes[0].recording.job.protocol.model.classes
    even = [np.full(classes, len(truth.labels[k]) / classes) for k in slices]
    chance = float(np.mean([_right(truth.labels[k], counts) for k, counts in zip(slices, even, strict=True)]))
    mean = None if why else psnr(truth.mean_images(tried), truth.originals(tried))
    blind = ["no run: the test images' mean, labels alike", *_psnr_cells(mean), _percent(chance)]
    return AttackResult(
        name="invert",
        title="What the server can rebuild of records",
        headline=_headline(outcomes, mean, chance),
        sentences=_sentences(outcomes, why, len(tried), _beyond(chance, len(slices))),
        columns=["run", "PSNR, dB", "least", "most", "labels"],
        rows=[*(_cells(outcome) for outcome in outcomes), blind],
        figure=None if why else _grid(outcomes, truth, tried),
        caption="" if why else CAPTION,
        facts={
            "runs": [_facts(outcome) for outcome in outcomes], "clients": len(slices), "slices": tried,
            "label_chance": chance, "mean_image_psnr": _listed(mean),
        },
    )  # fmt: skip


def _headline(outcomes: list[ReconstructionResult], mean: np.ndarray | None, chance: float) -> str:
    if mean is None:
        read = ", ".join(f"{_percent(outcome.labels)} from {outcome.recording.gets}" for outcome in outcomes)
        return f"Labels read right: {read}; {_percent(chance)} with equal counts."
    rebuilt = ", ".join(f"{_mean(outcome.psnr)} dB from {outcome.recording.gets}" for outcome in outcomes)
    return f"Images rebuilt at a PSNR of {rebuilt}; the data set's mean image, which takes no run, has {_mean(mean)} dB."


def _beyond(chance: float, clients: int) -> float:
    """Share of labels that random guessing exceeds once in 30,000 times (four deviations)."""
    return chance + 4 * math.sqrt(chance * (1 - chance) / clients)


def _sentences(outcomes: list[ReconstructionResult], why: str | None, tried: int, beyond: float) -> list[str]:
    said = [
        "The server uses what it has: the signed job, the models that it sent, the updates that came back. The experimenter's "
        "truth judges the result and is used for nothing else."
    ]
    for outcome in outcomes:
        recording = outcome.recording
        privacy = recording.job.protocol.privacy
        if privacy.trust == "trusted-server":
            said.append(
                f"{recording.name} promises epsilon {privacy.epsilon:g} for each {privacy.unit} to everybody but the server, which "
                "adds the noise itself, after it has seen every update."
            )
        if outcome.stuck:
            said.append(
                f"{recording.name}: {outcome.stuck} of {tried} searches stuck (cosine distance above {MATCHED}). That protects "
                "nobody: more starts, or a better search, may find those images."
            )
        if recording.noisy and outcome.labels > beyond:
            said.append(
                f"{recording.name}: labels are read more often than by chance in spite of the noise. Epsilon bounds what is learned "
                "of a record; only at 0 is that nothing."
            )
    if why:
        said.append(f"Images were not searched: {why}.")
    return said


def _cells(outcome: ReconstructionResult) -> list[str]:
    return [f"{outcome.recording.name}: {outcome.recording.gets}", *_psnr_cells(outcome.psnr), _percent(outcome.labels)]


def _psnr_cells(found: np.ndarray | None) -> list[str]:
    return ["–"] * 3 if found is None else [_mean(found), f"{found.min():.1f}", f"{found.max():.1f}"]


def _mean(found: np.ndarray | None) -> str:
    return "–" if found is None else f"{found.mean():.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _listed(found: np.ndarray | None) -> list[float] | None:
    return None if found is None else [float(value) for value in found]


def _facts(outcome: ReconstructionResult) -> dict[str, object]:
    recording = outcome.recording
    return {
        "name": recording.name, "noisy": recording.noisy, "rounds_used": ROUNDS if recording.noisy else 1,
        "labels_right": outcome.labels, "psnr": _listed(outcome.psnr), "distance": _listed(outcome.distance),
    }  # fmt: skip


def _grid(outcomes: list[ReconstructionResult], truth: Truth, tried: list[int]) -> dict[str, object]:
    rows = [Row("Original", truth.originals(tried)[:SHOWN], [])]
    for outcome in outcomes:
        assert outcome.pictures is not None
        assert outcome.psnr is not None
        words = [f"{value:.1f} dB" for value in outcome.psnr[:SHOWN]]
        rows.append(Row(f"Rebuilt: {outcome.recording.gets}", outcome.pictures[:SHOWN], words))
    return grid(rows)
