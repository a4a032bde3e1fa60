"""Result page of an audit: sentences, a table, and measured errors against the claimed trade-off curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpcfl_net.attacks.audit.bounds import SHARES, TAIL, TradeOff
from dpcfl_net.attacks.audit.clients import ClientRecord
from dpcfl_net.attacks.audit.gather import EVERY_STEP, LIKELIHOOD
from dpcfl_net.attacks.audit.judgement import Bounds
from dpcfl_net.attacks.audit.record import Record
from dpcfl_net.report import figures
from dpcfl_net.results.attack_results import AUDIT, AttackResult

COLUMNS = ["view", "score", "in, missed", "out, accused", "(a) guesses", "(b) mu-GDP", "(c) tail", "noise/stated", "the claim"]


def page(
    record: Record | ClientRecord, bounds: Sequence[Bounds], nominal: TradeOff, notes: Sequence[str], facts: dict[str, Any],
    alpha: float,
) -> AttackResult:  # fmt: skip
    """Assemble the result of an audit.

    Args:
        record: The audited run.
        bounds: Bounds of each score.
        nominal: Trade-off curve of the charges in the ledgers.
        notes: Additional sentences.
        facts: Machine-readable facts.
        alpha: 1 - confidence of each bound.
    """
    return AttackResult(
        name=AUDIT,
        title="Audit: a lower bound on epsilon",
        headline=_headline(bounds, facts, alpha),
        sentences=[*_sentences(record, facts, alpha), *notes],
        columns=COLUMNS,
        rows=[_row(each) for each in bounds],
        figure=_figure(bounds, nominal, facts["false_alarm"] / sum(each.tests for each in bounds)),
        caption="Line: errors that the claim allows for any test on one record. Points: tests of this audit; a point below "
        "the line breaks the claim. Points are upper limits at the level of the tests.",
        facts=facts,
        keys=2,
    )


def _headline(bounds: Sequence[Bounds], facts: dict[str, Any], alpha: float) -> str:
    claim = f"epsilon {facts['claimed']:g} at delta {facts['delta']:g}"
    if facts["broken"]:
        return f"THE CLAIM DOES NOT HOLD ({claim}): {'; '.join(facts['broken'])}"
    measured = " and ".join(
        f"{each.gdp:.2f} in {'the view of every step' if each.view == EVERY_STEP else each.view}"
        for each in bounds
        if each.kind == LIKELIHOOD
    )
    return f"The claim stands: {claim}; measured at least {measured} ({1 - alpha:.0%}, mu-GDP)"


def _sentences(record: Record | ClientRecord, facts: dict[str, Any], alpha: float) -> list[str]:
    return [
        record.subject,
        "The included canaries were drawn before the run. The signed protocol fixes them by the hash of the experiment "
        f"part, {record.protocol.experiment_hash[:16]}, which still matches.",
        f"Each single bound holds with {1 - alpha:.0%} confidence. (a) the {SHARES[0]:.0%} to {SHARES[-1]:.0%} surest "
        "guesses: no assumption on noise or independence. (b) the Gaussian curve through the errors of the test 'score above 0', "
        f"fixed in advance: assumes isotropic noise. (c) canaries whose sum over the run lies where Gaussian noise alone has probability {TAIL:g}.",
        "The claim is tested by (a), by (c), by those errors against the trade-off curve of the charges in the ledgers, and by the "
        f"noise on the canaries that are out. A sound run fails any of these tests with probability at most {facts['false_alarm']:g}.",
        *record.remarks,
    ]  # fmt: skip


def _row(bounds: Bounds) -> list[str]:
    errors = bounds.errors
    return [
        bounds.view, bounds.kind, f"{errors.false_negatives}/{errors.ins}", f"{errors.false_positives}/{errors.outs}",
        f"{bounds.guesses:.2f}", f"{bounds.gdp:.2f}", "" if bounds.tail is None else f"{bounds.tail:.2f}",
        "" if bounds.noise is None else f"{bounds.noise:.4f}",
        f"BROKEN: {', '.join(bounds.broken)}" if bounds.broken else "stands",
    ]  # fmt: skip


def _figure(bounds: Sequence[Bounds], nominal: TradeOff, level: float) -> dict[str, Any]:
    rates = np.linspace(0, 1, 201)
    claimed = {
        "type": "scatter", "mode": "lines", "name": "claimed", "x": rates.tolist(), "y": nominal.min_false_negatives(rates).tolist(),
        "line": {"color": "@ink", "width": 2},
    }  # fmt: skip
    points = []
    for index, each in enumerate(bounds):
        x, y = each.errors.at_most(level)
        points.append({
            "type": "scatter", "mode": "markers", "name": f"{each.view}: {each.kind}", "x": [x], "y": [y],
            "marker": {"color": figures.colour(index), "symbol": figures.SYMBOLS[index % len(figures.SYMBOLS)], "size": 11},
        })  # fmt: skip
    return figures.spec(
        [claimed, *points],
        xaxis=figures.axis("excluded canaries classified as included", range=[0, 1]),
        yaxis=figures.axis("included canaries classified as excluded", range=[0, 1]),
    )
