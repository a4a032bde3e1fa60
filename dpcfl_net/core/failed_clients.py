"""The error of a process that serves several clients: it names those that have failed, so that the others can start again without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.number_spans import spans

NO_RESTART = (2, 3)  # exit codes of errors that come again after a restart
MOST_LISTED = 6500  # characters of a list of failed clients; with those of the reason it fits the message of an ended process
MOST_REASON = 1000
SHOWN = 10  # spans of clients in a text for people
LONGEST_LINE = 2000  # characters of another text
_SPAN = r"\d{1,9}(?:-\d{1,9})?"
_MESSAGE = re.compile(rf"ClientsFailed: clients? ({_SPAN}(?:, {_SPAN})*): (.*)")


class ClientsFailed(DpcflError):
    """Clients of a process have failed.

    Args:
        errors: Error of each of them, at least one. The message does not name all of more than fit it: then all clients of the
            process count as failed.
    """

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        codes = {client: error.exit_code if isinstance(error, DpcflError) else 70 for client, error in errors.items()}
        first = min(errors, key=lambda client: (codes[client] in NO_RESTART, client))
        self.exit_code = codes[first]
        reason = " ".join(f"{type(errors[first]).__name__}: {errors[first]}".split())
        found = spans(sorted(errors))
        listed = _named(found, len(found))
        super().__init__(f"{listed if len(listed) <= MOST_LISTED else _named(found)}: {reason[:MOST_REASON]}")


def failed_clients(message: str, among: Sequence[int]) -> list[int]:
    """Return the clients that the message of a process names; none if the whole process has failed.

    Args:
        message: Name and text of the error, perhaps after other lines. It may come from another host.
        among: Clients of the process, to which the result is limited.
    """
    if (named := _MESSAGE.fullmatch(message.strip().rpartition("\n")[2])) is None:
        return []
    failed = [_ends(span) for span in named[1].split(", ")]
    return [client for client in among if any(first <= client <= last for first, last in failed)]


def shortened(line: str) -> str:
    """Return the last line of a message as a text for people: of many failed clients it lists the first, and a long text is cut."""
    named = _MESSAGE.fullmatch(line)
    return line[:LONGEST_LINE] if named is None else f"ClientsFailed: {_named(named[1].split(', '))}: {named[2]}"


def listed_clients(clients: Sequence[int]) -> str:
    """Write sorted client ids as a text for people, with spans, as "clients 0-2, 7"; of many the first, as "clients 0, 2 and 9 more"."""
    return _named(spans(clients))


def _named(found: Sequence[str], most: int = SHOWN) -> str:
    """Name clients by their spans, and count those after the first `most` spans."""
    count, more = _count(found), _count(found[most:])
    return f"client{'' if count == 1 else 's'} {', '.join(found[:most])}" + (f" and {more:,} more" if more else "")


def _count(found: Sequence[str]) -> int:
    return sum(last - first + 1 for first, last in map(_ends, found))


def _ends(span: str) -> tuple[int, int]:
    first, _, last = span.partition("-")
    return int(first), int(last or first)
