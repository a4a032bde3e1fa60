"""An audited client: it trains on canaries, and records the noisy sum of every step; gate, ledger and mechanism are unchanged.

The recorded sums stay in the client's folder and are never sent. They are the worst case that the accountant assumes: a server
that sees the noisy sum of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core import tensors
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.types import Release, Task
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.client_host import ClientHost, Split
from dpcfl_net.federation.engine import Engine
from dpcfl_net.federation.gate import Charge
from dpcfl_net.privacy.canaries import GAIN, Canaries, CanaryPath, CanaryRecords
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.training.dpsgd import Trainer

FOLDER = "canaries"  # in the folder of the client's ledger


def taped(ledger: Path, round: int, kind: str) -> np.ndarray | None:
    """Read the recorded sums of one task.

    Args:
        ledger: Folder of the client's ledger.
        round: Round of the task.
        kind: Name of the task.

    Returns:
        Noisy sum of each step along each canary, (steps, m) float32, in units of the clip norm; None without a record.
    """
    path = _path(ledger, round, kind)
    return tensors.unpack(path.read_bytes())["sums"] if path.exists() else None


class AuditedHost(ClientHost):
    """A `ClientHost` whose training records are canaries, or empty slots.

    Args:
        algorithm: The job's algorithm.
        client: Client id.
        ledger: The client's ledger.
        open_data: Opens the records of a split; used for all splits except "train".
        canaries: The canaries.
        present: True for each canary that is in, (m,) bool; (0,) for empty slots only.
        noise_seed: Seed of the noise; None: noise of the operating system.
        identity: As for `ClientHost`.
    """

    def __init__(
        self, algorithm: ClientSide, client: int, ledger: Ledger, open_data: Callable[[Split], Any], canaries: Canaries,
        present: np.ndarray, noise_seed: bytes | None, identity: bytes | None = None,
    ) -> None:  # fmt: skip
        protocol = algorithm.protocol
        tap = self._tap = Tap(ledger.folder, canaries, protocol.local.clip)

        def records(part: Split) -> Any:
            if part != "train":
                return open_data(part)
            return CanaryRecords(protocol.client(client).records, present, tuple(protocol.model.input_shape))

        super().__init__(
            algorithm, client, ledger, records, lambda: CanaryEngine(protocol, canaries, tap), noise_seed, identity
        )

    def _compute(self, task: Task, charge: Charge, state: dict[str, Any]) -> tuple[Release, dict[str, Any], list[Event]]:
        with self._tap.during(task):
            return super()._compute(task, charge, state)


class Tap:
    """Records the projection of each step's noisy sum on each canary, in one file for each task.

    A task that runs again after a crash writes the same bits again.
    """

    def __init__(self, ledger: Path, canaries: Canaries, clip: float) -> None:
        self._ledger, self._canaries, self._clip = ledger, canaries, clip
        self._sums: list[np.ndarray] = []

    def __call__(self, noisy: np.ndarray) -> None:
        """Record the noisy sum of one step, (p,)."""
        self._sums.append((self._canaries.project(noisy) / self._clip).astype(np.float32))

    @contextmanager
    def during(self, task: Task) -> Iterator[None]:
        """Record the steps of one task; write them at the end of the `with` block."""
        self._sums = []
        yield
        if self._sums:
            path = _path(self._ledger, task.round, task.kind)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, tensors.pack({"sums": np.stack(self._sums)}), mode=0o600)


class CanaryEngine(Engine):
    """An `Engine` whose trainer computes gradients of canaries."""

    def __init__(self, protocol: Protocol, canaries: Canaries, tap: Tap) -> None:
        super().__init__(protocol)
        self._canaries, self._tap = canaries, tap

    @cached_property
    def trainer(self) -> Trainer:
        """DP-SGD on canaries; clipping and noise are those of `Engine`."""
        local = self._local
        trainer = Trainer(
            self.module(), clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size,
            path=CanaryPath(self._canaries, GAIN * local.clip), task=self._template.task,
        )  # fmt: skip
        trainer.tap = self._tap
        return trainer


def _path(ledger: Path, round: int, kind: str) -> Path:
    return ledger / FOLDER / f"round_{round:06d}_{kind}.msgpack"
