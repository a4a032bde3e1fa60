"""run.json: summary of a run, built from the files that its processes wrote."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpcfl_net import __version__
from dpcfl_net.core import runlog, yaml_file
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, LedgerError
from dpcfl_net.core.files import check_fields, in_home, read_object
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.data import cache
from dpcfl_net.experiment.job_files import Audit, Job, checked, read_experiment
from dpcfl_net.experiment.statement import ATTACKED, EXPORTED, FAIRNESS, NOT_DURABLE, TESTED, VALIDATED, privacy_statement
from dpcfl_net.federation.claim import composer
from dpcfl_net.privacy.ledger.book_claims import Budget
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.record_book import RecordBook
from dpcfl_net.results.attack_results import has_attacks
from dpcfl_net.results.epsilon_spent import clients_that_lack_charges, epsilon_curves, paying_ledgers
from dpcfl_net.results.number_format import at_most, counted, number
from dpcfl_net.results.run_files import actual_state, completed_rounds, mapping, report_command, wall_seconds

# Fields of run.json and sections of config.yaml that the program reads.
RUN_FIELDS: dict[str, tuple[type, ...]] = {
    "state": (str,), "rounds_done": (int,), "wall_s": (float,), "processes": (int,), "devices": (dict,), "privacy": (dict,),
    "final": (dict,),
}  # fmt: skip
RUN_SECTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "ledger": {"root": (str, type(None)), "budget": (dict, type(None))},
    "data": {"root": (str, type(None))},
    "output": {"transcript": (str,), "personal_models": (bool,)},
}
RUN_DEFAULTS = {"output": {"personal_models": False}}  # fields that earlier versions did not write
NOT_IN_BOOK = "all runs on the same records together: the record book (ledger.root) has no entry of this run"
PARTLY_IN_BOOK = "all runs on the records of the other clients together: the record book (ledger.root) has no entry of them"
LIBRARIES = ("torch", "numpy", "pyzmq", "opacus", "dp-accounting", "scikit-learn")


def read_run_job(folder: Path) -> Job:
    """Read the job of a run folder without checking its signatures.

    Raises:
        ConfigError: If the folder is not a run folder.
        Refused: If the job is malformed.
    """
    files = RunFolder(folder)
    files.require(files.protocol)
    protocol = read_protocol(files.protocol)
    return checked(Job(protocol, read_experiment(files.experiment, protocol)))


def run_settings(folder: Path) -> dict[str, Any]:
    """Read config.yaml of a run.

    Returns:
        Its sections.

    Raises:
        ConfigError: If a section that is read again is missing or malformed.
    """
    path = RunFolder(folder).config
    document = yaml_file.load(path)
    for name, fields in RUN_SECTIONS.items():
        section = document.get(name) if isinstance(document, dict) else None
        if isinstance(section, dict):
            section = document[name] = {**RUN_DEFAULTS.get(name, {}), **section}
        if not isinstance(section, dict) or not set(fields) <= set(section):
            raise ConfigError(f"{path} is damaged: it has no section {name} with {', '.join(fields)}")
        check_fields(section, f"{path}, {name}", fields)
    return dict(document)


def data_root(folder: Path, given: Path | str | None) -> str | None:
    """Return the folder of the data sets of a run.

    Args:
        folder: Run folder.
        given: A folder that replaces that of the run; None: `data.root` of config.yaml.

    Returns:
        The folder; None for the default one, also without config.yaml, as in a folder with the files of a job only.

    Raises:
        ConfigError: If config.yaml is damaged.
    """
    if given is None and RunFolder(folder).config.exists():
        given = run_settings(folder)["data"]["root"]
    return None if given is None else str(given)


def flushes(runtime: Mapping[str, Any], job: Job) -> bool:
    """Return True if a run flushes its ledgers: one in a single process does only if a record book composes it with others.

    Args:
        runtime: Section of its configuration; fields that are missing have their defaults.
        job: Its job.
    """
    in_network = runtime.get("federation", "network") == "network"
    return bool(runtime.get("durable", True)) and (in_network or job.protocol.ledger_scope == "dataset")


def run_document(
    folder: Path,
    job: Job,
    *,
    state: str,
    wall_s: float,
    processes: int,
    replace_one: float | None,
    devices: dict[str, int],
    durable: bool = True,
) -> dict[str, Any]:
    """Build run.json; figures that do not exist yet are null.

    Args:
        folder: Run folder.
        job: Its job.
        state: running, finished, failed or interrupted.
        wall_s: Seconds of the run so far, over all resumes.
        processes: Largest number of processes at once.
        replace_one: Epsilon under replace-one; None if infinite or not computed yet.
        devices: Worker processes by device, "cpu" or a GPU's UUID; empty if unknown.
        durable: False if the run does not flush its ledgers.

    Returns:
        The document.
    """
    files = RunFolder(folder)
    metrics, clusters = _without_clients(files.metrics), _without_clients(files.clusters)
    server = [line for line in metrics if line["view"] == "server" and "bytes_up" in line]
    observed = [line for line in metrics if line["view"] == "observer"]
    return {
        "name": job.protocol.name,
        "algorithm": job.protocol.algorithm,
        "state": state,
        "rounds_done": max((line["round"] for line in server), default=0),
        "wall_s": round(wall_s, 3),
        **_virtual(server),
        "processes": processes,
        "devices": devices,
        "bytes_up": sum(line["bytes_up"] for line in server),
        "bytes_down": sum(line.get("bytes_down", 0) for line in server),
        "privacy": _privacy(folder, job, observed, running=state == "running", replace_one=replace_one, durable=durable),
        "final": _final(observed, clusters, job.protocol.rounds if state == "finished" else None),
        "versions": {
            "dpcfl-net": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        },
        "seed": job.experiment.seed,
    }


def _privacy(
    folder: Path, job: Job, observed: Sequence[Mapping[str, Any]], *, running: bool, replace_one: float | None, durable: bool
) -> dict[str, Any]:
    """Privacy statement of the job, with what this run adds to it and what it has spent."""
    privacy = privacy_statement(job.protocol, replace_one)
    if job.experiment.audit is not None:
        privacy["audited"] = audited(job.experiment.audit, job.protocol)
    if job.experiment.data.get("evaluate") == "validation":
        privacy["not_covered"] = [VALIDATED if line == TESTED else line for line in privacy["not_covered"]]
    if any("f_acc" in line for line in observed):
        privacy["not_covered"].append(FAIRNESS)
    if has_attacks(folder):
        privacy["not_covered"].append(ATTACKED)
    if _exports_raw_models(folder, job):
        privacy["not_covered"].append(EXPORTED)
    if not durable:
        privacy["not_covered"].append(NOT_DURABLE)
    # Unknown while the run goes on; a launcher that is killed leaves this.
    privacy["epsilon_spent"] = None if running else _epsilon_spent(folder, job)
    if job.protocol.ledger_scope == "dataset" and not running:
        covered, not_covered = promised_over_runs(folder, job)
        privacy["covered"] += covered
        privacy["not_covered"] += not_covered
    return privacy


def _exports_raw_models(folder: Path, job: Job) -> bool:
    """Return True if personal models are written to the run folder that plain SGD has trained; those of DP-SGD follow from charged steps."""
    able = job.algorithm.capabilities
    if not (able.personal and able.plain_sgd and RunFolder(folder).config.exists()):
        return False
    exports: bool = run_settings(folder)["output"]["personal_models"]
    return exports


def _epsilon_spent(folder: Path, job: Job) -> float | None:
    """Largest epsilon that a client has spent; None if it is infinite, or the charges of a client are not known.

    None also before the first release without a guarantee in a plan that holds one: whether it comes may depend on earlier releases, as on
    the number of clusters that `rc-dpfl` finds, so that the charges so far promise nothing.
    """
    if job.protocol.unprotected:
        return None
    curves = epsilon_curves(folder, job)
    spent = max((curve[-1] for curve in curves if curve), default=0.0)
    return spent if math.isfinite(spent) and not clients_that_lack_charges(folder, job, curves) else None


def _final(observed: Sequence[Mapping[str, Any]], clusters: Sequence[dict[str, Any]], last_round: int | None) -> dict[str, Any]:
    """Figures of the newest round that has them; those of another round than `last_round` are not final."""
    seen = [line for line in clusters if line["view"] == "server" and "clusters" in line]
    judged = [line for line in clusters if line.get("view") == "observer" and "recovered" in line]
    last = max(observed, key=lambda line: line["round"], default={})
    agreement = max(judged, key=lambda line: line["round"], default={})
    if last_round is not None and last.get("round") != last_round:
        last, agreement = {}, {}
    return {
        **{name: last.get(name) for name in ("accuracy_mean", "accuracy_worst", "accuracy_minority", "accuracy_by_cluster")},
        "clusters_recovered": agreement.get("recovered"),
        "minority_recovered": agreement.get("minority_recovered"),
        "ari": agreement.get("ari"),
        "clusters": seen[-1].get("clusters") if seen else None,
        "diagnostics": last_numbers(seen),
        **{key: last[key] for key in ("accuracy_central",) if key in last},
    }


def _without_clients(path: Path) -> list[dict[str, Any]]:
    """Lines without their lists: with many clients these take megabytes a round."""
    kept = ("accuracy_by_cluster",)
    return [{k: v for k, v in line.items() if k in kept or not isinstance(v, list)} for line in runlog.each(path)]


def _virtual(server: list[dict[str, Any]]) -> dict[str, Any]:
    """Clock and seconds of a run in virtual time; empty for one in real time."""
    if not any(line.get("clock") == "virtual" for line in server):
        return {}
    return {"clock": "virtual", "virtual_s": round(sum(line.get("seconds", 0.0) for line in server), 3)}


def last_numbers(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the last number of each of the algorithm's diagnostics that has one number per round."""
    found = [(name, value) for line in lines for name, value in mapping(line, "diagnostics").items()]
    return {name: value for name, value in found if number(value) is not None}


def audited(audit: Audit, protocol: Protocol) -> str:
    """Describe the canaries of an audited run in one sentence.

    Args:
        audit: The audit.
        protocol: The signed protocol.
    """
    secure, were = protocol.privacy.secure, "were canaries" if audit.canaries > 1 else "was a canary"
    if protocol.privacy.unit == "client":
        others = "the others sent zeros" if audit.canaries < len(protocol.roster) else "none held data"
        return (
            f"{audit.canaries} of {len(protocol.roster)} clients {were} and {others}, for an audit: the accuracy is meaningless"
        )
    records = f"{audit.canaries} record{'s' if audit.canaries > 1 else ''}"
    many = len(audit.clients) > 1
    who = f"each of {len(audit.clients)} clients" if many else f"client {audit.clients[0]}"
    measured = (
        " of the released sums of its cluster (with T to n shares of the noise, of which epsilon counts T - C)"
        if secure
        else ""
    )
    others = "all other records, of other clients too," if secure else f"{'their' if many else 'its'} other records"
    return f"{records} of {who} {were} and {others} empty, for an audit{measured}: the accuracy is meaningless"


def read_document(folder: Path) -> dict[str, Any]:
    """Read run.json.

    Returns:
        The document; empty if the file is missing. State "running" becomes "interrupted" if no process holds the folder, and of a run
        without a recorded end `rounds_done` and `wall_s` are those of the rounds in metrics.jsonl.

    Raises:
        ConfigError: If the file is damaged, or metrics.jsonl cannot be read.
    """
    path = RunFolder(folder).run
    try:
        document = read_object(path, RUN_FIELDS) if path.exists() else {}
    except ConfigError as error:
        raise ConfigError(f"{error}; write it again with: {report_command(folder)}") from None
    if "state" not in document:
        return document
    return {
        **document, "state": actual_state(folder, document), "rounds_done": completed_rounds(folder, document),
        **({"wall_s": wall_seconds(folder, document)} if "wall_s" in document else {}),
    }  # fmt: skip


def add_not_covered(folder: Path, line: str) -> None:
    """Add a sentence on what epsilon does not cover to the statement in run.json, if there is one and it lacks the sentence."""
    path = RunFolder(folder).run
    document = read_object(path, RUN_FIELDS) if path.exists() else {}
    lines = mapping(document, "privacy").get("not_covered")
    if isinstance(lines, list) and line not in lines:
        lines.append(line)
        write_run(folder, document)


def write_run(folder: Path, document: dict[str, Any]) -> None:
    """Replace run.json."""
    write_atomically(RunFolder(folder).run, json.dumps(document, indent=2, allow_nan=False) + "\n")


def damages(folder: Path, job: Job) -> list[str]:
    """Describe the damaged files of a run folder that its figures leave out, one sentence each."""
    counts = [(folder / name, runlog.unreadable(folder / name)) for name in runlog.REQUIRED]
    found = [f"{path}: {counted(count, 'damaged line')} left out" for path, count in counts if count]
    for where in dict.fromkeys(paying_ledgers(folder, job)):
        if not where.exists():  # the client has not begun, or the ledger is on its machine
            continue
        try:
            read_ledger(where)
        except LedgerError as error:
            found.append(f"{error}: the epsilon spent is unknown")
    return found


def record_book(folder: Path) -> tuple[Path, Budget | None]:
    """Return folder of the record book and its budget (None without one), for ledger scope "dataset"."""
    ledger = run_settings(folder)["ledger"]
    budget = ledger["budget"]
    root = in_home(ledger["root"], "ledger.root").resolve()
    return root, None if budget is None else Budget(budget["epsilon"], budget["delta"])


def promised_over_runs(folder: Path, job: Job) -> tuple[list[str], list[str]]:
    """Describe what all runs on the same records promise together, for ledger scope "dataset".

    Args:
        folder: Run folder, whose config.yaml names the record book.
        job: The job.

    Returns:
        Sentences on what epsilon covers and on what it does not: the book lacks clients that were refused or that did not start, and all of
        them if it was moved or is on another host.
    """
    where, budget = record_book(folder)
    delta = job.protocol.privacy.delta if budget is None else budget.delta
    book, compose, roster = RecordBook(where), composer(cache.folder() / "claims"), job.protocol.roster
    spent = [book.spent(digest(job.protocol), entry.id, delta, compose, budget) for entry in roster] if where.exists() else []
    entered = [(epsilon, runs) for epsilon, runs in spent if runs]
    if not entered:
        return [], [NOT_IN_BOOK]
    epsilon, runs = max(entered)
    what = "a record" if job.protocol.privacy.unit == "sample" else "a client"
    whose = "the same records" if len(entered) == len(roster) else f"the records of {len(entered)} of {len(roster)} clients"
    said = "inf" if math.isinf(epsilon) else at_most(epsilon)
    said = f"all runs on {whose} in this record book: {runs} promise {what} epsilon {said} at delta {delta:g} together, at most"
    said = said if budget is not None or runs == 1 else f"{said}, if their plans were fixed before the first"
    return [said], [] if len(entered) == len(roster) else [PARTLY_IN_BOOK]
