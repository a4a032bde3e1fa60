"""How a server half reaches client halves: the same four words whether the clients are objects or processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import ClientEntry, derive_seed
from dpcfl_net.core.protocol import Protocol as Job
from dpcfl_net.core.types import ClientStep
from dpcfl_net.privacy.slots import Slot

if TYPE_CHECKING:
    from dpcfl_net.federation.central_dp import CentralDPServer

Arrays = Mapping[str, np.ndarray]


class ClientSide(Protocol):
    """What the client's floor needs to know of an algorithm; `algorithms.base.Algorithm` is one."""

    protocol: Job

    @property
    def name(self) -> str: ...

    @property
    def protects(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def dims(self) -> dict[str, int | tuple[int, int]]: ...

    def plan(self, client: ClientEntry) -> list[Slot]: ...

    def unmet(self) -> list[str]: ...

    def central_plan(self) -> list[Slot]: ...

    def client_steps(self) -> dict[str, ClientStep]: ...

    def personal_model(self, state: Mapping[str, Any]) -> Any: ...


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
    """The server half's view of its clients. Subclasses say how a task travels; nothing else differs."""

    curator: CentralDPServer | None = None  # a trusted server's own gate, where the job has one

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
        """Run a client half on every client (or on those named in `each`) and gather the releases.

        common: tensors that everybody gets; each: client -> tensors of its own. An answer that a crash cost counts towards
        the quorum, though it is missing from the results: nobody can give another. Raises RunFailed when fewer than the
        quorum answer.
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
        """Run a curator half behind the trusted server's gate: its release, or None where a crash cost the round."""
        if self.curator is None:
            raise RunFailed(f"{self.protocol.algorithm} needs a trusted server, and this job has none")
        return self.curator.release(self, method.central_step.kind, tensors)

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
        """theta_init, (p,) float32, the same for everybody who reads the protocol; other numbers are other draws."""
        from dpcfl_net.training.models import initial

        m = self.protocol.model
        seed = m.initial_seed if number == 0 else derive_seed(str(m.initial_seed).encode(), f"initial model {number}")
        return initial(m.name, tuple(m.input_shape), m.classes, seed)
