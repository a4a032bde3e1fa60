"""Privacy plan and expected cost of a job, for `dpcfl job` and `dpcfl run --dry-run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from dpcfl_net.experiment import host_costs
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.experiment.cost_prediction import measure_step, predict
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.claim import noisy_plans
from dpcfl_net.launch.placement import local
from dpcfl_net.privacy.slots import Slot
from dpcfl_net.results.number_format import at_most, counted, duration, size

LISTED = 4  # noise multipliers; of more the span


def describe(job: Job, config: Config) -> dict[str, Any]:
    """Collect the privacy plan of a job, and its cost on this machine; measures a training step.

    Args:
        job: The job.
        config: Its configuration.

    Returns:
        name, algorithm, rounds, clients, parameters, epsilon (None without a guarantee), unprotected (reasons why there is none), delta,
        noise_multipliers, plan and server_plan (slots with their number), records_per_client (smallest and largest number, if the plan
        depends on it; `plan` is that of the smallest), of_each_client (True if the server's plan is per client), clients_away,
        without_clients, and cost: steps, records, step_s, workers_at_a_time, wall_s, cpu_s, bytes_up, bytes_down, memory_bytes, source,
        and aggregators: None, or count, bytes_up and bytes_down (between clients and aggregators), memory_bytes.
    """
    protocol, cost = job.protocol, estimate(job.protocol)
    least, most = (
        choose(
            (entry for entry in protocol.roster if entry.rounds is None), key=attrgetter("records"), default=protocol.roster[0]
        )
        for choose in (min, max)
    )
    plan, differs = job.algorithm.plan(least), job.algorithm.plan(least) != job.algorithm.plan(most)
    noise = {round(plan.noise_multiplier, 5) for plan in noisy_plans(job.algorithm) if plan.noise_multiplier is not None}
    return {
        "name": protocol.name, "algorithm": protocol.algorithm, "rounds": protocol.rounds, "clients": cost["clients"],
        "parameters": cost["parameters"], "epsilon": None if protocol.unprotected else protocol.epsilon,
        "unprotected": list(protocol.unprotected), "delta": protocol.privacy.delta,
        "noise_multipliers": sorted(noise), "plan": _slots(plan),
        "records_per_client": [least.records, most.records] if differs else None,
        "server_plan": _slots(job.algorithm.central_plan()), "of_each_client": bool(job.algorithm.capabilities.participations),
        "clients_away": sum(entry.rounds is not None for entry in protocol.roster),
        "without_clients": job.algorithm.capabilities.without_clients or None, "cost": _cost(job, config, cost),
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """Format a description for the terminal.

    Args:
        found: From `describe`.
    """
    noise = found["noise_multipliers"]
    z = ", ".join(map(str, noise)) or "none"
    if len(noise) > LISTED:
        z = f"{noise[0]} to {noise[-1]}, depending on a client's records and epsilon"
    epsilon = f"inf ({'; '.join(found['unprotected'])})" if found["epsilon"] is None else at_most(found["epsilon"], 6)
    of_each = " of each client" if found["of_each_client"] else ""
    out = [
        f"{found['name']}: {found['algorithm']}, {found['clients']} clients, {found['rounds']} rounds, model with {found['parameters']:,} parameters",
        f"privacy: epsilon {epsilon}, delta {at_most(found['delta'], 6)}, noise multiplier {z}",
        *_slot_lines("each client may release", found["plan"]),
        *_slot_lines(f"the trusted server may publish{of_each}", found["server_plan"]),
    ]
    if sizes := found["records_per_client"]:
        out.append(
            f"sizes: clients have {sizes[0]:,} to {sizes[1]:,} records, which set their rates and steps; the plan above is that of a "
            f"client with {sizes[0]:,}"
        )
    if away := found["clients_away"]:
        out.append(
            f"availability: {away} client{'s are' if away > 1 else ' is'} away in some rounds; the plan above is that of a client that never is"
        )
    out.append(f"without some clients: {found['without_clients'] or 'not stated by the algorithm'}")
    return [*out, *_cost_lines(found["cost"])]


def _cost(job: Job, config: Config, cost: dict[str, Any]) -> dict[str, Any]:
    slots, (host, source) = local.compute_slots(config.runtime), host_costs.load()
    step = measure_step(job, config.data.root)
    workers = config.runtime.worker_processes(cost["clients"])
    found = predict(job, config, host, step, slots, workers)
    aggregators = {
        "count": cost["tree"].aggregators, "bytes_up": cost["group_bytes_up"], "bytes_down": cost["group_bytes_down"],
        "memory_bytes": found.aggregator_memory,
    }  # fmt: skip
    return {
        "steps": cost["steps"], "records": cost["records"], "step_s": step.step_s, "workers_at_a_time": slots,
        "wall_s": found.wall_s, "cpu_s": found.cpu_s, "bytes_up": cost["bytes_up"], "bytes_down": cost["bytes_down"],
        "memory_bytes": found.memory, "source": source, "aggregators": aggregators if cost["tree"].aggregators and workers else None,
    }  # fmt: skip


def _cost_lines(cost: dict[str, Any]) -> list[str]:
    slots, tree = cost["workers_at_a_time"], cost["aggregators"]
    through, beside = [], ""
    if tree is not None:
        through = [
            f"             {size(tree['bytes_up'])} from clients to {tree['count']} aggregators, "
            f"{size(tree['bytes_down'])} to clients"
        ]
        beside = f", of which aggregators {tree['memory_bytes'] / 2**30:.2f} GiB"
    return [
        f"expected cost ({cost['source']}):",
        f"  computing  {cost['steps']:,} steps on {cost['records']:,} records, {1e3 * cost['step_s']:.1f} ms each in one thread "
        f"(measured now), {counted(slots, 'worker')} at a time",
        f"  time       about {duration(cost['wall_s'])} on idle cores, {duration(cost['cpu_s'])} of processor time",
        f"  network    {size(cost['bytes_up'])} to the server, {size(cost['bytes_down'])} from it",
        *through,
        f"  memory     about {cost['memory_bytes'] / 2**30:.2f} GiB for all processes{beside}",
    ]


def _slots(plan: Iterable[Slot]) -> list[dict[str, Any]]:
    """Equal slots of a plan as one entry with their number."""
    return [
        {"count": count, "type": type(slot).__name__, **{field.name: getattr(slot, field.name) for field in fields(slot)}}
        for slot, count in Counter(plan).items()
    ]


def _slot_lines(title: str, slots: list[dict[str, Any]]) -> list[str]:
    out = [f"{title}:"] if slots else []
    for slot in slots:
        values = {key: value for key, value in slot.items() if key not in ("count", "type", "name")}
        settings = ", ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        )
        out.append(f"  {slot['count']:>4} x {slot['name']}: {slot['type']}({settings})")
    return out
