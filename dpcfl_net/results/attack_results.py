"""What an attack on a recorded run found, kept in the run folder and shown on its report page."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_bytes, write_atomically
from dpcfl_net.core.run_folder import RunFolder


@dataclass(frozen=True)
class AttackResult:
    """One attack or audit on one run: sentences for a person, a table, a picture.

    name: the file's name below RUN/attacks. headline: one sentence with the figure that counts. columns, rows: a table of
    strings, empty for none. figure: a plotly figure {data, layout, height} whose colours may be names such as "@c0" (see
    report/figures.py), or None; with `aspect`, width over height, `height` is the most that it takes. facts: the numbers
    themselves, for programs.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    title: str
    headline: str
    sentences: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    figure: dict[str, Any] | None = None
    caption: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, run: Path) -> Path:
        """Write RUN/attacks/NAME.json, in place of an earlier result of this name."""
        path = RunFolder(run).attack(self.name)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1))
        return path


def results(run: Path, notes: list[str]) -> list[AttackResult]:
    """Every result of a run folder, by name; where a file holds something else `notes` says so."""
    found = []
    for path in sorted(RunFolder(run).attacks.glob("*.json")):
        try:
            found.append(read_result(path))
        except ConfigError as error:
            notes.append(str(error))
    return found


def read_result(path: Path) -> AttackResult:
    """One result; ConfigError for a file that holds something else, or a figure or table that cannot be drawn."""
    try:
        found = TypeAdapter(AttackResult).validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is not the result of an attack: {where + ': ' if where else ''}{first['msg']}") from None
    if found.name != path.stem:
        raise ConfigError(f"{path} is not the result of an attack of this name, but of {found.name!r}")
    if any(len(row) != len(found.columns) for row in found.rows):
        raise ConfigError(f"{path}: rows must have {len(found.columns)} cells, as there are columns")
    sides: dict[str, Any] = {"data": list, "layout": dict, "height": (int, float), "aspect": (int, float)}
    figure = None if found.figure is None else {"aspect": 1, **found.figure}
    if figure is not None and not all(isinstance(figure.get(name), kind) for name, kind in sides.items()):
        raise ConfigError(f"{path}: figure must hold data (a list), layout (a mapping), height and, if any, aspect (numbers)")
    return found
