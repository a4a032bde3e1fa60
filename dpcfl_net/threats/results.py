"""What an attack on a recorded run found, kept in the run folder and shown on its report page."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpcfl_net.errors import ConfigError
from dpcfl_net.runlog import write_atomically

FOLDER = "attacks"


@dataclass(frozen=True)
class AttackResult:
    """One attack or audit on one run: sentences for a person, a table, a picture.

    name: the file's name below RUN/attacks. headline: one sentence with the figure that counts. columns, rows: a table of
    strings, empty for none. figure: a plotly figure {data, layout, height} whose colours may be names such as "@c0" (see
    report/figures.py), or None. facts: the numbers themselves, for programs.
    """

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
        path = run / FOLDER / f"{self.name}.json"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1))
        return path


def results(run: Path) -> list[AttackResult]:
    """Every result of a run folder, by name; ConfigError for a file that holds something else."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            found.append(AttackResult(**json.loads(path.read_text())))
        except (json.JSONDecodeError, TypeError) as error:
            raise ConfigError(f"{path} is not the result of an attack: {error}") from None
    return found
