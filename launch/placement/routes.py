"""The address of this machine on its routes to other hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.transport.sockets import is_loopback

DISCARD = 9  # port to look up a route; nothing is sent


def own_address(hosts: Iterable[str]) -> str:
    """Return the address at which hosts reach this machine.

    Args:
        hosts: Names or addresses, one at least. A host may be this machine, which alone would give a loopback address.

    Returns:
        The address on the route to the first host that is another machine; a loopback address if all are this machine.

    Raises:
        ConfigError: If there is no route to a host.
    """
    found = ""
    for host in hosts:
        found = _towards(host)
        if not is_loopback(found):
            break
    return found


def _towards(host: str) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the latter for a name with an empty label
        raise ConfigError(f"no route to {host} ({error}): give --address, the address of this machine for workers") from None
