"""Folder of one run's compute slots, with a lock that tells later runs whether its owner is alive."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from dpcfl_net.core.locks import try_own
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.training.compute_semaphore import host_folder

PREFIX, LOCK = "run-", ".owner"


class SlotFolder:
    """Compute slots of one run, until `close`.

    The lock lies beside the folder and is held before the folder is made: a folder whose lock is free has lost its owner.

    Args:
        count: Number of workers that may compute at a time.

    Attributes:
        spec: Folder and number of slots, for the workers.
    """

    def __init__(self, count: int) -> None:
        _remove_abandoned(host_folder())
        path = host_folder() / f"{PREFIX}{secrets.token_hex(8)}"
        while (handle := try_own(_lock_of(path))) is None:  # another launcher looks at the new file, and removes it
            path = host_folder() / f"{PREFIX}{secrets.token_hex(8)}"
        self._lock: int | None = handle
        self.spec = (path, count)

    @classmethod
    def of(cls, runtime: RuntimeSettings) -> SlotFolder | None:
        """Return the slots of a run; None: it uses the slots of the host.

        Args:
            runtime: Settings of the run.
        """
        return None if runtime.slots == "auto" else cls(runtime.slots)

    def close(self) -> None:
        """Remove the folder."""
        if self._lock is not None:
            _remove(self.spec[0])
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(host: Path) -> None:
    """Remove folders of launchers that were killed. Their workers, if any are left, keep the files that they have opened."""
    for name in sorted({found.name.removesuffix(LOCK) for found in host.glob(f"{PREFIX}*")}):
        if (handle := try_own(_lock_of(host / name))) is not None:
            _remove(host / name)
            os.close(handle)


def _remove(path: Path) -> None:
    """Remove the folder, then its lock, which the caller holds."""
    shutil.rmtree(path, ignore_errors=True)
    _lock_of(path).unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + LOCK)
