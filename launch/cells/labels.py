"""Labels of runs: algorithm, seed, and the settings that differ between the runs of a list."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.results.compare import dotted


def labels(cells: Sequence[Config]) -> list[str]:
    """Label runs so that each can be told from the others.

    Args:
        cells: Their configurations.

    Returns:
        Name, algorithm, differing settings by the last part of their key, and seed; an option of an algorithm counts only if it
        differs between runs of that algorithm.
    """
    settings = [dotted(config.model_dump(mode="json")) for config in cells]
    values = defaultdict[tuple[str, str], set[str]](set)
    for own in settings:
        for key, value in own.items():
            values[_group(key, own), key].add(json.dumps(value))
    return [
        " ".join([
            config.name,
            config.algorithm["name"],
            *(f"{key.rpartition('.')[2]}={_text(value)}" for key, value in own.items() if len(values[_group(key, own), key]) > 1),
            f"seed={config.seed}",
        ])
        for config, own in zip(cells, settings, strict=True)
    ]  # fmt: skip


def _group(key: str, own: dict[str, object]) -> str:
    """Return the algorithm whose runs a setting is compared within; "" for those of all."""
    return str(own["algorithm.name"]) if key.startswith("algorithm.") else ""


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
