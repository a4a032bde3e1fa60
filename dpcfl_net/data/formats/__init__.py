"""Readers of the user's files: one module for each format, which is imported only when it is used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.core.files import in_home
from dpcfl_net.data import natural
from dpcfl_net.data.files import FileSource
from dpcfl_net.data.formats.table import Table

_SPLIT_SEED = 1


def paths(files: FileSource, root: Path) -> list[Path]:
    """List the files of a data set, and the folders below its own: a folder without files may be a class.

    Args:
        files: The settings.
        root: Folder of the data sets.

    Raises:
        DataMissing: If there is no such file or folder.
    """
    path = _path(files, root)
    return [path] if path.is_file() else sorted(path.rglob("*"))


def read(name: str, files: FileSource, root: Path) -> dict[str, Any]:
    """Read a data set as the dict that a function of the user's would return (docs/how-to/plugins.md).

    Args:
        name: One of `files.FORMATS`.
        files: The settings.
        root: Folder of the data sets.

    Raises:
        ConfigError: If the files are damaged, or the settings do not fit them.
        DataMissing: If there is no such file or folder.
    """
    path = _path(files, root)
    reader = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    train, test = reader.read(path, files)
    if test is None:
        train, test = _split(train, files)
    return _dict(train, test, files)


def _path(files: FileSource, root: Path) -> Path:
    path = root / in_home(files.path, "data.files.path")
    if not path.exists():
        raise DataMissing(f"data.files.path is {files.path!r}: there is no file or folder {path}")
    return path


def _split(table: Table, files: FileSource) -> tuple[Table, Table]:
    """Split records without a test set, client by client."""
    if table.overlaps:
        raise ConfigError(
            f"data.files.path is {files.path!r}: windows of text overlap, so that they cannot be split at random; "
            "the folder must hold the folders train and test"
        )
    names = np.zeros(len(table.y), np.int32) if table.client is None else table.client
    if table.y.ndim != 1 or not len(table.x) == len(table.y) or names.shape != table.y.shape:
        raise ConfigError(
            f"data.files.path is {files.path!r}: labels and clients must be one for each of {len(table.x)} records, "
            f"got the shapes {table.y.shape} and {names.shape}"
        )
    if unnamed := natural.unnamed(names):
        raise ConfigError(f"data.files.path is {files.path!r}: {unnamed}")
    client, _ = natural.encoded(names, names[:0])
    chosen = natural.for_test(client, files.test_fraction, _SPLIT_SEED)
    return table.rows(~chosen), table.rows(chosen)


def _dict(train: Table, test: Table, files: FileSource) -> dict[str, Any]:
    if (train.client is None) != (test.client is None):
        raise ConfigError(f"data.files.path is {files.path!r}: only one of train and test records name their clients")
    mean, std = train.scale
    found: dict[str, Any] = {
        "train_x": train.x, "train_y": train.y, "test_x": test.x, "test_y": test.y,
        "classes": files.classes or train.classes or _refuse_unstated(train, files), "mean": mean, "std": std,
    }  # fmt: skip
    if train.client is not None:
        found |= {"train_client": train.client, "test_client": test.client}
    return found


def _refuse_unstated(train: Table, files: FileSource) -> NoReturn:
    """The number of classes is public; the largest label may be that of one record, which a claim protects."""
    whole = train.y.dtype.kind in "iu" and len(train.y)
    hint = f" (the largest label is {int(train.y.max())})" if whole else ""
    raise ConfigError(
        f"data.files.classes is missing, and {files.path!r} does not state the number of classes: set it from 2 to 256{hint}. "
        "It is not taken from the labels, since the job makes it public"
    )
