"""Settings and versions of a run, and the commands that resume and repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.results.compare import HIDDEN, SECRETS, flat, word
from dpcfl_net.results.run_files import mapping, resume_command
from dpcfl_net.results.run_view import RunView

Pair = tuple[str, str]


def settings(view: RunView) -> list[tuple[str, list[Pair]]]:
    """Return the resolved configuration by section: (section, [(key, value)]), without keys that are not set and values of secrets."""
    plain = [(key, word(value)) for key, value in view.config.items() if not isinstance(value, Mapping) and value is not None]
    sections = [(key, _section(key, value)) for key, value in view.config.items() if isinstance(value, Mapping)]
    return [(name, pairs) for name, pairs in [("run", plain), *sections] if pairs]


def versions(view: RunView) -> list[Pair]:
    """Return the versions of the libraries that the run used."""
    return [(name, str(value)) for name, value in mapping(view.run, "versions").items()]


def resume(view: RunView) -> Pair | None:
    """Return the command that resumes a run that has stopped, and its effect; None for other runs."""
    if view.state not in ("interrupted", "failed"):
        return None
    command = resume_command(view.folder)
    return command, "Continues from the last checkpoint, with the same job and ledgers."


def repeat_command(view: RunView) -> Pair:
    """Return the command that repeats the run, and how near it comes."""
    seeded = mapping(view.config, "privacy").get("noise") == "seeded"
    said = (
        "The noise is seeded: it gives the same bits on the same kind of processor with the same versions."
        if seeded
        else "A new job with the same settings and data; noise comes from the operating system, so the figures differ a little."
    )
    return f"dpcfl run {shlex.quote(str(RunFolder(view.folder).config))}", said


def _section(name: str, section: Mapping[str, Any]) -> list[Pair]:
    found = ((key, value) for key, value in flat(section) if value is not None)
    return [(key, HIDDEN if f"{name}.{key}" in SECRETS else word(value)) for key, value in found]
