"""Source code of plug-ins: the files that a plug-in's module imports from its own folder, and their sha256."""

from __future__ import annotations

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.plugins import MOVED, load

PACKAGE = __name__.partition(".")[0]
_imported: dict[str, tuple[Any, str]] = {}  # by module: spec of its import, sha256 at that time


def sha256(field: str, name: str) -> str:
    """Return the sha256 (hex) of a plug-in's source as this process has imported it.

    It covers the module, and the modules beside it and in its package that it imports. Modules of `dpcfl_net` and of other packages are
    left out. A change of the files takes effect in a new process, or after `importlib.reload`.

    Args:
        field: Configuration field, for messages.
        name: `package.module:function`.

    Raises:
        ConfigError: If the plug-in cannot be imported.
    """
    load(field, name)
    module = _module(name)
    spec = sys.modules[module].__spec__
    known = _imported.get(module)
    if known is None or known[0] is not spec:
        known = _imported[module] = spec, _sha256(module)
    return known[1]


def sha256_of_files(field: str, name: str) -> str:
    """As `sha256`, but of the files as they are now, which a new process would import."""
    load(field, name)
    return _sha256(_module(name))


def check_unchanged(field: str, name: str) -> None:
    """Check that the files of a plug-in are still those that this process has imported.

    Args:
        field: Configuration field, for messages.
        name: `package.module:function`.

    Raises:
        ConfigError: If they have changed: new processes of a run would execute other code than this one.
    """
    if sha256(field, name) != sha256_of_files(field, name):
        raise ConfigError(
            f"{field} is {name!r}: its code has changed since this process imported it; start the command again, or in Python restart "
            "the interpreter or the notebook's kernel"
        )


def _module(name: str) -> str:
    module = name.partition(":")[0]
    return MOVED.get(module, module)


def _sha256(module: str) -> str:
    origin = getattr(sys.modules[module], "__file__", None)
    if origin is None or module.partition(".")[0] == PACKAGE:
        return ""
    path, depth = Path(origin), module.count(".")
    root = path.parents[depth + 1 if path.stem == "__init__" else depth]
    found = {file.relative_to(root).as_posix(): hashlib.sha256(code).hexdigest() for file, code in _files(root, module).items()}
    return hashlib.sha256(canonical_json(found)).hexdigest()


def _is_shared(root: Path) -> bool:
    """True for a folder of installed packages, where the packages beside a plug-in's own are other people's."""
    folders = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    return root.resolve() in {Path(folder).resolve() for folder in folders}


def _files(root: Path, module: str) -> dict[Path, bytes]:
    """Source of a module and of all modules below `root` that it imports."""
    found: dict[Path, bytes] = {}
    waiting, own = {module}, module.partition(".")[0] if _is_shared(root) else None
    while waiting:
        name = waiting.pop()
        path = _file(root, name)
        if path is None or path in found:
            continue
        found[path] = path.read_bytes()
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for other in _imports(found[path], package):
            parts = other.split(".")
            if parts[0] != PACKAGE and own in (None, parts[0]):
                waiting |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found


def _file(root: Path, module: str) -> Path | None:
    folder = root.joinpath(*module.split("."))
    candidates = (folder / "__init__.py", folder.with_name(f"{folder.name}.py"))
    return next((path for path in candidates if path.is_file()), None)


def _imports(code: bytes, package: str) -> Iterator[str]:
    """Names of modules, and of what is imported from them, that some code imports anywhere."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # a module that is imported in a `try` may be broken
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
