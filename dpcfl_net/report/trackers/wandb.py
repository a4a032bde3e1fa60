"""Rounds of runs in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpcfl_net.report.trackers.base import Tracker, privacy_text, require, result, settings
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run import RunData

EXTRA = "wandb"
ROUND = "round"  # x axis of all figures


class WandB(Tracker):
    """Logs metrics by round, the configuration, and the privacy statement as note and summary. A resumed run is continued.

    Args:
        project: Name of the project; None: the name of the configuration.
        **options: Further arguments of `wandb.init`, such as entity or mode ("offline").

    Raises:
        ConfigError: If wandb is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._wandb: Any = require("wandb", EXTRA)
        self._project, self._options = project, options
        self._run: Any = None

    def open(self, run: RunData) -> None:
        self._run = self._wandb.init(
            **{
                "project": self._project or run.config.name, "name": run.path.resolve().name, "id": run.job.protocol.run,
                "resume": "allow", "config": settings(run), "notes": privacy_text(run), **self._options,
            }
        )  # fmt: skip
        self._run.define_metric("*", step_metric=ROUND)
        self._run.summary["privacy"] = statement(run.document.get("privacy")).headline

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({ROUND: step, **values})

    def close(self, run: RunData) -> None:
        self._run.summary.update(result(run))
        self._run.summary["privacy statement"] = privacy_text(run)
        self._run.finish(exit_code=0 if run.state == "finished" else 1)
