"""ZeroMQ sockets with the protocol's options, CURVE with an allow-list, and a guard against endless messages."""

from __future__ import annotations

import errno
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.transport.dialed import DialedConnection
from dpcfl_net.transport.guard import SPARE, UNREAD_LIMIT, ConnectionGuard
from dpcfl_net.transport.keys import is_curve_key
from dpcfl_net.transport.messages import MAX_FRAME, WireError, plain
from dpcfl_net.transport.wire_size import frame_bytes

DOMAIN = "dpcfl"
HIGH_WATER = 32  # messages; four windows, so that flow control sets the pace and not the mark
ZERO_COPY = 256 << 10  # bytes of a frame that is sent without a copy
FRAMES = 2  # header and one chunk
BATCH = 256  # messages read before queued messages are sent
BYE_LINGER_MS = 5000
_LAST, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)  # whole numbers: Python combines flags of an enum slowly
_READABLE = int(zmq.POLLIN)
_ADDRESS = re.compile(r"tcp://(?P<host>\*|\[[^\s\[\]]+\]|[^\s:/\[\]*\x00]+):(?P<port>\*|[0-9]{1,5})")


@dataclass(frozen=True)
class Link:
    """Identity and security of one end of a connection.

    Attributes:
        run: Run id, hex; every message of a peer must carry the same.
        job: Hash of the job, hex; every message of a peer must carry the same.
        keys: This side's CURVE pair (public, secret), z85; None with security "none".
        server_key: Public CURVE key of the listening side, z85, for the side that connects.
        security: "curve", or "none" on loopback.
        context: ZeroMQ context to use; None: a new one.
    """

    run: str
    job: str
    keys: tuple[str, str] | None = field(default=None, repr=False)
    server_key: str | None = None
    security: str = "curve"
    context: zmq.Context | None = None

    @classmethod
    def of(
        cls, protocol: Protocol, keys: tuple[str, str], server_key: str | None = None, context: zmq.Context | None = None
    ) -> Link:
        """Create the link of a job.

        Args:
            protocol: The job's protocol.
            keys: This side's CURVE pair.
            server_key: Public key of the listening side, for the side that connects.
            context: ZeroMQ context to use.
        """
        return cls(protocol.run, digest(protocol), keys, server_key, protocol.security, context)


def require_safe(address: str, security: str) -> None:
    """Check an address and its security.

    Args:
        address: "tcp://host:port".
        security: "curve" or "none".

    Raises:
        ConfigError: If the security is unknown, the address malformed, or "none" is not on loopback.
    """
    if security not in ("curve", "none"):
        raise ConfigError(f"transport.security must be curve or none, got {security!r}")
    host = host_of(address)
    if security == "none" and not is_loopback(host):
        raise ConfigError(f"transport.security: none is allowed on loopback only, not on {address}")


def host_of(address: str) -> str:
    """Return the host of an address "tcp://host:port"; ConfigError if it is malformed."""
    form = _ADDRESS.fullmatch(address)
    if form is None or (form["port"] != "*" and int(form["port"]) > 65535):
        raise ConfigError(f"an address must look like tcp://host:port with a port up to 65535, got {shown(address)}")
    return form["host"].strip("[]")


def require_free(address: str) -> None:
    """Check that this machine can listen on an address now.

    Args:
        address: "tcp://host:port"; the port "*" is any free one.

    Raises:
        ConfigError: If the address is malformed, taken, or that of another machine.
    """
    require_safe(address, "curve")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        _bind(made, address)


def send(made: zmq.Socket, *frames: bytes | memoryview) -> None:
    """Send one multipart message without waiting.

    A large frame is not copied. A small one is: pyzmq wakes a thread to learn when it may forget a frame that was not copied.

    Args:
        made: The socket.
        frames: The frames; the last one is the largest.

    Raises:
        zmq.Again: If the queue is full.
    """
    copy = len(frames[-1]) < ZERO_COPY
    for frame in frames[:-1]:
        made.send(frame, _MORE, copy)
    made.send(frames[-1], _LAST, copy)


def has_more(made: zmq.Socket) -> bool:
    """Return True if a message can be received without waiting; to ask costs less than the exception of `receive` without one."""
    return bool(int(made.get(zmq.EVENTS)) & _READABLE)


def dial(made: zmq.Socket, address: str) -> None:
    """Connect a socket, now or once the address is bound.

    Args:
        made: The socket.
        address: "tcp://host:port".

    Raises:
        ConfigError: For an address that cannot exist.
    """
    made.ipv6 = _is_ipv6(address)
    try:
        made.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {shown(address)}: {(error.strerror or str(error)).lower()}") from None


def _is_ipv6(address: str) -> bool:
    """True for an IPv6 address. Other sockets stay with IPv4: a host name may have addresses of both kinds."""
    return address.startswith("tcp://[")


def is_loopback(host: str) -> bool:
    """Return True for an address, or the name localhost, that only the same machine reaches."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_socket(context: zmq.Context, kind: int, peers: int = 1) -> zmq.Socket:
    """Create a socket with the protocol's limits and heartbeats.

    libzmq 4.3 aborts the process if a peer leaves while its messages wait in a full queue and a heartbeat follows. So a
    listening socket has no queue limit (the ConnectionGuard limits bytes) and sends no heartbeats; the time-to-live in the
    other side's heartbeats ends silent connections.

    Args:
        context: ZeroMQ context.
        kind: Socket type.
        peers: Expected number of peers, for the queue of connections not yet accepted.
    """
    made = context.socket(kind)
    made.maxmsgsize = MAX_FRAME
    made.sndhwm = made.rcvhwm = HIGH_WATER
    if kind in (zmq.ROUTER, zmq.PULL):
        made.rcvhwm = 0
    else:
        made.heartbeat_ivl, made.heartbeat_timeout, made.heartbeat_ttl = 5_000, 30_000, 30_000
    made.handshake_ivl = 10_000
    made.reconnect_ivl, made.reconnect_ivl_max = 100, 5_000
    made.backlog = peers + 128
    made.linger = 0
    if kind in (zmq.DEALER, zmq.PUSH):
        made.immediate = 1
    if kind == zmq.ROUTER:
        made.router_mandatory = 1
        made.router_handover = 0
    return made


class AllowList:
    """CURVE keys that may connect, and the refused ones until they are collected.

    `callback` runs in the authenticator's thread and shares only a bounded list.

    Args:
        keys: Public keys, z85.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self.keys = frozenset(key.encode() for key in keys)
        self._refused: list[str] = []

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if a key may connect."""
        known = domain == DOMAIN and key in self.keys
        if not known and len(self._refused) < 256:
            self._refused.append(key.decode("ascii", "replace"))
        return known

    def refusals(self) -> list[str]:
        """Return the keys refused since the last call."""
        found, self._refused = self._refused, []
        return found


class Listener:
    """A bound socket, under CURVE with its own authenticator, and a guard of its connections.

    Args:
        kind: Socket type.
        address: Address to bind.
        link: Keys and security.
        allowed: Public keys that may connect, z85.
        unread_limit: As for ConnectionGuard.

    Raises:
        ConfigError: For an address that is taken or not allowed, and for missing keys.
    """

    def __init__(
        self,
        kind: int,
        address: str,
        link: Link,
        allowed: Collection[str],
        unread_limit: int = UNREAD_LIMIT,
    ) -> None:
        require_safe(address, link.security)
        if link.security == "curve" and link.keys is None:
            raise ConfigError("a listening socket with security curve needs a key pair")
        self._own_context = link.context is None
        self._context = link.context or zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._routed = kind == zmq.ROUTER
        self._allow = AllowList(allowed)
        self.socket = new_socket(self._context, kind, len(allowed))
        most_silent = len(allowed) + SPARE if link.security == "curve" else None  # without CURVE only this machine connects
        self.guard = ConnectionGuard(self.socket, unread_limit, most_silent)
        try:
            if link.keys is not None and link.security == "curve":
                self._authenticator = _serve_curve(self.socket, link.keys, self._allow)
            self.address = _bind(self.socket, address)
        except BaseException:
            self.close(0)
            raise

    def receive(self) -> Arrived | None:
        """Receive the next message without waiting; None if there is none."""
        arrived = receive(self.socket, self._routed, self._authenticator is not None, self.guard)
        if arrived is None:
            self.guard.all_read()
        return arrived

    def news(self) -> list[WireError]:
        """Return refused keys, failed handshakes and cut connections since the last call."""
        refused = [("unknown-key", f"refused a connection with key {plain(key, 40)}") for key in self._allow.refusals()]
        return [WireError(code, reason) for code, reason in refused + self.guard.failures()]

    def close(self, linger_ms: int) -> None:
        """Close the socket; queued messages are sent for up to `linger_ms` milliseconds."""
        self.guard.close()
        self.socket.close(linger=linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._own_context:
            self._context.term()


def _require_own_keys(keys: tuple[str, str]) -> None:
    """ConfigError, which shows neither, for a pair of this side that is none."""
    if not all(map(is_curve_key, keys)):
        raise ConfigError("this side's key pair does not hold two CURVE keys")


def _serve_curve(made: zmq.Socket, keys: tuple[str, str], allow: AllowList) -> ThreadAuthenticator:
    """Start the authenticator and make the socket a CURVE server; must come before bind. ConfigError for a key that is none."""
    _require_own_keys(keys)
    authenticator = ThreadAuthenticator(made.context)
    try:
        authenticator.start()
    except (zmq.ZMQError, RuntimeError) as error:
        authenticator.stop()
        reason = f"the authenticator did not start ({error}); without it any key could connect"
        raise Refused("authenticator", reason) from None
    authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=allow)
    made.curve_server = True
    made.curve_publickey, made.curve_secretkey = (key.encode() for key in keys)
    made.zap_domain = DOMAIN.encode()
    made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return authenticator


def join_curve(made: zmq.Socket, link: Link) -> None:
    """Make a socket a CURVE client that talks only to the holder of the link's server key; no effect without CURVE.

    ConfigError for a key that is none.
    """
    if link.security == "curve" and link.keys is not None and link.server_key is not None:
        if not is_curve_key(link.server_key):
            raise ConfigError(f"the public key of the listening side is {shown(link.server_key)}: must be a CURVE key")
        _require_own_keys(link.keys)
        made.curve_publickey, made.curve_secretkey = (key.encode() for key in link.keys)
        made.curve_serverkey = link.server_key.encode()


def _bind(made: zmq.Socket, address: str) -> str:
    """Bind and return the address with its real port; ConfigError if it is taken or wrong."""
    made.ipv6 = _is_ipv6(address)
    try:
        made.bind(address)
    except zmq.ZMQError as error:
        unknown = "no address of this name or form" if error.errno in (errno.EAGAIN, errno.EINVAL, errno.ENODEV) else None
        raise ConfigError(f"cannot listen on {address}: {unknown or zmq.strerror(error.errno or 0)}") from None
    return bytes(made.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


class Arrived(NamedTuple):
    """One multipart message.

    Attributes:
        route: Connection, for ROUTER sockets.
        user: Authenticated CURVE key, z85; empty without CURVE.
        fd: Descriptor of the connection; -1 without a guard.
        malformed: True if it has no frames or too many, which are then left out.
        header: First frame.
        chunk: Second frame; None if there is none.
    """

    route: bytes
    user: str
    fd: int
    malformed: bool
    header: memoryview
    chunk: memoryview | None

    def require_frames(self) -> None:
        """Refuse a message of no frames or too many, before its header is read."""
        if self.malformed:
            raise WireError("multipart", "a message is a header, or a header and one chunk")

    def require_frames_of(self, kind: str) -> None:
        """Refuse a chunk without content, and content of a message that is no chunk."""
        if (kind == "CHUNK") != (self.chunk is not None):
            raise WireError("multipart", f"a {kind} with a wrong number of frames")


def receive(
    made: zmq.Socket, routed: bool = False, curve: bool = False, guard: ConnectionGuard | DialedConnection | None = None
) -> Arrived | None:
    """Receive the next message without waiting; excess frames are dropped one at a time.

    Args:
        made: The socket.
        routed: True for a ROUTER socket, whose messages begin with their connection.
        curve: True to read the authenticated key of the connection.
        guard: Receives size and key of each message.

    Returns:
        The message; None if there is none.
    """
    wanted = routed + FRAMES
    frames: list[zmq.Frame] = []
    count, size, more, fd = 0, 0, True, -1
    while more:
        try:
            frame = made.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        count, more = count + 1, frame.more
        if count <= wanted:
            frames.append(frame)
        if count > routed:
            size += frame_bytes(len(frame), curve)
    route, user = frames[0].bytes if routed else b"", _user(frame) if curve else ""
    if guard is not None and count > routed:
        fd = int(frame.get(zmq.SRCFD))
        guard.delivered(fd, size, user)
    if not routed < count <= wanted:
        return Arrived(route, user, fd, True, memoryview(b""), None)
    return Arrived(route, user, fd, False, frames[routed].buffer, frames[-1].buffer if count == wanted else None)


def _user(frame: zmq.Frame) -> str:
    """Authenticated CURVE key of the connection; empty if there is none."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
