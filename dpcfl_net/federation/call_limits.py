"""Limits on the calls of a run over the network, and the connection to the launcher of its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dpcfl_net.federation.client_pool import Word

WAITS = 10  # at most so many times timeout_s while a client waits for a core


@dataclass(frozen=True)
class CallLimits:
    """Limits on the calls of a run.

    Attributes:
        quorum: Fraction of the asked clients that must answer.
        timeout_s: Seconds for an answer, from the client's turn. Not counted: time that the client waits for a core of its
            host (at most `WAITS` times as long) and time that this process was suspended.
        join_timeout_s: Seconds for a started client to connect; after that it is missing from the round.
        max_live: Most clients connected at once; a larger call runs in waves, and clients are started when they are asked.
            None: all clients.
        pause_s: Seconds that a call below the quorum waits for clients to return; 0: it fails at once.
    """

    quorum: float = 1.0
    timeout_s: float = 600
    join_timeout_s: float = 120
    max_live: int | None = None
    pause_s: float = 0.0


@dataclass(frozen=True)
class LauncherLink:
    """The federation's connection to the launcher of its clients.

    Attributes:
        tell: Passes the word to start or stop a client to the launcher; None: no launcher listens.
        lost: Returns clients that became unreachable since the last call; the round does not wait for them.
    """

    tell: Callable[[Word, int], None] | None = None
    lost: Callable[[], Iterable[int]] = tuple


USUAL_LIMITS = CallLimits()
NO_LAUNCHER = LauncherLink()
