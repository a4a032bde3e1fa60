"""Accuracy and loss that privacy costs each client (F_acc and F_loss of RC-DPFL), relative to models trained without privacy.

Reads the experiment part of a job and the observer's results; nothing flows back into the run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core import runlog
from dpcfl_net.core.atomic import replacing
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.data import cache
from dpcfl_net.data.datasets import Images
from dpcfl_net.data.partition import open_rows
from dpcfl_net.data.slices import Slice
from dpcfl_net.experiment.job_files import Job, partition
from dpcfl_net.experiment.statement import FAIRNESS
from dpcfl_net.results.summary import add_not_covered, read_run_job
from dpcfl_net.training.worker_settings import as_in_a_worker

EPOCHS, BATCH, RATE, MOMENTUM = 10, 64, 0.02, 0.9


def add_fairness(folder: Path, root: str | None = None) -> dict[str, float | None]:
    """Compute F_acc and F_loss of the last round and append them to metrics.jsonl unless it holds them; the statement names them.

    F = max over clients i, j of |drop_i - drop_j|, where drop is the difference in test accuracy (or in mean test loss, in nats)
    between theta* and the client's model; theta* is plain SGD on all training records of the client's true cluster. The paper takes
    the training loss; here it is the test loss, since personal models are only tested.

    Args:
        folder: Run folder.
        root: Data folder; None for the default.

    Returns:
        {"f_acc": share in [0, 1], "f_loss": nats, or None if a loss is not finite}.

    Raises:
        ConfigError: If the folder has no accuracy and loss for every client.
        DataMissing: As `datasets.load`.

    Source: RC-DPFL, section 5.
    """
    metrics = RunFolder(folder).metrics
    lines = [line for line in runlog.read(metrics) if line.get("view") == "observer"]
    known = [line for line in lines if "f_acc" in line]
    if known:
        add_not_covered(folder, FAIRNESS)
        return {"f_acc": known[-1]["f_acc"], "f_loss": known[-1]["f_loss"]}
    seen = [line for line in lines if "loss_by_client" in line]
    if not seen:
        raise ConfigError(f"{folder} holds no accuracy and loss by client to compare with a model trained without privacy")
    last = max(seen, key=lambda line: line["round"])
    best = reference(read_run_job(folder), root)
    drop = best[:, 0] - np.asarray(last["accuracy_by_client"])
    rise = np.asarray([np.inf if loss is None else loss for loss in last["loss_by_client"]]) - best[:, 1]
    found = {"f_acc": float(np.ptp(drop)), "f_loss": float(np.ptp(rise)) if np.isfinite(rise).all() else None}
    runlog.append(metrics, {"view": "observer", "round": last["round"], **found})
    add_not_covered(folder, FAIRNESS)
    return found


@as_in_a_worker()
def reference(job: Job, root: str | None = None) -> np.ndarray:
    """Evaluate each client under theta* of its true cluster; theta* is kept in the user's cache folder.

    Args:
        job: The job.
        root: Data folder; None for the default.

    Returns:
        (n, 2) float64 in client order: test accuracy in [0, 1], mean test loss in nats.
    """
    from dpcfl_net.training.dpsgd import Evaluator
    from dpcfl_net.training.models import module_of

    experiment, m = job.experiment, job.protocol.model
    settings, images, slices = partition(experiment, root)
    asked: dict[str, Any] = {
        "data": experiment.data, "files": images.identity, "partition": experiment.partition_seed,
        "model": m.model_dump(mode="json"), "recipe": [EPOCHS, BATCH, RATE, MOMENTUM],
    }  # fmt: skip
    stored = cache.folder() / "references" / f"{hashlib.sha256(canonical_json(asked)).hexdigest()[:24]}.npy"
    if stored.exists():
        models = np.load(stored, allow_pickle=False)
    else:
        clusters = range(len(settings.clients))
        models = np.stack([_train(job, images, [s for s in slices if s.cluster == k]) for k in clusters])
        stored.parent.mkdir(parents=True, exist_ok=True)
        with replacing(stored) as file:
            np.save(file, models, allow_pickle=False)
    evaluator = Evaluator(module_of(m), m.task, tuple(m.input_shape))
    own = [slices[k] for k in experiment.slices]
    return np.array([
        evaluator.accuracy_and_loss(models[s.cluster], open_rows(images, [s], settings.evaluate)[0]) for s in own
    ])  # fmt: skip


def _train(job: Job, images: Images, slices: list[Slice]) -> np.ndarray:
    """theta* of one cluster, (p,) float32: SGD with momentum from theta_init on the records of all its clients."""
    import torch

    from dpcfl_net.training.losses import each_loss
    from dpcfl_net.training.models import flatten, initial_of, module_of

    m = job.protocol.model
    data, _ = open_rows(images, slices)
    module = module_of(m, initial_of(m))
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    order = np.random.Generator(np.random.PCG64([job.experiment.partition_seed, slices[0].cluster]))
    for _ in range(EPOCHS):
        shuffled = order.permutation(len(data))
        for start in range(0, len(data), BATCH):
            batch = shuffled[start : start + BATCH]
            x, y = data.batch(batch, len(batch))
            optimiser.zero_grad()
            each_loss(m.task, module(x), y).mean().backward()
            optimiser.step()
    return flatten(module)
