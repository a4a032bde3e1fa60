"""The `dpcfl` command line. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

MOST_CLIENTS, MOST_SECONDS, MOST_ROUNDS, MOST_EPSILON = 10_000, 1_000_000, 100_000, 100_000  # as in the configuration

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Differentially private clustered federated learning with real processes and a server that nobody trusts.",
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Data sets.")
app.add_typer(data_app, name="data")
attack_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Attacks of a server on the runs that it recorded.")
app.add_typer(attack_app, name="attack")


def _above_zero(value: float) -> float:
    """Refuse zero and negative numbers, as the configuration does."""
    if not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def _budget(epsilon: float | None, delta: float | None) -> tuple[float, float] | None:
    """The budget of a record: (epsilon, delta), or None."""
    if epsilon is None and delta is None:
        return None
    if epsilon is None or delta is None:
        raise typer.BadParameter(f"--budget-epsilon is {epsilon}, --budget-delta {delta}: give both or none")
    return epsilon, delta


def _at_most(value: float | None, most: float) -> float | None:
    if value is not None and not 0 < value <= most:
        raise typer.BadParameter(f"{value:g} is not above 0 and at most {most:,}")
    return value


def _seconds(value: float) -> float | None:
    return _at_most(value, MOST_SECONDS)


def _epsilon(value: float | None) -> float | None:
    return _at_most(value, MOST_EPSILON)


def _delta(value: float | None) -> float | None:
    if value is not None and not 0 < value < 1:
        raise typer.BadParameter(f"{value:g} is not between 0 and 1")
    return value


def _version(asked: bool) -> None:
    if asked:
        from dpcfl_net import __version__

        print(f"dpcfl_net {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Differentially private clustered federated learning as real processes and real messages."""


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. privacy.epsilon=3 algorithm.name=global")
]


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="YAML file of one experiment")] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="parent of the run folder")] = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(help="resume a run that stopped, crashed or failed; takes no configuration")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check the configuration and print plan and cost; start nothing")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="run everything in this process, so that breakpoints work; no transcript")
    ] = False,
) -> None:
    """Run an experiment: coordinator, observer and one worker process per client on this machine."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import run as runs

    if resume is not None:
        if config is not None or overrides or dry_run:
            raise ConfigError("--resume takes no configuration, no overrides and no --dry-run: the job is signed")
        raise typer.Exit(runs.resume(resume, debug=debug))
    if config is None:
        raise ConfigError("give a configuration file, or --resume RUN")
    if dry_run:
        runs.dry_run(config, overrides or [])
        return
    raise typer.Exit(runs.new(config, overrides or [], out, debug=debug))


@app.command()
def launch(
    config: Annotated[Path | None, typer.Argument(help="YAML file of one experiment")] = None,
    overrides: Overrides = None,
    on: Annotated[str, typer.Option(help="local, ray, slurm or ssh")] = "local",
    hosts: Annotated[Path | None, typer.Option(help="ssh: YAML file of the hosts (docs/multi-host.md)")] = None,
    address: Annotated[str | None, typer.Option(help="address that workers connect to (default: auto-detected)")] = None,
    bind: Annotated[str | None, typer.Option(help="address to listen on (default: --address; 0.0.0.0: all interfaces)")] = None,
    ports: Annotated[str, typer.Option(help="ports of coordinator and observer; 0: any free port")] = "0,0",
    root: Annotated[str | None, typer.Option(help="ray, slurm: folder for keys and ledgers on each host")] = None,
    python: Annotated[str | None, typer.Option(help="slurm: Python interpreter on the nodes (default: this one)")] = None,
    cpus_per_worker: Annotated[float, typer.Option(help="ray: CPUs per worker process")] = 1.0,
    gpus_per_worker: Annotated[float, typer.Option(help="ray: GPUs per worker process; fractions allowed")] = 0.0,
    out: Annotated[Path, typer.Option(help="parent of the run folder")] = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(help="resume a run that stopped, crashed or failed; takes no configuration")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="ask the hosts and print the placement; start nothing")] = False,
    sbatch: Annotated[Path | None, typer.Option(help="slurm: write a batch script to this file, start nothing")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="--sbatch: nodes")] = 1,
    cpus: Annotated[int, typer.Option(min=1, max=10_000, help="--sbatch: CPUs of each node")] = 1,
    gpus: Annotated[int, typer.Option(min=0, max=10_000, help="--sbatch: GPUs of each node")] = 0,
    time: Annotated[str, typer.Option(help="--sbatch: time limit in SLURM's format")] = "1:00:00",
) -> None:
    """Run an experiment with its workers on other hosts."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import launch as launching

    found = ports.split(",")
    if len(found) != 2 or not all(port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536 for port in found):
        raise ConfigError(f"--ports is {ports!r}: must be two numbers from 0 to 65535, for example 5700,5701")
    pair = (int(found[0]), int(found[1]))
    options = launching.Options(on, hosts, address, bind, pair, root, python, cpus_per_worker, gpus_per_worker)
    if resume is not None:
        if config is not None or overrides or dry_run or sbatch:
            raise ConfigError("--resume takes no configuration, no overrides, no --dry-run and no --sbatch: the job is signed")
        raise typer.Exit(launching.resume(resume, options))
    if config is None:
        raise ConfigError("give a configuration file, or --resume RUN")
    if sbatch is not None:
        if on != "slurm":
            raise ConfigError(f"--sbatch belongs to --on slurm; --on is {on!r}")
        shape = {"nodes": nodes, "cpus": cpus, "gpus": gpus, "time": time}
        launching.write_script(config, overrides or [], out, options, sbatch, shape)
        return
    if dry_run:
        launching.dry_run(config, overrides or [], options)
        return
    raise typer.Exit(launching.new(config, overrides or [], out, options))


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="YAML file of one experiment")],
    axes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE,VALUE]...", help="e.g. privacy.epsilon=3,5,15 seed=0:4 algorithm.name=r-dpcfl,local"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="parent of the sweep's folder, and of the store that all sweeps share")] = Path(
        "runs"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the cells and their state; start nothing")] = False,
) -> None:
    """Run every combination of some settings; finished runs are not repeated."""
    from dpcfl_net.launch import sweeps

    if dry_run:
        sweeps.dry_run(config, axes or [], out)
        return
    raise typer.Exit(sweeps.sweep(config, axes or [], out))


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN|SWEEP...")],
    force: Annotated[bool, typer.Option("--force", help="also compare runs whose privacy or data differ, marked")] = False,
    csv: Annotated[Path | None, typer.Option(help="write one line per run as CSV")] = None,
    page: Annotated[Path | None, typer.Option(help="write plots and table as one HTML file")] = None,
    fairness: Annotated[
        bool, typer.Option("--fairness", help="add F_acc and F_loss, measured against models trained without privacy")
    ] = False,
) -> None:
    """Compare finished runs over seeds; refuse runs whose privacy or data differ."""
    from dpcfl_net.launch.cli import compare as comparison

    comparison.compare_runs(folders, force=force, csv=csv, page=page, fairness=fairness)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="parent of the run folders")] = Path("runs"),
    config: Annotated[Path, typer.Option(help="YAML file")] = Path("configs/quickstart.yaml"),
) -> None:
    """Run R-DPCFL, Global and Local at the same epsilon on scikit-learn's digits."""
    from dpcfl_net.launch.cli import run as runs

    raise typer.Exit(runs.quickstart(config, out))


@app.command()
def job(
    config: Annotated[Path, typer.Argument(help="YAML file of one experiment")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="folder for protocol.json, experiment.json and their signatures")] = Path("job"),
    keys: Annotated[Path | None, typer.Option(help="folder of keys (default: OUT/keys, created if missing)")] = None,
) -> None:
    """Write a signed job: protocol, experiment and their signatures."""
    from dpcfl_net.launch.cli import run as runs

    runs.write_job(config, overrides or [], out, keys)


@app.command()
def keygen(folder: Path, clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of clients")]) -> None:
    """Create the keys of operator, coordinator, observer and clients."""
    from dpcfl_net.transport.keys import make_keys

    make_keys(folder, clients)
    typer.echo(f"{clients + 2} connection keys and the operator's signing key in {folder}")


@app.command()
def diff(mine: Path, theirs: Path) -> None:
    """Show where two protocol.json files differ, field by field."""
    from dpcfl_net.core.protocol import differences, read_protocol

    found = differences(read_protocol(mine), read_protocol(theirs))
    typer.echo("\n".join(found) if found else "the same")
    raise typer.Exit(3 if found else 0)


@app.command()
def coordinator(
    protocol: Annotated[Path, typer.Argument(help="protocol.json, the public part of a job")],
    bind: Annotated[str, typer.Option(help="for example tcp://0.0.0.0:5700")],
    keys: Annotated[Path, typer.Option(help="folder with the coordinator's key pair")],
    operator_key: Annotated[Path, typer.Option(help="the operator's public key file")],
    observer: Annotated[str | None, typer.Option(help="address of the observer")] = None,
    out: Annotated[Path, typer.Option(help="run folder; resumes from its checkpoints")] = Path("run"),
    transcript: Annotated[
        Literal["off", "headers", "full"], typer.Option(help="how much of every message to record")
    ] = "headers",
    quorum: Annotated[float, typer.Option(callback=_above_zero, max=1.0, help="fraction of clients that must answer")] = 1.0,
    round_timeout: Annotated[float, typer.Option(callback=_seconds, help="seconds")] = 600.0,
    join_timeout: Annotated[float, typer.Option(callback=_seconds, help="seconds")] = 120.0,
) -> None:
    """Start only the coordinator, on any host."""
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.runtime.coordinator import CoordinatorSpec, run_coordinator

    key = read_operator_key(operator_key)
    out.mkdir(parents=True, exist_ok=True)
    spec = CoordinatorSpec(
        protocol, key, bind, observer, keys, out, transcript,
        quorum=quorum, round_timeout_s=round_timeout, join_timeout_s=join_timeout,
    )  # fmt: skip
    run_coordinator(spec)


@app.command()
def worker(
    job: Annotated[Path, typer.Argument(help="folder with both parts of the job")],
    client: Annotated[int, typer.Option(min=0, max=MOST_CLIENTS - 1, help="number of this client in the roster")],
    connect: Annotated[str, typer.Option(help="address of the coordinator")],
    keys: Annotated[Path, typer.Option(help="folder with this client's key pair")],
    operator_key: Annotated[Path, typer.Option(help="the operator's public key file, pinned here")],
    observer: Annotated[str | None, typer.Option(help="address of the observer")] = None,
    ledgers: Annotated[Path, typer.Option(help="folder of this client's ledger")] = Path("ledgers"),
    book: Annotated[Path | None, typer.Option(help="folder of the record book, for jobs with ledger_scope dataset")] = None,
    budget_epsilon: Annotated[
        float | None, typer.Option(callback=_epsilon, help="largest epsilon of all runs on a record together")
    ] = None,
    budget_delta: Annotated[float | None, typer.Option(callback=_delta, help="at this delta")] = None,
    max_epsilon: Annotated[
        float | None,
        typer.Option(
            callback=_epsilon,
            help="refuse jobs above this epsilon, and jobs without one (default: 100; jobs that declare no epsilon are served)",
        ),
    ] = None,
    max_delta: Annotated[
        float | None,
        typer.Option(callback=_delta, help="refuse jobs above this delta (default: 1 / number of this client's records)"),
    ] = None,
    data_root: Annotated[str | None, typer.Option(help="folder of the data sets")] = None,
    orphan_timeout: Annotated[
        float, typer.Option(callback=_seconds, help="exit after this many seconds without a coordinator")
    ] = 60.0,
    gpu: Annotated[str | None, typer.Option(help="UUID of the GPU (default: compute on the CPU)")] = None,
    turns: Annotated[Path | None, typer.Option(help="workers that share this folder compute one at a time")] = None,
) -> None:
    """Start one client, on any host."""
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.core.types import Policy
    from dpcfl_net.runtime.worker import run_worker
    from dpcfl_net.runtime.worker_spec import Terms, WorkerSpec
    from dpcfl_net.training.devices import Device

    terms = Terms(Policy(max_epsilon, max_delta), book, _budget(budget_epsilon, budget_delta))
    key = read_operator_key(operator_key)
    run_worker(
        WorkerSpec(
            job, client, connect, observer, keys, key, ledgers, terms, data_root, (turns, 1) if turns else None,
            orphan_timeout, Device(gpu),
        )
    )  # fmt: skip


@app.command()
def observer(
    job: Annotated[Path, typer.Argument(help="folder with both parts of the job")],
    bind: Annotated[str, typer.Option(help="for example tcp://0.0.0.0:5701")],
    keys: Annotated[Path, typer.Option(help="folder with the observer's key pair")],
    operator_key: Annotated[Path, typer.Option(help="the operator's public key file")],
    out: Annotated[Path, typer.Option(help="run folder")] = Path("run"),
    data_root: Annotated[str | None, typer.Option(help="folder of the data sets")] = None,
    evaluate_every: Annotated[int, typer.Option(min=1, max=MOST_ROUNDS, help="evaluate every N rounds, and the last")] = 1,
) -> None:
    """Start only the observer, which measures outside the protocol."""
    from dpcfl_net.core.signing import read_operator_key
    from dpcfl_net.runtime.observer import ObserverSpec, run_observer

    key = read_operator_key(operator_key)
    out.mkdir(parents=True, exist_ok=True)
    run_observer(ObserverSpec(job, key, bind, keys, out, data_root, evaluate_every))


@app.command()
def account(json_file: Annotated[Path, typer.Option("--json", help="file of events and delta; -: standard input")]) -> None:
    """Compute epsilon of events, or the noise multiplier for a target epsilon."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.core.files import parse_json, read_json, read_stdin, shown
    from dpcfl_net.privacy.accounting.accountant import account as solve

    most, where = 1 << 20, "standard input" if str(json_file) == "-" else str(json_file)
    document = parse_json(read_stdin(most), where) if str(json_file) == "-" else read_json(json_file, most)
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must hold a JSON object with events and delta, got {shown(document)}")
    typer.echo(json.dumps(solve(document)))


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration and of all algorithms' options."""
    from dpcfl_net.experiment.config import schema as build

    typer.echo(json.dumps(build(), indent=2))


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    client: Annotated[int | None, typer.Option(min=0, help="only this client")] = None,
    round: Annotated[int | None, typer.Option("--round", min=0, help="only this round")] = None,
    limit: Annotated[int, typer.Option(min=1, help="largest number of messages to print")] = 200,
) -> None:
    """List the messages that the server saw."""
    from dpcfl_net.launch.cli import run as runs

    runs.inspect(folder, client, round, limit)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    operator_key: Annotated[
        Path | None, typer.Option(help="the operator's public key file (default: RUN/operator.pub)")
    ] = None,
) -> None:
    """Check signatures, hash chains, ledgers, plan and messages; recompute epsilon."""
    from dpcfl_net.launch.cli import run as runs

    raise typer.Exit(runs.verify(folder, operator_key))


@app.command()
def audit(folder: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """Bound epsilon from below with the canaries of a run (configs/threats/audit_*.yaml); exit code 3 if its claim is violated."""
    from dpcfl_net.launch.cli import attack as attacks

    raise typer.Exit(attacks.audit(folder))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN|SWEEP")]) -> None:
    """Rewrite run.json and report.html of a run, or report.html of a sweep."""
    from dpcfl_net.launch.cli import run as runs
    from dpcfl_net.report.sweep import write_sweep
    from dpcfl_net.results.compare import SWEEP

    if (folder / SWEEP).exists():
        typer.echo(write_sweep(folder))
    else:
        runs.report(folder)


@app.command()
def bench(
    what: Annotated[
        str,
        typer.Argument(help="dpsgd: speed against peers; live: a thousand clients on this machine; gpu: 21 workers on one GPU"),
    ] = "dpsgd",
    clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="live: number of clients")] = 1000,
    sampled: Annotated[
        int, typer.Option(min=1, max=MOST_CLIENTS, help="live: clients per round, and most connected at once")
    ] = 100,
    per_worker: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="live: clients per process")] = 1,
    slots_per_gpu: Annotated[int, typer.Option(min=1, max=1_000, help="gpu: workers that compute at the same time")] = 1,
) -> None:
    """Measure DP-SGD against peers, a thousand clients on this machine, or sharing a GPU."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import bench_dpsgd, bench_gpu, bench_live

    if what not in ("dpsgd", "live", "gpu"):
        raise ConfigError(f"unknown benchmark {what!r}: must be dpsgd, live or gpu")
    if what == "live":
        bench_live.live(clients, sampled, group=per_worker)
    elif what == "gpu":
        bench_gpu.gpu(slots_per_gpu)
    else:
        bench_dpsgd.dpsgd()


@app.command()
def reproduce(
    figures: Annotated[list[str] | None, typer.Argument(help="for example r-dpcfl/fig3; --list names them all")] = None,
    scale: Annotated[str, typer.Option(help="laptop, or paper (the paper's settings)")] = "laptop",
    out: Annotated[Path, typer.Option(help="parent of the figure's folder")] = Path("reproductions"),
    every: Annotated[bool, typer.Option("--list", help="list the figures")] = False,
) -> None:
    """Recompute figures of the papers and check the papers' claims."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import reproduce as reproductions

    if every:
        reproductions.list_all()
        return
    if not figures:
        raise ConfigError("give one or more figures, or --list")
    reproductions.reproduce(figures, scale, out)


@app.command()
def doctor(
    clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of workers to check for")] = 21,
) -> None:
    """Show what this machine can do, what would fail here and how to fix it."""
    from dpcfl_net.launch.cli import doctor as doctors

    raise typer.Exit(doctors.run(clients))


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10")],
    root: Annotated[Path | None, typer.Option(help="target folder")] = None,
) -> None:
    """Download a data set with torchvision."""
    from dpcfl_net.data.datasets import fetch as download

    typer.echo(f"{name} is in {download(name, root)}")


@attack_app.command("nan-oracle")
def nan_oracle(folder: Annotated[Path, typer.Argument(metavar="RUN")]) -> None:
    """Infer membership of a known record from which updates are finite (configs/threats/nan_oracle.yaml)."""
    from dpcfl_net.launch.cli import attack as attacks

    attacks.nan_oracle(folder)


@attack_app.command()
def selections(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    against: Annotated[Path | None, typer.Option(metavar="RUN2", help="a second run, for comparison")] = None,
    data_root: Annotated[Path | None, typer.Option(help="folder of the data sets")] = None,
) -> None:
    """Infer clusters from repeated private choices, beside exact theory (configs/threats/selections_*.yaml)."""
    from dpcfl_net.launch.cli import attack as attacks

    attacks.selections(folder, against, data_root)


@attack_app.command()
def invert(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    against: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="a second run on the same records, shown in the same grid")
    ] = None,
    records: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of images to reconstruct")] = 6,
    data_root: Annotated[Path | None, typer.Option(help="folder of the data sets")] = None,
) -> None:
    """Reconstruct images and labels from updates (configs/threats/invert_*.yaml)."""
    from dpcfl_net.launch.cli import attack as attacks

    attacks.invert(folder, against, records, data_root)


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. A user's mistake becomes one line on stderr and an exit code; only a bug shows a traceback."""
    from dpcfl_net.launch.cli.errors import is_unread, report

    try:
        code = app(args=arguments, standalone_mode=False)
        if sys.stdout is not None:  # closed by whoever started this
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort, SystemExit):  # the last one: whoever read the output has left, as `head` does
        code = 130
    except Exception as error:
        code = 130 if isinstance(error, BrokenPipeError) and is_unread() else report(error)
        if code is None:
            raise
    sys.exit(code if isinstance(code, int) else 0)
