"""Download of the public image data sets: official addresses, checksums, and conversion to the files that are read."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpcfl_net.core.atomic import replacing
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.readers import damaged

TIMEOUT_S = 30.0  # without a byte
CHUNK = 1 << 20
MOST_BYTES = 2 << 30  # of one file; the largest has 560 MB, and a server may send without an end
PIXELS = 3 * 32 * 32
# Names of IDX files without their end: training images and labels, test images and labels.
IDX_STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


@dataclass(frozen=True)
class Remote:
    """A file of a data set.

    Attributes:
        addresses: Folders that have the file, the first that answers is used.
        name: Name of the file there.
        checksum: "md5:..." or "sha256:..." of its content.
        targets: Files that it becomes, relative to the folder of the data sets.
        convert: Writes the targets from the file, (file, folder of the data sets); None: it is the target.
    """

    addresses: tuple[str, ...]
    name: str
    checksum: str
    targets: tuple[str, ...]
    convert: Callable[[Path, Path], None] | None = None


def _idx(folder: str, addresses: tuple[str, ...], sums: tuple[str, str, str, str]) -> tuple[Remote, ...]:
    names = [f"{stem}-ubyte.gz" for stem in IDX_STEMS]
    return tuple(
        Remote(addresses, name, f"sha256:{found}", (f"{folder}/raw/{name}",)) for name, found in zip(names, sums, strict=True)
    )


@dataclass(frozen=True)
class _Cifar:
    """Members of a binary archive without pickles; a record has label bytes, of which the last counts, and 3072 pixels."""

    archive: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int = 1


_CIFAR = {
    "cifar10": _Cifar(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),
        ("cifar-10-batches-bin/test_batch.bin",),
    ),
    "cifar100": _Cifar(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        ("cifar-100-binary/train.bin",),
        ("cifar-100-binary/test.bin",),
        labels=2,
    ),
}
# Number of classes of each split.
EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


def emnist_stems(split: str) -> tuple[str, ...]:
    """Return the names of a split's files as those of `IDX_STEMS`."""
    return tuple(f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1"))


_EMNIST_FILES = tuple(f"{stem}-ubyte.gz" for split in EMNIST_CLASSES for stem in emnist_stems(split))


def convert_cifar(archive: Path, folder: Path, name: str = "cifar10") -> None:
    """Convert a binary CIFAR archive to NAME_train.npz and NAME_test.npz (x uint8 (N, 32, 32, 3), y uint8 (N,)).

    Args:
        archive: The tar file.
        folder: Target folder.
        name: "cifar10", or "cifar100" with its 100 fine labels.

    Raises:
        ConfigError: If the archive is damaged.

    Source: Krizhevsky 2009.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec = _CIFAR[name]
    for part, members in (("train", spec.train), ("test", spec.test)):
        records = np.concatenate([_records(archive, member, spec.labels + PIXELS) for member in members])
        x = records[:, spec.labels :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        with replacing(folder / f"{name}_{part}.npz") as file:
            np.savez_compressed(file, x=np.ascontiguousarray(x), y=records[:, spec.labels - 1].copy())


def _records(archive: Path, member: str, size: int) -> np.ndarray:
    try:
        with tarfile.open(archive) as tar:
            file = tar.extractfile(member)
            raw = file.read() if file else b""
    except (KeyError, tarfile.TarError, EOFError, zlib.error) as error:
        raise damaged(archive, str(error)) from error
    if not raw or len(raw) % size:
        raise damaged(archive, f"{member} has {len(raw)} bytes, no multiple of {size}")
    return np.frombuffer(raw, np.uint8).reshape(-1, size)


def unpack_emnist(archive: Path, root: Path) -> None:
    """Unpack the gzipped IDX files of all splits to EMNIST/raw.

    Args:
        archive: The zip file.
        root: Folder of the data sets.

    Raises:
        ConfigError: If the archive is damaged.
    """
    folder = root / "EMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as packed:
            for name in _EMNIST_FILES:
                with packed.open(f"gzip/{name}") as member, replacing(folder / name) as file:
                    shutil.copyfileobj(member, file, CHUNK)
    except (KeyError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise damaged(archive, str(error)) from error


def _cifar_remote(name: str) -> Remote:
    spec, folder = _CIFAR[name], name.upper()
    return Remote(
        ("https://www.cs.toronto.edu/~kriz",),
        spec.archive,
        f"md5:{spec.md5}",
        tuple(f"{folder}/{name}_{part}.npz" for part in ("train", "test")),
        lambda archive, root: convert_cifar(archive, root / folder, name),
    )


_EMNIST = Remote(
    ("https://biometrics.nist.gov/cs_links/EMNIST",),
    "gzip.zip",
    "md5:58c8d27c78d21e728a6bc7b3cc06412e",
    tuple(f"EMNIST/raw/{name}" for name in _EMNIST_FILES),
    unpack_emnist,
)
REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": _idx(
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist"),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": _idx(
        "FashionMNIST",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    "cifar10": (_cifar_remote("cifar10"),),
    "cifar100": (_cifar_remote("cifar100"),),
    **dict.fromkeys([f"emnist-{split}" for split in EMNIST_CLASSES], (_EMNIST,)),
}


def fetch(name: str, root: Path, mirror: str | None = None, say: Callable[[str], None] = lambda line: None) -> None:
    """Download a data set to where `datasets.load` looks for it; files that are there are kept if their checksum is right.

    An interrupted download leaves no file behind: each appears under its name once it is complete and its checksum is right.

    Args:
        name: A name of `REMOTES`.
        root: Folder of the data sets.
        mirror: Address of a folder with the same files, in place of the official ones.
        say: Called with the address of each download, before it begins.

    Raises:
        ConfigError: If the download fails, or a file has another checksum.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        for remote in REMOTES[name]:
            if not _is_there(remote, root):
                # The system's temporary folder is often too small, and a file can only be renamed within a file system.
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as folder:
                    _place(remote, _downloaded(remote, Path(folder), mirror, say), root)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"could not download {name} into {root}: {error}. Without a network, copy the files there from a machine "
            f"that has them, set DPCFL_DATA to their folder, or name a mirror with --mirror."
        ) from error


def _is_there(remote: Remote, root: Path) -> bool:
    paths = [root / target for target in remote.targets]
    return all(path.is_file() for path in paths) and (
        remote.convert is not None or _checksum(paths[0], remote) == remote.checksum
    )


def _place(remote: Remote, file: Path, root: Path) -> None:
    if remote.convert is not None:
        remote.convert(file, root)
        return
    target = root / remote.targets[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, target)


def _checksum(path: Path, remote: Remote) -> str:
    kind = remote.checksum.partition(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _downloaded(remote: Remote, folder: Path, mirror: str | None, say: Callable[[str], None]) -> Path:
    """Download from the first address that answers, and compare the checksum."""
    path, failures = folder / remote.name, []
    for address in (mirror,) if mirror is not None else remote.addresses:
        url = f"{address.rstrip('/')}/{remote.name}"
        say(url)
        try:
            _transfer(url, path)
        except (OSError, ValueError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
            continue
        found = _checksum(path, remote)
        if found == remote.checksum:
            return path
        failures.append(f"{url}: {path.stat().st_size:,} bytes with {found}, must be {remote.checksum}")
    raise OSError("; ".join(failures))


def _transfer(url: str, path: Path) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    request = urllib.request.Request(url, headers={"User-Agent": "dpcfl"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, path.open("wb") as file:
        while part := answer.read(CHUNK):
            file.write(part)
            if file.tell() > MOST_BYTES:
                raise OSError(f"more than {MOST_BYTES:,} bytes, the limit")
