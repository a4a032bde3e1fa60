"""Page of the configuration keys, from the schema that also checks configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from reference_pages.markdown import WRITTEN, code, table

HEAD = ("key", "type", "default", "allowed", "meaning")
NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true, false",
    "object": "mapping",
    "null": "null",
}
INTRODUCTION = """# Configuration keys

After this page you know every key of a configuration: its type, its default, the values that are allowed, and its meaning.

```sh
dpcfl schema        # the same as a JSON schema, for editors
```

A key such as `privacy.epsilon` is `privacy: {epsilon: 5}` in the file, and `privacy.epsilon=5` on the command line.
[Configuration](configuration.md) explains values, overrides, limits that join several keys, and exit codes.
"""


def page() -> str:
    """Return the page."""
    from dpcfl_net.algorithms.base import registry
    from dpcfl_net.experiment.config_schema import schema

    document = schema()
    definitions = document["$defs"]
    top = {name: _long_form(part) for name, part in document["properties"].items() if name != "algorithm"}
    plain = {name: part for name, part in top.items() if "$ref" not in part}
    lines = [*INTRODUCTION.splitlines(), "", "## Top level", ""]
    lines += table(HEAD, [*_rows(plain, set(document["required"]), "", definitions), _algorithm_row()])
    for name, part in top.items():
        if "$ref" in part:
            lines += [f"## {name}", "", f"{_sentence(part['description'])}", ""]
            lines += table(HEAD, _section(_definition(part, definitions), f"{name}.", definitions))
    lines += ["## Options of algorithms", "", "Under `algorithm`, beside its `name`; or under `algorithms.NAME`.", ""]
    *sections, name_alone = document["properties"]["algorithm"]["anyOf"]
    assert name_alone["type"] == "string"
    for name, part in zip(registry(), sections, strict=True):
        assert part["title"] == name
        paper = registry()[name].paper
        options = {key: value for key, value in part["properties"].items() if key != "name"}
        lines += [f"### {name}", "", f"Source: {paper}.", ""]
        if options:
            lines += table(HEAD, _rows(options, set(part.get("required", ())), "", definitions))
        else:
            lines += ["No options.", ""]
    return "\n".join(lines).rstrip() + f"\n\n{WRITTEN}\n"


def _algorithm_row() -> tuple[str, ...]:
    """Describe `algorithm`, whose content depends on its name."""
    meaning = "name (or your own: package.module:Class) and [options](#options-of-algorithms)"
    return (code("algorithm"), "mapping or text", "required", "", f"{meaning}; or the name alone")


def _long_form(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a section that may also be a name alone, such as `model`, as a section."""
    match part.get("anyOf"):
        case [{"$ref": reference}, {"type": "string"}]:
            return {**part, "$ref": reference}
    return part


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _definition(part: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    return definitions[part["$ref"].rpartition("/")[2]]


def _section(section: Mapping[str, Any], prefix: str, definitions: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return list(_rows(section["properties"], set(section.get("required", ())), prefix, definitions))


def _rows(
    properties: Mapping[str, Any], required: set[str], prefix: str, definitions: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each key, and after a section its keys with their dotted names."""
    for name, part in properties.items():
        key = f"{prefix}{name}"
        default = "required" if name in required else code(_yaml(part.get("default"), part, definitions))
        yield code(key), _type(part), default, _allowed(part), part.get("description", "")
        inner = next((choice for choice in (part, *part.get("anyOf", ())) if "$ref" in choice), None)
        repeated = next(iter(part.get("patternProperties", {}).values()), None)
        if inner is not None:
            yield from _section(_definition(inner, definitions), f"{key}.", definitions)
        elif repeated is not None and "$ref" in repeated:
            fields = ", ".join(code(field) for field in _definition(repeated, definitions)["properties"])
            yield code(f"{key}.N"), "mapping", "", "", f"N: number from 0; fields {fields}, as of `{prefix}default`"


def _yaml(value: Any, part: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return a default as it is written in a configuration; nothing for a section, whose keys have their defaults."""
    if "$ref" in part or (isinstance(value, Mapping) and value):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value == round(value, 9):
        return f"{value:g}"
    return json.dumps(value)


def _type(part: Mapping[str, Any]) -> str:
    """Return the type in words."""
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_type(choice) for choice in part["anyOf"]))
    if "$ref" in part:
        return "section"
    if "const" in part:
        return code(str(part["const"]))
    if part.get("type") == "array":
        items = part.get("items", {})
        return f"list of {_type(items)}s" if items.get("type") in NAMES else "list"
    return NAMES[part["type"]]


def _allowed(part: Mapping[str, Any]) -> str:
    """Return the allowed values in words; nothing if the type says all."""
    if "anyOf" in part:
        return "; ".join(filter(None, (_allowed(choice) for choice in part["anyOf"])))
    if "enum" in part:
        return ", ".join(code(str(value)) for value in part["enum"])
    most = "to" if "minimum" in part else "at most"
    words = {
        "exclusiveMinimum": "above",
        "minimum": "from",
        "exclusiveMaximum": "below",
        "maximum": most,
        "multipleOf": "multiple of",
    }
    bounds = ", ".join(f"{word} {_number(part[name])}" for name, word in words.items() if name in part).replace(", to ", " to ")
    pattern = part.get("pattern")
    found = [bounds, f"pattern {code(_readable(pattern))}" if pattern else ""]
    return ", ".join(filter(None, found))


def _number(value: float) -> str:
    """Return a bound; large powers of two as such."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 2**power and power > 40 else f"{value:,.12g}"


def _readable(pattern: str) -> str:
    return re.sub(r"^\^|\$$", "", pattern)
