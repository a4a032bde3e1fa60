"""The operator's copies of ledgers that other hosts keep: what an agent reports, what the launcher copies, and their comparison.

The original stays on its host. A copy tells how many charges a ledger must hold: a host without them could charge them again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import LedgerError, Refused
from dpcfl_net.core.files import read_bytes
from dpcfl_net.launch.placement.messages import LedgerUpdate
from dpcfl_net.privacy.ledger.chain import COUNTER, LINES, holds, last_counted
from dpcfl_net.privacy.ledger.entries import counter_line, digest, read_counter, split_lines


class LedgerTail:
    """Reads the lines of a client's ledger that were not sent yet; they hold no keys and no releases.

    Args:
        client: Client id.
        folder: Its ledger.
    """

    def __init__(self, client: int, folder: Path) -> None:
        self._client, self._folder = client, folder
        self._counter, self._sent, self._digest = b"", 0, hashlib.sha256().digest()
        self._seen: tuple[int, int] | None = None  # size and time of the file whose lines were sent

    def new_lines(self) -> LedgerUpdate | None:
        """Return new complete lines, or all lines if the file was rewritten after a crash; None if there are none."""
        seen = self._look()
        if seen is None or seen == self._seen:  # the journal, which is long, need not be read
            return None
        counter = last_counted(self._folder)  # after the look and before the lines: the ledger may grow in between
        if counter is None or counter == self._counter:
            return None
        content = (self._folder / LINES).read_bytes()
        content = content[: content.rfind(b"\n") + 1]
        if content.count(b"\n") <= int(counter.partition(b" ")[0]):
            return None  # the journal has the newest line, the file does not yet
        same = hashlib.sha256(content[: self._sent]).digest() == self._digest
        start = self._sent if same else 0
        self._counter, self._sent, self._digest = counter, len(content), hashlib.sha256(content).digest()
        self._seen = seen
        return LedgerUpdate(client=self._client, at=start, lines=content[start:].decode(), counter=counter.decode())

    def _look(self) -> tuple[int, int] | None:
        try:
            found = (self._folder / LINES).stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns


def extend_copy(folder: Path, report: LedgerUpdate) -> None:
    """Add reported lines to a copy.

    Args:
        folder: The copy.
        report: Lines of the ledger.

    Raises:
        Refused: With code "agent-line" if lines are missing before those of the report.
        LedgerError: "ledger-rolled-back" if the ledger lacks lines of the copy, which then stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, copied = folder / LINES, _copied(folder)
    if report.at > len(copied):
        raise Refused(
            "agent-line",
            f"the ledger of client {report.client} continues at byte {report.at}, but the copy has {len(copied)}",
        )
    content = copied[: report.at] + report.lines.encode()
    if not content.startswith(copied):
        raise _rolled_back(report.client)
    write_atomically(path, content.decode())
    write_atomically(folder / COUNTER, report.counter)


def copied_counter(folder: Path) -> str | None:
    """Return number and hash of the last line of a copy, as the content of a counter file; None without a copy.

    A crash may leave the counter file of a copy one report behind its lines, and a power failure may leave it without lines.
    """
    lines, _ = split_lines(_copied(folder))
    path = folder / COUNTER
    counter = read_bytes(path) if path.exists() else b""
    named = read_counter(counter)
    if named is not None and named[0] >= len(lines):
        return counter.decode()
    return counter_line(len(lines) - 1, digest(lines[-1])).decode() if lines else None


def check_counter(client: int, folder: Path, counter: str) -> None:
    """Check that a ledger holds every line of the operator's copy, before its client runs again.

    Args:
        client: Client id.
        folder: Its ledger on this host.
        counter: `copied_counter` of the copy. The hash of a line determines all lines before it.

    Raises:
        LedgerError: "ledger-rolled-back" if it does not, "ledger-broken" if the ledger was edited or damaged.
    """
    if not holds(folder, counter.encode()):
        raise _rolled_back(client)


def _copied(folder: Path) -> bytes:
    """Read the lines of a copy; a power failure may leave zeros in place of those that were not flushed."""
    path = folder / LINES
    return read_bytes(path).partition(b"\0")[0] if path.exists() else b""


def _rolled_back(client: int) -> LedgerError:
    return LedgerError(
        "ledger-rolled-back",
        f"the ledger of client {client} lacks lines that were copied from it before: it was removed or replaced by an older copy, "
        "and a part of the budget could be spent twice",
    )
