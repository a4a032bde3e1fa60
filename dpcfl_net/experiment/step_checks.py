"""Checks of an algorithm's client steps against its plan and its named tensor sides, before a job is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.federation.capabilities import ClientSide, client_steps, tensor_sides
from dpcfl_net.federation.claim import protected
from dpcfl_net.federation.plan_examples import plan_examples


def step_problems(algorithm: ClientSide) -> list[str]:
    """Find tensor sides without a size, and slots of a plan that no client step can fill, or not so often.

    Such a slot is a mistake: its noise is paid for, and a step that no slot is planned for is refused in its first round.

    Args:
        algorithm: The job's algorithm; its plans are lists of slots.

    Returns:
        One sentence for each problem.
    """
    return list(dict.fromkeys(problem for entry in plan_examples(algorithm) for problem in _problems(algorithm, entry)))


def _problems(algorithm: ClientSide, entry: ClientEntry) -> Iterator[str]:
    """Problems with the plan of one client."""
    name, steps = algorithm.protocol.algorithm, client_steps(algorithm)
    planned = algorithm.plan(entry)
    plan, counts, rounds = (
        {slot.name: slot for slot in planned},
        Counter(slot.name for slot in planned),
        algorithm.protocol.rounds,
    )
    used = {kind: step for kind, step in steps.items() if set(step.charges) <= plan.keys()}
    filled = {charge for step in used.values() for charge in step.charges}
    if unfilled := [slot for slot in plan.values() if slot.name not in filled]:
        charges = ", ".join(f"{kind!r} charges {' and '.join(step.charges)}" for kind, step in steps.items())
        for slot in unfilled:
            yield (
                f"the plan of {name} has slot {slot.name!r} ({type(slot).__name__}), which no client step fills with slots of this plan: "
                f"{charges or 'the class has no client step, a method with @on_client'}"
            )
    for slot in protected([*plan.values()]):
        charging = [kind for kind, step in used.items() if slot.name in step.charges]
        if charging and counts[slot.name] > (most := rounds * len(charging)):
            yield (
                f"the plan of {name} has slot {slot.name!r} {counts[slot.name]} times: must be at most {most} times, since a round runs each client "
                f"step once ({' and '.join(map(repr, charging))} in {rounds} rounds), and the noise pays for every slot"
            )
    known = tensor_sides(algorithm)
    for kind, step in used.items():
        for verb, specs in (("takes", step.takes), ("gives", step.gives)):
            for tensor, spec in specs.items():
                for side in spec.shape:
                    if isinstance(side, str) and side not in known:
                        yield (
                            f"client step {kind!r} of {name} {verb} {tensor!r} with the side {side!r}: must be a number, 'p', 'M' or a name in "
                            "Capabilities.sides"
                        )
