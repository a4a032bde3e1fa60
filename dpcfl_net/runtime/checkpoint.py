"""A checkpoint is the last State: written whole or not at all, read to go on."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from dpcfl_net.core.atomic import sync_folder, write_durably
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.types import State

ARRAY = "__array__"
STATE, HASHES = "state.msgpack", "sha256"


class Checkpoints:
    """The folder `checkpoints/` of a run: round_00012/{state.msgpack, cluster_0.safetensors, ..., sha256}; the newest `keep` stay.

    sha256 holds the hash of every other file. A checkpoint that is not what was written counts as none: `warn` is told, and
    the one before is taken.
    """

    def __init__(self, folder: Path, keep: int = 2, warn: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.keep, self._warn = folder, keep, warn
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, t: int, state: State) -> None:
        """Store the state after round t durably, then forget the oldest."""
        final = self.folder / f"round_{t:05d}"
        draft = self.folder / f".round_{t:05d}.part"
        _remove(draft)
        draft.mkdir()
        from safetensors.numpy import save

        hashes = {}
        for cluster, model in enumerate(state.models):
            name, data = f"cluster_{cluster}.safetensors", save({"theta": np.ascontiguousarray(model)})
            write_durably(draft / name, data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        rest = {"round": t, "models": list(state.models.shape), "assignment": state.assignment,
                "memory": _plain(state.memory), "diagnostics": _plain(state.diagnostics)}  # fmt: skip
        data = msgpack.packb(rest)
        write_durably(draft / STATE, data)
        hashes[STATE] = hashlib.sha256(data).hexdigest()
        write_durably(draft / HASHES, "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)).encode())
        sync_folder(draft)
        _remove(final)
        draft.rename(final)
        sync_folder(self.folder)
        for old in self.rounds()[: -self.keep]:
            _remove(self.folder / f"round_{old:05d}")

    def rounds(self) -> list[int]:
        """The rounds that are there, in order, whole or not; what else lies in the folder is none."""
        found = (re.fullmatch(r"round_([0-9]{5,9})", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def newest(self) -> tuple[int, State] | None:
        """(round, state) of the newest whole checkpoint; None if there is none at all, RunFailed if all are damaged."""
        rounds = self.rounds()
        for t in reversed(rounds):
            try:
                return t, self.read(t)
            except RunFailed as problem:
                self._warn(f"{problem}; going on from the one before")
        if rounds:
            raise RunFailed(f"no checkpoint in {self.folder} can be read: rounds {', '.join(map(str, rounds))}")
        return None

    def read(self, t: int) -> State:
        """The state after round t; RunFailed if its files are not those that were written."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        folder = self.folder / f"round_{t:05d}"
        try:
            files = _whole(folder)
            rest = msgpack.unpackb(files[STATE], max_bin_len=1 << 40)
            models = np.empty(rest["models"], dtype=np.float32)
            for cluster in range(len(models)):
                models[cluster] = load(files[f"cluster_{cluster}.safetensors"])["theta"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunFailed(f"checkpoint {folder} cannot be read: {error}") from None
        return State(models, rest["assignment"], _rich(rest["memory"]), _rich(rest["diagnostics"]))


def _whole(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint; ValueError naming one that is not what was written."""
    files: dict[str, bytes] = {}
    for line in (folder / HASHES).read_text().splitlines():
        wanted, _, name = line.partition("  ")
        files[name] = (folder / name).read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != wanted:
            raise ValueError(f"{name} is not what was written")
    return files


def _remove(path: Path) -> None:
    """Remove a checkpoint's folder, or a file that stands in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {ARRAY: [array.dtype.str, list(array.shape), array.tobytes()]}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        if ARRAY in value:
            dtype, shape, data = value[ARRAY]
            return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
        return {key: _rich(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rich(item) for item in value]
    return value
