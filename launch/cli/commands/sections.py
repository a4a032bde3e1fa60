"""Help of `dpcfl`: commands under headings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from typer.core import TyperGroup


def description(command: Callable[..., None]) -> str | None:
    """Return the docstring of a command, from its source where Python drops docstrings, as under -OO."""
    if command.__doc__ is not None:
        return command.__doc__
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(command))).body
    assert isinstance(function, ast.FunctionDef)
    return ast.get_docstring(function)


class SectionedGroup(TyperGroup):
    """Lists commands under the heading of each, in the order in which headings first appear."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list of commands per heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        names = self.list_commands(ctx)
        width = max(map(len, names))
        for name in names:
            command: Any = self.get_command(ctx, name)
            if not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                summary = command.get_short_help_str(formatter.width - width - 6)
                sections.setdefault(heading, []).append((name.ljust(width), summary))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
