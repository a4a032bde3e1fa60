"""`dpcfl launch`: run an experiment with workers on other hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands import completion
from dpcfl_net.launch.cli.commands.parameters import (
    NO_CONFIG,
    AsJson,
    LogLevel,
    OptionalConfig,
    Out,
    Overrides,
    Quiet,
    Resume,
)  # fmt: skip


def launch(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option(
            help="where workers run: local, ray, slurm or ssh",
            autocompletion=completion.one_of(("local", "ray", "slurm", "ssh")),
        ),
    ] = "local",
    hosts: Annotated[
        Path | None,
        typer.Option(help="ssh: YAML file of the hosts, as hosts: [{name: a, address: me@a.example.org, workers: 8}]"),
    ] = None,
    address: Annotated[str | None, typer.Option(help="address that workers connect to (default: auto-detected)")] = None,
    bind: Annotated[str | None, typer.Option(help="address to listen on (default: --address; 0.0.0.0: all interfaces)")] = None,
    ports: Annotated[str, typer.Option(help="ports of coordinator and observer; 0: any free port")] = "0,0",
    root: Annotated[str | None, typer.Option(help="ray, slurm: folder for keys and ledgers on each host")] = None,
    python: Annotated[str | None, typer.Option(help="slurm: Python interpreter on the nodes (default: this one)")] = None,
    cpus_per_worker: Annotated[float, typer.Option(help="ray: CPUs per worker process")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(help="ray: GPUs per worker process; fractions allowed")] = 0.0,
    ray_wait: Annotated[
        float, typer.Option(help="ray: seconds to wait for nodes, for example of an autoscaling cluster")
    ] = 60.0,
    out: Out = Path("runs"),
    resume: Resume = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="contact the hosts, check their GPUs, and print which client runs where; start nothing"),
    ] = False,
    sbatch: Annotated[Path | None, typer.Option(help="slurm: write a batch script to this file, start nothing")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="--sbatch: number of nodes")] = 1,
    cpus: Annotated[int, typer.Option(min=1, max=10_000, help="--sbatch: CPUs of each node")] = 1,
    gpus: Annotated[int, typer.Option(min=0, max=10_000, help="--sbatch: GPUs of each node")] = 0,
    time: Annotated[str, typer.Option(help="--sbatch: time limit in SLURM's format, above 2 minutes")] = "1:00:00",
    memory: Annotated[
        str | None, typer.Option(help="--sbatch: memory of each node, for example 4G (default: no request)")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="--sbatch: partition (default: the cluster's)")] = None,
    account: Annotated[str | None, typer.Option(help="--sbatch: account (default: the user's)")] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option("--slurm", metavar="KEY=VALUE", help="--sbatch: a further option of sbatch; repeatable"),
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="slurm, in a batch job: requeue the job when it is interrupted, then resume its run"),
    ] = False,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree", help="run an aggregator on each host: its workers connect to it, and it alone to the coordinator"
        ),
    ] = False,
    as_json: AsJson = False,
    log_level: LogLevel = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with workers on other hosts.

    The coordinator and the observer run on this machine.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import launch as launching
    from dpcfl_net.launch.cli import run as runs
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
    from dpcfl_net.launch.placement.slurm_batch import Resources

    options = launching.Options(
        on, hosts, address, bind, launching.port_pair(ports), root, python, cpus_per_worker, gpus_per_worker, ray_wait, requeue,
        tree,
    )  # fmt: skip
    resources = Resources(nodes, cpus, gpus, time, memory, partition, account, tuple(slurm or ()))
    if resume is not None and (config is not None or overrides or dry_run or sbatch):
        raise ConfigError("--resume takes no configuration, no overrides, no --dry-run and no --sbatch: the job is signed")
    if resume is not None and requeue:
        raise ConfigError("--requeue is for a batch job that starts a run; it resumes that run itself, without --resume")
    if resume is None and config is None:
        raise ConfigError(NO_CONFIG)
    if sbatch is None and (given := resources.given()):
        raise ConfigError(f"{', '.join(given)}: only with --sbatch FILE")
    if sbatch is not None and on != "slurm":
        raise ConfigError(f"--sbatch belongs to --on slurm; --on is {on!r}")
    if sbatch is not None and dry_run:
        raise ConfigError("--sbatch writes a script and --dry-run contacts the hosts: give one of them")
    with messages_to_stderr(as_json, quiet) as stdout:
        code, found = 0, {}
        if config is None:
            assert resume is not None
            code = launching.resume(resume, options)
            found = {"folder": resume, **runs.document(resume)}
        elif sbatch is not None:
            launching.write_script(config, overrides or [], out, options, sbatch, resources)
            found = {"file": sbatch}
        elif dry_run:
            found = launching.dry_run(config, overrides or [], options)
            print("\n".join(launching.dry_run_lines(found, on)))
        elif requeue:
            from dpcfl_net.launch.cli import slurm_job

            code, found = slurm_job.run(config, overrides or [], out, options)
        else:
            code, found = launching.new(config, overrides or [], out, options)
    if as_json:
        print_json(found, stdout)
    raise typer.Exit(code)
