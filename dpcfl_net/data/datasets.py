"""The data sets, from where they lie on this machine to shared, memory-mapped arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.data import cache, own, readers
from dpcfl_net.data.download import fetch as _download
from dpcfl_net.errors import ConfigError, DataMissing
from dpcfl_net.plugins import is_plugin

DIGITS_TEST = 360
_DIGITS_SEED = 1797


@dataclass(frozen=True, eq=False)
class Images:
    """One data set. x: uint8 (N, C, H, W), or float32 (N, d) in a set of the user's own; y: uint8 (N,).

    A pixel v is fed to a model as (v / 255 - mean) / std, a float feature v as (v - mean) / std. sha256: the content of a
    set of the user's own.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    mean: float
    std: float
    sha256: str | None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) or (d,)."""
        return self.train_x.shape[1:]

    @property
    def sizes(self) -> tuple[int, int]:
        """(training records, test records)."""
        return len(self.train_x), len(self.test_x)


@dataclass(frozen=True)
class _Set:
    """Where a set's files are (alternatives, best first; .gz may be missing) and how they are decoded."""

    files: tuple[tuple[str, ...], ...]
    decode: Callable[[list[Path]], dict[str, np.ndarray]]
    mean: float
    std: float
    classes: int = 10


def _idx_files(folder: str) -> tuple[tuple[str, ...], ...]:
    stems = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(tuple(f"{folder}/raw/{stem}-ubyte{end}" for stem in stems) for end in (".gz", ""))


def _decode_idx(paths: list[Path]) -> dict[str, np.ndarray]:
    train_x, train_y, test_x, test_y = (readers.read_idx(path) for path in paths)
    return {"train_x": _one_channel(train_x), "train_y": train_y, "test_x": _one_channel(test_x), "test_y": test_y}


def _decode_npz(paths: list[Path]) -> dict[str, np.ndarray]:
    (train_x, train_y), (test_x, test_y) = (readers.read_npz(path) for path in paths)
    return {"train_x": _channels_first(train_x), "train_y": train_y, "test_x": _channels_first(test_x), "test_y": test_y}


def _one_channel(x: np.ndarray) -> np.ndarray:
    return x[:, None]


def _channels_first(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


_CIFAR = (
    ("CIFAR10/cifar10_train.npz", "CIFAR10/cifar10_test.npz"),
    ("CIFAR10/cifar10_train_20k.npz", "CIFAR10/cifar10_test_4k.npz"),
)
_SETS = {
    "mnist": _Set(_idx_files("MNIST"), _decode_idx, 0.1307, 0.3081),
    "fashion-mnist": _Set(_idx_files("FashionMNIST"), _decode_idx, 0.1307, 0.3081),
    "cifar10": _Set(_CIFAR, _decode_npz, 0.5, 0.5),
}
NAMES = ("digits", *_SETS)


def load(name: str, root: str | os.PathLike[str] | None = None, sha256: str | None = None) -> Images:
    """The set called `name`; its arrays are read-only views of files that all processes of this user share.

    Looked for in `root`, else in $DPCFL_DATA, else in the user's cache folder. ConfigError: unknown name, or a damaged
    file (named); DataMissing: not there, with how to get it. `digits` comes with scikit-learn and is always there.
    `package.module:function` is a set of the user's own (docs/plugins.md), sha256 the content of one as a job pins it.
    """
    if is_plugin(name):
        return Images(**own.load(name, _root(root), sha256))
    if name == "digits":
        arrays = cache.arrays("digits", f"scikit-learn digits, split {_DIGITS_SEED}", _read_digits)
        return Images(**arrays, classes=10, mean=0.0, std=1.0, sha256=None)
    spec = _known(name)
    folder = _root(root)
    paths = _find(spec, folder)
    if paths is None:
        raise _missing(name, spec, folder)
    arrays = cache.arrays(name, _identity(paths), lambda: _checked(spec, paths))
    return Images(**arrays, classes=spec.classes, mean=spec.mean, std=spec.std, sha256=None)


def fetch(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """Download `name` into `root` (default as in `load`) and say where it is; ConfigError if that cannot be done."""
    folder = _root(root)
    if name != "digits":
        _known(name)
        _download(name, folder)
    load(name, folder)
    return folder


def _known(name: str) -> _Set:
    if name not in _SETS:
        raise ConfigError(f"unknown data set {name!r}, allowed: {', '.join(NAMES)} or package.module:function")
    return _SETS[name]


def _root(root: str | os.PathLike[str] | None) -> Path:
    chosen = root or os.environ.get("DPCFL_DATA") or cache.folder() / "data"
    return Path(chosen).expanduser().resolve()


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


def _identity(paths: list[Path]) -> str:
    return "\n".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)


def _checked(spec: _Set, paths: list[Path]) -> dict[str, np.ndarray]:
    arrays = spec.decode(paths)
    where = paths[0].parent
    for part in ("train", "test"):
        x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
        if y.ndim != 1 or len(x) != len(y) or not len(y):
            raise ConfigError(f"damaged data in {where}: {len(x)} {part} images but labels of shape {y.shape}")
        if y.max() >= spec.classes:
            raise ConfigError(f"damaged data in {where}: {part} label {y.max()}, expected 0..{spec.classes - 1}")
    return arrays


def _read_digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = np.rint(x.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = y.astype(np.uint8)
    order = np.random.Generator(np.random.PCG64(_DIGITS_SEED)).permutation(len(x))
    train, test = order[:-DIGITS_TEST], order[-DIGITS_TEST:]
    return {"train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test]}
