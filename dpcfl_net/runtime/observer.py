"""The observer process: evaluates published models with the ground truth; it sends nothing to other processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from dpcfl_net.clustering import metrics
from dpcfl_net.core import runlog
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.clock import AwakeClock, since_epoch
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import Assignment, State
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment.cost_estimate import is_evaluated
from dpcfl_net.experiment.job_files import Job, read_job
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.evaluation import PersonalFigures, RoundFigures, TestSetEvaluator
from dpcfl_net.runtime.specs import ObserverSpec
from dpcfl_net.runtime.state_check import checked, misfit
from dpcfl_net.training import memory
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import Link
from dpcfl_net.transport.keys import OBSERVER
from dpcfl_net.transport.message_log import refusal
from dpcfl_net.transport.observer_inbox import ObserverInbox
from dpcfl_net.transport.observer_notes import End, Models, Personal, Span

_log = logging.getLogger(__name__)

# After the end the observer exits when no message came for QUIET_S and no figures are missing or they are LATE_S late. Messages
# that keep coming put this off until LATE_S after the end, or MOST_LATE_S if figures are missing: no client can hold up the end.
QUIET_S, LATE_S, MOST_LATE_S = 0.5, 15.0, 120.0
MOST_NAMED = 20  # clients in a warning
SILENT_S = 30.0  # silence of the coordinator after the checkpoint of the last round that counts as the end


def run_observer(spec: ObserverSpec) -> None:
    """Evaluate published models and collect the reports of workers until the run ends.

    Args:
        spec: Arguments of the process.

    Raises:
        Refused: If the job is invalid or not signed by the operator.
    """
    job = read_job(spec.job, spec.operator_key)
    if spec.after_the_end:
        Observer(spec, job).evaluate_last_round()
        return
    protocol = job.protocol
    with ObserverInbox(
        spec.bind,
        Link.of(protocol, keys.read_pair(spec.keys, OBSERVER, protocol.observer_key)),
        coordinator_key=protocol.coordinator_key,
        client_keys={entry.id: entry.public_key for entry in protocol.roster},
        parameters=protocol.model.parameters,
        max_models=job.algorithm.capabilities.published_models,
        on_failure=lambda failure: _log.warning("%s", refusal(failure)),
    ) as inbox:
        files = RunFolder(spec.folder)
        files.addresses.mkdir(parents=True, exist_ok=True)
        write_atomically(files.address(OBSERVER), inbox.address)
        _log.info("listening at %s", inbox.address)
        import torch  # loads while workers start

        torch.set_num_threads(1)
        memory.keep_freed()
        Observer(spec, job).listen(inbox)


class Observer:
    """Writes figures of models, assignments and personal models to metrics.jsonl, clusters.jsonl and spans.jsonl.

    Args:
        spec: Arguments of the process.
        job: The job.
        writes_spans: Record the time of evaluations; it takes none in virtual time.
    """

    def __init__(self, spec: ObserverSpec, job: Job, writes_spans: bool = True) -> None:
        self._writes_spans = writes_spans
        self.job, self.truth = job, job.experiment.true_clusters
        self._known = DataSettings.model_validate(job.experiment.data).clusters_known
        self._every = spec.evaluate_every
        files = RunFolder(spec.folder)
        self._checkpoints, self._warnings = files.checkpoints, files.warnings
        self._algorithm = job.algorithm
        # One model for the clients of one true cluster would fit it without having found anything.
        self._judged = self._known and (self._algorithm.capabilities.published_models > 1 or len(set(self.truth)) > 1)
        self._test_sets = TestSetEvaluator(job, spec.data_root)
        self._personal: PersonalFigures | None = None
        if self._algorithm.capabilities.personal:
            self._personal = PersonalFigures(self._algorithm, len(self.truth), AwakeClock().now)
        self._written = set[int]()
        for line in runlog.each(files.metrics):
            if line.get("view") == "observer":
                self._written.add(line["round"])
                if self._personal is not None and "accuracy_by_client" in line:  # not the line of `dpcfl compare --fairness`
                    self._personal.resume(line)
        self._scored = {line["round"] for line in runlog.each(files.clusters) if "assigned" in line}
        self._unscored = self._written - self._scored  # by a crash or a full disk between the two files
        self._open = ExitStack()
        self._metrics, self._clusters, self._spans = self._open.enter_context(
            runlog.all_open(files.metrics, files.clusters, files.spans)
        )

    def listen(self, inbox: ObserverInbox) -> None:
        """Take messages until the coordinator ends the run and the figures of the last round are complete.

        Args:
            inbox: Socket of the observer.
        """
        clock = AwakeClock()  # after a pause of the whole run, clients still have their time to report
        ended: float | None = None
        heard = clock.now()
        while True:
            notes = inbox.poll(1.0 if ended is None else QUIET_S)
            now = clock.now()
            heard = now if any(isinstance(note, Models | End) for note in notes) else heard
            if ended is None and now - heard > SILENT_S and self._last_round_is_done():
                ended = heard  # the coordinator could not reach this observer, and its message of the end is lost
            for note in notes:
                if isinstance(note, End):
                    ended = now
                else:
                    self.take(note)
            if self._personal is not None:
                self._write_personal(self._personal.overdue())
            if ended is not None and self._is_over(clock.now() - ended, quiet=not notes):
                self.evaluate_last_round()
                return

    def _is_over(self, late_s: float, *, quiet: bool) -> bool:
        """Return True if the observer waits no longer, some seconds after the end."""
        if self._waiting():
            return late_s > (LATE_S if quiet else MOST_LATE_S)
        return quiet or late_s > LATE_S

    def _last_round_is_done(self) -> bool:
        return (self._checkpoints / f"round_{self.job.protocol.rounds:05d}").is_dir()

    def evaluate_last_round(self) -> None:
        """Evaluate the last round from its checkpoint if its models were lost in a crash of the observer.

        Personal models are not evaluated again, since only their clients have them: figures that came are written, and clients
        without any keep those of an earlier round.
        """
        last = self.job.protocol.rounds
        if self._personal is not None:
            unreported = [] if last in self._written else self._personal.unreported(last)
            self._write_personal(self._personal.rest())
            if unreported and last in self._written:
                more = f" and {len(unreported) - MOST_NAMED} more" if len(unreported) > MOST_NAMED else ""
                self._warn(
                    f"no accuracy after the last round was reported by client{'s' * (len(unreported) > 1)} "
                    f"{', '.join(map(str, unreported[:MOST_NAMED]))}{more}: the final one is that of an earlier model"
                )
            if not self._written and self._last_round_is_done():
                self._warn('no client reported figures of a personal model: its client steps must keep it in me.state["model"]')
        if last in self._written or self._personal is not None or not self._checkpoints.is_dir():
            return
        found = Checkpoints(self._checkpoints, warn=_log.warning).newest()
        if found is not None and found[0] == last:
            state = checked(self._algorithm, found[1])  # the server is not trusted
            self.take(Models(last, state.assignment, state.models))

    def _warn(self, text: str) -> None:
        _log.warning("%s", text)
        runlog.append(self._warnings, {"view": "observer", "time": time.time(), "text": text})

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def _waiting(self) -> bool:
        return self._personal is not None and self.job.protocol.rounds not in self._written

    def take(self, note: Models | Personal | Span) -> None:
        """Take one message; write the figures of a round when they are complete. What does not fit the job is dropped.

        Args:
            note: The message.
        """
        if not 1 <= note.round <= self.job.protocol.rounds:
            return
        if isinstance(note, Models) and (problem := self._misfit(note)):
            _log.warning("refused: round %d of the coordinator has %s", note.round, problem)
            return
        if isinstance(note, Span):
            self._spans.write(vars(note))
            return
        if self._personal is not None and isinstance(note, Models) and len(note.models) > 1 and self._due(note.round):
            self._write_scores(note.round, note.assignment)
        if note.round in self._written:
            if self._personal is None and isinstance(note, Models) and note.round in self._unscored:
                self._unscored.remove(note.round)
                self._write_scores(note.round, self._test_sets.clusters_of(note))
            return
        if self._personal is not None:
            self._write_personal(self._personal.take(note))
        elif isinstance(note, Models):
            if any(note.labels.values()):
                self._write_labels(note)
            if self._due(note.round):
                started = time.monotonic()
                self._write(note.round, self._test_sets.evaluate(note))
                if self._writes_spans:
                    evaluated = Span(OBSERVER, "evaluate", note.round, *since_epoch(started, time.monotonic()))
                    self._spans.write(vars(evaluated))

    def _misfit(self, note: Models) -> str | None:
        """Say why models do not fit the job: the server is not trusted, and must not end the observer."""
        if any(client >= len(self.truth) for client in note.clients or ()):
            return f"clients of a round that are not in the job, which has {len(self.truth)}"
        return misfit(self._algorithm, State(note.models, note.assignment))

    def _write_personal(self, rounds: Iterable[tuple[int, PersonalFigures]]) -> None:
        for t, figures in rounds:
            if self._due(t):
                self._write(t, self._test_sets.fill(figures))

    def _due(self, t: int) -> bool:
        return is_evaluated(t, self._every, self.job.protocol.rounds)

    def _write(self, t: int, entry: RoundFigures) -> None:
        accuracy = [entry.accuracy[client] for client in sorted(entry.accuracy)]
        losses = [entry.loss[client] for client in sorted(entry.loss)]
        finite = [value for value in losses if value is not None and math.isfinite(value)]
        summary = metrics.accuracy_summary(accuracy, self.truth)
        self._metrics.write({
            "view": "observer", "round": t, "time": time.time(), **summary, "accuracy_by_client": accuracy,
            "loss_mean": float(np.mean(finite)) if finite else None, "loss_by_client": losses, **_central(entry),
            **({} if entry.reported is None else {"reported": entry.reported}),
        })  # fmt: skip
        self._written.add(t)
        self._write_scores(t, entry.assignment)

    def _write_scores(self, t: int, found: Assignment) -> None:
        """Write a round's clusters and how well they fit the true ones, once, if each client has a cluster."""
        if t in self._scored or any(cluster is None for cluster in found):
            return
        self._scored.add(t)
        scores = {
            "ari": metrics.adjusted_rand_index(self.truth, found),
            "assignment_accuracy": metrics.assignment_accuracy(self.truth, found),
            "recovered": metrics.recovered(self.truth, found),
            "minority_recovered": metrics.minority_recovered(self.truth, found),
        }
        self._clusters.write({"view": "observer", "round": t, **(scores if self._judged else {}), "assigned": found})

    def _write_labels(self, note: Models) -> None:
        """Write the share of correct labels of each kind; clusters are named to fit the first kind best."""
        first = next(iter(note.labels.values()))
        labelled = np.unique([m for m in first if m is not None]).size
        facts = {"view": "observer", "round": note.round, "labelled": labelled, **_moved(note.labels)}
        if not self._known:
            self._clusters.write(facts)
            return
        true = [self.truth[client] for client in note.clients or ()]
        names = metrics.best_names(true, first)
        # A label that occurs only in other kinds gets the name of an unused cluster.
        unused = [cluster for cluster in dict.fromkeys(true) if cluster not in names.values()]
        every_label = dict.fromkeys(label for labels in note.labels.values() for label in labels if label is not None)
        names |= dict(zip((label for label in every_label if label not in names), unused, strict=False))

        def share_correct(labels: Sequence[int | None]) -> float:
            return float(np.mean([names.get(label) == cluster for label, cluster in zip(labels, true, strict=True)]))

        accuracy = {kind: share_correct(labels) for kind, labels in note.labels.items() if labels}
        self._clusters.write({**facts, "label_accuracy": accuracy})


def _central(entry: RoundFigures) -> dict[str, float | None]:
    """Figures on the central test set; empty without one."""
    if entry.central is None:
        return {}
    accuracy, loss = entry.central
    return {"accuracy_central": accuracy, "loss_central": loss if math.isfinite(loss) else None}


def _moved(labels: Mapping[str, Sequence[int | None]]) -> dict[str, int]:
    """Count the clients that rebalancing placed in another cluster than their released label names, if both are known."""
    if not {"as released", "as placed"} <= set(labels):
        return {}
    return {"moved": sum(one != other for one, other in zip(labels["as released"], labels["as placed"], strict=True))}
