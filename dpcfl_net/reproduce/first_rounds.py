"""First rounds of R-DPCFL without the rest of the run, bit-identical: clipped sums once, noise any number of times."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.seeds import derive_seed
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.data import datasets
from dpcfl_net.data.partition import open_client, open_set, plan_slices
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment.calibration import calibrated
from dpcfl_net.experiment.config import resolve
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.privacy.mechanisms import gaussian_on_grid
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.privacy.slots import DPSGDSlot, given
from dpcfl_net.reproduce.base import Scale

MODELS = {"mnist": "cnn", "fashion-mnist": "cnn", "cifar10": "cifar-cnn", "digits": "digits-cnn"}


def configuration(
    dataset: str, records: int, seed: int, *, epsilon: float = 10.0, batch: int = 32, scale: Scale = "laptop"
) -> Config:
    """Configure R-DPCFL on four rotations with {3, 6, 6, 6} clients.

    Args:
        dataset: A key of MODELS.
        records: Training records per client.
        seed: Seed of the run.
        epsilon: Target epsilon at delta 1e-4.
        batch: Batch size after the first round (b>1).
        scale: laptop: E = 25, learning rate .005 (the published code's for Fashion-MNIST), c = 1, a small CNN. paper: E = 200; on
            CIFAR-10 the paper's ResNet-18 with learning rate 5e-4 and c = 3.

    Returns:
        The configuration, with K = 1 and the paper's Renyi accountant.
    """
    large = scale == "paper" and dataset == "cifar10"
    return resolve(
        {
            "name": "first-round",
            "seed": seed,
            "rounds": 25 if scale == "laptop" else 200,
            "data": {"dataset": dataset, "clients": [3, 6, 6, 6], "train_per_client": records},
            "model": {"name": "resnet18" if large else MODELS[dataset]},
            "local": {"batch_size": batch, **({"lr": 5e-4, "clip": 3.0} if large else {"lr": 0.005, "clip": 1.0})},
            "privacy": {"epsilon": epsilon, "delta": 1e-4, "accountant": "rdp", "noise": "seeded"},
            "algorithm": {"name": "r-dpcfl", "clusters": 4},
        }
    )


def setting(scale: Scale, seed: int, *, epsilon: float = 10.0, records: int | None = None) -> Config:
    """Return the configuration of the figures on first rounds.

    Args:
        scale: laptop: Fashion-MNIST with 600 records per client; paper: CIFAR-10 with 6600.
        seed: Seed of the run.
        epsilon: Target epsilon.
        records: Training records per client, instead of the scale's.

    Returns:
        The configuration.
    """
    dataset, usual = {"laptop": ("fashion-mnist", 600), "paper": ("cifar10", 6600)}[scale]
    return configuration(dataset, records or usual, seed, epsilon=epsilon, scale=scale)


@dataclass(frozen=True, eq=False)
class FirstRound:
    """A full-batch first round before noise.

    Attributes:
        theta: Initial model, (p,) float32.
        sums: Sum of clipped gradients per client, (n, p) float64.
        truth: True cluster of each client.
        sizes: Records of each client (N).
        clip: Clip norm (c).
        rate: Learning rate.
    """

    theta: np.ndarray
    sums: np.ndarray
    truth: list[int]
    sizes: list[int]
    clip: float
    rate: float

    @property
    def records(self) -> int:
        """Records of every client; the largest number if they differ."""
        return max(self.sizes)

    def updates(self, noise_multipliers: float | Sequence[float], keys: Sequence[bytes]) -> np.ndarray:
        """Add noise as `Trainer.train` does.

        Args:
            noise_multipliers: z of every client, or of each.
            keys: Task key of each client.

        Returns:
            The released updates, (n, p) float32.
        """
        each = zip(self.sums, self.sizes, np.broadcast_to(noise_multipliers, len(self.sizes)), keys, strict=True)
        return np.stack([self._update(total, size, float(z), key) for total, size, z, key in each])

    def deviation(self, noise_multiplier: float) -> float:
        """Return the standard deviation of an update's noise per coordinate with `records` records: rate * clip * z / N."""
        return self.rate * self.clip * noise_multiplier / self.records

    def deviations(self, noise_multipliers: float | Sequence[float]) -> np.ndarray:
        """Return the standard deviation of the noise per coordinate of each update, (n,).

        Args:
            noise_multipliers: z of every client, or of each.
        """
        found: np.ndarray = self.rate * self.clip * np.asarray(noise_multipliers, np.float64) / np.array(self.sizes)
        return found

    def _update(self, total: np.ndarray, size: int, noise_multiplier: float, key: bytes) -> np.ndarray:
        noisy = gaussian_on_grid(total, noise_multiplier * self.clip, NormalStream(key, "noise")).astype(np.float32)
        noisy /= np.float32(size)
        return (self.theta - np.float32(self.rate) * noisy) - self.theta  # rounds like a real run: step, then difference


class GradientBank:
    """First rounds of one data set, seed, model and local step for any clusters; caches each client's sum."""

    def __init__(self, config: Config) -> None:
        import torch

        from dpcfl_net.training import models
        from dpcfl_net.training.dpsgd import Trainer

        torch.set_num_threads(1)
        images = datasets.load(config.data.dataset, config.data.root)
        name, shape, classes = config.model.name, images.input_shape, images.classes
        root, local = str(config.seed).encode(), config.local
        self.config, self._images = config, images
        self._partition_seed = derive_seed(root, "partition")
        self.theta = models.initial(name, shape, classes, derive_seed(root, "initial model"))
        module = models.build(name, shape, classes)
        self._trainer = Trainer(
            module, clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size, precision=local.precision
        )
        self._sums: dict[tuple[int, int, bytes], np.ndarray] = {}

    def full_batch(
        self, clients: Sequence[int] | None = None, shift: str | None = None, sizes: Sequence[int] | None = None
    ) -> FirstRound:
        """Compute the full-batch round at K = 1; clients are in natural order.

        Args:
            clients: Cluster sizes; default: the configuration's.
            shift: Shift between clusters; default: the configuration's.
            sizes: Training records of each client; default: the configuration's.

        Returns:
            The round before noise.
        """
        settings = self._settings(clients, shift, sizes)
        local, pieces = self.config.local, plan_slices(settings, self._images, self._partition_seed)
        sums = np.stack([self._sum(settings, piece) for piece in pieces])
        records = [len(piece.train_rows) for piece in pieces]
        return FirstRound(self.theta, sums, settings.true_clusters, records, local.clip, local.lr)

    def stochastic(self, batch: int, noise_multiplier: float, keys: Sequence[bytes]) -> np.ndarray:
        """Run a first round of ceil(N/b1) Poisson steps.

        Args:
            batch: Expected batch size b1.
            noise_multiplier: z.
            keys: Task key of each client.

        Returns:
            The released updates, (n, p) float32.
        """
        settings = self._settings(None, None)
        updates = []
        for piece, key in zip(plan_slices(settings, self._images, self._partition_seed), keys, strict=True):
            data = open_client(settings, piece, self.config.data.root)
            slot = DPSGDSlot("first", batch / len(data), math.ceil(len(data) / batch))
            updates.append(self._trainer.train(self.theta, data, slot, noise_multiplier, key)[0] - self.theta)
        return np.stack(updates)

    def _settings(self, clients: Sequence[int] | None, shift: str | None, sizes: Sequence[int] | None = None) -> DataSettings:
        document = self.config.data.model_dump(exclude={"root"})
        given: dict[str, Any] = {"clients": None if clients is None else list(clients), "shift": shift}
        if sizes is not None:
            document["train_per_client"], given["sizes"] = None, list(sizes)
        return DataSettings.model_validate(document | {key: value for key, value in given.items() if value is not None})

    def _sum(self, settings: DataSettings, piece: Any) -> np.ndarray:
        key = (piece.source, *piece.transformation.values(), piece.train_rows.tobytes())
        if key not in self._sums:
            data = open_client(settings, piece, self.config.data.root)
            with np.errstate(all="ignore"):
                self._sums[key] = self._trainer.clipped_sum(self.theta, data, np.arange(len(data)))
        return self._sums[key]


_BANKS: dict[str, GradientBank] = {}


def bank(config: Config) -> GradientBank:
    """Return the bank for a configuration's data, model, local step and seed; all figures of a process share it."""
    parts = (config.data.model_dump(mode="json"), config.model.name, config.local.model_dump(), config.seed)
    key = json.dumps(parts)
    if key not in _BANKS:
        _BANKS[key] = GradientBank(config)
    return _BANKS[key]


def keys(clients: int, *labels: str | int) -> list[bytes]:
    """Derive one deterministic key per client, not secret; each sequence of labels gives other keys.

    Args:
        clients: Number of clients.
        *labels: Purpose of the keys.

    Returns:
        Keys in client order.
    """
    return [derive(hashlib.sha256(b"first round").digest(), *labels, client) for client in range(clients)]


def noise_of_run(config: Config) -> float:
    """Return z of a run of this configuration, calibrated from its algorithm's plan and cached."""
    records = len(plan_slices(config.data, open_set(config.data, config.data.root), seed=0)[0].train_rows)
    parts = (
        config.options.model_dump(mode="json"),
        config.local.model_dump(),
        config.privacy.model_dump(exclude={"noise_seed", "epsilon_by_client"}),
    )
    return _solved(config.algorithm["name"], config.rounds, records, json.dumps(parts))


@cache
def _solved(algorithm: str, rounds: int, records: int, parts: str) -> float:
    options, local, privacy = json.loads(parts)
    nowhere = {"run": "0" * 32, "coordinator_key": "", "observer_key": "", "server_seed": "", "experiment_hash": ""}
    protocol = Protocol.model_validate(
        {
            **nowhere, "name": "noise", "algorithm": algorithm, "options": options, "rounds": rounds, "local": local,
            "privacy": privacy, "ledger_scope": "run", "security": "none",
            "model": ModelTemplate(name="", input_shape=[], classes=2, layout=[], parameters=1, initial_seed=0),
            "roster": [ClientEntry(id=0, public_key="", records=records, noise_multiplier=1.0)],
        }
    )  # fmt: skip
    return given(calibrated(protocol).roster[0].noise_multiplier)
