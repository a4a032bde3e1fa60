"""Data that every tracker logs: metrics by view, the configuration without secrets, the privacy statement."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Self

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.core.files import shown
from dpcfl_net.results.compare import SECRETS, flat
from dpcfl_net.results.number_format import number
from dpcfl_net.results.privacy_statement import statement, statement_text
from dpcfl_net.results.rounds import RoundMetrics
from dpcfl_net.results.run import RunData
from dpcfl_net.results.run_view import letter

EPSILON = "server/epsilon_spent"  # the tag that may come some rounds later; those of the observer may at the end
# Figures of a round by view: the server could compute its own; the observer needs test data and true clusters.
SERVER = ("epsilon_spent", "clusters", "seconds", "paused_s", "bytes_up", "bytes_down")
COUNTS = ("missing", "late", "away")  # of clients, which the server sees
OBSERVER = ("accuracy", "accuracy_worst", "accuracy_minority", "accuracy_central", "loss", "ari")


class Tracker(ABC):
    """A callback of `dpcfl.run` that is also called at the beginning and at the end of a run.

    Trackers run in the experimenter's process. They see test accuracies and true clusters, which the server of a run never may:
    do not let the server's operator read them during a run. A tracker serves one run at a time.
    """

    first_round = 1  # of those that this log gets
    _logged: dict[int, tuple[float, frozenset[str]]]  # time and tags of the rounds that were logged
    _tags: dict[frozenset[str], frozenset[str]]  # one object for all rounds with the same tags

    def __call__(self, metrics: RoundMetrics) -> None:
        """Log a round."""
        at = time.time() if metrics.time is None else metrics.time
        self._logged[metrics.round] = at, frozenset()
        self._log_new(metrics.round, scalars(metrics))

    def add_epsilons(self, spent: Mapping[int, float]) -> None:
        """Log epsilons that were computed after their round was logged.

        Args:
            spent: Epsilon by round; rounds that were not logged, or that have one, are left out.
        """
        for t in sorted(spent):
            self._log_new(t, {EPSILON: spent[t]})

    def begin(self, run: RunData, first_round: int = 1) -> None:
        """Begin a run, or a resumed part of it.

        Args:
            run: The run.
            first_round: First round that follows.
        """
        self.first_round, self._logged, self._tags = first_round, {}, {}
        self.open(run)

    def end(self, run: RunData) -> None:
        """End a run: log the figures that came after their round was logged, and its result."""
        for one in run.rounds:
            self._log_new(one.round, scalars(one))
        self.close(run)

    def _log_new(self, t: int, values: Mapping[str, float]) -> None:
        """Log the figures that a logged round lacks."""
        at, known = self._logged.get(t, (0.0, values.keys()))
        if late := {tag: value for tag, value in values.items() if tag not in known}:
            tags = frozenset({*known, *late})
            self._logged[t] = at, self._tags.setdefault(tags, tags)
            self.log(t, late, at)

    def replay(self, run: RunData) -> Self:
        """Log all rounds of a run that has ended, with their times.

        Args:
            run: The run, from `dpcfl.open_run`.

        Returns:
            The tracker.

        Raises:
            ConfigError: If `run` is no run, such as the path of one.
        """
        if not isinstance(run, RunData):
            raise ConfigError(f"run is {shown(run)}: must be a run, which dpcfl.open_run(path) opens")
        self.begin(run)
        for metrics in run.rounds:
            self(metrics)
        self.end(run)
        return self

    @abstractmethod
    def open(self, run: RunData) -> None:
        """Open the log of a run with its configuration and privacy statement; continue one that exists."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Log figures.

        Args:
            step: The round.
            values: Figures by tag, such as "observer/accuracy".
            at: Time, in seconds since the epoch.
        """

    @abstractmethod
    def close(self, run: RunData) -> None:
        """Log the result and close the log."""


def scalars(metrics: RoundMetrics) -> dict[str, float]:
    """Return the figures of a round by tag; a tag begins with the view, `server/` or `observer/`."""
    own = {f"server/{name}": number(getattr(metrics, name)) for name in SERVER}
    own |= {f"server/{name}": float(len(getattr(metrics, name))) for name in COUNTS}
    own |= {f"observer/{name}": number(getattr(metrics, name)) for name in OBSERVER}
    # MLflow refuses a "#" in the name of a metric, as in the names of clusters after the 26th.
    clusters = [letter(k).removeprefix("#") for k in range(len(metrics.accuracy_by_cluster))]
    own |= {
        f"observer/accuracy_cluster/{k}": number(value) for k, value in zip(clusters, metrics.accuracy_by_cluster, strict=True)
    }
    return {tag: value for tag, value in own.items() if value is not None}


def result(run: RunData) -> dict[str, float]:
    """Return the figures of the last evaluated round in run.json by tag."""
    final, spent = run.final, number(run.document.get("privacy", {}).get("epsilon_spent"))
    own = {f"final/observer/{name}": number(final.get(f"accuracy_{name}")) for name in ("mean", "worst", "minority", "central")}
    own |= {"final/observer/ari": number(final.get("ari")), "final/server/epsilon_spent": spent}
    return {tag: value for tag, value in own.items() if value is not None}


def settings(run: RunData) -> dict[str, Any]:
    """Return the resolved configuration by dotted key, without secrets."""
    found = dict(flat(run.config.model_dump(mode="json", exclude={"algorithms"})))
    return {key: value for key, value in found.items() if key not in SECRETS and value is not None}


def privacy_text(run: RunData) -> str:
    """Return the whole privacy statement as text."""
    return statement_text(statement(run.document.get("privacy")))


def require(module: str, extra: str) -> ModuleType:
    """Import a library that is not a dependency.

    Args:
        module: Its name.
        extra: The extra of this package that installs it.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported ({error}): {advice(extra)}") from None
