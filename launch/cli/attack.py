"""What `dpcfl attack` does: run one attack on a recorded run, keep the result in its folder, say what it found."""

from __future__ import annotations

from pathlib import Path

from dpcfl_net.results.attack_results import AttackResult


def nan_oracle(run: Path) -> None:
    """Was a known record in the batches of each recorded update?"""
    from dpcfl_net.attacks import nan_oracle

    show(run, nan_oracle.attack(run))


def selections(run: Path, against: Path | None, root: Path | None) -> None:
    """Which model is each client nearest to?"""
    from dpcfl_net.attacks import selections

    show(run, selections.attack(run, against, None if root is None else str(root)))


def audit(run: Path) -> int:
    """Epsilon from below, and whether the run's claim stands: 3 if it does not, else 0."""
    from dpcfl_net.attacks.audit.audit import audit_run

    result = audit_run(run)
    show(run, result)
    return 3 if result.facts["broken"] else 0


def table(result: AttackResult) -> list[str]:
    """A result's table in columns of equal width."""
    lines = [result.columns, *result.rows]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip() for line in lines]


def invert(run: Path, against: Path | None, records: int, root: Path | None) -> None:
    """Which labels and images do the updates hold? A comparison is kept in both run folders."""
    from dpcfl_net.attacks import reconstruction

    result = reconstruction.attack(run, against, records, None if root is None else str(root))
    show(run, result)
    if against is not None:
        keep(against, result)


def show(run: Path, result: AttackResult) -> None:
    """Keep the result and print it: headline, sentences, table, where it is."""
    path = keep(run, result)
    print("\n".join([result.headline, *result.sentences, *(["", *table(result), ""] if result.rows else []), str(path)]))


def keep(run: Path, result: AttackResult) -> Path:
    """Write the result to RUN/attacks, where it is found from then on, and the run's report anew."""
    from dpcfl_net.report.page import write_report

    path = result.write(run)
    write_report(run)
    return path
