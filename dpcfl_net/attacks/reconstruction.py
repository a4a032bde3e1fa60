"""Reconstructs labels and images from recorded runs and scores them against the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dpcfl_net.attacks.inversion import MATCHED, Inverted, invert, psnr
from dpcfl_net.attacks.label_inference import LabelReader
from dpcfl_net.attacks.pictures import Row, grid
from dpcfl_net.attacks.updates import Update, read_updates
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.datasets import Images
from dpcfl_net.data.partition import open_rows
from dpcfl_net.data.slices import Slice
from dpcfl_net.experiment.job_files import Job, partition
from dpcfl_net.federation.claim import SEEDED
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.summary import data_root, read_run_job

ROUNDS = 2  # first rounds used if updates are noisy; without noise one round is enough
BY_CHANCE = 1 / 30_000  # probability with which labels that were guessed are said to be read more often than by chance
RECORDS, SHOWN = 6, 6  # images reconstructed by default; maximum number of images drawn

CAPTION = (
    "PSNR under each image, against the original; runs are matched by record. Images: cosine distance and total variation "
    "(Geiping, Bauermeister, Droege, Moeller 2020). Labels, share read correctly: the last layer's gradient (Zhao, "
    "Mopuri, Bilen 2020)."
)


@dataclass(frozen=True, eq=False)
class Recording:
    """Job and first updates of a run.

    Attributes:
        job: The run's job.
        updates: Updates by slice, not by client, since client ids differ between runs.
        noisy: True if clients added noise.
    """

    job: Job
    updates: dict[int, list[Update]]
    noisy: bool

    @property
    def name(self) -> str:
        return self.job.protocol.name

    @property
    def received(self) -> str:
        """Description of the updates that the server receives."""
        if not self.noisy:
            return "raw updates"
        protocol = self.job.protocol
        targets = {protocol.epsilon_of(entry) for entry in protocol.roster}
        epsilon = " to ".join(f"{target:g}" for target in sorted({min(targets), max(targets)}))
        if protocol.unprotected == [SEEDED]:
            return f"noisy updates of epsilon {epsilon}, if the noise were secret"
        return f"noisy updates of epsilon {'inf' if protocol.unprotected else epsilon}"


@dataclass(frozen=True, eq=False)
class Truth:
    """Ground truth of the experimenter.

    Attributes:
        images: The data set.
        slices: Records of each client, by slice.
        labels: Labels of each slice's records.
    """

    images: Images
    slices: Sequence[Slice]
    labels: list[np.ndarray]

    def originals(self, slices: list[int]) -> np.ndarray:
        """The single record of each slice as the client's model sees it, (k, C, H, W) in [0, 1]."""
        pieces = [self.slices[k] for k in slices]
        records = [self.images.of(piece.source).train_x[piece.train_rows[0]] for piece in pieces]
        return np.stack([_shifted(x, piece, piece.train_rows[:1]) for x, piece in zip(records, pieces, strict=True)])

    def mean_images(self, slices: list[int]) -> np.ndarray:
        """Baseline without a run: the mean test image with each client's shift but for noise, (k, C, H, W) in [0, 1]."""
        pieces = [self.slices[k] for k in slices]
        return np.stack(
            [_shifted(self.images.of(piece.source).test_x.mean(axis=0), piece, np.empty(0, np.int64)) for piece in pieces]
        )

    def pictures(self, records: np.ndarray) -> np.ndarray:
        """Convert model inputs (k, C, H, W) to images with values in [0, 1]."""
        images: np.ndarray = np.clip(records * self.images.std + self.images.mean, 0, 1)
        return images


@dataclass(frozen=True, eq=False)
class ReconstructionResult:
    """Result of the attack on one run.

    Attributes:
        recording: The run.
        labels: Share of labels read correctly, mean over clients.
        exchanged: Share that the labels read from another client's update match, mean over pairs of clients: the share that labels
            which many records have give without any information about a client. 0 for a single client.
        pictures: Reconstructed images, (k, C, H, W) in [0, 1]; None if no image was searched, as for the next two.
        psnr: PSNR of each image in dB, (k,).
        distance: Cosine distance of each search, (k,).
    """

    recording: Recording
    labels: float
    exchanged: float
    pictures: np.ndarray | None = None
    psnr: np.ndarray | None = None
    distance: np.ndarray | None = None

    @property
    def stuck(self) -> int:
        """Number of searches that did not reach the recorded gradient; 0 with noise, where none can."""
        return 0 if self.recording.noisy or self.distance is None else int((self.distance > MATCHED).sum())


def attack(
    folder: Path, against: Path | None = None, records: int | None = None, root: Path | str | None = None
) -> AttackResult:
    """Infer the labels of every client and reconstruct images, for one run or two side by side.

    The search uses the transcript and the protocol alone. Images need clients with one record and one step.

    Args:
        folder: Run folder.
        against: Second run folder, of the same data.
        records: Number of images to reconstruct; None: 6, or one of each client if there are fewer.
        root: Folder of the data sets; None: that of the run.

    Returns:
        The result with a table and, if images were searched, a figure.

    Raises:
        ConfigError: If there is no full transcript, the runs have different data, the model has no last linear layer, or
            records is out of range.
        DataMissing: If the data set, the ground truth, is not available.
    """
    recordings = [read_recording(path) for path in (folder, against) if path is not None]
    _same_data(recordings)
    slices = sorted(set.intersection(*(set(recording.updates) for recording in recordings)))
    if not slices:
        raise ConfigError(f"no client has a recorded update in both {folder} and {against}")
    records = min(RECORDS, len(slices)) if records is None else records
    if not 1 <= records <= len(slices):
        raise ConfigError(f"records is {records}: must lie in 1..{len(slices)}, the clients whose updates were recorded")
    truth = read_truth(recordings[0].job, data_root(folder, root))
    why = next((why for recording in recordings if (why := no_image(recording)) is not None), None)
    outcomes = [_outcome(recording, truth, slices, [] if why else slices[:records]) for recording in recordings]
    return result(outcomes, truth, slices, slices[:records], why)


def read_recording(folder: Path) -> Recording:
    """Read the updates that the attack uses.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: As `read_updates`.
    """
    job = read_run_job(folder)
    by_client = read_updates(folder, job, ROUNDS)
    noisy = any(update.noisy for updates in by_client.values() for update in updates)
    used = {job.experiment.slices[client]: updates[: ROUNDS if noisy else 1] for client, updates in by_client.items()}
    return Recording(job, used, noisy)


def read_truth(job: Job, root: str | None) -> Truth:
    """Load the ground truth of a job.

    Args:
        job: The run's job.
        root: Folder of the data sets.

    Raises:
        DataMissing: If the data set is not available.
    """
    _, images, slices = partition(job.experiment, root)
    return Truth(images, slices, [open_rows(images, [piece])[0].labels() for piece in slices])


def no_image(recording: Recording) -> str | None:
    """Reason why images cannot be reconstructed, or None. An update must be one step on one record that is an image."""
    protocol = recording.job.protocol
    most = max(entry.records for entry in protocol.roster)
    steps = max(update.steps for updates in recording.updates.values() for update in updates)
    shape = protocol.model.input_shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        return f"records of shape {tuple(shape)} are not images"
    return (
        None
        if most == steps == 1
        else f"an update of {recording.name} has {most} records and {steps} steps, must have one of each"
    )


def reconstruct(recording: Recording, slices: list[int]) -> Inverted:
    """Read labels and reconstruct images, with the server's knowledge alone.

    Args:
        recording: Updates of a run.
        slices: Slices to attack.

    Returns:
        Records in the order of `slices`.
    """
    protocol, reader = recording.job.protocol, LabelReader(recording.job.protocol)
    by_slice = [recording.updates[k] for k in slices]
    rounds = min(map(len, by_slice))
    models = np.stack([[update.model for update in updates[:rounds]] for updates in by_slice])
    gradients = np.stack([[update.gradient(protocol.local) for update in updates[:rounds]] for updates in by_slice])
    labels = np.array([reader.counts(updates).argmax() for updates in by_slice])
    return invert(protocol.model, models, gradients, labels, noisy=recording.noisy)


def _outcome(recording: Recording, truth: Truth, slices: list[int], tried: list[int]) -> ReconstructionResult:
    reader = LabelReader(recording.job.protocol)
    read = np.stack([reader.counts(recording.updates[k]) for k in slices])
    labels = float(np.mean([_correct_share(truth.labels[k], counts) for k, counts in zip(slices, read, strict=True)]))
    exchanged = _exchanged([truth.labels[k] for k in slices], read)
    if not tried:
        return ReconstructionResult(recording, labels, exchanged)
    inverted = reconstruct(recording, tried)
    pictures = truth.pictures(inverted.records)
    return ReconstructionResult(
        recording, labels, exchanged, pictures, psnr(pictures, truth.originals(tried)), inverted.distance
    )


def _correct_share(labels: np.ndarray, counts: np.ndarray) -> float:
    """Share of a client's labels that the estimated counts match."""
    return float(np.minimum(np.bincount(labels, minlength=len(counts)), counts).sum() / len(labels))


def _exchanged(labels: list[np.ndarray], read: np.ndarray) -> float:
    """Mean share of a client's labels that the counts read from another client match, as shares of its records."""
    found = np.stack([np.bincount(own, minlength=read.shape[1]) / len(own) for own in labels])
    shares = [np.minimum(found, counts / counts.sum()).sum(1) for counts in read]  # of each client, by one client's counts
    own = sum(float(share[k]) for k, share in enumerate(shares))
    return (float(np.sum(shares)) - own) / max(1, len(labels) * (len(labels) - 1))


def _shifted(image: np.ndarray, piece: Slice, row: np.ndarray) -> np.ndarray:
    """Shift an image (C, H, W) of 0 to 255 as a client does, to [0, 1]; noise is that of the row, if there is one."""
    turned: np.ndarray = np.rot90(image, piece.quarter_turns, axes=(1, 2))
    if piece.features is None:
        return turned / 255
    features = piece.features if len(row) else replace(piece.features, noise=0.0)
    return features.applied(np.rint(turned).astype(np.uint8)[None], row, "train")[0] / 255


def _same_data(recordings: list[Recording]) -> None:
    parts = [recording.job.experiment for recording in recordings]
    settings = [
        {f"data.{key}": value for key, value in part.data.items()} | {"partition_seed": part.partition_seed} for part in parts
    ]
    first, last = settings[0], settings[-1]
    if apart := [
        f"{key}: {first.get(key)} and {last.get(key)}" for key in {**first, **last} if first.get(key) != last.get(key)
    ]:
        raise ConfigError(f"the runs differ in data, so no record is in both: {'; '.join(apart)}")


# ---- the result


def result(
    outcomes: list[ReconstructionResult], truth: Truth, slices: list[int], tried: list[int], why: str | None
) -> AttackResult:
    """Summarise outcomes as sentences, a table and, if images were searched, a grid.

    Args:
        outcomes: One per run.
        truth: Ground truth.
        slices: Slices whose labels were read.
        tried: Slices whose images were searched.
        why: Reason why no image was searched, or None.
    """
    classes = outcomes[0].recording.job.protocol.model.classes
    uniform = [np.full(classes, len(truth.labels[k]) / classes) for k in slices]
    chance = float(np.mean([_correct_share(truth.labels[k], counts) for k, counts in zip(slices, uniform, strict=True)]))
    mean = None if why else psnr(truth.mean_images(tried), truth.originals(tried))
    rows = [
        [f"{one.recording.name}: {one.recording.received}", *_psnr_cells(one.psnr), _percent(one.labels)] for one in outcomes
    ]
    baseline = ["no run: the test images' mean, equal label counts", *_psnr_cells(mean), _percent(chance)]
    return AttackResult(
        name="invert",
        title="Reconstruction of records from updates",
        headline=_headline(outcomes, mean, chance),
        sentences=_sentences(outcomes, why, len(tried), chance, len(slices)),
        columns=["run", "PSNR, dB", "min", "max", "labels"],
        rows=[*rows, baseline],
        figure=None if why else _grid(outcomes, truth, tried),
        caption="" if why else CAPTION,
        facts={
            "runs": [_facts(outcome) for outcome in outcomes], "clients": len(slices), "slices": tried,
            "label_chance": chance, "mean_image_psnr": _listed(mean),
        },
    )  # fmt: skip


def _headline(outcomes: list[ReconstructionResult], mean: np.ndarray | None, chance: float) -> str:
    if mean is None:
        labels = ", ".join(f"{_percent(outcome.labels)} from {outcome.recording.received}" for outcome in outcomes)
        return f"Labels read correctly: {labels}; {_percent(chance)} with equal counts."
    images = ", ".join(f"{_mean(outcome.psnr)} dB from {outcome.recording.received}" for outcome in outcomes)
    return f"Images reconstructed at a PSNR of {images}; the data set's mean image, which needs no run, has {_mean(mean)} dB."


def _significant(chance: float, clients: int) -> float:
    """Share of labels that guessing one record per client exceeds with probability at most BY_CHANCE."""
    from scipy.stats import binom

    return float(binom.isf(BY_CHANCE, clients, chance)) / clients


def _sentences(outcomes: list[ReconstructionResult], why: str | None, tried: int, chance: float, clients: int) -> list[str]:
    sentences = [
        "The server uses the signed job, the models that it sent and the updates that it received. The experimenter's ground "
        "truth is used only to score the result."
    ]
    for outcome in outcomes:
        recording = outcome.recording
        protocol = recording.job.protocol
        if protocol.privacy.central:
            promised = "no finite epsilon" if protocol.unprotected else f"epsilon {protocol.epsilon:g}"
            sentences.append(
                f"{recording.name} promises {promised} for each {protocol.privacy.unit} against everyone except the server, which adds "
                "the noise after it has received every update."
            )
        if outcome.stuck:
            sentences.append(
                f"{recording.name}: {outcome.stuck} of {tried} searches stuck (cosine distance above {MATCHED}). This "
                "is no protection: more starts or a better search may find those images."
            )
        if recording.noisy and outcome.labels > _significant(max(chance, outcome.exchanged), clients):
            sentences.append(
                f"{recording.name}: labels are read correctly more often than by chance, despite the noise. Epsilon bounds "
                "the information about a record; only epsilon 0 excludes all information."
            )
    if why:
        sentences.append(f"Images were not searched: {why}.")
    return sentences


def _psnr_cells(values: np.ndarray | None) -> list[str]:
    return ["–"] * 3 if values is None else [_mean(values), f"{values.min():.1f}", f"{values.max():.1f}"]


def _mean(values: np.ndarray | None) -> str:
    return "–" if values is None else f"{values.mean():.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _listed(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else [float(value) for value in values]


def _facts(outcome: ReconstructionResult) -> dict[str, object]:
    recording = outcome.recording
    return {
        "name": recording.name, "noisy": recording.noisy, "rounds_used": ROUNDS if recording.noisy else 1,
        "labels_right": outcome.labels, "labels_exchanged": outcome.exchanged, "psnr": _listed(outcome.psnr), "distance": _listed(outcome.distance),
    }  # fmt: skip


def _grid(outcomes: list[ReconstructionResult], truth: Truth, tried: list[int]) -> dict[str, object]:
    rows = [Row("Original", truth.originals(tried)[:SHOWN], [])]
    for outcome in outcomes:
        assert outcome.pictures is not None
        assert outcome.psnr is not None
        words = [f"{value:.1f} dB" for value in outcome.psnr[:SHOWN]]
        rows.append(Row(f"Reconstructed: {outcome.recording.received}", outcome.pictures[:SHOWN], words))
    return grid(rows)
