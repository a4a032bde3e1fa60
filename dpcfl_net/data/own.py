"""Data sets of the user's, by a function or in files: validation of the arrays, cached under the hash of their content."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core import plugins
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.data import cache, formats, natural, readers
from dpcfl_net.data.files import FileSource

FIELD = "data.dataset"
NUMBERS = ("classes", "mean", "std")
CLIENTS = ("train_client", "test_client")
MOST_CLASSES = 256  # labels are kept as bytes
_LARGEST = float(np.finfo(np.float32).max)
READERS = 3  # raised when a reader of files makes other records of the same files: they are read again


@dataclass(frozen=True)
class Source:
    """Sources of records.

    Attributes:
        name: `package.module:function`, or a format of `files.FORMATS`.
        root: Folder of the data sets, passed to the function.
        files: Files of a format; None for a function.
    """

    name: str
    root: Path
    files: FileSource | None = None

    def __str__(self) -> str:
        return f"{FIELD} is {self.name!r}" if self.files is None else f"data.files.path is {self.files.path!r}"

    @property
    def key(self) -> str:
        """Text that is equal for equal sources."""
        return "\n".join((self.name, str(self.root), "" if self.files is None else self.files.model_dump_json()))


def load(source: Source, sha256: str | None = None) -> dict[str, Any]:
    """Load a data set of the user's as the fields of `Images`.

    Args:
        source: Where the records come from.
        sha256: Content hash that a job pins. If set, the cached copy is used; without one, the source must have this content.
            None reads the source once per process, so that changes of code or files are noticed.

    Returns:
        The fields of `Images`.

    Raises:
        ConfigError: If the source is no data set, or its content differs from the pinned one.
        DataMissing: If the files do not exist.
    """
    wanted = sha256 or (_content(source) if source.files is None else _content_of_files(source, source.files))
    kept = _found(wanted) or _keep(_pinned(source, wanted))
    classes, mean, std = kept.pop("numbers").tolist()[:3]
    owners = tuple(kept.pop(key) for key in CLIENTS) if CLIENTS[0] in kept else None
    return {
        **kept, "owners": owners, "classes": int(classes), "mean": mean, "std": std, "sha256": wanted, "identity": wanted,
    }  # fmt: skip


def client_names(source: Source, sha256: str) -> list[str] | None:
    """Read the source again for the names of its clients, which the cached copy does not hold.

    Args:
        source: Where the records come from.
        sha256: Content hash that the source must have.

    Returns:
        Names in the order of the numbers in `owners`; None if the records do not name their clients.

    Raises:
        ConfigError: As `load`.
        DataMissing: As `load`.
    """
    given = _given(source)
    _check_content(source, sha256, _digest(_converted(source, given)))
    return natural.names(*(given[key] for key in CLIENTS)) if CLIENTS[0] in given else None


def repeats(source: Source) -> bool:
    """Return True if the source gives the same records when it is read once more; a record book knows them by their content.

    Args:
        source: A function; it is called again.

    Raises:
        ConfigError: As `load`.
    """
    return _digest(_arrays(source)) == _content(source)


@functools.cache
def _content(source: Source) -> str:
    """Call the function, cache its arrays, and return their SHA-256."""
    arrays = _arrays(source)
    _keep(arrays)
    return _digest(arrays)


def _content_of_files(source: Source, files: FileSource) -> str:
    """Return the SHA-256 of the arrays in files, which are read once for each version of the files."""
    version = f"{READERS}\n{source.key}\n{readers.identity(formats.paths(files, source.root))}"

    def read() -> dict[str, np.ndarray]:
        arrays = _arrays(source)
        _keep(arrays)
        return {"sha256": np.frombuffer(_digest(arrays).encode(), np.uint8)}

    return cache.arrays("files", version, read, ("sha256",))["sha256"].tobytes().decode()


def _found(wanted: str) -> dict[str, np.ndarray] | None:
    """Open the cached arrays of a content, with the clients of the records if it has them."""
    plain = (*cache.KEYS, "numbers")
    kept = cache.find(cache.OWN, wanted, plain)
    return (
        cache.find(cache.OWN, wanted, (*CLIENTS, *plain)) if kept is not None and len(kept["numbers"]) > len(NUMBERS) else kept
    )


def _keep(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cache arrays under the hash of their content, and open the copy."""
    return cache.arrays(cache.OWN, _digest(arrays), lambda: arrays, tuple(arrays))


def _pinned(source: Source, wanted: str) -> dict[str, np.ndarray]:
    arrays = _arrays(source)
    _check_content(source, wanted, _digest(arrays))
    return arrays


def _check_content(source: Source, wanted: str, found: str) -> None:
    if found != wanted:
        raise ConfigError(
            f"{source}: its data have the sha256 {found} here, data.sha256 says {wanted}: the function, its files "
            "or library versions differ from those that made the job"
        )


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for key, array in arrays.items():
        total.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def _arrays(source: Source) -> dict[str, np.ndarray]:
    return _converted(source, _given(source))


def _converted(source: Source, given: Any) -> dict[str, np.ndarray]:
    """Check and convert a data set: labels to uint8, clients to int32, and numbers to one float64 array."""
    problems = _problems(given)
    if problems:
        raise ConfigError([f"{source}: {problem}" for problem in problems])
    owners = dict(zip(CLIENTS, natural.encoded(*(given[key] for key in CLIENTS)), strict=True)) if CLIENTS[0] in given else {}
    features = {key: given[key] for key in cache.KEYS if key.endswith("_x")}
    labels = {key: given[key].astype(np.uint8) for key in cache.KEYS if key.endswith("_y")}
    numbers = np.array([*(given[key] for key in NUMBERS), *([1.0] if owners else [])], np.float64)  # a mark that clients exist
    return {**owners, **{key: {**features, **labels}[key] for key in cache.KEYS}, "numbers": numbers}


def _given(source: Source) -> Any:
    if source.files is None:
        given = plugins.call(FIELD, source.name, source.root)
        if not isinstance(given, Mapping):
            return given
        return {**given, **{key: natural.as_text(given[key]) for key in CLIENTS if isinstance(given.get(key), np.ndarray)}}
    return formats.read(source.name, source.files, source.root)


def _key_differences(given: Mapping[Any, Any]) -> str:
    """Name the keys that a data set lacks, and those that mean nothing."""
    needed = [*cache.KEYS, *NUMBERS, *(CLIENTS if set(CLIENTS) & set(given) else ())]
    lacking = [repr(key) for key in needed if key not in given]
    unknown = [shown(key) for key in given if key not in needed]
    parts = {"it lacks": lacking, "it has unknown keys": unknown}
    return "; ".join(f"{what} {', '.join(keys)}" for what, keys in parts.items() if keys)


def _problems(given: Any) -> list[str]:
    """Problems of a data set; later checks rely on earlier ones."""
    expected = {*cache.KEYS, *NUMBERS}
    if not isinstance(given, Mapping) or set(given) not in (expected, expected | {*CLIENTS}):
        got = _key_differences(given) if isinstance(given, Mapping) else f"got {type(given).__name__}"
        optional = f"and for clients of the records {' and '.join(CLIENTS)}"
        return [f"it must return a dict with the keys {', '.join([*cache.KEYS, *NUMBERS])}, {optional}; {got}"]
    columns = [*cache.KEYS, *(key for key in CLIENTS if key in given)]
    not_arrays = [key for key in columns if not isinstance(given[key], np.ndarray)]
    wrong = [f"{key} must be a numpy array, got {type(given[key]).__name__}" for key in not_arrays]
    if wrong:
        return wrong
    found = _numbers(given) + _features(given["train_x"], given["test_x"])
    for part in ("train", "test"):
        found += _labels(part, given[f"{part}_x"], given[f"{part}_y"], given["classes"])
        if f"{part}_client" in given:
            found += _clients(part, given[f"{part}_x"], given[f"{part}_client"])
    return found


def _clients(part: str, x: np.ndarray, client: np.ndarray) -> list[str]:
    if client.dtype.kind not in "iuUS" or client.shape != (len(x),):
        others = [name for name in client.flat if not isinstance(name, str)] if client.dtype.kind == "O" else []
        first = f" with {shown(others[0])}" if others else ""
        return [
            f"{part}_client must be whole numbers or text, one for each of {len(x)} records, got {client.dtype} {client.shape}{first}"
        ]
    unnamed = natural.unnamed(client)
    return [f"{part}_client: {unnamed}"] if unnamed else []


def _numbers(given: Mapping[str, Any]) -> list[str]:
    found = []
    classes, mean, std = (given[key] for key in NUMBERS)
    if not _is_whole(classes) or not 2 <= classes <= MOST_CLASSES:
        found.append(f"classes must be a whole number from 2 to {MOST_CLASSES}, got {classes!r}")
    if not _is_finite(mean):
        found.append(f"mean must be one finite float32 number, got {mean!r}")
    if not _is_finite(std) or np.float32(std) <= 0:
        found.append(f"std must be one finite float32 number above 0, got {std!r}")
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, (float, np.floating))) and abs(value) <= _LARGEST


def _features(train: np.ndarray, test: np.ndarray) -> list[str]:
    found = []
    for key, x in (("train_x", train), ("test_x", test)):
        images, vectors = x.dtype == np.uint8 and x.ndim == 4, x.dtype == np.float32 and x.ndim == 2
        codes = x.dtype == np.uint8 and x.ndim == 2
        if not (images or vectors or codes):
            of_floats = ": images with values from 0 to 1 become (255 * x).round().astype(np.uint8)"
            found.append(
                f"{key} must be images, uint8 (N, C, H, W), feature vectors, float32 (N, d), or character codes, uint8 (N, d), "
                f"got {x.dtype} {x.shape}{of_floats if x.dtype.kind == 'f' and x.ndim == 4 else ''}"
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
