"""`dpcfl attack` and `dpcfl audit`: run an attack on a recorded run, keep its result in the run folder, print it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import MOST_CLIENTS, DataRoot, RunFolder

if TYPE_CHECKING:
    from dpcfl_net.results.attack_results import AttackResult


def nan_oracle(folder: RunFolder) -> None:
    """Infer membership of a known record from which updates are finite (configs/threats/nan_oracle.yaml)."""
    from dpcfl_net.attacks import nan_oracle

    _show(folder, nan_oracle.attack(folder))


def selections(
    folder: RunFolder,
    against: Annotated[Path | None, typer.Option(metavar="RUN2", help="a second run, for comparison")] = None,
    data_root: DataRoot = None,
) -> None:
    """Infer clusters from repeated private choices, beside exact theory (configs/threats/selections_*.yaml)."""
    from dpcfl_net.attacks import selections

    _show(folder, selections.attack(folder, against, None if data_root is None else str(data_root)))


def invert(
    folder: RunFolder,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="a second run on the same records, shown in the same grid")
    ] = None,
    records: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of images to reconstruct")] = 6,
    data_root: DataRoot = None,
) -> None:
    """Reconstruct images and labels from updates (configs/threats/invert_*.yaml)."""
    from dpcfl_net.attacks import reconstruction

    result = reconstruction.attack(folder, against, records, None if data_root is None else str(data_root))
    _show(folder, result)
    if against is not None:
        _keep(against, result)


def audit(folder: RunFolder) -> None:
    """Bound epsilon from below with the canaries of a run (configs/threats/audit_*.yaml); exit code 3 if its claim is violated."""
    from dpcfl_net.attacks.audit.audit import audit_run

    result = audit_run(folder)
    _show(folder, result)
    raise typer.Exit(3 if result.facts["broken"] else 0)


def _show(run: Path, result: AttackResult) -> None:
    """Keep the result and print headline, sentences, table and path."""
    path = _keep(run, result)
    print("\n".join([result.headline, *result.sentences, *(["", *_table(result), ""] if result.rows else []), str(path)]))


def _table(result: AttackResult) -> list[str]:
    """The result's table in columns of equal width."""
    lines = [result.columns, *result.rows]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip() for line in lines]


def _keep(run: Path, result: AttackResult) -> Path:
    """Write the result to RUN/attacks and rewrite the run's report with it."""
    from dpcfl_net.report.page import write_report

    path = result.write(run)
    write_report(run)
    return path
