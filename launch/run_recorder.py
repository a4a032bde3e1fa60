"""Record of a run while it lasts: run.json and the epsilon lines."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.statement import replace_one_epsilon
from dpcfl_net.launch import run_kinds
from dpcfl_net.results import summary
from dpcfl_net.results.epsilon_spent import write_epsilon_lines

FIRST_EPSILON_S = 1.0  # assumed cost of the first computation of epsilon: a run of seconds computes it at its end only
STATEMENT_S = 1.0  # how long a stopped run waits for its replace-one epsilon, which a report computes too


class RunRecorder:
    """Keeps run.json and the epsilon lines up to date during a run.

    It belongs to the operator and may read everything.

    Args:
        folder: The run folder.
        job: The job.
        seconds_before: Duration of the run before it was resumed, in seconds.
        run: The processes of the run.
        durable: False if the run does not flush its ledgers.
    """

    def __init__(self, folder: Path, job: Job, seconds_before: float, run: run_kinds.Run, *, durable: bool) -> None:
        self.folder, self.job, self.seconds_before, self._run, self._durable = folder, job, seconds_before, run, durable
        self.document: dict[str, Any] = {}
        self._began = time.monotonic()  # the clock of the machine may be set during the run
        self._replace_one: float | None = None
        self._epsilon_round, self._epsilon_s, self._epsilon_at = 0, FIRST_EPSILON_S, time.monotonic()
        self._statement = threading.Thread(target=self._compute_replace_one, daemon=True)
        self._statement.start()

    def progress(self) -> Any:
        """Return the `ProgressView` of now. Updates the epsilon lines too, in at most a thirtieth of the time."""
        from dpcfl_net.launch.cli.progress import tail_progress

        view = tail_progress(self.folder)
        if view.round > self._epsilon_round and time.monotonic() - self._epsilon_at > 30 * self._epsilon_s:
            start = time.monotonic()
            write_epsilon_lines(self.folder, self.job)
            self._epsilon_round, self._epsilon_at = view.round, time.monotonic()
            self._epsilon_s = self._epsilon_at - start
            view = tail_progress(self.folder)
        return view

    def write(self, state: str, *, last: bool = False, error: str = "") -> dict[str, Any]:
        """Write run.json and return its content.

        Args:
            state: "running", "finished", "interrupted" or "failed".
            last: True at the end of the run; the epsilon lines are then written too.
            error: Message of the failure; empty without one.

        Raises:
            OSError: If it cannot be written.
        """
        if last:
            self._statement.join(None if state == "finished" else STATEMENT_S)
            with contextlib.suppress(OSError):  # a full disk: they follow from the ledgers, and run.json matters more
                write_epsilon_lines(self.folder, self.job)
        self.document = summary.run_document(
            self.folder,
            self.job,
            state=state,
            wall_s=self.seconds_before + time.monotonic() - self._began,
            processes=self._run.processes(),
            replace_one=self._replace_one,
            devices=self._run.devices(),
            durable=self._durable,
        )
        if error:
            self.document["error"] = error
        summary.write_run(self.folder, self.document)
        return self.document

    def _compute_replace_one(self) -> None:
        self._replace_one = replace_one_epsilon(self.job.protocol)
