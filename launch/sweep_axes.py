"""Axes of a sweep: settings and their values, from the command line or the Python API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from dpcfl_net.core import yaml_file
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.experiment.config_overrides import NAMED_SECTIONS, full_key, plain

MOST_CELLS = 5_000
OPEN, CLOSE, QUOTES = "[{(", "]})", "'\""


def parse_axes(items: Iterable[str]) -> dict[str, list[str]]:
    """Parse axes of the command line: `key=a,b,c`, or `key=0:4` for 0, 1, 2, 3.

    Commas inside brackets, braces and quotes do not separate values.

    Args:
        items: One item per axis.

    Returns:
        Values as YAML text, by dotted key; `algorithm=a,b` is the axis `algorithm.name`.

    Raises:
        ConfigError: With every invalid item.
    """
    axes: dict[str, list[str]] = {}
    problems = []
    for item in items:
        key, equals, text = item.partition("=")
        if (span := _span(text)) is not None and len(span) > MOST_CELLS:
            raise ConfigError(f"axis {item!r} has {len(span):,} values, must be at most {MOST_CELLS:,}")
        values = _values(text)
        if equals and key and span is not None and not span:
            problems.append(f"axis {item!r} is an empty range: stop must be above start, as in {key}=0:4 for 0, 1, 2, 3")
        elif not equals or not key or not values or "" in values:
            problems.append(f"axis {item!r} is not key=value,value or key=start:stop, for example seed=0:4")
        elif key in axes:
            problems.append(f"axis {key!r} is given twice: put its values into one list")
        elif len(set(map(_number_or_text, values))) < len(values):
            problems.append(f"axis {item!r} has a value twice")
        axes[key] = values
    if problems:
        raise ConfigError(problems)
    return _with_full_keys(axes)


def axes_of(values: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Convert axes of the Python API to the form of `parse_axes`.

    Args:
        values: Lists of values, by dotted key.

    Returns:
        Values as YAML text, by dotted key.

    Raises:
        ConfigError: With every axis that is not a list of different values.
    """
    axes: dict[str, list[str]] = {}
    problems = []
    for key, given in values.items():
        listed = plain(given if hasattr(given, "tolist") else list(given)) if isinstance(given, Iterable) else []
        if isinstance(given, str | Mapping) or not isinstance(listed, list) or not listed:
            problems.append(f"axis {key!r} is {shown(given)}: must be a list of values, for example [0, 1, 2]")
            continue
        axes[key] = [yaml_file.dump(value, flow=True).strip() for value in listed]
        if len(set(axes[key])) < len(listed):
            problems.append(f"axis {key!r} has a value twice: {shown(listed)}")
    if problems:
        raise ConfigError(problems)
    return _with_full_keys(axes)


def _with_full_keys(axes: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Rename an axis of names, such as `algorithm=global,local`, to its full key `algorithm.name`."""
    found: dict[str, list[str]] = {}
    for key, texts in axes.items():
        values = [yaml_file.parse(text, f"axis {key}") for text in texts] if key in NAMED_SECTIONS else []
        names = values and all(isinstance(value, str) for value in values)
        full = full_key(key, values[0]) if names else key
        if full in found or (full != key and full in axes):
            raise ConfigError(f"axes {key!r} and {full!r} are the same setting: put the values into one list")
        found[full] = texts
    return found


def _number_or_text(text: str) -> Decimal | str:
    """Return equal values for equal numbers, such as 1, 1.0 and 1e0."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text


def _span(text: str) -> range | None:
    """Parse `start:stop`; None for other text."""
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text, re.ASCII)
    return range(int(found[1]), int(found[2])) if found else None


def _values(text: str) -> list[str]:
    """Expand `start:stop`, or split at commas outside brackets, braces and quotes."""
    if (span := _span(text)) is not None:
        return [str(number) for number in span]
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        else:
            depth += (letter in OPEN) - (letter in CLOSE)
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
