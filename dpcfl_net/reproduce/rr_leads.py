"""Claims about leads of RR-Cluster in its tables 2, 3 and 5: over the same algorithm without rebalancing, and over all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from dpcfl_net.reproduce.claims import Cause, Claim, Comparison, NotTested
from dpcfl_net.reproduce.rr_accuracy import Found, Rows, System, found_in, gain, listed
from dpcfl_net.reproduce.rr_moves import idle


def leads(found: Found, setting: str, guarantee: str, pair: tuple[System, System]) -> list[Comparison]:
    """Compare two systems at every epsilon at which they have a common seed.

    Args:
        found: Accuracies of all runs.
        setting: Setting of the data.
        guarantee: Key of GUARANTEES.
        pair: The system that is expected to be worse, and the one that is expected to be better.
    """
    epsilons = sorted({key[3] for key in found if key[:2] == (setting, guarantee)})
    return [one for e in epsilons if (one := gain(found, setting, guarantee, pair, e)) is not None]


def not_acting(rows: Rows, setting: str, guarantee: str, system: System) -> NotTested | None:
    """Return why the runs of a system do not test rebalancing; None if it moved labels.

    Args:
        rows: Lines of data.csv.
        setting: Setting of the data.
        guarantee: Key of GUARANTEES.
        system: A system with rebalancing.
    """
    return idle(row for row in rows if (row["setting"], row["guarantee"], row["system"]) == (setting, guarantee, system.title))


def raised(
    place: str, rows: Rows, setting: str, guarantee: str, pair: tuple[System, System], cause: Cause | None = None
) -> list[Claim]:
    """Claim that rebalancing raises the accuracy of a system.

    Args:
        place: Begin of the claim's text.
        rows: Lines of data.csv.
        setting: Setting of the data.
        guarantee: Key of GUARANTEES.
        pair: The system without and with rebalancing.
        cause: Cause if the claim does not hold.

    Returns:
        The claim, if both systems have a common seed.
    """
    gains = leads(found_in(rows), setting, guarantee, pair)
    if not gains:
        return []
    text = f"{place}: rebalancing raises the accuracy of {pair[0].title}"
    return [Claim(text, listed(gains), not_acting(rows, setting, guarantee, pair[1]) or gains, cause, grows=True)]


def highest(place: str, found: Found, setting: str, guarantee: str, best: System, others: Sequence[System]) -> list[Claim]:
    """Claim that a system has the highest accuracy.

    Args:
        place: Begin of the claim's text.
        found: Accuracies of all runs.
        setting: Setting of the data.
        guarantee: Key of GUARANTEES.
        best: The system.
        others: All other systems.

    Returns:
        The claim, if the system has a common seed with another one.
    """
    over = [
        replace(lead, name=f"{other.title}, {lead.name}")
        for other in others
        for lead in leads(found, setting, guarantee, (other, best))
    ]
    measured = ", ".join(f"{fmean(lead.values.values()):+.1f} points over {lead.name}" for lead in over)
    return [Claim(f"{place}: {best.title} has the highest accuracy", measured, over, grows=True)] if over else []
