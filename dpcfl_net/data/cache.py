"""Cache of decoded arrays: one memory-mapped file per array, shared by all processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from dpcfl_net.core.atomic import replacing
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import reason
from dpcfl_net.core.shared_result import shared

FORMAT = 1
KEYS = ("train_x", "train_y", "test_x", "test_y")
OWN = "own"  # name of the user's data sets; other users may not read their copies, since they may be barred from the original


def folder() -> Path:
    """Return the user's cache folder of this program: $XDG_CACHE_HOME/dpcfl_net, else ~/.cache/dpcfl_net.

    Raises:
        ConfigError: Without XDG_CACHE_HOME, if the user has no home folder: neither HOME nor an entry in /etc/passwd.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dpcfl_net"
    except RuntimeError:
        raise ConfigError("this user has no home folder: set HOME, or XDG_CACHE_HOME to a folder for caches") from None


def arrays(
    name: str, identity: str, decode: Callable[[], dict[str, np.ndarray]], keys: tuple[str, ...] = KEYS
) -> dict[str, np.ndarray]:
    """Open the cached arrays of a data set read-only; decode them first if there is no valid copy.

    One process decodes; others wait for it, unless it is stopped.

    Args:
        name: Name of the data set.
        identity: Text that changes with the content of the source files.
        decode: Returns the arrays; called only without a valid copy.
        keys: Names of the arrays.

    Returns:
        Memory-mapped arrays by name.

    Raises:
        ConfigError: If the folder cannot be written, or the copy cannot be read back.
    """
    home = _home(name, identity)
    found = find(name, identity, keys)
    if found is not None:
        return found
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700 if name == OWN else 0o777)
        return shared(home / "lock", lambda: _open(home, keys), lambda: _keep(home, keys, decode()))
    except OSError as error:
        raise ConfigError(
            f"cannot write decoded images to {home}: {reason(error)}; set XDG_CACHE_HOME to a folder that you can write, with free space"
        ) from error


def find(name: str, identity: str, keys: tuple[str, ...]) -> dict[str, np.ndarray] | None:
    """Open cached arrays as `arrays` does; None if there is no valid copy with all of them.

    Args:
        name: Name of the data set.
        identity: Text that changes with the content.
        keys: Names of the arrays.
    """
    home = _home(name, identity)
    found = _open(home, keys)
    if found is not None and name == OWN:
        _close(home)
    return found


def _close(folder: Path) -> None:
    """Close a folder to other users that an earlier version left open."""
    state = folder.stat()
    if state.st_mode & 0o077 and state.st_uid == os.getuid():
        folder.chmod(0o700)


def _home(name: str, identity: str) -> Path:
    key = hashlib.sha256(f"{FORMAT}\n{identity}".encode()).hexdigest()[:16]
    return folder() / "images" / f"{name}-{key}"


def _open(home: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray] | None:
    paths = tuple(home / f"{key}.npy" for key in keys)
    try:
        stamps = tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in (path.stat() for path in paths))
        # mmap of a file cut short raises here, so a damaged copy counts as none
        return dict(zip(keys, _mapped(paths, stamps), strict=True))
    except (OSError, ValueError, EOFError):
        return None


@lru_cache(maxsize=4)
def _mapped(paths: tuple[Path, ...], stamps: object) -> list[np.ndarray]:
    """Map the files once per process for as long as their stamps are the same."""
    return [np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) for path in paths]


def _keep(home: Path, keys: tuple[str, ...], decoded: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for key in keys:
        with replacing(home / f"{key}.npy", durable=True) as file:
            np.save(file, np.ascontiguousarray(decoded[key]), allow_pickle=False)
    found = _open(home, keys)
    if found is None:
        raise ConfigError(f"decoded images in {home} cannot be read back; delete that folder")
    return found
