"""Partition of a data set: true clusters, and each client's slice of records with its transformation."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data import datasets, natural, regression, roles, shifts, skew
from dpcfl_net.data.central import withheld
from dpcfl_net.data.datasets import Images, load, mixed
from dpcfl_net.data.disjoint import DisjointShares
from dpcfl_net.data.quantity import SizeLaw, drawn_sizes, held_back
from dpcfl_net.data.records import ClientData
from dpcfl_net.data.settings import OWNED, DataSettings, is_own
from dpcfl_net.data.slices import Slice, Slices, Split


def records_per_client(settings: DataSettings, sizes: tuple[int, int]) -> tuple[int, int]:
    """Compute the numbers of training and test records of each client; not for roles.

    Sizes that are null in the settings are capped at the share of the papers' experiments: of 60,000 training images 8,000 for
    a client (80 % of a sixth), of 10,000 test images 1,666 (a sixth), for regression 50 and 50 points. "digits" and plugin data
    sets have no cap.

    Args:
        settings: The data settings.
        sizes: Records of the data set, (training, test).

    Returns:
        (training, test) records; training includes validation records, test has no record of the central test set.

    Raises:
        ConfigError: With every size that is impossible.
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
    elif problem := _central_problem(settings, n_test, test or 1):
        problems.append(problem)
    if problems:
        raise ConfigError(problems)
    most_train, most_test = _papers_share(settings.dataset, sizes)
    if train is None:
        train = min(possible, most_train)
    if test is None:
        test = max(1, min((n_test - (settings.central_test or 0)) // largest, most_test))
    return train, test


def _central_problem(settings: DataSettings, n_test: int, needed: int) -> str | None:
    """Message about a central test set that leaves a client fewer test records than it needs; None without one."""
    if settings.central_test is None or settings.central_test <= n_test - needed:
        return None
    return (
        f"data.central_test is {settings.central_test}: must be at most {n_test - needed}, or null: {settings.dataset} has {n_test} "
        f"test records, and a client tests on {needed} of the others"
    )


def _papers_share(dataset: str, sizes: tuple[int, int]) -> tuple[int, int]:
    if dataset == "digits" or is_own(dataset):
        return sizes
    if dataset == "regression":
        return regression.SHARE, regression.SHARE
    return 2 * sizes[0] // 15, sizes[1] // 6


def open_set(settings: DataSettings, root: str | os.PathLike[str] | None = None) -> Images:
    """Load the data set of the settings, with the content that they pin.

    Args:
        settings: The data settings.
        root: Folder of the data sets, as for `datasets.load`.

    Raises:
        ConfigError: As `datasets.load`.
        DataMissing: As `datasets.load`.
    """
    if len(settings.datasets) > 1:
        return mixed(settings.datasets, root)
    return load(settings.dataset, root, settings.sha256, settings.files)


def shift_problems(settings: DataSettings, images: Images) -> list[str]:
    """Return messages about a shift or partition that is impossible on these records.

    Args:
        settings: The data settings.
        images: The data set.
    """
    clusters, classes = len(settings.clients), images.classes
    found = shifts.problems(settings.shifts, clusters, images.input_shape, classes)
    if settings.partition == "natural" and images.owners is None:
        found.append(f"data.partition is 'natural': the records of {settings.dataset!r} do not name their clients")
    return found


def plan_slices(settings: DataSettings, images: Images, seed: int) -> Sequence[Slice]:
    """Plan the slices of all clients in natural order (cluster by cluster).

    Depends on the arguments only. Within a cluster, training and validation rows of different clients are disjoint. Test rows
    are disjoint where they fit and overlap as little as possible otherwise; with label skew they overlap (`skew.shares`).
    Clients of different clusters may hold the same source record with different transformations.

    Args:
        settings: The data settings.
        images: The data set.
        seed: Seed of the partition.

    Returns:
        One slice for each client, made when it is asked for.

    Raises:
        ConfigError: As `records_per_client` and `roles.shares`.
    """
    return _planned(settings.model_dump_json(exclude={"root"}), images, seed)


@functools.lru_cache(maxsize=4)
def _planned(asked: str, images: Images, seed: int) -> Slices:
    settings = DataSettings.model_validate_json(asked)
    found = list[tuple[Sequence[skew.Share], dict[str, Any]]]()
    clusters = range(len(settings.clients))
    permuted = "label-permutation" in settings.shifts
    orders = shifts.label_orders(len(clusters), images.classes, seed) if permuted else [None for _ in clusters]
    for cluster, shares in enumerate(_shares_by_cluster(settings, images, seed)):
        own = {
            "cluster": cluster,
            "quarter_turns": cluster % 4 if "rotation" in settings.shifts else 0,
            "label_shift": cluster if "label-flip" in settings.shifts else 0,
            "line": regression.line(cluster, settings.noise) if "line" in settings.shifts else None,
            "features": shifts.feature_shift(settings.shifts, cluster, seed),
            "label_order": orders[cluster],
            "source": cluster if images.sources else 0,
        }
        found.append((shares, own))
    return Slices(found)


def _shares_by_cluster(settings: DataSettings, images: Images, seed: int) -> Iterator[Sequence[skew.Share]]:
    """Yield the rows of the clients of each cluster."""
    if settings.partition == "natural":
        yield from _natural(settings, images, seed)
        return
    first = 0
    for cluster, count in enumerate(settings.clients):
        rng = np.random.Generator(np.random.PCG64([seed, cluster]))
        own = settings.sizes[first : first + count] if isinstance(settings.sizes, list) else settings.sizes
        central = withheld(images, settings.central_test, seed, cluster if images.sources else 0)
        yield _shares(settings, images, cluster, own, rng, central)
        first += count


def _natural(settings: DataSettings, images: Images, seed: int) -> Iterator[list[skew.Share]]:
    """Yield the rows of the clients of each cluster; the clients are drawn once for all clusters."""
    if images.owners is None:
        raise ConfigError(f"data.partition is 'natural': the records of {settings.dataset!r} do not name their clients")
    rng = np.random.Generator(np.random.PCG64([seed, 0]))
    if problem := _central_problem(settings, images.sizes[1], 1):
        raise ConfigError(problem)
    most, central = (settings.train_per_client, settings.test_per_client), withheld(images, settings.central_test, seed)
    drawn = natural.shares(
        images.owners, settings.client_count, settings.min_per_client, most, settings.validation, rng, central
    )
    for count, end in zip(settings.clients, np.cumsum(settings.clients).tolist(), strict=True):
        yield drawn[end - count : end]


def _shares(
    settings: DataSettings,
    images: Images,
    cluster: int,
    own: list[int] | SizeLaw | None,
    rng: np.random.Generator,
    central: np.ndarray | None,
) -> Sequence[skew.Share]:
    count = settings.clients[cluster]
    if images.groups is not None:
        per_client = settings.train_per_client, settings.test_per_client
        return roles.shares(images.groups, count, *per_client, settings.validation)
    if images.sources:  # a mixture: the cluster has a data set of its own
        images, changes = images.sources[cluster], {"dataset": settings.datasets[cluster], "clients": [count], "sizes": None}
        settings = settings.model_copy(update=changes)
    train, test = records_per_client(settings, images.sizes)
    if settings.alpha is not None:
        sizes = skew.Sizes(train, held_back(settings.validation, train), test)
        return skew.shares(images.train_y, images.test_y, images.classes, count, sizes, settings.alpha, rng, central)
    records = _sizes(settings, own, count, train, images.sizes[0], rng)
    return DisjointShares(records, test, settings.validation, images.sizes, rng, central)


def _sizes(
    settings: DataSettings, own: list[int] | SizeLaw | None, count: int, train: int, most: int, rng: np.random.Generator
) -> list[int]:
    """Training records of each client of a cluster, validation records included."""
    if own is None:
        return [train] * count
    if isinstance(own, SizeLaw):
        if own.smallest > train:
            raise ConfigError(f"data.sizes.smallest is {own.smallest}: must be at most the mean, {train} records a client")
        return drawn_sizes(own, count, train * count, rng)
    if sum(own) > most:
        raise ConfigError(f"data.sizes: the clients of a cluster need {sum(own)} records, {settings.dataset} has {most}")
    return own


def client_names(
    settings: DataSettings, images: Images, pieces: Sequence[Slice], root: str | os.PathLike[str] | None = None
) -> list[str] | None:
    """Find what the data set calls the owner of each slice: a value of the client column, or a speaking role.

    Args:
        settings: The data settings.
        images: The data set.
        pieces: Slices of a partition of it.
        root: Folder of the data sets, as for `datasets.load`.

    Returns:
        The names in the order of the slices; None for partitions that do not follow owners.

    Raises:
        ConfigError: As `datasets.client_names`.
        DataMissing: As `datasets.client_names`.
    """
    if settings.partition not in OWNED:
        return None
    names = datasets.client_names(settings.dataset, root, settings.sha256, settings.files)
    if names is None:
        return None
    first = np.array([piece.train_rows[0] for piece in pieces], np.int64)
    if images.groups is not None:
        numbers = np.searchsorted(images.groups[0], first, side="right") - 1
    else:
        assert images.owners is not None
        numbers = images.owners[0][first]
    return [names[number] for number in numbers.tolist()]


def open_client(
    settings: DataSettings, piece: Slice, root: str | os.PathLike[str] | None = None, part: Split = "train"
) -> ClientData:
    """Open the records of one client.

    Args:
        settings: The data settings.
        piece: The client's slice.
        root: Folder of the data sets, as for `datasets.load`.
        part: "train", "validation" or "test".

    Raises:
        ConfigError: As `datasets.load`.
        DataMissing: As `datasets.load`.
    """
    return open_rows(open_set(settings, root), [piece], part)[0]


def open_rows(images: Images, pieces: Sequence[Slice], part: Split = "train") -> tuple[ClientData, np.ndarray]:
    """Open the concatenated records of several clients that share one transformation.

    Args:
        images: The data set.
        pieces: Slices of the clients, at least one.
        part: "train", "validation" or "test".

    Returns:
        The records, and where each client but the first begins, int64 (n - 1,), for `numpy.split`.

    Raises:
        ValueError: For slices with different transformations, or none.
    """
    first = pieces[0] if pieces else None
    others = {(piece.source, *piece.transformation.values()) for piece in pieces}
    if first is None or len(others) != 1:
        raise ValueError(f"clients opened together must have one transformation, got {len(others)}")
    rows = [piece.rows(part) for piece in pieces]
    ends = np.cumsum([len(own) for own in rows])
    source: Literal["train", "test"] = "test" if part == "test" else "train"
    return ClientData(images.of(first.source), source, np.concatenate(rows), **first.transformation), ends[:-1]
