"""File names of run folders and sweep folders. No other module holds these names."""

from __future__ import annotations

import shlex
from pathlib import Path

from dpcfl_net.core.errors import ConfigError

PROTOCOL, ROSTER, EXPERIMENT, OPERATOR_KEY = "protocol.json", "roster.jsonl", "experiment.json", "operator.pub"
CONFIG, RUN, PLACEMENT, LOCK, PREPARING = "config.yaml", "run.json", "placement.json", ".lock", ".preparing"
METRICS, CLUSTERS, MESSAGES, SPANS, WARNINGS = (
    "metrics.jsonl", "clusters.jsonl", "messages.jsonl", "spans.jsonl", "warnings.jsonl",
)  # fmt: skip
TRANSCRIPT, FIRST_ROUND, REPORT = "transcript.msgpack", "first_round.npz", "report.html"
KEYS, LEDGERS, CHECKPOINTS, LOGS, ADDRESSES, ATTACKS = "keys", "ledgers", "checkpoints", "logs", "addresses", "attacks"
EXPORT, TRACE, OWN_CODE = "export", "trace.json", "own_code.json"
SWEEP, CHAOS = "sweep.json", "chaos.yaml"
TUNING, TRIALS, TRIALS_PAGE = "tuning.json", "trials.csv", "trials.html"
OUTCOMES, SLURM = "outcomes", "slurm"


class RunFolder:
    """Paths of the files in a run folder; nothing is read, written or created.

    A worker host keeps keys, ledgers, logs and the signed job under the same names.

    Attributes:
        path: The folder itself.
        protocol: Public part of the signed job.
        roster: Clients of the signed job, one JSON object a line; the protocol names its hash.
        experiment: Private part of the signed job: data, true clusters and seeds.
        operator_key: Public key of the operator who signed the job.
        config: Resolved configuration.
        run: Summary of the run.
        chaos: Faults that were injected; only for runs with `--chaos`.
        placement: Hosts of the workers; only for runs on several hosts.
        own_code: sha256 of the source of an algorithm and a model of the user's own; only for runs that have one.
        lock: Lock file of the process that runs the folder.
        preparing: Marks a folder whose keys and job are not complete.
        metrics: Metrics per round, one JSON object a line.
        clusters: Cluster assignments and their scores per round, one JSON object a line.
        messages: Sizes and times of messages, one JSON object a line.
        spans: Busy intervals of processes, one JSON object a line.
        warnings: Warnings of processes, one JSON object a line.
        transcript: Messages as the coordinator sent and received them.
        first_round: Clustering of the first round's updates.
        report: Report page.
        keys: Key pairs, one folder per owner.
        ledgers: Privacy ledgers, one folder per owner.
        checkpoints: Server states.
        logs: Standard error of processes.
        addresses: Listening addresses of coordinator and observer.
        attacks: Results of attacks, one JSON file each.
        export: Models, metrics, figures and statement as files for other programs.
        trace: The run as Chrome trace events.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.protocol, self.experiment = self.path / PROTOCOL, self.path / EXPERIMENT
        self.roster, self.operator_key = self.path / ROSTER, self.path / OPERATOR_KEY
        self.config, self.run, self.chaos = self.path / CONFIG, self.path / RUN, self.path / CHAOS
        self.placement, self.lock = self.path / PLACEMENT, self.path / LOCK
        self.preparing, self.own_code = self.path / PREPARING, self.path / OWN_CODE
        self.metrics, self.clusters = self.path / METRICS, self.path / CLUSTERS
        self.messages, self.spans, self.warnings = self.path / MESSAGES, self.path / SPANS, self.path / WARNINGS
        self.transcript, self.first_round = self.path / TRANSCRIPT, self.path / FIRST_ROUND
        self.report = self.path / REPORT
        self.keys, self.ledgers, self.checkpoints = self.path / KEYS, self.path / LEDGERS, self.path / CHECKPOINTS
        self.logs, self.addresses, self.attacks = self.path / LOGS, self.path / ADDRESSES, self.path / ATTACKS
        self.export, self.trace = self.path / EXPORT, self.path / TRACE

    def require(self, file: Path) -> None:
        """Raise ConfigError if a file that makes the folder a run folder is missing."""
        if not file.is_file():
            raise no_run(self.path, f"it holds no {file.name}")

    def ledger(self, owner: str) -> Path:
        """Return the ledger folder of a key owner, such as "client_3"."""
        return self.ledgers / owner

    def log(self, process: str) -> Path:
        """Return the log file of a process."""
        return self.logs / f"{process}.log"

    def address(self, role: str) -> Path:
        """Return the file that holds the listening address of a role."""
        return self.addresses / role

    def attack(self, name: str) -> Path:
        """Return the result file of an attack."""
        return self.attacks / f"{name}.json"


class SweepFolder:
    """Paths of the files in a sweep folder.

    Attributes:
        path: The folder itself.
        sweep: Axes, and the run folder and state of each cell.
        report: Comparison page.
        logs: Output of the processes that ran cells, if several did.
        outcomes: Failures of cells that SLURM ran, one JSON file each.
        slurm: Batch scripts of job arrays.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.sweep, self.report = self.path / SWEEP, self.path / REPORT
        self.logs, self.outcomes, self.slurm = self.path / LOGS, self.path / OUTCOMES, self.path / SLURM

    def log(self, name: str) -> Path:
        """Return a log file of the sweep."""
        return self.logs / f"{name}.log"

    def outcome(self, cell: int) -> Path:
        """Return the file of a cell's failure."""
        return self.outcomes / f"cell_{cell}.json"

    def array(self, part: int) -> Path:
        """Return the batch script of a job array."""
        return self.slurm / f"array_{part}.sh"


class TuneFolder(SweepFolder):
    """Paths of the files in a tuning folder, which is the sweep folder of the final runs.

    Attributes:
        tuning: Search, all trials, chosen settings and results.
        trials: One line per run of a trial.
        page: Page of the trials.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.tuning, self.trials, self.page = self.path / TUNING, self.path / TRIALS, self.path / TRIALS_PAGE


def no_run(folder: str | Path, lacks: str) -> ConfigError:
    """Return the error of a folder that is no run folder.

    Args:
        folder: The folder.
        lacks: Why it is none, as "it holds no protocol.json".
    """
    if SweepFolder(folder).sweep.is_file():
        return ConfigError(
            f"{folder} is a sweep, not a run folder: give the folder of one of its runs, which its {SWEEP} names; for the figures of the "
            f"whole sweep open {SweepFolder(folder).report}, for its table: dpcfl compare {shlex.quote(str(folder))}"
        )
    if RunFolder(folder).preparing.is_file():
        return ConfigError(
            f"the preparation of the run {folder} did not finish: {lacks}; unless its process still runs, start the run again, since this "
            "folder cannot be resumed and has spent nothing, and remove the folder"
        )
    return ConfigError(f"{folder} is not a run folder: {lacks}")


def signature_path(path: Path) -> Path:
    """Return the path of the operator's signature on a file."""
    return path.with_name(f"{path.name}.sig")
