"""Page of the commands, from the functions that typer makes commands of."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reference_pages.markdown import WRITTEN, code, table

VALUES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
INTRODUCTION = """# Commands

After this page you know every command of `dpcfl`, its arguments and its options. `dpcfl COMMAND --help` prints the same.
[Exit codes](configuration.md#exit-codes) are those of all commands.
"""


def page() -> str:
    """Return the page."""
    listed = list(_commands())
    lines = [*INTRODUCTION.splitlines(), ""]
    lines += table(
        ("command", "does"), [(f"[{name}](#{name.replace(' ', '-')})", _help(command)[0]) for name, command in listed]
    )
    for name, command in listed:
        parameters = list(_parameters(command))
        usage = " ".join(filter(None, (name, *(parameter.usage for parameter in parameters), "[OPTIONS]")))
        lines += [f"## {name}", "", *(line for text in _help(command) for line in (text, "")), "```text", usage, "```", ""]
        lines += table(("argument, option", "value", "default", "meaning"), [parameter.row for parameter in parameters])
    return "\n".join(lines).rstrip() + f"\n\n{WRITTEN}\n"


def _commands() -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the commands with their full names, groups opened."""
    from dpcfl_net.launch.cli.commands import GROUPS, SECTIONS

    for commands in SECTIONS.values():
        for command in commands:
            yield f"dpcfl {_dashed(command.__name__)}", command
    for group, (_, _, commands) in GROUPS.items():
        for command in commands:
            yield f"dpcfl {group} {_dashed(command.__name__)}", command


def _help(command: Callable[..., None]) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(command) or "").split("\n\n")]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


class _Parameter(typing.NamedTuple):
    """A parameter for the line of usage and for the table."""

    usage: str
    row: tuple[str, str, str, str]


def _parameters(command: Callable[..., None]) -> Iterator[_Parameter]:
    """Yield the parameters of a command: arguments, then options, as in its signature."""
    import typer

    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, *extra = typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        info: Any = next(iter(extra), typer.Argument())
        required = parameter.default is parameter.empty
        unset = required or parameter.default is None or parameter.default is False
        default = "required" if required else "" if unset else code(str(parameter.default))
        meaning = "; ".join(filter(None, (info.help or "", _limits(info))))
        if type(info).__name__ == "ArgumentInfo":
            shown = info.metavar or name.upper()
            usage = (shown if required else f"[{shown}]") + "..." * _is_many(kind)
            yield _Parameter(usage, (code(shown), "", default, meaning))
            continue
        declared = (info.default, *(info.param_decls or ()))  # within Annotated, typer takes the first name for a default
        given = [text for text in declared if isinstance(text, str) and text.startswith("-")]
        plain = f"--{_dashed(name)}"
        switch = f"{plain}, --no-{_dashed(name)}" if kind is bool else plain
        names = given or switch.split(", ")
        value = "" if kind is bool else info.metavar or _value(_inner(kind))
        usage = f"{names[0]} {value}" if required else ""
        yield _Parameter(usage, (", ".join(map(code, names)), code(value), default, meaning))


def _is_many(kind: Any) -> bool:
    """Return True if an argument may be repeated."""
    return any(typing.get_origin(part) is list for part in (kind, *typing.get_args(kind)))


def _inner(kind: Any) -> Any:
    """Return the type of a value: of an optional one without None, of a list its items."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union, list):  # Literal | None is a typing.Union
        return next(_inner(part) for part in typing.get_args(kind) if part is not type(None))
    return kind


def _value(kind: Any) -> str:
    """Return the placeholder of a value: its kind, or the choices."""
    return "|".join(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else VALUES[kind]


def _limits(info: Any) -> str:
    """Return the range of a number in words."""
    to = "at most" if info.min is None else "to"
    parts = [f"{word} {value:,}" for word, value in (("from", info.min), (to, info.max)) if value is not None]
    return " ".join(parts)
