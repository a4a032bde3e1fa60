"""Configurations that come with the package."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGED = Path(__file__).parents[1] / "configs"


def packaged_names() -> list[str]:
    """Names of the configurations that come with the package, sorted."""
    return sorted(str(path.relative_to(PACKAGED).with_suffix("")) for path in PACKAGED.rglob("*.yaml"))


def packaged_in_place_of(name: str | Path) -> str | None:
    """Return the name of the packaged configuration that a path without a file stands for; None if there is a file, or no such name.

    Args:
        name: A packaged name, or a path such as "configs/quickstart.yaml" or "quickstart.yaml".
    """
    plain = str(name).removesuffix(".yaml").removeprefix("configs/")
    return plain if not os.path.isfile(name) and plain in packaged_names() else None


def replacement_note(name: str | Path) -> str:
    """Say that a packaged configuration stands in for a file that is not there; empty if none does, or if its name was given.

    Args:
        name: As for `packaged_in_place_of`.
    """
    found = packaged_in_place_of(name)
    return "" if found in (None, str(name)) else f"there is no file {name} here: using the packaged configuration {found}"


def packaged() -> dict[str, str]:
    """Return the first line of each packaged configuration, a comment that describes it, by name."""
    found = {}
    for name in packaged_names():
        first, _, _ = (PACKAGED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")
        found[name] = first.removeprefix("#").strip()
    return found
