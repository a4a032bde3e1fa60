"""Changes to a configuration document: `key=value` texts and mappings with dotted keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpcfl_net.core import yaml_file
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown

MOST_KEY_PARTS = 8  # of a dotted key
_PLUGIN_SECTION = re.compile(r"algorithms\.([^:]+:[^.]+)(?:\.(.+))?")  # the name package.module:Class is one part of a key
NAMED_SECTIONS = ("algorithm", "model")  # a name alone may stand for such a section: `algorithm=global`


def with_named_sections(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a document with `algorithm: global` written out as `algorithm: {name: global}`; `model` alike."""
    named = {key: {"name": value} for key, value in document.items() if key in NAMED_SECTIONS and isinstance(value, str)}
    return {**document, **named}


def full_key(key: str, value: Any) -> str:
    """Return the dotted key that a value belongs to: `algorithm.name` for a name that is given for `algorithm`."""
    return f"{key}.name" if key in NAMED_SECTIONS and isinstance(value, str) else key


class _Change(NamedTuple):
    """One value that is to be set, with the text that asks for it."""

    text: str
    key: str
    value: Any


def change(document: dict[str, Any], changes: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to a document in place, and return it.

    Args:
        document: The configuration as it was written.
        changes: Texts of a dotted key and a YAML value, as "privacy.epsilon=3", where "algorithm=global" is "algorithm.name=global"; or
            values by dotted key, as {"privacy.epsilon": 3}, {"privacy": {"epsilon": 3}} or {"algorithm": "global"}, where nested
            mappings are merged into their sections.

    Raises:
        ConfigError: If a text or a key has another form, if a part of a key is a value and not a section, or if two changes contradict
            each other.
    """
    given = list(_merged(changes)) if isinstance(changes, Mapping) else [_parsed(item) for item in changes]
    wanted = [
        list(_leaves(tuple(key_parts(key)), value)) for _, key, value in given
    ]  # before `_set`, which changes sections in place
    for _, key, value in given:
        _set(document, key, value)
    problems = []
    for number, leaves in enumerate(wanted):
        for path, value in leaves:
            if not _holds(document, path, value):
                last = next(one for one in reversed(given[number + 1 :]) if _overlap(path, key_parts(one.key)))
                problems.append(
                    f"overrides {shown(given[number].text)} and {shown(last.text)} contradict each other: give one of them"
                )
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return document


def _parsed(item: str) -> _Change:
    """Read a `key=value` text."""
    key, equals, text = item.partition("=")
    if not equals or not _is_key(key):
        raise ConfigError(f"override {shown(item)} is not key=value, for example privacy.epsilon=3")
    value = yaml_file.parse(text, f"override {shown(item)}")
    return _Change(item, full_key(key, value), value)


def _merged(changes: Mapping[str, Any], within: str = "") -> Iterator[_Change]:
    """List the values of nested mappings by dotted key; `within` is the section that they belong to."""
    for name, value in changes.items():
        key = f"{within}.{name}" if within else name
        if not isinstance(key, str) or not _is_key(key):
            raise ConfigError(f"override {shown(key)} is not a dotted key, for example privacy.epsilon")
        if isinstance(value, Mapping) and value:
            yield from _merged(value, key)
        else:
            yield _Change(f"{key}={value}", full_key(key, value), plain(value))


def _leaves(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """List the values in a section by path; a value is its own only one."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    else:
        yield path, value


def _holds(document: Any, path: Sequence[Any], value: Any) -> bool:
    """Return True if a document has this value at a path."""
    for part in path:
        if not isinstance(document, dict) or part not in document:
            return False
        document = document[part]
    return document is value or bool(document == value)


def _overlap(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True if one of two paths is the other one, or a section around it."""
    shorter = min(len(one), len(other))
    return list(one[:shorter]) == list(other[:shorter])


def outweighed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Find changes of the chosen algorithm's settings that another section of the document outweighs.

    Args:
        document: The configuration, with the changes.
        changes: The changes alone, as nested sections.

    Returns:
        One sentence for each of them: the key that has the effect, and its value.
    """
    name = section(document, "algorithm").get("name")
    own, own_changed = (section(section(place, "algorithms"), str(name)) for place in (document, changes))
    found = _outweighed(
        ("local", section(changes, "local")), (f"algorithms.{name}.local", section(own, "local")), section(own_changed, "local")
    )
    options = {key: value for key, value in own_changed.items() if key != "local"}
    return found + _outweighed(
        (f"algorithms.{name}", options), ("algorithm", section(document, "algorithm")), section(changes, "algorithm")
    )


def section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a section of a document; empty if it is missing or no section."""
    found = document.get(key)
    return found if isinstance(found, Mapping) else {}


def _outweighed(
    changed: tuple[str, Mapping[str, Any]], stronger: tuple[str, Mapping[str, Any]], also_changed: Mapping[str, Any]
) -> list[str]:
    """Sentences about changed keys that a stronger section has with another value, unless that value was changed too."""
    (prefix, values), (strong, winners) = changed, stronger
    return [
        f"{prefix}.{key} is {shown(value)}: it has no effect, since {strong}.{key} is {shown(winners[key])}; set {strong}.{key}"
        for key, value in values.items()
        if key in winners and key not in also_changed and winners[key] != value and not isinstance(value, Mapping)
    ]


def plain(value: Any) -> Any:
    """Convert a Python value to YAML types: a deep copy with lists for tuples, text for paths, no numpy numbers.

    Raises:
        ConfigError: For a function or class, which a configuration can only name.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        module = value.__module__ if value.__module__ != "__main__" else "my_code"
        raise ConfigError(
            f"a configuration cannot hold {value.__qualname__!r} itself: give its name, '{module}:{value.__qualname__}'"
        )
    return value.tolist() if hasattr(value, "tolist") else value


def _is_key(key: str) -> bool:
    parts = key_parts(key)
    return all(parts) and len(parts) <= MOST_KEY_PARTS


def key_parts(key: str) -> list[str]:
    """Split a dotted key; `algorithms.package.module:Class.ratio` has three parts."""
    if named := _PLUGIN_SECTION.fullmatch(key):
        name, rest = named.groups()
        return ["algorithms", name, *(rest.split(".") if rest is not None else [])]
    return key.split(".")


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key_parts(key)
    at = document
    for part in path:
        nested = at.get(part)
        if nested is None:
            nested = at[part] = {}
        if not isinstance(nested, dict):
            raise ConfigError(f"override {key!r}: {part!r} is a value, not a section")
        at = nested
    at[last] = value
