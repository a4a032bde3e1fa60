"""Settings that cannot be combined with emulated links and virtual time."""

from __future__ import annotations

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.config_schema import Config, NetworkSection
from dpcfl_net.experiment.network_settings import links_of

MOST_REAL_LATENCY_S = 1.0  # a handshake of CURVE over TCP takes about 9 one-way trips


def network_problems(config: Config) -> list[str]:
    """List the problems of links, of virtual time, and of both with the federation.

    Args:
        config: A configuration whose fields are valid one by one.

    Returns:
        One sentence for each problem: field, value and allowed values.
    """
    return [*_clock_problems(config), *_emulation_problems(config), *_link_problems(config)]


def _clock_problems(config: Config) -> list[str]:
    """Problems of virtual time, and settings that belong to it."""
    network, federation, problems = config.network, config.runtime.federation, []
    if network.clock != "virtual":
        return _of_virtual_time(network)
    if federation != "in-process":
        problems.append(
            f"network.clock is 'virtual': runtime.federation must be 'in-process', got {federation!r}; over the network "
            "transfers take their real time"
        )
    if config.capabilities.asynchronous:
        problems.append(
            "network.clock is 'virtual': algorithm.asynchronous must be null, since it has separate virtual `durations`"
        )
    if network.how != "off":
        problems.append(f"network.how is {network.how!r}: must be 'off' where network.clock is 'virtual', which sends nothing")
    return problems


def _of_virtual_time(network: NetworkSection) -> list[str]:
    """Problems of settings that only virtual time has."""
    found: list[tuple[str, float]] = [("cores", network.cores)] if network.cores else []
    links = [
        ("default", network.default),
        *((f"groups.{key}", link) for key, link in network.groups.items()),
        *((f"clients.{key}", link) for key, link in network.clients.items()),
    ]
    found += [(f"{field}.compute_factor", link.compute_factor) for field, link in links if link.compute_factor is not None]
    return [f"network.{field} is {value:g}: belongs to network.clock virtual, got 'real'" for field, value in found]


def _emulation_problems(config: Config) -> list[str]:
    """Problems of the way in which links are emulated."""
    network, federation, problems = config.network, config.runtime.federation, []
    if network.how != "off" and federation != "network":
        problems.append(f"network.how is {network.how!r}: runtime.federation must be 'network', got {federation!r}")
    if network.model_fields_set and not network.model_fields_set & {"how", "clock"}:  # written off is a choice
        problems.append("network.how is missing: links need 'relay' or 'netem', or network.clock 'virtual'; 'off' ignores them")
    if network.how == "netem" and config.runtime.clients_per_worker > 1:
        problems.append(
            f"network.how is 'netem': each client has its own network; runtime.clients_per_worker must be 1, got "
            f"{config.runtime.clients_per_worker}"
        )
    if network.how == "netem" and config.runtime.transport.security != "curve":
        problems.append("network.how is 'netem': its addresses are not loopback; runtime.transport.security must be 'curve'")
    return problems


def _link_problems(config: Config) -> list[str]:
    """Problems of the link of each client."""
    network = config.network
    try:
        schedules = links_of(network, config.data.clients)
    except ConfigError as error:
        return error.problems
    if network.how == "off":
        return []
    return [
        f"network: the latency of client {client} is {longest * 1000:g} ms: must be at most {MOST_REAL_LATENCY_S * 1000:g} where "
        f"network.how is {network.how!r}, since a handshake must be over after 10 s; network.clock 'virtual' takes any"
        for client, schedule in enumerate(schedules)
        if (longest := max([schedule.link.latency_s, *(step.latency_s or 0.0 for step in schedule.steps)]))
        > MOST_REAL_LATENCY_S
    ]
