"""What the commands do: make a job, run it on this machine, go on with it, look at it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment import job_files
from dpcfl_net.experiment.build import make_job, with_noise_seed
from dpcfl_net.experiment.config import Config
from dpcfl_net.experiment.cost_estimate import estimate, step_seconds
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.statement import replace_one_epsilon
from dpcfl_net.federation.claim import noisy_plans
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.placement import local
from dpcfl_net.launch.placement.placements import Placement
from dpcfl_net.launch.running import IN_PROCESS, Kept, kept, new_folder, run_and_report, write_config
from dpcfl_net.results import summary
from dpcfl_net.transport.keys import make_keys


def new(path: Path, overrides: Iterable[str], out: Path, *, debug: bool = False) -> int:
    """Make a job and run it; debug: everything in this process. Returns the exit code."""
    return _new(path, overrides, out, debug=debug)[0]


def _new(path: Path, overrides: Iterable[str], out: Path, *, debug: bool = False) -> tuple[int, dict[str, Any]]:
    with Interrupts(until_exit=True) as interrupts:
        with interrupts.raising():
            config = configuration.load(path, overrides)
            if debug:
                config = configuration.load(config, IN_PROCESS)
        return run_and_report(new_folder(config, out), config, interrupts=interrupts, calling_process=debug)


def quickstart(path: Path, out: Path) -> int:
    """The main job, then Global and Local at the same epsilon, then one table."""
    from dpcfl_net.launch.cli.screen import print_summary

    done: list[dict[str, Any]] = []
    for override in ([], ["algorithm.name=global"], ["algorithm.name=local"]):
        code, document = _new(path, override, out)
        if code:
            return code
        done.append(document)
    print_summary(done[0], done[1:])
    return 0


def resume(folder: Path, *, debug: bool = False) -> int:
    """Resume a run that was stopped or killed: the same signed job, ledgers and checkpoints. Returns the exit code."""
    found = kept(folder, warn=_warn)
    if debug and found.config.runtime.federation != "in-process":
        raise ConfigError(f"--debug: {folder} was started with runtime.federation network; resume it without --debug")
    return go_on(folder, found, debug=debug)


def go_on(folder: Path, found: Kept, site: Placement | None = None, *, debug: bool = False) -> int:
    """Resume a run unless it is finished, which is printed; the exit code."""
    if found.finished:
        print(f"{folder} is finished: {found.document.get('rounds_done', 'all')} rounds")
        return 0
    return run_and_report(folder, found.config, found.seconds, site, calling_process=debug)[0]


def _before(folder: Path) -> dict[str, Any]:
    """run.json of a run; one that cannot be read is said and made again."""
    try:
        return summary.read_document(folder)
    except ConfigError as error:
        _warn(str(error))
        return {}


def _warn(text: str) -> None:
    print(f"warning: {text}")


def dry_run(path: Path, overrides: Iterable[str]) -> None:
    """Make the job in memory and print what it would do and cost."""
    import tempfile

    config = configuration.load(path, overrides)
    with tempfile.TemporaryDirectory() as folder:
        make_keys(RunFolder(folder).keys, sum(config.data.clients))
        _print_job(make_job(config, RunFolder(folder).keys), config)


def write_job(path: Path, overrides: Iterable[str], out: Path, keys: Path | None) -> None:
    """The two parts of a job with signatures, for processes that are started by hand or elsewhere."""
    config = configuration.load(path, overrides)
    keys = keys or RunFolder(out).keys
    if not keys.exists():
        make_keys(keys, sum(config.data.clients))
    config = with_noise_seed(config)
    job = make_job(config, keys)
    job_files.write_job(job, out, keys)
    write_config(out, config)
    _print_job(job, config)
    files = RunFolder(out)
    print(
        f"job in {out}: {files.protocol.name} (for everybody), {files.experiment.name} (for workers and observer), signatures, "
        f"{files.operator_key.name}"
    )


def report(folder: Path) -> None:
    """Write run.json, the models and report.html, for a run of hand-started processes too."""
    from dpcfl_net.report.page import write_report
    from dpcfl_net.results.models import export_models

    job = summary.read_run_job(folder)
    before = _before(folder)
    for damage in summary.damages(folder, job):
        print(f"warning: {damage}")
    summary.write_epsilon_lines(folder, job)
    done = max((line.get("round", 0) for line in runlog.read(RunFolder(folder).metrics) if "bytes_up" in line), default=0)
    state = before.get("state", "finished" if done == job.protocol.rounds else "interrupted")
    replace_one = before.get("privacy", {}).get("epsilon_replace_one") or replace_one_epsilon(job.protocol)
    document = summary.run_document(
        folder,
        job,
        state=state,
        wall_s=before.get("wall_s", _wall(folder)),
        processes=before.get("processes", len(job.protocol.roster) + 2),
        replace_one=replace_one,
        devices=before.get("devices", {}),
    )
    summary.write_run(folder, document)
    if state != "running":  # its launcher writes them at the end
        if RunFolder(folder).config.exists():
            settings = summary.run_settings(folder)
            export_models(folder, job, settings["data"]["root"], personal=settings["output"]["personal_models"])
        else:
            export_models(folder, job)
    print(write_report(folder))


def verify(folder: Path, operator_key: Path | None) -> int:
    """Print every check; 3 if one does not hold."""
    from dpcfl_net.results.verify import verify_run

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder")
    checks = verify_run(folder, read_operator_key(operator_key) if operator_key else None)
    for check in checks:
        word = {True: "holds", False: "FAILS", None: "none "}[check.holds]
        print(f"{word}  {check.what}: {check.detail}")
    return 3 if any(check.holds is False for check in checks) else 0


def inspect(folder: Path, client: int | None, round_: int | None, limit: int) -> None:
    """The transcript as a table."""
    from dpcfl_net.transport import transcript
    from dpcfl_net.transport.messages import decode

    path = RunFolder(folder).transcript
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name} (output.transcript: off?)")
    protocol = summary.read_run_job(folder).protocol
    print({
        "untrusted-server": "The server is not trusted: what it received below is all that it has, and what each client's gate let out.",
        "trusted-server": "The server is trusted: it sees every sampled client's update and cluster identifier as they are. Only what it "
        "publishes is noisy; whoever holds this transcript holds the clients' raw updates.",
    }[protocol.privacy.trust])  # fmt: skip
    if protocol.unprotected:
        print(f"Without any guarantee: {'; '.join(protocol.unprotected)}")
    print("   #  time      to the server  from the server  client  round  kind       task                 bytes  content")
    shown = left = 0
    reader = transcript.read(path)
    for record in reader:
        header = decode(record.header)
        peer = record.peer.removeprefix("client ")
        if (
            header.kind == "CHUNK"
            or (client is not None and peer != str(client))
            or (round_ is not None and header.round != round_)
        ):
            continue
        if shown >= limit:
            left += 1
            continue
        shown += 1
        up, down = ("x", "") if record.direction == "up" else ("", "x")
        tensors = ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape, _ in header.tensors)
        clock = time.strftime("%H:%M:%S", time.localtime(record.time))
        size = len(record.header) + header.size
        print(f"{record.number:>4}  {clock}  {up:^13}  {down:^15}  {peer:>6}  {header.round:>5}  {header.kind:<9}  {header.task:<18} "
              f"{size:>7}  {tensors or header.code}")  # fmt: skip
    if left:
        print(f"{left} more messages; --limit, --client and --round choose")
    if reader.cut:
        print("the last record was cut by a crash")


def _print_job(job: Job, config: Config) -> None:
    """The plan and what it will cost on a machine like this one."""
    protocol, cost = job.protocol, estimate(job.protocol, config.runtime.max_live_workers)
    z = sorted({round(noise, 5) for noise in noisy_plans(job.algorithm).values() if noise is not None})
    print(
        f"{protocol.name}: {protocol.algorithm}, {cost['clients']} clients, {protocol.rounds} rounds, {cost['parameters']:,} parameters"
    )
    print(
        f"epsilon {protocol.privacy.epsilon:g} at delta {protocol.privacy.delta:g}: noise multiplier {', '.join(map(str, z)) or 'none'}"
    )
    for slot, count in Counter(job.algorithm.plan(protocol.roster[0])).items():
        print(f"  plan of a client: {count} x {slot}")
    for slot, count in Counter(job.algorithm.central_plan()).items():
        print(f"  plan of the trusted server: {count} x {slot}")
    slots = local.compute_slots(config.runtime)
    minutes = step_seconds(job, config.data.root) * cost["steps"] / slots / 60
    print(
        f"expected: {cost['steps']:,} steps over {cost['records']:,} records, about {minutes:.1f} minutes of computing in {slots} slots here; "
        f"{cost['bytes_up'] / 1e6:.1f} MB up, {cost['bytes_down'] / 1e6:.1f} MB down; "
        f"about {cost['memory'] / 2**30:.1f} GiB of memory for all processes"
    )


def _wall(folder: Path) -> float:
    times = [line["time"] for line in runlog.read(RunFolder(folder).metrics) if "time" in line]
    return max(times) - min(times) if times else 0.0
