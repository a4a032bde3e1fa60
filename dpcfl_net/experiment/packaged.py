"""Configurations that come with the package."""

from __future__ import annotations

from pathlib import Path

PACKAGED = Path(__file__).parents[1] / "configs"


def packaged_names() -> list[str]:
    """Names of the configurations that come with the package, sorted."""
    return sorted(str(path.relative_to(PACKAGED).with_suffix("")) for path in PACKAGED.rglob("*.yaml"))


def packaged() -> dict[str, str]:
    """Return the first line of each packaged configuration, a comment that describes it, by name."""
    found = {}
    for name in packaged_names():
        first, _, _ = (PACKAGED / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")
        found[name] = first.removeprefix("#").strip()
    return found
