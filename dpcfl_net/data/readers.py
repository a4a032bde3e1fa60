"""Readers for the two file forms of image sets: idx(.gz) and npz; a damaged file is an error that names it."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from dpcfl_net.errors import ConfigError


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of an idx file, plain or gzipped (LeCun's format: 0 0 type rank, big-endian sizes, values)."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, str(error)) from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise damaged(path, "not an idx file of unsigned bytes")
    rank = raw[3]
    start = 4 + 4 * rank
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank))
    if len(raw) != start + math.prod(shape):
        raise damaged(path, f"{len(raw)} bytes, its header says {start + math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Arrays x uint8 (N, H, W, 3) and y uint8 (N,) of an npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = file["x"], file["y"]
    except (OSError, EOFError, KeyError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise damaged(path, str(error)) from error
    if x.dtype != np.uint8 or y.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3:
        raise damaged(path, f"x is {x.dtype} {x.shape}, y is {y.dtype} {y.shape}; expected uint8 (N, H, W, 3) and uint8 (N,)")
    return x, y


def identity(paths: list[Path]) -> str:
    """What tells these files from others and from themselves after a change, without reading them."""
    return "\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)


def damaged(path: Path, why: str) -> ConfigError:
    """The error for a file that cannot be what it should be."""
    return ConfigError(f"damaged data file {path}: {why}; fetch it again")
