"""A run's models, metrics, figures and privacy statement as plain files for other programs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core.csv_text import csv_text
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import given_path, write_text, writing
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.report.lead import result_line
from dpcfl_net.report.page import run_figures
from dpcfl_net.report.svg.draw import draw
from dpcfl_net.report.theme import in_light
from dpcfl_net.results.models import BASE, FOLDER
from dpcfl_net.results.privacy_statement import statement, statement_text
from dpcfl_net.results.rounds import RoundMetrics, rounds_of
from dpcfl_net.results.run_files import item, mapping, report_command
from dpcfl_net.results.run_view import RunView, read_run

_SHARED = re.compile(rf"{BASE}|(cluster|client)_\d+")  # names of models that leave the clients
WIDTH = 760  # of a figure in pixels
BY_ROUND = (
    "round", "accuracy", "accuracy_worst", "accuracy_minority", "accuracy_central", "loss", "clusters", "ari", "epsilon_spent", "seconds", "paused_s",
    "bytes_up", "bytes_down", "missing", "late", "away",
)  # fmt: skip


def export(folder: Path | str, out: Path | str | None = None) -> list[Path]:
    """Write models, metrics, figures and the privacy statement of a run as files; files of an earlier export are replaced or removed.

    Personal models of clients stay where they are: the privacy statement does not cover them.

    Args:
        folder: The run folder.
        out: Where to write; None: `export` in the run folder.

    Returns:
        The files: models/*.safetensors, rounds.csv, clients.csv, figures/*.svg, privacy.json, privacy.txt. A run that has no
        models or no rounds yet lacks those files.

    Raises:
        ConfigError: As `read_run`, or if the run has no privacy statement yet, or `out` is the run folder, is empty or cannot be written.
        OSError: If the disk is full.
    """
    view, target = read_run(folder), given_path(out, "out") if out is not None else RunFolder(folder).export
    with writing(target):
        is_the_run = target.resolve() == Path(folder).resolve()
    if is_the_run:
        raise ConfigError(
            f"the folder to write is {target}: must be another one than the run's; the default is {RunFolder(folder).export}"
        )
    if "epsilon" not in (privacy := mapping(view.run, "privacy")):
        raise ConfigError(f"{folder} has no privacy statement yet; write it with: {report_command(Path(folder))}")
    with writing(target):
        (target / "figures").mkdir(parents=True, exist_ok=True)
    rounds = rounds_of(view)
    texts = {
        "privacy.json": json.dumps(privacy, indent=2, allow_nan=False) + "\n",
        "privacy.txt": f"{result_line(view)}\n{statement_text(statement(privacy))}",
    }
    if rounds:
        texts["rounds.csv"] = csv_text(BY_ROUND, ([_cell(getattr(one, key)) for key in BY_ROUND] for one in rounds))
        texts["clients.csv"] = csv_text(
            ("round", "client", "true_cluster", "cluster", "accuracy", "epsilon_spent"),
            (row for one in rounds for row in _clients(view, one)),
        )
    figures = [figure for own in run_figures(view).values() for figure in own]
    texts |= {
        f"figures/{figure.key}.svg": draw(figure.spec, WIDTH, in_light, title=figure.title, background="@surface") + "\n"
        for figure in figures
        if figure.spec is not None
    }
    for name, text in texts.items():
        write_text(target / name, text)
    written = [*_copy_models(Path(folder), target), *(target / name for name in texts)]
    _remove_stale(target, [figure.key for figure in figures], written)
    return written


def _remove_stale(target: Path, figures: Iterable[str], written: Sequence[Path]) -> None:
    """Remove files of an earlier export, of another run or round, that this one lacks; other files in the folder stay."""
    models = [path for path in (target / FOLDER).glob("*.safetensors") if _SHARED.fullmatch(path.stem)]
    named = [f"figures/{key}.svg" for key in figures]
    diagnostics = (target / "figures").glob("diagnostics-*.svg")
    for path in {*models, *diagnostics, *(target / name for name in ("rounds.csv", "clients.csv", *named))} - {*written}:
        with writing(path):
            path.unlink(missing_ok=True)


def _copy_models(folder: Path, target: Path) -> list[Path]:
    """Copy the models that left the clients."""
    shared = [path for path in sorted((folder / FOLDER).glob("*.safetensors")) if not path.stem.endswith("_personal")]
    copies = [target / FOLDER / path.name for path in shared]
    for path, copy in zip(shared, copies, strict=True):
        with writing(copy):
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
    return copies


def _clients(view: RunView, one: RoundMetrics) -> Iterable[Sequence[Any]]:
    spent, true = view.spent.get(one.round, []), view.true_clusters
    columns = (true, one.assignment, one.accuracy_by_client, spent)
    if any(columns[1:]):
        for client in range(view.clients):
            yield [one.round, client, *("" if (found := item(column, client)) is None else found for column in columns)]


def _cell(value: Any) -> Any:
    """A cell of a CSV file; numbers of clients are separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else value
