"""Epsilon that clients have spent, from the charges in their ledgers: by round, and as lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.frozen import digest, once
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signed_settings import PrivacyTarget
from dpcfl_net.core.types import Adjacency
from dpcfl_net.data import cache
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.central_dp import CENTRAL_SERVER
from dpcfl_net.federation.claim import noisy_plans
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.chain import LINES, read_ledger
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.ledger.journal import JOURNAL
from dpcfl_net.privacy.slots import for_clients, names_for
from dpcfl_net.results.asked_clients import last_tasks
from dpcfl_net.results.run_files import finished_rounds
from dpcfl_net.transport.keys import client_key

Charges = tuple[Event, ...]  # of a client in a round
MOST_VALUES = 1000  # epsilons of a run, one for each plan and round, some 10 ms each; of more, only those of every k-th round


def charges(ledger: Path, protocol: Protocol) -> list[Entry]:
    """Read the lines of a ledger that charge a job.

    Args:
        ledger: Folder of the ledger.
        protocol: Protocol of the job.

    Raises:
        LedgerError: If the ledger is broken.
    """
    own = digest(protocol)
    return [line for line in read_ledger(ledger) if line.job == own and line.events]


def charges_to(entries: Iterable[Entry], job: Job, client: int) -> list[tuple[int, list[Event]]]:
    """List the charges of a job to a client; those of a trusted server to all clients, and to this client alone.

    Args:
        entries: Lines of the ledger that is charged for the client.
        job: The job.
        client: Client id.

    Returns:
        (round, events) in order.
    """
    own = digest(job.protocol)
    lines = [(entry.round, list(zip(entry.slots, entry.events, strict=True))) for entry in entries if entry.job == own]
    if job.algorithm.capabilities.participations:
        names = names_for(job.algorithm.central_plan(), client)
        lines = [(t, [pair for pair in pairs if pair[0] in names]) for t, pairs in lines]
    return [(t, [event for _, event in pairs]) for t, pairs in lines if pairs]


def events_under(entries: Iterable[Entry], job: Job, client: int, adjacency: Adjacency) -> list[Event]:
    """List what the slots that a client was charged for cost under an adjacency, which need not be that of the job.

    Args:
        entries: As for `charges_to`.
        job: The job.
        client: Client id.
        adjacency: "zero-out" or "replace-one".

    Returns:
        Events in order.
    """
    entry, own = job.protocol.client(client), digest(job.protocol)
    plan, noise = job.algorithm.plan(entry), entry.noise_multiplier
    if job.protocol.privacy.central:
        plan, noise = for_clients(job.algorithm.central_plan(), [client]), job.protocol.curator_noise_multiplier
    slots = {slot.name: slot for slot in plan}  # a ledger of participations also holds those of other clients
    names = [name for line in entries if line.job == own for name in line.slots if name in slots]
    return [slots[name].event(noise, adjacency) for name in names]


def paying_ledgers(folder: Path, job: Job) -> list[Path]:
    """Return the ledger folder of `paying_ledger` of each client, in client order."""
    files, roster = RunFolder(folder), job.protocol.roster
    if job.protocol.privacy.central:
        return [files.ledger(CENTRAL_SERVER)] * len(roster)
    return [files.ledger(client_key(entry.id)) for entry in roster]


def paying_ledger(folder: Path, job: Job, client: int) -> Path:
    """Return the ledger folder with a client's epsilon: its own, or the trusted server's."""
    if job.protocol.privacy.central:
        return RunFolder(folder).ledger(CENTRAL_SERVER)
    return ledger_folder(folder, client)


def ledger_folder(folder: Path, client: int) -> Path:
    """Return the folder of a client's ledger of this run."""
    return RunFolder(folder).ledger(client_key(client))


def epsilon_curves(folder: Path, job: Job) -> list[list[float]]:
    """Compute each client's epsilon after each charged round.

    Returns:
        One list per client in client order: inf for a job without a guarantee and for a damaged ledger, empty without a ledger,
        NaN for rounds that are left out (`rounds_between`), never for the last one.
    """
    separate = job.algorithm.capabilities.participations > 0  # one ledger with separate charges to each client
    payers = zip(paying_ledgers(folder, job), job.protocol.roster, strict=True)
    kept = _curves_of_last_call(digest(job.protocol))
    computed, curves = _Curves(job, dict(kept)), []
    # The lines of one ledger at a time are in memory: those of all would take megabytes for each client.
    for where, entries in groupby(payers, key=lambda payer: payer[0]):
        lines, known = _whole_lines(where), {}
        for _, entry in entries:
            payer = entry.id if separate else 0
            if payer not in known:  # if damaged, the worker refuses to start, and the epsilon spent is unknown
                known[payer] = [math.inf] if lines is None else computed.after(charges_to(lines, job, entry.id))
            curves.append(known[payer])
    kept.clear()
    kept.update(computed.found)
    return curves


@lru_cache(maxsize=4)
def _curves_of_last_call(job: str) -> dict[tuple[Charges, ...], list[float]]:
    """Curves of a job by its charges, for the next call: the summary of an interrupted run asks again. One dict per job hash."""
    return {}


def _whole_lines(where: Path) -> list[Entry] | None:
    """Lines of a ledger; empty without a ledger, None if it is damaged."""
    if not (where / LINES).exists():
        return []
    try:
        return read_ledger(where)
    except LedgerError:
        return None


class _Curves:
    """Epsilon of the clients of a job after each round; clients with equal charges share one computation.

    Args:
        job: The job.
        known: Curves that are known.

    Attributes:
        found: All curves that were asked for, by charges.
    """

    def __init__(self, job: Job, known: dict[tuple[Charges, ...], list[float]]) -> None:
        self._job, self._known = job, known
        self._step = rounds_between(job)
        self._charges: dict[Charges, Charges] = {}  # equal ones of all rounds and clients are one object
        self.found: dict[tuple[Charges, ...], list[float]] = {}

    def after(self, charges: list[tuple[int, list[Event]]]) -> list[float]:
        """Epsilon after each charged round, as `epsilon_curves`; of an asynchronous run with a trusted server, after each participation."""
        job, groups = self._job, dict[int, list[Event]]()
        for t, events in charges:
            groups.setdefault(t, []).extend(events)
        rounds = groups if job.algorithm.capabilities.participations else range(1, max(groups, default=0) + 1)
        each = (tuple(groups.get(t, ())) for t in rounds)
        charged = tuple(self._charges.setdefault(events, events) for events in each)
        if not charged or job.protocol.unprotected:
            return [math.inf] * len(charged)
        if charged not in self.found:
            self.found[charged] = self._known.get(charged) or self._compute(charged)
        return list(self.found[charged])

    def _compute(self, charged: tuple[Charges, ...]) -> list[float]:
        protocol, rounds = self._job.protocol, len(charged)
        accounted = protocol.privacy.model_copy(update={"delta": protocol.accounted_delta})
        known = sorted({*range(self._step, rounds, self._step), rounds})
        periods = tuple(sum(charged[start:end], ()) for start, end in pairwise([0, *known]))
        found = (_whole_curve if rounds >= protocol.rounds else _curve)(periods, accounted)
        values = dict(zip(known, found, strict=True))
        return [values.get(t, math.nan) for t in range(1, rounds + 1)]


def rounds_between(job: Job) -> int:
    """Return k where epsilon is known after every k-th round: above 1 for jobs with many plans, as those of clients of unequal size."""
    plans = once(job.protocol, "number of plans", lambda: len(noisy_plans(job.algorithm)))
    return max(1, math.ceil(plans * job.protocol.rounds / MOST_VALUES))


def _curve(charged: tuple[Charges, ...], privacy: PrivacyTarget) -> list[float]:
    """Epsilon after each group of charges."""
    from dpcfl_net.privacy.accounting.accountant import epsilon_by_prefix

    return epsilon_by_prefix(charged, privacy.delta, privacy.adjacency, privacy.accountant)


@lru_cache(maxsize=256)
def _whole_curve(charged: tuple[Charges, ...], privacy: PrivacyTarget) -> list[float]:
    """`_curve` of a whole run, kept: runs that differ in the seed share it."""
    questions = [cost(events, privacy.delta, privacy.adjacency, privacy.accountant) for events in charged]
    found: list[float] = cached(cache.folder() / "claims", {"by_round": questions}, lambda: _curve(charged, privacy))
    return found


def write_epsilon_lines(folder: Path, job: Job) -> None:
    """Append the epsilon spent by each client to metrics.jsonl, for each round that lacks it and whose epsilon is known.

    A client without a charge in a round that the server has finished, as one that was not drawn, has spent what it had before.

    In an asynchronous run a ledger's rounds are its client's participations: the line is what is spent now, at the newest version.
    """
    metrics = RunFolder(folder).metrics
    written = max((line["round"] for line in runlog.each(metrics) if "epsilon_spent_by_client" in line), default=0)
    done = finished_rounds(folder)
    curves = epsilon_curves(folder, job)
    if job.algorithm.capabilities.asynchronous:
        rounds = range(done, done + (done > written))
    else:
        lacking = clients_that_lack_charges(folder, job, curves)
        known = [len(curve) if client in lacking else max(len(curve), done) for client, curve in enumerate(curves)]
        rounds = range(written + 1, min(known, default=0) + 1)
    with runlog.all_open(metrics) as (lines,):
        for t in rounds:
            at = None if job.algorithm.capabilities.asynchronous else t
            spent = [curve[:at][-1] if curve else 0.0 for curve in curves]
            if not any(map(math.isnan, spent)):
                lines.write({"view": "server", "round": t, "epsilon_spent_by_client": spent})


def clients_that_lack_charges(folder: Path, job: Job, curves: list[list[float]]) -> set[int]:
    """Find clients that may have charges that no ledger here has: theirs is elsewhere, or a copy that lags behind their tasks.

    Args:
        folder: Run folder.
        job: Its job.
        curves: `epsilon_curves` of both.
    """
    payers = paying_ledgers(folder, job)
    absent = {where for where in set(payers) if not (where / JOURNAL).exists()}  # one ledger may be that of all clients
    if not absent:
        return set()
    elsewhere = [
        (entry, len(curve)) for entry, where, curve in zip(job.protocol.roster, payers, curves, strict=True) if where in absent
    ]
    asked = last_tasks(folder)
    if asked:
        return {entry.id for entry, charged in elsewhere if asked.get(entry.id, 0) > charged}
    done = finished_rounds(folder)
    return {entry.id for entry, charged in elsewhere if not charged and entry.rounds_there(1, done)}
