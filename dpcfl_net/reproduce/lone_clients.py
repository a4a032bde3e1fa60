"""First rounds with clusters of one client and with clients of few records: fits with and without the test for outliers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcfl_net.clustering import separation
from dpcfl_net.clustering.fitting import CUT, Fitter, MixtureFit
from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.lone import with_outliers
from dpcfl_net.clustering.metrics import recovered
from dpcfl_net.clustering.outliers import outliers
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult, Scale
from dpcfl_net.reproduce.claims import Claim, NotTested, share
from dpcfl_net.reproduce.first_rounds import FirstRound, bank, configuration, keys, noise_of_run
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER
from dpcfl_net.results.statistics import interval
from dpcfl_net.results.tables import Table

DATASET = "fashion-mnist"
FEW = 50  # records of a client with few
MOST = 8
CLEAR, LOST = 5, 1  # epsilons at which lone clients are told apart on seeds 100 and 101, and are not
HALF = 0.5  # margin of the claims: 10 seeds can show that a share is above it


@dataclass(frozen=True)
class LoneSetting:
    """Clusters of a first round.

    Attributes:
        shift: Shift between the clusters.
        clients: Cluster sizes.
        few: Indices of the clients with 50 records.
    """

    shift: str
    clients: tuple[int, ...]
    few: tuple[int, ...] = ()


ONE, TWO = (1, 5, 5, 5), (1, 1, 7, 7)
SETTINGS = (
    LoneSetting("rotation", ONE), LoneSetting("label-flip", ONE), LoneSetting("rotation", TWO), LoneSetting("label-flip", TWO),
    LoneSetting("rotation", (1, 15)),
    LoneSetting("rotation", ONE, (0,)), LoneSetting("rotation", ONE, (1,)), LoneSetting("rotation", (5, 5, 5, 5), (0, 5)),
    LoneSetting("rotation", (16,), (0,)),
    LoneSetting("rotation", (21,)), LoneSetting("rotation", (7, 7, 7)), LoneSetting("rotation", (3, 6, 6, 6)),
    LoneSetting("label-flip", (3, 6, 6, 6)), LoneSetting("rotation", (5, 5, 5, 5)), LoneSetting("label-flip", (4, 4, 4, 4, 5)),
)  # fmt: skip
RECORDS = {"laptop": 600, "paper": 6600}  # of a client, or as many as its cluster has images for
IMAGES = 60_000  # of the data set; each cluster has its own shift of all of them
EPSILONS = {"laptop": (1, 2, 3, 5, 10, 100), "paper": (3, 4, 5, 10, 15)}


class LoneClients(Reproduction):
    """Extends Section C.9 of the paper by clusters of one client and clients of few records."""

    name = "r-dpcfl/lone-clients"
    paper = PAPER + ", Appendix C.9"
    title = "Clusters of one client: share of rounds with the right clusters"

    def compute(self, context: Context) -> ReproductionResult:
        return self.judge([row for seed in context.seeds(range(10)) for row in rounds(seed, context.scale, context.say)])

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Judge rows of any number of seeds.

        Args:
            rows: Lines of data.csv.
        """
        notes = [
            f"Clusters of one client, and clients of {FEW} records among larger ones. Before: the fit without the test for outliers, in "
            "which unequal noise counts as unknown. The constants of the test were chosen on seeds 100 and 101.",
        ]
        return ReproductionResult(rows, claims(rows), [], tables(rows), notes)


def rounds(seed: int, scale: Scale, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a row for every setting and epsilon.

    Args:
        seed: Seed of the rounds.
        scale: laptop or paper.
        say: Prints progress.

    Yields:
        Lines of data.csv.
    """
    for setting in SETTINGS:
        usual = min(RECORDS[scale], IMAGES // max(setting.clients))
        sizes = [FEW if i in setting.few else usual for i in range(sum(setting.clients))]
        first = bank(configuration(DATASET, usual, seed, scale=scale)).full_batch(
            setting.clients, setting.shift, sizes if setting.few else None
        )
        for epsilon in EPSILONS[scale]:
            noise = {n: _noise(n, seed, epsilon, scale) for n in set(sizes)}
            yield {
                "dataset": DATASET, "records": usual, "seed": seed, "shift": setting.shift,
                "clients": "+".join(map(str, setting.clients)), "few": "+".join(map(str, setting.few)),
                "clusters": len(setting.clients), "epsilon": epsilon, "z": noise[usual],
                **_measured(first, [noise[size] for size in sizes], (setting.shift, str(setting), epsilon), seed),
            }  # fmt: skip
    say(f"seed {seed} done")


def _noise(records: int, seed: int, epsilon: float, scale: Scale) -> float:
    return noise_of_run(configuration(DATASET, records, seed, epsilon=epsilon, scale=scale))


def _measured(first: FirstRound, z: Sequence[float], names: tuple[str, str, float], seed: int) -> dict[str, Any]:
    """Fit without and with the test for outliers; score the true clusters; apply two other rules."""
    x = first.updates(z, keys(len(z), "lone", seed, *map(str, names)))
    noise = KnownNoise.of(first.deviations(z), len(z), x.shape[1])
    fitter = Fitter(x, x.shape[1], "spectral", seed, noise)
    # Before: unequal noise counted as unknown, and a cluster of one had no score.
    same = noise.weights is None
    before = (fitter if same else Fitter(x, x.shape[1], "spectral", seed, None)).best(None, MOST)
    after = with_outliers(fitter, before if same else fitter.best(None, MOST), None, MOST)
    truth = np.array(first.truth)
    lone = np.bincount(truth)[truth] == 1
    chi_square, _ = outliers(fitter.points, before.labels, noise, heterogeneity=False)
    alone = after.outliers & (np.bincount(after.labels)[after.labels] == 1)
    wrong = dict(zip(after.candidates.tolist(), after.scores.tolist(), strict=True)).get(before.clusters)
    wrong = None if before.clusters == after.clusters else wrong
    lost = bool(lone.any()) and (alone & lone).sum() != lone.sum()
    reported = bool((after.outliers | after.unverified)[lone].all())
    return {
        **_fit("before", before, first), **_fit("after", after, first),
        "alone": int(alone.sum()), "alone_right": bool((alone == lone).all()), "alone_wrong": int((alone & ~lone).sum()),
        "unplaced": int((after.outliers & ~alone).sum()), "unverified": int(after.unverified.sum()),
        "reported": reported, "silent": lost and not reported and after.mss >= CUT, "no_false": not (alone & ~lone).any(),
        "true_score": score_of(fitter, noise, truth), "wrong_mss": wrong,
        "above_wrong": wrong is None or after.mss > wrong,
        "chi_square_right": bool((chi_square == lone).all()), "chi_square_wrong": int((chi_square & ~lone).sum()),
        "chi_square_no_false": not (chi_square & ~lone).any(),
        "bic_right": bic(fitter, noise, truth) < min(bic(fitter, noise, fitter.fit(m).labels) for m in range(1, MOST + 1)),
    }  # fmt: skip


def _fit(name: str, fit: MixtureFit, first: FirstRound) -> dict[str, Any]:
    many = [i for i, size in enumerate(first.sizes) if size == first.records]
    labels, others = fit.labels.tolist(), recovered([first.truth[i] for i in many], [int(fit.labels[i]) for i in many])
    found = {
        "clusters": fit.clusters,
        "mss": fit.mss,
        "mpo": fit.mpo,
        "recovered": recovered(first.truth, labels),
        "others": others,
    }
    return {f"{name}_{key}": value for key, value in found.items()}


def score_of(fitter: Fitter, noise: KnownNoise, labels: np.ndarray) -> float:
    """Score given clusters; a cluster of one has the spread of the others, at least that of the known noise."""
    names = len(np.unique(labels))
    pooled = separation.within(fitter.points, labels, noise.weights) / max(1, len(labels) - names)
    alone = max(noise.squared_norm, pooled)
    return separation.effective(fitter.points, labels, names, fitter.p, weights=noise.weights, alone=alone)


def bic(fitter: Fitter, noise: KnownNoise, labels: np.ndarray) -> float:
    """Compute BIC of given clusters with known noise, -2 log L + M p log n, less what all clusters share."""
    scatter = separation.within(fitter.points, labels, noise.weights) / noise.deviation**2
    return scatter + len(np.unique(labels)) * fitter.p * math.log(len(labels))


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Judge the fits with lone clients and clients of few records.

    Args:
        rows: Lines of data.csv.

    Returns:
        Claims of this project.
    """
    lone = [row for row in rows if row["clients"].startswith("1+")]
    equal = [row for row in lone if not row["few"]]
    one, two = ([row for row in equal if row["clients"] == "+".join(map(str, sizes))] for sizes in (ONE, TWO))
    alone = [row for row in equal if row["after_recovered"] and row["wrong_mss"] is not None]
    wrong = [row for row in lone if not row["alone_right"] and row["after_mss"] >= CUT]
    few = [row for row in rows if row["few"] == "1" and row["epsilon"] >= CLEAR]
    company = [row for row in rows if not row["few"] and not row["clients"].startswith("1+")]
    kept = [row for row in company if row["before_recovered"]]
    return [
        *(
            _claim(f"{sizes}: `auto` finds the right clusters, lone clients alone, {where}", shown, "after_recovered")
            for sizes, own in (("{1,5,5,5}", one), ("{1,1,7,7}", two))
            for where, shown in (
                (f"at epsilon {CLEAR:g} and above", [row for row in own if row["epsilon"] >= CLEAR]),
                (f"at epsilon {LOST:g} and below", [row for row in own if row["epsilon"] <= LOST]),
            )
        ),
        _claim(f"{{1,5,5,5}}: the same without the test for outliers, at epsilon {CLEAR:g} and above",
               [row for row in one if row["epsilon"] >= CLEAR], "before_recovered"),
        _claim("where lone clients were found, the right fit scores above the fit with them in other clusters", alone, "above_wrong"),
        _claim(f"where a lone client is in another cluster at a score of {CUT:g} or more, it is reported: as an outlier, or as "
               "a client that may resemble no other", wrong, "reported"),
        _claim("without lone clients, clusters that were found without the test are found with it", kept, "after_recovered"),
        _claim("clients that have company are not alone", list(rows), "no_false"),
        _claim("the same if an update need only reach beyond the noise (chi-square)", list(rows), "chi_square_no_false"),
        _claim("BIC with known noise prefers the right clusters to all fits without clusters of one", one + two, "bic_right"),
        _claim(f"{{1,5,5,5}} with 50 records at a member of a larger cluster: the other clients are right at epsilon {CLEAR:g} and above",
               few, "after_others"),
    ]  # fmt: skip


def _claim(text: str, rows: Sequence[Mapping[str, Any]], key: str) -> Claim:
    """Claim that the key is true in most of the rows; a seed is one unit."""
    units: dict[Any, list[bool]] = {}
    for row in rows:
        units.setdefault(row["seed"], []).append(bool(row[key]))
    evidence = [share(units, HALF)] if units else NotTested("no such round")
    return Claim(f"(ours) {text} (in most rounds)", f"{sum(map(sum, units.values()))} of {len(rows)}", evidence)


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Tabulate the rounds with the right clusters by setting and epsilon, and what became of the others.

    Args:
        rows: Lines of data.csv.

    Returns:
        Two tables.
    """
    groups: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    for row in rows:
        groups.setdefault(_name(row), {}).setdefault(row["epsilon"], []).append(row)
    recovery, scores = [], []
    for name, levels in groups.items():
        for epsilon, own in levels.items():
            z = f"{min(row['z'] for row in own):.2g} to {max(row['z'] for row in own):.2g}"
            recovery.append([
                name, f"{epsilon:g}", z, *(_shares(own, key) for key in ("before_recovered", "after_recovered", "after_others")),
                *(str(sum(row[key] for row in own)) for key in ("alone_wrong", "unplaced", "chi_square_wrong")),
            ])  # fmt: skip
            scores.append([
                name, f"{epsilon:g}", *(_median(own, key) for key in ("true_score", "before_mss", "after_mss")),
                _median([row for row in own if row["wrong_mss"] is not None], "wrong_mss"),
                f"{sum(row['silent'] for row in own)} of {len(own)}", _marked(own),
            ])  # fmt: skip
    caption = (
        "Rounds with exactly the true clusters at unknown M, share and 95 % interval over seeds. Wrongly alone, unplaced: clients of "
        "larger clusters in clusters of one, and outliers in clusters of others, over all rounds; beyond the noise: clients of "
        "larger clusters that a test against noise alone would take for outliers. Of the others: without clients of 50 records."
    )
    columns = [
        "clusters",
        "epsilon",
        "z",
        "before",
        "with outliers",
        "of the others",
        "wrongly alone",
        "unplaced",
        "beyond the noise",
    ]
    told = (
        "Medians of the score. True: of the true clusters. Wrong: of the fit without clusters of one, as it is recorded beside a fit "
        "with them. Silent: rounds with a score of 2.5 or more in which a lone client is in another cluster and is not reported. Marked: "
        "clients of rounds with the right clusters that are reported as unverified."
    )
    names = ["clusters", "epsilon", "true", "before", "with outliers", "wrong", "silent", "marked"]
    return [
        Table("Recovery at unknown M", columns, recovery, caption),
        Table("Separation scores", names, scores, told),
    ]


def _name(row: Mapping[str, Any]) -> str:
    few = f", 50 records: client {row['few'].replace('+', ', ')}" if row["few"] else ""
    return f"{row['shift']}, {{{row['clients'].replace('+', ',')}}}{few}"


def _shares(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [float(row[key]) for row in rows]
    found = interval(values, "share")
    between = f" ({found[0]:.2f} to {found[1]:.2f})" if found else ""
    return f"{int(sum(values))} of {len(values)}{between}"


def _marked(rows: Sequence[Mapping[str, Any]]) -> str:
    right = [row for row in rows if row["after_recovered"]]
    clients = sum(int(size) for row in right for size in row["clients"].split("+"))
    return f"{sum(row['unverified'] for row in right)} of {clients}"


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    return f"{np.median([row[key] for row in rows]):.1f}" if rows else "–"
