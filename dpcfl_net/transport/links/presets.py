"""Named links with the publications that their values are from."""

from __future__ import annotations

from dataclasses import dataclass

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.names import hint
from dpcfl_net.transport.links.link import Link

_PROFILES = "WebPageTest, settings/connectivity.ini.sample"  # https://github.com/WPO-Foundation/webpagetest


@dataclass(frozen=True)
class Preset:
    """A link and the source of its values.

    Attributes:
        link: The link; half of the source's round trip in each direction, no loss where the source states none.
        source: Publication and the values that it states.
    """

    link: Link
    source: str


PRESETS = {
    "datacenter": Preset(
        Link(latency_s=0.000134, up_bps=10e9, down_bps=10e9),
        "Guo et al., Pingmesh, SIGCOMM 2015: median round trip between pods 268 us; rate of 10 Gigabit Ethernet",
    ),
    "fiber": Preset(
        Link(latency_s=0.002, up_bps=5e6, down_bps=20e6), f"{_PROFILES}: FIOS, 20 Mbit/s down, 5 Mbit/s up, round trip 4 ms"
    ),
    "cable": Preset(
        Link(latency_s=0.014, up_bps=1e6, down_bps=5e6), f"{_PROFILES}: Cable, 5 Mbit/s down, 1 Mbit/s up, round trip 28 ms"
    ),
    "lte": Preset(
        Link(latency_s=0.035, up_bps=12e6, down_bps=12e6), f"{_PROFILES}: LTE, 12 Mbit/s down and up, round trip 70 ms"
    ),
    "4g": Preset(Link(latency_s=0.085, up_bps=9e6, down_bps=9e6), f"{_PROFILES}: 4G, 9 Mbit/s down and up, round trip 170 ms"),
    "3g": Preset(
        Link(latency_s=0.150, up_bps=768e3, down_bps=1.6e6),
        f"{_PROFILES}: 3G, 1.6 Mbit/s down, 768 kbit/s up, round trip 300 ms",
    ),
    "satellite": Preset(
        Link(latency_s=0.279, up_bps=3e6, down_bps=25e6),
        "RFC 2488, section 2: round trip over a geostationary satellite 558 ms; rates: broadband as the FCC defined it in 2015, "
        "25 Mbit/s down, 3 Mbit/s up",
    ),
}


def preset(name: str) -> Link:
    """Return a link by name; ConfigError with all names if it is unknown."""
    if name not in PRESETS:
        raise ConfigError(f"preset is {shown(name)}: must be one of {', '.join(PRESETS)}{hint(name, PRESETS)}")
    return PRESETS[name].link
