"""Messages for configuration errors: field, value, allowed values and nearest known name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dpcfl_net.core import yaml_file
from dpcfl_net.core.files import shown
from dpcfl_net.core.names import nearest

# Tags that pydantic adds to the location of an error in a union.
_TAGS = ("int", "float", "str", "bool", "constrained-int", "constrained-float", "constrained-str")
_ALLOWED = {
    "bool_type": "must be true or false",
    "dict_type": "must be a section of keys and values",
    "model_type": "must be a section of keys and values",
    "model_attributes_type": "must be a section of keys and values",
    "list_type": "must be a list, as [1, 2]",
    "float_parsing": "must be a valid number",
    "int_parsing": "must be a valid integer",
}
# Of a number that is given as text.
_QUOTED: dict[str, tuple[str, Callable[[str], float]]] = {
    "float_type": ("a valid number", float),
    "int_type": ("a valid integer", int),
}


def sentences(error: ValidationError, hint: Callable[[str], str], prefix: str = "") -> list[str]:
    """Describe each invalid field in one sentence.

    Args:
        error: Validation error of pydantic.
        hint: Returns the suffix for an unknown dotted key, such as `; did you mean 'rounds'?`.
        prefix: Dotted key of the validated section.

    Returns:
        One sentence per field.
    """
    return [sentence for _, sentence in located_sentences(error, hint, prefix)]


def located_sentences(
    error: ValidationError, hint: Callable[[str], str], prefix: str = ""
) -> list[tuple[tuple[str | int, ...], str]]:
    """Describe each invalid field as `sentences` does, with the keys and indices that lead to it.

    Args:
        error: Validation error of pydantic.
        hint: As in `sentences`.
        prefix: As in `sentences`.

    Returns:
        Place and sentence per field.
    """
    by_field: dict[str, list[Mapping[str, Any]]] = {}
    for item in error.errors():
        by_field.setdefault(_field(item, prefix), []).append(item)
    return [(items[0]["loc"], _sentence(field, items, hint)) for field, items in by_field.items()]


def missing_option(algorithm: str, field: str, example: Any) -> str:
    """Describe a missing required option of an algorithm, with an example for the file and for the command line."""
    *path, last = field.split(".")
    value: Any = {last: example}
    for part in reversed(path[1:]):
        value = {part: value}
    in_file = yaml_file.dump({"algorithms": {algorithm: value}}, flow=True).strip().removeprefix("{").removesuffix("}")
    on_line = f"{field}={yaml_file.dump(example, flow=True).strip()}"
    return f"{field} is missing; add to the file:  {in_file}  or on the command line:  {on_line}"


def example_of(options: type[BaseModel], path: Sequence[str | int]) -> Any:
    """Return the first example in the schema of a field, or a value of its type."""
    model: Any = options
    for name in path[:-1]:
        model = section_of(model.model_fields[name].annotation)
    info = model.model_fields[path[-1]]
    return info.examples[0] if info.examples else {int: 1, float: 0.1, bool: True}.get(info.annotation, "...")


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return all dotted keys of a section, including nested sections."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        if (section := section_of(info.annotation)) is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def section_of(annotation: Any) -> Any:
    """Model of a section, also of one that may be null; None for any other field."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def allowed_keys(path: str, keys: Iterable[str]) -> list[str]:
    """Return the known keys of the section of a dotted key, without the section's name."""
    section = path.rpartition(".")[0]
    return list(dict.fromkeys(key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section))


def nearest_key(path: str, keys: Iterable[str]) -> str | None:
    """Return the known key nearest to a mistyped one.

    Compares the last word within the same section first, then the whole key, then the last word in any section. A word of one letter
    is near to nothing.
    """
    keys = list(dict.fromkeys(keys))
    section, _, last = path.rpartition(".")
    if len(last) == 1:
        return None
    here = {key.rpartition(".")[2]: key for key in reversed(keys) if key.rpartition(".")[0] == section}
    if (name := nearest(last, here)) is not None:
        return here[name]
    if (name := nearest(path, keys, most=2)) is not None:
        return name
    anywhere = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return anywhere.get(nearest(last, anywhere) or "")


def _field(item: Mapping[str, Any], prefix: str) -> str:
    *within, last = [prefix, *map(str, item["loc"])] if item["loc"] else [prefix]
    known = [part for part in within if part and not _is_tag(part)]
    # The last part of an unknown key is what the user wrote, even if it looks like a tag.
    if item["type"] == "extra_forbidden" or not _is_tag(last):
        known.append(last)
    return ".".join(known)


def _is_tag(part: str) -> bool:
    return part in _TAGS or part.startswith(("literal[", "list[", "function-", "nullable["))


def _sentence(field: str, items: Sequence[Mapping[str, Any]], hint: Callable[[str], str]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key {shown(field)}{hint(field)}"
    if first["type"] == "missing":
        return f"{field} is missing"
    if first["type"] == "value_error":
        said = str(first["msg"]).removeprefix("Value error, ")
        if not field:  # of the whole document
            return said
        return f"{field} {said}" if said.startswith("is ") else f"{field}: {said}"
    one, *others = dict.fromkeys(map(_allowed, items))
    allowed = ", or ".join([one, *(other.removeprefix("must be ") for other in others)])
    return f"{field} is {_written(first.get('input'))}: {allowed}"


def _written(value: Any) -> str:
    """Show a value; null, true and false as in the file."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else shown(value)


def _is_finite(number: Callable[[str], float], text: str) -> bool:
    try:
        return math.isfinite(number(text))
    except ValueError:
        return False


def _allowed(item: Mapping[str, Any]) -> str:
    kind, value = item["type"], item.get("input")
    if kind == "list_type" and "literal[" in str(item["loc"][-1]):
        return "must be a list of these"
    if kind in _ALLOWED:
        return _ALLOWED[kind]
    if kind in _QUOTED and isinstance(value, str):
        words, number = _QUOTED[kind]
        quoted = value.isascii() and _is_finite(number, value)  # Python also reads other digits and spaces, YAML does not
        return f"must be {words}" + ("; write it without quotes" if quoted else "")
    if kind == "literal_error":
        return f"must be {item['ctx']['expected']}"
    if kind == "string_type":
        return "must be text" + ("; put it in quotes" if isinstance(value, (int, float)) else "")
    if kind == "string_pattern_mismatch":
        return f"must match {item['ctx']['pattern']}"
    if kind == "too_short":
        return f"must have at least {item['ctx']['min_length']}"
    message = str(item["msg"])
    return message.replace("Input should be", "must be").replace("String should", "must")
