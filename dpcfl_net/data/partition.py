"""Which client holds which records, turned or relabelled how: known true clusters, disjoint slices within each."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dpcfl_net.data.datasets import Images, load
from dpcfl_net.errors import ConfigError
from dpcfl_net.plugins import is_plugin

if TYPE_CHECKING:
    import torch

MOST_CLUSTERS = {"rotation": 4, "label-flip": 10}


class DataSettings(BaseModel):
    """The part of a configuration that says what data the clients hold."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    dataset: str = Field("digits", description="digits, mnist, fashion-mnist, cifar10, or your own: package.module:function")
    clients: list[int] = Field([2, 2, 2, 2], min_length=1, description="clients in each true cluster, e.g. [3, 6, 6, 6]")
    shift: Literal["rotation", "label-flip", "none"] = Field(
        "rotation",
        description="how cluster k differs: images turned by k * 90 degrees, labels moved to (y + k) mod classes, or not at all",
    )
    train_per_client: int | None = Field(
        None,
        ge=1,
        description="training records a client; null: as many as equal disjoint slices allow, at most the papers' share",
    )
    test_per_client: int | None = Field(
        None, ge=1, description="test records a client; null: equal disjoint slices of the test set, at most the papers' share"
    )

    sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="content of a data set of your own; null: as it is now, which the job then pins",
    )

    @model_validator(mode="after")
    def _possible(self) -> DataSettings:
        if any(size < 1 for size in self.clients):
            raise ValueError(f"clients must hold whole numbers >= 1, got {self.clients}")
        most = MOST_CLUSTERS.get(self.shift)
        if most is not None and len(self.clients) > most:
            raise ValueError(f"shift {self.shift!r} makes at most {most} different clusters, clients has {len(self.clients)}")
        if self.sha256 is not None and not is_plugin(self.dataset):
            raise ValueError(f"sha256 belongs to a data set of your own, package.module:function; dataset is {self.dataset!r}")
        return self

    @property
    def true_clusters(self) -> list[int]:
        """The cluster of each client, in natural order."""
        return [cluster for cluster, size in enumerate(self.clients) for _ in range(size)]


@dataclass(frozen=True, eq=False)
class Slice:
    """One client's records: row numbers (int64) into the training and the test images, and how they are changed."""

    cluster: int
    train_rows: np.ndarray
    test_rows: np.ndarray
    quarter_turns: int
    label_shift: int


def records_per_client(settings: DataSettings, sizes: tuple[int, int]) -> tuple[int, int]:
    """(training, test) records of every client, from the sizes (training, test) of the image set alone.

    null sizes are capped at the share of R's experiments: of 60,000 training images 8,000 a client (80 % of a sixth),
    of 10,000 test images 1,666 (a sixth); digits and sets of the user's own are not capped. ConfigError names what is impossible.
    """
    largest, (n_train, n_test) = max(settings.clients), sizes
    possible = n_train // largest
    train, test = settings.train_per_client, settings.test_per_client
    problems = []
    if possible < 1:
        problems.append(f"data.clients: a cluster of {largest} clients cannot share {n_train} training images disjointly")
    elif train is not None and train > possible:
        problems.append(
            f"data.train_per_client: {train} records for each of {largest} clients of a cluster need {train * largest} images, "
            f"{settings.dataset} has {n_train}; the largest possible is {possible}"
        )
    if test is not None and test > n_test:
        problems.append(f"data.test_per_client: {test} is more than the {n_test} test images of {settings.dataset}")
    if problems:
        raise ConfigError(problems)
    whole = settings.dataset == "digits" or is_plugin(settings.dataset)
    if train is None:
        train = possible if whole else min(possible, 2 * n_train // 15)
    if test is None:
        test = max(1, min(n_test // largest, n_test if whole else n_test // 6))
    return train, test


def open_set(settings: DataSettings, root: str | os.PathLike[str] | None = None) -> Images:
    """The whole set of the settings, with the content that they pin; errors as `datasets.load`."""
    return load(settings.dataset, root, settings.sha256)


def shift_problems(settings: DataSettings, images: Images) -> list[str]:
    """Why these records cannot be made to differ between clusters as the settings say."""
    clusters, shape = len(settings.clients), images.input_shape
    if settings.shift == "rotation" and clusters > 1 and (len(shape) != 3 or shape[1] != shape[2]):
        return [f"data.shift is 'rotation': must be label-flip or none where records, here {shape}, are not square images"]
    if settings.shift == "label-flip" and clusters > images.classes:
        return [f"data.shift is 'label-flip': {clusters} clusters of {images.classes} classes cannot all differ"]
    return []


def plan_slices(settings: DataSettings, sizes: tuple[int, int], seed: int) -> list[Slice]:
    """The slices of all clients in natural order (cluster by cluster), from the set's sizes and the seed alone.

    Within a cluster training slices are disjoint; test slices are too where they fit, and overlap as little as they can
    where test_per_client asks for more (at its largest, every client has the whole test set). Clients of different
    clusters may hold the same source image, differently changed. ConfigError as `records_per_client`.
    """
    train, test = records_per_client(settings, sizes)
    slices = []
    for cluster, count in enumerate(settings.clients):
        rng = np.random.Generator(np.random.PCG64([seed, cluster]))
        train_order, test_order = rng.permutation(sizes[0]), rng.permutation(sizes[1])
        turns = cluster % 4 if settings.shift == "rotation" else 0
        shift = cluster if settings.shift == "label-flip" else 0
        for j in range(count):
            test_rows = test_order[(j * test + np.arange(test)) % sizes[1]]
            slices.append(Slice(cluster, train_order[j * train : (j + 1) * train], test_rows, turns, shift))
    return slices


class ClientData:
    """A client's own records: views of the shared images, its rows of them, and how it sees them.

    x: uint8 (all, C, H, W) or float32 (all, d), y: uint8 (all,), rows: int64 (N,) into them. Positions 0..N-1 below are
    positions in rows.
    """

    def __init__(
        self, images: Images, part: Literal["train", "test"], rows: np.ndarray, quarter_turns: int = 0, label_shift: int = 0
    ) -> None:
        self._x, self._y = (images.train_x, images.train_y) if part == "train" else (images.test_x, images.test_y)
        self._rows = np.ascontiguousarray(rows, np.int64)
        if len(self._rows) and not 0 <= self._rows.min() <= self._rows.max() < len(self._x):
            span = f"{self._rows.min()}..{self._rows.max()}"
            raise ConfigError(f"rows {span} of {len(self._x)} {part} images: a smaller copy of the set than was planned for?")
        self._turns, self._shift, self.classes = quarter_turns % 4, label_shift, images.classes
        largest = 255 if self._x.dtype == np.uint8 else 1
        self._scale, self._offset = 1 / (largest * images.std), images.mean / images.std

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) or (d,)."""
        return tuple(self._x.shape[1:])

    def labels(self) -> np.ndarray:
        """int64 (N,): the labels as the client sees them."""
        return self._labels(self._rows)

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Records at positions `rows` (at most `size`) as float32 (size, C, H, W) or (size, d) and int64 (size,); the rest is zeros."""
        import torch

        count = len(rows)
        if count > size:
            raise ValueError(f"{count} records do not fit a batch of {size}")
        own = self._rows[rows]
        values = self._x[own]
        if self._turns:
            values = np.ascontiguousarray(np.rot90(values, self._turns, axes=(2, 3)))
        x = torch.zeros((size, *values.shape[1:]), dtype=torch.float32)
        y = torch.zeros(size, dtype=torch.int64)
        x[:count].copy_(torch.from_numpy(values)).mul_(self._scale).sub_(self._offset)
        y[:count] = torch.from_numpy(self._labels(own))
        return x, y

    def data_digest(self) -> str:
        """sha256 (hex) of the source records, whatever their order and however they are turned or relabelled."""
        each = sorted(hashlib.sha256(self._x[row].tobytes() + bytes([self._y[row]])).digest() for row in self._rows)
        return hashlib.sha256(b"".join(each)).hexdigest()

    def _labels(self, own: np.ndarray) -> np.ndarray:
        return (self._y[own].astype(np.int64) + self._shift) % self.classes


def open_client(
    settings: DataSettings, piece: Slice, root: str | os.PathLike[str] | None = None, part: Literal["train", "test"] = "train"
) -> ClientData:
    """The training or test records of one client, from the set that `open_set` finds (and its errors)."""
    rows = piece.train_rows if part == "train" else piece.test_rows
    return ClientData(open_set(settings, root), part, rows, piece.quarter_turns, piece.label_shift)
