"""`dpcfl sweep`: run a grid of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands import completion
from dpcfl_net.launch.cli.commands.parameters import (
    MOST_CELLS,
    AsJson,
    Config,
    LogLevel,
    Quiet,
)


def sweep(
    config: Config,
    axes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE,VALUE",
            help="settings and their values, e.g. privacy.epsilon=3,5,15 seed=0:4 algorithm=r-dpcfl,local",
            autocompletion=completion.overrides,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="parent of the sweep's folder and of the run store shared by all sweeps")] = Path(
        "runs"
    ),
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_CELLS, help="cells at once; default: 1 on this machine, else as many as fit"),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            help="where cells run: local, slurm or ray",
            autocompletion=completion.one_of(("local", "slurm", "ray")),
        ),
    ] = "local",
    collect: Annotated[
        bool, typer.Option("--collect", help="print the state of all cells and write the report; start nothing")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="local: list the runs and which are finished; slurm: print the batch script; start nothing"
        ),
    ] = False,
    cpus: Annotated[int, typer.Option(min=1, max=10_000, help="slurm, ray: CPUs of each cell")] = 1,
    gpus: Annotated[int, typer.Option(min=0, max=10_000, help="slurm, ray: GPUs of each cell")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="slurm, ray: memory of each cell, for example 4G (default: no request)")
    ] = None,
    time: Annotated[str, typer.Option(help="slurm: time limit of each cell; an interrupted cell is requeued")] = "1:00:00",
    partition: Annotated[str | None, typer.Option(help="slurm: partition (default: the cluster's)")] = None,
    account: Annotated[str | None, typer.Option(help="slurm: account (default: the user's)")] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="KEY=VALUE", help="slurm: a further option of sbatch; repeatable"),
    ] = None,
    as_json: AsJson = False,
    log_level: LogLevel = None,
    quiet: Quiet = False,
) -> None:
    """Run every combination of settings.

    It skips finished runs and resumes stopped ones.
    """
    from dpcfl_net.launch.cli import sweep as sweeps
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
    from dpcfl_net.launch.placement.slurm_batch import Resources
    from dpcfl_net.launch.sweeps import Sweep

    resources = Resources(1, cpus, gpus, time, memory, partition, account, tuple(slurm or ()))
    sweeps.check_options(on, resources, collect=collect, dry_run=dry_run)
    with messages_to_stderr(as_json, quiet) as stdout:

        def tell(document: sweeps.Document) -> None:
            if as_json:
                print_json(document(), stdout)

        if on == "local" and not collect:
            plan = Sweep.of(config, axes or [], out)
            code = sweeps.dry_run(plan, tell) if dry_run else sweeps.sweep(plan, jobs or 1, tell)
        else:
            plan = sweeps.plan(config, axes or [], out, on, gpus)
            if collect:
                code = sweeps.collect(plan, tell)
            elif on == "slurm":
                code = sweeps.submit(plan, resources, jobs, tell, dry_run=dry_run)
            else:
                code = sweeps.run_on_ray(plan, resources, jobs, tell)
    raise typer.Exit(code)
