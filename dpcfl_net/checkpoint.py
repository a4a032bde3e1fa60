"""A checkpoint is the last State: written whole or not at all, read to go on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from dpcfl_net.errors import RunFailed
from dpcfl_net.types import State

ARRAY = "__array__"


class Checkpoints:
    """The folder `checkpoints/` of a run: round_00012/{state.msgpack, cluster_0.safetensors, ...}; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, t: int, state: State) -> None:
        """Store the state after round t durably, then forget the oldest."""
        final = self.folder / f"round_{t:05d}"
        draft = self.folder / f".round_{t:05d}.part"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        from safetensors.numpy import save

        for cluster, model in enumerate(state.models):
            _durable(draft / f"cluster_{cluster}.safetensors", save({"theta": np.ascontiguousarray(model)}))
        rest = {"round": t, "models": list(state.models.shape), "assignment": state.assignment, "memory": _plain(state.memory)}
        _durable(draft / "state.msgpack", msgpack.packb(rest))
        _sync(draft)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync(self.folder)
        for old in self.rounds()[: -self.keep]:
            shutil.rmtree(self.folder / f"round_{old:05d}")

    def rounds(self) -> list[int]:
        """The rounds that are there, in order."""
        return sorted(int(path.name.removeprefix("round_")) for path in self.folder.glob("round_*"))

    def newest(self) -> tuple[int, State] | None:
        """(round, state) of the newest checkpoint, or None; RunFailed names one that cannot be read."""
        rounds = self.rounds()
        return (rounds[-1], self.read(rounds[-1])) if rounds else None

    def read(self, t: int) -> State:
        """The state after round t."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = self.folder / f"round_{t:05d}"
        try:
            rest = msgpack.unpackb((folder / "state.msgpack").read_bytes(), max_bin_len=1 << 40)
            models = np.empty(rest["models"], dtype=np.float32)
            for cluster in range(len(models)):
                models[cluster] = load_file(folder / f"cluster_{cluster}.safetensors")["theta"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunFailed(f"checkpoint {folder} cannot be read: {error}") from None
        return State(models, rest["assignment"], _rich(rest["memory"]))


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


def _durable(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
