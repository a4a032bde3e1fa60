"""Cells of a sweep: all combinations of the axes, each a checked configuration with its run folder in the store."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net import __version__
from dpcfl_net.algorithms.base import Options
from dpcfl_net.core import plugin_source, yaml_file
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.plugins import short
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_options import has_option, is_changed
from dpcfl_net.experiment.config_overrides import change
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.own_code import check_code, own_code
from dpcfl_net.launch.sweep_axes import MOST_CELLS
from dpcfl_net.training.devices import CPU, deal

Source = str | Path | Mapping[str, Any] | Config  # a configuration, as `configuration.load` accepts it


@dataclass(frozen=True)
class Cell:
    """One point of a grid.

    Attributes:
        values: Values on the axes, by dotted key.
        label: The axes with several values, as key=value; "as configured" without axes.
        config: The configuration.
    """

    values: dict[str, Any]
    label: str
    config: Config


def grid(source: Source, axes: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Build and check every combination of the axes, the last axis fastest.

    An option that has one value in all cells needs an effect in one cell at least; in cells without an effect it has its default.

    Args:
        source: Configuration, as `configuration.load` accepts it.
        axes: Values as YAML text, by dotted key.

    Raises:
        ConfigError: With every problem and its cells.
    """
    if (count := math.prod(map(len, axes.values()))) > MOST_CELLS:
        raise ConfigError(f"the axes have {count:,} combinations, must be at most {MOST_CELLS:,}")
    built: dict[tuple[str, ...], Cell | ConfigError] = {}
    for texts in itertools.product(*axes.values()):
        try:
            built[texts] = _cell(source, axes, texts)
        except ConfigError as error:
            built[texts] = error
    valid = [cell.config.options for cell in built.values() if isinstance(cell, Cell)]
    problems: dict[str, list[str]] = {}
    for texts, found in built.items():
        if isinstance(found, Cell):
            continue
        try:
            built[texts] = _cell_without(source, axes, texts, found, valid)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(_label(axes, texts))
    if problems:
        raise ConfigError([f"{problem} (cell {first_of(labels)})" for problem, labels in problems.items()])
    cells = [cell for cell in built.values() if isinstance(cell, Cell)]
    check_code([cell.config for cell in cells])
    return _distinct(cells)


def cell_at(source: Source, axes: Mapping[str, Sequence[str]], index: int) -> Cell:
    """Build one combination of the axes.

    Args:
        source: Configuration, as `configuration.load` accepts it.
        axes: Values as YAML text, by dotted key.
        index: Position in the grid, from 0.

    Raises:
        ConfigError: If there is no such combination, or if its configuration is invalid.
    """
    texts = next(itertools.islice(itertools.product(*axes.values()), index, None), None)
    if texts is None:
        raise ConfigError(f"cell {index}: the sweep has {math.prod(map(len, axes.values()))} cells, counted from 0")
    try:
        return _cell(source, axes, texts)
    except ConfigError as error:
        return _cell_without(source, axes, texts, error)


def cell_folder(config: Config, store: Path) -> Path:
    """Return the folder of a configuration's run in the store."""
    return store / f"{short(config.algorithm['name'])}-{job_key(config)[:16]}"


def job_key(config: Config) -> str:
    """Return the sha256 (hex) of all that can change the result of a run: not names, folders, slots and timeouts.

    It covers the source code of an algorithm or a model of the user's own, as this process has imported it.
    """
    settings = config.model_dump(mode="json", exclude={"name": True, "output": True, "algorithms": True, "data": {"root"}})
    # The result and its privacy statement depend on quorum and transport, but not on slots and timeouts.
    settings["runtime"] = {key: settings["runtime"][key] for key in ("quorum", "transport")}
    # A GPU computes other bits than the CPU. One that the configuration names may be on another host.
    if config.runtime.device.startswith("cuda") or deal(config.runtime, 1) != [CPU]:
        settings["runtime"]["device"] = "cuda"
    # The job signs the groups of aggregators, which decide the last bits of a mean.
    if groups := config.runtime.groups(config.data.client_count):
        settings["runtime"]["aggregators"] = [len(group) for group in groups]
    sources = [plugin_source.sha256(field, name) for field, name in own_code(config)]
    return hashlib.sha256(canonical_json([__version__, settings, *sources])).hexdigest()


def _cell(source: Source, axes: Mapping[str, Sequence[str]], texts: Sequence[str], defaults: Collection[str] = ()) -> Cell:
    items = [f"{key}={text}" for key, text in zip(axes, texts, strict=True)]
    values = {key: yaml_file.parse(text, f"axis {key}") for key, text in zip(axes, texts, strict=True)}
    return Cell(values, _label(axes, texts), configuration.load(source, items, defaults))


def _cell_without(
    source: Source,
    axes: Mapping[str, Sequence[str]],
    texts: Sequence[str],
    error: ConfigError,
    others: Sequence[Options] | None = None,
) -> Cell:
    """Build a cell without the common options that have no effect in it.

    Args:
        source: As in `cell_at`.
        axes: As in `cell_at`.
        texts: The cell's values.
        error: The error of the cell with these options.
        others: Options of the valid cells, in one of which such an option needs an effect; None: it has one.

    Raises:
        ConfigError: The error, if an axis gives such an option several values or if it has no effect in other cells; or a new one.
    """
    own = change({}, [f"{key}={text}" for (key, values), text in zip(axes.items(), texts, strict=True) if len(values) > 1])
    common = [option for option in configuration.idle_options(error) if not has_option(own, option)]
    if others is not None:
        common = [option for option in common if any(is_changed(options, option) for options in others)]
    if not common:
        raise error
    return _cell(source, axes, texts, common)


def _label(axes: Mapping[str, Sequence[str]], texts: Sequence[str]) -> str:
    """Name the axes with several values; all axes if none has; without axes, the only cell."""
    items = {key: f"{key}={text}" for key, text in zip(axes, texts, strict=True)}
    return " ".join(item for key, item in items.items() if len(axes[key]) > 1) or " ".join(items.values()) or "as configured"


def _distinct(cells: list[Cell]) -> list[Cell]:
    """Return the cells; ConfigError if two are the same job, because one of their axes has no effect."""
    seen: dict[str, Cell] = {}
    problems = []
    for cell in cells:
        other = seen.setdefault(job_key(cell.config), cell)
        if other is not cell:
            problems.append(
                f"cells {other.label!r} and {cell.label!r} are the same job: the setting in which they differ has no effect"
            )
    if problems:
        raise ConfigError(problems)
    return cells


def first_of(labels: Sequence[str]) -> str:
    """Name the first of several cells or trials, and count the others."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
