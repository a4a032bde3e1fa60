"""`dpcfl audit`: lower bound on epsilon from one recorded run with canaries, and a test of the run's claim."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from dpcfl_net.attacks.audit.bounds import TradeOff
from dpcfl_net.attacks.audit.gather import MAX_DISCREPANCY, Gatherer
from dpcfl_net.attacks.audit.judgement import ALPHA, judge
from dpcfl_net.attacks.audit.page import page
from dpcfl_net.attacks.audit.record import Record
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
    record = Record(folder)
    gatherer = Gatherer(record)
    if not gatherer.scores:
        raise ConfigError(f"{folder} holds no training of an audited client yet")
    plans = {repr(events): events for events in map(record.events, record.audit.clients)}
    nominal, delta = TradeOff.of(list(plans.values())), record.protocol.privacy.delta
    bounds = judge(gatherer.scores, nominal, record.epsilon, delta, false_alarm)
    broken = [f"{test} ({each.view}, {each.kind})" for each in bounds for test in each.broken]
    if gatherer.discrepancy > MAX_DISCREPANCY + gatherer.rounding:
        broken.append(f"releases are not the sums of the taped steps: off by {gatherer.discrepancy:.3g} clip norms")
    facts = {
        "claimed": record.epsilon, "delta": delta, "broken": broken, "false_alarm": false_alarm,
        "canaries": record.audit.canaries, "clients": record.audit.clients, "discrepancy": gatherer.discrepancy,
        "rounding": gatherer.rounding,
        "bounds": [asdict(each) for each in bounds],
    }  # fmt: skip
    return page(record, bounds, nominal, gatherer.notes, facts, ALPHA)
