"""Federation: how the server calls client steps, with the same interface in one process and over the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import ClientEntry, derive_seed
from dpcfl_net.core.protocol import Protocol as Job
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

if TYPE_CHECKING:
    from dpcfl_net.federation.central_dp import CentralDPServer

Arrays = Mapping[str, np.ndarray]


class ClientSide(Protocol):
    """The part of an algorithm that the client runtime uses; `algorithms.base.Algorithm` implements it."""

    protocol: Job
    options: Any
    setting: Setting
    capabilities: Capabilities

    @property
    def name(self) -> str: ...

    def problems(self, options: Any, setting: Setting) -> list[str]: ...

    def plan(self, client: ClientEntry) -> list[Slot]: ...

    def central_plan(self) -> list[Slot]: ...


class Results(Mapping[int, Arrays]):
    """What clients released, in client order whatever the order of arrival; `missing` did not answer in time."""

    def __init__(self, asked: list[int], answers: Mapping[int, Arrays]) -> None:
        self._answers = {client: answers[client] for client in sorted(asked) if client in answers}
        self.missing = [client for client in sorted(asked) if client not in answers]

    def __getitem__(self, client: int) -> Arrays:
        return self._answers[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def column(self, name: str) -> dict[int, np.ndarray]:
        """One released tensor of every client that answered."""
        return {client: arrays[name] for client, arrays in self._answers.items()}


class Federation:
    """The server's view of its clients. Subclasses define how a task travels."""

    central_server: CentralDPServer | None = None  # a trusted server's own gate, if the job has one

    def __init__(self, protocol: Job, *, quorum: float = 1.0) -> None:
        self.protocol, self.quorum = protocol, quorum
        self.clients = [entry.id for entry in protocol.roster]
        self.round = 0
        self.missing: list[int] = []  # of the last call
        self.lost: list[int] = []  # those of them whose answer a crash cost: it is charged and final, and never comes
        self.answered = 0

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down on the wire so far."""
        return 0, 0

    @property
    def live(self) -> int:
        """Clients that are connected now."""
        return len(self.clients)

    @property
    def started(self) -> int:
        """How often a client was started so far."""
        return 0

    def call(self, method: Any, *, common: Arrays | None = None, each: Mapping[int, Arrays] | None = None) -> Results:
        """Run a client step on every client (or on those named in `each`) and gather the releases.

        An answer that a crash lost counts towards the quorum, though it is missing from the results: there is no other.

        Args:
            method: The client step.
            common: Tensors for all clients.
            each: Client to its own tensors.

        Returns:
            The releases in client order.

        Raises:
            RunFailed: If fewer clients than the quorum answer.
        """
        asked = sorted(self.clients if each is None else each)
        tasks = {client: {**(common or {}), **(each[client] if each else {})} for client in asked}
        answers = self._exchange(method.client_step.kind, tasks)
        needed = int(np.ceil(self.quorum * len(asked)))
        if (count := len(answers) + len(self.lost)) < needed:
            raise RunFailed(
                f"round {self.round}: {count} of {len(asked)} clients answered, the quorum is {needed} (runtime.quorum is "
                f"{self.quorum:g}; a lower one goes on without the others)"
            )
        return Results(asked, answers)

    def release(self, method: Any, **tensors: np.ndarray) -> Arrays | None:
        """Run a central step behind the trusted server's gate: its release, or None if a crash lost the round."""
        if self.central_server is None:
            raise RunFailed(f"{self.protocol.algorithm} needs a trusted server, and this job has none")
        return self.central_server.release(self, method.central_step.kind, tensors)

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]]) -> dict[int, Arrays]:
        """Ask, and gather the releases; sets `missing`, `lost` and `answered`."""
        raise NotImplementedError

    def rng(self, purpose: str) -> np.random.Generator:
        """The server's own randomness for one purpose of this round; the same after a resume."""
        return np.random.Generator(np.random.Philox(self.seed(purpose)))

    def seed(self, purpose: str) -> int:
        """A public 31-bit seed for one purpose of this round."""
        return derive_seed(f"{self.protocol.server_seed}/{self.round}".encode(), purpose, 31)

    def initial_model(self, number: int = 0) -> np.ndarray:
        """theta_init, (p,) float32, the same for every reader of the protocol; other numbers give other initial values."""
        from dpcfl_net.training.models import initial

        m = self.protocol.model
        seed = m.initial_seed if number == 0 else derive_seed(str(m.initial_seed).encode(), f"initial model {number}")
        return initial(m.name, tuple(m.input_shape), m.classes, seed)
