"""The observer process: the experimenter's instrument. It knows the truth, evaluates, writes; nothing flows back."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net import runlog
from dpcfl_net.clustering import metrics
from dpcfl_net.data.partition import DataSettings, open_client, open_set, plan_slices
from dpcfl_net.data.records import ClientData
from dpcfl_net.experiment import OBSERVER, Job, read_job
from dpcfl_net.job import digest
from dpcfl_net.runlog import Lines, say, write_atomically
from dpcfl_net.wire import keys
from dpcfl_net.wire.observer_link import End, Models, ObserverInbox, Personal, Span

# After the end the observer leaves once nobody has said anything for QUIET_S, or figures are LATE_S late.
QUIET_S, LATE_S = 0.5, 15.0


@dataclass(frozen=True)
class ObserverSpec:
    """Everything the observer is started with."""

    job: Path
    operator_key: str
    bind: str
    keys: Path
    folder: Path
    data_root: str | None = None


def run_observer(spec: ObserverSpec) -> None:
    """Evaluate what the coordinator publishes and gather what workers report, until the run's end."""
    import torch

    torch.set_num_threads(1)
    job = read_job(spec.job, spec.operator_key)
    protocol = job.protocol
    inbox = ObserverInbox(
        spec.bind,
        run=protocol.run,
        job=digest(protocol),
        security=protocol.security,
        keys=(keys.read_public(spec.keys, OBSERVER), keys.read_secret(spec.keys, OBSERVER)),
        coordinator_key=protocol.coordinator_key,
        client_keys={entry.id: entry.public_key for entry in protocol.roster},
        parameters=protocol.model.parameters,
        max_models=job.algorithm.published_models,
        on_failure=lambda failure: say(f"refused: {failure}"),
    )
    try:
        (spec.folder / "addresses").mkdir(parents=True, exist_ok=True)
        write_atomically(spec.folder / "addresses" / OBSERVER, inbox.address)
        Observer(spec, job).listen(inbox)
    finally:
        inbox.close()


@dataclass
class Round:
    """What is known of one round: the server's models and who uses which, or the clients' personal figures."""

    assignment: list[int | None]
    accuracy: dict[int, float] = field(default_factory=dict)
    loss: dict[int, float | None] = field(default_factory=dict)
    phase: str = ""


class Observer:
    """Turns models, assignments and personal figures into lines of metrics.jsonl, clusters.jsonl and spans.jsonl."""

    def __init__(self, spec: ObserverSpec, job: Job) -> None:
        self.job, self.truth = job, job.experiment.true_clusters
        self._root = spec.data_root
        self._metrics, self._clusters = Lines(spec.folder / "metrics.jsonl"), Lines(spec.folder / "clusters.jsonl")
        self._spans = Lines(spec.folder / "spans.jsonl")
        self._written = {line["round"] for line in runlog.read(spec.folder / "metrics.jsonl") if line.get("view") == "observer"}
        self._rounds: dict[int, Round] = {}
        self._evaluator: Any = None
        self._tests: list[ClientData] = []
        self._algorithm = job.algorithm
        self._personal = self._algorithm.personal

    def listen(self, inbox: ObserverInbox) -> None:
        """Until the coordinator's end and the last round's figures (workers may be a little late)."""
        ended: float | None = None
        while True:
            notes = inbox.poll(1.0 if ended is None else QUIET_S)
            for note in notes:
                if isinstance(note, End):
                    ended = time.monotonic()
                else:
                    self._take(note)
            if ended is not None and not notes and (not self._waiting() or time.monotonic() - ended > LATE_S):
                return

    def _waiting(self) -> bool:
        return bool(self._rounds) or (self._personal and self.job.protocol.rounds not in self._written)

    def _take(self, note: Models | Personal | Span) -> None:
        if isinstance(note, Span):
            self._spans.write({"who": note.who, "what": note.what, "round": note.round, "start": note.start, "end": note.end})
        elif note.round in self._written:
            return
        elif isinstance(note, Personal):
            entry = self._rounds.setdefault(note.round, Round([None] * len(self.truth), phase="personal"))
            entry.accuracy[note.client], entry.loss[note.client] = note.accuracy, note.loss
            if len(entry.accuracy) == len(self.truth):
                self._write(note.round, entry)
        elif not self._personal and note.round > 0:
            started = time.time()
            self._write(note.round, self._evaluate(note))
            self._spans.write({"who": OBSERVER, "what": "evaluate", "round": note.round, "start": started, "end": time.time()})

    def _evaluate(self, note: Models) -> Round:
        """Every client's own test records under the model of its cluster."""
        if self._evaluator is None:
            self._open()
        entry = Round(note.assignment, phase=note.phase)
        for client, cluster in enumerate(note.assignment):
            row = client if self._algorithm.model_per_client else cluster or 0
            model = note.models[row]
            entry.accuracy[client], entry.loss[client] = self._evaluator.accuracy_and_loss(model, self._tests[client])
        return entry

    def _open(self) -> None:
        from dpcfl_net.models import build
        from dpcfl_net.privacy.dpsgd import Evaluator

        experiment, m = self.job.experiment, self.job.protocol.model
        settings = DataSettings.model_validate(experiment.data)
        slices = plan_slices(settings, open_set(settings, self._root), experiment.partition_seed)
        self._tests = [open_client(settings, slices[k], self._root, "test") for k in experiment.slices]
        self._evaluator = Evaluator(build(m.name, tuple(m.input_shape), m.classes))

    def _write(self, t: int, entry: Round) -> None:
        accuracy = [entry.accuracy[client] for client in sorted(entry.accuracy)]
        losses = [entry.loss[client] for client in sorted(entry.loss)]
        finite = [value for value in losses if value is not None and math.isfinite(value)]
        summary = metrics.accuracy_summary(accuracy, self.truth)
        self._metrics.write({
            "view": "observer", "round": t, "time": time.time(), **summary, "accuracy_by_client": accuracy,
            "loss_mean": float(np.mean(finite)) if finite else None, "loss_by_client": losses,
        })  # fmt: skip
        self._written.add(t)
        self._rounds.pop(t, None)
        found = entry.assignment
        if any(cluster is None for cluster in found):
            return
        self._clusters.write({
            "view": "observer", "round": t, "ari": metrics.adjusted_rand_index(self.truth, found),
            "assignment_accuracy": metrics.assignment_accuracy(self.truth, found),
            "recovered": metrics.recovered(self.truth, found), "minority_recovered": metrics.minority_recovered(self.truth, found),
        })  # fmt: skip
