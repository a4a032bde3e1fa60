"""Starts and stops the server of `dpcfl serve`."""

from __future__ import annotations

import threading
import webbrowser
from collections import Counter
from pathlib import Path

from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.serve.access import TUNNEL, Access, loopback
from dpcfl_net.launch.serve.server import PageServer
from dpcfl_net.launch.serve.site import Site
from dpcfl_net.results.listing import RUN, SWEEP, Listing
from dpcfl_net.results.number_format import counted


def serve(folder: Path, host: str, port: int, *, opens_browser: bool) -> None:
    """Serve the pages of a folder until a signal.

    Args:
        folder: Folder of runs and sweeps.
        host: Loopback address or "localhost".
        port: Port; 0: a free one.
        opens_browser: Open the list in the user's browser.

    Raises:
        Refused: If the host is not a loopback address.
        ConfigError: If the folder cannot be listed or the port cannot be used.
    """
    host = loopback(host)
    site, access = Site(folder), Access()
    with PageServer(site, access, host, port) as server, Interrupts() as interrupts:
        try:
            with interrupts.raising():
                print(_counts(site.library.listing()))
                print(f"open {server.with_token(access.token)}")
                print(TUNNEL.format(port=server.server_port, host=f"[{host}]" if ":" in host else host))
                print("Ctrl-C stops it", flush=True)
                if opens_browser:
                    # In a thread: a browser within the terminal returns when it is left.
                    threading.Thread(target=_open, args=(server.with_token(access.once()),), daemon=True).start()
                server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


def _open(address: str) -> None:
    if not webbrowser.open(address):
        print("no browser was found: open the address above in one", flush=True)


def _counts(listing: Listing) -> str:
    kinds = Counter(found.kind for found in listing.found.values())
    said = [counted(kinds[kind], kind) for kind in (RUN, SWEEP)]
    return f"{' and '.join(said)} in {listing.root}"
