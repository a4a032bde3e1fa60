"""Files in which the coordinator, or an aggregator, records what it sees of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.atomic import replacing
from dpcfl_net.core.clock import since_epoch
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.runlog import all_open
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.pause import Pause
from dpcfl_net.transport.endpoint import Fault

_log = logging.getLogger(__name__)

LOGGED = {"HELLO", "WELCOME", "TASK", "RESULT", "ERROR", "BYE"}


class ServerRecords:
    """Files in which the server records its view of a run.

    Args:
        folder: Run folder.
        protocol: The signed protocol.
        algorithm: The job's algorithm.
        virtual_time: Clock of a run in virtual time, in seconds since the epoch; None: the real time.
    """

    def __init__(
        self, folder: Path, protocol: Protocol, algorithm: Algorithm, virtual_time: Callable[[], float] | None = None
    ) -> None:
        self.protocol, self.algorithm = protocol, algorithm
        self._virtual, self._clock = virtual_time is not None, virtual_time or time.monotonic
        self._files = files = RunFolder(folder)
        files.addresses.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        self._messages, self._metrics, self._clusters, self._spans, self._warnings = self._open.enter_context(
            all_open(files.messages, files.metrics, files.clusters, files.spans, files.warnings)
        )
        self._round_start, self._wall_start = self._clock(), time.monotonic()
        self._bytes, self._started = (0, 0), 0

    def warn(self, text: str) -> None:
        """Log a warning and record it."""
        _log.warning("%s", text)
        self._warnings.write({"time": time.time(), "text": text})

    def pause(self, pause: Pause) -> None:
        """Record the beginning of a pause below the quorum."""
        _log.warning("%s", pause.text)
        self._warnings.write({"view": "pause", "time": time.time(), "text": pause.text, "seconds": pause.seconds})

    def resume(self, pause: Pause, seconds: float) -> None:
        """Record the end of a pause after some seconds."""
        now, what = time.time(), f"round {pause.round}" if pause.round else "joining"
        text = f"{what}: the pause ended after {seconds:.0f} s"
        _log.info("%s", text)
        self._warnings.write({"view": "pause", "time": now, "text": text, "seconds": 0})
        self.span("coordinator", "pause", pause.round, now - seconds, now)

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def messages(self, lines: Iterable[dict[str, Any]]) -> None:
        """Record the headers of messages whose kind is logged."""
        if logged := [line for line in lines if line["kind"] in LOGGED]:
            self._messages.write(*logged)

    def fault(self, fault: Fault) -> None:
        """Record an injected fault as a span of its client."""
        now = time.time()
        self._spans.write({
            "who": f"client {fault.message.client}", "what": f"fault {fault.what}", "round": fault.message.round, "start": now,
            "end": now + fault.seconds, "fault": fault.text,
        })  # fmt: skip

    def span(self, who: str, what: str, t: int, start: float, end: float) -> None:
        """Record a period of work of one process in round t, in seconds since the epoch."""
        self._spans.write({"who": who, "what": what, "round": t, "start": start, "end": end})

    def joined(self, t: int) -> None:
        """Record that the clients have joined before round t."""
        self._round_start, self._wall_start = self._clock(), time.monotonic()
        begins = f"round {t} begins" if t <= self.protocol.rounds else "all rounds are done"
        _log.info("%d clients in the roster; %s", len(self.protocol.roster), begins)

    def round(self, t: int, state: State, fed: Federation, *, resumed: bool = False) -> None:
        """Record the figures of a round.

        Args:
            t: Round.
            state: State after the round.
            fed: The federation, for traffic and missing clients.
            resumed: True for the round that a resumed run starts from: the figures are those of the time since then.
        """
        now, wall, counts = self._clock(), time.monotonic(), fed.counts
        up, down = (total - before for total, before in zip(fed.traffic, self._bytes, strict=True))
        self._bytes = fed.traffic
        took = f"done in {now - self._round_start:.2f} s" if not resumed else "was done before this start"
        _log.info("round %d of %d %s: %d bytes to the server, %d from it", t, self.protocol.rounds, took, up, down)
        assignment = list(state.assignment)
        if self.protocol.has_schedule:
            entries = zip(self.protocol.roster, assignment, strict=True)
            assignment = [m if entry.rounds_there(1, t) else None for entry, m in entries]
        clusters = max((m + 1 for m in state.assignment if m is not None), default=0)
        clusters = clusters if self.algorithm.capabilities.model_per_client else len(state.models)
        phase = {"phase": "single"} if clusters == 1 else {}
        default_figures = phase | {"sizes": [assignment.count(m) for m in range(clusters)]}
        arrays = {name: value for name, value in state.diagnostics.items() if isinstance(value, Mapping)}
        figures = {name: _plain(value) for name, value in state.diagnostics.items() if name not in arrays}
        self._metrics.write(
            {"view": "server", "round": t, "time": time.time(), "seconds": now - self._round_start, "bytes_up": up, "bytes_down": down,
             "answered": fed.answered, "missing": fed.missing, "away": counts.away, "late": counts.late, "paused_s": counts.paused_s,
             "live": fed.live, "started": fed.started - self._started, **({"resumed": True} if resumed else {}),
             **({"clock": "virtual", "wall_s": wall - self._wall_start} if self._virtual else {})}
        )  # fmt: skip
        self._started = fed.started
        self._clusters.write(
            {
                "view": "server",
                "round": t,
                "assignment": assignment,
                "clusters": clusters,
                "diagnostics": default_figures | figures,
            }
        )
        start, end = (self._round_start, now) if self._virtual else since_epoch(self._round_start, now)
        self.span("coordinator", "wait", t, start, end)
        for name, group in arrays.items():
            with replacing(self._files.path / f"{name}.npz") as file:
                np.savez(file, **group)
        self._round_start, self._wall_start = now, time.monotonic()


def _plain(value: Any) -> Any:
    """The value with numbers and lists in place of numpy's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
