"""Comparison of finished runs: results over seeds, and whether the runs are comparable."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import check_fields
from dpcfl_net.core.locks import is_running
from dpcfl_net.core.run_folder import RunFolder, SweepFolder
from dpcfl_net.results.number_format import number, plain
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import JsonLine, JsonlTail, mapping, read_mapping, whole
from dpcfl_net.results.tables import Table

# Settings that do not change the experiment; runs that differ only in the seed are repetitions.
ASIDE = ("seed", "name", "output.", "runtime.", "data.root", "privacy.noise_seed")
TERMS = ("delta", "unit", "adjacency", "trust", "insecure")
PRIVACY = ("delta", "unit", "adjacency", "trust", "insecure", "epsilon_spent", "epsilon_replace_one")
# Required fields.
RUN_FIELDS = {"name": (str,), "algorithm": (str,), "seed": (int,)}
SWEEP_FIELDS = {"cells": (list,), "axes": (dict,)}
# Figures of the observer's last lines that run.json may lack.
OBSERVED = ("accuracy_p10", "accuracy_disparity", "f_acc", "f_loss", "assignment_accuracy")
# Columns of a table: key in `final`, title, and for FAIRNESS scale and digits.
SHARES = (
    ("accuracy_mean", "mean %"),
    ("accuracy_minority", "minority %"),
    ("accuracy_worst", "worst %"),
    ("accuracy_p10", "p10 %"),
)
COUNTS = (("clusters_recovered", "clusters found"), ("minority_recovered", "minority found"))
FAIRNESS = (("f_acc", "F_acc %", 100, 1), ("f_loss", "F_loss", 1, 3))


@dataclass(frozen=True)
class Result:
    """One finished run.

    Attributes:
        folder: Run folder.
        name: Name of the run.
        algorithm: Algorithm.
        seed: Seed.
        state: Always "finished".
        settings: Content of config.yaml.
        privacy: Privacy section of run.json.
        final: Final figures of run.json and of the observer's last lines; shares in [0, 1].
    """

    folder: Path
    name: str
    algorithm: str
    seed: int
    state: str
    settings: dict[str, Any]
    privacy: dict[str, Any]
    final: dict[str, Any]

    @property
    def epsilon(self) -> float:
        """Claimed epsilon; inf for an unprotected run."""
        found = number(self.privacy.get("epsilon"))
        return math.inf if found is None else found


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed.

    Attributes:
        results: The runs.
        settings: Their settings by dotted key.
    """

    results: tuple[Result, ...]
    settings: dict[str, Any]

    @property
    def algorithm(self) -> str:
        return self.results[0].algorithm

    @property
    def epsilon(self) -> float:
        return max(result.epsilon for result in self.results)

    def values(self, key: str) -> list[float]:
        """Return a figure of `final` for each run that has it."""
        return [found for result in self.results if (found := number(result.final.get(key))) is not None]

    def count(self, key: str) -> tuple[int, int]:
        """Count a Boolean of `final`: (runs where it is True, runs that have it)."""
        judged = [result.final[key] for result in self.results if isinstance(result.final.get(key), bool)]
        return sum(judged), len(judged)


def read_result(folder: Path) -> Result:
    """Read a finished run.

    Args:
        folder: Run folder.

    Raises:
        ConfigError: If the folder is not a run folder, is damaged, or the run has not finished.
    """
    notes: list[str] = []
    files = RunFolder(folder)
    run, settings = read_mapping(files.run, notes), read_mapping(files.config, notes)
    if notes:
        raise ConfigError([f"{folder}: {note.removesuffix(' and was left out')}" for note in notes])
    if not run or not settings:
        raise ConfigError(f"{folder} is not a run folder: it needs {files.run.name} and {files.config.name}")
    if run.get("state") != "finished":
        cut_off = run.get("state") == "running" and not is_running(folder)
        done = f"{'interrupted' if cut_off else run.get('state')} after {run.get('rounds_done', 0)} rounds"
        raise ConfigError(f"{folder} is {done}; only finished runs compare: dpcfl run --resume {folder}")
    check_fields({**dict.fromkeys(RUN_FIELDS), **run}, str(files.run), RUN_FIELDS)
    privacy, path = {"epsilon": None, **mapping(settings, "privacy")}, f"{files.config}, privacy"
    check_fields(privacy, path, {"epsilon": (float,)})
    final = mapping(run, "final")
    seen = _observed(folder)
    added = {key: seen[key] for key in OBSERVED if key in seen and final.get(key) is None}
    return Result(
        folder, run["name"], run["algorithm"], run["seed"], "finished", settings, mapping(run, "privacy"),
        {**final, **added},
    )  # fmt: skip


def read_sweep(folder: Path) -> list[Result]:
    """Read the finished runs of a sweep, in the order of its cells.

    Args:
        folder: Sweep folder.

    Raises:
        ConfigError: If the folder is not a sweep folder or no run has finished.
    """
    cells = read_document(folder)["cells"]
    folders = dict.fromkeys((folder / cell["folder"]).resolve() for cell in cells)
    done = [path for path in folders if read_mapping(RunFolder(path).run, []).get("state") == "finished"]
    if not done:
        raise ConfigError(f"{folder}: none of the sweep's {len(cells)} runs has finished")
    return [read_result(path) for path in done]


def read_document(folder: Path) -> JsonLine:
    """Read sweep.json.

    Args:
        folder: Sweep folder.

    Returns:
        {config, axes, cells: [{values, folder, state}]}.

    Raises:
        ConfigError: If the folder is not a sweep folder or the file is damaged.
    """
    file = SweepFolder(folder).sweep
    document, path = read_mapping(file, []), str(file)
    if not document:
        raise ConfigError(f"{folder} is not a sweep: it holds no readable {file.name}")
    check_fields({**dict.fromkeys(SWEEP_FIELDS), **document}, path, SWEEP_FIELDS)
    for cell in document["cells"]:
        check_fields({"cell": cell}, path, {"cell": (dict,)})
        check_fields({"folder": None, **cell}, f"{path}, cells", {"folder": (str,)})
    check_fields(document["axes"], f"{path}, axes", dict.fromkeys(document["axes"], (list,)))
    return document


def swept_terms(document: Mapping[str, Any]) -> list[str]:
    """Return the axes of a sweep over privacy and data; runs with different values on them are not compared."""
    return [key for key, values in document["axes"].items() if len(values) > 1 and key.startswith(("privacy.", "data."))]


def rows(results: Iterable[Result]) -> list[Row]:
    """Group runs that differ only in their seed, in order of first appearance; duplicates of a run are dropped."""
    found: dict[str, list[Result]] = {}
    for result in {result.folder.resolve(): result for result in results}.values():
        found.setdefault(repr(sorted(_dotted(result.settings).items())), []).append(result)
    return [Row(tuple(group), _dotted(group[0].settings)) for group in found.values()]


def differing(table: Sequence[Row]) -> list[str]:
    """Find the settings that differ between rows.

    Returns:
        Dotted keys; an option of an algorithm counts only if it differs between rows of that algorithm.
    """
    keys = dict.fromkeys(key for row in table for key in row.settings)
    return [key for key in keys if _differs(key, table)]


def telling(table: Sequence[Row]) -> list[str]:
    """Find the settings that differ between rows of the same algorithm, as dotted keys."""
    by_algorithm: dict[str, list[Row]] = {}
    for row in table:
        by_algorithm.setdefault(row.algorithm, []).append(row)
    return [key for key in differing(table) if any(_differs(key, own) for own in by_algorithm.values())]


def unequal(results: Sequence[Result], apart: Collection[str] = ()) -> dict[Path, str]:
    """Find runs whose privacy terms or data settings differ from those of most runs.

    Args:
        results: The runs.
        apart: Dotted keys; runs with different values of them are not compared with each other.

    Returns:
        What differs, by run folder.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        own = _dotted(result.settings)
        groups.setdefault(json.dumps([own.get(key) for key in apart]), []).append(result)
    return {path: text for group in groups.values() for path, text in _unequal(group).items()}


def statements(results: Iterable[Result]) -> tuple[list[str], list[str]]:
    """Collect the privacy statements of runs.

    Returns:
        Distinct headlines, distinct alerts.
    """
    said = [statement(result.privacy) for result in results]
    return list(dict.fromkeys(one.headline for one in said)), list(dict.fromkeys(alert for one in said for alert in one.alerts))


def refusal(found: Mapping[Path, str]) -> ConfigError:
    """Build the error for runs that are not comparable, from the result of `unequal`."""
    return ConfigError([f"{path.name}: {text}" for path, text in found.items()] + ["--force shows them with a mark"])


def table(shown: Sequence[Row], marked: Collection[Path] = ()) -> Table:
    """Build the comparison table: settings that differ, then figures as mean +- standard deviation.

    Args:
        shown: Rows of the table.
        marked: Folders of runs that are not comparable (see `unequal`); their rows are marked in an extra column.
    """
    keys = differing(shown)
    columns = [("algorithm", [row.algorithm for row in shown]), ("epsilon", [_epsilon(row) for row in shown])]
    columns += [(_title(key, keys), [word(row.settings.get(key)) for row in shown]) for key in keys]
    columns += [("runs", [str(len(row.results)) for row in shown])]
    columns += [(title, [_spread(row.values(key), 100, 1) for row in shown]) for key, title in SHARES]
    columns += [(title, [_count(*row.count(key)) for row in shown]) for key, title in COUNTS]
    for key, title, scale, digits in FAIRNESS:
        if any(row.values(key) for row in shown):
            columns += [(title, [_spread(row.values(key), scale, digits) for row in shown])]
    if marked:
        odd = [any(result.folder in marked for result in row.results) for row in shown]
        columns += [("", ["NOT COMPARABLE" if one else "" for one in odd])]
    caption = "mean +- standard deviation over the runs of a row, which differ in their seed only; clusters recovered in k of n"
    lines = [list(row) for row in zip(*(words for _, words in columns), strict=True)]
    return Table("Comparison", [title for title, _ in columns], lines, caption)


def word(value: Any) -> str:
    """Format a setting; a dash if it is missing."""
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def write_csv(file: TextIO, results: Sequence[Result]) -> None:
    """Write one line per run: folder, settings that differ, privacy, and scalar final figures unrounded."""
    keys = differing(rows(results))
    figures = list(
        dict.fromkeys(key for result in results for key, value in result.final.items() if not isinstance(value, list))
    )
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["folder", "name", "algorithm", "seed", *keys, "epsilon", *PRIVACY, *figures])
    for result in results:
        own = _dotted(result.settings)
        writer.writerow(
            [result.folder, result.name, result.algorithm, result.seed, *(_cell(own.get(key)) for key in keys), result.epsilon]
            + [_cell(result.privacy.get(key)) for key in PRIVACY]
            + [_cell(result.final.get(key)) for key in figures]
        )


def _observed(folder: Path) -> JsonLine:
    """Newest value of each field in the observer's lines."""
    files = RunFolder(folder)
    lines = [*JsonlTail(files.metrics).new(), *JsonlTail(files.clusters).new()]
    seen = [line for line in lines if line.get("view") == "observer" and whole(line.get("round")) is not None]
    return {key: value for line in sorted(seen, key=lambda line: line["round"]) for key, value in line.items()}


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key, without those that do not change the experiment."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= _dotted(value, f"{key}.")
        elif not key.startswith(ASIDE):
            found[key] = value
    return found


def _differs(key: str, table: Sequence[Row]) -> bool:
    if key in ("algorithm.name", "privacy.epsilon"):  # these always have a column
        return False
    if key.startswith("algorithm."):
        by_algorithm: dict[str, set[str]] = {}
        for row in table:
            by_algorithm.setdefault(row.algorithm, set()).add(json.dumps(row.settings.get(key)))
        return any(len(values) > 1 for values in by_algorithm.values())
    return len({json.dumps(row.settings.get(key)) for row in table}) > 1


def _unequal(results: Sequence[Result]) -> dict[Path, str]:
    terms = [_terms(result) for result in results]
    found: dict[Path, list[str]] = {}
    for key in dict.fromkeys(key for own in terms for key in own):
        usual, _ = Counter(own.get(key) for own in terms).most_common(1)[0]
        for result, own in zip(results, terms, strict=True):
            if own.get(key) != usual:
                found.setdefault(result.folder, []).append(f"{key} is {own.get(key)}, elsewhere {usual}")
    return {path: "; ".join(texts) for path, texts in found.items()}


def _terms(result: Result) -> dict[str, str]:
    """Terms that must be equal for comparable runs: claimed privacy, and data."""
    privacy = {"epsilon": plain(result.epsilon, 6) if math.isfinite(result.epsilon) else "inf"}
    privacy |= {key: str(result.privacy.get(key, "not stated")) for key in TERMS}
    data = {key: word(value) for key, value in _dotted(result.settings).items() if key.startswith("data.")}
    return privacy | data


def _title(key: str, keys: Sequence[str]) -> str:
    """Last word of a dotted key if it is unique."""
    last = key.rsplit(".", 1)[-1]
    return last if [other.rsplit(".", 1)[-1] for other in keys].count(last) == 1 else key


def _cell(value: Any) -> Any:
    return "" if value is None else value if isinstance(value, (str, float, int)) else json.dumps(value)


def _epsilon(row: Row) -> str:
    return "inf" if math.isinf(row.epsilon) else plain(row.epsilon)


def _spread(values: Sequence[float], scale: float, digits: int) -> str:
    if not values:
        return "–"
    mean = f"{scale * statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} +- {scale * statistics.stdev(values):.{digits}f}"


def _count(found: int, judged: int) -> str:
    return f"{found}/{judged}" if judged else "–"
