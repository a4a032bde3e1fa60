"""Mechanisms for the labels of RR-Cluster (its section 3.3): right labels at equal epsilon, and whole runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from dpcfl_net.privacy.accounting.accountant import calibrate
from dpcfl_net.privacy.accounting.accountant import epsilon as spent_by
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Claim, Exact, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.rr_accuracy import PAPER, Rows
from dpcfl_net.reproduce.rr_curves import CONFIGS, EVERY, SCALE_NOTES
from dpcfl_net.reproduce.rr_labels import labels_of
from dpcfl_net.reproduce.rr_moves import moves_of
from dpcfl_net.results.number_format import counted
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

CLUSTERS, ROUNDS, SAMPLE, POPULATION, DELTA = 4, 15, 100, 1000, 1e-3  # of configs/rr_cluster/small_fmnist_balanced.yaml
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)  # epsilon of all labels of a run, for the replacement of a client
RELEASES = (1, 5)
NO_SUMS = 1e9  # noise multiplier of sums that tell nothing
RAISED = 1.2  # noise on the sums beside labels, over that without labels
RUN_EPSILON = 8.0
GAUSSIAN_SAMPLES, RESPONSE_SAMPLES = (f"{name}, the sample of each round" for name in ("Gaussian", "randomised response"))
GAUSSIAN_BESIDE, RESPONSE_BESIDE = (
    f"{name}, beside sums with {RAISED:g} times their noise" for name in ("Gaussian", "randomised response")
)
SEEDS = {"laptop": (0, 1, 2), "paper": (0, 1, 2)}
REPLACED = {"privacy.adjacency": "replace-one", "privacy.accountant": "pld", "privacy.epsilon": RUN_EPSILON}
RR = {"name": "rr-cluster", "base": "ifca"}
SAMPLED = {**RR, "labels": "randomised-response", "labels_epsilon": 1.5}
FIVE = {**RR, "labels": "randomised-response", "labels_every": 3, "labels_epsilon": 0.8}
WITHOUT = {**RR, "guarantee": "expected", "sampling": "poisson"}
ONCE = {**WITHOUT, "labels": "randomised-response", "labels_every": 8, "labels_epsilon": 3.0}  # in round 9
RUNS: Mapping[str, Mapping[str, Any]] = {
    "labels-first, B = 12": {**RR, "min_cluster_size": 12},
    "labels-first, B = 24": {**RR, "min_cluster_size": 24},
    "labels-first, randomised response of each sample, B = 12": {**SAMPLED, "min_cluster_size": 12},
    "randomised response, 5 releases, B = 12": {**FIVE, "min_cluster_size": 12},
    "randomised response once, B = 12": {**ONCE, "min_cluster_size": 12},
    "randomised response once, B = 24": {**ONCE, "min_cluster_size": 24},
    "exponential mechanism once, B = 12": {**ONCE, "labels": "exponential", "min_cluster_size": 12},
    "expected, B = 12": {**WITHOUT, "min_cluster_size": 12},
    "true clusters": {**WITHOUT, "base": "oracle", "min_cluster_size": 0},
}
FIRST, _, OF_SAMPLES, FIVE_TIMES, FEWER, BINDING, CHOSEN, EXPECTED, TRUE = RUNS


class Mechanisms(Reproduction):
    """Exact shares of right labels by mechanism, and runs at epsilon 8 for the replacement of a client."""

    name = "rr-cluster/labels"
    paper = PAPER + ", Section 3.3 (other mechanisms for the identifiers)"
    title = "Mechanisms for labels at equal epsilon"
    complete_runs = True
    run_columns = ("run", "seed")
    value_columns = ("accuracy",)

    def compute(self, context: Context) -> ReproductionResult:
        def plan(cell: tuple[str, int]) -> tuple[Sequence[Any], Grid]:
            name, seed = cell
            axes: dict[str, Sequence[Any]] = {
                "algorithm": [dict(RUNS[name])],
                **{key: [value] for key, value in REPLACED.items()},
                "output.evaluate_every": [EVERY],
                "seed": [seed],
            }
            return cell, (packaged(f"rr_cluster/{CONFIGS[context.scale]}"), axes)

        cells = list(itertools.product(RUNS, context.seeds(SEEDS[context.scale])))
        measured = measure(self, context, cells, plan, lambda cell, result: [run_row(cell[0], result)], whole=True)
        exact: list[dict[str, Any]] = [
            {"mechanism": name, "budget": budget, "right": 100 * share}
            for budget in BUDGETS
            for name, share in (right_labels(budget) | right_beside_sums(budget)).items()
        ]
        outcome = self.judge([*exact, *measured.rows])
        outcome.notes.insert(0, SCALE_NOTES[context.scale])
        return measured.count(outcome)

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build plot, tables and claims from the lines of data.csv."""
        exact = [row for row in rows if row.get("mechanism")]
        names = list(dict.fromkeys(str(row["mechanism"]) for row in exact))
        shares = {
            name: [(float(row["budget"]), float(row["right"])) for row in exact if row["mechanism"] == name] for name in names
        }
        figure = lines("right", "Right labels by mechanism", shares, "epsilon of all labels of a run", "right labels, %", log_x=True,
                       caption="Right before noise; replacement of a client, 4 clusters, 15 rounds; chance is 25 %.")  # fmt: skip
        measures = ("sent", "released", "accuracy", "noise_multiplier")
        shown = [[name, *(_mean(by_seed(rows, name, key)) for key in measures)] for name in RUNS]
        columns = ["labels", "sent right, %", "released right, %", "accuracy, %", "z of the sums"]
        tables = [
            Table("Right labels, %", ["mechanism", *(f"{b:g}" for b in BUDGETS)],
                  [[name, *(f"{share:.1f}" for _, share in shares[name])] for name in names]),
            Table(f"Runs at epsilon {RUN_EPSILON:g} for the replacement of a client", columns, shown),
        ]  # fmt: skip
        return ReproductionResult(rows, [*exact_claims(shares), *run_claims(rows)], [figure], tables)


@cache
def right_labels(budget: float) -> dict[str, float]:
    """Compute the share of released labels that equal the label before noise, where all labels of a run cost an epsilon.

    The exponential mechanism has its best case here: all other clusters have the largest loss.

    Args:
        budget: Epsilon of all labels, under replacement of a client.

    Returns:
        Mechanism to share.
    """
    found = {}
    z = _largest_cost(lambda z: [FixedSizeGaussian(1 / z, SAMPLE, POPULATION, ROUNDS)], budget)
    found[GAUSSIAN_SAMPLES] = gaussian_right(math.sqrt(2) / z)
    pure = _largest_cost(lambda e: [_labelled(NO_SUMS, e)], budget)
    found[RESPONSE_SAMPLES] = kept(pure)
    for count in RELEASES:
        releases = f"all clients, {counted(count, 'release')}"
        pure = _largest_cost(lambda e, n=count: [RandomisedResponse(e, CLUSTERS, n)], budget)  # type: ignore[misc]
        found[f"randomised response, {releases}"] = kept(pure)
        span = _largest_cost(lambda e, n=count: [BoundedRangeSelection(e, n)], budget)  # type: ignore[misc]
        found[f"exponential mechanism, {releases}"] = kept(span / 2)
        mean = _largest_cost(lambda m, n=count: [FixedSizeGaussian(1 / m, POPULATION, POPULATION, n)], budget)  # type: ignore[misc]
        found[f"Gaussian, {releases}"] = gaussian_right(math.sqrt(2) / mean)
    return found


def right_beside_sums(budget: float) -> dict[str, float]:
    """Compute the share of right labels of each round's sample where labels and sums together cost an epsilon.

    The noise on the sums is RAISED times what the sums alone need for this epsilon.

    Args:
        budget: Epsilon of labels and sums, under replacement of a client.

    Returns:
        Mechanism to share.
    """
    alone = calibrate(lambda z: [FixedSizeGaussian(z, SAMPLE, POPULATION, ROUNDS)], budget, DELTA, "replace-one")
    pure = _largest_cost(lambda e: [_labelled(RAISED * alone, e)], budget)
    noise = alone / math.sqrt(1 - RAISED**-2)  # 1 / alone^2 = 1 / (RAISED * alone)^2 + 1 / noise^2
    return {GAUSSIAN_BESIDE: gaussian_right(math.sqrt(2) * noise), RESPONSE_BESIDE: kept(pure)}


def kept(log_ratio: float) -> float:
    """Compute the chance of the right label if it is e^log_ratio times as probable as each other one.

    Args:
        log_ratio: Difference of the log-probabilities.
    """
    return 1 / (1 + (CLUSTERS - 1) * math.exp(-log_ratio))


def _labelled(noise: float, label_epsilon: float) -> LabelledFixedSizeGaussian:
    """All rounds of a run with labels by randomised response, and sums of a noise multiplier."""
    return LabelledFixedSizeGaussian(noise, label_epsilon, CLUSTERS, SAMPLE, POPULATION, ROUNDS)


def gaussian_right(deviation: float) -> float:
    """Compute the chance that a one-hot label of norm 1 is its own largest coordinate after noise.

    Args:
        deviation: Standard deviation of the noise.
    """
    from scipy import integrate, stats

    def inside(x: float) -> float:
        return float(stats.norm.pdf(x) * stats.norm.cdf(x + 1 / deviation) ** (CLUSTERS - 1))

    return float(integrate.quad(inside, -9, 9)[0])


def exact_claims(shares: Mapping[str, Sequence[tuple[float, float]]]) -> list[Claim]:
    """Compare mechanisms at equal epsilon.

    Args:
        shares: Mechanism to (budget, right labels in percent).

    Returns:
        The claims.
    """

    def of(name: str) -> list[float]:
        return [share for _, share in shares[name]]

    def compared(text: str, upper: str, lower: str) -> Claim:
        high, low = of(upper), of(lower)
        measured = ", ".join(f"{a:.0f} against {b:.0f} % at {e:g}" for a, b, e in zip(high, low, BUDGETS, strict=True))
        return Claim(f"(ours) {text}", measured, Exact(all(a > b for a, b in zip(high, low, strict=True))))

    one = "all clients, 1 release"
    return [
        compared("a single randomised response of all clients is right more often than Gaussian labels of every sample",
                 f"randomised response, {one}", GAUSSIAN_SAMPLES),
        compared("five of them are too", f"randomised response, all clients, {RELEASES[1]} releases", GAUSSIAN_SAMPLES),
        compared("randomised response of every sample is right more often than Gaussian labels of every sample",
                 RESPONSE_SAMPLES, GAUSSIAN_SAMPLES),
        compared("the same beside sums with equal noise", RESPONSE_BESIDE, GAUSSIAN_BESIDE),
        compared("randomised response is right more often than the exponential mechanism at its best",
                 f"randomised response, {one}", f"exponential mechanism, {one}"),
        compared("randomised response is right more often than Gaussian noise on as many labels", f"randomised response, {one}", f"Gaussian, {one}"),
    ]  # fmt: skip


def run_claims(rows: Rows) -> list[Claim]:
    """Compare whole runs at equal epsilon.

    Args:
        rows: Lines of data.csv.

    Returns:
        The claims.
    """

    def compared(text: str, upper: str, lower: str, key: str = "accuracy") -> Claim:
        high, low = by_seed(rows, upper, key), by_seed(rows, lower, key)
        measured = f"{statistics.fmean(high.values()):.1f} against {statistics.fmean(low.values()):.1f} %"
        return Claim(f"(ours) {text}", measured, [paired(high, low, LEAD)])

    return [
        compared(
            "released labels are right more often with one randomised response than under labels-first",
            FEWER,
            FIRST,
            "released",
        ),
        compared(
            "labels-first is more accurate with randomised response of each sample than with Gaussian labels", OF_SAMPLES, FIRST
        ),
        compared("labels of all clients, released 5 times, are more accurate than labels-first", FIVE_TIMES, FIRST),
        compared(
            "labels of all clients, released once after 8 rounds without labels, are more accurate than labels-first",
            FEWER,
            FIRST,
        ),
        compared("a B that binds (24 of 25) is more accurate than B = 12 with them", BINDING, FEWER),
        compared("randomised response is more accurate than the exponential mechanism", FEWER, CHOSEN),
        compared("`expected`, which releases no label, is more accurate than labels released once", EXPECTED, FEWER),
        compared(
            "the true clusters, the bound of every mechanism for labels, are more accurate than `expected`", TRUE, EXPECTED
        ),
    ]


def run_row(name: str, result: Result) -> dict[str, Any]:
    """Return a line of data.csv.

    Args:
        name: Key of RUNS.
        result: A finished run.
    """
    return {
        "run": name, "seed": result.seed, "accuracy": 100 * float(result.final["accuracy_mean"]),
        "noise_multiplier": result.privacy["noise_multiplier"]["max"], **labels_of(result), **moves_of(result),
    }  # fmt: skip


def by_seed(rows: Rows, name: str, key: str) -> dict[Any, float]:
    """Collect a measure of a run by seed; runs without it are left out."""
    return {row["seed"]: float(row[key]) for row in rows if row.get("run") == name and row.get(key) not in (None, "")}


def _mean(values: Mapping[Any, float]) -> str:
    return f"{statistics.fmean(values.values()):.2f}" if values else "–"


def _largest_cost(events: Callable[[float], Sequence[Event]], budget: float) -> float:
    """Find the largest parameter whose events cost at most a budget, by bisection; cost rises with the parameter."""
    low, high = 0.0, 1.0
    while spent_by(events(high), DELTA, "replace-one") <= budget:
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if spent_by(events(middle), DELTA, "replace-one") <= budget else (low, middle)
    return low
