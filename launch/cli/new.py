"""`dpcfl new`: writes a project with a configuration, a data set, an algorithm and tests."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import naming, shown, write_text

TEMPLATES = Path(__file__).parents[1] / "project"
SUFFIX = ".template"
PACKAGE, TESTS = (
    "package",
    "checks",
)  # folders that get the package's name, and the name "tests", which a distribution leaves out
LONGEST_NAME = 60


def create(folder: Path) -> list[Path]:
    """Write a project into a new or empty folder.

    Args:
        folder: The folder; its name becomes the name of the project and of its package.

    Returns:
        The files.

    Raises:
        ConfigError: If the folder is a file or not empty, or if no package can have its name.
    """
    project, package = _names(folder)
    with naming(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}: give a new or an empty folder")
        written = []
        for template in sorted(path for path in TEMPLATES.rglob(f"*{SUFFIX}") if path.is_file()):
            parts = [{PACKAGE: package, TESTS: "tests"}.get(part, part) for part in template.relative_to(TEMPLATES).parts]
            target = folder.joinpath(*parts[:-1], parts[-1].removesuffix(SUFFIX))
            target.parent.mkdir(parents=True, exist_ok=True)
            text = template.read_text(encoding="utf-8")
            write_text(target, text.replace("{{project}}", project).replace("{{package}}", package))
            written.append(target)
    return written


def _names(folder: Path) -> tuple[str, str]:
    """Return the names of project and package; ConfigError if the folder's name gives none."""
    name = folder.resolve().name
    package = re.sub(r"[-. ]+", "_", name.lower())
    rule = "letters a to z, digits, spaces, dots, dashes and underscores, beginning with a letter"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package) or len(package) > LONGEST_NAME:
        raise ConfigError(
            f"the folder's name is {shown(name)}: must be up to {LONGEST_NAME} {rule}, as it names a Python package"
        )
    if keyword.iskeyword(package):
        raise ConfigError(f"the folder's name is {shown(name)}: {package!r} is a word of Python's own; choose another name")
    if package == "tests" or _is_taken(package):
        raise ConfigError(f"the folder's name is {shown(name)}: Python has a module {package!r}; choose another name")
    return package.replace("_", "-"), package


def _is_taken(package: str) -> bool:
    """Return True for an installed module; a folder of the current folder is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
