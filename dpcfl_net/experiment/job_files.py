"""Experiment part of a signed job (data, slices, seeds; for workers and observer only), and the job's files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, ValidationError

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.files import read_bytes
from dpcfl_net.core.frozen import FrozenModel, canonical, digest, invalid_fields, once
from dpcfl_net.core.job_reader import read_part, read_signed_protocol
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import Roster
from dpcfl_net.core.run_folder import RunFolder, signature_path
from dpcfl_net.core.signing import check_signature, sign, write_secret
from dpcfl_net.data.datasets import Images, place
from dpcfl_net.data.partition import open_rows, open_set, plan_slices
from dpcfl_net.data.records import ClientData
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.data.slices import Slice, Split
from dpcfl_net.transport.keys import COORDINATOR, NOISE_SEED, OPERATOR, public_path, secret_path

if TYPE_CHECKING:
    from dpcfl_net.privacy.canaries import Canaries

ALL_CLIENTS = 0  # number from which the bits of clients that are canaries are drawn


class Audit(FrozenModel):
    """Clients with canaries in place of records, or clients that are canaries.

    Attributes:
        canaries: Record slots for canaries of each audited client; with privacy.unit client, the number of audited clients, each of
            which is one canary.
        clients: Audited clients.
        secret: Hex secret of directions and bits, drawn before the run.
    """

    canaries: int = Field(ge=1)
    clients: list[int]
    secret: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)

    def in_model(self, parameters: int) -> Canaries:
        """Return the canaries of a model: directions common to all audited clients, bits of each client.

        Args:
            parameters: Number of parameters p.
        """
        return _canaries(self.canaries, parameters, self.secret)

    def update(self, protocol: Protocol, client: int) -> np.ndarray:
        """Return the update of a client of a job with privacy.unit client, before clipping.

        Args:
            protocol: The signed protocol.
            client: Client id.

        Returns:
            (p,) float64: zeros for clients that are no canaries.
        """
        from dpcfl_net.privacy.canaries import GAIN

        parameters = protocol.model.parameters
        if client not in self.clients:
            return np.zeros(parameters)
        canaries = self.in_model(parameters)
        out = -1.0 if protocol.privacy.adjacency == "replace-one" else 0.0
        sign = 1.0 if canaries.bits(ALL_CLIENTS)[client] else out
        return sign * canaries.vector(client, GAIN * protocol.local.clip)


@lru_cache(maxsize=1)  # the clients of a process share them
def _canaries(count: int, parameters: int, secret: str) -> Canaries:
    from dpcfl_net.privacy.canaries import Canaries

    return Canaries(count, parameters, bytes.fromhex(secret))


class Experiment(FrozenModel):
    """Part of a job for workers and observer only.

    Attributes:
        salt: Hides this part behind its hash in the protocol.
        seed: Seed of the experiment.
        data: Data settings.
        partition_seed: Seed of the partition.
        slices: Slice of the partition by client id.
        true_clusters: True cluster by client id.
        noise_seed: Hex secret of seeded noise; None otherwise.
        audit: The audit; None without one.
    """

    added = ("audit",)
    salt: str = Field(repr=False)
    seed: int
    data: dict[str, Any]
    partition_seed: int
    slices: list[int]  # slices[client id] = the slice of the partition that this client holds
    true_clusters: list[int]
    noise_seed: str | None = Field(None, repr=False)
    audit: Audit | None = None

    @property
    def noise(self) -> bytes | None:
        """Secret of seeded noise; None if each task draws its own."""
        return None if self.noise_seed is None else bytes.fromhex(self.noise_seed)


@dataclass(frozen=True)
class Job:
    """Both parts of a job, as the operator holds them."""

    protocol: Protocol
    experiment: Experiment

    @property
    def algorithm(self) -> Algorithm:
        """The job's algorithm."""
        return algorithm_of(self.protocol)


def read_experiment(path: Path, protocol: Protocol) -> Experiment:
    """Read the experiment part and compare its hash with the protocol's.

    Args:
        path: The file.
        protocol: The signed protocol.

    Raises:
        Refused: "experiment-hash" if they differ.
    """
    experiment = read_part(path, Experiment)
    if digest(experiment) != protocol.experiment_hash:
        raise Refused("experiment-hash", f"{path} is not the experiment that the signed protocol names")
    return experiment


def write_job(job: Job, folder: Path, key_folder: Path) -> None:
    """Write protocol.json and experiment.json with the operator's signatures, roster.jsonl, and the operator's public key.

    experiment.json gets mode 0600: its salt and its seeds are secret.

    Args:
        job: The job.
        folder: Target folder.
        key_folder: Folder of all keys.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = RunFolder(folder)
    if job.protocol.format > 1:
        Roster.of(job.protocol.roster).write(files.roster)
    parts: tuple[tuple[Path, FrozenModel, int], ...] = (
        (files.protocol, job.protocol, 0o666),
        (files.experiment, job.experiment, 0o600),
    )
    for path, part, mode in parts:
        data = canonical(part)
        write_atomically(path, data, mode=mode)
        signature_path(path).write_text(sign(secret_path(key_folder, OPERATOR), data))
    if job.experiment.noise is not None and job.protocol.privacy.central:
        write_secret(secret_path(key_folder, COORDINATOR).with_name(NOISE_SEED), job.experiment.noise.hex())
    files.operator_key.write_text(public_path(key_folder, OPERATOR).read_text())


def read_job(folder: Path, operator_key: str) -> Job:
    """Read and verify both parts of a job.

    The last job is cached by the content of its files, so that a forked process need not verify it again.

    Args:
        folder: Folder of the job.
        operator_key: Public key of the operator, pinned by the caller.

    Raises:
        Refused: If the operator did not sign the files, they do not belong together, or the job is invalid.
    """
    content, files = hashlib.sha256(), RunFolder(folder)
    for part in (files.protocol, files.experiment):
        for path in (part, signature_path(part)):
            content.update(hashlib.sha256(read_bytes(path) if path.exists() else b"").digest())
    if files.roster.exists():  # its content is compared with its hash whenever it is read; a changed file is opened again
        state = files.roster.stat()
        content.update(repr((state.st_ino, state.st_size, state.st_mtime_ns)).encode())
    return _read_job(folder, operator_key, content.hexdigest())


@lru_cache(maxsize=1)
def _read_job(folder: Path, operator_key: str, content: str) -> Job:
    files = RunFolder(folder)
    protocol = read_signed_protocol(files.protocol, operator_key)
    experiment = read_experiment(files.experiment, protocol)
    check_signature(files.experiment, operator_key, digest(experiment))
    return checked(Job(protocol, experiment))


def checked(job: Job) -> Job:
    """Return the job if its algorithm and options are known here and its experiment fits the roster.

    Args:
        job: The job.

    Raises:
        Refused: "job-invalid" otherwise.
    """
    algorithm_of(job.protocol)
    experiment, clients = job.experiment, range(len(job.protocol.roster))
    try:
        DataSettings.model_validate(experiment.data)
    except ValidationError as error:
        raise Refused("job-invalid", f"the experiment's data: {invalid_fields(error)}") from None
    if experiment.noise_seed is not None and job.protocol.privacy.noise != "seeded":
        why = "everyone who knows it can subtract the noise, but the protocol claims an epsilon"
        raise Refused("job-invalid", f"the experiment has a noise seed, privacy.noise is {job.protocol.privacy.noise!r}: {why}")
    for name, numbers in (("the roster's ids", job.protocol.clients), ("slices", sorted(experiment.slices))):
        if numbers != clients and list(numbers) != list(clients):
            raise Refused("job-invalid", f"{name} must be 0 to {len(clients) - 1}, each once")
    if len(experiment.true_clusters) != len(clients):
        raise Refused("job-invalid", f"true_clusters names {len(experiment.true_clusters)} clients, the roster {len(clients)}")
    return job


def client_slice(job: Job, client: int, root: str | None) -> tuple[DataSettings, Slice]:
    """Return data settings and slice of a client.

    Args:
        job: The job.
        client: Client id.
        root: Folder of the data sets, which are read for sizes, labels or roles.
    """
    settings, _, slices = partition(job.experiment, root)
    return settings, slices[job.experiment.slices[client]]


def check_model(job: Job, root: str | None) -> None:
    """Compare the declared facts of the data set with the signed model: a record with another label or shape would raise an error.

    Args:
        job: The job.
        root: Folder of the data sets.

    Raises:
        Refused: "model" if task, shape of a record or number of classes differ.
    """
    model, (_, images, _) = job.protocol.model, partition(job.experiment, root)
    here, signed = (images.task, list(images.input_shape), images.classes), (model.task, model.input_shape, model.classes)
    if here != signed:
        said = (f"{task}, records of {shape}, {classes} classes" for task, shape, classes in (here, signed))
        raise Refused("model", "the data set here is for {}; the signed model is for {}".format(*said))


def client_records(job: Job, client: int, root: str | None, part: Split) -> ClientData:
    """Open the records of a client.

    Args:
        job: The job.
        client: Client id.
        root: Folder of the data sets.
        part: "train", "validation" or "test".

    Raises:
        ConfigError: As `datasets.load`.
        DataMissing: As `datasets.load`.
    """
    _, images, slices = partition(job.experiment, root)
    return open_rows(images, [slices[job.experiment.slices[client]]], part)[0]


def evaluated_records(job: Job, client: int, root: str | None) -> ClientData:
    """Open the records on which a client's model is evaluated (`data.evaluate`); arguments and errors as `client_records`."""
    settings, images, slices = partition(job.experiment, root)
    return open_rows(images, [slices[job.experiment.slices[client]]], settings.evaluate)[0]


def partition(experiment: Experiment, root: str | None) -> tuple[DataSettings, Images, Sequence[Slice]]:
    """Return settings, data set and all slices, once for the clients of a process: each look costs as much as a short task."""
    data, seed = experiment.data, experiment.partition_seed

    def plan() -> tuple[DataSettings, Images, Sequence[Slice]]:
        settings = DataSettings.model_validate(data)
        images = open_set(settings, root)
        return settings, images, plan_slices(settings, images, seed)

    return once(experiment, ("partition", *place(root)), plan)
