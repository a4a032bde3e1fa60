"""Common parts of the scripted malicious servers: they choose steps by name, print a verdict, and end with its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from dpcfl_net.core.errors import ConfigError, DpcflError


class Named(Protocol):
    """A step of a script."""

    @property
    def name(self) -> str: ...


class Judged(Protocol):
    """A client's reaction to a step."""

    @property
    def holds(self) -> bool: ...


AnyStep = TypeVar("AnyStep", bound=Named)


def chosen(names: str, script: Sequence[AnyStep]) -> list[AnyStep]:
    """Return steps of a script by their names.

    Args:
        names: Names separated by commas, or "all".
        script: All steps, in their order.

    Raises:
        ConfigError: For an unknown name.
    """
    if names == "all":
        return list(script)
    known, wanted = {step.name: step for step in script}, [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"unknown step {', '.join(map(repr, unknown))}: must be of {', '.join(known)}")
    return [known[name] for name in wanted]


def verdict(reactions: Sequence[Judged]) -> int:
    """Print how many reactions hold.

    Returns:
        Exit code: 0 if all do, 3 if one does not or there are none.
    """
    held = sum(reaction.holds for reaction in reactions)
    print(f"{held} of {len(reactions)} reactions hold")
    return 0 if reactions and held == len(reactions) else 3


def run(main: Callable[[], int]) -> None:
    """Run a program and exit with its code, or with that of its error.

    Args:
        main: The program.
    """
    try:
        sys.exit(main())
    except DpcflError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
