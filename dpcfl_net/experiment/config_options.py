"""Algorithm options in a configuration: merges those of the chosen algorithm, checks those of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from dpcfl_net.algorithms.base import Algorithm, Options, find, registry
from dpcfl_net.core import names
from dpcfl_net.core.config_messages import example_of, known_keys, missing_option, sentences
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.experiment.config_overrides import section

Hint = Callable[[str, Iterable[str]], str]  # (unknown key, keys that are more likely than others) -> hint


def with_algorithm(document: Mapping[str, Any], problems: list[str], hint: Hint) -> dict[str, Any]:
    """Merge `algorithms.<name>` into `algorithm` and `local`; whole numbers are accepted as floats.

    Args:
        document: A configuration as written.
        problems: Receives the problems that are found.
        hint: Returns the hint about an unknown key.

    Returns:
        A copy of the document with all options of the chosen algorithm.
    """
    merged = dict(document)
    chosen, by_name = merged.get("algorithm"), merged.get("algorithms")
    by_name = by_name if isinstance(by_name, dict) else {}
    if chosen is None or (isinstance(chosen, dict) and "name" not in chosen):
        problems.append(f"algorithm.name is missing: must be one of {', '.join(registry())} or package.module:Class")
        return {**merged, "algorithm": {}}
    if not isinstance(chosen, dict):
        return merged
    name = chosen["name"]
    for listed, own in by_name.items():
        problems += _listed_problems(listed, own, hint, chosen=listed == name)
    try:
        algorithm = find(str(name))
    except ConfigError as error:
        problems += error.problems
        return merged
    own = by_name.get(name)
    own = dict(own) if isinstance(own, dict) else {}
    local, before = own.pop("local", None), merged.get("local") or {}
    if isinstance(local, dict) and isinstance(before, dict):
        merged["local"] = {**before, **local}
    try:
        given = algorithm.Options.with_present_names({k: v for k, v in chosen.items() if k != "name"})
        options = _deep(algorithm.Options.with_present_names(own), given)
    except ValueError as error:
        problems.append(f"algorithm.{error}")
        return merged
    added = ""
    try:
        read = algorithm.Options.read(options)
        added = f", and this is its default in the Options of {name}"  # pydantic checks no defaults
        algorithm.Options.read(read.model_dump(warnings=False))
        options = read.model_dump(mode="json", warnings=False)
        algorithm.Options.read(options)
    except ValidationError as error:
        problems += [f"{problem}{added}" for problem in _option_problems(str(name), algorithm, error, hint)]
    except ValueError as error:
        problems.append(f"algorithm.name is {name!r}: a default of its Options is no value that a job can hold: {error}")
    merged["algorithm"] = {"name": name, **options}
    return merged


def shared_options(chosen: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the `algorithm` section for another algorithm: without options that only the present one has.

    Args:
        chosen: The section as written; keys that no algorithm has stay, and are reported later.
        name: Name of the other algorithm.
    """
    try:
        own, other = find(str(chosen.get("name"))).Options.model_fields, find(name).Options.model_fields
    except ConfigError:  # the check of the whole configuration reports it
        return dict(chosen)
    return {key: value for key, value in chosen.items() if key not in own or key in other}


def unknown_options(chosen: Mapping[str, Any]) -> list[str]:
    """List the options in the `algorithm` section that the algorithm does not have, by present or earlier name.

    Args:
        chosen: The section with the algorithm's name.

    Raises:
        ConfigError: If there is no such algorithm.
    """
    options = find(str(chosen.get("name"))).Options
    return [name for name in chosen if name != "name" and name not in {*options.model_fields, *options.earlier_names}]


def has_option(document: Mapping[str, Any], option: str) -> bool:
    """Return True if a document sets an option of any algorithm.

    Args:
        document: A configuration, or a part of one.
        option: Dotted name of the option, without `algorithm.`.
    """
    names = section(document, "algorithms")
    return any(last in part for name in ("", *names) for part, last in _places(document, name, option))


def without_options(document: dict[str, Any], options: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a document without options of the chosen algorithm, which then have their defaults.

    Args:
        document: A configuration.
        options: Dotted names of the options, without `algorithm.`.
    """
    found = copy.deepcopy(document)
    for option in options:
        for part, last in _places(found, str(section(found, "algorithm").get("name")), option):
            if last in part:
                del part[last]
    return found


def is_changed(options: Options, option: str) -> bool:
    """Return True if an option has another value than its default; False also if the algorithm has no such option.

    Args:
        options: Validated options of an algorithm.
        option: Dotted name of the option, without `algorithm.`.
    """
    name, _, rest = option.partition(".")
    if name not in type(options).model_fields:
        return False
    value = getattr(options, name)
    return is_changed(value, rest) if rest else bool(value != type(options).model_fields[name].default)


def _places(document: Mapping[str, Any], name: str, option: str) -> list[tuple[Any, str]]:
    """The sections of a document that may hold an option of an algorithm, and its last name there."""
    *path, last = option.split(".")
    found = [section(document, "algorithm"), section(section(document, "algorithms"), name)]
    for part in path:
        found = [section(place, part) for place in found]
    return [(place, last) for place in found]


def _option_problems(name: str, algorithm: type[Algorithm], error: ValidationError, hint: Hint) -> list[str]:
    """Problems of the chosen algorithm's options; for a missing one, the line to add."""
    lacking = {
        ".".join(map(str, ("algorithm", *item["loc"]))): item["loc"] for item in error.errors() if item["type"] == "missing"
    }
    lines = {
        f"{field} is missing": missing_option(name, field, example_of(algorithm.Options, path))
        for field, path in lacking.items()
    }
    keys = known_keys(algorithm.Options, "algorithm.")
    found = sentences(error, lambda path: hint(path, keys), "algorithm")
    return [lines.get(sentence, sentence) for sentence in found]


def _listed_problems(listed: str, own: Any, hint: Hint, *, chosen: bool) -> list[str]:
    """Problems of an entry of `algorithms`; options of the chosen algorithm are checked after the merge."""
    if listed not in registry():
        known = f"must be one of {', '.join(registry())}{names.hint(listed, registry())}"
        return [] if is_plugin(listed) else [f"unknown algorithm {shown(f'algorithms.{listed}')}: {known}"]
    if not isinstance(own, dict):
        return []  # the schema says so
    prefix, local = f"algorithms.{listed}", own.get("local", {})
    if not isinstance(local, dict):
        return [f"{prefix}.local is {shown(local)}: must be a section of keys and values"]
    if chosen:
        return []
    options = {key: value for key, value in own.items() if key != "local"}
    return _section_problems(f"{prefix}.local", LocalTraining, local, hint) + _section_problems(
        prefix, registry()[listed].Options, options, hint
    )


def _section_problems(prefix: str, section: type[BaseModel], values: Mapping[str, Any], hint: Hint) -> list[str]:
    """Problems of the values of a section, which may be incomplete."""
    try:
        section.model_validate(values, strict=True)
    except ValidationError as error:
        keys = known_keys(section, f"{prefix}.")
        found = sentences(error, lambda path: hint(path, keys), prefix)
        return [sentence for sentence in found if not sentence.endswith(" is missing")]
    return []


def _deep(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _deep(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out
