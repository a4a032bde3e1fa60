"""Result of membership inference as sentences, a table and a ROC curve."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from dpcfl_net.attacks.membership_scores import ALARM, Curve, Scored, above_limit, auc, least_clients, most_true_positives
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.claim import SEEDED
from dpcfl_net.report.figures import axis, colour, spec
from dpcfl_net.results.attack_results import AttackResult
from dpcfl_net.results.number_format import at_most

NAME = "membership"
MOST_CLIENTS = 10**6  # whose number a sentence names
FEW = 8  # clients below which intervals cover clearly less than 95 %
MEASURES = {
    "cosine": "the cosine similarity between a record's gradient and the update",
    "loss": "the negative loss of a record after the update",
}
CAPTION = (
    "ROC curve over all attacked clients. Limit: no test of one record can lie above it under the run's epsilon for replace-one "
    "(Kairouz, Oh, Viswanath 2015)."
)


def page(protocol: Protocol, found: Curve, scored: list[Scored], rounds: int, epsilon: float, measure: str) -> AttackResult:
    """Summarise the attack.

    Args:
        protocol: Protocol of the run.
        found: AUC and rates.
        scored: Scores of each attacked client.
        rounds: Number of rounds with scores.
        epsilon: Largest replace-one epsilon of the attacked clients against the server; inf for raw updates.
        measure: Key of MEASURES.
    """
    delta = protocol.privacy.delta
    limits = [most_true_positives(rate.false, epsilon, delta) for rate in found.rates]
    above, needed = above_limit(scored, epsilon, delta), least_clients(scored, epsilon, delta)
    rows = [
        [f"{rate.asked:g}", f"{rate.false:.4f}", f"{rate.true:.3f}", f"{rate.low:.3f} to {rate.high:.3f}", f"{limit:.3f}"]
        for rate, limit in zip(found.rates, limits, strict=True)
    ]
    own = [auc(each.members, each.others) for each in scored]
    return AttackResult(
        name=NAME,
        title="Membership: which records a client trained on",
        headline=f"{protocol.name}: AUC {found.auc:.3f} ({found.low:.3f} to {found.high:.3f}), 0.5 by chance, over "
        f"{_counted(scored)} of {len(scored)} clients and {rounds} rounds.",
        sentences=_sentences(protocol, epsilon, measure, above, len(scored), needed),
        columns=["false positive rate, at most", "measured", "true positive rate", "95 % interval", "limit of epsilon"],
        rows=rows,
        figure=_figure(found, epsilon, delta),
        caption=CAPTION,
        facts={
            "run": protocol.name, "algorithm": protocol.algorithm, "measure": measure, "rounds": rounds, "auc": found.auc,
            "auc_low": found.low, "auc_high": found.high,
            "epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta,
            "rates": [{**asdict(rate), "limit": limit} for rate, limit in zip(found.rates, limits, strict=True)],
            "above_limit": above, "clients": {each.client: value for each, value in zip(scored, own, strict=True)},
            "members": sum(len(each.members) for each in scored), "others": sum(len(each.others) for each in scored),
        },
    )  # fmt: skip


def _counted(scored: list[Scored]) -> str:
    return f"{sum(len(each.members) for each in scored)} members and {sum(len(each.others) for each in scored)} non-members"


def _sentences(protocol: Protocol, epsilon: float, measure: str, above: list[float], clients: int, needed: float) -> list[str]:
    sentences = [
        f"Per round and record the server computes {MEASURES[measure]}. The same measure with the updates of the other clients "
        "shows its distribution for non-members; log-likelihood ratios are added over rounds (FedMIA, Zhu et al. 2025).",
        "Members are training records of a client, non-members test records with its transformation. Only the experimenter knows "
        "which is which, and only to score the result.",
        "Intervals resample whole clients, since the scores of one client's records share its noise."
        + (
            f" Those of {clients} clients are too narrow: in a simulation those of 4 held the true value in 88 % of cases."
            if clients < FEW
            else ""
        ),
    ]
    if math.isinf(epsilon):
        reason = " (privacy.trust: trusted-server)" if protocol.privacy.central else ""
        return [*sentences, f"The server receives updates without a guarantee against it{reason}: every rate is possible."]
    secret = ", if the noise were secret" if SEEDED in protocol.unprotected else ""
    sentences.append(
        f"A client without the record holds another in its place, so the limit is that of replace-one: epsilon {at_most(epsilon, 3)} at delta "
        f"{protocol.privacy.delta:g}{secret}. A result below it is no proof of it: dpcfl audit measures a lower bound with canaries."
    )
    if above:
        sentences.append(
            f"ABOVE THE LIMIT at false positive rates {', '.join(map(str, above))}, which has a chance of at most {ALARM:g} if the claim "
            "holds: check the run with dpcfl audit."
        )
    elif clients < needed:
        count = (
            f"{needed:,} clients are needed, and more for an attack that makes errors"
            if needed <= MOST_CLIENTS
            else f"more than {MOST_CLIENTS:,} clients would be needed"
        )
        sentences.append(
            f"No result of {clients} clients is reported as above the limit: it would be chance too often, since the records of a client may "
            f"share all of its noise. At this epsilon {count}."
        )
    return sentences


def _figure(found: Curve, epsilon: float, delta: float) -> dict[str, Any]:
    line = np.linspace(0, 1, 101)
    limit = [most_true_positives(float(x), epsilon, delta) for x in line]
    traces = [
        _trace("attack", list(found.false), list(found.true), {"color": colour(0), "width": 2}),
        _trace("chance", [0.0, 1.0], [0.0, 1.0], {"color": "@ink", "width": 1}),
    ]
    if math.isfinite(epsilon):
        traces.append(
            _trace(f"limit of epsilon {at_most(epsilon, 3)}", line.tolist(), limit, {"color": colour(1), "dash": "dash"})
        )
    layout = {
        "xaxis": axis("false positive rate", range=[0, 1.02]),
        "yaxis": axis("true positive rate", range=[0, 1.02]),
    }
    return spec(traces, 360, **layout)


def _trace(name: str, x: list[float], y: list[float], line: dict[str, Any]) -> dict[str, Any]:
    shown = f"{name}, false %{{x:.3f}}: true %{{y:.3f}}<extra></extra>"
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "hovertemplate": shown}
