"""Implements `dpcfl launch`: workers on this machine, a Ray cluster, a SLURM allocation, or hosts reached by ssh."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core import process_log
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_object, write_text
from dpcfl_net.core.locks import run_lock
from dpcfl_net.core.number_spans import spans
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch import new_run, saved_run
from dpcfl_net.launch.cli import run as runs
from dpcfl_net.launch.cli.output_room import say_last
from dpcfl_net.launch.cli.reported_run import run_and_report
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.links import refuse_remote
from dpcfl_net.launch.placement import slurm, slurm_batch, ssh
from dpcfl_net.launch.placement.base import RUN_MODULE
from dpcfl_net.launch.placement.placements import KeyOwners, LocalPlacement, Placement
from dpcfl_net.launch.placement.remote_placement import ListenAddress, RemotePlacement
from dpcfl_net.launch.placement.slurm_batch import Resources
from dpcfl_net.launch.running import RunOptions
from dpcfl_net.results.run_files import resume_command
from dpcfl_net.transport.sockets import is_loopback

ENGINES = ("local", "ray", "slurm", "ssh")
MOST_NAMED = 20  # clients of a host that are listed one by one


@dataclass(frozen=True)
class Options:
    """Options of `dpcfl launch`.

    Attributes:
        on: One of ENGINES.
        hosts: ssh: YAML file of the hosts.
        address: Address that workers connect to; None: detected.
        bind: Address to listen on; None: `address`.
        ports: Ports of coordinator and observer; 0: any free port.
        root: ray, slurm: folder for keys and ledgers on each host.
        python: slurm: Python interpreter on the nodes; None: this one.
        cpus: ray: CPUs per worker process.
        gpus: ray: GPUs per worker process; fractions are allowed.
        ray_wait: ray: seconds to wait for nodes.
        requeue: slurm: requeue the batch job when its run is interrupted.
        tree: Run an aggregator on each host, for its workers.

    Raises:
        ConfigError: With every option that does not fit `on`.
    """

    on: str
    hosts: Path | None = None
    address: str | None = None
    bind: str | None = None
    ports: tuple[int, int] = (0, 0)
    root: str | None = None
    python: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    ray_wait: float = 60.0
    requeue: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.on not in ENGINES:
            problems.append(f"--on is {self.on!r}: must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}")
        if (self.hosts is None) == (self.on == "ssh"):
            problems.append("--hosts FILE belongs to --on ssh: give both or neither")
        if self.on == "local" and (self.address or self.bind or any(self.ports) or self.root or self.python):
            problems.append("--address, --bind, --ports, --root and --python are for other hosts; --on is 'local'")
        if self.on == "ssh" and (self.root or self.python):
            problems.append("--root and --python: with --on ssh set root and python in the hosts file")
        if self.on == "ray" and self.python:
            problems.append("--python: with --on ray workers use the Python of the cluster")
        if self.on != "ray" and (self.cpus, self.gpus) != (1.0, 0.0):
            problems.append("--cpus-per-worker and --gpus-per-worker are for --on ray")
        if self.on != "ray" and self.ray_wait != 60.0:
            problems.append("--ray-wait is for --on ray")
        if not 1 <= self.ray_wait <= 86_400:
            problems.append(f"--ray-wait is {self.ray_wait:g}: must be from 1 to 86,400 seconds")
        if self.tree and self.on == "local":
            problems.append("--tree is for other hosts; --on is 'local': set runtime.aggregators to the number of aggregators")
        if self.requeue and self.on != "slurm":
            problems.append(f"--requeue is for --on slurm; --on is {self.on!r}")
        if not 0 < self.cpus <= 10_000 or not 0 <= self.gpus <= 10_000:
            problems.append(
                f"--cpus-per-worker is {self.cpus:g}, --gpus-per-worker {self.gpus:g}: must be above 0 and at least 0, at most 10,000"
            )
        if problems:
            raise ConfigError(problems)


def port_pair(text: str) -> tuple[int, int]:
    """Read the ports of coordinator and observer, as "5700,5701"; ConfigError for anything else."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(p.isascii() and p.isdigit() and len(p) < 6 and int(p) < 65536 for p in numbers):
        raise ConfigError(f"--ports is {text!r}: must be two numbers from 0 to 65535, for example 5700,5701")
    coordinator, observer = map(int, numbers)
    if coordinator == observer != 0:
        raise ConfigError(
            f"--ports is {text!r}: must be two different ports, for example {coordinator},{coordinator % 65535 + 1}"
        )
    return coordinator, observer


def new(
    path: Path, overrides: list[str], out: Path, options: Options, folder: Path | None = None
) -> tuple[int, dict[str, Any]]:
    """Run a configuration with its workers on other hosts. Each host creates the keys of its clients.

    Args:
        path: Configuration: a file or a packaged name.
        overrides: Settings to change, as key=value.
        out: Parent of the new run folder.
        options: Options of the command.
        folder: The new run folder; None: one in `out` with a free name.

    Returns:
        The exit code, and run.json (empty if nothing began) with the run folder as `folder`.
    """
    from dpcfl_net.launch.cli.screen import open_screen

    config = _load(path, overrides, options)
    if options.on == "local":
        code, document, folder = runs.new_run(path, overrides, out)
        return code, {"folder": folder, **document}
    folder = folder or new_run.new_folder(config, out)
    files = RunFolder(folder)
    # Unique: a host may serve several launchers with equal folder names. It accepts fewer characters than a folder name.
    name = f"{re.sub('[^A-Za-z0-9._-]', '_', folder.name)[:100].lstrip('_.-')}-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(until_exit=True))
        try:
            with interrupts.raising(), run_lock(folder):
                files.preparing.touch()  # a killed or failed preparation has the mark and no lock: the next run in `out` removes it
                placement = stack.enter_context(_open_placement(config, options, name, files.logs))
                config = _with_tree(config, options, placement)
                hosts = _assign(config, placement)
                write_atomically(files.placement, json.dumps({"on": options.on, "run": name, "placed": hosts}, indent=1) + "\n")
                with open_screen() as screen:
                    new_run.prepare(folder, config, placement, screen.prepare)
                files.preparing.unlink()
        except KeyboardInterrupt:
            stack.close()  # the hosts first
            shutil.rmtree(folder, ignore_errors=True)
            say_last("stopped before the run began; the new run folder was removed")
            return 130, {}
        print("\n".join(placement_lines(_describe_placement(placement, hosts, config))))
        code, document = run_and_report(folder, config, RunOptions(placement=placement, interrupts=interrupts))
        return code, {"folder": folder, **document}


def resume(folder: Path, options: Options) -> int:
    """Resume a run with workers on other hosts; each client runs again on the host that has its ledger.

    Args:
        folder: The run folder.
        options: Options of the command, with the same `on` as before.

    Returns:
        The exit code.
    """
    document = _read_placement(folder)
    if document["on"] != options.on:
        raise ConfigError(f"--on is {options.on!r}: the workers of {folder} were started with --on {document['on']}")
    saved = saved_run.read_saved_run(folder, remote=True, warn=runs.warn)
    if saved.finished:
        return runs.resume_saved(folder, saved)
    config = saved.config
    if options.tree and not config.runtime.aggregators:
        raise ConfigError(f"--tree: {folder} has no aggregators, and its job is signed; resume it without --tree")
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(until_exit=True))
        try:
            with interrupts.raising():
                opened = _open_placement(config, options, document["run"], RunFolder(folder).logs, document["placed"])
                placement = stack.enter_context(opened)
                placement.make_keys(RunFolder(folder).keys, KeyOwners.of(config))
        except KeyboardInterrupt:
            say_last(f"stopped before the run continued; resume with: {resume_command(folder)}")
            return 130
        return runs.resume_saved(folder, saved, placement, interrupts=interrupts)


def dry_run(path: Path, overrides: list[str], options: Options) -> dict[str, Any]:
    """Contact the hosts, find which client would run where, and check the GPUs there; start and write nothing.

    Returns:
        worker_processes (the largest number at a time) and hosts (name, location, cores, memory_bytes, gpus, clients, and
        aggregator with aggregators).
    """
    config = _load(path, overrides, options)
    clients, size = config.data.client_count, config.runtime.clients_per_worker
    if options.on == "local":
        new_run.check_gpus(config)
        placement = LocalPlacement(cpu=config.runtime.device == "cpu")
        hosts = [placement.capacity()[0].name] * -(-clients // size)
        placed = _describe_placement(placement, hosts, config)
        return {"worker_processes": config.runtime.worker_processes(clients), "hosts": placed}
    name = f"dry-run-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory() as logs, _open_placement(config, options, name, Path(logs)) as remote:
        config = _with_tree(config, options, remote)
        hosts = _assign(config, remote)
        remote.check_gpus(config.runtime)
        return {"worker_processes": len(hosts), "hosts": _describe_placement(remote, hosts, config)}


def write_script(path: Path, overrides: list[str], out: Path, options: Options, to: Path, resources: Resources) -> None:
    """Write a batch script for `sbatch`, after a check of the configuration.

    Args:
        path: Configuration: a file or a packaged name.
        overrides: Settings to change, as key=value.
        out: Parent of the run folder.
        options: Options of the command.
        to: Path of the script.
        resources: What the script requests from SLURM.
    """
    config = _load(path, overrides, options)
    given = {"--address": options.address, "--bind": options.bind, "--root": options.root, "--python": options.python}
    arguments = [word for name, value in given.items() if value is not None for word in (name, value)]
    arguments += ["--ports", ",".join(map(str, options.ports))] if any(options.ports) else []
    arguments += ["--tree"] if options.tree else []
    command = [
        sys.executable,
        *RUN_MODULE,
        "dpcfl_net",
        "launch",
        str(configuration.find(path).resolve()),
        *overrides,
        "--on",
        "slurm",
        "--requeue",
        *(["--log-level", level] if (level := os.environ.get(process_log.VARIABLE)) else []),
        *arguments,
    ]
    command += ["--out", str(out.resolve())]
    text = slurm_batch.script(shlex.join(command), config.name, resources)
    write_text(to, text, new_run.mode_of({}, [override.partition("=")[0] for override in overrides]))
    print(f"wrote {to}; submit it with: {shlex.join(['sbatch', str(to)])}")


def _load(path: Path, overrides: list[str], options: Options) -> Config:
    """Load and check a configuration; with --tree also together with aggregators, before hosts are contacted."""
    config = configuration.load(path, overrides)
    _check(config, options)
    return configuration.load(config, {"runtime.aggregators": 1}) if options.tree else config


def _with_tree(config: Config, options: Options, placement: RemotePlacement) -> Config:
    """Set the number of clients of each host's aggregator, if --tree asks for aggregators."""
    if not options.tree:
        return config
    sizes = placement.group_sizes(config.data.client_count, config.runtime.clients_per_worker)
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"aggregators": sizes})})


def _assign(config: Config, placement: RemotePlacement) -> list[str]:
    """Assign the worker processes to hosts."""
    clients, runtime = config.data.client_count, config.runtime
    return placement.assign_hosts(clients, runtime.clients_per_worker, runtime.groups(clients))


def _check(config: Config, options: Options) -> None:
    """Refuse settings that do not work with workers on other hosts."""
    problems = []
    if options.on != "local":
        if config.runtime.federation == "in-process":
            problems.append(
                "runtime.federation is 'in-process': starts no workers, must be 'network' for workers on other hosts"
            )
        if config.runtime.aggregators and options.tree:
            problems.append(
                f"runtime.aggregators is {config.runtime.aggregators}: must be 0 with --tree, which sets the clients of each host's "
                "aggregator"
            )
        if config.ledger.scope == "dataset":
            problems.append(
                "ledger.scope is 'dataset': allowed with --on local only: each host would have a separate record book and would not "
                "count what the other hosts spent on the same records"
            )
        if config.runtime.transport.security == "none" and not (options.address and is_loopback(options.address)):
            problems.append("runtime.transport.security is 'none': allowed on loopback only, must be 'curve' between hosts")
    if problems:
        raise ConfigError(problems)


@contextmanager
def _open_placement(
    config: Config, options: Options, run: str, logs: Path, assigned: list[str] | None = None
) -> Iterator[RemotePlacement]:
    """Connect to the hosts of a run; disconnect at the end, also after an error."""
    logs.mkdir(parents=True, exist_ok=True)
    root, cpu = options.root or ssh.ROOT, config.runtime.device == "cpu"
    with ExitStack() as stack:
        if options.on == "ssh":
            assert options.hosts is not None
            file = ssh.read_hosts(options.hosts)
            hosts, address = file.make_hosts(run, logs, cpu=cpu), options.address or ssh.own_address(file)
        elif options.on == "slurm":
            nodes = slurm.allocation()
            hosts = slurm.make_hosts(nodes, python=options.python or sys.executable, root=root, run=run, logs=logs, cpu=cpu)
            address = options.address or slurm.own_address(name for name, _ in nodes)
        else:
            from dpcfl_net.launch.placement import ray

            workers = -(-config.data.client_count // config.runtime.clients_per_worker)
            counts = None if assigned is None else ray.counts_of(assigned)
            cluster = ray.Cluster(workers, options.cpus, options.gpus, options.ray_wait, counts)
            stack.callback(cluster.close)
            hosts, address = ray.make_hosts(cluster, root=root, run=run, cpu=cpu), options.address or cluster.own_address()
        refuse_remote(config)
        for host in hosts:
            host.runtime(config.runtime)  # refuses GPUs of the hosts file without a setting that uses them
        placement = RemotePlacement(hosts, ListenAddress(address, options.bind, options.ports), assigned)
        stack.callback(placement.close)
        placement.open()
        for warning in placement.clock_warnings():
            print(f"warning: {warning}", file=sys.stderr)
        yield placement


def _read_placement(folder: Path) -> dict[str, Any]:
    """Read placement.json."""
    path = RunFolder(folder).placement
    if not path.exists():
        RunFolder(folder).require(RunFolder(folder).operator_key)  # the last file of a job
        raise ConfigError(f"{folder} has no {path.name}: its workers ran on this machine, use {resume_command(folder)}")
    fields: dict[str, tuple[type, ...]] = {"on": (str,), "run": (str,), "placed": (list,)}
    document = read_object(path, fields)
    if not set(fields) <= set(document) or not all(isinstance(name, str) for name in document["placed"]):
        raise ConfigError(f"{path} is damaged: it must hold 'on', 'run' and 'placed' (a list of names)")
    return document


def _describe_placement(placement: Placement, hosts: list[str], config: Config) -> list[dict[str, Any]]:
    """Describe each host and its clients; `hosts` names the host of each worker process."""
    size, clients = config.runtime.clients_per_worker, config.data.client_count
    groups, found = config.runtime.groups(clients), []
    for node in placement.capacity():
        firsts = [k * size for k, name in enumerate(hosts) if name == node.name]
        own = [client for first in firsts for client in range(first, min(first + size, clients))]
        found.append({
            "name": node.name, "location": node.location, "cores": node.cores, "memory_bytes": node.memory,
            "gpus": list(node.gpus), "clients": own,
            **({"aggregator": next((k for k, group in enumerate(groups) if group[0] in own), None)} if groups else {}),
        })  # fmt: skip
    return found


def dry_run_lines(found: dict[str, Any], on: str) -> list[str]:
    """Format the result of `dry_run`.

    Args:
        found: The result.
        on: One of ENGINES.
    """
    if on != "local":
        return placement_lines(found["hosts"])
    where = found["hosts"][0]["name"]
    return [f"coordinator, observer and up to {found['worker_processes']} worker processes on {where}"]


def placement_lines(hosts: list[dict[str, Any]]) -> list[str]:
    """Format hosts and their clients, one line per host.

    Args:
        hosts: As in the result of `dry_run`.
    """
    lines = ["coordinator and observer: this machine"]
    for host in hosts:
        gpus = f", GPUs {'; '.join(host['gpus'])}" if host["gpus"] else ""
        lines.append(
            f"{host['name']} ({host['location']}): {host['cores']} cores, {host['memory_bytes'] / 2**30:.1f} GiB available{gpus}; "
            f"clients {_ranges(host['clients']) or 'none'}"
            + ("" if host.get("aggregator") is None else f"; aggregator {host['aggregator']}")
        )
    return lines


def _ranges(numbers: list[int]) -> str:
    """Format ascending numbers; if there are many, as spans."""
    return ", ".join(map(str, numbers) if len(numbers) <= MOST_NAMED else spans(numbers))
