"""`dpcfl bench`: speed and memory on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcfl_net.launch.cli.commands import completion
from dpcfl_net.launch.cli.commands.parameters import MOST_CLIENTS, AsJson

if TYPE_CHECKING:
    from dpcfl_net.launch.bench.figures import Result
    from dpcfl_net.launch.bench.options import Options

RUNS = ("live", "gpu")
# As the registry of rows has them, for completion without loading it.
BENCHMARKS = (
    "dpsgd", "resnet", "epoch", "start", "clients", "curves", "tree", "noop", "round", "mixture", "aggregate", "wire", "secure",
    "accounting", "all", *RUNS,
)  # fmt: skip


def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="dpsgd, resnet, epoch, start, clients, curves, tree, noop, round, mixture, aggregate, wire, secure or accounting: one "
            "row; all: every row; live: a thousand clients on this machine; gpu: 21 workers on one GPU",
            autocompletion=completion.one_of(BENCHMARKS),
        ),
    ] = "dpsgd",
    against: Annotated[
        str | None, typer.Option(help="compare only with these: opacus,flower,pfl,sklearn,grpc (default: all installed)")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, max=1_000, help="repetitions (default: depends on the row)")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="small cases, once each: tests the rows; the figures mean nothing")
    ] = False,
    as_json: AsJson = False,
    markdown: Annotated[
        Path | None, typer.Option(help="also write the tables to this Markdown file, or into its part for them")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, max=MOST_CLIENTS, help="live: number of clients (default: 1,000)")
    ] = None,
    sampled: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_CLIENTS, help="live: clients per round, and largest number of connected clients (default: 100)"
        ),
    ] = None,
    per_worker: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_CLIENTS, help="live: clients per process (default: 1, more with 2,000 clients)"),
    ] = None,
    slots_per_gpu: Annotated[
        int | None, typer.Option(min=1, max=1_000, help="gpu: workers that compute at the same time (default: 1)")
    ] = None,
) -> None:
    """Measure speed and memory on this machine.

    For comparison it also measures other libraries, if they are installed: pip install -e '.[bench]' in a checkout.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.bench.options import Options
    from dpcfl_net.launch.bench.options import against as parse
    from dpcfl_net.launch.bench.registry import ROWS
    from dpcfl_net.launch.cli import bench_gpu, bench_live
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json

    names = (*ROWS, "all", *RUNS)
    if what not in names:
        raise ConfigError(f"unknown benchmark {what!r}: must be one of {', '.join(names)}")
    _refuse_others(
        what,
        {
            "rows": {"--against": against, "--repeats": repeats, "--quick": quick, "--markdown": markdown},
            "live": {"--clients": clients, "--sampled": sampled, "--per-worker": per_worker},
            "gpu": {"--slots-per-gpu": slots_per_gpu},
        },
    )
    clients, sampled = clients or 1000, sampled or 100
    if sampled > clients:
        raise ConfigError(f"--sampled is {sampled}: must be at most --clients, here {clients}")
    if what in RUNS:
        with messages_to_stderr(as_json) as stdout:
            live = what == "live"
            found = bench_live.live(clients, sampled, group=per_worker) if live else bench_gpu.gpu(slots_per_gpu or 1)
        if as_json:
            print_json(found, stdout)
    else:
        _rows(list(ROWS) if what == "all" else [what], Options(repeats, quick, parse(against)), as_json, markdown)


def _refuse_others(what: str, options: Mapping[str, Mapping[str, object]]) -> None:
    """ConfigError if an option was given that what is measured does not have.

    Args:
        what: Name of a row, all, or one of RUNS.
        options: Owner of options (rows, or one of RUNS) to their values.
    """
    from dpcfl_net.core.errors import ConfigError

    own = what if what in RUNS else "rows"
    for owner, values in options.items():
        if owner != own and (given := [name for name, value in values.items() if value]):
            raise ConfigError(f"{', '.join(given)}: only for {owner}, not for {what}")


def _rows(names: list[str], options: Options, as_json: bool, markdown: Path | None) -> None:
    """Measure rows, print each when it is done, and write the Markdown file; of several rows, one that fails is left out.

    Raises:
        DpcflError: If the only row fails.
        RunFailed: If some of several rows fail, at the end.
    """
    from dpcfl_net.core.errors import DpcflError, RunFailed
    from dpcfl_net.launch.bench import machine, registry, tables
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json

    here = machine.describe()
    if not as_json:
        typer.echo(f"{machine.headline(here)}\n{tables.EXPLAINED}\n")
    results: list[Result] = []
    failed: list[str] = []
    for name in names:
        try:
            with messages_to_stderr(as_json):
                results.append(registry.measure(name, options))
        except DpcflError as error:
            if len(names) == 1:
                raise
            failed.append(name)
            typer.echo(f"{name}: not measured: {error}\n", err=True)
            continue
        if not as_json:
            typer.echo(tables.text(results[-1]) + "\n")
    if as_json:
        print_json({"machine": here, "rows": [result.as_json() for result in results]})
    if markdown is not None:
        tables.write(markdown, results, here)
    if failed:
        raise RunFailed(f"not measured: {', '.join(failed)}; measure them again with: dpcfl bench {failed[0]}")
