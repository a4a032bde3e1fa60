"""Common parts of the scripts: they choose steps by name, print a verdict, and end with an exit code instead of a traceback."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.files import reason


class Named(Protocol):
    """A step of a script."""

    @property
    def name(self) -> str: ...


class Judged(Protocol):
    """A client's reaction to a step."""

    @property
    def holds(self) -> bool: ...


AnyStep = TypeVar("AnyStep", bound=Named)


def seconds(text: str) -> float:
    """Parse a number of seconds above 0, as the type of an argument."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0")
    return found


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
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {reason(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
