"""Checkpoints of the server state, read to resume a run.

A checkpoint is flushed to the disk while the next round runs. Until then a crash of the machine (not of the process) may damage it;
its hashes show that, and the run resumes from the one before, whose flush has ended. So at most two rounds are repeated, and clients
keep their answers of two rounds. A repeated round gives the same models, since clients send the same bytes. That does not hold for a
round that lacks clients: its checkpoint is flushed before the next round begins (`coordinator.drive`), since clients refuse another
model in a round that they have charged. For the same reason a resumed run first flushes the checkpoint that it starts from
(`Checkpoints.resume`): the process that wrote it may have been killed before its flush ended, or the flush has failed.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from dpcfl_net.core.atomic import sync_file, sync_folder
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.files import naming, read_bytes
from dpcfl_net.core.types import State
from dpcfl_net.privacy.ledger.durable import Disk

_log = logging.getLogger(__name__)

ARRAY = "__array__"
STATE, HASHES = "state.msgpack", "sha256"
MOST_BYTES = 1 << 40  # of one file


def rounds_in(folder: Path) -> list[int]:
    """List the rounds with a checkpoint in increasing order; none if the folder does not exist.

    Args:
        folder: Folder `checkpoints/` of a run.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"round_([0-9]{5,9})", name)))


class Checkpoints:
    """Folder `checkpoints/` of a run: round_00012/{state.msgpack, cluster_0.safetensors, ..., sha256}.

    The file sha256 holds the hash of every other file. A damaged checkpoint is skipped with a warning. One thread writes.

    Args:
        folder: The folder; created if it does not exist.
        keep: Number of newest checkpoints to keep.
        warn: Receives warnings.
        durable: False skips the flushes: a crash of the machine may damage the newest checkpoints.
    """

    def __init__(
        self, folder: Path, keep: int = 2, warn: Callable[[str], None] = lambda text: None, *, durable: bool = True
    ) -> None:
        self.folder, self.keep, self._warn, self._durable = folder, keep, warn, durable
        self._flushing: Future[None] | None = None
        self._flusher = ThreadPoolExecutor(1, "checkpoint")  # one thread for all rounds: no round waits until it has started
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, t: int, state: State) -> None:
        """Write the state after round t; wait for the flush of the checkpoint before, and begin that of this one.

        Args:
            t: Round.
            state: State after the round.

        Raises:
            OSError: If a file cannot be written, or one of the checkpoint before could not be flushed.
            RunFailed: If memory or diagnostics hold a value that cannot be read back.
        """
        self.flush()
        packed = _packed(t, state)
        _log.debug("writes the checkpoint of round %d", t)
        final = self.folder / f"round_{t:05d}"
        draft = self.folder / f".round_{t:05d}.part"
        with naming(final):
            self._write_files(draft, state, packed)
            _remove(final)
            draft.rename(final)
        self._flushing = self._flusher.submit(self._flush, final)

    def _write_files(self, draft: Path, state: State, packed: bytes) -> None:
        from safetensors.numpy import save

        _remove(draft)
        draft.mkdir()
        hashes = {}
        for cluster, model in enumerate(state.models):
            name, data = f"cluster_{cluster}.safetensors", save({"theta": np.ascontiguousarray(model)})
            (draft / name).write_bytes(data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        (draft / STATE).write_bytes(packed)
        hashes[STATE] = hashlib.sha256(packed).hexdigest()
        (draft / HASHES).write_text("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)))

    def flush(self) -> None:
        """Wait until the newest checkpoint is on the disk and the oldest are removed.

        Raises:
            OSError: If that has failed.
        """
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()

    def _flush(self, final: Path) -> None:
        if self._durable:
            for path in final.iterdir():
                sync_file(path)
            sync_folder(final)
            sync_folder(self.folder)
        for old in self.rounds()[: -self.keep]:
            _remove(self.folder / f"round_{old:05d}")

    def rounds(self) -> list[int]:
        """List the rounds with a checkpoint in increasing order, damaged ones included; other files are ignored."""
        return rounds_in(self.folder)

    def resume(self) -> tuple[int, State] | None:
        """Read the newest checkpoint that is not damaged, and flush it, which the process that wrote it may not have done.

        Returns:
            As `newest`.

        Raises:
            RunFailed: As `newest`.
            OSError: If it cannot be flushed.
        """
        found, disk = self.newest(), Disk(self._durable)
        if found is not None:
            disk.sync_tree(self.folder / f"round_{found[0]:05d}")
            disk.sync_folder(self.folder.parent)
        return found

    def newest(self) -> tuple[int, State] | None:
        """Read the newest checkpoint that is not damaged.

        Returns:
            (round, state), or None without a checkpoint.

        Raises:
            RunFailed: If all checkpoints are damaged.
        """
        rounds = self.rounds()
        for t in reversed(rounds):
            try:
                return t, self.read(t)
            except RunFailed as problem:
                self._warn(f"{problem}; using the checkpoint before it")
        if rounds:
            raise RunFailed(f"no checkpoint in {self.folder} can be read: rounds {', '.join(map(str, rounds))}")
        return None

    def read(self, t: int) -> State:
        """Read the state after round t.

        Args:
            t: Round.

        Returns:
            The state.

        Raises:
            RunFailed: If a file is missing, its hash differs from the recorded one, or it does not hold what `write` writes.
        """
        folder = self.folder / f"round_{t:05d}"
        try:
            return _state(t, _verified_files(folder))
        except Exception as error:  # the observer reads what an untrusted server wrote: its hashes fit any content
            raise RunFailed(f"checkpoint {folder} cannot be read: {error}") from None


def _verified_files(folder: Path) -> dict[str, bytes]:
    """Read the files of a checkpoint; ValueError if a hash differs from the recorded one."""
    files: dict[str, bytes] = {}
    for line in read_bytes(folder / HASHES).decode().splitlines():
        expected, _, name = line.partition("  ")
        if name != Path(name).name:
            raise ValueError(f"{name!r} is not the name of one of its files")
        files[name] = read_bytes(folder / name, MOST_BYTES)
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise ValueError(f"{name} differs from its recorded hash")
    return files


def _state(t: int, files: dict[str, bytes]) -> State:
    """Read the state after round t; any exception if the files do not hold one."""
    fields = msgpack.unpackb(files[STATE], max_bin_len=MOST_BYTES)
    if fields["round"] != t:
        raise ValueError(f"it holds round {fields['round']}")
    memory, diagnostics = _decode(fields["memory"]), _decode(fields["diagnostics"])
    if not (isinstance(fields["assignment"], list) and isinstance(memory, dict) and isinstance(diagnostics, dict)):
        raise ValueError("assignment, memory or diagnostics are of another type")
    return State(_models(fields["models"], files), fields["assignment"], memory, diagnostics)


def _models(shape: Any, files: dict[str, bytes]) -> np.ndarray:
    """Read the models; takes no memory for a recorded shape that they do not have."""
    from safetensors.numpy import load

    count, size = shape
    if sum(len(data) for data in files.values()) < 4 * count * size:
        raise ValueError(f"{count} models of {size} parameters do not fit its files")
    models = np.empty((count, size), np.float32)
    for cluster in range(count):
        model = load(files[f"cluster_{cluster}.safetensors"])["theta"]
        if model.dtype != np.float32 or model.shape != (size,):
            raise ValueError(f"model {cluster} is {model.dtype} {model.shape}, must be float32 ({size},)")
        models[cluster] = model
    return models


def _remove(path: Path) -> None:
    """Remove a checkpoint's folder, or a file of the same name."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _packed(t: int, state: State) -> bytes:
    """Bytes of the state without its models."""
    try:
        data: bytes = msgpack.packb({
            "round": t, "models": list(state.models.shape), "assignment": state.assignment,
            "memory": _encode(state.memory), "diagnostics": _encode(state.diagnostics),
        })  # fmt: skip
    except (TypeError, ValueError, OverflowError) as error:
        raise RunFailed(
            f"the state after round {t} cannot be stored: {error}; State.memory and State.diagnostics hold numbers, texts, lists, "
            "arrays of numbers, and dicts with texts as keys"
        ) from None
    return data


def _encode(value: Any) -> Any:
    """Replace arrays by values that msgpack can write; TypeError for a value that it could not read back."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("an array of objects")
        return {ARRAY: [array.dtype.str, list(array.shape), array.tobytes()]}
    if isinstance(value, bytes | bytearray | memoryview):  # the run's files are JSON
        raise TypeError("bytes")
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict has the key {odd[0]!r}")
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    """Restore the arrays that `_encode` replaced."""
    if isinstance(value, dict):
        if ARRAY in value:
            dtype, shape, data = value[ARRAY]
            return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
