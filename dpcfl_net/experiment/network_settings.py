"""The `network` section: a link for each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import in_home
from dpcfl_net.core.frozen import StrictModel
from dpcfl_net.transport.links.link import MOST_BPS, MOST_LATENCY_S, MOST_LOSS, MOST_RESETS_PER_HOUR, MOST_S, Link
from dpcfl_net.transport.links.netem import unsupported
from dpcfl_net.transport.links.presets import PRESETS, preset
from dpcfl_net.transport.links.schedule import Schedule
from dpcfl_net.transport.links.trace import read_trace

_MOST_MBPS = MOST_BPS / 1e6
# Field of a configuration: field of a link, and its unit.
_UNITS = {
    "latency_ms": ("latency_s", 1e-3), "jitter_ms": ("jitter_s", 1e-3), "up_mbps": ("up_bps", 1e6), "down_mbps": ("down_bps", 1e6),
    "loss": ("loss", 1.0), "resets_per_hour": ("resets_per_hour", 1.0), "on_s": ("on_s", 1.0), "off_s": ("off_s", 1.0),
}  # fmt: skip


class LinkSettings(StrictModel):
    """A link and the speed of its client: a preset, and fields that replace its values.

    A field that is not given is that of the less specific link.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    preset: str | None = Field(default=None, description=f"values to start from: {', '.join(PRESETS)}")
    latency_ms: float | None = Field(default=None, ge=0, le=1e3 * MOST_LATENCY_S, description="delay of one direction")
    jitter_ms: float | None = Field(
        default=None, ge=0, le=1e3 * MOST_LATENCY_S, description="the delay is uniform in latency_ms plus or minus this"
    )
    up_mbps: float | None = Field(
        default=None, ge=1e-6, le=_MOST_MBPS, description="rate from the client to the server, Mbit/s"
    )
    down_mbps: float | None = Field(
        default=None, ge=1e-6, le=_MOST_MBPS, description="rate from the server to the client, Mbit/s"
    )
    loss: float | None = Field(
        default=None,
        ge=0,
        le=MOST_LOSS,
        description="fraction of packets lost; TCP repairs it, so it delays and bounds the rate",
    )
    resets_per_hour: float | None = Field(
        default=None, ge=0, le=MOST_RESETS_PER_HOUR, description="expected resets of a connection per hour, at random times"
    )
    on_s: float | None = Field(default=None, ge=0.001, le=MOST_S, description="seconds that the link is on in each cycle")
    off_s: float | None = Field(default=None, ge=0, le=MOST_S, description="seconds that the link is off in each cycle")
    compute_factor: float | None = Field(
        default=None, gt=0, le=1e6, description="clock virtual: factor on the processor time of a client step; default: 1"
    )

    @model_serializer(mode="wrap")
    def _given(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in standard(self).items() if value is not None}


def _named(value: Any) -> Any:
    """A name is a preset."""
    return {"preset": value} if isinstance(value, str) else value


def _by_number(value: Any) -> Any:
    """A list gives the links of 0, 1, ...; null leaves one out. Keys of YAML are text, those of Python may be numbers."""
    if isinstance(value, list):
        return {str(number): link for number, link in enumerate(value) if link is not None}
    return {str(key): link for key, link in value.items()} if isinstance(value, dict) else value


LinkChoice = Annotated[LinkSettings, BeforeValidator(_named)]
Links = Annotated[dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,4})$")], LinkChoice], BeforeValidator(_by_number)]


def _absolute(path: str) -> str:
    """A path that is the same when the run is resumed from another folder."""
    return str(in_home(path, "network.trace").absolute())


class NetworkSettings(StrictModel):
    """The `network` section."""

    model_config = ConfigDict(allow_inf_nan=False)

    how: Literal["off", "relay", "netem"] = Field(
        default="off",
        description="off: no emulation; relay: a process that delays the clients' connections; netem: network namespaces of Linux, "
        "as root",
    )
    clock: Literal["real", "virtual"] = Field(
        default="real", description="real: transfers take their time; virtual: their time is computed, nothing waits"
    )
    default: LinkChoice = Field(default=LinkSettings(), description="link of all clients: a preset, or a section of fields")
    groups: Links = Field(
        default={}, description="links by group of data.clients: a list in their order (null: default), or by number from 0"
    )
    clients: Links = Field(default={}, description="links by client, from 0")
    trace: Annotated[str, AfterValidator(_absolute)] | None = Field(
        default=None, description="CSV of rates and delays over time: client,from_s,to_s,up_bps,down_bps,latency_s"
    )


def links_of(settings: NetworkSettings, groups: Sequence[int]) -> list[Schedule]:
    """Resolve the link of every client: its own fields over those of its group, over the default; the trace over all.

    A section with `preset` takes nothing from the less specific ones.

    Args:
        settings: The `network` section.
        groups: Number of clients in each group, as `data.clients`.

    Returns:
        One schedule per client, in order.

    Raises:
        ConfigError: Lists every problem: field, value and allowed values.
    """
    members = [group for group, size in enumerate(groups) for _ in range(size)]
    problems = _outside("groups", settings.groups, len(groups)) + _outside("clients", settings.clients, len(members))
    default = _over(Link(), settings.default, "network.default", problems)
    by_group = {int(key): _over(default, link, f"network.groups.{key}", problems) for key, link in settings.groups.items()}
    links = [by_group.get(group, default) for group in members]
    for key, link in settings.clients.items():
        if int(key) < len(links):
            links[int(key)] = _over(links[int(key)], link, f"network.clients.{key}", problems)
    steps: dict[int, Any] = {}
    if settings.trace is not None:
        try:
            steps = read_trace(settings.trace, len(members))
        except ConfigError as error:
            problems += [f"network.trace: {problem}" for problem in error.problems]
    schedules = [Schedule(link, steps.get(client, ())) for client, link in enumerate(links)]
    if settings.how == "netem":
        problems += [
            f"network.how is 'netem': it cannot make the link of client {client}, since {why}; must be 'relay'"
            for client, schedule in enumerate(schedules)
            if (why := unsupported(schedule))
        ]
    if problems:
        raise ConfigError(problems)
    return schedules


def compute_factors(settings: NetworkSettings, groups: Sequence[int]) -> dict[int, float]:
    """Resolve the factor on each client's processor time: its own over that of its group, over the default, as for links.

    Args:
        settings: The `network` section; its numbers of groups and clients are valid.
        groups: Number of clients in each group, as `data.clients`.

    Returns:
        Factor by client; clients without one are left out.
    """
    members = [group for group, size in enumerate(groups) for _ in range(size)]
    found = {}
    for client, group in enumerate(members):
        for link in (settings.clients.get(str(client)), settings.groups.get(str(group)), settings.default):
            if link is not None and link.compute_factor is not None:
                found[client] = link.compute_factor
            if link is not None and (link.compute_factor is not None or link.preset is not None):
                break
    return found


def _outside(field: str, given: dict[str, LinkSettings], count: int) -> list[str]:
    """Problems of numbers that no group or client has."""
    return [
        f"network.{field}.{key}: must be 0 to {count - 1}, as data.clients has {count} {field}"
        for key in given
        if int(key) >= count
    ]


def _over(base: Link, settings: LinkSettings, field: str, problems: list[str]) -> Link:
    """Link with the given fields changed; adds what is wrong with it to `problems`."""
    if settings.preset is not None:
        try:
            base = preset(settings.preset)
        except ConfigError as error:
            problems += [f"{field}.{problem}" for problem in error.problems]
            return base
    values = vars(base) | {
        name: value * unit for given, (name, unit) in _UNITS.items() if (value := getattr(settings, given)) is not None
    }
    if values["jitter_s"] > values["latency_s"]:
        latency_ms = values["latency_s"] * 1e3
        problems.append(f"{field}.jitter_ms is {values['jitter_s'] * 1e3:g}: must be 0 to latency_ms, which is {latency_ms:g}")
    elif values["off_s"] and values["on_s"] is None:
        problems.append(f"{field}.off_s is {values['off_s']:g}: needs on_s, the seconds that the link is on before")
    else:
        return Link(**values)
    return base
