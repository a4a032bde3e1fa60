"""Models that are taken home: named tensors that plain torch loads, with the accuracy that the run reports."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch
import yaml
from api_runs import TINY
from safetensors import safe_open
from safetensors.torch import load_file

import dpcfl_net as dpcfl
from dpcfl_net.data.partition import open_set
from dpcfl_net.data.records import ClientData
from dpcfl_net.data.regression import LinearTask
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment.job_files import client_records
from dpcfl_net.results.models import export_models
from dpcfl_net.results.summary import run_settings
from dpcfl_net.runtime.checkpoint import Checkpoints


def accuracy(module: torch.nn.Module, run: dpcfl.Run, client: int) -> float:
    """Of one client's test records, which turn with its cluster."""
    data = client_records(run.job, client, None, "test")
    x, y = data.batch(np.arange(len(data)), len(data))
    with torch.no_grad():
        return (module(x).argmax(1) == y).float().mean().item()


def test_three_lines_of_torch_load_a_model_with_the_accuracy_that_was_reported(with_epsilon):
    last = with_epsilon.rounds[-1]
    for client, cluster in enumerate(last.assignment):
        path = with_epsilon.path / "models" / f"cluster_{cluster}.safetensors"
        module = torch.nn.Sequential(*_digits_layers())
        module.load_state_dict(load_file(path))
        assert accuracy(module.eval(), with_epsilon, client) == pytest.approx(last.accuracy_by_client[client])


def test_metadata_says_how_to_build_the_module_and_feed_it(with_epsilon):
    from sklearn.datasets import load_digits  # here: each test process would import it at collection

    path = with_epsilon.models.path(0)
    with safe_open(path, "pt") as file:
        said = file.metadata()
    module_name, function = said["builder"].split(":")
    module = getattr(importlib.import_module(module_name), function)(**json.loads(said["arguments"]))
    module.load_state_dict(load_file(path))
    x = (load_digits().images[:5] / 16 * 255).round() / float(said["input_largest"])
    x = (x - float(said["input_mean"])) / float(said["input_deviation"])
    inputs = torch.tensor(x, dtype=torch.float32).reshape(-1, *json.loads(said["input_shape"]))
    assert module(inputs).shape == (5, 10)
    assert {key: said[key] for key in ("epsilon", "delta", "unit", "round", "algorithm")} == {
        "epsilon": "5.0", "delta": "0.0001", "unit": "sample", "round": "3", "algorithm": "dp-ifca",
    }  # fmt: skip
    assert len(said["job"]) == 64


@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_inputs_scaled_as_the_metadata_says_are_those_that_the_model_was_trained_on(kind, with_epsilon, tmp_path):
    settings = {
        **TINY,
        "data": {
            "dataset": "regression",
            "clients": [2],
            "shift": "line",
            "noise": 0.1,
            "train_per_client": 64,
            "test_per_client": 8,
        },
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0},
        "privacy": {"epsilon": 5, "delta": 1e-2, "unit": "client", "trust": "trusted-server"},
        "output": {"transcript": "off"},
    }
    run = with_epsilon if kind == "bytes" else dpcfl.run(settings, tmp_path, "in-process", progress=False)
    images = open_set(DataSettings.model_validate(run.job.experiment.data), None)
    line = None if kind == "bytes" else LinearTask(1.0, 0.0, 0.1)
    inputs, _ = ClientData(images, "train", np.arange(5), line=line).batch(np.arange(5), 5)
    said = run.models.metadata(0)
    scaled = (images.train_x[:5] / float(said["input_largest"]) - float(said["input_mean"])) / float(said["input_deviation"])
    assert inputs.numpy() == pytest.approx(scaled, abs=1e-5)


def test_files_hold_the_bits_of_the_last_checkpoint(in_process, by_network):
    found = Checkpoints(in_process.path / "checkpoints").newest()
    assert found is not None
    assert list(in_process.models) == [0, 1]
    for cluster, theta in enumerate(found[1].models):
        tensors = in_process.models[cluster]
        flat = np.concatenate([tensors[name].numpy().ravel() for name, _ in in_process.job.protocol.model.layout])
        assert np.array_equal(flat, theta)
        assert all(torch.equal(tensors[name], by_network.models[cluster][name]) for name in tensors)


def test_modules_come_loaded_in_evaluation_mode(in_process):
    module = in_process.models.module(1)
    assert not module.training
    assert module.state_dict().keys() == in_process.models[1].keys()
    with pytest.raises(dpcfl.ConfigError, match="no model 9"):
        in_process.models.module(9)


def test_a_damaged_file_is_a_sentence(in_process, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cluster_0.safetensors").write_bytes(b"no tensors")
    models = type(in_process.models)(tmp_path)
    with pytest.raises(dpcfl.ConfigError, match="cannot be read"):
        models[0]
    with pytest.raises(dpcfl.ConfigError, match="cannot be read"):
        models.metadata(0)


def test_personal_models_stay_in_the_clients_folder_until_they_are_asked_for(tmp_path):
    run = dpcfl.run({**TINY, "algorithm": {"name": "local"}}, tmp_path, "in-process", progress=False)
    assert list(run.models) == []
    module = torch.nn.Sequential(*_digits_layers())
    for client, reported in enumerate(run.rounds[-1].accuracy_by_client):
        module.load_state_dict(run.personal(client))
        assert accuracy(module.eval(), run, client) == pytest.approx(reported)
    (run.path / "ledgers" / "client_0001").rename(tmp_path / "elsewhere")
    with pytest.raises(dpcfl.ConfigError, match="a personal model stays on its client's machine"):
        run.personal(1)


def test_an_algorithm_without_personal_models_says_so(in_process):
    with pytest.raises(dpcfl.ConfigError, match="dp-ifca has no personal models"):
        in_process.personal(0)


def test_personal_models_are_exported_on_request(tmp_path):
    settings = {**TINY, "algorithm": {"name": "mr-mtl"}, "output": {"personal_models": True}}
    run = dpcfl.run(settings, tmp_path, "in-process", progress=False)
    names = ["client_0_personal.safetensors", "client_1_personal.safetensors", "cluster_0.safetensors"]
    assert sorted(path.name for path in (run.path / "models").iterdir()) == names
    assert list(run.models) == [0]  # the server's model alone
    for client in range(2):
        path = run.path / "models" / f"client_{client}_personal.safetensors"
        exported, own = load_file(path), run.personal(client)
        assert exported.keys() == own.keys()
        assert all(torch.equal(exported[name], own[name]) for name in own)
        with safe_open(path, "pt") as file:
            assert file.metadata()["epsilon"] == "none"
        assert path.stat().st_mode & 0o777 == 0o600
    (run.path / "ledgers" / "client_0001").rename(tmp_path / "elsewhere")  # as if the client ran on another machine
    export_models(run.path, run.job, personal=True)
    assert sorted(path.name for path in (run.path / "models").iterdir()) == [names[0], names[2]]
    export_models(run.path, run.job)
    assert sorted(path.name for path in (run.path / "models").iterdir()) == [names[2]]


@pytest.mark.parametrize(
    ("algorithm", "asked", "named"), [("dp-fedper", True, True), ("dp-fedper", False, False), ("mr-mtl", True, False)]
)
def test_the_statement_names_personal_models_without_noise_that_a_run_exports(algorithm, asked, named, tmp_path):
    """Heads of DP-FedPer lie in the run folder then; the models of MR-MTL are functions of steps that epsilon counts."""
    by_client = {"unit": "client", "trust": "trusted-server", "epsilon": 8.0, "delta": 1e-2} if algorithm == "dp-fedper" else {}
    settings = {
        **TINY, "model": {"name": "digits-cnn"}, "algorithm": {"name": algorithm}, "output": {"personal_models": asked},
        "privacy": by_client or TINY["privacy"],
    }  # fmt: skip
    if by_client:
        settings["algorithm"] |= {"sampling_rate": 1.0}
    run = dpcfl.run(settings, tmp_path, "in-process", progress=False)
    assert (
        any(
            line.startswith("personal models of clients in the folder models")
            for line in run.document["privacy"]["not_covered"]
        )
        == named
    )
    assert bool([*(run.path / "models").glob("client_*_personal.safetensors")]) == asked


def test_a_run_of_an_earlier_version_exports_no_personal_models(in_process, tmp_path):
    document = yaml.safe_load((in_process.path / "config.yaml").read_text())
    del document["output"]["personal_models"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    assert run_settings(tmp_path)["output"]["personal_models"] is False


def test_personal_models_of_an_algorithm_without_any_are_not_exported(in_process):
    with pytest.raises(dpcfl.ConfigError, match="must be false, since dp-ifca has no personal models"):
        dpcfl.load(TINY, {"output.personal_models": True})
    with pytest.raises(dpcfl.ConfigError, match="dp-ifca has no personal models"):
        export_models(in_process.path, in_process.job, personal=True)


def test_a_base_model_is_added_to_each_clusters(tmp_path):
    settings = {
        **TINY, "data": {**TINY["data"], "clients": [4, 4], "train_per_client": 60}, "local": {"batch_size": 20, "lr": 0.2, "clip": 0.5},
        "privacy": {**TINY["privacy"], "epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server"},
        "algorithm": {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 2, "sampling_rate": 1.0, "base": "fedcam", "guarantee": "expected"},
    }  # fmt: skip
    run = dpcfl.run(settings, tmp_path, "in-process", progress=False)
    assert sorted(path.name for path in (run.path / "models").iterdir()) == [
        "base.safetensors", "cluster_0.safetensors", "cluster_1.safetensors",
    ]  # fmt: skip
    last = run.rounds[-1]
    found = [
        {run_cluster: accuracy(run.models.module(run_cluster), run, client) for run_cluster in run.models}
        for client in range(8)
    ]
    assert all(
        last.accuracy_by_client[client] in [pytest.approx(value) for value in found[client].values()] for client in range(8)
    )


def _digits_layers():
    nn = torch.nn
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return [*first, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
