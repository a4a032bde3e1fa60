"""Rounds of runs in MLflow."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.report.trackers.base import EPSILON, Tracker, privacy_text, require, result, settings
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run import RunData

EXTRA = "mlflow"
LONGEST = 500  # characters of a parameter, in any version of MLflow
MOST = 100  # parameters in one request
BYTES = "server/bytes_up"  # a tag of every round
JOB = "dpcfl.job"  # tag: run id of the signed job
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Logs metrics by round, the configuration as parameters, the privacy statement as tag and artifact.

    A resumed or replayed run continues its MLflow run; rounds that are there already are not logged again.

    Args:
        uri: Tracking URI, such as "http://host:5000" or "sqlite:///mlflow.db"; None: MLflow's default (MLFLOW_TRACKING_URI).
        experiment: Name of the MLflow experiment; None: the name of the configuration.

    Raises:
        ConfigError: If MLflow is not installed, or does not open `uri`.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self._entities = require("mlflow.entities", EXTRA)
        try:
            self._client: Any = require("mlflow", EXTRA).MlflowClient(tracking_uri=uri)
        except require("mlflow.exceptions", EXTRA).MlflowException as error:
            raise ConfigError(f"MLflow does not open {shown(uri)}: {error}") from None
        self._experiment, self._run = experiment, ""
        self._known = dict.fromkeys((EPSILON, BYTES), 0)  # last round that the MLflow run holds

    def open(self, run: RunData) -> None:
        name, job = self._experiment or run.config.name, run.job.protocol.run
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment], filter_string=f"tags.`{JOB}` = '{job}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {JOB: job, "dpcfl.folder": str(run.path.resolve()), "algorithm": str(run.config.algorithm["name"])}
            self._run = self._client.create_run(experiment, tags=tags, run_name=run.path.resolve().name).info.run_id
            parameters = [self._entities.Param(key, _cut(value)) for key, value in settings(run).items()]
            for start in range(0, len(parameters), MOST):
                self._client.log_batch(self._run, params=parameters[start : start + MOST])
            self._client.log_text(self._run, json.dumps(settings(run), indent=2), "configuration.json")
        for tag in self._known:
            history = self._client.get_metric_history(self._run, tag) if earlier else []
            self._known[tag] = max((metric.step for metric in history), default=0)
        self._state_privacy(run)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        new = {tag: value for tag, value in values.items() if step > self._known[EPSILON if tag == EPSILON else BYTES]}
        if new:
            self._client.log_batch(
                self._run, metrics=[self._entities.Metric(tag, value, int(1000 * at), step) for tag, value in new.items()]
            )

    def close(self, run: RunData) -> None:
        at = int(1000 * time.time())
        found = [self._entities.Metric(tag, value, at, run.rounds_done) for tag, value in result(run).items()]
        self._client.log_batch(self._run, metrics=found)
        self._state_privacy(run)
        self._client.set_terminated(self._run, STATUS.get(run.state, "FAILED"))

    def _state_privacy(self, run: RunData) -> None:
        self._client.set_tag(self._run, "privacy", statement(run.document.get("privacy")).headline)
        self._client.log_text(self._run, privacy_text(run), "privacy.txt")


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
