"""Trusted server: samples clients, collects raw releases, and publishes only releases that its privacy gate has charged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.protocol import Protocol as Job
from dpcfl_net.core.signatures import misfit
from dpcfl_net.core.tensors import read_only, unpack
from dpcfl_net.core.types import Release, Task
from dpcfl_net.federation.base import Arrays, Federation
from dpcfl_net.federation.capabilities import central_steps
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.gate import Charge, Gate, GateSpec
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.privacy.slots import Slot, for_clients, slot_of

CENTRAL_SERVER = "curator"  # role in the ledger, and name of its folder
PUBLISHED = "published"  # in the folder of the server's ledger
SERVER_ID = -1  # in place of a client id, in the gate of a trusted server


def published(ledger: Path) -> Iterator[tuple[int, str, Arrays]]:
    """Read the releases that a trusted server kept, in the order of rounds.

    Args:
        ledger: Folder of the server's ledger.

    Yields:
        Round, central step, and tensors by name.
    """
    for path in sorted((ledger / PUBLISHED).glob("round_*.msgpack")):
        _, number, kind = path.stem.split("_", 2)
        yield int(number), kind, unpack(path.read_bytes())


class CentralServerSide(Protocol):
    """The part of an algorithm that the trusted server uses."""

    protocol: Job

    def central_plan(self) -> list[Slot]: ...


class CentralDPServer:
    """Runs central steps: charges the ledger, samples clients, collects updates, adds noise, stores and publishes the release.

    After a crash the same key gives the same sample and noise, and clients answer with the same bytes. Participations in a buffer
    are charged to each client by name, so that the ledger also tells which clients a release holds, and no client exceeds its plan.

    Args:
        algorithm: The job's algorithm.
        ledger: The server's ledger.
        noise_seed: Seed of the noise; None: noise of the operating system.
        keep: Keep every release as it was published, for an audit; a release that an audit cannot read is an error.

    Attributes:
        shown: Facts that the central steps of the last round gave to the observer (`show_observer`); they are not in the releases.
        gate: The server's privacy gate.
    """

    def __init__(self, algorithm: CentralServerSide, ledger: Ledger, noise_seed: bytes | None, *, keep: bool = False) -> None:
        self._algorithm, self._ledger, self._keep = algorithm, ledger, keep
        self._steps, protocol = central_steps(algorithm), algorithm.protocol
        self.shown: dict[str, Any] = {}
        self._shown_in = 0
        plan, noise = for_clients(algorithm.central_plan(), protocol.clients), protocol.curator_noise_multiplier
        # Computed again, a release could differ: it depends on the clients that answer.
        spec = GateSpec.of(protocol, SERVER_ID, plan, self._steps, noise, noise_seed=noise_seed, most_stored=None)
        self.gate = Gate(spec, ledger)

    @classmethod
    def of(
        cls,
        algorithm: CentralServerSide,
        ledgers: Path,
        noise_seed: bytes | None,
        *,
        durable: bool = True,
        keep: bool = False,
    ) -> CentralDPServer | None:
        """Open the central server of a job.

        Args:
            algorithm: The job's algorithm.
            ledgers: Folder of the ledgers.
            noise_seed: Noise seed of a run with seeded noise; otherwise None.
            durable: Write the ledger with fsync.
            keep: As for the class.

        Returns:
            The server; None if the job trusts no server.

        Raises:
            LedgerError: If the ledger is damaged, or belongs to another job.
        """
        protocol = algorithm.protocol
        if not protocol.privacy.central:
            return None
        owner = {"run": protocol.run, "job": digest(protocol), "role": CENTRAL_SERVER}
        seed = None if noise_seed is None else derive(noise_seed, CENTRAL_SERVER)
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger(ledgers / CENTRAL_SERVER, owner=owner, durable=durable))
            server = cls(algorithm, ledger, seed, keep=keep)
            stack.pop_all()
        return server

    def participations_left(self, slot: str, before: int) -> dict[int, int]:
        """Count the participations that each client has left, by the ledger.

        Args:
            slot: Name of the participation in the central plan.
            before: Count those in the rounds before this one.
        """
        left = self.gate.remaining(before)
        return {client: left[slot_of(slot, client)] for client in self._algorithm.protocol.clients}

    def participants(self, slot: str, round: int) -> list[int] | None:
        """List the clients that were charged for a round's buffer, in client order; None if it was not charged.

        Args:
            slot: Name of the participation in the central plan.
            round: The round.
        """
        charged = self.gate.charged(round)
        if charged is None:
            return None
        return [client for client in self._algorithm.protocol.clients if slot_of(slot, client) in charged]

    def release(self, fed: Federation, kind: str, tensors: Arrays, buffer: Mapping[int, Arrays] | None = None) -> Arrays | None:
        """Run a central step and return the tensors to publish.

        Args:
            fed: Federation of the clients.
            kind: Name of the central step.
            tensors: Its tensors.
            buffer: Raw releases that arrived before the charge, by client; None: the step calls the clients.

        Returns:
            The release; None if a crash lost the round after it was charged.

        Raises:
            RunFailed: If the step does not take these tensors, the gate refuses it, or it is kept for an audit
                that cannot read it.
        """
        if reason := misfit(getattr(self._algorithm, kind), "me", **tensors):
            called = ", ".join(["me", *(f"{name}=..." for name in tensors)])
            raise RunFailed(f"round {fed.round}: central step {kind!r} is called as {kind}({called}), and {reason}")
        if fed.round != self._shown_in:
            self.shown, self._shown_in = {}, fed.round
        task = Task(fed.round, kind, {name: np.asarray(value) for name, value in tensors.items()})
        answer = self.gate.answer(
            task, lambda task: None, lambda charge, state: self._compute(fed, task, buffer or {}, charge, state)
        )
        if answer.status == "lost":
            return None
        if answer.status != "release":
            raise RunFailed(f"the central server's gate refused round {fed.round}: {answer.code}: {answer.reason}")
        if self._keep:
            folder = self._ledger.folder / PUBLISHED
            folder.mkdir(mode=0o700, exist_ok=True)
            write_atomically(folder / f"round_{task.round:06d}_{kind}.msgpack", bytes(answer.release), mode=0o600)
        return unpack(answer.release)

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    def _compute(
        self, fed: Federation, task: Task, buffer: Mapping[int, Arrays], charge: Charge, state: Any
    ) -> tuple[Release, dict[str, Any], list[Event]]:
        me = CentralContext(fed, charge, self.shown, buffer)
        fed.in_central_step = True
        try:
            # The models of the server's state are among them: what a step writes into them would be published without noise.
            release = getattr(self._algorithm, task.kind)(
                me, **{name: read_only(array) for name, array in task.tensors.items()}
            )
        finally:
            fed.in_central_step = False
        if self._keep and isinstance(release, Release) and (problem := me.audit_problem(release)):
            raise RunFailed(f"round {fed.round}: central step {task.kind!r} cannot be audited: {problem}")
        return release, state, me.ran()
