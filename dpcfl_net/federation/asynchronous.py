"""Asynchronous calls of client steps: open tasks, their outcomes, and raw releases that wait in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dpcfl_net.core.errors import RunFailed

Decode = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Participation:
    """One task of an asynchronous run.

    Attributes:
        client: Client id.
        participation: Number of the client's participation, from 1; the round of its request, so that the n-th participation
            fills the client's n-th slots.
        kind: Name of the client step.
        tensors: Tensors of the task as they cross the wire (`MessageEncoding.encode_tasks`).
        ends: Virtual time of the answer in a run in one process, seconds; unused over the network.
    """

    client: int
    participation: int
    kind: str
    tensors: Mapping[str, np.ndarray]
    ends: float = 0.0


class Receiver(Protocol):
    """The part of a federation that tells when raw releases may be read."""

    round: int
    in_central_step: bool


class RawRelease(Mapping[str, np.ndarray]):
    """Raw release to a trusted server: only a central step can read its tensors, as `me.buffer`.

    Args:
        fed: Federation that received it.
        client: Client id.
        tensors: Its tensors.
        decode: Decodes them when they are read.
    """

    def __init__(self, fed: Receiver, client: int, tensors: Mapping[str, np.ndarray], decode: Decode = dict) -> None:
        self._fed, self._client, self._tensors, self._decode = fed, client, tensors, decode

    def decoded(self, decode: Decode) -> RawRelease:
        """Return the release with the decoding of its tensors, which are not read yet.

        Args:
            decode: Decodes the tensors.
        """
        return RawRelease(self._fed, self._client, self._tensors, decode)

    def _read(self) -> Mapping[str, np.ndarray]:
        if not self._fed.in_central_step:
            raise RunFailed(
                f"round {self._fed.round}: the raw release of client {self._client} was read outside a central step, where it may become "
                "public without noise: pass it to a method with @on_central_server by fed.release(method, buffer={client: release}), "
                "and read it there as me.buffer"
            )
        return self._decode(self._tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


@dataclass(frozen=True)
class Outcome:
    """End of a participation.

    Attributes:
        client: Client id.
        release: The release as it crossed the wire (`decoded`), a `RawRelease` with a trusted server; None if there is none and
            never will be.
        lost: True if a crash lost the answer; it is charged.
        at: Virtual time of the answer, seconds; None over the network.
    """

    client: int
    release: Mapping[str, np.ndarray] | None
    lost: bool = False
    at: float | None = None

    def decoded(self, decode: Decode) -> Outcome:
        """Decode the release; that of a trusted server is decoded when a central step reads it.

        Args:
            decode: Decodes the tensors of a release.
        """
        release = self.release
        if release is None:
            return self
        return replace(self, release=release.decoded(decode) if isinstance(release, RawRelease) else decode(release))
