"""Both ends of the wire: the coordinator's ServerEndpoint and a worker's ClientEndpoint."""

from __future__ import annotations

from dpcfl_net.transport.client import ClientEndpoint
from dpcfl_net.transport.client_events import ClientEvent, ClientTimes
from dpcfl_net.transport.faults import Fault, FaultInjector, MessageFaults
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.payload import Payload
from dpcfl_net.transport.peers import ServerEvent
from dpcfl_net.transport.server import ServerEndpoint, ServerTimes
from dpcfl_net.transport.sockets import Link

__all__ = [
    "ClientEndpoint", "ClientEvent", "ClientTimes", "Fault", "FaultInjector", "Link", "MessageFaults", "MessageLog", "Payload", "ServerEndpoint",
    "ServerEvent", "ServerTimes",
]  # fmt: skip
