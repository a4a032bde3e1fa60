"""An audited client: canaries in place of its records, a tap behind its noise; gate, ledger and mechanism are everybody's.

What the tap sees stays in the client's own folder and never crosses the wire: it is the worst case that the accountant
assumes, a server that sees the noisy sum of every single step.
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
from dpcfl_net.federation.base import ClientSide
from dpcfl_net.federation.client import ClientHost, Engine, Split
from dpcfl_net.federation.gate import Charge
from dpcfl_net.privacy.canaries import GAIN, Canaries, CanaryPath, CanaryRecords
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.training.dpsgd import Trainer

FOLDER = "canaries"  # in the folder of the client's ledger


def taped(ledger: Path, round: int, kind: str) -> np.ndarray | None:
    """(steps, m) float32: the noisy sum of each step of one task along each canary, in units of clip; None if there is none."""
    path = _path(ledger, round, kind)
    return tensors.unpack(path.read_bytes())["sums"] if path.exists() else None


class AuditedHost(ClientHost):
    """As `ClientHost`; the training records are canaries, the others (`open_data`) its own."""

    def __init__(
        self, algorithm: ClientSide, client: int, ledger: Ledger, open_data: Callable[[Split], Any], canaries: Canaries,
        noise_seed: bytes | None,
    ) -> None:  # fmt: skip
        protocol = algorithm.protocol
        tap = self._tap = Tap(ledger.folder, canaries, protocol.local.clip)

        def records(part: Split) -> Any:
            if part != "train":
                return open_data(part)
            return CanaryRecords(protocol.client(client).records, canaries.bits(client), tuple(protocol.model.input_shape))

        super().__init__(algorithm, client, ledger, records, lambda: CanaryEngine(protocol, canaries, tap), noise_seed)

    def _compute(self, task: Task, charge: Charge, state: dict[str, Any]) -> tuple[Release, dict[str, Any], list[Event]]:
        with self._tap.during(task):
            return super()._compute(task, charge, state)


class Tap:
    """Keeps what each step's noisy sum shows of each canary, a file a task: written again, with the same bits, if it runs again."""

    def __init__(self, ledger: Path, canaries: Canaries, clip: float) -> None:
        self._ledger, self._canaries, self._clip = ledger, canaries, clip
        self._sums: list[np.ndarray] = []

    def __call__(self, noisy: np.ndarray) -> None:
        """One step's noisy sum, (p,)."""
        self._sums.append((self._canaries.project(noisy) / self._clip).astype(np.float32))

    @contextmanager
    def during(self, task: Task) -> Iterator[None]:
        """Gather the steps of one task, and write them when it is done."""
        self._sums = []
        yield
        if self._sums:
            path = _path(self._ledger, task.round, task.kind)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, tensors.pack({"sums": np.stack(self._sums)}), mode=0o600)


class CanaryEngine(Engine):
    """As `Engine`, with a trainer whose gradients are the canaries'."""

    def __init__(self, protocol: Protocol, canaries: Canaries, tap: Tap) -> None:
        super().__init__(protocol)
        self._canaries, self._tap = canaries, tap

    @cached_property
    def trainer(self) -> Trainer:
        """DP-SGD on canaries: from the clipping on it is everybody's."""
        local = self._local
        return Trainer(
            self._module(), clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size,
            path=CanaryPath(self._canaries, GAIN * local.clip), task=self._template.task, tap=self._tap,
        )  # fmt: skip


def _path(ledger: Path, round: int, kind: str) -> Path:
    return ledger / FOLDER / f"round_{round:06d}_{kind}.msgpack"
