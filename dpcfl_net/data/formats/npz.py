"""Records in a NumPy archive: x, y and a column of clients, with or without a test set."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.data.files import FileSource
from dpcfl_net.data.formats.table import Table, refused
from dpcfl_net.data.readers import DAMAGED


def read(path: Path, files: FileSource) -> tuple[Table, Table | None]:
    """Read `x` and `y`, or `train_x`, `train_y`, `test_x` and `test_y`, and the column of clients.

    `classes`, `mean` and `std` may stand beside them. The names of `files.columns` replace x, y and client.

    Args:
        path: The file.
        files: The settings.

    Returns:
        Training and test records; None for the test records if the file has none.

    Raises:
        ConfigError: If the file does not hold such arrays.
    """
    arrays = _arrays(path)
    if f"train_{files.columns.x}" in arrays:
        return _table(path, arrays, files, "train_"), _table(path, arrays, files, "test_")
    return _table(path, arrays, files, ""), None


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        if not zipfile.is_zipfile(path):
            raise refused(path, "not an npz file")
        with np.load(path, allow_pickle=False) as file:
            return {key: _array(path, file, key) for key in file.files}
    except DAMAGED as error:
        raise refused(path, str(error)) from error


def _array(path: Path, file: Any, key: str) -> np.ndarray:
    try:
        return file[key]
    except ValueError as error:
        advice = "store a column of text as np.array(column, str) and one of whole numbers as np.array(column, int)"
        raise refused(path, f"{key}: {error}" + (f"; {advice}" if "Object arrays" in str(error) else "")) from error


def _table(path: Path, arrays: dict[str, np.ndarray], files: FileSource, prefix: str) -> Table:
    columns = files.columns
    client = f"{prefix}{columns.client or 'client'}"
    needed = [f"{prefix}{columns.x}", f"{prefix}{columns.y}", *([client] if columns.client else [])]
    if missing := [key for key in needed if key not in arrays]:
        raise refused(
            path, f"it has no {', '.join(missing)}; it has {', '.join(arrays) or 'nothing'} (data.files.columns names others)"
        )
    x = arrays[needed[0]]
    if x.dtype == np.float64:
        x = x.astype(np.float32)
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]  # images of one channel
    mean, std = (_number(path, arrays, key) for key in ("mean", "std"))
    if (mean is None) != (std is None):
        raise refused(path, f"it has {'std' if mean is None else 'mean'} alone; must have both mean and std, or none")
    classes = _number(path, arrays, "classes")
    return Table(
        x,
        arrays[needed[1]],
        arrays.get(client),
        None if classes is None else int(classes),
        None if mean is None or std is None else (mean, std),
    )


def _number(path: Path, arrays: dict[str, np.ndarray], key: str) -> float | None:
    if key not in arrays:
        return None
    if arrays[key].size != 1 or arrays[key].dtype.kind not in "iuf":
        raise refused(path, f"{key} must be one number, got {arrays[key].dtype} {arrays[key].shape}")
    return float(arrays[key].reshape(-1)[0])
