"""Terms of the pages, explained where they stand: on hover, on focus by keyboard, and on touch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup

TERMS = {
    "MSS": "Separation of the two closest clusters: distance of their centres over twice their standard deviation, corrected for "
    "the error of estimated centres. Larger is better; below 2 clusters blur.",
    "MPO": "Maximum pairwise overlap, 2 Q(MSS): twice the share of their clients that the two closest clusters would confuse. 0: none; "
    "1: half of them, as by chance.",
    "ARI": "Adjusted Rand index of the server's clusters against the true ones. 1: the same clusters; 0: as good as chance.",
    "Epsilon": "Bound on what a release reveals: it is at most e^epsilon times as probable with the protected data as without, "
    "but for a probability of delta. Smaller is more private.",
    "Delta": "Probability for which the bound of epsilon may fail.",
    "Accountant": "Method that composes the losses of all releases of a run.",
    "Noise multiplier": "Standard deviation of the noise over what one record, or one client, can move a sum: the clip norm, and twice the "
    "clip norm where a sample of fixed size has another client in its place.",
    "Epsilon under replace-one": "The bound if a record (or client) may be exchanged for any other, instead of being replaced by an empty one.",
    "Adjacency": "Which two data sets the promise compares.",
    "P_max": "Largest probability of a client to be drawn first.",
    "Top_mass": "Probability that the first client drawn is one of the five likeliest.",
    "Survivors": "Clients whose answers are in the last secure sum.",
    "Unverified": "Clients that may resemble no other: noise may hide a distance as large as that between the closest clusters.",
    "Worst client": "Lowest accuracy of a client.",
    "Central test set": "Accuracy on public test records that no client holds, as a mean over the clients' models.",
}
WORD = re.compile(r"\b(MSS|MPO|ARI)\b")


def explained(text: str) -> Markup:
    """Escape a text and add explanations: to the whole text if it is a term, else to the abbreviations in it."""
    from markupsafe import Markup, escape

    if text in TERMS:
        return _explained(text)
    parts = WORD.split(text)
    return Markup("").join(_explained(part) if index % 2 else escape(part) for index, part in enumerate(parts))


def _explained(term: str) -> Markup:
    from markupsafe import Markup

    return Markup('<abbr tabindex="0" title="{0}" data-title="{0}">{1}</abbr>').format(TERMS[term], term)
