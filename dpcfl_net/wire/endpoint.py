"""The two ends of the wire: the coordinator's ServerEndpoint and a worker's ClientEndpoint."""

from __future__ import annotations

from dpcfl_net.wire.client import ClientEndpoint, ClientEvent
from dpcfl_net.wire.payload import Payload
from dpcfl_net.wire.peers import ServerEvent
from dpcfl_net.wire.server import ServerEndpoint

__all__ = ["ClientEndpoint", "ClientEvent", "Payload", "ServerEndpoint", "ServerEvent"]
