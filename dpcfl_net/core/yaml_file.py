"""YAML 1.2 (core schema) of bounded size, without duplicate keys; errors name the line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.reader import ReaderError

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import read_text, shown

MOST_BYTES, MOST_DEPTH, MOST_NODES, MOST_DIGITS = 1 << 20, 32, 50_000, 100

_WORDS = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.capitalize(), word.upper())
}
# Section 10.3.2 of YAML 1.2; also digits grouped by underscores, as in PyYAML and Python.
_INTEGER = re.compile(r"[-+]?\d+(_\d+)*|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(_\d+)*(\.\d*)?)([eE][-+]?\d+)?", re.ASCII)
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TEXT = ("!", "tag:yaml.org,2002:str")


def load(path: Path) -> Any:
    """Read a YAML file; ConfigError as `files.read_text` and `parse`."""
    return parse(read_text(path, MOST_BYTES), str(path))


def parse(text: str, where: str) -> Any:
    """Parse YAML.

    Args:
        text: One YAML document, or an empty text.
        where: Origin of the text for messages: a path or an argument.

    Returns:
        Mappings with text keys, lists, text, numbers, Booleans and None. `1e-4` is a number; `on`, `yes` and `1:30` are text.
        An alias stands for a copy; `<<` merges mappings.

    Raises:
        ConfigError: If the text is not YAML, holds a duplicate key, a tag or a second document, or exceeds MOST_BYTES,
            MOST_DEPTH, MOST_NODES (aliases expanded) or MOST_DIGITS.
    """
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{where}: more than {MOST_BYTES:,} characters, the limit")
    try:
        return _Builder(text, where).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark is not None else ""
        problem = "a tab where YAML allows only spaces" if "'\\t'" in (error.problem or "") else error.problem or error.context
        raise ConfigError(f"{where} is not YAML: {problem}{line}") from None
    except ReaderError as error:
        code = f"#x{ord(error.character):04x}" if isinstance(error.character, str) else f"#x{error.character:04x}"
        raise ConfigError(f"{where} is not YAML: character {code} at position {error.position} is not allowed") from None


def dump(value: Any, *, flow: bool | None = None) -> str:
    """Format a value as YAML that `parse` reads back unchanged.

    Args:
        value: Mappings with text keys, lists, text, numbers, Booleans and None.
        flow: True for one line, False for one line per item, None for innermost lists and mappings in one line.

    Returns:
        The text.
    """
    width = math.inf if flow else None
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=width)
    return text.removesuffix("...\n")


class _Builder:
    """Builds the value from parser events; an alias repeats the events of its anchor, so that all limits apply to it."""

    def __init__(self, text: str, where: str) -> None:
        self._where, self._nodes = where, 0
        self._events: Iterator[Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._anchors: dict[str, list[Event]] = {}
        self._recording: list[list[Event]] = []

    def document(self) -> Any:
        next(self._events)  # the stream's start
        start = next(self._events)
        if isinstance(start, StreamEndEvent):
            return None
        value = self._node(self._next(), 1)
        next(self._events)  # the document's end
        if isinstance(more := next(self._events), DocumentStartEvent):
            raise self._wrong(more, "a second document begins; only one is allowed")
        return value

    def _next(self) -> Event:
        event = next(self._events)
        for events in self._recording:
            events.append(event)
        return event

    def _node(self, event: Event, depth: int) -> Any:
        self._nodes += 1
        if depth > MOST_DEPTH:
            raise self._wrong(event, f"nested more than {MOST_DEPTH} deep")
        if self._nodes > MOST_NODES:
            raise self._wrong(event, f"more than {MOST_NODES:,} values, aliases expanded")
        assert isinstance(event, NodeEvent)
        if isinstance(event, AliasEvent):
            return self._alias(event, depth)
        if event.anchor is None:
            return self._value(event, depth)
        events: list[Event] = []
        self._anchors.pop(event.anchor, None)
        self._recording.append(events)
        value = self._value(event, depth)
        self._recording = [other for other in self._recording if other is not events]
        self._anchors[event.anchor] = [event, *events]
        return value

    def _alias(self, event: AliasEvent, depth: int) -> Any:
        if event.anchor not in self._anchors:
            raise self._wrong(event, f"alias *{event.anchor} has no complete anchor before it")
        first, *rest = self._anchors[event.anchor]
        for events in self._recording:
            events[-1] = first
        outer, self._events = self._events, iter(rest)
        value = self._value(first, depth)
        self._events = outer
        return value

    def _value(self, event: Event, depth: int) -> Any:
        if isinstance(event, ScalarEvent):
            return self._scalar(event)
        if isinstance(event, SequenceStartEvent):
            self._untagged(event)
            found = []
            while not isinstance(item := self._next(), SequenceEndEvent):
                found.append(self._node(item, depth + 1))
            return found
        assert isinstance(event, MappingStartEvent)
        self._untagged(event)
        return self._mapping(depth)

    def _mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(key := self._next(), MappingEndEvent):
            if not isinstance(key, ScalarEvent):
                raise self._wrong(key, "a key must be text, not a list, a mapping or an alias")
            name, line = key.value, _line(key)
            if name in lines:
                raise self._wrong(key, f"key {shown(name)} is given twice, first in line {lines[name]}")
            lines[name] = line
            value = self._node(self._next(), depth + 1)
            if name == "<<" and key.implicit[0]:
                merged = self._merged(key, value)
            else:
                found[name] = value
        return {**merged, **found}

    def _merged(self, key: Event, value: Any) -> dict[str, Any]:
        """Merge mappings; the first one takes precedence."""
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            raise self._wrong(key, "<< must be followed by a mapping or a list of mappings")
        return {name: item for part in reversed(parts) for name, item in part.items()}

    def _scalar(self, event: ScalarEvent) -> Any:
        if "\0" in event.value:
            raise self._wrong(event, f"{shown(event.value)} holds a null character")
        if event.tag in _TEXT or (event.tag is None and not event.implicit[0]):
            return event.value
        self._untagged(event)
        try:
            return _plain(event.value)
        except ValueError as error:
            raise self._wrong(event, str(error)) from None

    def _untagged(self, event: Any) -> None:
        if event.tag is not None and event.tag not in _TEXT[:1]:
            raise self._wrong(event, f"tag {shown(event.tag)} is not allowed here")

    def _wrong(self, event: Event, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}, line {_line(event)}: {problem}")


def _line(event: Event) -> int:
    return 0 if event.start_mark is None else event.start_mark.line + 1


def _plain(text: str) -> Any:
    """Value of an unquoted scalar; ValueError for a number that is too long or too large."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > MOST_DIGITS:
            raise ValueError(f"a number of {len(text):,} digits; at most {MOST_DIGITS} are allowed")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if found := _SPECIAL.fullmatch(text):
        return math.nan if found[1] is None else float(f"{found[1]}inf")
    if _FLOAT.fullmatch(text):
        value = float(text)
        if math.isinf(value):
            raise ValueError(f"{shown(text)} is beyond the largest number, about 1.8e308")
        return value
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes strings that would be parsed as another type; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    try:
        plain = isinstance(_plain(text), str)
    except ValueError:
        plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


_Dumper.add_representer(str, _represent_text)
