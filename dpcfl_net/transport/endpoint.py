"""The two ends of the wire: the coordinator's ServerEndpoint and a worker's ClientEndpoint."""

from __future__ import annotations

from dpcfl_net.transport.client import ClientEndpoint, ClientEvent
from dpcfl_net.transport.payload import Payload
from dpcfl_net.transport.peers import ServerEvent
from dpcfl_net.transport.server import ServerEndpoint

__all__ = ["ClientEndpoint", "ClientEvent", "Payload", "ServerEndpoint", "ServerEvent"]
