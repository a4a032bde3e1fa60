"""`dpcfl attack` and `dpcfl audit`: attack a recorded run, save the result in the run folder and print it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dpcfl_net.launch.cli.commands.parameters import MOST_CLIENTS, AsJson, DataRoot, RunFolder

if TYPE_CHECKING:
    from dpcfl_net.results.attack_results import AttackResult


def nan_oracle(folder: RunFolder, as_json: AsJson = False) -> None:
    """Infer whether a known record is in a batch.

    It uses only which updates are finite. It needs a run of threats/nan_oracle.
    """
    with _running():
        from dpcfl_net.attacks import nan_oracle

        result = nan_oracle.attack(folder)
    _show(folder, result, as_json)


def selections(
    folder: RunFolder,
    against: Annotated[Path | None, typer.Option(metavar="RUN2", help="second run for comparison")] = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Infer the clusters of clients from their private selections.

    It prints the measured success next to the exact theory. It needs a run of threats/selections_raw, _record or _client.
    """
    with _running():
        from dpcfl_net.attacks import selections

        result = selections.attack(folder, against, data_root)
    _show(folder, result, as_json)


def invert(
    folder: RunFolder,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="second run on the same records, shown in the same grid")
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_CLIENTS, help="number of images to reconstruct (default: 6, or all if there are fewer)"),
    ] = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Reconstruct images and labels from updates.

    It needs a run of threats/invert_raw or threats/invert_dp.
    """
    with _running():
        from dpcfl_net.attacks import reconstruction

        result = reconstruction.attack(folder, against, records, data_root)
    _show(folder, result, as_json)
    if against is not None:
        _keep(against, result)


def membership(
    folder: RunFolder,
    measure: Annotated[
        Literal["cosine", "loss"], typer.Option(help="what to compare of a record and an update: gradient or loss")
    ] = "cosine",
    records: Annotated[int, typer.Option(min=1, help="largest number of members, and of non-members, of each client")] = 100,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Infer which records a client trained on (FedMIA).

    It compares the updates of all clients and rounds. It needs a run with output.transcript=full, as threats/membership_raw and threats/membership_dp.
    """
    with _running():
        from dpcfl_net.attacks import membership as attacks

        result = attacks.attack(folder, measure, records, data_root)
    _show(folder, result, as_json)


def audit(folder: RunFolder, as_json: AsJson = False) -> None:
    """Measure a lower bound of epsilon with canaries.

    It needs a run with audit.canaries: of threats/audit_epsilon2, 5 or 10, audit_clients, audit_secure or audit_secure_clients, or your
    own. The exit code is 3 if the claim does not hold.
    """
    with _running():
        from dpcfl_net.attacks.audit.audit import audit_run

        result = audit_run(folder)
    _show(folder, result, as_json)
    raise typer.Exit(3 if result.facts["broken"] else 0)


def _running() -> AbstractContextManager[None]:
    """Show that an attack computes: some take a minute."""
    from dpcfl_net.launch.cli.steps import computing

    return computing("attacking")


def _show(run: Path, result: AttackResult, as_json: bool) -> None:
    """Save the result and print headline, sentences, table and path."""
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
    from dpcfl_net.launch.cli.terminal import terminal_width

    with messages_to_stderr(as_json):
        path = _keep(run, result)
    if as_json:
        shown = ("name", "title", "headline", "sentences", "columns", "rows", "facts")
        print_json({**{key: getattr(result, key) for key in shown}, "file": path})
        return
    print("\n".join([*_text(result, terminal_width()), str(path)]))


def _text(result: AttackResult, width: int | None) -> list[str]:
    """Headline, sentences and table as lines, broken for a terminal of that width."""
    import textwrap

    from dpcfl_net.results.tables import Table

    said = [result.headline, *result.sentences]
    if width is not None:
        said = [line for sentence in said for line in textwrap.wrap(sentence, width)]
    table = Table(result.title, result.columns, result.rows, keys=result.keys)
    return [*said, *(["", *table.lines(width), ""] if result.rows else [])]


def _keep(run: Path, result: AttackResult) -> Path:
    """Write the result to RUN/attacks, except it from the promise of the run, and rewrite its report."""
    from dpcfl_net.experiment.statement import ATTACKED
    from dpcfl_net.report.page import write_report
    from dpcfl_net.results.attack_results import has_attacks
    from dpcfl_net.results.summary import add_not_covered

    path = result.write(run)
    if has_attacks(run):
        add_not_covered(run, ATTACKED)
    write_report(run)
    return path
