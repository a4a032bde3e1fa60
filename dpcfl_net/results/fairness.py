"""What privacy costs each client (RC-DPFL's F_acc and F_loss), against models trained without it on the same clusters' data.

The experimenter's side only: it reads the experiment part of a job and what the observer wrote; nothing flows back.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core import runlog
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import replacing
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.data import cache
from dpcfl_net.data.partition import DataSettings, Slice, open_client, open_many, open_set, plan_slices
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.results.summary import read_run_job

EPOCHS, BATCH, RATE, MOMENTUM = 10, 64, 0.02, 0.9


def add_fairness(folder: Path, root: str | None = None) -> dict[str, float | None]:
    """F_acc and F_loss of a run's last round, appended to its metrics.jsonl unless they are there already.

    F = max over clients i, j of |drop_i - drop_j| (RC-DPFL, section 5). drop: accuracy, or mean loss in nats, of the client's
    model on its own test records against that of theta*, plain SGD on all training records of its true cluster. (The paper
    takes the training loss; personal models are only ever tested.) Raises ConfigError for a folder without a figure for every
    client, DataMissing as `datasets.load`.
    """
    metrics = RunFolder(folder).metrics
    lines = [line for line in runlog.read(metrics) if line.get("view") == "observer"]
    known = [line for line in lines if "f_acc" in line]
    if known:
        return {"f_acc": known[-1]["f_acc"], "f_loss": known[-1]["f_loss"]}
    seen = [line for line in lines if "loss_by_client" in line]
    if not seen:
        raise ConfigError(f"{folder} holds no accuracy and loss by client to compare with a model trained without privacy")
    last = max(seen, key=lambda line: line["round"])
    best = reference(read_run_job(folder), root)
    drop = best[:, 0] - np.asarray(last["accuracy_by_client"])
    rise = np.asarray([np.inf if loss is None else loss for loss in last["loss_by_client"]]) - best[:, 1]
    found = {"f_acc": float(np.ptp(drop)), "f_loss": float(np.ptp(rise)) if np.isfinite(rise).all() else None}
    book = runlog.Lines(metrics)
    book.write({"view": "observer", "round": last["round"], **found})
    book.close()
    return found


def reference(job: Job, root: str | None = None) -> np.ndarray:
    """(n, 2): test accuracy and mean test loss of each client under theta* of its true cluster, in client order.

    Trained once for a data setting, model and partition; kept in the user's cache folder.
    """
    from dpcfl_net.training.dpsgd import Evaluator
    from dpcfl_net.training.models import build

    experiment, m = job.experiment, job.protocol.model
    settings = DataSettings.model_validate(experiment.data)
    slices = plan_slices(settings, open_set(settings, root), experiment.partition_seed)
    asked: dict[str, Any] = {
        "data": experiment.data, "partition": experiment.partition_seed, "model": m.model_dump(mode="json"),
        "recipe": [EPOCHS, BATCH, RATE, MOMENTUM],
    }  # fmt: skip
    stored = cache.folder() / "references" / f"{hashlib.sha256(canonical_json(asked)).hexdigest()[:24]}.npy"
    if stored.exists():
        models = np.load(stored, allow_pickle=False)
    else:
        clusters = range(len(settings.clients))
        models = np.stack([_train(job, settings, [s for s in slices if s.cluster == k], root) for k in clusters])
        stored.parent.mkdir(parents=True, exist_ok=True)
        with replacing(stored) as file:
            np.save(file, models, allow_pickle=False)
    shape = tuple(m.input_shape)
    evaluator = Evaluator(build(m.name, shape, m.classes), m.task, shape)
    own = [slices[k] for k in experiment.slices]
    return np.array([evaluator.accuracy_and_loss(models[s.cluster], open_client(settings, s, root, "test")) for s in own])


def _train(job: Job, settings: DataSettings, slices: list[Slice], root: str | None) -> np.ndarray:
    """theta* of one cluster, (p,) float32: SGD with momentum from theta_init over the records of all its clients."""
    import torch

    from dpcfl_net.training.losses import each_loss
    from dpcfl_net.training.models import build, initial

    m = job.protocol.model
    data, _ = open_many(settings, slices, root)
    module = build(m.name, tuple(m.input_shape), m.classes)
    theta = torch.from_numpy(initial(m.name, tuple(m.input_shape), m.classes, m.initial_seed))
    torch.nn.utils.vector_to_parameters(theta, module.parameters())
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
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy().astype(np.float32)
