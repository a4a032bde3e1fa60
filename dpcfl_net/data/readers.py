"""Readers of IDX (optionally gzipped) and NPZ image files; errors name the damaged file."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_at_most

MOST_BYTES = 1 << 30  # of one unpacked file
# What NumPy raises for a damaged archive, also for one with a password, an odd compression or an impossible size.
DAMAGED = (OSError, EOFError, KeyError, ValueError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile)


def read_idx(path: Path, record: tuple[int, ...]) -> np.ndarray:
    """Read an IDX file (LeCun's format: 0 0 type rank, big-endian sizes, values).

    Args:
        path: The file; gzipped if it ends in .gz.
        record: Shape of one record, (28, 28) for an image or () for a label.

    Returns:
        uint8 (N, *record).

    Raises:
        ConfigError: If the file is damaged or has another shape.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = read_at_most(cast(BinaryIO, file), MOST_BYTES, f"damaged data file {path}")
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, str(error)) from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise damaged(path, "not an idx file of unsigned bytes")
    rank = raw[3]
    start = 4 + 4 * rank
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank))
    if shape[1:] != record or not rank:
        raise damaged(path, f"its shape is {shape}, must be {_any_number_of(record)}")
    if len(raw) != start + math.prod(shape):
        raise damaged(path, f"{len(raw)} bytes, its header says {start + math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_npz(path: Path, record: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Read an NPZ file of images.

    Args:
        path: The file.
        record: Shape of one image, (H, W, C).

    Returns:
        Images uint8 (N, H, W, C) and labels uint8 (N,).

    Raises:
        ConfigError: If the file does not hold such arrays.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise damaged(path, "not an npz file")
        with np.load(path, allow_pickle=False) as file:
            x, y = file["x"], file["y"]
    except DAMAGED as error:
        raise damaged(path, str(error)) from error
    if x.dtype != np.uint8 or y.dtype != np.uint8 or x.shape[1:] != record or y.shape != x.shape[:1]:
        expected = f"uint8 {_any_number_of(record)} and uint8 (N,)"
        raise damaged(path, f"x is {x.dtype} {x.shape}, y is {y.dtype} {y.shape}, must be {expected}")
    return x, y


def _any_number_of(record: tuple[int, ...]) -> str:
    return f"({', '.join(['N', *map(str, record)])}{'' if record else ','})"


def identity(paths: list[Path]) -> str:
    """Return a text that identifies these versions of the files (path, size, modification time) without reading them.

    Of a folder it has the path only: files that a program leaves there, such as locks, would change its time.
    """
    return "\n".join(
        str(path) if path.is_dir() else f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths
    )


def damaged(path: Path, why: str) -> ConfigError:
    """Return the error for a damaged data file."""
    return ConfigError(f"damaged data file {path}: {why}; fetch it again")
