"""`dpcfl audit`: lower bound on epsilon from one recorded run with canaries, and a test of the run's claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpcfl_net.attacks.audit.bounds import TradeOff
from dpcfl_net.attacks.audit.clients import ClientRecord
from dpcfl_net.attacks.audit.gather import Scores, agree, gathered
from dpcfl_net.attacks.audit.judgement import ALPHA, judge
from dpcfl_net.attacks.audit.page import page
from dpcfl_net.attacks.audit.record import Record, audited_job
from dpcfl_net.attacks.audit.secure_clients import SecureClientRecord
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.results.attack_results import AttackResult

FALSE_ALARM = 1e-3  # maximum probability that a sound run fails any test


def audit_run(folder: Path, false_alarm: float = FALSE_ALARM) -> AttackResult:
    """Audit a recorded run.

    Args:
        folder: Run folder.
        false_alarm: Maximum probability that a sound run fails any test.

    Returns:
        The result; `facts["broken"]` names every test that the claim fails.

    Raises:
        ConfigError: If the run has no canaries, or no audited client was trained yet.
        Refused: If the job or the canaries are not those that were signed.
        LedgerError: If a ledger is broken.
    """
    job = audited_job(folder)
    if job.protocol.privacy.unit == "client":
        clients = SecureClientRecord(folder, job) if job.protocol.privacy.secure else ClientRecord(folder, job)
        if not clients.scores:
            raise ConfigError(f"{folder} holds no sum over its clients yet")
        return _judged(clients, clients.scores, clients.claim, [], {}, false_alarm)
    record = Record(folder, job)
    gatherer = gathered(record)
    if not gatherer.scores:
        raise ConfigError(f"{folder} holds no training of an audited client yet")
    plans = {repr(events): events for events in map(record.events, record.audit.clients)}
    measured = {"discrepancy": gatherer.discrepancy, "rounding": gatherer.rounding}
    return _judged(record, gatherer.scores, TradeOff.of(list(plans.values())), gatherer.notes, measured, false_alarm)


def _judged(
    record: Record | ClientRecord, scores: Sequence[Scores], claim: TradeOff, notes: Sequence[str], measured: dict[str, float],
    false_alarm: float,
) -> AttackResult:  # fmt: skip
    """Test a claim by the scores of its canaries; `measured` are facts on the agreement of both views, if there are two."""
    delta = record.protocol.privacy.delta
    bounds = judge(scores, claim, record.epsilon, delta, false_alarm)
    broken = [f"{test} ({each.view}, {each.kind})" for each in bounds for test in each.broken]
    if measured and not agree(**measured):
        broken.append(f"releases are not the sums of the taped steps: off by {measured['discrepancy']:.3g} clip norms")
    facts: dict[str, Any] = {
        "claimed": record.epsilon, "delta": delta, "broken": broken, "false_alarm": false_alarm,
        "canaries": record.audit.canaries, "clients": record.audit.clients, **measured, "bounds": [asdict(each) for each in bounds],
    }  # fmt: skip
    return page(record, bounds, claim, notes, facts, ALPHA)
