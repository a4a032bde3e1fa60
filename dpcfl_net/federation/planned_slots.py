"""Slots of a gate's plan: which of them a task fills, and what each costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.types import Adjacency, ClientStep, Task
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.slots import Slot, slot_of


class PlannedSlots:
    """Slots of a plan by name, and the slots that tasks of each kind fill.

    Args:
        plan: Every slot of the plan; slots of one name are equal.
        charges: Names of the slots that one task of each kind fills.
        clients_in: Kind of a task to the name of its tensor of clients: it fills the slots of each of these clients.
        noise_multiplier: z of the plan; None for a plan without noise.
        adjacency: Adjacency of the privacy target.

    Attributes:
        quota: Number of slots of each name.
        slots: Slot of each name.
        events: Event of each name.

    Raises:
        ConfigError: If plan and charges disagree.
    """

    def __init__(
        self,
        plan: Sequence[Slot],
        charges: Mapping[str, Sequence[str]],
        clients_in: Mapping[str, str],
        noise_multiplier: float | None,
        adjacency: Adjacency,
    ) -> None:
        self.quota = Counter(slot.name for slot in plan)
        self.slots = {slot.name: slot for slot in plan}
        self._charges = {kind: tuple(names) for kind, names in charges.items()}
        self._clients_in = dict(clients_in)
        self._check(plan)
        self.events = {name: slot.event(noise_multiplier, adjacency) for name, slot in self.slots.items()}

    @staticmethod
    def charges_of(
        plan: Sequence[Slot], clients: Sequence[int], steps: Mapping[str, ClientStep]
    ) -> tuple[dict[str, Sequence[str]], dict[str, str]]:
        """Read `charges` and `clients_in` from declared steps; a step whose slots are not in the plan is left out.

        Args:
            plan: The plan.
            clients: Client ids of the roster.
            steps: Steps by task name.
        """
        names = {slot.name for slot in plan}

        def needed(step: ClientStep) -> set[str]:
            return {slot_of(name, c) for name in step.charges for c in clients} if step.clients_in else set(step.charges)

        used = {kind: step for kind, step in steps.items() if needed(step) <= names}
        clients_in = {kind: step.clients_in for kind, step in used.items() if step.clients_in}
        return {kind: step.charges for kind, step in used.items()}, clients_in

    def __contains__(self, kind: str) -> bool:
        """Return True if the plan has tasks of a kind."""
        return kind in self._charges

    def names(self, task: Task) -> tuple[str, ...]:
        """List the names of the slots that a task fills.

        Args:
            task: The task; its kind is in the plan.

        Raises:
            Refused: "tensors", if it must list distinct clients and does not.
        """
        names, tensor = self._charges[task.kind], self._clients_in.get(task.kind)
        if tensor is None:
            return names
        clients = np.asarray(task.tensors.get(tensor, ()))
        if clients.ndim != 1 or not clients.size or len(np.unique(clients)) < clients.size:
            raise Refused("tensors", f"{tensor} must list each client of a {task.kind} once")
        return tuple(slot_of(name, int(client)) for client in clients for name in names)

    def fits(self, entry: Entry) -> bool:
        """Return True if a line of the ledger charges what its task fills, at the plan's price.

        Args:
            entry: A debit, or the charge for a truncated line.
        """
        known = all(self.events.get(name) == event for name, event in zip(entry.slots, entry.events, strict=True))
        if entry.type == "closed" or not known:
            return known
        if entry.kind in self._clients_in:
            return 0 < len(set(entry.slots)) == len(entry.slots)
        return entry.slots == self._charges.get(entry.kind)

    def costliest(self, left: Mapping[str, int]) -> tuple[str, ...]:
        """List the names of the costliest slots that one task may still fill.

        Args:
            left: Unused slots of each name.

        Returns:
            Names; of a task that lists clients, the slots of all clients that have some left.
        """
        kinds = (self._affordable(kind, left) for kind in sorted(self._charges))
        return max(kinds, key=lambda names: sum(self.events[name].weight for name in names), default=())

    def _affordable(self, kind: str, left: Mapping[str, int]) -> tuple[str, ...]:
        if kind not in self._clients_in:
            return self._charges[kind] if all(left[name] > 0 for name in self._charges[kind]) else ()
        own = tuple(slot_of(name, "") for name in self._charges[kind])
        return tuple(name for name in left if left[name] > 0 and name.startswith(own))

    def _check(self, plan: Sequence[Slot]) -> None:
        problems = [f"plan: slots named {slot.name!r} differ" for slot in plan if slot != self.slots[slot.name]]
        for kind, names in self._charges.items():
            if kind not in self._clients_in:
                problems += [f"task {kind!r}: no slot {name!r} in the plan" for name in names if name not in self.slots]
            problems += [f"task {kind!r}: slot {name!r} twice on one key" for name in names if names.count(name) > 1]
        if problems:
            raise ConfigError(sorted(set(problems)))
