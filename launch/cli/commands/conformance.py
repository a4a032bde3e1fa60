"""`dpcfl conformance`: check the privacy claim of a training function of another program, or answers of another accountant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import AsJson

if TYPE_CHECKING:
    from dpcfl_net.attacks.conformance.kit import Options
    from dpcfl_net.attacks.conformance.vectors import Answer

MOST_SEED = 2**63 - 1


def conformance(
    adapter: Annotated[
        str | None,
        typer.Argument(metavar="FUNCTION", help="module:function or path/to/file.py:function that trains on given records"),
    ] = None,
    claim: Annotated[Path | None, typer.Argument(metavar="CLAIM", help="YAML file of its claim")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="fewer calls of the function; small violations can be overlooked")
    ] = False,
    calls: Annotated[
        int | None,
        typer.Option(min=5, max=1_000_000, help="largest number of calls; checks with too few are undecided (default: 500)"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_SEED, help="repeatable records and, for a function with a seed, repeatable results"),
    ] = None,
    as_json: AsJson = False,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="also write an HTML page")] = None,
    accounting: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="check the answers of another accountant to the vectors in this JSON file"),
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write accounting vectors with bounds; takes about a minute")
    ] = None,
) -> None:
    """Test the privacy claim of another program.

    Checks accounting, clipping, sampling and noise of a training function, and audits it with canaries. Exit code 3 if a check fails,
    4 if none fails and one is undecided.
    """
    from dpcfl_net.core.errors import ConfigError

    wanted = [
        ("FUNCTION" if claim is None else "FUNCTION and CLAIM", adapter is not None),
        ("--accounting", accounting is not None),
        ("--vectors", vectors is not None),
    ]
    given = [name for name, present in wanted if present]
    if len(given) != 1 or (adapter is None) != (claim is None):
        what = " and ".join(given) or "nothing"
        raise ConfigError(f"{what} given: give FUNCTION and CLAIM, or --accounting FILE, or --vectors FILE")
    if adapter is None and (quick or calls is not None or seed is not None or page is not None):
        raise ConfigError("--quick, --calls, --seed and --page are for a FUNCTION and its CLAIM")
    if vectors is not None:
        _write_vectors(vectors, as_json)
    elif accounting is not None:
        _judge_vectors(accounting, as_json)
    elif adapter is not None and claim is not None:
        _check(adapter, claim, _options(quick, calls, seed), as_json, page)


def _options(quick: bool, calls: int | None, seed: int | None) -> Options:
    from dpcfl_net.attacks.conformance.kit import Options
    from dpcfl_net.attacks.conformance.plan import MOST_CALLS

    return Options(quick, MOST_CALLS if calls is None else calls, seed)


def _check(adapter: str, claim: Path, options: Options, as_json: bool, page: Path | None) -> None:
    """Run the kit, print the report and exit with its code."""
    from textwrap import fill

    from dpcfl_net.attacks.conformance import kit
    from dpcfl_net.attacks.conformance import page as pages
    from dpcfl_net.attacks.conformance.claim import read_claim
    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.launch.cli.terminal import terminal_width

    width = min(pages.WIDTH, terminal_width() or pages.WIDTH)
    report = kit.run(adapter, read_claim(claim), options, lambda line: typer.echo(f"{fill(line, width)}\n", err=as_json))
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(pages.text(report, width))
    if page is not None:
        pages.write(page, report)
        typer.echo(str(page), err=as_json)
    raise typer.Exit(report.exit_code)


def _write_vectors(path: Path, as_json: bool) -> None:
    from dpcfl_net.attacks.conformance.vectors import document, reference
    from dpcfl_net.core.files import write_text
    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.launch.cli.steps import computing

    with computing("computing bounds"):
        found = document(reference())
    count = len(found["vectors"])
    write_text(path, json.dumps(found, indent=1) + "\n")
    if as_json:
        print_json({"file": str(path), "vectors": count})
    else:
        typer.echo(f'{path}: {count} vectors. Fill in each "epsilon", then: dpcfl conformance --accounting {path}')


def _judge_vectors(path: Path, as_json: bool) -> None:
    """Print a line for each vector, and exit with 3 if an answer is too small, 4 if none is and one is undecided."""
    from dpcfl_net.attacks.conformance.findings import FAIL, UNDECIDED
    from dpcfl_net.attacks.conformance.vectors import judge
    from dpcfl_net.launch.cli.json_output import print_json

    answers = judge(path, lambda answer: None if as_json else typer.echo(_line(answer)))
    verdicts = [answer.verdict for answer in answers]
    if as_json:
        entries = [
            {"name": each.vector.name, "adjacency": each.vector.adjacency, "verdict": each.verdict, "epsilon": each.vector.answer,
             "epsilon_lower": each.lower, "epsilon_upper": each.upper, "sentence": each.sentence}
            for each in answers
        ]  # fmt: skip
        print_json({"failed": verdicts.count(FAIL), "undecided": verdicts.count(UNDECIDED), "vectors": entries})
    else:
        typer.echo(f"{len(answers)} vectors: {verdicts.count(FAIL)} answers too small, {verdicts.count(UNDECIDED)} undecided")
    raise typer.Exit(3 if FAIL in verdicts else 4 if UNDECIDED in verdicts else 0)


def _line(answer: Answer) -> str:
    vector = answer.vector
    if vector.answer is None:
        return f"{answer.verdict:14}  {vector.name} ({vector.adjacency}): no answer"
    limits = f"{answer.lower:.5g} to {answer.upper:.5g}"
    return f"{answer.verdict:14}  {vector.name} ({vector.adjacency}): {vector.answer:.5g}, bounds {limits}: {answer.sentence}"
