"""Check of the interface over which the processes of one machine connect."""

from __future__ import annotations

import socket

PATIENCE_S = 5.0
REPAIR = "bring up the interface lo: ip link set lo up"


def connect() -> int:
    """Open and close a connection over 127.0.0.1.

    Returns:
        The port of the connection.

    Raises:
        OSError: If there is none, as in a network namespace in which the interface lo is down; listening works there.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
            return port
