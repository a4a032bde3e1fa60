"""Fits with clusters of one client, and the confidence of fits in which a client belongs to no cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpcfl_net.clustering import separation
from dpcfl_net.clustering.fitting import ENOUGH, Fitter, MixtureFit, shadow
from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.outliers import grouped, outliers, unverified

_PASSES = 3


def with_outliers(fitter: Fitter, found: MixtureFit, clusters: int | None, room: int) -> MixtureFit:
    """Move each outlier of a fit to a cluster of one, or lower the fit's confidence.

    Outliers are set aside and the others are fitted again, until the outliers no longer change. If M is chosen, that fit is taken
    if it scores at least 2; if M is given, if its clusters are tighter at the same M.

    Args:
        fitter: Fitter of all updates, with known noise.
        found: Fit without clusters of one.
        clusters: Number of clusters; None if it was chosen.
        room: Most clusters, if chosen; 0: no clusters of one.

    Returns:
        The same fit if it has no outliers; a fit in which every outlier is alone; or the same fit with its outliers marked and
        at most the score whose overlap is the share of outliers. Clients that may resemble no other are marked.
    """
    if fitter.noise is None:
        return found
    chosen = _settled(fitter, fitter.noise, found, clusters, room)
    marked, _ = outliers(fitter.points, chosen.labels, fitter.noise)
    return replace(chosen, unverified=unverified(fitter.points, chosen.labels, fitter.noise, marked))


def _settled(fitter: Fitter, noise: KnownNoise, found: MixtureFit, clusters: int | None, room: int) -> MixtureFit:
    marked, reach = outliers(fitter.points, found.labels, noise)
    if not marked.any():
        return found
    if fitter.space == "spectral" and room > 0:
        apart = _apart(fitter, noise, (marked, reach), clusters, room)
        if apart is not None and _better(fitter, apart, found, clusters):
            return _described(fitter, apart, found)
    return _described(fitter, _capped(fitter, found, marked), found)


def _apart(
    fitter: Fitter, noise: KnownNoise, first: tuple[np.ndarray, np.ndarray], clusters: int | None, room: int
) -> MixtureFit | None:
    """Fit the others until the outliers stay the same; None if there is no room for them or they keep changing."""
    n, weights = len(fitter.points), noise.weights_of(len(fitter.points))
    marked, reach = first
    aside = np.flatnonzero(marked).tolist()
    for _ in range(_PASSES):
        groups = grouped(fitter.points, aside, weights, reach)
        rest = np.setdiff1d(np.arange(n), aside)
        inner = None if clusters is None else clusters - len(groups)
        if len(rest) < 2 or room <= len(groups) or (inner is not None and not 1 <= inner <= len(rest)):
            return None
        part = fitter.part(rest).best(inner, room - len(groups))
        found = _joined(fitter, part, rest, groups)
        marked, reach = outliers(fitter.points, found.labels, noise)
        together = [row for group in groups if len(group) > 1 for row in group]
        before, aside = aside, sorted({*np.flatnonzero(marked).tolist(), *together})
        if aside == before:
            return replace(found, outliers=marked)
    return None


def _joined(fitter: Fitter, part: MixtureFit, rest: np.ndarray, groups: list[list[int]]) -> MixtureFit:
    """Add groups of outliers as further clusters to the fit of the others."""
    n, clusters = len(fitter.points), part.clusters + len(groups)
    posteriors = np.zeros((n, clusters))
    posteriors[rest, : part.clusters] = part.posteriors
    for k, group in enumerate(groups):
        posteriors[group, part.clusters + k] = 1
    labels = np.zeros(n, np.int64)
    labels[rest] = part.labels
    for k, group in enumerate(groups):
        labels[group] = part.clusters + k
    mss = separation.effective(fitter.points, labels, clusters, fitter.p, weights=fitter.weights, alone=_alone(fitter, labels))
    centres, deviations = shadow(fitter.flat, posteriors)
    return replace(
        part, clusters=clusters, labels=labels, posteriors=posteriors, mss=mss, mpo=separation.maximum_pairwise_overlap(mss),
        coordinates=fitter.flat, centres=centres, deviations=deviations,
    )  # fmt: skip


def _alone(fitter: Fitter, labels: np.ndarray) -> float:
    """Value of p s^2 for clusters of one: that of the other clusters together, at least that of the known noise."""
    known = fitter.noise.squared_norm if fitter.noise else 0.0
    free = len(labels) - len(np.unique(labels))
    return max(known, separation.within(fitter.points, labels, fitter.weights) / free) if free else known


def _better(fitter: Fitter, apart: MixtureFit, found: MixtureFit, clusters: int | None) -> bool:
    if clusters is None:
        return apart.mss >= ENOUGH
    scatter = [separation.within(fitter.points, one.labels, fitter.weights) for one in (apart, found)]
    return scatter[0] <= scatter[1] * (1 + 1e-9)  # equal if the fit had the outliers alone already, without a score


def _capped(fitter: Fitter, found: MixtureFit, marked: np.ndarray) -> MixtureFit:
    """Mark outliers. Those in clusters of others are a share of clients in a wrong cluster, which bounds score and overlap."""
    wrong = marked & (np.bincount(found.labels)[found.labels] > 1)
    if not wrong.any():
        return replace(found, outliers=marked)
    mss = min(found.mss, separation.score_of_overlap(float(wrong.mean())))
    mpo = found.mpo if fitter.space == "pca2" else separation.maximum_pairwise_overlap(mss)
    return replace(found, mss=mss, mpo=mpo, outliers=marked)


def _described(fitter: Fitter, chosen: MixtureFit, found: MixtureFit) -> MixtureFit:
    """Add the scores of the numbers of clusters that were compared; fits with outliers in clusters of others have a low score."""
    if fitter.space == "pca2":
        return chosen
    scores = {}
    for m in found.candidates.tolist():
        scores[m] = _capped(fitter, fitter.fit(m), chosen.outliers).mss
    if chosen.clusters > 1:
        scores[chosen.clusters] = chosen.mss
    order = sorted(scores)
    return replace(chosen, candidates=np.array(order, np.int64), scores=np.array([scores[m] for m in order]))
