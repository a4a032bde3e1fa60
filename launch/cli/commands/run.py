"""`dpcfl run`, `quickstart`, `job`, `inspect`, `verify`, `export` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcfl_net.launch.cli.commands import completion
from dpcfl_net.launch.cli.commands.parameters import (
    NO_CONFIG,
    AsJson,
    Config,
    DataRoot,
    LogLevel,
    OptionalConfig,
    Out,
    Overrides,
    Quiet,
    Resume,
    RunFolder,
    Track,
    say_if_packaged,
)

if TYPE_CHECKING:
    from dpcfl_net.report.trackers.base import Tracker


def run(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    out: Out = Path("runs"),
    resume: Resume = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print privacy plan and cost; start nothing")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="run everything in one process, for breakpoints; no transcript")
    ] = False,
    chaos: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of faults to inject, for tests, as {seed: 0, processes: [{kill: client 3, at: {round: 2, step: sent}}]}"
        ),
    ] = None,
    track: Track = None,
    as_json: AsJson = False,
    log_level: LogLevel = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment on this machine.

    It starts a coordinator, an observer and one worker process per client.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json

    if resume is not None and (config is not None or overrides or dry_run):
        raise ConfigError("--resume takes no configuration, no overrides and no --dry-run: the job is signed")
    if resume is None and config is None:
        raise ConfigError(NO_CONFIG)
    with messages_to_stderr(as_json, quiet) as stdout:
        code = 0
        if config is not None and dry_run:
            found = _dry_run(config, overrides or [], shown=not as_json, quiet=quiet)
        else:
            _load_libraries(warm=not debug)
            from dpcfl_net.launch.cli import run as runs

            trackers = _trackers(track)
            if config is not None:
                code, document, folder = runs.new_run(config, overrides or [], out, debug=debug, chaos=chaos, trackers=trackers)
                found = {"folder": folder, **document}
            else:
                assert resume is not None
                code = runs.resume(resume, debug=debug, chaos=chaos, trackers=trackers)
                found = {"folder": resume, **runs.document(resume)}
    if as_json:
        print_json(found, stdout)
    raise typer.Exit(code)


def _dry_run(config: Path, overrides: list[str], *, shown: bool, quiet: bool) -> dict[str, Any]:
    """Return the privacy plan and the cost of a run; print them if `shown`."""
    from dpcfl_net.launch.cli import estimate
    from dpcfl_net.launch.cli import run as runs
    from dpcfl_net.launch.cli.steps import preparing

    with preparing(quiet) as on_step:
        found = runs.dry_run(config, overrides, on_step)
    if shown:
        print("\n".join(estimate.lines(found)))
    print("nothing was started; run the same command without --dry-run to start the run")
    return found


def _trackers(texts: list[str] | None) -> list[Tracker]:
    if not texts:
        return []
    from dpcfl_net.report.trackers.named import open_trackers

    return open_trackers(texts)


def quickstart(
    out: Annotated[Path, typer.Option(help="parent of the run folders")] = Path("runs"),
    config: Annotated[
        Path,
        typer.Option(
            help="YAML file, or a name that `dpcfl configs` lists",
            autocompletion=completion.configurations,
            callback=say_if_packaged,
        ),
    ] = Path("quickstart"),
    as_json: AsJson = False,
    log_level: LogLevel = None,
    quiet: Quiet = False,
) -> None:
    """Run an example: three algorithms at one epsilon.

    It runs R-DPCFL, Global and Local on scikit-learn's digits and downloads nothing.
    """
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json

    with messages_to_stderr(as_json, quiet) as stdout:
        _load_libraries(warm=True)
        from dpcfl_net.launch.cli import run as runs

        code, found = runs.quickstart(config, out)
    if as_json:
        print_json(found, stdout)
    raise typer.Exit(code)


def _load_libraries(*, warm: bool) -> None:
    """Load the libraries of a run, and show it; `warm`: another process loads those of the run's processes meanwhile."""
    from dpcfl_net.launch.cli.steps import loading

    with loading():
        if warm:
            from dpcfl_net.launch.placement import parents

            parents.warm()
        from dpcfl_net.launch.cli import run  # noqa: F401


def job(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="folder for protocol.json, roster.jsonl, experiment.json and signatures")] = Path(
        "job"
    ),
    keys: Annotated[Path | None, typer.Option(help="folder of keys (default: OUT/keys, created if missing)")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a signed job for manually started processes.

    It writes protocol.json, roster.jsonl, experiment.json and signatures. A folder that holds another job is refused: every job has new
    secrets, except with privacy.noise seeded and a noise seed.
    """
    from dpcfl_net.core.run_folder import RunFolder
    from dpcfl_net.launch.cli import estimate
    from dpcfl_net.launch.cli import run as runs
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
    from dpcfl_net.launch.cli.steps import preparing

    with messages_to_stderr(as_json) as stdout, preparing() as on_step:
        found = runs.write_job(config, overrides or [], out, keys, on_step)
    if as_json:
        print_json(found, stdout)
        return
    typer.echo("\n".join(estimate.lines(found)))
    protocol, experiment, operator_key = found["files"]
    typer.echo(
        f"wrote the job to {out}: {protocol} and {RunFolder(out).roster.name} (for all processes), {experiment} (for workers and "
        f"observer), their signatures and {operator_key}; keys are in {keys or RunFolder(out).keys}"
    )


def clients(
    folder: RunFolder,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Show whose data each client of a run has.

    Each line has the client's name in your data, its records, clusters, last accuracy and epsilon spent. It reads the data set and the
    experimenter's part of the job: no process of the run knows the names.
    """
    from dataclasses import asdict

    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.launch.cli.screen import print_table
    from dpcfl_net.results.clients import client_summaries, client_table

    found = client_summaries(folder, data_root)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        print_table(client_table(found))


def inspect(
    folder: RunFolder,
    client: Annotated[int | None, typer.Option(min=0, help="only messages of this client")] = None,
    round: Annotated[int | None, typer.Option("--round", min=0, help="only messages of this round")] = None,
    limit: Annotated[int, typer.Option(min=1, help="largest number of messages to print")] = 200,
    as_json: AsJson = False,
) -> None:
    """List the messages that the server of a run received and sent."""
    from dpcfl_net.launch.cli import inspect as inspection
    from dpcfl_net.launch.cli.json_output import print_json

    found = inspection.inspect(folder, inspection.Selection(client, round, limit))
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(inspection.lines(found)))


def verify(
    folder: RunFolder,
    operator_key: Annotated[
        Path | None, typer.Option(help="the operator's public key file (default: RUN/operator.pub)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a run's signatures, ledgers and epsilon.

    It also checks hash chains, the plan and the messages. The run must have ended. The exit code is 3 if a check fails.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.launch.cli.steps import computing

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder")
    with computing("checking"):
        from dpcfl_net.results.verify import verify_run

        checks = verify_run(folder, read_operator_key(operator_key) if operator_key else None)
    fails = any(check.holds is False for check in checks)
    if as_json:
        found = [{"check": check.what, "holds": check.holds, "detail": check.detail} for check in checks]
        print_json({"holds": not fails, "checks": found})
    else:
        words = {True: "holds", False: "FAILS", None: "none "}
        typer.echo("\n".join(f"{words[check.holds]}  {check.what}: {check.detail}" for check in checks))
    raise typer.Exit(3 if fails else 0)


def export(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="folder to write (default: RUN/export)")] = None,
    as_json: AsJson = False,
) -> None:
    """Write models, metrics and figures as files.

    It writes safetensors, CSV, SVG, and the privacy statement as JSON and text. It leaves out personal models of clients.
    """
    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.report.export import export as write

    files = [str(path) for path in write(folder, out)]
    if as_json:
        print_json({"files": files})
    else:
        typer.echo("\n".join(files))


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN|SWEEP", help="folder of a run or a sweep")],
    alone: Annotated[
        Path | None,
        typer.Option(help="folder of a run of `local` on the same data: mark clients that are less accurate than in it"),
    ] = None,
) -> None:
    """Rewrite the report of a run or sweep.

    For a run it also rewrites run.json and the models.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.core.run_folder import SweepFolder
    from dpcfl_net.launch.cli import run as runs
    from dpcfl_net.report.sweep import write_sweep

    if SweepFolder(folder).sweep.exists():
        if alone is not None:
            raise ConfigError(f"--alone is for the report of a run, and {folder} is a sweep")
        typer.echo(f"report: {write_sweep(folder)}")
    else:
        runs.report(folder, alone)
