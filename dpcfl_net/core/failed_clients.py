"""The error of a process that serves several clients: it names those that have failed, so that the others can start again without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.number_spans import spans

NO_RESTART = (2, 3)  # exit codes of errors that come again after a restart
_SPAN = r"\d{1,9}(?:-\d{1,9})?"
_MESSAGE = re.compile(rf"ClientsFailed: clients? ({_SPAN}(?:, {_SPAN})*): .*")


class ClientsFailed(DpcflError):
    """Clients of a process have failed.

    Args:
        errors: Error of each of them, at least one.
    """

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        codes = {client: error.exit_code if isinstance(error, DpcflError) else 70 for client, error in errors.items()}
        first = min(errors, key=lambda client: (codes[client] in NO_RESTART, client))
        self.exit_code = codes[first]
        reason = f"{type(errors[first]).__name__}: {errors[first]}"
        super().__init__(f"{listed_clients(sorted(errors))}: {' '.join(reason.split())}")


def failed_clients(message: str, among: Sequence[int]) -> list[int]:
    """Return the clients that the message of a process names; none if the whole process has failed.

    Args:
        message: Name and text of the error, perhaps after other lines. It may come from another host.
        among: Clients of the process, to which the result is limited.
    """
    if (named := _MESSAGE.fullmatch(message.strip().rpartition("\n")[2])) is None:
        return []
    spans = [(int(first), int(last or first)) for first, _, last in (part.partition("-") for part in named[1].split(", "))]
    return [client for client in among if any(first <= client <= last for first, last in spans)]


def listed_clients(clients: Sequence[int]) -> str:
    """Write sorted client ids with spans, as "clients 0-2, 7"."""
    return f"client{'' if len(clients) == 1 else 's'} {', '.join(spans(clients))}"
