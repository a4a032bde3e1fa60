"""R-DPCFL's figures 6 and 7 (11 and 12 with Global): accuracy and cluster recovery of all systems against epsilon."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dpcfl_net.report import sweep
from dpcfl_net.reproduce.base import Context, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import LEAD, Cause, Claim, paired
from dpcfl_net.results import compare, compare_table
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table

PAPER = "Malekmohammadi, Taik, Farnadi, Differentially Private Clustered Federated Learning, TMLR 2025"
SYSTEMS = ("oracle", "r-dpcfl", "dp-ifca", "mr-mtl", "local", "km-cdpfl", "global")
CONFIGS = {
    "laptop": (
        "laptop_fashion_mnist_rotation",
        "laptop_mnist_rotation",
        "laptop_cifar10_rotation",
        "laptop_cifar10_label_flip",
    ),
    "paper": ("paper_fashion_mnist_rotation", "paper_mnist_rotation", "paper_cifar10_rotation", "paper_cifar10_label_flip"),
}
# Epsilon to seeds. The paper: four seeds at each of 3, 4, 5, 10, 15.
SEEDS: Mapping[str, Mapping[float, Sequence[int]]] = {
    "laptop": {5: (0, 1, 2), 3: (0,), 4: (0,), 10: (0,), 15: (0,)},
    "paper": dict.fromkeys((3, 4, 5, 10, 15), (0, 1, 2, 3)),
}
CIFAR_SEEDS: Mapping[float, Sequence[int]] = {5: (0,)}  # at laptop scale, where a run takes minutes
RECOVERED = "clusters_recovered"
SLACK = 2.0  # points: tolerance of "not below"


class MeanAccuracy(Reproduction):
    """Figure 6: mean accuracy over all clients (top), share of runs with all clusters recovered (bottom)."""

    name = "r-dpcfl/fig6"
    paper = PAPER + ", Figures 6 and 11"
    title = "Mean accuracy and recovery of all clusters against epsilon"
    complete_runs = True
    measure: ClassVar[str] = "accuracy_mean"
    found: ClassVar[str] = RECOVERED
    group: ClassVar[str] = "all clients"

    def compute(self, context: Context) -> ReproductionResult:
        outcome = ReproductionResult([], [])
        for stem in CONFIGS[context.scale]:
            path = packaged(f"r_dpcfl/fig6/{stem}")
            by_epsilon = CIFAR_SEEDS if stem.startswith("laptop_cifar10") else SEEDS[context.scale]
            results = [
                result
                for epsilon, seeds in by_epsilon.items()
                for result in context.results(
                    path, {"privacy.epsilon": [epsilon], "seed": context.seeds(seeds), "algorithm.name": SYSTEMS}
                )
            ]
            self.add(outcome, stem, results)
            used = (f"{epsilon:g}: {', '.join(map(str, context.seeds(seeds)))}" for epsilon, seeds in by_epsilon.items())
            outcome.notes.append(f"Seeds by epsilon, {stem}: {'; '.join(used)}.")
        outcome.notes.append("Updates and selections of a run together spend its whole epsilon.")
        return outcome

    def add(self, outcome: ReproductionResult, setting: str, results: Sequence[Result]) -> None:
        """Add rows, figures, table and claims of one data setting."""
        rows = compare.rows(sorted(results, key=lambda result: (result.epsilon, SYSTEMS.index(result.algorithm))))
        outcome.rows += [row_of(setting, result) for result in results]
        outcome.claims += self.claims(setting, results)
        for figure in sweep.figures(rows):
            if figure.key in (self.measure, self.found):
                title = f"{figure.title}, {setting.replace('_', ' ')}"
                outcome.figures.append(replace(figure, key=f"{figure.key}-{setting}", title=title))
        table = compare_table.table(rows)
        outcome.tables.append(Table(setting, table.columns, table.rows, table.caption))

    def claims(self, setting: str, results: Sequence[Result]) -> list[Claim]:
        """Check the paper's orderings, and which system recovers clusters more often, at each epsilon.

        Args:
            setting: Name of the configuration.
            results: All runs of the setting.

        Returns:
            The claims.
        """
        claims = []
        for epsilon in sorted({_epsilon(result) for result in results}):
            own = [result for result in results if _epsilon(result) == epsilon]
            at = by_system(own, self.measure)
            where = f"{setting}, epsilon {epsilon:g}"
            claims += [
                ordering(where, at, "oracle", "r-dpcfl", margin=-SLACK, group=self.group),
                *(
                    ordering(where, at, above, below, cause=_noise(own) if above == "r-dpcfl" else None, group=self.group)
                    for above, below in (
                        ("r-dpcfl", "local"), ("r-dpcfl", "mr-mtl"), ("r-dpcfl", "dp-ifca"), ("local", "global"), ("mr-mtl", "global"),
                    )
                ),
                recovery(where, by_system(own, self.found, unit=1), "r-dpcfl", "dp-ifca", self.found),
            ]  # fmt: skip
        return claims


class MinorityAccuracy(MeanAccuracy):
    """Figure 7: the same for the clients of the minority cluster."""

    name = "r-dpcfl/fig7"
    paper = PAPER + ", Figures 7 and 12"
    title = "Accuracy and recovery of the minority cluster against epsilon"
    measure = "accuracy_minority"
    found = "minority_recovered"
    group = "the minority"


def ordering(
    where: str,
    at: Mapping[str, Mapping[int, float]],
    above: str,
    below: str,
    *,
    margin: float = LEAD,
    cause: Cause | None = None,
    group: str = "all clients",
) -> Claim:
    """Claim that one system is above another by a margin.

    Args:
        where: Configuration and epsilon, for the text.
        at: System to seed to accuracy in percent.
        above: The better system.
        below: The other system.
        margin: Smallest lead that agrees with the claim, in points; negative: tolerated deficit.
        cause: Shown if the claim does not hold.
        group: Clients of the accuracy, for the text.

    Returns:
        The claim.
    """
    words = "is above" if margin > 0 else f"is not below (by more than {-margin:g} points)"
    return Claim(
        f"{where}: {above} {words} {below} in accuracy of {group}",
        f"{statistics.fmean(at[above].values()):.1f} against {statistics.fmean(at[below].values()):.1f} %",
        [paired(at[above], at[below], margin)],
        cause,
    )


def recovery(where: str, found: Mapping[str, Mapping[int, float]], more: str, less: str, key: str = RECOVERED) -> Claim:
    """Claim that one system recovers clusters in more runs than another.

    Args:
        where: Configuration and epsilon, for the text.
        found: System to seed to 1 if it recovered them, else 0.
        more: The system that recovers them more often.
        less: The other system.
        key: clusters_recovered or minority_recovered.

    Returns:
        The claim.
    """
    what = "all clusters" if key == RECOVERED else "the minority"
    return Claim(
        f"{where}: {more} recovers {what} more often than {less}",
        ", ".join(f"{name} {sum(found[name].values()):.0f} of {len(found[name])}" for name in (more, less)),
        [paired(found[more], found[less], 0.0, unit="runs", test="sign")],
    )


def by_system(results: Iterable[Result], measure: str, *, unit: float = 100) -> dict[str, dict[int, float]]:
    """Collect a measure by system and seed.

    Args:
        results: Finished runs of one configuration and epsilon; those without the measure are left out.
        measure: Key of the final results.
        unit: Factor of the values; 100: percent.

    Returns:
        System to seed to the measure.
    """
    found: dict[str, dict[int, float]] = {}
    for result in results:
        if result.final.get(measure) is not None:
            found.setdefault(result.algorithm, {})[result.seed] = unit * float(result.final[measure])
    return found


def _noise(results: Sequence[Result]) -> Cause:
    """The guess why R-DPCFL lags where it does: its noise multiplier beside Local's. No run isolates it."""
    z = {
        name: statistics.fmean(float(r.privacy["noise_multiplier"]["max"]) for r in results if r.algorithm == name)
        for name in ("r-dpcfl", "local")
    }
    return Cause(
        f"its full-batch round and selections raise the noise multiplier ({z['r-dpcfl']:.2f} against {z['local']:.2f})"
    )


def _epsilon(result: Result) -> float:
    return float(result.settings["privacy"]["epsilon"])


def row_of(setting: str, result: Result) -> dict[str, Any]:
    """Return a line of data.csv."""
    figures = {key: value for key, value in result.final.items() if not isinstance(value, list)}
    return {
        "setting": setting, "algorithm": result.algorithm, "epsilon": result.settings["privacy"]["epsilon"], "seed": result.seed,
        "epsilon_claimed": result.epsilon, "noise_multiplier": result.privacy["noise_multiplier"]["max"], **figures,
    }  # fmt: skip
