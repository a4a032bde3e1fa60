"""Source code of an algorithm or a model of the user's own: unchanged since this process imported it, and since its run was started."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from dpcfl_net.core import plugin_source, runlog
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.results.run_files import finished_rounds, read_mapping


def own_code(config: Config) -> list[tuple[str, str]]:
    """Return field and name of an algorithm and a model of the user's own. The content of a data set is in `data.sha256`."""
    named = [("algorithm.name", config.algorithm["name"]), ("model.name", config.model.name)]
    return [(field, name) for field, name in named if is_plugin(name)]


def check_code(configs: Iterable[Config]) -> None:
    """Check that own code is that of the files; ConfigError if a file has changed since this process imported it."""
    for field, name in dict.fromkeys(pair for config in configs for pair in own_code(config)):
        plugin_source.check_unchanged(field, name)


def record_code(folder: Path, config: Config) -> None:
    """Record the source of own code in a run folder; a resumed run whose code has changed since gets a warning.

    The run is not refused: the change may be the repair that it needs. The warning tells readers of its results that its rounds come
    from two versions of the code.

    Args:
        folder: The run folder, with a complete job.
        config: The configuration of the run.

    Raises:
        ConfigError: If the code cannot be imported.
        OSError: If a file cannot be written.
    """
    files = RunFolder(folder)
    now = {field: plugin_source.sha256_of_files(field, name) for field, name in own_code(config)}
    before = read_mapping(files.own_code, [])
    changed = [f"{field} is {name!r}" for field, name in own_code(config) if before.get(field, now[field]) != now[field]]
    if changed:
        last = finished_rounds(folder)
        when = f"after round {last} of this run" if last else "since this run was started"
        for what in changed:
            text = f"{what}: its code has changed {when}; the remaining rounds run the changed code"
            runlog.append(files.warnings, {"view": "launcher", "time": time.time(), "text": text})
    if now != before:
        write_atomically(files.own_code, canonical_json(now))
