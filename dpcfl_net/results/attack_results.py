"""Results of attacks on recorded runs, kept in the run folder and shown on the report page."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_bytes
from dpcfl_net.core.run_folder import RunFolder

AUDIT = "audit"  # name of the result of an audit


@dataclass(frozen=True)
class AttackResult:
    """Result of one attack or audit on one run.

    Attributes:
        name: Name of its file in RUN/attacks, without the suffix.
        title: Heading on the report page.
        headline: One sentence with the main figure.
        sentences: Explanation, one sentence per item.
        columns: Column titles of a table; empty for no table.
        rows: Cells of the table as text.
        figure: Plotly figure {data, layout, height}, or None. Colours may be names such as "@c0" (see report/figures.py). With
            `aspect` (width over height), `height` is the largest height in pixels.
        caption: Caption of the figure.
        facts: Numbers for programs.
        keys: Number of the table's first columns that tell rows apart.
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
    keys: int = 1

    def write(self, run: Path) -> Path:
        """Write RUN/attacks/NAME.json; an earlier result of this name is replaced.

        Args:
            run: Run folder.

        Returns:
            The file.
        """
        path = RunFolder(run).attack(self.name)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1))
        return path


def has_attacks(run: Path) -> bool:
    """Return True if a run folder has the result of an attack; an audit is none, since its canaries are no records of clients.

    Args:
        run: Run folder.
    """
    return any(path.stem != AUDIT for path in RunFolder(run).attacks.glob("*.json"))


def results(run: Path, notes: list[str]) -> list[AttackResult]:
    """Read all results of a run folder, sorted by name.

    Args:
        run: Run folder.
        notes: Receives a sentence for each file that is not a result.
    """
    found = []
    for path in sorted(RunFolder(run).attacks.glob("*.json")):
        try:
            found.append(read_result(path))
        except ConfigError as error:
            notes.append(str(error))
    return found


def read_result(path: Path) -> AttackResult:
    """Read one result.

    Raises:
        ConfigError: If the file is not a result, or its table or figure is malformed.
    """
    try:
        found = TypeAdapter(AttackResult).validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is not the result of an attack: {where + ': ' if where else ''}{first['msg']}") from None
    if found.name != path.stem:
        raise ConfigError(f"{path} is not the result of an attack of this name, but of {found.name!r}")
    if any(len(row) != len(found.columns) for row in found.rows):
        raise ConfigError(f"{path}: every row must have {len(found.columns)} cells, one per column")
    sides: dict[str, Any] = {"data": list, "layout": dict, "height": (int, float), "aspect": (int, float)}
    figure = None if found.figure is None else {"aspect": 1, **found.figure}
    if figure is not None and not all(isinstance(figure.get(name), kind) for name, kind in sides.items()):
        raise ConfigError(f"{path}: figure must hold data (a list), layout (a mapping), height and, if any, aspect (numbers)")
    return found
