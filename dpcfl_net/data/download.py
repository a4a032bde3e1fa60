"""Download of the public image data sets with torchvision, checked by MD5."""

from __future__ import annotations

import importlib
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from dpcfl_net.core.atomic import replacing
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.vision import torchvision
from dpcfl_net.data.readers import damaged

# The archive without pickles: records of one label byte and 3 x 32 x 32 pixel bytes (Krizhevsky 2009)
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR_RECORD = 1 + 3 * 32 * 32


def fetch(name: str, root: Path) -> None:
    """Download a data set to where `datasets.load` looks for it.

    Args:
        name: "mnist", "fashion-mnist" or "cifar10".
        root: Folder of the data sets.

    Raises:
        ConfigError: If the download fails.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name == "cifar10":
            _fetch_cifar(root)
        else:
            datasets = torchvision().datasets
            {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name](root, download=True)
    except (OSError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"could not download {name} into {root}: {error}. Without a network, copy the files there from a machine "
            f"that has them, or set DPCFL_DATA to their folder."
        ) from error


def _fetch_cifar(root: Path) -> None:
    if all((root / "CIFAR10" / f"cifar10_{part}.npz").is_file() for part in ("train", "test")):
        return
    torchvision()
    utils = importlib.import_module("torchvision.datasets.utils")
    with tempfile.TemporaryDirectory(dir=root) as folder:
        utils.download_url(CIFAR_URL, folder, "cifar.tar.gz", CIFAR_MD5)
        convert_cifar(Path(folder) / "cifar.tar.gz", root / "CIFAR10")


def convert_cifar(archive: Path, folder: Path) -> None:
    """Convert the binary CIFAR-10 archive to cifar10_train.npz and cifar10_test.npz (x uint8 (N, 32, 32, 3), y uint8 (N,)).

    Args:
        archive: The tar file.
        folder: Target folder.

    Raises:
        ConfigError: If the archive is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, names in (("train", [f"data_batch_{i}.bin" for i in range(1, 6)]), ("test", ["test_batch.bin"])):
        records = np.concatenate([_records(archive, f"cifar-10-batches-bin/{name}") for name in names])
        x = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        with replacing(folder / f"cifar10_{part}.npz") as file:
            np.savez_compressed(file, x=np.ascontiguousarray(x), y=records[:, 0].copy())


def _records(archive: Path, member: str) -> np.ndarray:
    try:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            raw = file.read() if file else b""
    except (KeyError, tarfile.TarError, EOFError) as error:
        raise damaged(archive, str(error)) from error
    if not raw or len(raw) % CIFAR_RECORD:
        raise damaged(archive, f"{member} has {len(raw)} bytes, no multiple of {CIFAR_RECORD}")
    return np.frombuffer(raw, np.uint8).reshape(-1, CIFAR_RECORD)
