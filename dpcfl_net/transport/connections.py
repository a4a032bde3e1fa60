"""Connections of clients at the coordinator: whose they are, when they begin and end, and heartbeats that find lost ones."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.transport.channel import remember
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.messages import Header, WireError, encode
from dpcfl_net.transport.peers import Peer, ServerEvent
from dpcfl_net.transport.server_line import ServerLine
from dpcfl_net.transport.sockets import Arrived
from dpcfl_net.transport.timers import Timers

SLOTS = 16  # parts of the heartbeat interval over which the clients are spread


class Connections:
    """Identity and liveness of the clients' connections.

    Args:
        by_key: Client id by public CURVE key, z85; None without CURVE.
        line: The coordinator's socket.
        log: Receives failures and messages.
        events: Receives "joined" and "left".
        heartbeat_s: Interval of heartbeats, seconds.

    Attributes:
        peers: State by client id; filled by the owner.
        ready: Connected clients.
    """

    def __init__(
        self,
        by_key: Mapping[str, int] | None,
        line: ServerLine,
        log: MessageLog,
        events: list[ServerEvent],
        heartbeat_s: float,
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.ready: set[int] = set()
        self._by_key, self._line, self._log, self._events = by_key, line, log, events
        self._by_route: dict[bytes, int] = {}
        self._heartbeat_s, self._beats = heartbeat_s, Timers()

    def client_of(self, arrived: Arrived) -> int | None:
        """Client of a message by its authenticated key, or by the HELLO of its connection without CURVE."""
        return self._by_route.get(arrived.route) if self._by_key is None else self._by_key.get(arrived.user)

    def known(self, route: bytes, client: int | None, header: Header) -> Peer:
        """Client of a message on a connection that said HELLO, after the checks of boot and sequence.

        Raises:
            WireError: "no-hello", "boot" or "sequence".
        """
        peer = self.peers.get(client) if client is not None else None
        if peer is None or peer.route != route:
            raise WireError("no-hello", f"a {header.kind} before HELLO")
        if header.boot != peer.boot:
            raise WireError("boot", "a message of another boot than the connection's HELLO")
        peer.channel.admit(header)
        peer.heard = time.monotonic()
        return peer

    def hello(self, route: bytes, client: int | None, header: Header) -> Peer | None:
        """Handle a HELLO.

        Args:
            route: Its connection.
            client: The client by `client_of`.
            header: The HELLO.

        Returns:
            The client if a new connection was accepted; None for a repeated HELLO.

        Raises:
            WireError: "identity", "unknown-client", "sequence", "stale-boot" or "duplicate".
        """
        if self._by_key is None:
            if client not in (None, header.client):
                raise WireError("identity", f"this connection is client {client} already")
            client = header.client
        elif header.client != client:
            claim = f"claims to be client {header.client}; its key is that of client {client}"
            self._log.failed(f"client {client}", WireError("identity", claim))
        peer = self.peers.get(client) if client is not None else None
        if peer is None:
            raise WireError("unknown-client", f"no client {client} in this job")
        if peer.route == route and peer.boot == header.boot:
            peer.channel.admit(header)
            peer.channel.say("WELCOME", parent=header.id)
            return None
        if header.boot in peer.boots:
            raise WireError("stale-boot", "a boot id that was used before")
        if peer.route not in (None, route) and self._alive(peer):
            raise WireError("duplicate", f"client {client} is connected already")
        self._join(peer, route, header)
        return peer

    def _alive(self, peer: Peer) -> bool:
        """True if the peer's connection still exists; if not, it is marked as left."""
        if peer.route is not None and self._line.is_there(peer.route):
            return True
        self.left(peer)
        return False

    def _join(self, peer: Peer, route: bytes, header: Header) -> None:
        peer.channel.restart()
        peer.route, peer.boot, peer.phase = route, header.boot, "idle"
        peer.heard = time.monotonic()
        peer.channel.sequence = header.sequence
        remember(peer.boots, header.boot, None)
        self._by_route[route] = peer.client
        self._log.message("up", peer.name, header, len(encode(header)))
        peer.channel.say("WELCOME", parent=header.id)
        self._beats.set(peer.client, self._next_beat(peer.client, time.monotonic()))
        if peer.client not in self.ready:
            self.ready.add(peer.client)
            self._events.append(ServerEvent("joined", peer.client))

    def left(self, peer: Peer) -> None:
        """Note that a client's connection has ended."""
        if peer.route is not None:
            self._by_route.pop(peer.route, None)
        peer.route = None
        peer.channel.restart()
        self._beats.drop(peer.client)
        if peer.client in self.ready:
            self.ready.discard(peer.client)
            self._events.append(ServerEvent("left", peer.client))

    @property
    def next_beat(self) -> float:
        """Time of the next heartbeat, monotonic clock."""
        return self._beats.next

    def beat(self, now: float) -> None:
        """Send heartbeats to the clients whose turn it is, unless they have just got another message."""
        for client in self._beats.expired(now):
            peer = self.peers[client]
            if now - peer.told >= self._heartbeat_s / 2:
                peer.channel.say("HEARTBEAT", code="idle")
            self._beats.set(client, self._next_beat(client, now))

    def _next_beat(self, client: int, now: float) -> float:
        """Next turn of a client, which stays in its slot of the interval also after a delay."""
        offset = self._heartbeat_s * (client % SLOTS) / SLOTS
        return now + self._heartbeat_s - (now - offset) % self._heartbeat_s


def keys_of(clients: Mapping[int, str]) -> dict[str, int]:
    """Return the client id by public key.

    Args:
        clients: Public CURVE key by client id, z85.

    Raises:
        ConfigError: If two clients have the same key.
    """
    found = {key: client for client, key in clients.items()}
    if len(found) != len(clients):
        raise ConfigError("two clients of the roster have the same public key")
    return found
