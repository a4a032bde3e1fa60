"""Who may read a served page: requests of this machine, under its own name, with the token or the cookie that follows it."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import threading
import time
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from dpcfl_net.core.errors import Refused

LOCALHOST = "localhost"
TOKEN_BYTES = 32
ONCE_S = 60.0  # life of the code that the command line of a browser holds
TUNNEL = "to read it from another machine: ssh -L {port}:{host}:{port} THIS_MACHINE, then open the same address there"


def loopback(host: str) -> str:
    """Return the loopback address of `--host`.

    Args:
        host: "localhost" or an address.

    Raises:
        Refused: If it is not a loopback address: the pages hold test accuracies and true clusters of clients.
    """
    if host == LOCALHOST:
        return "127.0.0.1"
    try:
        if ipaddress.ip_address(host).is_loopback:
            return host
    except ValueError:
        pass  # a name: it may resolve to another address tomorrow
    raise Refused(
        "--host",
        f"{host!r} must be 127.0.0.1, ::1 or localhost, because the pages hold true clusters and accuracies of clients, and "
        f"HTTP is not encrypted; {TUNNEL.format(port='PORT', host='127.0.0.1')}",
    )


def is_own_name(header: str) -> bool:
    """Return True if a Host header names this machine by a loopback name, with any port: a tunnel may have another.

    A page of another site whose name was made to resolve to 127.0.0.1 (DNS rebinding) sends that name.
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
        return name == LOCALHOST or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Access:
    """Secrets of one server.

    Attributes:
        token: In the printed address.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(TOKEN_BYTES)
        self._session = secrets.token_urlsafe(TOKEN_BYTES)
        self._once: dict[str, float] = {}
        self._lock = threading.Lock()

    def once(self) -> str:
        """Return a code that is accepted once instead of the token, within ONCE_S seconds.

        Other users can read the command line of a browser; they shall not find the token there.
        """
        code = secrets.token_urlsafe(TOKEN_BYTES)
        with self._lock:
            self._once[code] = time.monotonic() + ONCE_S
        return code

    def admits(self, token: str) -> bool:
        """Return True for the token, or for a code that was not used before."""
        if _equal(token, self.token):
            return True
        with self._lock:
            known = [code for code in self._once if _equal(token, code)]
            return any(self._once.pop(code) > time.monotonic() for code in known)

    def cookie(self, port: int) -> str:
        """Return the value of Set-Cookie. Cookies do not distinguish ports, so the name does."""
        return f"{_name(port)}={self._session}; Path=/; HttpOnly; SameSite=Lax"

    def knows(self, cookies: str, port: int) -> bool:
        """Return True if a Cookie header holds the cookie of this server.

        Args:
            cookies: The header.
            port: Port of the server.
        """
        try:
            found = SimpleCookie(cookies).get(_name(port))
        except CookieError:
            return False
        return found is not None and _equal(found.value, self._session)


def _name(port: int) -> str:
    return f"dpcfl-{port}"


def _equal(given: str, wanted: str) -> bool:
    """Compare in a time that does not depend on the content."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
