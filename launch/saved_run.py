"""A run folder to be resumed: its configuration and its run.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import check_runnable
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.build import changed_settings
from dpcfl_net.experiment.config_options import unknown_options
from dpcfl_net.experiment.config_overrides import section
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.results import summary


@dataclass(frozen=True)
class SavedRun:
    """Configuration and run.json of a run folder.

    Attributes:
        config: The configuration of the run.
        document: Content of run.json; empty if there is none.
    """

    config: Config
    document: dict[str, Any]

    @property
    def finished(self) -> bool:
        """True if all rounds are done."""
        return self.document.get("state") == "finished"

    @property
    def seconds(self) -> float:
        """Duration of the run so far, in seconds."""
        return float(self.document.get("wall_s", 0.0))


def read_saved_run(folder: Path, *, remote: bool = False, warn: Callable[[str], None] = lambda text: None) -> SavedRun:
    """Read a run folder that is to be resumed.

    Args:
        folder: The run folder.
        remote: Accept a run with workers on other hosts.
        warn: Called with a message if run.json is damaged; it is then written again.

    Returns:
        Its configuration and run.json.

    Raises:
        ConfigError: If the folder holds no run, or a damaged one, or one with workers on other hosts and `remote` is not set, or
            one that is not finished and that an earlier version started, or whose configuration is not that of its signed job.
        Refused: If its job is not signed.
    """
    files = RunFolder(folder)
    files.require(files.config)
    try:
        config = configuration.load(files.config)
    except ConfigError as error:
        problems = _lost_options(configuration.read_document(files.config)) or error.problems
        raise ConfigError([f"{files.config}: {problem}" for problem in problems]) from None
    if not remote and files.placement.exists():
        raise ConfigError(f"the workers of {folder} are on other hosts: resume with dpcfl launch --resume {folder} --on ...")
    job = summary.read_run_job(folder)
    try:
        saved = SavedRun(config, summary.read_document(folder))
    except ConfigError as error:
        warn(str(error))
        saved = SavedRun(config, {})
    if not saved.finished:
        check_runnable(job.protocol)
        if changed := changed_settings(config, job):
            raise ConfigError([f"{files.config} is not the configuration of the signed job: {change}" for change in changed])
    return saved


def _lost_options(document: Mapping[str, Any]) -> list[str]:
    """Name the options of a run that the algorithm of the user's own has lost since it started."""
    chosen = section(document, "algorithm")
    name = str(chosen.get("name"))
    try:
        lost = unknown_options(chosen) if is_plugin(name) else []
    except ConfigError:  # there is no such algorithm any more, which the error of the configuration says
        return []
    return [
        f"{name} has no option {option!r} now, with which this run started: restore it, or state its present name in the algorithm's Options, "
        f"as earlier_names = {{{option!r}: 'PRESENT_NAME'}}"
        for option in lost
    ]
