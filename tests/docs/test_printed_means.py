"""Means, deviations, leads and counts in tables of the documentation are those of the raw data in docs/measured/."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import pytest
from conftest import ROOT

from dpcfl_net.results.statistics import holm, interval, p_values

MEASURED = ROOT / "docs" / "measured"
EXPLANATION = ROOT / "docs" / "explanation"
RESULTS = (EXPLANATION / "results.md").read_text()
ALGORITHMS = ("oracle", "r-dpcfl", "dp-ifca", "mr-mtl", "local", "km-cdpfl", "global")
Row = Mapping[str, str]


def rows(path: str) -> list[Row]:
    """Read a CSV file of docs/measured/."""
    with (MEASURED / path).open() as file:
        return list(csv.DictReader(file))


def by_seed(found: Sequence[Row], column: str, **where: str | float) -> dict[int, float]:
    """Return a column in percent by seed, of the rows that have these values; runs of one seed count as their mean."""
    chosen = [row for row in found if all(_same(row[key], value) for key, value in where.items())]
    values: dict[int, list[float]] = {}
    for row in chosen:
        values.setdefault(int(row["seed"]), []).append(float(row[column]))
    return {seed: statistics.fmean(each) for seed, each in sorted(values.items())}


def _same(text: str, value: str | float) -> bool:
    return text == value if isinstance(value, str) else bool(text) and float(text) == value


def number(value: float, zero: str = "") -> str:
    """Print with one decimal; `zero` is the digit before the point of numbers below 1."""
    text = f"{value:.1f}"
    return text.replace("0.", f"{zero}.", 1) if text.lstrip("-").startswith("0.") else text


def spread(values: Sequence[float], zero: str = "") -> str:
    """Print mean and standard deviation of shares in percent."""
    scaled = [100 * value for value in values]
    return f"{number(statistics.fmean(scaled), zero)} +- {number(statistics.stdev(scaled), zero)}"


def recovered(found: Sequence[Row], column: str, **where: str | float) -> list[bool]:
    """Return whether the clusters were recovered, of the rows that have these values."""
    return [row[column] == "True" for row in found if all(_same(row[key], value) for key, value in where.items())]


def test_numbers_are_printed_as_on_the_pages():
    assert [number(value) for value in (0.34, -0.26, 12.04, -3.96, 0.0)] == [".3", "-.3", "12.0", "-4.0", ".0"]
    assert number(0.34, "0") == "0.3"
    assert spread([0.5, 0.51, 0.52]) == "51.0 +- 1.0"


def tuned(dataset: str) -> Iterator[tuple[float, list[Row]]]:
    """Yield the final runs of equal tuning by epsilon."""
    found = [row for row in rows(f"equal_tuning_{dataset}.csv") if row["kind"] == "final"]
    for epsilon in (3.0, 5.0, 10.0):
        yield epsilon, [row for row in found if float(row["epsilon"]) == epsilon]


def lines_of_tuning(found: Sequence[Row]) -> Iterator[str]:
    """Yield the line of each algorithm in a table of equal tuning."""
    for algorithm in ALGORITHMS:
        runs = [row for row in found if row["algorithm"] == algorithm]
        (chosen,) = {(row["lr"], row["clip"], row["lam"], row["rounds_fraction"]) for row in runs}
        lr, clip, lam, fraction = (text if not text else f"{float(text):g}".removeprefix("0") for text in chosen)
        own = (f", lambda {lam}" if lam else "") + (f", selections in {int(25 * float(fraction))} rounds" if fraction else "")
        told = algorithm in ("r-dpcfl", "dp-ifca", "km-cdpfl")
        count = f"{sum(row['clusters_recovered'] == 'True' for row in runs)} of {len(runs)}" if told else "–"
        mean, minority = ([float(row[f"accuracy_{of}"]) for row in runs] for of in ("mean", "minority"))
        yield f"| `{algorithm}` | {spread(mean)} | {spread(minority)} | {count} | {lr}, {clip}{own} |"


def lines_of_leads(found: Sequence[Row]) -> Iterator[str]:
    """Yield the line of each lead of R-DPCFL, with verdicts after Holm's correction over the leads over all but the oracle."""
    leads: dict[tuple[str, str], list[float]] = {}
    for rival in (*ALGORITHMS[2:], "oracle"):
        for of in ("mean", "minority"):
            own, other = (by_seed(found, f"accuracy_{of}", algorithm=name) for name in ("r-dpcfl", rival))
            assert own.keys() == other.keys()
            leads[rival, of] = [100 * (own[seed] - other[seed]) for seed in own]
    judged = [lead for lead in leads if lead[0] != "oracle"]
    adjusted = dict(zip(judged, holm([2 * min(p_values(leads[lead], 0.5)) for lead in judged]), strict=True))
    for rival in (*ALGORITHMS[2:], "oracle"):
        line = f"| `{rival}` |"
        for of in ("mean", "minority"):
            low, high = interval(leads[rival, of]) or (math.nan, math.nan)
            text = f"{number(statistics.fmean(leads[rival, of]))} ({number(low)} to {number(high)})"
            holds = rival != "oracle" and adjusted[rival, of] <= 0.05 and statistics.fmean(leads[rival, of]) > 0.5
            verdict = " holds" if holds else " undecided" if rival != "oracle" else ""
            line += f" {f'**{text}**' if holds else text} |{verdict} |"
        yield line


@pytest.mark.parametrize("dataset", ["fashion_mnist", "mnist"])
def test_equal_tuning_prints_what_its_runs_had(dataset: str):
    part = RESULTS.partition("### Fashion-MNIST, 21 clients")[2]
    part = part.partition("### MNIST, 21 clients")[0 if dataset == "fashion_mnist" else 2].partition("\n## ")[0]
    expected = [line for _, found in tuned(dataset) for line in (*lines_of_tuning(found), *lines_of_leads(found))]
    assert [line for line in expected if line not in part] == []


def test_equal_tuning_on_digits_prints_what_its_runs_had():
    part = RESULTS.partition("\n## Equal tuning\n")[2].partition("\n### ")[0]
    found = rows("equal_tuning_digits.csv")
    for algorithm in ("oracle", "r-dpcfl", "local", "mr-mtl", "dp-ifca", "global"):
        (line,) = (line for line in part.splitlines() if line.startswith(f"| `{algorithm}` |") and "+-" in line)
        cells = [cell.strip() for cell in line.split("|")]
        for at, epsilon, kind in ((2, 3.0, "shared"), (3, 3.0, "tuned"), (5, 5.0, "shared"), (6, 5.0, "tuned")):
            runs = by_seed(found, "accuracy_mean", kind=kind, epsilon=epsilon, algorithm=algorithm)
            assert cells[at] == spread([*runs.values()]), (algorithm, epsilon, kind)


@pytest.mark.parametrize("setting", ["fashion_mnist", "mnist"])
def test_complete_runs_print_what_their_runs_had(setting: str):
    page = (EXPLANATION / "reproductions" / "complete-runs.md").read_text()
    heading = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}[setting]
    part = page.partition(f"\n### {heading}\n")[2].partition("\n### ")[0]
    found = rows("r-dpcfl-fig6-laptop/data.csv")
    for epsilon in (3, 4, 5, 10, 15):
        table = part.partition(f"| at epsilon {epsilon}, six seeds |")[2].partition("\n\n")[0]
        for algorithm in ALGORITHMS:
            where: dict[str, str | float] = {
                "setting": f"laptop_{setting}_rotation",
                "epsilon": float(epsilon),
                "algorithm": algorithm,
            }
            means = [spread([*by_seed(found, f"accuracy_{of}", **where).values()], "0") for of in ("mean", "minority", "worst")]
            both = [recovered(found, f"{of}_recovered", **where) for of in ("clusters", "minority")]
            counts = ["–" if algorithm in ("local", "mr-mtl") else f"{sum(each)}/{len(each)}" for each in both]
            assert f"| `{algorithm}` | {' | '.join((*means, *counts))} |" in table, (epsilon, algorithm)


@pytest.mark.parametrize("setting", ["balanced", "imbalanced"])
def test_table_1_prints_what_its_runs_had(setting: str):
    page = (EXPLANATION / "reproductions" / "rr-cluster.md").read_text()
    table = page.partition(f"| {setting} | epsilon |")[2].partition("\n\n")[0]
    found, wrong, cells = rows("rr-cluster-table1-laptop/data.csv"), [], 0
    for line in table.splitlines()[2:]:
        system, epsilon, _, *printed = (cell.strip() for cell in line.strip("|").split("|"))
        for guarantee, cell in zip(("labels-first", "expected", "paper"), printed, strict=True):
            where: dict[str, str | float] = {"setting": setting, "guarantee": guarantee, "system": system}
            values = [*by_seed(found, "accuracy", epsilon=float(epsilon), **where).values()]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0
            expected = "–" if not values else number(statistics.fmean(values), "0")
            expected += f" ± {number(error, '0')} ({len(values)})" if len(values) > 1 else ""
            cells += 1
            if cell != expected:
                wrong.append(f"{system}, epsilon {epsilon}, {guarantee}: {cell} is printed, {expected} was measured")
    assert wrong == []
    assert cells == 42


def test_accuracy_by_round_with_the_larger_network_prints_what_its_runs_had():
    page = (EXPLANATION / "reproductions" / "rr-cluster.md").read_text()
    table = page.partition("| | 5 | 25 | 50 | 75 | 100 | each seed at 100 |")[2].partition("\n\n")[0]
    found = rows("rr-cluster-fig1-paper/data.csv")
    systems = dict.fromkeys(row["system"] for row in found)
    assert len(systems) == 3
    for system in systems:
        by_round = [by_seed(found, "accuracy", system=system, round=each) for each in (5, 25, 50, 75, 100)]
        means = [number(statistics.fmean(values.values())) for values in by_round]
        seeds = ", ".join(map(number, by_round[-1].values()))
        assert f"| {system} | {' | '.join(means)} | {seeds} |" in table
