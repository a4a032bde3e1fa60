"""A run folder as a Python object: configuration, privacy statement, metrics, models, ledgers and messages, for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.core.files import given_path, shown
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import ADJACENCIES, Adjacency
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.results import summary
from dpcfl_net.results.clients import ClientSummary, client_summaries
from dpcfl_net.results.epsilon_spent import charges_to, events_under, paying_ledger
from dpcfl_net.results.models import Models, personal_tensors
from dpcfl_net.results.number_format import percent
from dpcfl_net.results.privacy_statement import Statement, statement
from dpcfl_net.results.rounds import FIGURES, RoundMetrics, rounds_of
from dpcfl_net.results.run_files import report_command
from dpcfl_net.results.run_view import RunView, read_run
from dpcfl_net.results.verify import Check, verify_run

if TYPE_CHECKING:
    import pandas
    import torch


@dataclass(frozen=True)
class Privacy:
    """The privacy statement of a run.

    Attributes:
        epsilon: Promised epsilon over the whole run; inf if the run has no guarantee.
        delta: Promised delta.
        unit: "sample" (one training or validation record) or "client" (all data of one client).
        adjacency: "zero-out" or "replace-one".
        trust: "untrusted-server", "trusted-server" or "secure-aggregation".
        epsilon_spent: Largest epsilon that a client has spent so far; inf without a guarantee, and if charges may be in ledgers elsewhere.
        statement: Headline, alerts, facts, and covered and uncovered items, as text.
        document: The statement in run.json.
    """

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    trust: str
    epsilon_spent: float
    statement: Statement = field(repr=False)  # long texts: print(run.privacy) shows the first one
    document: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Privacy:
        """The statement of a run.json."""
        epsilon, spent = document.get("epsilon"), document.get("epsilon_spent")
        return cls(
            float("inf") if epsilon is None else float(epsilon), float(document["delta"]), document["unit"], document["adjacency"],
            document["trust"], float("inf") if spent is None else float(spent), statement(document), document,
        )  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([self.statement.headline, *self.statement.alerts])


@dataclass(frozen=True)
class Message:
    """One message that the server sent or received, chunks merged.

    Attributes:
        time: Seconds since the epoch.
        direction: "up" (to the server) or "down".
        client: Number of the client.
        round: Round that the message belongs to.
        kind: HELLO, WELCOME, TASK, RESULT, ERROR, HEARTBEAT or BYE.
        task: Client step of a TASK or RESULT.
        code: Status of a RESULT, such as "release".
        bytes: Size of the payload.
        tensors: Arrays by name, as they crossed the wire (docs/how-to/compression.md); None unless the transcript is kept in full.
    """

    time: float
    direction: str
    client: int
    round: int
    kind: str
    task: str
    code: str
    bytes: int
    tensors: dict[str, np.ndarray] | None


class Transcript:
    """The messages that the server saw, in order; iterating verifies the hash chain.

    Args:
        path: The transcript's file.

    Raises:
        ConfigError: On iteration, if the run kept no transcript.
        Refused: On iteration, at the first record that was changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Message]:
        from dpcfl_net.transport.transcript import messages

        if not self.path.exists():
            raise ConfigError(f"there is no {self.path}: the run kept no transcript (output.transcript)")
        for record, header, tensors in messages(self.path):
            client = record.peer.removeprefix("client ")
            yield Message(
                record.time, record.direction, int(client) if client.isdecimal() else -1, header.round, header.kind, header.task,
                header.code, header.size, tensors,
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"<transcript {self.path}>"


class RunData:
    """One run folder, finished, interrupted or still running. Every access reads the current files.

    Args:
        path: The run folder.

    Raises:
        ConfigError: If the folder holds no run, or the path is empty.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = given_path(path, "path").absolute()  # the caller may change its folder, as by %cd in a notebook
        files = RunFolder(self.path)
        files.require(files.config)

    @cached_property
    def config(self) -> Config:
        """The resolved configuration."""
        return configuration.read_kept(RunFolder(self.path).config)

    @cached_property
    def job(self) -> Job:
        """The job: protocol and experiment."""
        return summary.read_run_job(self.path)

    @property
    def document(self) -> dict[str, Any]:
        """run.json; empty before the run has begun."""
        return summary.read_document(self.path)

    @property
    def state(self) -> str:
        """`running`, `finished`, `interrupted`, `failed`, or `unknown` without run.json."""
        return str(self.document.get("state", "unknown"))

    @property
    def rounds_done(self) -> int:
        """Number of finished rounds."""
        return int(self.document.get("rounds_done", 0))

    @property
    def privacy(self) -> Privacy:
        """The privacy statement.

        Raises:
            ConfigError: If the folder has no run.json yet.
        """
        if "privacy" not in (document := self.document):
            raise ConfigError(f"{self.path} has no run.json yet; write it with: {report_command(self.path)}")
        return Privacy.of(document["privacy"])

    @property
    def final(self) -> dict[str, Any]:
        """Figures of the last evaluated round in run.json, None if a finished run lacks those of its last round; shares in [0, 1]."""
        return dict(self.document.get("final", {}))

    @property
    def view(self) -> RunView:
        """The content of the folder as plain tables by round."""
        return read_run(self.path)

    @property
    def rounds(self) -> list[RoundMetrics]:
        """Metrics of every round so far, in order."""
        return rounds_of(self.view)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Metrics of every round as a list of dictionaries."""
        return [metrics.as_dict() for metrics in self.rounds]

    @property
    def metrics(self) -> pandas.DataFrame:
        """Metrics of every round as a data frame, indexed by round; NaN for figures that were not measured.

        Raises:
            ConfigError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError(f"metrics need pandas: use .records, or {advice('pandas')}") from None
        columns = list(RoundMetrics.__dataclass_fields__)
        figures = dict.fromkeys(FIGURES, "float64")  # of None alone, pandas makes a column of objects
        return pandas.DataFrame(self.records, columns=columns).astype(figures).set_index("round")

    @property
    def warnings(self) -> list[str]:
        """Warnings of server and launcher, such as restarts of workers."""
        return [str(line.get("text")) for line in runlog.read(RunFolder(self.path).warnings)]

    @property
    def models(self) -> Models:
        """Trained models by cluster: torch state dicts; `.module(cluster)` builds and loads one."""
        return Models(self.path)

    def personal(self, client: int) -> dict[str, torch.Tensor]:
        """Read one client's personal model (mr-mtl, local, dp-fedper).

        It is read from the client's files, on the client's machine only. The privacy statement does not cover it.

        Args:
            client: Number of the client.

        Returns:
            State dict.

        Raises:
            ConfigError: If the algorithm has no personal models, or the client's files are elsewhere.
        """
        import torch

        return {name: torch.from_numpy(value.copy()) for name, value in personal_tensors(self.path, self.job, client).items()}

    def ledger(self, client: int) -> list[Entry]:
        """Read the privacy ledger that is charged for a client: its own, or the trusted server's.

        Args:
            client: Number of the client.

        Returns:
            Entries in order; each debit has its round, slots and events.

        Raises:
            ConfigError: If the roster has no such client, or its ledger is on another machine.
            LedgerError: If the ledger was changed.
        """
        roster = [entry.id for entry in self.job.protocol.roster]
        if not isinstance(client, (int, np.integer)) or isinstance(client, bool) or client not in roster:
            raise ConfigError(f"client is {client!r}: must be 0 to {len(roster) - 1}")
        where = paying_ledger(self.path, self.job, client)
        if not where.is_dir():
            raise ConfigError(f"client {client} has no ledger in {self.path}: it is on the client's machine")
        return read_ledger(where)

    def events(self, client: int, adjacency: Adjacency | None = None) -> list[Event]:
        """The mechanisms that a client's ledger was charged for, for `dpcfl.account` with the same adjacency; errors as `ledger`.

        Args:
            client: Client id.
            adjacency: "zero-out" or "replace-one"; None: that of the run. Under "replace-one" a choice by counts of records has twice
                the range.
        """
        if adjacency not in (None, *ADJACENCIES):
            raise ConfigError(f"adjacency is {shown(adjacency)}: must be {' or '.join(ADJACENCIES)}")
        if adjacency is not None:
            return events_under(self.ledger(client), self.job, client, adjacency)
        return [event for _, events in charges_to(self.ledger(client), self.job, client) for event in events]

    def clients(self, data_root: Path | str | None = None) -> list[ClientSummary]:
        """Summarise each client: its name in your data, records, clusters, last accuracy and epsilon spent.

        Args:
            data_root: Folder of the data sets; None: that of the run.

        Raises:
            ConfigError: If the data set is not the one of the run.
            DataMissing: If the data set is not on this machine.
        """
        return client_summaries(self.path, data_root)

    @property
    def transcript(self) -> Transcript:
        """The messages that the server saw."""
        return Transcript(RunFolder(self.path).transcript)

    def verify(self, operator_key: str | None = None) -> list[Check]:
        """Check signatures, hash chains, ledgers, plan and messages; recompute epsilon.

        Args:
            operator_key: The operator's public key, 64 hex digits; None: the one in the run folder.

        Returns:
            The checks; `check.holds` is False for one that fails and None where there is nothing to check.

        Raises:
            ConfigError: If `operator_key` is malformed, the run folder has no key, or the run is running.
        """
        return verify_run(self.path, operator_key)

    def __repr__(self) -> str:
        name, *facts = [f"{label} {value}" if label else value for label, value in self._facts()]
        return f"<{type(self).__name__} {name}: {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        folder = self.path
        with contextlib.suppress(OSError, ValueError):  # the current folder was removed, or is elsewhere
            folder = folder.relative_to(Path.cwd())
        rows = [*self._facts()[1:], ("folder", str(folder))]
        cells = "".join(f"<tr><th style='text-align:left'>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
        return f"<strong>{escape(self._facts()[0][1])}</strong><table>{cells}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        """(label, value) pairs of a short summary; the first one is the name."""
        document, config = self.document, self.config
        progress = f"{document.get('state', 'not started')} after {document.get('rounds_done', 0)} of {config.rounds} rounds"
        facts = [("", config.name), ("algorithm", str(config.algorithm["name"])), ("", progress)]
        if (accuracy := document.get("final", {}).get("accuracy_mean")) is not None:
            facts.append(("accuracy", percent(accuracy)))
        if "privacy" in document:
            facts.append(("privacy", statement(document["privacy"]).headline))
        return facts
