"""R-DPCFL's figures 10 and 13: MSS as a criterion for the number of clusters and for their recovery."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.clustering import mixture
from dpcfl_net.clustering.metrics import recovered
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult, Scale
from dpcfl_net.reproduce.claims import ALWAYS, Cause, Claim, NotTested, share
from dpcfl_net.reproduce.first_rounds import bank, configuration, keys, noise_of_run, setting
from dpcfl_net.reproduce.plots import lines, points
from dpcfl_net.reproduce.r_dpcfl_batches import averages, stated
from dpcfl_net.reproduce.r_dpcfl_noise import PAPER
from dpcfl_net.results.tables import Table

CANDIDATES = range(2, 8)
EPSILONS = (3, 4, 5, 10)
WAYS: dict[str, tuple[mixture.Space, str, str]] = {
    "two components, plain MSS (published code)": ("pca2", "mss_plain", "two of the four clusters are close together in two components"),
    "all dimensions, plain MSS (as printed)": (
        "full", "mss_plain", "estimation error alone separates the centres, and components with fewer members look tighter",
    ),
    "M - 1 components, effective MSS (this project)": (
        "spectral", "mss", "with well separated clusters the score is largest after merging; therefore this project uses another rule",
    ),
}  # fmt: skip


class NumberOfClusters(Reproduction):
    """Figure 10: MSS against candidates for M, four epsilons and five seeds."""

    name = "r-dpcfl/fig10"
    paper = PAPER + ", Figure 10 and Appendix C.9"
    title = "MSS against the number of components"

    def compute(self, context: Context) -> ReproductionResult:
        seeds = context.seeds(range(5))
        rows = [row for seed in seeds for row in self.rows(context, seed)]
        config = setting(context.scale, seeds[0])
        figures = []
        for k, way in enumerate(WAYS):
            kept = [row for row in rows if row["way"] == way]
            curves = {
                f"epsilon {e:g}": averages([row for row in kept if row["epsilon"] == e], "candidate", "score") for e in EPSILONS
            }
            figures.append(lines(f"way{k}", f"{way}, mean of {len(seeds)} seeds", curves, "components", "MSS"))
        note = stated(config, bank(config).full_batch().records)
        return ReproductionResult(rows, _claims_on_number(rows), figures, notes=[note])

    def rows(self, context: Context, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a row for every epsilon, score and candidate; `chosen` is the M of this project's rule."""
        first = bank(setting(context.scale, seed)).full_batch()
        for epsilon in EPSILONS:
            noise = noise_of_run(setting(context.scale, seed, epsilon=epsilon))
            x = first.updates(noise, keys(len(first.truth), "fig10", seed, str(epsilon)))
            chosen = mixture.fit(x, clusters=None, seed=seed, noise_deviation=first.deviation(noise)).clusters
            for way, (space, score, _) in WAYS.items():
                fits = {m: mixture.fit(x, clusters=m, space=space, seed=seed) for m in CANDIDATES}
                for m, fit in fits.items():
                    yield {
                        "seed": seed, "epsilon": epsilon, "z": noise, "way": way, "candidate": m, "score": getattr(fit, score),
                        "chosen": chosen,
                    }  # fmt: skip
        context.say(f"seed {seed} done")


def _claims_on_number(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    claims = []
    for way, (_, _, cause) in WAYS.items():
        largest = {
            key: max(
                (row for row in rows if row["way"] == way and (row["seed"], row["epsilon"]) == key),
                key=lambda row: row["score"],
            )
            for key in dict.fromkeys((row["seed"], row["epsilon"]) for row in rows)
        }
        by_epsilon = {e: [row["candidate"] for (_, at), row in largest.items() if at == e] for e in EPSILONS}
        right = sum(m == 4 for chosen in by_epsilon.values() for m in chosen)
        claims.append(
            Claim(
                f"MSS peaks at the true M = 4 (in {ALWAYS:.0%} of the rounds): {way}",
                f"{right} of {len(largest)}; M by epsilon: "
                + "; ".join(f"{e:g}: {chosen}" for e, chosen in by_epsilon.items()),
                [share(_by_seed({key: row["candidate"] == 4 for key, row in largest.items()}))],
                Cause(cause),
            )
        )
    ours = {(row["seed"], row["epsilon"]): row["chosen"] for row in rows}
    listing = "; ".join(f"{e:g}: {[m for (_, at), m in ours.items() if at == e]}" for e in EPSILONS)
    right = sum(m == 4 for m in ours.values())
    claims.append(
        Claim(
            f"(ours) this project's rule finds M = 4 (in {ALWAYS:.0%} of the rounds)",
            f"{right} of {len(ours)}; M by epsilon: {listing}",
            [share(_by_seed({key: m == 4 for key, m in ours.items()}))],
        )
    )
    return claims


def _by_seed(rounds: Mapping[tuple[Any, float], bool]) -> dict[Hashable, list[bool]]:
    found: dict[Hashable, list[bool]] = {}
    for (seed, _), right in rounds.items():
        found.setdefault(seed, []).append(right)
    return found


@dataclass(frozen=True)
class Group:
    """First rounds that differ only in seed, epsilon and b>1."""

    dataset: str
    records: int
    seeds: range
    epsilons: Sequence[float]
    later: Sequence[int] = (32,)
    shift: str = "rotation"


GROUPS = {
    "laptop": [
        Group("fashion-mnist", 600, range(5), (1, 2, 3, 5, 10), (32, 128)),
        Group("fashion-mnist", 600, range(4), (1, 2, 3, 5, 10), shift="label-flip"),
        Group("fashion-mnist", 1000, range(3), (0.7, 1, 2, 5)),
        Group("mnist", 600, range(3), (0.7, 1, 2, 3, 10)),
        Group("cifar10", 600, range(1), (3, 5, 10, 15)),
    ],
    "paper": [Group("cifar10", 6600, range(5), (3, 4, 5, 10, 15), (16, 32, 64, 128))],
}
PLANE = "k-means finds groups that look separated in any points in a plane"
ERROR = "with few updates of many parameters, estimation error alone separates the centres for any data"
CLOSE = "just above 2 a client or two can still be in the wrong cluster; the best threshold is in the table"
SCORES = (
    ("pca2", "mss_plain", "two components, plain MSS (published code)", PLANE),
    ("full", "mss_plain", "all dimensions, plain MSS (as printed)", ERROR),
    ("sklearn", "mss_plain", "scikit-learn on the raw updates, plain MSS", ERROR),
    ("spectral", "mss_plain", "M - 1 components, plain MSS", CLOSE),
    ("spectral", "mss_effective", "M - 1 components, effective MSS (this project)", CLOSE),
    ("pca2", "mss_effective", "two components, effective MSS", CLOSE),
)


class Recovery(Reproduction):
    """Figure 13: MSS as a predictor of recovery; M = 4 is known."""

    name = "r-dpcfl/fig13"
    paper = PAPER + ", Figure 13"
    title = "MSS against recovery of the clusters"

    def compute(self, context: Context) -> ReproductionResult:
        rows = [row for group in GROUPS[context.scale] for row in _rounds(group, context.scale, context.say)]
        figures, claims, table = [], [], []
        for k, (space, score, words, cause) in enumerate(SCORES):
            own = [row for row in rows if row["space"] == space]
            pairs = [(row[score], row["recovered"]) for row in own]
            figures.append(_strip(f"space{k}", words, pairs))
            claims.append(above_two(words, [(independent_unit(row), row[score], row["recovered"]) for row in own], cause))
            cut, wrong = threshold(pairs)
            found = [mss for mss, right in pairs if right]
            lost = [mss for mss, right in pairs if not right]
            table.append([words, str(len(pairs)), str(len(found)), _span(found), _span(lost), f"{cut:.2f}", str(wrong)])
        columns = [
            "space and score",
            "rounds",
            "recovered",
            "MSS where recovered",
            "MSS where not",
            "best threshold",
            "mistakes there",
        ]
        rounds = sum(row["space"] == "spectral" for row in rows)
        note = f"{rounds} first rounds; scikit-learn's mixture on those of seed 0."
        return ReproductionResult(rows, claims, figures, [Table("Thresholds", columns, table)], [note])


def _rounds(group: Group, scale: Scale, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for seed in group.seeds:
        first = bank(configuration(group.dataset, group.records, seed, scale=scale)).full_batch(shift=group.shift)
        for later, epsilon in itertools.product(group.later, group.epsilons):
            noise = noise_of_run(configuration(group.dataset, group.records, seed, epsilon=epsilon, batch=later, scale=scale))
            names = ("fig13", group.dataset, group.records, group.shift, seed, later, str(epsilon))
            x = first.updates(noise, keys(len(first.truth), *names))
            for space in mixture.SPACES if seed == 0 else mixture.SPACES[:3]:
                fit = mixture.fit(x, clusters=4, space=space, seed=seed)
                yield {
                    "dataset": group.dataset, "records": group.records, "shift": group.shift, "seed": seed, "epsilon": epsilon,
                    "b_later": later, "z": noise, "space": space, "mss_plain": fit.mss_plain, "mss_effective": fit.mss,
                    "recovered": recovered(first.truth, fit.labels.tolist()),
                }  # fmt: skip
        say(f"{group.dataset}, {group.records} records, {group.shift}, seed {seed} done")


def above_two(words: str, rounds: Sequence[tuple[Hashable, float, bool]], cause: str) -> Claim:
    """Check the paper's claim that an MSS above 2 always means recovery.

    Args:
        words: Name of the space and score.
        rounds: Data set and seed, MSS, and True if the clusters were found, of each round.
        cause: What might explain a failure.

    Returns:
        The claim; not tested without an MSS above 2.
    """
    above, below = ([(unit, right) for unit, mss, right in rounds if (mss > 2) == side] for side in (True, False))
    units: dict[Hashable, list[bool]] = {}
    for unit, right in above:
        units.setdefault(unit, []).append(right)
    wrong, right_below = sum(not right for _, right in above), sum(right for _, right in below)
    return Claim(
        f"an MSS above 2 always (in {ALWAYS:.0%} of the rounds) means that the clusters were found: {words}",
        f"above 2: {len(above)} rounds, {wrong} of them wrong; at or below: {len(below)}, {right_below} of them right",
        [share(units)] if units else NotTested("no round has an MSS above 2"),
        Cause(cause),
    )


def independent_unit(row: Mapping[str, Any]) -> str:
    """Name the independent unit of a round: rounds of one data set and seed share initial model and records at every size."""
    return f"{row['dataset']}, seed {row['seed']}"


def threshold(pairs: Sequence[tuple[float, bool]]) -> tuple[float, int]:
    """Find the MSS threshold with the fewest mistakes.

    Args:
        pairs: (MSS, True if the clusters were found) of each round.

    Returns:
        The threshold, and its mistakes: recovered at or below it, or not recovered above it.
    """
    cuts = sorted({mss for mss, _ in pairs})
    middles = [cuts[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(cuts)), cuts[-1]]
    mistakes = {cut: sum((mss > cut) != right for mss, right in pairs) for cut in middles}
    best = min(mistakes, key=lambda cut: mistakes[cut])
    return best, mistakes[best]


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else "–"


def _strip(key: str, title: str, pairs: Sequence[tuple[float, bool]]) -> Any:
    """Plot MSS by recovery; points are spread vertically within a class to keep them apart."""
    series = {
        word: [(mss, side + 0.3 * (k % 10) / 10) for k, (mss, right) in enumerate(pairs) if right is bool(side)]
        for side, word in ((0, "not found"), (1, "found"))
    }
    return points(key, title, series, "MSS", "found (upper) or not (lower)")
