"""Local steps in bfloat16: gradients near float32's, clipping that holds for the summed numbers, equal bits, refusals."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL
from real_models import CLASSES
from records import KEY, Images, start
from test_deep_path import strided
from test_dpsgd import odd, overflowing

import dpcfl_net as dpcfl
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.privacy import clipping
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.training import devices, models, precision
from dpcfl_net.training.devices import Device
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.training.models import flatten
from dpcfl_net.transport.keys import make_keys

torch.set_num_threads(1)

HERE = precision.missing()
CASES = {
    "cnn": (lambda: models.build("cnn", (1, 28, 28), 10), (1, 28, 28)),
    "digits-cnn": (lambda: models.build("digits-cnn", (1, 8, 8), 10), (1, 8, 8)),
    "linear": (lambda: models.build("linear", (1, 8, 8), 10), (1, 8, 8)),
    "odd": (odd, (2, 13, 9)),
    "deep": (strided, (3, 10, 9)),
}


@pytest.fixture(autouse=True)
def able(monkeypatch):
    """The engine computes the same numbers without the instructions, slowly."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


def trainer(name: str, kind: str = "bfloat16", clip: float = 1.0, batch_size: int = 8) -> Trainer:
    torch.manual_seed(0)
    return Trainer(CASES[name][0](), clip=clip, learning_rate=0.1, batch_size=batch_size, precision=kind)


def weights(name: str) -> np.ndarray:
    torch.manual_seed(0)
    return flatten(CASES[name][0]())


@pytest.mark.parametrize("name", CASES)
def test_clipped_sums_are_near_those_of_float32(name):
    data, theta = Images(20, CASES[name][1], classes=CLASSES if name == "deep" else 10), weights(name)
    single, half = (trainer(name, kind).clipped_sum(theta, data, np.arange(20)) for kind in ("float32", "bfloat16"))
    error = np.linalg.norm(half - single) / np.linalg.norm(single)
    assert 1e-5 < error < 0.05


def squared(vector: np.ndarray) -> Fraction:
    """Squared norm in exact arithmetic."""
    return sum((Fraction(float(value)) ** 2 for value in vector[vector != 0]), Fraction(0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1e-12, pytest.param(1.0, marks=pytest.mark.slow), 1e3])
def test_a_clipped_record_is_within_the_clip_norm_in_exact_arithmetic(name, scale):
    data, theta = Images(6, CASES[name][1], classes=CLASSES if name == "deep" else 10), weights(name) * np.float32(scale)
    ours, clip = trainer(name, clip=0.3), Fraction(0.3)
    with torch.no_grad():
        x, y = data.batch(np.arange(6), ours.slots)
        _, parts = ours._engine.gradients(torch.from_numpy(theta), x, y)
    squares = torch.stack([part.squared_norms() for part in parts]).sum(0)
    target = clipping.reserved_clip(0.3, ours.slots, torch.float32)
    for slot in range(3):
        pieces = [part.gradient(slot)[1] for part in parts]
        assert all(piece.dtype == torch.float32 for piece in pieces)
        row = np.concatenate([piece.double().numpy() for piece in pieces])
        if name != "deep":  # its rows are products, rounded when they are written out
            assert squared(row) <= Fraction(float(squares[slot]))
        factor = np.float32(min(1.0, target / float(squares[slot]) ** 0.5))
        assert squared(row * float(factor)) <= clip**2
        alone = ours.clipped_sum(theta, data, np.array([slot]))
        assert squared(alone) <= clip**2


@pytest.mark.parametrize("name", ["cnn", "deep"])
def test_adjacent_sums_differ_by_at_most_the_clip_norm(name):
    data, theta = Images(12, CASES[name][1], classes=CLASSES if name == "deep" else 10), weights(name)
    ours = trainer(name, clip=0.05, batch_size=16)
    everyone = np.arange(12)
    whole = ours.clipped_sum(theta, data, everyone)
    longest = 0.0
    for target in everyone:
        kept = data.x[target].clone()
        data.x[target] = torch.nan
        longest = max(longest, float(np.linalg.norm(whole - ours.clipped_sum(theta, data, everyone))))
        data.x[target] = kept
    assert 0.04 < longest <= 0.05


@pytest.mark.parametrize("how", ["inf", "norm"])
def test_a_record_that_overflows_is_dropped_bit_for_bit(how):
    theta, data = overflowing(how)
    ours, others = trainer("digits-cnn", batch_size=16), np.array([0, 1, 2, 3, 4, 6, 7])
    control = ours.clipped_sum(theta, data, others)
    assert np.isfinite(control).all()
    assert np.abs(control).max() > 0
    assert np.array_equal(ours.clipped_sum(theta, data, np.append(others, 5)), control)


@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_their_neighbours(name):
    shape, ours, theta = CASES[name][1], trainer(name), torch.from_numpy(weights(name))
    n, classes = ours.slots, CLASSES if name == "deep" else 10
    (x, y), (mixed, mixed_y) = (Images(n, shape, classes, seed).batch(np.arange(n), n) for seed in (2, 3))
    mixed[1] = torch.inf
    mixed[3], mixed_y[3] = x[3], y[3]
    (logits, parts), (logits_mixed, parts_mixed) = (ours._engine.gradients(theta, *both) for both in ((x, y), (mixed, mixed_y)))
    assert torch.equal(logits[3], logits_mixed[3])
    for a, b in zip(parts, parts_mixed, strict=True):
        assert torch.equal(a.squared_norms()[3], b.squared_norms()[3])
        assert torch.equal(a.gradient(3)[1], b.gradient(3)[1])


def test_a_task_repeats_its_bits_and_evaluation_stays_in_float32():
    data, theta, slot = Images(60), start(), DPSGDSlot("train", 0.2, 5)
    first, second = (trainer("digits-cnn").train(theta, data, slot, 1.0, KEY) for _ in range(2))
    other, event = trainer("digits-cnn", "float32").train(theta, data, slot, 1.0, KEY)
    assert np.array_equal(first[0], second[0])
    assert first[1] == event
    assert 0 < np.abs(first[0] - other).max() < 0.01  # the same batches and the same noise
    module = models.build("digits-cnn", (1, 8, 8), 10)
    assert np.array_equal(
        trainer("digits-cnn")._engine.logits(torch.from_numpy(theta), data.x).numpy(),
        Evaluator(module)._engine.logits(torch.from_numpy(theta), data.x).numpy(),
    )


def document(**changes) -> dict:
    data = {"dataset": "digits", "clients": [2, 2], "train_per_client": 100, "test_per_client": 30}
    whole = {**SMALL, "data": data, "rounds": 2, "output": {"transcript": "off"}, "algorithm": {"name": "global"}}
    local = {"batch_size": 32, "lr": 0.5, "precision": "bfloat16"}
    return {**whole, "local": local} | changes


def job_for(folder: Path, **changes):
    if not (folder / "keys").exists():
        make_keys(folder / "keys", 4)
    return make_job(config.resolve(document(**changes)), folder / "keys")


def test_the_precision_is_signed_and_the_usual_one_leaves_jobs_as_they_were(tmp_path):
    job, usual = job_for(tmp_path), job_for(tmp_path, local={"batch_size": 32, "lr": 0.5, "precision": "float32"})
    plain = job_for(tmp_path, local={"batch_size": 32, "lr": 0.5})
    assert digest(usual.protocol) == digest(plain.protocol) != digest(job.protocol)
    assert "precision" not in plain.protocol.local.model_dump()
    assert job.protocol.local.model_dump()["precision"] == "bfloat16"


def test_a_processor_without_the_instructions_is_refused_with_the_reason(tmp_path, monkeypatch):
    job = job_for(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    with pytest.raises(
        ConfigError, match=r"local\.precision is 'bfloat16': this processor has none of the instructions avx512_bf16"
    ):
        job_for(tmp_path)
    with pytest.raises(Refused, match="must be 'float32' here") as refusal:
        make_host(job, 0, tmp_path / "ledgers", durable=False)
    assert refusal.value.code == "precision"
    assert not (tmp_path / "ledgers").exists()


def test_a_worker_on_a_gpu_refuses(tmp_path, monkeypatch):
    job = job_for(tmp_path)
    monkeypatch.setattr(devices, "_current", Device("GPU-aaaaaaaa"))
    with pytest.raises(Refused, match="computes on a GPU") as refusal:
        make_host(job, 0, tmp_path / "ledgers", durable=False)
    assert refusal.value.code == "precision"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local": {"precision": "float16"}}, "local.precision is 'float16': must be 'float32' or 'bfloat16'"),
        ({"runtime": {"device": "cuda"}}, "runtime.device must be cpu or auto, got 'cuda'"),
        (
            {
                "algorithm": {"name": "dp-fedavg"},
                "privacy": {"epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server"},
            },
            "local.precision is 'bfloat16': belongs to DP-SGD",
        ),
        ({"audit": {"canaries": 10}, "output": {"transcript": "full"}}, "canaries have no forward pass"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, words):
    with pytest.raises(ConfigError) as caught:
        config.resolve(document(**changes))
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_models_that_bfloat16_cannot_train_are_named():
    codes = models.build("char-transformer", (80,), 97)
    with pytest.raises(ConfigError, match="codes that an Embedding reads"):
        Trainer(codes, clip=1.0, learning_rate=0.1, batch_size=8, precision="bfloat16", input_shape=(80,))
    with pytest.raises(ConfigError, match="works with models of the fast and deep engines, this model uses vmap"):
        Trainer(CASES["odd"][0](), clip=1.0, learning_rate=0.1, batch_size=8, path="vmap", precision="bfloat16")


@pytest.mark.skipif(bool(HERE), reason=HERE or "has the instructions")
def test_seeded_runs_by_network_and_in_one_process_have_the_same_bits(tmp_path):
    settings = document(name="half", rounds=3)
    del settings["output"]
    runs = [dpcfl.run(settings, tmp_path / how, how, progress=False) for how in ("network", "in-process")]
    first, second = ({name: tensor.numpy().tobytes() for name, tensor in run.models[0].items()} for run in runs)
    assert first == second
    assert [row["accuracy_by_client"] for row in runs[0].records] == [row["accuracy_by_client"] for row in runs[1].records]
