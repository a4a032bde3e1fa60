"""`dpcfl verify`: checks signature, hash chains, and the consistency of ledgers, plan, messages and privacy statement."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.locks import is_held
from dpcfl_net.core.number_spans import spans
from dpcfl_net.core.protocol import FORMAT
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import is_operator_key, read_operator_key
from dpcfl_net.experiment.build import changed_settings
from dpcfl_net.experiment.config import read_kept
from dpcfl_net.experiment.job_files import Job, read_job
from dpcfl_net.experiment.statement import privacy_statement, replace_one_epsilon
from dpcfl_net.federation.central_dp import CENTRAL_SERVER, SERVER_ID
from dpcfl_net.federation.claim import noisy_plans, plan_events, protected, unmet_condition
from dpcfl_net.privacy.events.base import Event, merge
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.journal import JOURNAL
from dpcfl_net.privacy.ledger.ledger_folder import is_in_use
from dpcfl_net.privacy.slots import Slot, for_clients
from dpcfl_net.results import summary
from dpcfl_net.results.answers import other_than_announced, other_than_answered
from dpcfl_net.results.asked_clients import asked_clients
from dpcfl_net.results.compare import word
from dpcfl_net.results.epsilon_spent import charges_to, ledger_folder
from dpcfl_net.results.number_format import at_most, counted, number
from dpcfl_net.results.privacy_statement import has_single_releases, protects_validation
from dpcfl_net.results.run_files import mapping
from dpcfl_net.results.split_models import Given, given, other_than_charged, rounds_not_compared, split_models
from dpcfl_net.transport import transcript
from dpcfl_net.transport.keys import client_key
from dpcfl_net.transport.messages import decode

_PROMISE = (
    "unit", "adjacency", "trust", "epsilon", "epsilon_with_secret_noise", "delta", "accountant", "noise_multiplier", "ledger_scope",
    "insecure", "epsilon_by_client", "participations", "client_sampling",
)  # fmt: skip
_SUMS = ("participants", "answers", "colluders", "participation")
_WHOLE = "ledgers: hash chains and counters whole"
_SAME = 1e-3  # relative difference of two epsilons of different versions of the accountant's library


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        what: What was checked.
        holds: True if it holds; None if there was nothing to check.
        detail: Figure, or first difference.
    """

    what: str
    holds: bool | None
    detail: str


def verify_run(folder: Path, operator_key: str | None = None) -> list[Check]:
    """Run every check that a run folder allows.

    Args:
        folder: Run folder.
        operator_key: Operator's public key, 64 hex digits; None for the key in the run folder.

    Returns:
        The checks in order.

    Raises:
        ConfigError: If the folder is not a run folder, is running, has a ledger that a process holds, or has no operator key, or if
            `operator_key` is malformed.
    """
    files = RunFolder(folder)
    files.require(files.protocol)
    if is_held(folder):  # ledgers and transcript would be read at different times, and differ
        raise ConfigError(
            f"{folder} is running: verify it after it has ended; until then: dpcfl watch {shlex.quote(str(folder))}"
        )
    if operator_key is not None and not (isinstance(operator_key, str) and is_operator_key(operator_key)):
        raise ConfigError(f"operator_key is {shown(operator_key)}: must be an operator's public key, 64 hex digits")
    operator = read_operator_key(files.operator_key) if operator_key is None else operator_key
    try:
        job = read_job(folder, operator)
    except DpcflError as error:
        return [Check("job signed by the operator, experiment matches its hash", False, str(error))]
    checks = [Check("job signed by the operator, experiment matches its hash", True, f"job {digest(job.protocol)[:16]}")]
    checks.append(_configuration(files.config, job))
    ledgers, charged = _ledgers(folder, job)
    checks += ledgers
    checks.append(_conditions(job))
    epsilon, spent = _epsilon(job, charged)
    checks += [epsilon, _statement(folder, job, spent)]
    checks += _messages(folder, job, charged)
    return checks


def _configuration(path: Path, job: Job) -> Check:
    """Check that config.yaml, from which reports and comparisons take settings, is what was run."""
    what = "config.yaml is the configuration of the signed job"
    if unknown := _not_comparable(path, job):
        return Check(what, None, f"not checked: {unknown}")
    try:
        changed = changed_settings(read_kept(path), job)
    except ConfigError as error:
        changed = error.problems
    return Check(what, not changed, changed[0] if changed else "every setting that the job holds is equal")


def _not_comparable(path: Path, job: Job) -> str:
    """Say why a file cannot be compared with the job; empty if it can."""
    if not path.exists():
        return f"there is no {path.name}"
    return "" if job.protocol.format == FORMAT else f"the job has format {job.protocol.format}"


def _ledgers(folder: Path, job: Job) -> tuple[list[Check], dict[int, list[Any]]]:
    """Check chains, counters and plan of all ledgers; a trusted server has one, and clients that got no task may have none."""
    own, adjacency = digest(job.protocol), job.protocol.privacy.adjacency
    trusted = job.protocol.privacy.central
    problems: list[str] = []
    over: list[str] = []
    absent: dict[int, Path] = {}
    charged: dict[int, list[Any]] = {}
    for owner, where, plan_of, noise in _owners(folder, job):
        if not where.exists():
            if not trusted or owner == SERVER_ID:
                absent[owner] = where
            continue
        if is_in_use(where):  # as by a worker that was started manually
            raise ConfigError(f"{where}: a process holds the ledger of {_name(owner)}: verify after it has ended")
        try:
            lines = read_ledger(where)
        except DpcflError as error:
            problems.append(f"{_name(owner)}: {error}")
            continue
        if (named := lines[0].owner) != _header(owner, job):
            whose = ", ".join(f"{key} {value}" for key, value in sorted(named.items()))
            problems.append(f"{_name(owner)}: the ledger in {where} belongs to {whose}")
            continue
        charged[owner], plan = [line for line in lines if line.job == own and line.events], plan_of()
        over += _beyond_plan(owner, charged[owner], plan, {slot.name: slot.event(noise, adjacency) for slot in plan})
    count = sum(map(len, charged.values()))
    without = _without_ledger(folder, job, absent) if absent else Check(_WHOLE, True, "")
    if problems or without.holds is not True:
        whole = Check(_WHOLE, False, problems[0]) if problems else without
    else:
        whole = Check(_WHOLE, True, f"{len(charged)} ledgers, {count} charges{without.detail}")
    return [
        whole,
        Check("ledgers hold nothing beyond the plan", not over, over[0] if over else "every charge is a planned slot"),
    ], charged


def _without_ledger(folder: Path, job: Job, absent: Mapping[int, Path]) -> Check:
    """Check that the owners without a ledger are clients that got no task; unknown if no record of tasks is left."""
    first = min(absent)
    missing = f"{_name(first)}: no ledger in {absent[first]}"
    before = _if_before_the_first_round(folder)
    if SERVER_ID in absent or _starts_every_client(folder, job):
        return Check(_WHOLE, False, f"{missing}: it never started, its ledger is on another machine, or was removed{before}")
    asked = asked_clients(folder)
    if asked is None:
        unknown = f"{missing}, and neither the transcript nor messages.jsonl tells whether it got a task{before}"
        return Check(_WHOLE, False if before else None, unknown)
    if lost := sorted(asked & absent.keys()):
        gone = f"it got a task, so that its ledger is on another machine, or was removed{before}"
        return Check(_WHOLE, False, f"{_name(lost[0])}: no ledger in {absent[lost[0]]}: {gone}")
    return Check(_WHOLE, True, f"; clients without a ledger, which got no task: {len(absent)}")


def _starts_every_client(folder: Path, job: Job) -> bool:
    """True if each client of the job opens its ledger before the first round, as in one process and below aggregators."""
    if job.protocol.aggregators:
        return True
    try:
        return bool(summary.run_settings(folder).get("runtime", {}).get("federation") == "in-process")
    except ConfigError:
        return True


def _owners(folder: Path, job: Job) -> Iterator[tuple[int, Path, Callable[[], list[Slot]], float | None]]:
    """Owner, folder, plan and noise multiplier of each ledger that the job may have."""
    algorithm, protocol, files = job.algorithm, job.protocol, RunFolder(folder)
    for entry in protocol.roster:
        yield entry.id, files.ledger(client_key(entry.id)), partial(algorithm.plan, entry), entry.noise_multiplier
    if protocol.privacy.central:
        plan = partial(for_clients, algorithm.central_plan(), protocol.clients)
        yield SERVER_ID, files.ledger(CENTRAL_SERVER), plan, protocol.curator_noise_multiplier


def _header(owner: int, job: Job) -> dict[str, Any]:
    """Owner in the first line of a ledger of the job."""
    whose = {"role": CENTRAL_SERVER} if owner == SERVER_ID else {"client": owner}
    return {"run": job.protocol.run, "job": digest(job.protocol), **whose}


def _beyond_plan(owner: int, lines: list[Any], plan: list[Slot], events: dict[str, Event]) -> list[str]:
    """Charges of one ledger that its plan does not hold."""
    spent, quota = Counter(name for line in lines for name in line.slots), Counter(slot.name for slot in plan)
    over = [f"{_name(owner)}: {name} charged {n} times, planned {quota[name]}" for name, n in spent.items() if n > quota[name]]
    for line in lines:
        over += [
            f"{_name(owner)} line {line.sequence}: {name} is not the plan's event"
            for name, event in zip(line.slots, line.events, strict=True)
            if events.get(name) != event
        ]
    return over


def _name(owner: int) -> str:
    return "the trusted server" if owner == SERVER_ID else f"client {owner}"


def _conditions(job: Job) -> Check:
    """Check what each worker checked before it served the job."""
    what = "the signed job meets the conditions of its epsilon"
    try:
        problem = unmet_condition(job.algorithm)
    except DpcflError as error:
        problem = str(error)
    return Check(what, problem is None, problem or "sampling, adjacency, client state and declared releases")


def _epsilon(job: Job, charged: dict[int, list[Any]]) -> tuple[Check, float]:
    """Recompute epsilon from the ledgers, for an unprotected run that of the noisy part.

    Returns:
        The check, and the largest epsilon that a client has spent: inf for a job without a guarantee, and where unprotected events were
        charged.
    """
    from dpcfl_net.privacy.accounting.accountant import epsilon

    privacy, delta = job.protocol.privacy, job.protocol.accounted_delta
    paid = {client: [event for line in lines for event in line.events] for client, lines in charged.items()}
    if privacy.central:  # clients send raw updates; the server's ledger holds what it published
        published = charged.get(SERVER_ID, [])
        clients = job.protocol.clients if job.algorithm.capabilities.participations else [0]
        paid = {c: [event for _, events in charges_to(published, job, c) for event in events] for c in clients}
    reasons = {event.unprotected for events in paid.values() for event in events if event.unprotected}
    known: dict[tuple[Event, ...], float] = {}
    within = reasons <= set(job.protocol.unprotected)
    for client, spent in paid.items():
        events = tuple(merge(Counter(event for event in spent if not event.unprotected)))
        if events not in known:
            known[events] = epsilon(list(events), delta, adjacency=privacy.adjacency, accountant=privacy.accountant)
        within = within and known[events] <= job.protocol.epsilon_of(job.protocol.client(client))
    planned = [0.0]
    for plan, z, target in noisy_plans(job.algorithm):
        if z is not None:
            events = tuple(plan_events(protected(list(plan)), z, privacy.adjacency))
            planned.append(epsilon(list(events), delta, privacy.adjacency, privacy.accountant))
            within = within and planned[-1] <= target
    most, target = max(known.values(), default=0.0), job.protocol.epsilon
    spent_at_most = math.inf if reasons or job.protocol.unprotected else most
    charged_in_all, plan_in_all = at_most(most, 6), at_most(max(planned), 6)
    detail = f"charged {charged_in_all}, whole plan {plan_in_all}, target {target:g} at delta {privacy.delta:g}"
    if job.protocol.unprotected:
        what = "no finite epsilon, as the signed job says; that of the noisy updates alone is within the target"
        return Check(what, within, f"{detail}; {'; '.join(job.protocol.unprotected)}"), spent_at_most
    return Check("epsilon recomputed from ledgers and plan is within the target", within, detail), spent_at_most


def _statement(folder: Path, job: Job, spent: float) -> Check:
    """Check that run.json, from which pages, exports and comparisons take the privacy statement, promises what the job does.

    Its sentences are not compared: those of other versions have other words.

    Args:
        folder: Run folder.
        job: The signed job.
        spent: Largest epsilon of a client by the ledgers; may be inf.
    """
    what = "run.json states the promise of the signed job"
    path = RunFolder(folder).run
    if unknown := _not_comparable(path, job):
        return Check(what, None, f"not checked: {unknown}")
    try:
        document = summary.read_document(folder)
    except ConfigError as error:
        return Check(what, False, error.problems[0])
    stated, signed = (_promise(part) for part in (mapping(document, "privacy"), privacy_statement(job.protocol, None)))
    for key, value in signed.items():
        if stated[key] != value:
            return Check(what, False, f"{key}: {word(stated[key])} here, {word(value)} by the job")
    least = {"epsilon_replace_one": replace_one_epsilon(job.protocol)}
    if document.get("state") == "finished":  # until then clients may charge more
        least["epsilon_spent"] = number(spent)
    for key, value in least.items():
        said = number(mapping(document, "privacy").get(key))
        if said is not None and (value is None or said < value * (1 - _SAME)):
            return Check(what, False, f"{key}: {word(said)} here, {word(value)} by job and ledgers")
    return Check(what, True, "unit, adjacency, trust, epsilon, delta, noise and scope are equal")


def _promise(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a privacy statement that follow from the signed job alone, and are no sentences; None for a missing one."""
    sums = mapping(privacy, "secure_sums")
    # An earlier version did not write these two, and they are then read as False.
    said = {"validation_records": protects_validation(privacy), "secure_sums.single_releases": has_single_releases(privacy)}
    return {key: privacy.get(key) for key in _PROMISE} | {f"secure_sums.{key}": sums.get(key) for key in _SUMS} | said


def _messages(folder: Path, job: Job, charged: dict[int, list[Any]]) -> list[Check]:
    """Check the chain of the transcript, and its messages against the ledgers."""
    path = RunFolder(folder).transcript
    if not path.exists():
        missing = f"there is no {path.name}{_if_before_the_first_round(folder)}"
        return [Check("transcript: hash chain whole", None if _writes_no_transcript(folder) else False, missing)]
    try:
        reader = transcript.read(path)
        records = list(reader)
    except DpcflError as error:
        return [Check("transcript: hash chain whole", False, str(error))]
    cut = " (the last record is truncated)" if reader.cut else ""
    whole = Check("transcript: hash chain whole", True, f"{len(records)} records{cut}")
    if job.protocol.format != FORMAT:
        why = f"the job has format {job.protocol.format}, whose payload hashes are SHA-256: verify with the version that ran it"
        return [whole, Check("messages: debited, charged for the models shown, and as answered", None, f"not checked: {why}")]
    own = {client: lines for client, lines in charged.items() if client != SERVER_ID}
    return [whole, _debited(records, own), *_models(folder, job, records, own), *_contents(folder, records, charged)]


def _writes_no_transcript(folder: Path) -> bool:
    """True if config.yaml turns the transcript off; False if it is damaged or missing, which other checks report."""
    try:
        return bool(summary.run_settings(folder)["output"]["transcript"] == "off")
    except ConfigError:
        return False


def _debited(records: list[transcript.Record], charged: dict[int, list[Any]]) -> Check:
    """Check that every release received was debited first."""
    paid = {(client, line.round, line.kind) for client, lines in charged.items() for line in lines}
    unpaid, released = [], set()
    for record in records:
        client = record.client
        if record.direction != "up" or client is None:
            continue
        header = decode(record.header)
        if header.kind == "RESULT" and header.code == "release":
            released.add((client, header.round, header.task))
            if (client, header.round, header.task) not in paid:
                unpaid.append(f"client {client} released {header.task} in round {header.round} without a debit")
    silent = f"; {counted(len(paid - released), 'debit')} without a release received" if paid - released else ""
    detail = unpaid[0] if unpaid else f"{counted(len(released), 'release')}, each debited{silent}"
    return Check("messages: every release was debited first", not unpaid, detail)


def _models(folder: Path, job: Job, records: list[transcript.Record], charged: dict[int, list[Any]]) -> list[Check]:
    """Check that clients were charged for the models that they were given, which clients of one cluster share."""
    shown = given(records)
    debits = {client: [line for line in lines if line.type == "debit"] for client, lines in charged.items()}
    foreign = other_than_charged(shown, job.protocol, debits)
    clusters = RunFolder(folder).clusters
    split, unknown = split_models(shown, job.protocol, clusters), rounds_not_compared(shown, job.protocol, clusters)
    return [
        Check(
            "messages: clients were charged for the models that the transcript shows",
            not foreign,
            foreign[0] if foreign else f"{sum(map(len, debits.values()))} ids of debits are those of tasks",
        ),
        Check("models: clients of one cluster were given the same", *_same_models(shown, split, unknown)),
    ]


def _same_models(shown: Given, split: list[str], unknown: list[int]) -> tuple[bool | None, str]:
    """Result and detail of the comparison of models; no result if tasks could not be compared, for want of assignments or bytes."""
    if split:
        return False, split[0]
    if unknown:
        lacking = ", ".join(spans(unknown))
        return (
            None,
            f"not checked in rounds {lacking}, of which clusters.jsonl lacks the assignments: each has as many models as the job",
        )
    compared, without = len(shown.models()), shown.without_bytes
    detail = f"{compared} tasks compared"
    if without:
        detail += (
            f"; of {without} masked steps the transcript keeps no bytes to compare (output.transcript full), and masks of "
            "different models do not cancel"
        )
    return (True if compared or not without else None), detail


def _if_before_the_first_round(folder: Path) -> str:
    """Advice for a run without a checkpoint, most of which is not there yet."""
    return (
        ""
        if any(RunFolder(folder).checkpoints.glob("round_*"))
        else "; no round has a checkpoint: resume the run, then verify it"
    )


def _contents(folder: Path, records: list[transcript.Record], charged: dict[int, list[Any]]) -> list[Check]:
    """Compare kept bytes with their hashes, and releases with the clients' answers, where the folder has them."""
    checks = []
    if any(record.payload is not None for record in records):
        refused, changed = other_than_announced(records)
        detail = changed[0] if changed else "the transcript keeps all bytes"
        if refused and not changed:
            detail += f"; messages that arrived damaged and were not accepted: {refused}"
        checks.append(Check("messages: kept bytes have the hashes in their headers", not changed, detail))
    folders = {c: ledger_folder(folder, c) for c in charged if c != SERVER_ID}
    compared, releases, other = other_than_answered(records, charged, folders)
    what = "messages: releases are those that the clients answered"
    if compared or other:
        detail = other[0] if other else f"{compared} releases compared with the answers that clients keep of their last rounds"
        checks.append(Check(what, not other, detail))
    elif folders and not any((kept / JOURNAL).exists() for kept in folders.values()):
        checks.append(
            Check(what, None, "not checked: the ledgers here are copies, and the answers are on the hosts of the clients")
        )
    elif folders and releases:  # each ledger keeps those of its last rounds
        checks.append(Check(what, None, "not checked: the ledgers here lack the answers, which were removed"))
    return checks
