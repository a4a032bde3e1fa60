"""`dpcfl launch`: the same job with its workers on this machine, on a Ray cluster, in a SLURM allocation, or behind ssh."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_object, write_text
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config import Config
from dpcfl_net.launch import running
from dpcfl_net.launch.cli import run as runs
from dpcfl_net.launch.placement import slurm, ssh
from dpcfl_net.launch.placement.placements import ListenAddress, LocalPlacement, Placement, RemotePlacement

WAYS = ("local", "ray", "slurm", "ssh")


@dataclass(frozen=True)
class Options:
    """What the command was asked for; `on` is one of WAYS. cpus, gpus: of a worker, for Ray."""

    on: str
    hosts: Path | None = None
    address: str | None = None
    bind: str | None = None
    ports: tuple[int, int] = (0, 0)
    root: str | None = None
    python: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.on not in WAYS:
            problems.append(f"--on is {self.on!r}: must be {', '.join(WAYS)}")
        if (self.hosts is None) == (self.on == "ssh"):
            problems.append("--hosts FILE belongs to --on ssh, which needs it")
        if self.on == "local" and (self.address or self.bind or any(self.ports) or self.root or self.python):
            problems.append("--address, --bind, --ports, --root and --python are for other hosts; --on is 'local'")
        if self.on == "ssh" and (self.root or self.python):
            problems.append("--root and --python: put root and python into the hosts file")
        if self.on == "ray" and self.python:
            problems.append("--python: Ray's workers run the Python that the cluster runs")
        if self.on != "ray" and (self.cpus, self.gpus) != (1.0, 0.0):
            problems.append("--cpus-per-worker and --gpus-per-worker are for --on ray")
        if not 0 < self.cpus <= 10_000 or not 0 <= self.gpus <= 10_000:
            problems.append(
                f"--cpus-per-worker is {self.cpus:g}, --gpus-per-worker {self.gpus:g}: must be above 0 and at least 0, at most 10,000"
            )
        if problems:
            raise ConfigError(problems)


def new(path: Path, overrides: list[str], out: Path, options: Options) -> int:
    """Make a job whose clients' keys are made where they will run, and run it; the exit code."""
    config = configuration.load(path, overrides)
    _check(config, options)
    if options.on == "local":
        return runs.new(path, overrides, out)
    folder = running.new_folder(config, out)
    files = RunFolder(folder)
    # Hosts may serve several launchers whose folders have one name, and take fewer letters than a folder here may have.
    name = f"{re.sub('[^A-Za-z0-9._-]', '_', folder.name)[:100].lstrip('_.-')}-{secrets.token_hex(4)}"
    with _site(config, options, name, files.logs) as site:
        placed = site.places(sum(config.data.clients), config.runtime.clients_per_worker)
        write_atomically(files.placement, json.dumps({"on": options.on, "run": name, "placed": placed}, indent=1) + "\n")
        running.prepare(folder, config, site)
        print(_who_runs_where(site, placed, config))
        code, _ = running.run_and_report(folder, config, site=site)
    return code


def resume(folder: Path, options: Options) -> int:
    """Go on with a run whose workers were elsewhere: each again where its ledger is."""
    placement = _placement(folder)
    if placement["on"] != options.on:
        raise ConfigError(f"--on is {options.on!r}: the workers of {folder} were started by {placement['on']!r}")
    found = running.kept(folder, elsewhere=True, warn=lambda text: print(f"warning: {text}"))
    if found.finished:
        return runs.go_on(folder, found)
    config = found.config
    with _site(config, options, placement["run"], RunFolder(folder).logs, placement["placed"]) as site:
        site.make_keys(RunFolder(folder).keys, sum(config.data.clients), config.runtime.clients_per_worker)
        return runs.go_on(folder, found, site)


def dry_run(path: Path, overrides: list[str], options: Options) -> None:
    """Ask the hosts what they have, and print who would run where; nothing is enrolled or started."""
    import tempfile

    config = configuration.load(path, overrides)
    _check(config, options)
    clients, size = sum(config.data.clients), config.runtime.clients_per_worker
    if options.on == "local":
        from dpcfl_net.launch.processes import worker_processes

        node = LocalPlacement().capacity()[0]
        print(f"coordinator, observer and {worker_processes(config, clients)} worker processes at most on {node.name}")
        return
    with tempfile.TemporaryDirectory() as logs, _site(config, options, f"dry-run-{secrets.token_hex(4)}", Path(logs)) as site:
        print(_who_runs_where(site, site.places(clients, size), config))


def write_script(path: Path, overrides: list[str], out: Path, options: Options, to: Path, shape: dict[str, Any]) -> None:
    """The batch script for `sbatch`; the configuration is checked now rather than when the allocation comes."""
    config = configuration.load(path, overrides)
    _check(config, options)
    given = {"--address": options.address, "--bind": options.bind, "--root": options.root, "--python": options.python}
    again = [word for name, value in given.items() if value is not None for word in (name, value)]
    again += ["--ports", ",".join(map(str, options.ports))] if any(options.ports) else []
    command = [
        sys.executable,
        "-m",
        "dpcfl_net.launch.cli",
        "launch",
        str(configuration.find(path).resolve()),
        *overrides,
        "--on",
        "slurm",
        *again,
    ]
    command += ["--out", str(out.resolve())]
    write_text(to, slurm.script(command, name=config.name, **shape))
    print(f"{to}: submit it with sbatch {to}")


def _check(config: Config, options: Options) -> None:
    """What does not go together with workers on other hosts."""
    problems = []
    if options.on != "local":
        if config.runtime.federation == "in-process":
            problems.append("runtime.federation is 'in-process': has no workers to put on other hosts, must be 'network'")
        if config.ledger.scope == "dataset":
            problems.append(
                "ledger.scope is 'dataset': works with --on local only: each host would keep a record book of its own, which knows "
                "nothing of what the other hosts promised about the same records"
            )
        if config.runtime.transport.security == "none" and not _is_loopback(options.address):
            problems.append("runtime.transport.security is 'none': allowed on loopback only, must be 'curve' between hosts")
    if problems:
        raise ConfigError(problems)


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@contextmanager
def _site(config: Config, options: Options, run: str, logs: Path, placed: list[str] | None = None) -> Iterator[RemotePlacement]:
    """The hosts of a run, answered and with room for its workers; closed at the end, whatever happened."""
    logs.mkdir(parents=True, exist_ok=True)
    root, cluster = options.root or ssh.ROOT, None
    if options.on == "ssh":
        assert options.hosts is not None
        file = ssh.read_hosts(options.hosts)
        hosts, address = file.dialled(run, logs), options.address or ssh.own_address(file)
    elif options.on == "slurm":
        nodes = slurm.allocation()
        hosts = slurm.dialled(nodes, python=options.python or sys.executable, root=root, run=run, logs=logs)
        address = options.address or slurm.own_address()
    else:
        from dpcfl_net.launch.placement import ray

        workers = -(-sum(config.data.clients) // config.runtime.clients_per_worker)
        cluster = ray.Cluster(workers, options.cpus, options.gpus)
        hosts, address = ray.dialled(cluster, root=root, run=run), options.address or cluster.own_address()
    site = RemotePlacement(hosts, ListenAddress(address, options.bind, options.ports), placed)
    try:
        site.open()
        yield site
    finally:
        site.close()
        if cluster is not None:
            cluster.close()


def _placement(folder: Path) -> dict[str, Any]:
    path = RunFolder(folder).placement
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name}: its workers ran here, use dpcfl run --resume")
    fields: dict[str, tuple[type, ...]] = {"on": (str,), "run": (str,), "placed": (list,)}
    document = read_object(path, fields)
    if not set(fields) <= set(document) or not all(isinstance(name, str) for name in document["placed"]):
        raise ConfigError(f"{path} is damaged: it must hold on, run and placed, a list of names")
    return document


def _who_runs_where(site: Placement, placed: list[str], config: Config) -> str:
    """A line for each host."""
    size, clients = config.runtime.clients_per_worker, sum(config.data.clients)
    lines = ["coordinator and observer: here"]
    for node in site.capacity():
        firsts = [k * size for k, name in enumerate(placed) if name == node.name]
        theirs = ", ".join(f"{first}-{min(first + size, clients) - 1}" if size > 1 else str(first) for first in firsts)
        gpus = f", GPUs {'; '.join(node.gpus)}" if node.gpus else ""
        lines.append(
            f"{node.name} ({node.where}): {node.cores} cores, {node.memory / 2**30:.1f} GiB available{gpus}; clients {theirs or 'none'}"
        )
    return "\n".join(lines)
