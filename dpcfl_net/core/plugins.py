"""Plug-ins: functions and classes that a configuration names as `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpcfl_net.core import vision
from dpcfl_net.core.errors import ConfigError

# Earlier paths of modules of this package, which jobs and configurations may name.
MOVED = {
    "dpcfl_net.threats.nan_probe": "dpcfl_net.attacks.nan_probe",
    "dpcfl_net.threats.server_probe": "dpcfl_net.attacks.server_probe",
}
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_plugin(name: str) -> bool:
    """Return True if a name refers to a plug-in and not to a built-in."""
    return ":" in name


def short(name: str) -> str:
    """Return a name for use in a folder name: of a plug-in, only the function or class."""
    return name.rpartition(":")[2]


def load(field: str, name: str) -> Callable[..., Any]:
    """Import a plug-in from the current folder or an installed package.

    The current folder is put first on `sys.path`, as under `python -m`, and stays there for later imports. Python's own modules are
    refused: with them a configuration alone could execute a command (os:system) or remove the data sets (shutil:rmtree).

    Args:
        field: Configuration field, for messages.
        name: `package.module:function`.

    Raises:
        ConfigError: If the module or function does not exist, is Python's own or a script's, is not callable, or its import raises.
    """
    if not _FORM.fullmatch(name):
        raise ConfigError(f"{field} is {name!r}: a function of your own is written package.module:function")
    module_name, _, function_name = name.partition(":")
    if module_name.endswith(".py"):
        raise ConfigError(
            f"{field} is {name!r}: name the module, without .py: {module_name.removesuffix('.py')}:{function_name}"
        )
    if module_name == "__main__":
        raise ConfigError(
            f"{field} is {name!r}: other processes cannot import the code of a script or notebook; write it to a file, "
            f"for example my_code.py, and give the name my_code:{function_name}"
        )
    module_name = MOVED.get(module_name, module_name)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if _is_pythons(module_name):
        raise ConfigError(
            f"{field} is {name!r}: {module_name.partition('.')[0]} is a module of Python; name a function of your own"
        )
    if module_name not in sys.modules:  # in a forked process, which has it, this would take 1.4 MiB
        importlib.invalidate_caches()
    try:
        module = _with_torchvision(importlib.import_module, module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise failure(field, name, f"importing {module_name}", error) from error
        raise ConfigError(
            f"{field} is {name!r}: no module {error.name!r} in {here} or among the installed packages; "
            "start the command in the folder where the module is, or install it"
        ) from None
    except (Exception, SystemExit) as error:
        raise failure(field, name, f"importing {module_name}", error) from error
    return _function(field, name, module, function_name)


def _is_pythons(module: str) -> bool:
    """Return True for a module of the standard library, unless one of the current folder hides it; nothing is imported."""
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    known = sys.modules.get(top)
    origin = getattr(known, "__file__", None) if known is not None else getattr(importlib.util.find_spec(top), "origin", None)
    if origin is None or not os.path.isabs(origin):  # "built-in", "frozen"
        return True
    return Path(origin).resolve().is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def load_file(field: str, name: str) -> Callable[..., Any]:
    """Import a function from a Python file; the file's folder is put first on `sys.path`.

    Args:
        field: Configuration field or argument, for messages.
        name: `path/to/file.py:function`.

    Raises:
        ConfigError: If the file or function does not exist, is not callable, or the file raises.
    """
    path, _, function_name = name.rpartition(":")
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"{field} is {name!r}: there is no file {path}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module_name = f"dpcfl_file_{file.stem}"  # no installed module is hidden by a file of its name
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None, "the suffix is that of Python files"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and torch look modules up by name
    try:
        _with_torchvision(spec.loader.exec_module, module)
    except (Exception, SystemExit) as error:
        raise failure(field, name, f"importing {file.name}", error) from error
    return _function(field, name, module, function_name)


def _function(field: str, name: str, module: Any, function_name: str) -> Callable[..., Any]:
    """A callable of a module; ConfigError if there is none of this name."""
    if not hasattr(module, function_name):
        raise ConfigError(f"{field} is {name!r}: {name.rpartition(':')[0]} has no {function_name!r}")
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(f"{field} is {name!r}: {function_name!r} is of type {type(function).__name__}, not a function")
    return function


def call(field: str, name: str, *arguments: Any) -> Any:
    """Call a plug-in and return its result.

    Raises:
        ConfigError: As `load`, or if the call raises; the message names file and line.
    """
    function = load(field, name)
    try:
        return _with_torchvision(function, *arguments)
    except (Exception, SystemExit) as error:
        raise failure(field, name, "the function", error) from error


def _with_torchvision(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; repeat the call after `vision.torchvision` if torchvision could not be imported."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        if not vision.lacks_operators(error):
            raise
    vision.torchvision()
    return function(*arguments)


def failure(field: str, name: str, what: str, error: BaseException) -> ConfigError:
    """Describe what a plug-in raised, with file and line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    # Of what the author wrote: a library that was called may raise, as pydantic does for a class of options.
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, _PACKAGE))]
    last = (own or frames)[-1]
    told = last.filename.startswith(_PACKAGE) or isinstance(
        error, SyntaxError
    )  # the text of a syntax error names file and line
    where = "" if told else f" ({Path(last.filename).name}, line {last.lineno})"
    from pydantic import PydanticUserError

    raised = f"{what} raised {type(error).__name__}: {error}"
    if isinstance(error, PydanticUserError):
        raised = _option_problem(error, last)
    return ConfigError(f"{field} is {name!r}: {raised}{where}")


def _option_problem(error: Any, place: traceback.FrameSummary) -> str:
    """Say which option of which class pydantic refuses to create; its error has three lines and names no class."""
    found = re.match(r"class (\w+)", place.line or "")
    owner = ".".join(part for part in (place.name, found[1] if found else "") if part and part != "<module>")
    if untyped := re.search(r"`(\w+) = (.*)`\. All model fields", error.message):
        option, default = untyped.groups()
        return f"option {option} of {owner} has no annotation: must have one, as {option}: TYPE = {default}"
    if unknown := re.match(r"Unable to generate pydantic-core schema for (?:<class ')?(.*?)(?:'>)?\. Set", error.message):
        named = [frame.f_locals.get("namespace") for frame, _ in traceback.walk_tb(error.__traceback__)]
        annotations: dict[str, Any] = next(
            (one["__annotations__"] for one in named if isinstance(one, dict) and "__annotations__" in one), {}
        )
        short = unknown[1].rpartition(".")[2]
        options = [option for option, annotation in annotations.items() if short in str(annotation)]
        return (
            f"{'option ' + options[0] if options else 'an option'} of {owner} has the type {unknown[1]}: must be of numbers, text, bool, "
            "Path or bytes, alone or in lists, tuples, sets and dicts, or a class derived from Options"
        )
    return f"{owner}: {error.message}"
