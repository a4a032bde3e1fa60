"""HTTP server of `dpcfl serve`: reads only, answers only this machine."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import reason
from dpcfl_net.launch.serve.access import Access, is_own_name
from dpcfl_net.launch.serve.site import STATE, Answer, Site, refusal

IDLE_S = 20.0  # after which a silent connection is closed
READ_S = 20.0  # for a whole request: one that comes byte by byte would keep its place among MOST_REQUESTS for ever
MOST_REQUESTS = 32  # at the same time
MOST_FIELDS = 500  # parameters of an address
TOKEN = "token"
UNREADABLE = (ConnectionError, TimeoutError)  # the browser has gone
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_ACCESS = (
    "This address needs the token of the running server",
    [
        "Open the whole address that dpcfl serve printed, with ?token=.... Each start makes a new token, so addresses of an earlier start "
        "no longer work."
    ],
)


class PageServer(ThreadingHTTPServer):
    """Serves a site on a loopback address.

    Args:
        site: The site.
        access: Its secrets.
        host: Loopback address.
        port: Port; 0: a free one.

    Raises:
        ConfigError: If the port cannot be used.
    """

    daemon_threads = True  # a page that is being rendered does not hold up the end

    def __init__(self, site: Site, access: Access, host: str, port: int) -> None:
        self.site, self.access = site, access
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.Semaphore(MOST_REQUESTS)
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            said = "another program uses it; leave out --port to take a free one" if taken else reason(error)
            raise ConfigError(f"--port is {port}: {said}") from None

    @property
    def address(self) -> str:
        """Address of the list of runs, without token."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def with_token(self, token: str) -> str:
        """Return the address with a token."""
        return f"{self.address}?{urlencode({TOKEN: token})}"

    def server_bind(self) -> None:
        # HTTPServer asks the name service for this machine's name here, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread started, or a signal ends the server: then a place given back twice does no harm
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A signal that comes while a request is handed to its thread closes the connection under that thread.
        has_ended = request.fileno() == -1
        if not has_ended and not isinstance(sys.exception(), UNREADABLE):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request: method, name of the host, token or cookie, then the site."""

    server: PageServer
    timeout = IDLE_S

    def setup(self) -> None:
        super().setup()
        self._reading = threading.Timer(READ_S, self._stop_reading)
        self._reading.daemon = True
        self._reading.start()

    def parse_request(self) -> bool:
        try:
            return super().parse_request()
        finally:
            self._reading.cancel()

    def finish(self) -> None:
        self._reading.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with contextlib.suppress(OSError):  # the browser has gone
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        self._send(self._answer())

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        said = [f"The method is {self.command}: must be GET or HEAD. These pages only show runs; they change nothing."]
        self._send(refusal(405, "This server only reads", said), {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def _answer(self) -> Answer:
        names = self.headers.get_all("Host") or []
        if len(names) != 1 or not is_own_name(names[0]):
            said = [f"The request names the host {', '.join(names)[:100] or '(none)'}: must be localhost or 127.0.0.1."]
            return refusal(403, "This server answers only under its own name", said, way=None)
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=MOST_FIELDS)
        except ValueError:
            said = [f"It has more than {MOST_FIELDS} parameters, or brackets without an IPv6 address."]
            return refusal(400, "This address is not readable", said)
        has_cookie = self.server.access.knows(self.headers.get("Cookie", ""), self.server.server_port)
        if TOKEN in query and (self.server.access.admits(query[TOKEN][0]) or has_cookie):
            return Answer(303, b"")
        if not has_cookie:
            return refusal(403, *NO_ACCESS, as_json=address.path.endswith(f"/{STATE}"), way=None)
        return self._page(address.path, query)

    def _page(self, path: str, query: dict[str, list[str]]) -> Answer:
        try:
            answer = self.server.site.answer(path, query)
        except Exception:  # one page's bug must not hide the others
            traceback.print_exc()
            said = ["This is a bug in dpcfl serve; the terminal where it runs shows where. Files of the run may be damaged."]
            return refusal(500, "This page failed", said, path.endswith(f"/{STATE}"))
        if answer.version and self.headers.get("If-None-Match") == f'"{answer.version}"':
            return Answer(304, b"", answer.kind, answer.version)
        return answer

    def _send(self, answer: Answer, more: dict[str, str] | None = None) -> None:
        self.send_response(answer.status)
        headers = {
            **HEADERS,
            "Content-Security-Policy": POLICY.format(scripts=f"'nonce-{answer.nonce}'" if answer.nonce else "'none'"),
            **(more or {}),
        }
        if answer.status == 303:
            headers |= {"Location": self._without_token(), "Set-Cookie": self.server.access.cookie(self.server.server_port)}
        if answer.status != 304:
            headers |= {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        if answer.version:
            headers["ETag"] = f'"{answer.version}"'
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _without_token(self) -> str:
        """Address of the same page; it begins with one slash, so that it cannot name another host."""
        address = urlsplit(self.path)
        kept = [(name, value) for name, values in parse_qs(address.query).items() for value in values if name != TOKEN]
        return f"/{quote(address.path.lstrip('/'))}" + (f"?{urlencode(kept)}" if kept else "")

    def version_string(self) -> str:
        return "dpcfl"

    def log_message(self, *_: object) -> None:
        """Log nothing: addresses of requests hold the token."""
