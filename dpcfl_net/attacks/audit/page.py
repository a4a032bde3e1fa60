"""Result of an audit: sentences, a table, and measured errors against the claimed trade-off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcfl_net.attacks.audit.bounds import SHARES, TAIL, TradeOff
from dpcfl_net.attacks.audit.gather import LIKELIHOOD, SERVER
from dpcfl_net.attacks.audit.record import Record
from dpcfl_net.report import figures
from dpcfl_net.results.attack_results import AttackResult

if TYPE_CHECKING:
    from dpcfl_net.attacks.audit.audit import Bounds

COLUMNS = ["view", "score", "in, missed", "out, accused", "(a) guesses", "(b) mu-GDP", "(c) tail", "noise/stated", "the claim"]


def page(
    record: Record, found: Sequence[Bounds], nominal: TradeOff, notes: Sequence[str], facts: dict[str, Any], unsure: float
) -> AttackResult:
    """Build the result of an audit."""
    return AttackResult(
        name="audit",
        title="Audit: epsilon from below",
        headline=_headline(found, facts, unsure),
        sentences=[*_sentences(record, facts, unsure), *notes],
        columns=COLUMNS,
        rows=[_row(bounds) for bounds in found],
        figure=_figure(found, nominal, unsure),
        caption="What the claim allows any test on one record, and what the tests of this audit did: a point below the line breaks "
        f"the claim. Points are upper limits ({1 - unsure:.0%}).",
        facts=facts,
    )


def _headline(found: Sequence[Bounds], facts: dict[str, Any], unsure: float) -> str:
    claim = f"epsilon {facts['claimed']:g} at delta {facts['delta']:g}"
    if facts["broken"]:
        return f"THE CLAIM DOES NOT HOLD ({claim}): {'; '.join(facts['broken'])}"
    plain = [bounds for bounds in found if bounds.kind == LIKELIHOOD]
    said = " and ".join(f"{bounds.gdp:.2f} in {_named(bounds.view)}" for bounds in plain)
    return f"The claim stands: {claim}; measured at least {said} ({1 - unsure:.0%}, mu-GDP)"


def _named(view: str) -> str:
    return view if view == SERVER else "the view of every step"


def _sentences(record: Record, facts: dict[str, Any], unsure: float) -> list[str]:
    clients, protocol = record.audit.clients, record.protocol
    who = f"client {clients[0]}" if len(clients) == 1 else f"{len(clients)} clients"
    slots = sorted({protocol.client(client).records for client in clients})
    ins = int(sum(record.bits(client).sum() for client in clients))
    every = record.audit.canaries * len(clients)
    return [
        f"The records of {who} were canaries, not data: {record.audit.canaries} in {' or '.join(map(str, slots))} slots each, "
        f"{ins} of {every} in, the rest and all other slots empty. What the run says of accuracy means nothing.",
        f"Which are in was drawn before the run and is sealed: the signed protocol holds the hash {protocol.experiment_hash[:16]}, "
        "which the experiment part still has.",
        f"Each bound holds with {1 - unsure:.0%} by itself. (a) the {SHARES[0]:.0%} to {SHARES[-1]:.0%} surest guesses, with no assumption on "
        "noise or independence. (b) the Gaussian curve through the errors of the test 'score above 0', fixed beforehand: assumes "
        f"isotropic noise. (c) canaries whose sum over the run is where Gaussian noise alone comes with a chance of {TAIL:g}.",
        "The claim is tested by (a), by (c), by those errors against the trade-off of what the ledgers were charged, and by how much "
        f"noise the empty slots show; a sound run fails any of these tests with a chance of at most {facts['false_alarm']:g}.",
    ]  # fmt: skip


def _row(bounds: Bounds) -> list[str]:
    errors = bounds.errors
    return [
        bounds.view, bounds.kind, f"{errors.false_negatives}/{errors.ins}", f"{errors.false_positives}/{errors.outs}",
        f"{bounds.guesses:.2f}", f"{bounds.gdp:.2f}", "" if bounds.tail is None else f"{bounds.tail:.2f}",
        "" if bounds.noise is None else f"{bounds.noise:.4f}",
        f"BROKEN: {', '.join(bounds.broken)}" if bounds.broken else "stands",
    ]  # fmt: skip


def _figure(found: Sequence[Bounds], nominal: TradeOff, unsure: float) -> dict[str, Any]:
    rates = np.linspace(0, 1, 201)
    claimed = {
        "type": "scatter", "mode": "lines", "name": "claimed", "x": rates.tolist(), "y": nominal.least_negatives(rates).tolist(),
        "line": {"color": "@ink", "width": 2},
    }  # fmt: skip
    points = []
    for index, bounds in enumerate(found):
        x, y = bounds.errors.at_most(unsure)
        points.append({
            "type": "scatter", "mode": "markers", "name": f"{bounds.view}: {bounds.kind}", "x": [x], "y": [y],
            "marker": {"color": figures.colour(index), "symbol": figures.SYMBOLS[index % len(figures.SYMBOLS)], "size": 11},
        })  # fmt: skip
    return figures.spec(
        [claimed, *points],
        xaxis=figures.axis("canaries that are out and taken for in", range=[0, 1]),
        yaxis=figures.axis("canaries that are in and missed", range=[0, 1]),
    )
