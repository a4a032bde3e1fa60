"""Updates and cluster choices that the server of a run received, from a full transcript."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.capabilities import client_steps, update_tensor
from dpcfl_net.results.recorded_messages import decoded_messages

MOST = 50_000_000  # numbers in the updates of one round


@dataclass
class Seen:
    """Messages that the server received, as figures.

    Attributes:
        components: Round to client to its update in the two principal components of the round's updates.
        choices: Round to client to the cluster that it chose.
    """

    components: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    choices: dict[int, dict[int, int]] = field(default_factory=dict)


def read_seen(folder: Path, job: Job, rounds: Collection[int]) -> Seen:
    """Read updates of some rounds, and all choices.

    Args:
        folder: Run folder.
        job: The run's job.
        rounds: Rounds whose updates are read.

    Returns:
        Updates of rounds in which at least three clients sent one, and choices.

    Raises:
        ConfigError: If there is no transcript, or the updates of a round are too large to be held at once.
        Refused: If the transcript was changed.
    """
    path = RunFolder(folder).transcript
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name}")
    size = len(job.protocol.roster) * sum(int(np.prod(shape)) for _, shape in job.protocol.model.layout)
    if size > MOST:
        raise ConfigError(f"the updates of one round hold {size:,} numbers, and at most {MOST:,} are read")
    names = {name: update_tensor(step) for name, step in client_steps(job.algorithm).items()}
    updates: defaultdict[int, dict[int, np.ndarray]] = defaultdict(dict)
    seen = Seen()
    for record, header, tensors in decoded_messages(path, job.algorithm):
        client = record.client
        if client is None or header.kind != "RESULT" or header.code != "release" or tensors is None:
            continue
        update = tensors.get(names.get(header.task) or "")
        if header.round in rounds and update is not None and np.isfinite(update).all():
            updates[header.round].setdefault(client, update.ravel())
        if "choice" in tensors:
            seen.choices.setdefault(header.round, {}).setdefault(client, int(tensors["choice"]))
    for t, own in sorted(updates.items()):
        if len(own) > 2 and len({len(update) for update in own.values()}) == 1:
            points = principal_components(np.stack([own[client] for client in sorted(own)]))
            seen.components[t] = {client: (float(a), float(b)) for client, (a, b) in zip(sorted(own), points, strict=True)}
    return seen


def principal_components(rows: np.ndarray) -> np.ndarray:
    """Return the coordinates of rows, (n, p), on their first two principal components, (n, 2), through the Gram matrix."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred @ centred.T)
    return vectors[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0.0))
