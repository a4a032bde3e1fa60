"""RR-Cluster's table 9: linear regression on four (or three) lines without privacy, and its dead models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from dpcfl_net.core import runlog
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.data.regression import LINES
from dpcfl_net.report.figures import Figure, axis, colour, spec
from dpcfl_net.reproduce.base import Context, Grid, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.claims import Claim, Comparison, paired
from dpcfl_net.reproduce.planned import measure
from dpcfl_net.reproduce.rr_accuracy import PAPER
from dpcfl_net.results.result import Result
from dpcfl_net.results.tables import Table
from dpcfl_net.runtime.checkpoint import Checkpoints

CLUSTERS = {"balanced": [10, 10, 10, 10], "imbalanced": [20, 10, 10]}
NOISE = {"easy": 0.1, "hard": 0.5}
MIN_SIZE = 8
SYSTEMS = {
    "FedAvg": {"name": "dp-fedavg", "sampling_rate": 1.0},
    "IFCA": {"name": "rr-cluster", "base": "ifca", "min_cluster_size": 0, "sampling_rate": 1.0},
    "RR-Cluster (IFCA)": {"name": "rr-cluster", "base": "ifca", "min_cluster_size": MIN_SIZE, "sampling_rate": 1.0},
}
SEEDS = tuple(range(20))
Cell = tuple[str, str, str, int]  # key of CLUSTERS, of NOISE, of SYSTEMS, and seed
USED = 0.05  # a model that a smaller share of clients chooses is dead


class Regression(Reproduction):
    """Four scenarios with 40 clients of 50 points each; the noise multiplier is negligible (epsilon 30,000)."""

    name = "rr-cluster/table9"
    paper = PAPER + ", Table 9 (Appendix D.3)"
    title = "Linear regression without privacy: dead models with and without rebalancing"
    complete_runs = True
    any_scale = True
    run_columns = ("clusters", "noise", "system", "seed")
    value_columns = ("dead_models",)

    def compute(self, context: Context) -> ReproductionResult:
        path, seeds = packaged("rr_cluster/regression"), context.seeds(SEEDS)

        def plan(cell: Cell) -> tuple[Sequence[Any], Grid]:
            shape, ease, title, seed = cell
            sizes, options = CLUSTERS[shape], SYSTEMS[title]
            own = {**options, "clusters": len(sizes)} if options["name"] == "rr-cluster" else options
            axes: dict[str, Sequence[Any]] = {
                "data.clients": [sizes],
                "data.noise": [NOISE[ease]],
                "algorithm": [own],
                "seed": [seed],
            }
            return cell, (path, axes)

        cells = list(itertools.product(CLUSTERS, NOISE, SYSTEMS, seeds))
        measured = measure(self, context, cells, plan, lambda cell, result: [line(cell, result)], whole=True)
        return measured.count(self.judge(measured.rows))

    def judge(self, rows: list[dict[str, Any]]) -> ReproductionResult:
        """Build table, plots and claims from the lines of data.csv; a plot needs a line with its models."""
        dead: dict[tuple[str, str], dict[int, int]] = {}
        drawn: dict[str, Figure] = {}
        for row in rows:
            scenario, title = f"{row['clusters']}, {row['noise']}", row["system"]
            dead.setdefault((scenario, title), {})[row["seed"]] = row["dead_models"]
            if row.get("models") and (words := f"{scenario}: {title}") not in drawn:
                drawn[words] = picture(words, CLUSTERS[row["clusters"]], NOISE[row["noise"]], json.loads(row["models"]))
        shown = [
            [scenario, title, f"{fmean(found.values()):.1f}", f"{sum(map(bool, found.values()))} of {len(found)}"]
            for (scenario, title), found in dead.items()
        ]
        table = Table("Dead models", ["scenario", "system", "mean", "runs with a dead model"], shown)
        judged = [one for scenario in dict.fromkeys(scenario for scenario, _ in dead) for one in claims(scenario, dead)]
        return ReproductionResult(rows, judged, list(drawn.values()), [table])


def line(cell: Cell, result: Result) -> dict[str, Any]:
    """Return a line of data.csv; `models` are the learnt slopes and intercepts as JSON."""
    shape, ease, title, seed = cell
    return {
        "clusters": shape, "noise": ease, "system": title, "seed": seed, "dead_models": unused(result), "worst_line": off(result),
        "loss_within": result.final["accuracy_mean"], "models": json.dumps(models_of(result).astype(float).round(4).tolist()),
    }  # fmt: skip


def claims(scenario: str, dead: dict[tuple[str, str], dict[int, int]]) -> list[Claim]:
    """Claim that IFCA leaves a model dead, and that rebalancing leaves fewer.

    Args:
        scenario: Balance and noise of the lines.
        dead: Dead models of each seed by scenario and system.

    Returns:
        The claims. The paper shows one run with a dead model: it is read as at least half of the runs. Its text speaks of dead
        models with balanced clusters; imbalanced ones are judged alike.
    """
    without, with_ = (
        {seed: float(count > 0) for seed, count in dead[scenario, title].items()} for title in ("IFCA", "RR-Cluster (IFCA)")
    )
    measured = f"runs with a dead model: IFCA {sum(without.values()):.0f}, RR-Cluster {sum(with_.values()):.0f} of {len(with_)}"
    return [
        Claim(
            f"{scenario}: IFCA leaves a model dead (in at least half of the runs)",
            measured,
            [Comparison(without, 0.5, "of the runs", test="share")],
        ),
        Claim(
            f"{scenario}: RR-Cluster leaves a model dead in fewer runs than IFCA",
            measured,
            [paired(without, with_, 0.0, unit="runs", test="sign")],
        ),
    ]


def models_of(result: Result) -> np.ndarray:
    """Return the learnt slopes and intercepts, (M, 2)."""
    found = Checkpoints(RunFolder(result.folder).checkpoints).newest()
    assert found is not None
    return np.asarray(found[1].models)


def unused(result: Result) -> int:
    """Count the models with less than a share USED of the clients after the last round."""
    models = models_of(result)
    if len(models) == 1:
        return 0
    judged = [entry for entry in runlog.read(RunFolder(result.folder).clusters) if entry.get("assigned")]
    counts = np.bincount([k for k in judged[-1]["assigned"] if k is not None], minlength=len(models))
    return int((counts < USED * counts.sum()).sum())


def off(result: Result) -> float:
    """Return the largest distance of a true line to its nearest model: root mean square over x in (-2, 2)."""
    true = np.array(LINES[: len(result.settings["data"]["clients"])])
    difference = true[:, None, :] - models_of(result)[None, :, :]
    return float(np.sqrt(difference[..., 0] ** 2 * 4 / 3 + difference[..., 1] ** 2).min(axis=1).max())


def picture(title: str, sizes: Sequence[int], noise: float, models: Sequence[Sequence[float]]) -> Figure:
    """Plot points of every true line in its colour, and the learnt models as dashed lines.

    Args:
        title: Title of the figure.
        sizes: Clients per line.
        noise: Standard deviation around the line.
        models: Slope and intercept of each learnt model.

    Returns:
        The figure.
    """
    rng = np.random.default_rng(0)
    data: list[dict[str, Any]] = []
    for cluster in range(len(sizes)):
        x = rng.uniform(-2, 2, 60)
        a, b = LINES[cluster]
        y = a * x + b + noise * rng.standard_normal(60)
        data.append({
            "type": "scatter", "mode": "markers", "name": f"line {cluster + 1}", "x": x.round(3).tolist(), "y": y.round(3).tolist(),
            "marker": {"color": colour(cluster), "size": 4, "opacity": 0.6}, "hoverinfo": "skip",
        })  # fmt: skip
    for number, (a, b) in enumerate(models):
        data.append({
            "type": "scatter", "mode": "lines", "name": "models", "legendgroup": "models", "showlegend": number == 0, "x": [-2, 2],
            "y": [b - 2 * a, b + 2 * a], "line": {"color": "@ink", "width": 2, "dash": "dash"},
            "hovertemplate": f"y = {a:.2f} x {b:+.2f}<extra></extra>",
        })  # fmt: skip
    key = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    return Figure(key, title, spec=spec(data, 300, xaxis=axis("x"), yaxis=axis("y", range=[-9, 9])))
