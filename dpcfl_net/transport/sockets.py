"""ZeroMQ sockets as the wire wants them: options, CURVE with an allow-list, and a guard against endless messages."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import shown
from dpcfl_net.transport.guard import UNREAD_LIMIT, ConnectionGuard
from dpcfl_net.transport.messages import WireError, plain

DOMAIN = "dpcfl"
HIGH_WATER = 64  # messages; four windows, so that flow control and not the mark sets the pace
MAX_FRAME = 2 << 20  # bytes
FRAMES = 2  # header and one chunk
BYE_LINGER_MS = 5000
_ADDRESS = re.compile(r"tcp://(?P<host>\*|\[[^\s\[\]]+\]|[^\s:/\[\]*\x00]+):(?P<port>\*|[0-9]{1,5})")


def require_safe(address: str, security: str) -> None:
    """ConfigError unless `security` is known and "none" stays on loopback."""
    if security not in ("curve", "none"):
        raise ConfigError(f"transport.security must be curve or none, got {security!r}")
    form = _ADDRESS.fullmatch(address)
    if form is None or (form["port"] != "*" and int(form["port"]) > 65535):
        raise ConfigError(f"an address must look like tcp://host:port with a port up to 65535, got {shown(address)}")
    host = form["host"].strip("[]")
    if security == "none" and not _is_loopback(host):
        raise ConfigError(f"transport.security: none is allowed on loopback only, not on {address}")


def dial(made: zmq.Socket, address: str) -> None:
    """Connect, now or once somebody listens there; ConfigError for an address that nobody can listen at."""
    try:
        made.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {shown(address)}: {(error.strerror or str(error)).lower()}") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_socket(context: zmq.Context, kind: int, peers: int = 1) -> zmq.Socket:
    """A socket with the limits and heartbeats of the wire; `peers` sizes the queue of connections not yet accepted.

    libzmq 4.3 aborts the whole process if a peer goes away while its messages wait because a queue is full, and a heartbeat of
    either side comes next. So a listening socket queues without a limit of its own (the ConnectionGuard has one, in bytes) and
    leaves heartbeats to whoever connects: their TTL ends a connection of which nothing is heard.
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
    """Answers which CURVE keys may connect; remembers refusals until the owner's loop collects them.

    `callback` runs in the authenticator's thread: appending to and popping from a bounded list is all that is shared.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self.keys = frozenset(key.encode() for key in keys)
        self._refused: list[str] = []

    def callback(self, domain: str, key: bytes) -> bool:
        known = domain == DOMAIN and key in self.keys
        if not known and len(self._refused) < 256:
            self._refused.append(key.decode("ascii", "replace"))
        return known

    def refusals(self) -> list[str]:
        """The keys refused since the last call."""
        found, self._refused = self._refused, []
        return found


class Listener:
    """A bound socket, under CURVE with an authenticator of its own, and what befalls its connections.

    Raises ConfigError for an address that is taken or not allowed, and for missing keys.
    """

    def __init__(
        self,
        kind: int,
        address: str,
        security: str,
        keys: tuple[str, str] | None,
        allowed: Collection[str],
        context: zmq.Context | None,
        unread_limit: int = UNREAD_LIMIT,
    ) -> None:
        require_safe(address, security)
        if security == "curve" and keys is None:
            raise ConfigError("whoever listens with security curve needs a key pair")
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._allow = AllowList(allowed)
        self.socket = new_socket(self._context, kind, len(allowed))
        self.guard = ConnectionGuard(self.socket, unread_limit)
        try:
            if keys is not None and security == "curve":
                self._authenticator = _serve_curve(self.socket, keys, self._allow)
            self.address = _bind(self.socket, address)
        except BaseException:
            self.close(0)
            raise

    def news(self) -> list[WireError]:
        """Refused keys, failed handshakes and cut connections since the last call."""
        refused = [("unknown-key", f"refused a connection with key {plain(key, 40)}") for key in self._allow.refusals()]
        return [WireError(code, reason) for code, reason in refused + self.guard.failures()]

    def close(self, linger_ms: int) -> None:
        self.guard.close()
        self.socket.close(linger=linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._own_context:
            self._context.term()


def _serve_curve(made: zmq.Socket, keys: tuple[str, str], allow: AllowList) -> ThreadAuthenticator:
    """Start the authenticator on the socket's context and make the socket a CURVE server; to be called before bind."""
    authenticator = ThreadAuthenticator(made.context)
    try:
        authenticator.start()
    except (zmq.ZMQError, RuntimeError) as error:
        authenticator.stop()
        reason = f"the authenticator did not start ({error}), and without it strangers could connect"
        raise Refused("authenticator", reason) from None
    authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=allow)
    made.curve_server = True
    made.curve_publickey, made.curve_secretkey = (key.encode() for key in keys)
    made.zap_domain = DOMAIN.encode()
    made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return authenticator


def join_curve(made: zmq.Socket, keys: tuple[str, str], server_key: str) -> None:
    """Make the socket a CURVE client that talks to the holder of `server_key` only."""
    made.curve_publickey, made.curve_secretkey = (key.encode() for key in keys)
    made.curve_serverkey = server_key.encode()


def _bind(made: zmq.Socket, address: str) -> str:
    """Bind and return the address with its real port; ConfigError if the address is taken or wrong."""
    try:
        made.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
    return bytes(made.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


@dataclass(frozen=True)
class Arrived:
    """One multipart message: header and chunk (None if there is none) from the connection `route` of the key `user`."""

    route: bytes
    user: str
    fd: int
    odd: bool
    header: memoryview
    chunk: memoryview | None


def receive(made: zmq.Socket, guard: ConnectionGuard | None = None) -> Arrived | None:
    """The next message, None if there is none; one with no or too many frames comes with `odd` set and those left out.

    Frames are read one at a time, and those too many are dropped as they are read.
    """
    routed = made.type == zmq.ROUTER
    wanted = routed + FRAMES
    frames: list[zmq.Frame] = []
    count, more, fd = 0, True, -1
    while more:
        try:
            frame = made.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        count, more = count + 1, frame.more
        if count <= wanted:
            frames.append(frame)
        if guard is not None and count > routed:
            fd = int(frame.get(zmq.SRCFD))
            guard.delivered(fd, len(frame.buffer))
    route = frames.pop(0).bytes if routed else b""
    if count > wanted or not frames:
        return Arrived(route, _user(frame), fd, True, memoryview(b""), None)
    return Arrived(route, _user(frame), fd, False, frames[0].buffer, frames[1].buffer if len(frames) == FRAMES else None)


def _user(frame: zmq.Frame) -> str:
    """The authenticated CURVE key of the connection, "" without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
