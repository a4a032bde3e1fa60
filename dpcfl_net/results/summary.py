"""run.json: one run in one small file, put together from what the processes wrote."""

from __future__ import annotations

import json
import math
import platform
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpcfl_net import __version__
from dpcfl_net.core import runlog, yaml_file
from dpcfl_net.core.errors import ConfigError, LedgerError
from dpcfl_net.core.files import check_fields, read_object
from dpcfl_net.core.protocol import PROTOCOL, PrivacyTarget, digest, read_protocol
from dpcfl_net.core.run_lock import is_running
from dpcfl_net.data import cache
from dpcfl_net.experiment.job_files import EXPERIMENT, Audit, Job, checked, read_experiment
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.central_dp import CENTRAL_SERVER
from dpcfl_net.federation.claim import composer
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.ledger import read_ledger
from dpcfl_net.privacy.ledger.record_book import RecordBook
from dpcfl_net.transport.keys import client_key

# What is read again of a run.json and of a run's config.yaml.
RUN_FIELDS: dict[str, tuple[type, ...]] = {
    "state": (str,), "rounds_done": (int,), "wall_s": (float,), "processes": (int,), "devices": (dict,), "privacy": (dict,),
    "final": (dict,),
}  # fmt: skip
RUN_SECTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "ledger": {"root": (str, type(None)), "budget": (dict, type(None))}, "data": {"root": (str, type(None))}, "output": {"transcript": (str,)},
}  # fmt: skip
LIBRARIES = ("torch", "numpy", "pyzmq", "opacus", "dp-accounting", "scikit-learn")


def read_run_job(folder: Path) -> Job:
    """The job of a run folder, without its signatures; ConfigError when the folder is no run."""
    if not (folder / PROTOCOL).exists():
        raise ConfigError(f"{folder} is not a run folder: it holds no {PROTOCOL}")
    protocol = read_protocol(folder / PROTOCOL)
    return checked(Job(protocol, read_experiment(folder / EXPERIMENT, protocol)))


def run_settings(folder: Path) -> dict[str, Any]:
    """The sections of a run's config.yaml as they are written there; ConfigError if they are not those of a run."""
    path = folder / "config.yaml"
    document = yaml_file.load(path)
    for name, fields in RUN_SECTIONS.items():
        section = document.get(name) if isinstance(document, dict) else None
        if not isinstance(section, dict) or not set(fields) <= set(section):
            raise ConfigError(f"{path} is damaged: it has no section {name} with {', '.join(fields)}")
        check_fields(section, f"{path}, {name}", fields)
    return dict(document)


def run_document(
    folder: Path, job: Job, *, state: str, wall_s: float, processes: int, replace_one: float | None, devices: dict[str, int]
) -> dict[str, Any]:
    """The whole of run.json; figures that are not there yet are null.

    devices: how many worker processes compute on what, "cpu" or a GPU's UUID; empty where that is not known.
    """
    metrics, clusters = (runlog.read(folder / name) for name in ("metrics.jsonl", "clusters.jsonl"))
    server = [line for line in metrics if line["view"] == "server" and "bytes_up" in line]
    observed = [line for line in metrics if line["view"] == "observer"]
    seen = [line for line in clusters if line["view"] == "server" and "clusters" in line]
    judged = [line for line in clusters if line.get("view") == "observer" and "recovered" in line]
    last = max(observed, key=lambda line: line["round"], default={})
    mixture: dict[str, Any] = next((line for line in seen if line.get("mss") is not None), {})
    agreement = max(judged, key=lambda line: line["round"], default={})
    privacy = privacy_statement(job.protocol, replace_one)
    if job.experiment.audit is not None:
        privacy["audited"] = audited(job.experiment.audit)
    spent = max(spent_by_client(folder, job), default=0.0)
    privacy["epsilon_spent"] = spent if math.isfinite(spent) else None
    if job.protocol.ledger_scope == "dataset" and state != "running":
        privacy["covered"].append(promised_over_runs(folder, job))
    return {
        "name": job.protocol.name,
        "algorithm": job.protocol.algorithm,
        "state": state,
        "rounds_done": max((line["round"] for line in server), default=0),
        "wall_s": round(wall_s, 3),
        "processes": processes,
        "devices": devices,
        "bytes_up": sum(line["bytes_up"] for line in server),
        "bytes_down": sum(line.get("bytes_down", 0) for line in server),
        "privacy": privacy,
        "final": {
            "accuracy_mean": last.get("accuracy_mean"),
            "accuracy_worst": last.get("accuracy_worst"),
            "accuracy_minority": last.get("accuracy_minority"),
            "accuracy_by_cluster": last.get("accuracy_by_cluster"),
            "clusters_recovered": agreement.get("recovered"),
            "minority_recovered": agreement.get("minority_recovered"),
            "ari": agreement.get("ari"),
            "mss": mixture.get("mss"),
            "mpo": mixture.get("mpo"),
            "clusters": seen[-1].get("clusters") if seen else None,
        },
        "versions": {
            "dpcfl-net": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        },
        "seed": job.experiment.seed,
    }


def audited(audit: Audit) -> str:
    """What is said of a run with canaries wherever its results are."""
    one = len(audit.clients) == 1
    who = f"client {audit.clients[0]}" if one else f"{len(audit.clients)} clients"
    return f"{audit.canaries} records of {who} were canaries and all others empty, for an audit: accuracy means nothing here"


def read_document(folder: Path) -> dict[str, Any]:
    """run.json, empty where there is none yet; ConfigError if it cannot be read.

    A run that says `running` while no process holds its folder was cut off: it is `interrupted`.
    """
    path = folder / "run.json"
    try:
        document = read_object(path, RUN_FIELDS) if path.exists() else {}
    except ConfigError as error:
        raise ConfigError(f"{error}; write it again with: dpcfl report {folder}") from None
    if document.get("state") == "running" and not is_running(folder):
        document["state"] = "interrupted"
    return document


def write_run(folder: Path, document: dict[str, Any]) -> None:
    """Replace run.json."""
    runlog.write_atomically(folder / "run.json", json.dumps(document, indent=2, allow_nan=False) + "\n")


def damages(folder: Path, job: Job) -> list[str]:
    """What of a run folder is left out of its figures because it is damaged, a sentence each."""
    counts = [(folder / name, runlog.unreadable(folder / name)) for name in runlog.REQUIRED]
    found = [f"{path}: {count} damaged line(s) left out" for path, count in counts if count]
    for where in dict.fromkeys(paying_ledger(folder, job, entry.id) for entry in job.protocol.roster):
        try:
            read_ledger(where)
        except LedgerError as error:
            found.append(f"{error}: what was spent is not known")
    return found


def charged_by_round(folder: Path, job: Job, client: int) -> list[tuple[int, list[Event]]]:
    """(round, events) of every charge of this run in the ledger that pays for a client, in order."""
    own = digest(job.protocol)
    entries = read_ledger(paying_ledger(folder, job, client))
    return [(entry.round, list(entry.events)) for entry in entries if entry.job == own and entry.events]


def paying_ledger(folder: Path, job: Job, client: int) -> Path:
    """The ledger in which a client's epsilon is: its own, or a trusted server's."""
    if job.protocol.privacy.trust == "trusted-server":
        return folder / "ledgers" / CENTRAL_SERVER
    return ledger_folder(folder, client)


def ledger_folder(folder: Path, client: int) -> Path:
    """Where a client's ledger of this run is."""
    return folder / "ledgers" / client_key(client)


def record_book(folder: Path) -> tuple[Path, float | None]:
    """Scope `dataset`: the folder of the record book, and the delta of its budget if it has one."""
    ledger = run_settings(folder)["ledger"]
    return Path(ledger["root"]).expanduser().resolve(), (ledger["budget"] or {}).get("delta")


def promised_over_runs(folder: Path, job: Job) -> str:
    """Scope `dataset`: what all runs on one client's records have promised together, at most; a sentence."""
    where, delta = record_book(folder)
    delta = delta or job.protocol.privacy.delta
    book, compose = RecordBook(where), composer(cache.folder() / "claims")
    epsilon, runs = max(book.spent(digest(job.protocol), entry.id, delta, compose) for entry in job.protocol.roster)
    what = "a record" if job.protocol.privacy.unit == "sample" else "a client"
    return f"all runs on the same records: {runs} promise {what} epsilon {epsilon:.4g} at delta {delta:g} together, at most"


def spent_by_client(folder: Path, job: Job) -> list[float]:
    """Epsilon of what each client's ledger was charged; clients with equal charges are computed once."""
    return [curve[-1] if curve else 0.0 for curve in epsilon_curves(folder, job)]


def epsilon_curves(folder: Path, job: Job) -> list[list[float]]:
    """For each client, epsilon after each of the run's charged rounds, inf with seeded noise or a damaged ledger; nothing for a client without one."""
    by_ledger: dict[Path, list[float]] = {}
    accounted = job.protocol.privacy.model_copy(update={"delta": job.protocol.accounted_delta})
    for entry in job.protocol.roster:
        where = paying_ledger(folder, job, entry.id)
        if where in by_ledger:
            continue
        by_ledger[where] = []
        if not (where / "ledger.jsonl").exists():
            continue
        groups: dict[int, list[Event]] = {}
        try:
            for t, events in charged_by_round(folder, job, entry.id):
                groups.setdefault(t, []).extend(events)
        except LedgerError:  # its worker refuses to start, and says why; what was spent is not known
            by_ledger[where] = [math.inf]
            continue
        charged = tuple(tuple(groups.get(t, ())) for t in range(1, max(groups, default=0) + 1))
        seeded = job.protocol.privacy.noise == "seeded"
        by_ledger[where] = [math.inf] * len(charged) if seeded else list(_curve(charged, job.protocol.rounds, accounted))
    return [by_ledger[paying_ledger(folder, job, entry.id)] for entry in job.protocol.roster]


@lru_cache(maxsize=256)
def _curve(charged: tuple[tuple[Event, ...], ...], rounds: int, privacy: PrivacyTarget) -> list[float]:
    """Epsilon after each round's charges; that of a whole run is remembered, for runs that differ in their seed."""
    from dpcfl_net.privacy.accounting.accountant import epsilon_by_prefix

    def computed() -> list[float]:
        return epsilon_by_prefix(charged, privacy.delta, privacy.adjacency, privacy.accountant)

    if len(charged) < rounds:
        return computed()
    questions = [cost(events, privacy.delta, privacy.adjacency, privacy.accountant) for events in charged]
    found: list[float] = cached(cache.folder() / "claims", {"by_round": questions}, computed)
    return found


def write_epsilon_lines(folder: Path, job: Job) -> None:
    """Append to metrics.jsonl what each client has spent after each round that is not there yet."""
    written = max(
        (line["round"] for line in runlog.read(folder / "metrics.jsonl") if "epsilon_spent_by_client" in line), default=0
    )
    curves = epsilon_curves(folder, job)
    lines = runlog.Lines(folder / "metrics.jsonl")
    for t in range(written, min(map(len, curves), default=0)):
        lines.write({"view": "server", "round": t + 1, "epsilon_spent_by_client": [curve[t] for curve in curves]})
    lines.close()
