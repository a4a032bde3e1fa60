"""Load a configuration: find its file, apply overrides, and validate it with messages that name the nearest valid key."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError

from dpcfl_net.algorithms.base import registry
from dpcfl_net.core import yaml_file
from dpcfl_net.core.config_messages import allowed_keys, known_keys, nearest_key, sentences
from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.core.names import hint
from dpcfl_net.core.protocol import LARGE_ROSTER
from dpcfl_net.core.types import NoEffect
from dpcfl_net.data.datasets import repeats
from dpcfl_net.data.partition import open_set
from dpcfl_net.data.settings import MOST_CLIENTS
from dpcfl_net.experiment.config_checks import combination_problems, dataset_problems, model_problems
from dpcfl_net.experiment.config_options import has_option, shared_options, with_algorithm, without_options
from dpcfl_net.experiment.config_overrides import change, outweighed, plain, with_named_sections
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.packaged import PACKAGED, packaged_in_place_of, packaged_names

GROUPS, LEAST_GROUP = 32, 100  # with a large roster: most worker processes, and fewest clients in one


def find(name: str | Path) -> Path:
    """Find a configuration by path or by the name of a packaged one.

    Args:
        name: Path of a YAML file, or a name such as "quickstart" or "r_dpcfl/fmnist_rotation". A file takes precedence over a name.

    Returns:
        Path of the YAML file.

    Raises:
        ConfigError: If it is neither; the message suggests the nearest packaged name.
    """
    if (packaged := packaged_in_place_of(name)) is not None:
        return PACKAGED / f"{packaged}.yaml"
    if not os.path.exists(name):  # False also for an invalid file name
        raise ConfigError(f"no such configuration file: {name}{hint(str(name).removesuffix('.yaml'), packaged_names())}")
    return Path(name)


def load(
    source: str | Path | Mapping[str, Any] | Config,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    defaults: Collection[str] = (),
) -> Config:
    """Load and check one configuration.

    Args:
        source: Path of a YAML file, name of a packaged configuration (see `find`), a document, or a configuration to change.
        overrides: `key=value` texts with YAML values, or a mapping. Keys are dotted; nested mappings are merged. Another
            `algorithm.name` drops the options of a configuration's algorithm, and those options of a document's algorithm that the
            other one does not have. An option of a valid source that loses its effect by an override has its default.
        defaults: Options of the algorithm, dotted, that have their defaults, whatever source and overrides say.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Lists every problem: field, value and allowed values. Also if a section of the source outweighs an override, as
            `algorithms.NAME.local` does with `local`, so that it would have no effect.
    """
    changes = overrides if isinstance(overrides, Mapping) else list(overrides)
    document, problems = _changed(source, changes)
    if problems:
        raise ConfigError(problems)
    document = without_options(document, defaults)
    try:
        return resolve(document)
    except ConfigError as error:
        changed = change({}, changes)
        lost = [option for option in idle_options(error) if not has_option(changed, option)]
        if not lost or not _is_valid(source):
            raise
    return resolve(without_options(document, lost))


def idle_options(error: ConfigError) -> list[str]:
    """List the options of the algorithm, dotted, that an error refuses since they have no effect."""
    return [problem.option for problem in error.problems if isinstance(problem, NoEffect)]


def _is_valid(source: str | Path | Mapping[str, Any] | Config) -> bool:
    """Return True if a configuration is valid as written, so that all of its options have an effect; the data may be missing."""
    try:
        resolve(source_document(source))
    except DataMissing:
        return True
    except ConfigError:
        return False
    return True


def without_effect(source: str | Path | Mapping[str, Any] | Config, changes: Mapping[str, Any]) -> list[str]:
    """Say which changes a section of the source outweighs; arguments as `load`, which refuses such changes.

    Raises:
        ConfigError: If the source cannot be read, or a part of a key is a value and not a section.
    """
    return _changed(source, changes)[1]


def _changed(
    source: str | Path | Mapping[str, Any] | Config, changes: list[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the source's document with the changes, and sentences about those without effect."""
    document, changed = source_document(source), change({}, changes)
    wanted, chosen = changed.get("algorithm"), document.get("algorithm")
    if isinstance(wanted, dict) and isinstance(chosen, dict) and wanted.get("name", chosen.get("name")) != chosen.get("name"):
        document["algorithm"] = {} if isinstance(source, Config) else shared_options(chosen, str(wanted["name"]))
    document = change(document, changes)
    return document, outweighed(document, changed)


def source_document(source: str | Path | Mapping[str, Any] | Config) -> dict[str, Any]:
    """Return a copy of the document that `load` starts from; errors as `find`."""
    if isinstance(source, Config):
        return source.model_dump(mode="json", exclude_unset=True)  # a default that depends on what is changed is found again
    if not isinstance(source, str | os.PathLike | Mapping):
        raise ConfigError(
            f"config is of type {type(source).__name__}: must be a file, the name of a packaged configuration, a dictionary or a Config"
        )
    return with_named_sections(plain(source) if isinstance(source, Mapping) else read_document(find(source)))


def read_kept(path: Path) -> Config:
    """Read the resolved configuration of a run folder, without the data set; ConfigError naming the file if it is damaged."""
    try:
        return Config.model_validate(read_document(path), strict=True)
    except ValidationError as error:
        raise ConfigError([f"{path}: {problem}" for problem in sentences(error, _key_hint)]) from None


def read_document(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file without validation; ConfigError if the file holds no mapping."""
    document = yaml_file.load(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return document


def resolve(document: Mapping[str, Any]) -> Config:
    """Validate a document, merge the chosen algorithm's options, and check combinations of settings.

    `data.sha256` of a plugin data set is filled in.

    Args:
        document: A configuration as written.

    Raises:
        ConfigError: Lists every problem.
    """
    problems = [
        f"{key} is {value!r}: must be 0 or at least {sys.float_info.min:.3g} in magnitude, since processes that train take smaller "
        "numbers for 0"
        for key, value in _numbers(document)
        if 0 < abs(value) < sys.float_info.min
    ]
    document, added = _with_dependent_defaults(with_algorithm(with_named_sections(document), problems, _key_hint))
    config: Config | None = None
    try:
        config = Config.model_validate(document, strict=True)
        for section, key in added:
            getattr(config, section).model_fields_set.discard(key)  # see `source_document`
    except ValidationError as error:
        problems += sentences(error, _key_hint)
        data, model = document.get("data"), document.get("model")
        problems += dataset_problems(data.get("dataset")) if isinstance(data, dict) else []
        problems += model_problems(model.get("name")) if isinstance(model, dict) else []
    if config is not None and not problems:
        problems += combination_problems(config)
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    sha256 = open_set(config.data, config.data.root).sha256
    if config.ledger.scope == "dataset" and config.data.sha256 is None and not repeats(config.data.dataset, config.data.root):
        raise ConfigError(
            f"ledger.scope is 'dataset': {config.data.dataset} returned other records when it was called again, and the record book knows "
            "records by their content, so that nothing would count as spent on them: give its random numbers a fixed seed, or set "
            "data.sha256 to that in the config.yaml of the first run"
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"sha256": sha256})})


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Dotted key and value of each number with a fraction in a document."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _numbers(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, key)


def _with_dependent_defaults(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Set defaults that depend on other settings; returns the document with them, and their sections and keys.

    No transcript in one process or with aggregators, many clients per process of a large roster, and the terms of secure sums.
    """
    runtime, output, data = (document.get(name, {}) for name in ("runtime", "output", "data"))
    found: dict[tuple[str, str], Any] = {}
    runtime_given = runtime if isinstance(runtime, dict) else {}
    without = runtime_given.get("federation") == "in-process" or runtime_given.get("aggregators")
    if without and isinstance(output, dict) and "transcript" not in output:
        found["output", "transcript"] = "off"
    privacy = document.get("privacy")
    if isinstance(privacy, dict) and privacy.get("trust") == "secure-aggregation" and privacy.get("secure_aggregation") is None:
        found["privacy", "secure_aggregation"] = {}
    sizes = data.get("clients") if isinstance(data, dict) else None
    if isinstance(runtime, dict) and "clients_per_worker" not in runtime and _can_group(document) and _counts(sizes):
        size = group_size(sum(sizes))
        if size > 1:
            found["runtime", "clients_per_worker"] = size
    complete = dict(document)
    for (section, key), value in found.items():
        complete[section] = {**complete.get(section, {}), key: value}
    return complete, list(found)


def group_size(clients: int) -> int:
    """Return the default number of clients per worker process: 1, or for a large roster what makes at most GROUPS processes.

    Args:
        clients: Number of clients.
    """
    return 1 if clients < LARGE_ROSTER else max(LEAST_GROUP, -(-clients // GROUPS))


def _counts(sizes: Any) -> TypeGuard[list[int]]:
    """Return True for a list of cluster sizes; anything else is reported by the schema."""
    return isinstance(sizes, list) and all(type(size) is int and 0 < size <= MOST_CLIENTS for size in sizes)


def _can_group(document: Mapping[str, Any]) -> bool:
    """Return True unless each client has a network namespace, which clients of one process would share."""
    network = document.get("network")
    return not (isinstance(network, dict) and network.get("how") == "netem")


def _key_hint(path: str, first: Iterable[str] = ()) -> str:
    """Hint about an unknown key: its algorithm, or the most similar key; keys in `first` are more likely."""
    options = {name: known_keys(algorithm.Options, "algorithm.") for name, algorithm in registry().items()}
    owners = [name for name, keys in options.items() if path in keys]
    if owners:
        return f", an option of {', '.join(owners)}"
    first = list(first)
    everywhere = [*first, *known_keys(Config), *(key for keys in options.values() for key in keys)]
    if near := nearest_key(path, everywhere):
        return f", did you mean {near!r}?"
    allowed = allowed_keys(path, first) or allowed_keys(path, everywhere)
    return f": must be one of {', '.join(allowed)}" if allowed else ""
