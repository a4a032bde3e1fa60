"""Requests of a malicious server of secure sums as data: stage, and what it changes in the honest request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dpcfl_net.adversaries.malicious_steps import Tensors
from dpcfl_net.federation.secure.keys import KEY_BYTES, public_of
from dpcfl_net.federation.secure.terms import Terms


@dataclass
class Forger:
    """State of a malicious server in a round.

    Attributes:
        terms: Terms of the sum.
        round: The round.
        own_key: X25519 secret key of the server.
        old_keys: Client to its signed keys of an earlier round; empty in the first.
        keys: Client to its signed keys of this round.
    """

    terms: Terms
    round: int
    own_key: bytes = field(repr=False)
    old_keys: dict[int, np.ndarray]
    keys: dict[int, np.ndarray] = field(default_factory=dict)

    def row(self, client: int) -> int:
        """Return the row of the first holder of a client's secrets that is another client."""
        return next(row for row, holder in enumerate(self.terms.holders(client)) if holder != client)

    def other(self, client: int) -> int:
        """Return the position of another client than this one."""
        return next(at for at, member in enumerate(self.terms.group) if member != client)

    def only(self, client: int, count: int) -> np.ndarray:
        """Return flags of this client and of `count - 1` others."""
        own = self.terms.position(client)
        flags = np.zeros(self.terms.n, np.uint8)
        flags[[own, *[at for at in range(self.terms.n) if at != own][: count - 1]]] = 1
        return flags


Change = Callable[[Forger, int, Tensors], Tensors]


@dataclass(frozen=True)
class SumAttack:
    """One malicious request to every client.

    Attributes:
        name: Name of the attack.
        says: Description.
        stage: Task that it forges; "masked" for the algorithm's masked step.
        change: Makes it from the honest tensors.
        after: True if it comes after the honest request.
    """

    name: str
    says: str
    stage: str
    change: Change
    after: bool = False


def replaced(task: Tensors, name: str, where: object, data: bytes | np.ndarray | int) -> Tensors:
    """Return a task in which some bytes of one tensor are replaced.

    Args:
        task: The task.
        name: Name of the tensor.
        where: Index of the bytes.
        data: The new bytes.
    """
    array = task[name].copy()
    array[where] = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data  # type: ignore[call-overload]
    return {**task, name: array}


def without_another(flags: np.ndarray, forger: Forger, client: int) -> np.ndarray:
    """Return flags without one other client.

    Args:
        flags: (n,) 0 or 1.
        forger: The server.
        client: The client that stays.
    """
    flags = flags.copy()
    flags[forger.other(client)] = 0
    return flags


def _server_key(start: int) -> Change:
    return lambda f, client, task: replaced(
        task, "keys", (f.row(client), slice(start, start + KEY_BYTES)), public_of(f.own_key)
    )


def _exchanged(f: Forger, client: int, task: Tensors) -> Tensors:
    rows = [row for row, holder in enumerate(f.terms.holders(client)) if holder != client][:2]
    return replaced(task, "keys", rows, task["keys"][rows[::-1]])


def _old(f: Forger, client: int, task: Tensors) -> Tensors:
    row = f.row(client)
    holder = f.terms.holders(client)[row]
    keys = f.old_keys.get(holder)
    return replaced(task, "keys", row, np.zeros(task["keys"].shape[1], np.uint8) if keys is None else keys)


def _own(f: Forger, client: int, task: Tensors) -> Tensors:
    row = f.terms.holders(client).index(client)
    return replaced(task, "keys", (row, slice(0, KEY_BYTES)), public_of(f.own_key))


def _few(name: str) -> Change:
    """A list with one client less than it takes."""

    def change(f: Forger, client: int, task: Tensors) -> Tensors:
        needed = f.terms.share_threshold if name == "present" else f.terms.survivors_needed
        return {**task, name: f.only(client, needed - 1)}

    return change


def _without_another(name: str) -> Change:
    return lambda f, client, task: {**task, name: without_another(task[name], f, client)}


def _without_itself(f: Forger, client: int, task: Tensors) -> Tensors:
    return replaced(task, "survivors", f.terms.position(client), 0)


def _other_model(f: Forger, client: int, task: Tensors) -> Tensors:
    return {name: array if name in ("present", "boxes") else array * 2 for name, array in task.items()}


SCRIPT = (
    SumAttack("other-group", "a group other than the job's, one client smaller", "secure_keys",
              lambda f, client, task: {"group": task["group"][without_another(np.ones(f.terms.n), f, client) > 0]}),
    SumAttack("box-key", "the server's key in place of a client's key for boxes", "secure_shares", _server_key(0)),
    SumAttack("mask-key", "the server's key in place of a client's key for masks", "secure_shares", _server_key(KEY_BYTES)),
    SumAttack("unsigned", "keys without a signature", "secure_shares",
              lambda f, client, task: replaced(task, "keys", (f.row(client), slice(2 * KEY_BYTES, None)), 0)),
    SumAttack("exchanged", "two clients' signed keys exchanged", "secure_shares", _exchanged),
    SumAttack("old-keys", "keys that a client signed in an earlier round", "secure_shares", _old),
    SumAttack("own-keys", "the server's key under the client's own name", "secure_shares", _own),
    SumAttack("few-present", "one holder fewer than it takes to restore a secret", "secure_shares", _few("present")),
    SumAttack("few-boxes", "the same when vectors are masked", "masked", _few("present")),
    SumAttack("other-model", "the masked step again with another model", "masked", _other_model, after=True),
    SumAttack("other-present", "the masked step again without one client", "masked", _without_another("present"), after=True),
    SumAttack("few-survivors", "a list of survivors below the threshold", "secure_survivors", _few("survivors")),
    SumAttack("left-out", "a list of survivors without the client itself", "secure_survivors", _without_itself),
    SumAttack("second-list", "a second list of survivors to sign", "secure_survivors", _without_another("survivors"), after=True),
    SumAttack("unsigned-list", "a list of survivors that no witness signed", "secure_unmask",
              lambda f, client, task: {**task, "signatures": np.zeros_like(task["signatures"])}),
    SumAttack("other-list", "another list of survivors, with the signatures of the first", "secure_unmask",
              _without_another("survivors")),
    SumAttack("few-unmasked", "shares for a sum below the threshold", "secure_unmask", _few("survivors")),
    SumAttack("both-shares", "shares again, of another kind for one client", "secure_unmask", _without_another("survivors"),
              after=True),
)  # fmt: skip
