"""Plugin data sets: validation of the arrays that a user's function returns, cached under the hash of their content."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core import plugins
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data import cache

FIELD = "data.dataset"
NUMBERS = ("classes", "mean", "std")
MOST_CLASSES = 256  # labels are kept as bytes


def load(name: str, root: Path, sha256: str | None = None) -> dict[str, Any]:
    """Load a plugin data set as the fields of `Images`.

    Args:
        name: `package.module:function`.
        root: Folder of the data sets, passed to the function.
        sha256: Content hash that a job pins. If set, the cached copy is used; without one, the function must return this
            content. None calls the function once per process, so that changes of its code or files are noticed.

    Returns:
        The fields of `Images`.

    Raises:
        ConfigError: If the function does not return a data set, or its content differs from the pinned one.
    """
    wanted = sha256 or _content(name, root)
    kept = cache.arrays("own", wanted, lambda: _pinned(name, root, wanted), (*cache.KEYS, "numbers"))
    classes, mean, std = kept.pop("numbers").tolist()
    return {**kept, "classes": int(classes), "mean": mean, "std": std, "sha256": wanted, "identity": wanted}


@functools.cache
def _content(name: str, root: Path) -> str:
    """Call the function, cache its arrays, and return their SHA-256."""
    arrays = _called(name, root)
    found = _digest(arrays)
    cache.arrays("own", found, lambda: arrays, tuple(arrays))
    return found


def _pinned(name: str, root: Path, wanted: str) -> dict[str, np.ndarray]:
    arrays = _called(name, root)
    found = _digest(arrays)
    if found != wanted:
        raise ConfigError(
            f"{FIELD} is {name!r}: its data have the sha256 {found} here, data.sha256 says {wanted}: the function, its files "
            "or library versions differ from those that made the job"
        )
    return arrays


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for key, array in arrays.items():
        total.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def _called(name: str, root: Path) -> dict[str, np.ndarray]:
    """Call the function and convert its result: labels to uint8, and classes, mean and std to one float64 array."""
    given = plugins.call(FIELD, name, root)
    problems = _problems(given)
    if problems:
        raise ConfigError([f"{FIELD} is {name!r}: {problem}" for problem in problems])
    features = {key: given[key] for key in cache.KEYS if key.endswith("_x")}
    labels = {key: given[key].astype(np.uint8) for key in cache.KEYS if key.endswith("_y")}
    numbers = np.array([given[key] for key in NUMBERS], np.float64)
    return {key: {**features, **labels}[key] for key in cache.KEYS} | {"numbers": numbers}


def _problems(given: Any) -> list[str]:
    """Problems of a function's return value; later checks rely on earlier ones."""
    expected = {*cache.KEYS, *NUMBERS}
    if not isinstance(given, Mapping) or set(given) != expected:
        got = f"the keys {sorted(map(str, given))}" if isinstance(given, Mapping) else type(given).__name__
        return [f"it must return a dict with the keys {', '.join([*cache.KEYS, *NUMBERS])}, got {got}"]
    not_arrays = [key for key in cache.KEYS if not isinstance(given[key], np.ndarray)]
    wrong = [f"{key} must be a numpy array, got {type(given[key]).__name__}" for key in not_arrays]
    if wrong:
        return wrong
    found = _numbers(given) + _features(given["train_x"], given["test_x"])
    for part in ("train", "test"):
        found += _labels(part, given[f"{part}_x"], given[f"{part}_y"], given["classes"])
    return found


def _numbers(given: Mapping[str, Any]) -> list[str]:
    found = []
    classes, mean, std = (given[key] for key in NUMBERS)
    if not _is_whole(classes) or not 2 <= classes <= MOST_CLASSES:
        found.append(f"classes must be a whole number from 2 to {MOST_CLASSES}, got {classes!r}")
    if not _is_finite(mean):
        found.append(f"mean must be one finite number, got {mean!r}")
    if not _is_finite(std) or std <= 0:
        found.append(f"std must be one finite number above 0, got {std!r}")
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, (float, np.floating))) and math.isfinite(value)


def _features(train: np.ndarray, test: np.ndarray) -> list[str]:
    found = []
    for key, x in (("train_x", train), ("test_x", test)):
        images, vectors = x.dtype == np.uint8 and x.ndim == 4, x.dtype == np.float32 and x.ndim == 2
        if not (images or vectors):
            found.append(
                f"{key} must be images, uint8 (N, C, H, W), or feature vectors, float32 (N, d), got {x.dtype} {x.shape}"
            )
        elif not x.size:
            found.append(f"{key} is empty, its shape is {x.shape}")
        elif images and x.shape[1] > 4 >= x.shape[3]:
            found.append(f"{key} looks like (N, H, W, C), its shape is {x.shape}: give x.transpose(0, 3, 1, 2)")
        elif vectors and not np.isfinite(x).all():
            found.append(f"{key} holds a value that is not finite")
    if not found and (train.dtype, train.shape[1:]) != (test.dtype, test.shape[1:]):
        found.append(f"train_x is {train.dtype} {train.shape[1:]} a record, test_x is {test.dtype} {test.shape[1:]}")
    return found


def _labels(part: str, x: np.ndarray, y: np.ndarray, classes: Any) -> list[str]:
    if y.dtype.kind not in "iu" or y.ndim != 1:
        return [f"{part}_y must be whole numbers (N,), got {y.dtype} {y.shape}"]
    if len(x) != len(y):
        return [f"{part}_x has {len(x)} records and {part}_y {len(y)}"]
    if len(y) and _is_whole(classes) and not 0 <= y.min() <= y.max() < classes:
        return [f"{part}_y holds labels {y.min()}..{y.max()}, {classes} classes allow 0..{classes - 1}"]
    return []
