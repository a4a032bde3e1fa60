"""Accuracy of clients that train alone, from a run of `local` beside the shown one."""

from __future__ import annotations

from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.results.run_files import numbers
from dpcfl_net.results.run_view import RunView, read_run

SAME = ("seed", "data", "model", "privacy")  # of config.yaml


def accuracy_alone(view: RunView, folder: Path | str) -> dict[int, float]:
    """Read the last accuracy of each client in a run of `local`.

    Args:
        view: The run that it is compared with.
        folder: Run folder of `local`.

    Returns:
        Client to accuracy, 0 to 1.

    Raises:
        ConfigError: If it is not a run of `local`, if it differs in seed, data, model or privacy, or if it has no accuracies.
    """
    other = read_run(folder)
    if other.algorithm != "local":
        raise ConfigError(f"{folder} is a run of {other.algorithm}: must be a run of local, in which every client trains alone")
    if different := [key for key in SAME if view.config.get(key) != other.config.get(key)]:
        raise ConfigError(f"{folder} is not comparable with {view.folder}: {', '.join(different)} of config.yaml differ")
    row = numbers(other.observed[max(other.observed)], "accuracy_by_client") if other.observed else []
    found = {client: value for client, value in enumerate(row) if value is not None}
    if not found:
        raise ConfigError(f"{folder} holds no accuracy by client")
    return found
