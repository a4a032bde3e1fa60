"""Steps of a malicious server as data: requested round, weights, and forged fields."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.tensors import DTYPES
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.secure.stages import MASKING, STAGES
from dpcfl_net.transport.encodings import to_half

Round = Literal["next", "skip", "last", "previous", "first", "left-out", "zero", "beyond"]
Weights = Literal["honest", "as-sent", "other", "per-client", "nan", "infinite", "longer", "whole", "extra"]
Tensors = dict[str, np.ndarray]
BFLOAT16_BITS = {"nan": 0x7FC0, "infinite": 0x7F80}
SCALE = 0.1  # standard deviation of the weights: a client cannot distinguish them from trained ones
FOREIGN = hashlib.sha256(b"another job").hexdigest()


@dataclass(frozen=True)
class Step:
    """One request to every client.

    Attributes:
        name: Name of the step.
        says: Description.
        round: Requested round: "next" after the last requested one, "skip" two after it, "left-out" the latest one that was
            skipped.
        weights: Weights as for `make`.
        task: Name of the task; empty: the one the plan pays for most often.
        header: Replaced fields of the task's header.
        restart: True if the server restarts first, as after a crash.
        job: Job hash of all later messages; empty: the right one.
        pays: True if an honest client may charge for the step and answer.
    """

    name: str
    says: str
    round: Round = "next"
    weights: Weights = "honest"
    task: str = ""
    header: Mapping[str, Any] = field(default_factory=dict)
    restart: bool = False
    job: str = ""
    pays: bool = False


SCRIPT = (
    Step("honest", "a task of the job in the next round", pays=True),
    Step("again", "the same round again", "last", "as-sent"),
    Step("other-model", "the same round with another model", "last", "other"),
    Step("skip", "the round after the next: rounds may be left out", "skip", pays=True),
    Step("left-out", "the round that was left out", "left-out"),
    Step("round-zero", "a round before the first", "zero"),
    Step("beyond", "a round after the job's last", "beyond"),
    Step("other-task", "a kind of task that the job does not have", task="steal"),
    Step("noise-field", "a noise multiplier of 0 in the header", header={"noise_multiplier": 0.0}),
    Step("clip-field", "a clip norm of 1e9 in the header", header={"clip": 1e9}),
    Step("batch-field", "a batch of one record in the header", header={"batch_size": 1}),
    Step("extra-tensor", "a noise multiplier as an additional tensor", weights="extra"),
    Step("job-field", "another job's hash in the header of a task", header={"job": FOREIGN}),
    Step("not-finite", "weights with a NaN", weights="nan"),
    Step("infinite", "weights with an infinity", weights="infinite"),
    Step("split", "a different model for each client", weights="per-client", pays=True),
    Step("rollback", "the server runs an older state: the last round again", "last", "as-sent", restart=True),
    Step("rollback-previous", "from that state, the round before", "previous", "as-sent"),
    Step("rollback-first", "from that state, the first round", "first", "as-sent"),
    Step("rollback-other", "again from an older state, with other random numbers", "last", "other", restart=True),
    Step("go-on", "a task of the job in the next round, after all these steps", pays=True),
    Step("other-shape", "weights of another architecture, one parameter longer", weights="longer"),
    Step("whole-numbers", "weights of another type", weights="whole"),
    Step("other-job", "the server restarts with another job", restart=True, job=FOREIGN),
)


def usual_step(algorithm: Algorithm) -> ClientStep:
    """Return the client step with weights that the first client's plan pays for most often.

    Args:
        algorithm: The job's algorithm.

    Raises:
        ConfigError: If no client step takes weights.
    """
    names = [slot.name for slot in algorithm.plan(algorithm.protocol.roster[0])]
    steps = [
        step for step in client_steps(algorithm).values() if step.kind not in STAGES and not set(MASKING) & set(step.takes)
    ]
    paid = [step for step in steps if step.takes and set(step.charges) <= set(names)]
    if not paid:
        raise ConfigError(f"algorithm {algorithm.name} sends its clients no weights alone (malicious_sums attacks secure sums)")
    return max(paid, key=lambda step: (min(map(names.count, step.charges), default=0), -len(step.charges)))


def round_number(round: Round, asked: list[int], rounds: int) -> int:
    """Return the round that a step requests.

    Args:
        round: Kind of round, as `Step.round`.
        asked: Rounds requested so far, in order.
        rounds: Rounds of the job.

    Raises:
        ConfigError: If there is no such round.
    """
    last = asked[-1] if asked else 0
    fixed = {"next": last + 1, "skip": last + 2, "zero": 0, "beyond": rounds + 1}
    if round in fixed:
        return fixed[round]
    left_out = sorted(set(range(1, last)) - set(asked))
    found = {"last": asked[-1:], "previous": asked[-2:-1], "first": asked[:1], "left-out": left_out[-1:]}[round]
    if not found:
        raise ConfigError(f"no {round} round exists after the rounds {asked}: play an honest step first")
    return found[0]


def make(step: ClientStep, algorithm: Algorithm, weights: Weights, round: int, client: int) -> Tensors:
    """Create the tensors of a task: Gaussian numbers, equal for all clients in a round, changed as `weights` says.

    Args:
        step: The client step.
        algorithm: The job's algorithm.
        weights: "honest" or "as-sent": unchanged. "other" or "per-client": other numbers for all, or for each client. "nan" or
            "infinite": one such value. "longer": one parameter more. "whole": integers. "extra": an additional tensor named
            noise_multiplier.
        round: The round.
        client: Client id.
    """
    seed = {"other": [1, round], "per-client": [2, round, client]}.get(weights, [0, round])
    draw = np.random.Generator(np.random.PCG64(seed))
    longer = int(weights == "longer")
    made: Tensors = {}
    template = MessageEncoding(algorithm).task_template(step)
    for name, pinned in sorted(template.items()):
        shape = [side if isinstance(side, int) else side[1] for side in pinned.shape]
        shape[-1:] = [side + longer for side in shape[-1:]]
        drawn = draw.standard_normal(shape) * SCALE
        made[name] = to_half(drawn, "bfloat16") if pinned.dtype == "b2" else drawn.astype(DTYPES[pinned.dtype])
    first = min(made)
    if weights in ("nan", "infinite"):
        bad = {"nan": np.nan, "infinite": np.inf} if made[first].dtype.kind == "f" else BFLOAT16_BITS
        made[first].reshape(-1)[0] = bad[weights]
    elif weights == "whole":
        made[first] = np.ones(made[first].shape, "<i8")
    elif weights == "extra":
        made["noise_multiplier"] = np.zeros(1, "<f4")
    return made
