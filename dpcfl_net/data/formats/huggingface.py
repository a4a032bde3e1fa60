"""A data set of the Hugging Face library `datasets` that was saved with `save_to_disk`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.data.files import FileSource
from dpcfl_net.data.formats.image_folder import pixels
from dpcfl_net.data.formats.table import Table, refused


def read(path: Path, files: FileSource) -> tuple[Table, Table | None]:
    """Read the splits train and test, or a data set without splits. Nothing is downloaded.

    The column of records holds images or arrays: uint8 (H, W) or (C, H, W), or float vectors.

    Args:
        path: The folder.
        files: The settings, with the names of the columns.

    Returns:
        Training and test records; None for the test records without a split test.

    Raises:
        ConfigError: If the folder or a column does not fit, or the library is missing.
    """
    saved = _load(path)
    if not hasattr(saved, "keys"):
        return _table(path, saved, files), None
    if "train" not in saved:
        raise refused(path, f"it has the splits {', '.join(saved)}, must have train")
    return _table(path, saved["train"], files), _table(path, saved["test"], files) if "test" in saved else None


def _load(path: Path) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ConfigError(f"data.dataset is 'huggingface': needs the library datasets: {advice('huggingface')}") from None
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise refused(path, f"not a folder that save_to_disk wrote: {error}") from error


def _table(path: Path, rows: Any, files: FileSource) -> Table:
    columns = files.columns
    has = list(rows.column_names)
    wanted = [columns.x, columns.y, *([columns.client] if columns.client else [])]
    if missing := [name for name in wanted if name not in has]:
        raise refused(path, f"it has no column {', '.join(missing)}; it has {', '.join(has)} (set data.files.columns)")
    if not len(rows):
        raise refused(path, "it has no record")
    labels = np.asarray(rows.with_format("numpy")[columns.y][:])
    named = columns.client or ("client" if "client" in has else None)
    owners = None if named is None else np.asarray(rows.with_format("numpy")[named][:])
    if owners is not None and owners.dtype == object:
        # A missing name would become a client "None"; an empty one is refused.
        owners = np.array(["" if name is None else str(name) for name in owners])
    classes = getattr(rows.features[columns.y], "num_classes", None)
    return Table(_records(path, rows, files), labels, owners, classes)


def _records(path: Path, rows: Any, files: FileSource) -> np.ndarray:
    name = files.columns.x
    if type(rows.features[name]).__name__ == "Image":
        found = [pixels(image, files.shape) for image in rows[name]]
        if len({image.shape for image in found}) > 1:
            raise refused(path, f"images of column {name} differ in shape; set data.files.shape")
        return np.stack(found)
    values = np.asarray(rows.with_format("numpy")[name][:])
    if values.dtype == object:
        raise refused(path, f"arrays of column {name} differ in shape")
    if values.dtype.kind not in "iuf":
        raise refused(path, f"column {name} must hold images or numbers, got {values.dtype}")
    if values.dtype.kind == "f" or values.ndim == 2:
        return values.astype(np.float32)
    if not (values.min() >= 0 and values.max() <= 255):  # the library returns all whole numbers as int64
        raise refused(path, f"pixels of column {name} are {values.min()} to {values.max()}, must be 0 to 255")
    values = values.astype(np.uint8)
    return values[:, None] if values.ndim == 3 else values
