"""Trained models of a run as files with named tensors (models/*.safetensors), and as torch modules."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.core.tensors import unpack
from dpcfl_net.data.partition import open_set
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.privacy.ledger.ledger_folder import is_missing, read_state
from dpcfl_net.results.epsilon_spent import ledger_folder
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.training.worker_settings import as_in_a_worker

if TYPE_CHECKING:
    import torch
    from torch import nn

FOLDER, BASE = "models", "base"
BUILDER = "dpcfl_net.training.models:build"


def export_models(folder: Path, job: Job, data_root: str | None = None, *, personal: bool = False) -> list[Path]:
    """Write the models of the newest checkpoint into models/, one safetensors file each, and remove older files there.

    A file holds the tensors of `module.state_dict()` by name. Its metadata (text) says how to build the module and how to
    scale its inputs, the privacy promise, the round and the job: see docs/how-to/python.md.

    Args:
        folder: The run folder.
        job: Its job.
        data_root: Folder of the data sets; None: the default.
        personal: Also write the personal model of every client whose ledger is on this machine.

    Returns:
        Paths of the files; none before the first round, or if no model leaves the clients.

    Raises:
        ConfigError: If `personal` is set and the algorithm has no personal models.
        LedgerError: If `personal` is set and a client's ledger is damaged.
        RunFailed: If every checkpoint is damaged.
        OSError: If a file cannot be written.
    """
    if personal:
        _require_personal_models(job)
    if not (RunFolder(folder).checkpoints).is_dir() or (found := Checkpoints(RunFolder(folder).checkpoints).newest()) is None:
        return []
    from safetensors.numpy import save  # `save_file` raises its own error on a full disk, no OSError

    t, state = found
    described = _metadata(job, t, data_root)
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    written = []
    for row, theta in enumerate(state.models):
        path = target / f"{_name(job, row)}.safetensors"
        write_atomically(path, save(named_tensors(job.protocol.model, theta), metadata={**described, "name": path.stem}))
        written.append(path)
    for client in job.algorithm.clients if personal else ():
        theta = _personal_model(folder, job, client)
        if theta is not None:
            written.append(target / f"client_{client}_personal.safetensors")
            _write_personal_model(written[-1], named_tensors(job.protocol.model, theta), described)
    for path in target.glob("*.safetensors"):
        if path not in written:
            path.unlink()
    return written


def named_tensors(template: ModelTemplate, theta: np.ndarray) -> dict[str, np.ndarray]:
    """Split a flat model into the tensors of `module.state_dict()`.

    Args:
        template: The job's model.
        theta: (p,) float32.

    Returns:
        Tensors by name; of a plugin model also the buffers.
    """
    tensors, at = {}, 0
    for name, shape in template.layout:
        count = math.prod(shape)
        tensors[name] = np.ascontiguousarray(theta[at : at + count]).reshape(shape)
        at += count
    if not is_plugin(template.name):  # the package's own models have no buffers and no tied parameters
        return tensors
    import torch

    with as_in_a_worker():
        module = _build(template.name, template.input_shape, template.classes)
        module.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in tensors.items()}, strict=False)
        return {
            name: value.detach().numpy().copy()
            for name, value in module.state_dict().items()
            if isinstance(value, torch.Tensor)
        }


class Models(Mapping[int, "dict[str, torch.Tensor]"]):
    """The models of one run: cluster (or client, for an algorithm with a model for each) to torch state dict.

    Args:
        folder: The run folder.

    Raises:
        ConfigError: On any access, if a model is missing or its file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._paths: dict[int, Path] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            number = path.stem.rpartition("_")[2]
            if number.isdecimal():
                self._paths[int(number)] = path
        self._paths = dict(sorted(self._paths.items()))

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self._load(self.path(number))

    def __iter__(self) -> Iterator[int]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __repr__(self) -> str:
        return f"<models of {self._folder}: {', '.join(path.stem for path in self._paths.values()) or 'none'}>"

    def path(self, number: int) -> Path:
        """Path of a model's safetensors file."""
        if number not in self._paths:
            raise ConfigError(f"no model {shown(number)} in {self._folder}: it holds {list(self._paths) or 'none'}")
        return self._paths[number]

    def metadata(self, number: int) -> dict[str, str]:
        """A file's metadata: how to build the module and scale inputs, and the privacy promise."""
        return self._metadata(self.path(number))

    def module(self, number: int) -> nn.Module:
        """Build a model and load it.

        Args:
            number: Cluster, or client for an algorithm with a model for each.

        Returns:
            The module in evaluation mode. Inputs are float32, scaled as the metadata says. Where the run has a base model
            (FedCAM), the module adds the base model's outputs to the cluster's.
        """
        own = self._module(self.path(number))
        base = self._folder / f"{BASE}.safetensors"
        if not base.exists():
            return own
        from torch import nn

        class Sum(nn.Module):
            """Outputs of the base model plus those of the cluster's."""

            def __init__(self, *parts: nn.Module) -> None:
                super().__init__()
                self.parts = nn.ModuleList(parts)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                outputs: torch.Tensor = self.parts[0](x) + self.parts[1](x)
                return outputs

        return Sum(self._module(base), own).eval()

    def _module(self, path: Path) -> nn.Module:
        arguments = json.loads(self._metadata(path)["arguments"])
        module = _build(**arguments)
        module.load_state_dict(self._load(path))
        return module.eval()

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None

    def _metadata(self, path: Path) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                return dict(file.metadata())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None


def personal_tensors(folder: Path, job: Job, client: int) -> dict[str, np.ndarray]:
    """Read the personal model of one client from its ledger folder.

    No message contains it and no other process of the run has it, so it can be read on the client's machine only. The privacy
    statement covers what leaves a client, so it says nothing about this model.

    Args:
        folder: The run folder of the machine that the client ran on.
        job: The run's job.
        client: Number of the client.

    Returns:
        Tensors by name, after the client's last committed step.

    Raises:
        ConfigError: If the algorithm has no personal models, or this machine does not hold this client's.
        LedgerError: If the client's ledger is damaged.
    """
    _require_personal_models(job)
    if client not in job.algorithm.clients or is_missing(ledger_folder(folder, client)):
        raise ConfigError(f"client {client} has no ledger in {folder}: a personal model stays on its client's machine")
    theta = _personal_model(folder, job, client)
    if theta is None:
        raise ConfigError(f"client {client} has no personal model yet")
    return named_tensors(job.protocol.model, theta)


def _require_personal_models(job: Job) -> None:
    if not job.algorithm.capabilities.personal:
        raise ConfigError(f"{job.protocol.algorithm} has no personal models: clients use the models of their clusters")


def _personal_model(folder: Path, job: Job, client: int) -> np.ndarray | None:
    """Read a personal model from the client's ledger folder, (p,) float32; None if this machine has none."""
    ledger = ledger_folder(folder, client)
    if is_missing(ledger):
        return None
    packed = read_state(ledger, digest(job.protocol))
    return None if packed is None else unpack(packed).get("model")


def _write_personal_model(path: Path, tensors: dict[str, np.ndarray], described: dict[str, str]) -> None:
    """Write a file that only the user can read: its model is private, and the run's epsilon does not cover it."""
    from safetensors.numpy import save

    metadata = {**described, "epsilon": "none", "name": path.stem}
    write_atomically(path, save(tensors, metadata=metadata), mode=0o600)


def _name(job: Job, row: int) -> str:
    """File name of a row of `State.models`."""
    capabilities = job.algorithm.capabilities
    if capabilities.model_per_client:
        return f"client_{row}"
    shared = capabilities.shared_models
    return f"cluster_{row - shared}" if row >= shared else BASE


def _build(name: str, input_shape: list[int], classes: int) -> nn.Module:
    """Build the module of a template without a change of the caller's random state."""
    import torch

    from dpcfl_net.training.models import build

    with torch.random.fork_rng(devices=[]):
        return build(name, tuple(input_shape), classes)


def _metadata(job: Job, t: int, data_root: str | None) -> dict[str, str]:
    protocol, images = job.protocol, open_set(DataSettings.model_validate(job.experiment.data), data_root)
    model, privacy = protocol.model, privacy_statement(protocol, None)
    epsilon = privacy["epsilon"]
    return {
        "format": "pt",
        "builder": BUILDER,
        "arguments": json.dumps({"name": model.name, "input_shape": model.input_shape, "classes": model.classes}),
        "task": model.task,
        "input_shape": json.dumps(model.input_shape),
        "input": "(value / input_largest - input_mean) / input_deviation, as float32",
        "input_largest": "255" if images.train_x.dtype == np.uint8 else "1",
        "input_mean": repr(float(images.mean)),
        "input_deviation": repr(float(images.std)),
        "algorithm": protocol.algorithm,
        "round": str(t),
        "rounds": str(protocol.rounds),
        "epsilon": "none" if epsilon is None else repr(float(epsilon)),
        "delta": repr(float(protocol.privacy.delta)),
        "unit": protocol.privacy.unit,
        "adjacency": protocol.privacy.adjacency,
        "trust": protocol.privacy.trust,
        "job": digest(protocol),
    }
