"""Data sets: search for the files on this machine, decoding, and shared memory-mapped arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.core.files import in_home
from dpcfl_net.core.names import hint
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.data import cache, download, own, readers, regression, roles
from dpcfl_net.data.files import FORMATS, FileSource

MIX = "+"  # joins the names of a mixture
DIGITS_TEST = 360
_DIGITS_SEED = 1797


@dataclass(frozen=True)
class Images:
    """One data set; equal to another one read from the same files.

    A pixel or code v is fed to a model as (v / 255 - mean) / std, a feature v as (v - mean) / std.

    Attributes:
        train_x: Training records: images uint8 (N, C, H, W), text windows uint8 (N, d), or vectors float32 (N, d).
        train_y: Training labels, uint8 (N,); for regression the noise term of the targets, float32 (N,).
        test_x: Test records, as `train_x`.
        test_y: Test labels, as `train_y`.
        classes: Number of classes; 1 for regression (the model's single output).
        mean: Subtracted from the records.
        std: Divides the records.
        sha256: Content hash of a plugin data set; None otherwise.
        identity: Text that changes with the source files.
        task: "classification" or "regression".
        groups: Text data sets: offsets of the roles' training and test texts, (R + 1,) each.
        owners: Client of each training and test record, int32 (N,) and (M,), if the records name their clients.
        sources: Data sets of a mixture, one for each true cluster, equal in shape, classes and scaling; its own arrays are
            those of the first. Empty otherwise.
    """

    train_x: np.ndarray = field(compare=False, repr=False)
    train_y: np.ndarray = field(compare=False, repr=False)
    test_x: np.ndarray = field(compare=False, repr=False)
    test_y: np.ndarray = field(compare=False, repr=False)
    classes: int
    mean: float
    std: float
    sha256: str | None
    identity: str = field(repr=False)
    task: Literal["classification", "regression"] = "classification"
    groups: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False, repr=False)
    owners: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False, repr=False)
    sources: tuple[Images, ...] = ()

    def of(self, source: int) -> Images:
        """Return one data set of a mixture, or this one if it is none.

        Args:
            source: Position in the mixture.
        """
        return self.sources[source] if self.sources else self

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record, (C, H, W) or (d,)."""
        return self.train_x.shape[1:]

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of records, (training, test)."""
        return len(self.train_x), len(self.test_x)


@dataclass(frozen=True)
class _Set:
    """Files of a data set (alternatives, preferred first) and their decoder: (paths, (H, W)) -> arrays."""

    files: tuple[tuple[str, ...], ...]
    decode: Callable[[list[Path], tuple[int, int]], dict[str, np.ndarray]]
    size: tuple[int, int]
    mean: float
    std: float
    classes: int = 10


def _idx_files(folder: str, stems: tuple[str, ...] = download.IDX_STEMS) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"{folder}/raw/{stem}-ubyte{end}" for stem in stems) for end in (".gz", ""))


def _decode_idx(paths: list[Path], size: tuple[int, int]) -> dict[str, np.ndarray]:
    train_x, train_y, test_x, test_y = (
        readers.read_idx(path, record) for path, record in zip(paths, (size, (), size, ()), strict=True)
    )
    return {"train_x": train_x[:, None], "train_y": train_y, "test_x": test_x[:, None], "test_y": test_y}


def _decode_npz(paths: list[Path], size: tuple[int, int]) -> dict[str, np.ndarray]:
    (train_x, train_y), (test_x, test_y) = (readers.read_npz(path, (*size, 3)) for path in paths)
    return {"train_x": _channels_first(train_x), "train_y": train_y, "test_x": _channels_first(test_x), "test_y": test_y}


def _channels_first(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _emnist(split: str, classes: int) -> _Set:
    first = 1 if split == "letters" else 0  # the letters are numbered from 1

    def decode(paths: list[Path], size: tuple[int, int]) -> dict[str, np.ndarray]:
        arrays = _decode_idx(paths, size)
        for part in ("train", "test"):  # the files hold transposed images
            arrays[f"{part}_x"] = np.ascontiguousarray(arrays[f"{part}_x"].swapaxes(2, 3))
            arrays[f"{part}_y"] = arrays[f"{part}_y"] - np.uint8(first)  # 0 becomes 255, which no class has
        return arrays

    return _Set(_idx_files("EMNIST", download.emnist_stems(split)), decode, (28, 28), 0.1307, 0.3081, classes)


def _cifar_files(folder: str, *ends: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{folder}/{folder.lower()}_{train}.npz", f"{folder}/{folder.lower()}_{test}.npz") for train, test in ends)


_SETS = {
    "mnist": _Set(_idx_files("MNIST"), _decode_idx, (28, 28), 0.1307, 0.3081),
    "fashion-mnist": _Set(_idx_files("FashionMNIST"), _decode_idx, (28, 28), 0.1307, 0.3081),
    "cifar10": _Set(_cifar_files("CIFAR10", ("train", "test"), ("train_20k", "test_4k")), _decode_npz, (32, 32), 0.5, 0.5),
    "cifar100": _Set(_cifar_files("CIFAR100", ("train", "test")), _decode_npz, (32, 32), 0.5, 0.5, 100),
    **{f"emnist-{split}": _emnist(split, classes) for split, classes in download.EMNIST_CLASSES.items()},
}
PUBLIC = ("digits", *_SETS, "shakespeare", "regression")
NAMES = (*PUBLIC, *FORMATS)


def load(
    name: str, root: str | os.PathLike[str] | None = None, sha256: str | None = None, files: FileSource | None = None
) -> Images:
    """Load a data set; its arrays are read-only views of files that all processes of this user share.

    The files are looked for in `root`, else in $DPCFL_DATA, else in the user's cache folder. "digits" comes with scikit-learn
    and "regression" is generated, so both are always available.

    Args:
        name: One of `PUBLIC`, one of `files.FORMATS` with `files`, or `package.module:function` (docs/how-to/plugins.md).
        root: Folder of the data sets.
        sha256: Content hash of a data set of the user's that the job pins.
        files: Where the files are, for the names in `files.FORMATS`.

    Returns:
        The data set.

    Raises:
        ConfigError: For an unknown name or a damaged file.
        DataMissing: If the files are not there; the message says how to get them.
    """
    if is_plugin(name) or (name in FORMATS and files is not None):
        return Images(**own.load(own.Source(name, _root(root), files), sha256))
    if name == "regression":
        return Images(**regression.load())
    if name == "shakespeare":
        return Images(**roles.load(_root(root)))
    if name == "digits":
        identity = f"scikit-learn digits, split {_DIGITS_SEED}"
        digits: dict[str, Any] = dict(cache.arrays("digits", identity, _read_digits))
        return Images(**digits, classes=10, mean=0.0, std=1.0, sha256=None, identity=identity)
    spec = _known(name)
    folder = _root(root)
    paths = _find(spec, folder)
    if paths is None:
        raise _missing(name, spec, folder)
    identity = readers.identity(paths)
    arrays: dict[str, Any] = dict(cache.arrays(name, identity, lambda: _checked(spec, paths)))
    return Images(**arrays, classes=spec.classes, mean=spec.mean, std=spec.std, sha256=None, identity=identity)


def client_names(
    name: str, root: str | os.PathLike[str] | None = None, sha256: str | None = None, files: FileSource | None = None
) -> list[str] | None:
    """Read the names of the clients of a data set, which no job and no cached copy holds.

    Args:
        name: As for `load`.
        root: As for `load`.
        sha256: Content hash of a data set of the user's.
        files: As for `load`.

    Returns:
        Names in the order of the numbers in `Images.owners`, or of the roles in `Images.groups`; None if there are none.

    Raises:
        ConfigError: As `load`, or if the files have changed.
        DataMissing: As `load`.
    """
    if sha256 is not None:
        return own.client_names(own.Source(name, _root(root), files), sha256)
    return roles.names(_root(root)) if name == "shakespeare" else None


def mixed(names: Sequence[str], root: str | os.PathLike[str] | None = None) -> Images:
    """Load several data sets as the sources of a mixture, one for each true cluster.

    Args:
        names: Names of public data sets.
        root: As for `load`.

    Returns:
        The first data set, with all of them as `sources`.

    Raises:
        ConfigError: As `load`, or if the records of two data sets differ in shape, number of classes or scaling.
        DataMissing: As `load`.
    """
    found = [load(name, root) for name in names]
    kinds = [(each.input_shape, each.classes, each.mean, each.std) for each in found]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            shapes = " and ".join(
                f"{other} has records {shape} of {classes} classes, mean {mean:g}, deviation {std:g}"
                for other, (shape, classes, mean, std) in ((names[0], kinds[0]), (name, kind))
            )
            raise ConfigError(f"data.dataset is {MIX.join(names)!r}: all must be alike, but {shapes}")
    return replace(found[0], sources=tuple(found), identity="\n".join(each.identity for each in found))


def repeats(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Return True if a data set has the same records each time it is loaded; a function of the user's is called again.

    Args:
        name: As for `load`.
        root: As for `load`.

    Raises:
        ConfigError: As `load`.
    """
    return not is_plugin(name) or own.repeats(own.Source(name, _root(root)))


def place(root: str | os.PathLike[str] | None = None) -> tuple[str | None, ...]:
    """Return all values that the place of the files depends on, as `load` looks for them."""
    return (None if root is None else str(root), *map(os.environ.get, ("DPCFL_DATA", "XDG_CACHE_HOME", "HOME")))


def is_here(name: str) -> bool:
    """Return True if the files of a data set are where `load` looks for them; they are not read."""
    if name in _SETS:
        return _find(_SETS[name], _root(None)) is not None
    return name != "shakespeare" or roles.is_here(_root(None))


def fetch(
    name: str,
    root: str | os.PathLike[str] | None = None,
    mirror: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Download a data set; data sets without a download are only loaded.

    Args:
        name: Name of a public data set.
        root: Target folder; default as for `load`.
        mirror: Address of a folder with the same files, in place of the official ones.
        say: Called with the address of each download, before it begins.

    Returns:
        The folder.

    Raises:
        ConfigError: If the name is unknown or the download fails.
        DataMissing: If the data set has no download and is not there.
    """
    folder = _root(root)
    if name not in ("digits", "regression", "shakespeare"):
        if name not in download.REMOTES:
            allowed = ", ".join(download.REMOTES)
            raise ConfigError(f"unknown data set {name!r}, allowed: {allowed}{hint(name, download.REMOTES)}")
        download.fetch(name, folder, mirror, say)
    load(name, folder)
    return folder


def _known(name: str) -> _Set:
    if name not in _SETS:
        raise ConfigError(f"unknown data set {name!r}, allowed: {', '.join(PUBLIC)} or package.module:function")
    return _SETS[name]


def _root(root: str | os.PathLike[str] | None) -> Path:
    chosen = root or os.environ.get("DPCFL_DATA") or cache.folder() / "data"
    path = in_home(chosen, "data.root" if root else "DPCFL_DATA")
    return Path(os.path.realpath(path))  # resolve() raises on a loop of symbolic links


def _find(spec: _Set, folder: Path) -> list[Path] | None:
    for names in spec.files:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return paths
    return None


def _missing(name: str, spec: _Set, folder: Path) -> DataMissing:
    wanted = ", ".join(spec.files[0])
    return DataMissing(
        f"data set {name!r} is not in {folder} (looked for {wanted}). "
        f"Get it with `dpcfl data fetch {name}`, or set DPCFL_DATA (or data.root) to a folder that has it."
    )


def _checked(spec: _Set, paths: list[Path]) -> dict[str, np.ndarray]:
    arrays = spec.decode(paths, spec.size)
    # Training files come first, and labels are in the last file of each split.
    last_files = {"train": paths[len(paths) // 2 - 1], "test": paths[-1]}
    for part, path in last_files.items():
        x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
        if len(x) != len(y) or not len(y):
            raise readers.damaged(path, f"{len(x)} {part} images and {len(y)} labels")
        if y.max() >= spec.classes:
            raise readers.damaged(path, f"{part} label {y.max()}, must be 0 to {spec.classes - 1}")
    return arrays


def _read_digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = np.rint(x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = y.astype(np.uint8)
    order = np.random.Generator(np.random.PCG64(_DIGITS_SEED)).permutation(len(x))
    train, test = order[:-DIGITS_TEST], order[-DIGITS_TEST:]
    return {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
