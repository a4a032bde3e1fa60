"""Implements the commands on one run: run, resume, dry run, job and report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_bytes, shown
from dpcfl_net.core.frozen import canonical
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment import job_files
from dpcfl_net.experiment.build import make_job, with_noise_seed
from dpcfl_net.experiment.config_overrides import change, section
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.statement import replace_one_epsilon
from dpcfl_net.launch.calling_process import IN_PROCESS
from dpcfl_net.launch.cli import estimate
from dpcfl_net.launch.cli.reported_run import run_and_report
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.new_run import check_gpus, check_policy, new_folder, write_config
from dpcfl_net.launch.placement.placements import Placement
from dpcfl_net.launch.running import RunOptions
from dpcfl_net.launch.saved_run import SavedRun, read_saved_run
from dpcfl_net.results import summary
from dpcfl_net.results.epsilon_spent import write_epsilon_lines
from dpcfl_net.results.run_files import finished_rounds
from dpcfl_net.transport.identities import identity_path, make_all_identities
from dpcfl_net.transport.keys import COORDINATOR, OBSERVER, PACK, aggregator_key, client_key, make_keys, public_path

if TYPE_CHECKING:
    from dpcfl_net.report.trackers.base import Tracker


def new_run(
    path: Path,
    overrides: Sequence[str],
    out: Path,
    *,
    debug: bool = False,
    chaos: Path | None = None,
    trackers: Sequence[Tracker] = (),
) -> tuple[int, dict[str, Any], Path]:
    """Run a configuration on this machine.

    Args:
        path: Configuration: a file or a packaged name.
        overrides: Settings to change, as key=value.
        out: Parent of the new run folder.
        debug: Run everything in this process.
        chaos: File of faults to inject; None: no faults.
        trackers: Get the rounds of the run.

    Returns:
        The exit code, run.json (empty if nothing began) and the run folder.
    """
    with Interrupts(until_exit=True) as interrupts:
        with interrupts.raising():
            config = configuration.load(path, overrides)
            if debug:
                _refuse_other_than_in_process(overrides)
                config = configuration.load(config, IN_PROCESS)
            check_gpus(config)
        options = RunOptions(interrupts=interrupts, in_calling_process=debug, chaos=chaos, trackers=trackers)
        folder = new_folder(config, out)
        return *run_and_report(folder, config, options), folder


def _refuse_other_than_in_process(overrides: Sequence[str]) -> None:
    """Refuse overrides that --debug would undo; a configuration's own values give way."""
    asked = change({}, overrides)
    for key, value in IN_PROCESS.items():
        group, _, name = key.partition(".")
        given = section(asked, group).get(name, value)
        if given != value:
            raise ConfigError(f"--debug sets {key} to {value!r}: leave {shown(given)} out of the overrides")


def quickstart(path: Path, out: Path) -> tuple[int, list[dict[str, Any]]]:
    """Run a configuration, then Global and Local at the same epsilon, and print one table.

    The first run's page then marks the clients that are less accurate than with Local.

    Returns:
        The exit code, and run.json of each finished run with its folder.
    """
    from dpcfl_net.launch.cli.screen import print_summary
    from dpcfl_net.report.page import write_report

    done: list[dict[str, Any]] = []
    folders: list[Path] = []
    for override in ([], ["algorithm=global"], ["algorithm=local"]):
        code, document, folder = new_run(path, override, out)
        if code:
            return code, done
        done.append({"folder": str(folder), **document})
        folders.append(folder)
    print_summary(done[0], done[1:])
    print(f"report: {write_report(folders[0], alone=folders[-1])}")
    return 0, done


def resume(folder: Path, *, debug: bool = False, chaos: Path | None = None, trackers: Sequence[Tracker] = ()) -> int:
    """Resume a run on this machine with its signed job, ledgers and checkpoints.

    Args:
        folder: The run folder.
        debug: The run was started with everything in this process.
        chaos: File of faults to inject; None: no faults.
        trackers: Get the rounds of the run.

    Returns:
        The exit code.
    """
    saved = read_saved_run(folder, warn=warn)
    if debug and saved.config.runtime.federation != "in-process":
        raise ConfigError(f"--debug: the run in {folder} has runtime.federation 'network'; resume it without --debug")
    return resume_saved(folder, saved, debug=debug, chaos=chaos, trackers=trackers)


def resume_saved(
    folder: Path,
    saved: SavedRun,
    placement: Placement | None = None,
    *,
    interrupts: Interrupts | None = None,
    debug: bool = False,
    chaos: Path | None = None,
    trackers: Sequence[Tracker] = (),
) -> int:
    """Resume a run unless it is finished.

    Args:
        folder: The run folder.
        saved: Its configuration and run.json.
        placement: Hosts of the workers; None: this machine.
        interrupts: Signals that interrupt the run; None: from now on.
        debug: Run everything in this process.
        chaos: File of faults to inject; None: no faults.
        trackers: Get the rounds of the run.

    Returns:
        The exit code.
    """
    if saved.finished:
        print(f"{folder} is finished ({saved.document.get('rounds_done', 'all')} rounds): nothing to resume")
        return 0
    options = RunOptions(saved.seconds, placement, interrupts, in_calling_process=debug, chaos=chaos, trackers=trackers)
    return run_and_report(folder, saved.config, options)[0]


def document(folder: Path) -> dict[str, Any]:
    """Return run.json of a folder; empty if it is damaged, which is reported."""
    try:
        return summary.read_document(folder)
    except ConfigError as error:
        warn(str(error))
        return {}


def warn(text: str) -> None:
    """Print a warning."""
    print(f"warning: {text}")


def dry_run(path: Path, overrides: Iterable[str], on_step: Callable[[str], None] = lambda step: None) -> dict[str, Any]:
    """Return the privacy plan and the cost of a run, as `estimate.describe`; start and write nothing.

    Args:
        path: Configuration: a file or a packaged name.
        overrides: Settings to change, as key=value.
        on_step: Called with each step that may take long, before it begins.
    """
    import tempfile

    config = configuration.load(path, overrides)
    check_gpus(config)
    with tempfile.TemporaryDirectory() as folder:
        _make_keys(RunFolder(folder).keys, config)
        job = make_job(config, RunFolder(folder).keys, on_step)
        check_policy(job.protocol, config)
        return estimate.describe(job, config)


def _make_keys(folder: Path, config: Config) -> None:
    clients = config.data.client_count
    make_keys(folder, clients, len(config.runtime.groups(clients)))
    if config.privacy.secure:
        make_all_identities(folder, clients)


def _check_keys(folder: Path, config: Config) -> None:
    """Refuse a folder that lacks a key of a job of this configuration, and name the command that makes all of them."""
    clients = config.data.client_count
    groups = len(config.runtime.groups(clients))
    names = [client_key(client) for client in range(clients)]
    needed = [public_path(folder, name) for name in (COORDINATOR, OBSERVER, *(aggregator_key(k) for k in range(groups)))]
    needed += [] if public_path(folder, PACK).exists() else [public_path(folder, name) for name in names]
    if config.privacy.secure and not identity_path(folder, PACK).exists():
        needed += [identity_path(folder, name) for name in names]
    missing = next((path for path in needed if not path.exists()), None)
    if missing is not None:
        options = f"--clients {clients}" + (f" --aggregators {groups}" if groups else "")
        options += " --identities" if config.privacy.secure else ""
        raise ConfigError(f"{missing} is missing; all keys of this job are made by: dpcfl keygen NEW_FOLDER {options}")


def write_job(
    path: Path,
    overrides: Iterable[str],
    out: Path,
    keys: Path | None,
    on_step: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Write a signed job for manually started processes.

    Args:
        path: Configuration: a file or a packaged name.
        overrides: Settings to change, as key=value.
        out: Folder of the job.
        keys: Folder of keys; None: OUT/keys, created if missing.
        on_step: Called with each step that may take long, before it begins.

    Returns:
        Privacy plan and cost, as `estimate.describe`, with the files of the job.

    Raises:
        ConfigError: If the folder holds another job, which processes may serve, or `keys` lacks a key.
    """
    config = configuration.load(path, overrides)
    keys = keys or RunFolder(out).keys
    protocol = RunFolder(out).protocol
    earlier = read_bytes(protocol) if protocol.exists() else None
    if earlier is not None and not keys.exists():
        raise _another_job(out)
    if not keys.exists():
        _make_keys(keys, config)
    else:
        _check_keys(keys, config)
    config = with_noise_seed(config)
    job = make_job(config, keys, on_step)
    if earlier not in (None, canonical(job.protocol)):  # the protocol has the hashes of all other parts
        raise _another_job(out)
    job_files.write_job(job, out, keys)
    write_config(out, config)
    files = RunFolder(out)
    return {
        **estimate.describe(job, config), "folder": str(out),
        "files": [files.protocol.name, files.experiment.name, files.operator_key.name],
    }  # fmt: skip


def _another_job(out: Path) -> ConfigError:
    return ConfigError(f"{out} holds another job, which workers may serve: give a new folder with --out, or remove that job")


def report(folder: Path, alone: Path | None = None) -> None:
    """Write run.json, the models and report.html of a run, also of one with manually started processes.

    Args:
        folder: The run folder.
        alone: Run of `local` on the same data: the page marks the clients that are less accurate than there.
    """
    from dpcfl_net.launch.cli.steps import computing
    from dpcfl_net.report.page import write_report
    from dpcfl_net.results.models import export_models

    job = summary.read_run_job(folder)
    before = document(folder)
    for damage in summary.damages(folder, job):
        warn(damage)
    with computing("computing epsilon by round"):
        write_epsilon_lines(folder, job)
    state = before.get("state", "finished" if finished_rounds(folder) == job.protocol.rounds else "interrupted")
    settings = summary.run_settings(folder) if RunFolder(folder).config.exists() else {}
    found = summary.run_document(
        folder,
        job,
        state=state,
        wall_s=before.get("wall_s", _wall(folder)),
        processes=before.get("processes", len(job.protocol.roster) + 2),
        replace_one=replace_one_epsilon(job.protocol),  # not that of run.json, which may be edited or of an older accountant
        devices=before.get("devices", {}),
        durable=summary.flushes(settings.get("runtime", {}), job),
    )
    if "error" in before:
        found["error"] = before["error"]
    if found["rounds_done"] < (counted := before.get("rounds_done", 0)):
        left = f"{RunFolder(folder).metrics} has {found['rounds_done']} of the {counted} rounds in run.json"
        warn(f"{left}: it was removed or cut; run.json and models are left as they are")
    elif state != "running":  # the launcher of a running run writes both, and may have ended the run meanwhile
        summary.write_run(folder, found)
        if settings:
            export_models(folder, job, settings["data"]["root"], personal=settings["output"]["personal_models"])
        else:
            export_models(folder, job)
    print(f"report: {write_report(folder, alone)}")


def _wall(folder: Path) -> float:
    times = [line["time"] for line in runlog.each(RunFolder(folder).metrics) if "time" in line]
    return max(times) - min(times) if times else 0.0
