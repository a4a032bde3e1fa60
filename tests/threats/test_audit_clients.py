"""The audit of whole clients: sound trusted servers are not accused, broken ones are caught, and what cannot be audited is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from records import KEY
from test_audit import NEVER, said_of_a_sound_run

import dpcfl_net
from dpcfl_net.attacks.audit import scores
from dpcfl_net.attacks.audit.audit import audit_run
from dpcfl_net.attacks.audit.clients import PUBLISHED
from dpcfl_net.attacks.audit.gather import LIKELIHOOD, TWO_ROUNDS
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config as configuration
from dpcfl_net.federation import central_context, clipped_sums
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.privacy.canaries import Canaries

CLIENTS = 500
KEPT = Path("ledgers") / "curator" / "published"
SETTINGS = {
    "name": "audited-clients",
    "data": {"dataset": "digits", "clients": [CLIENTS], "shift": "none", "train_per_client": 1, "test_per_client": 1},
    "model": {"name": "digits-cnn"},
    "rounds": 20,
    "privacy": {"epsilon": 8, "delta": 1e-4, "unit": "client", "trust": "trusted-server"},
    "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.2},
    "output": {"transcript": "off", "evaluate_every": 20},
    "audit": {"canaries": CLIENTS},
}
REPLACED = {"privacy": {**SETTINGS["privacy"], "adjacency": "replace-one"}}
EXPECTED = {"algorithm": {"name": "rr-cluster", "guarantee": "expected", "clusters": 2, "sampling_rate": 0.2}}
LABELS = {**REPLACED, "algorithm": {"name": "rr-cluster", "guarantee": "labels-first", "clusters": 2, "sampling_rate": 0.2}}


def recorded(folder, how="in-process", **changes):
    file = folder / "audited.yaml"
    file.write_text(yaml.safe_dump({**SETTINGS, **changes}))
    return dpcfl_net.run(file, folder / "runs", how, progress=False).path


def bounds_of(result, kind: str = LIKELIHOOD) -> dict:
    (found,) = [b for b in result.facts["bounds"] if (b["view"], b["kind"]) == (PUBLISHED, kind)]
    return found


def test_a_sound_server_is_not_accused_and_much_of_its_epsilon_is_found(tmp_path, capsys, monkeypatch):
    folder = recorded(tmp_path)
    result = audit_run(folder, false_alarm=NEVER)
    assert result.facts["broken"] == []
    found = bounds_of(result)
    assert 1 < found["gdp"] < 8
    assert found["noise"] == pytest.approx(1, abs=0.08)  # 5,000 squares: a deviation of .01
    assert result.sentences[0].startswith(f"{CLIENTS} of {CLIENTS} clients were canaries: without data")
    document = dpcfl_net.open_run(folder).document
    assert document["privacy"]["audited"].startswith(f"{CLIENTS} of {CLIENTS} clients were canaries and none held data")
    said = said_of_a_sound_run(folder, capsys, monkeypatch)
    assert said.startswith("The claim stands: epsilon 8 at delta 0.0001;")
    assert "in the published sums (95%, mu-GDP)" in said


def test_a_release_that_was_not_charged_is_refused(tmp_path):
    folder = recorded(tmp_path, rounds=2)
    kept = sorted((folder / KEPT).iterdir())
    assert [file.name for file in kept] == ["round_000001_noisy_sum.msgpack", "round_000002_noisy_sum.msgpack"]
    kept[1].rename(kept[1].with_name("round_000003_noisy_sum.msgpack"))
    with pytest.raises(ConfigError, match=r"ledger has no charge for its release of round 3, noisy_sum"):
        audit_run(folder)


@pytest.mark.parametrize(
    "changes",
    [pytest.param(REPLACED, marks=pytest.mark.slow), EXPECTED, pytest.param(LABELS, marks=pytest.mark.slow)],
    ids=["replace-one", "expected", "labels-first"],
)
def test_samples_of_fixed_size_and_clusters_are_audited_too(changes, tmp_path):
    result = audit_run(recorded(tmp_path, **changes), false_alarm=NEVER)
    assert result.facts["broken"] == []
    assert 0 < bounds_of(result)["gdp"] < 8
    assert bounds_of(result)["tail"] is None or changes is EXPECTED
    assert bounds_of(result)["noise"] == pytest.approx(
        1.02, abs=0.1
    )  # opposite updates are in it; 5,000 squares: a deviation of .01


def less_noise(monkeypatch) -> None:
    whole = central_context.gaussian_on_grid
    monkeypatch.setattr(central_context, "gaussian_on_grid", lambda total, deviation, rng: whole(total, 0.3 * deviation, rng))


def no_clipping(monkeypatch) -> None:
    monkeypatch.setattr(clipped_sums, "shortened", lambda vectors, clip: [vector.astype(np.float64) for vector in vectors])


def repeated_noise(monkeypatch) -> None:
    whole, drawn = central_context.gaussian_on_grid, {}

    def same(total, deviation, rng):
        return total + drawn.setdefault(deviation, whole(np.zeros_like(total), deviation, rng))

    monkeypatch.setattr(central_context, "gaussian_on_grid", same)


def one_sample(monkeypatch) -> None:
    whole, drawn = CentralContext.sample, []

    def same(self, slot):
        drawn.append(whole(self, slot))
        self._sampled[slot] = drawn[0]
        return drawn[0]

    monkeypatch.setattr(CentralContext, "sample", same)


BROKEN = {
    less_noise: {("noise", LIKELIHOOD), ("trade-off", LIKELIHOOD)},
    no_clipping: {("trade-off", LIKELIHOOD), ("tail", LIKELIHOOD)},
    repeated_noise: {("trade-off", TWO_ROUNDS)},
    one_sample: {("tail", LIKELIHOOD)},
}


@pytest.mark.parametrize(
    "breaking",
    [
        pytest.param(breaking, id=breaking.__name__, marks=[pytest.mark.slow] * (breaking not in (less_noise, no_clipping)))
        for breaking in BROKEN
    ],
)
def test_a_broken_server_is_caught(breaking, tmp_path, monkeypatch):
    breaking(monkeypatch)
    result = audit_run(recorded(tmp_path))
    assert {(test, b["kind"]) for b in result.facts["bounds"] for test in b["broken"]} >= BROKEN[breaking]


@pytest.mark.parametrize(
    "changes",
    [*(pytest.param(changes, marks=pytest.mark.slow) for changes in (REPLACED, EXPECTED)), LABELS],
    ids=["replace-one", "expected", "labels-first"],
)
def test_too_little_noise_is_caught_in_samples_of_fixed_size_and_in_clusters(changes, tmp_path, monkeypatch):
    less_noise(monkeypatch)
    result = audit_run(recorded(tmp_path, **changes))
    assert "noise" in bounds_of(result)["broken"]
    # Most of what labels-first is charged pays for labels, at which no score looks.
    assert changes is LABELS or "trade-off" in bounds_of(result)["broken"]


def test_processes_keep_the_same_releases_as_one_process(tmp_path):
    """Seeded noise gives equal bits; the audit of such a run says that the seed gives the noise away."""
    few = {
        "data": {**SETTINGS["data"], "clients": [40]},
        "privacy": {**SETTINGS["privacy"], "noise": "seeded", "noise_seed": "77" * 32},
        "rounds": 2, "audit": {"canaries": 30}, "output": {"transcript": "headers"},
    }  # fmt: skip
    runs = []
    for how, more in (("in-process", {}), ("network", {"runtime": {"clients_per_worker": 20}})):
        (tmp_path / how).mkdir()
        runs.append(recorded(tmp_path / how, how, **few, **more))
    one, many = ({file.name: file.read_bytes() for file in (run / KEPT).iterdir()} for run in runs)
    assert one == many
    assert len(one) == 2
    result = audit_run(runs[1], false_alarm=NEVER)
    assert result.facts["broken"] == []
    assert "the other 10 clients sent zeros" in result.sentences[0]
    assert any("anyone who has the seed can subtract it" in sentence for sentence in result.sentences)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"privacy": {**SETTINGS["privacy"], "trust": "secure-aggregation"}, "local": {"deadline_s": 1}},
            "must be 'full', got 'off'",
        ),
        ({"algorithm": {"name": "rr-cluster", "base": "fesem"}}, "keeps a state"),
        ({"algorithm": {"name": "rr-cluster", "base": "fedcam"}}, "trains more than one model"),
        ({"algorithm": {"name": "dp-fedavg", "asynchronous": {"buffer": 10}}}, "is asynchronous"),
        ({"audit": {"canaries": 5, "client": 1}}, "audit.client is 1: must be all"),
        ({"audit": {"canaries": CLIENTS + 1}}, f"must be at most the {CLIENTS} clients"),
    ],
)
def test_what_cannot_be_audited_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        configuration.resolve({**SETTINGS, **changes})


OWN = """
import dpcfl_net as dpcfl
from dpcfl_net.algorithms.dp_fedavg import DPFedAvg

class Closer(DPFedAvg):
    def new_sums(self):
        return dpcfl.ClippedSums((1, self.protocol.model.parameters), self.protocol.local.clip / 2)

class Divided(DPFedAvg):
    @dpcfl.on_central_server(charges=["round"])
    def noisy_sum(self, me, model):
        return dpcfl.Release(sum=super().noisy_sum(me, model).tensors["sum"] / 2)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [("Closer", "its sums have the clip norm 0.5: must be local.clip, 1,"), ("Divided", "it changes the noisy sums before")],
)
def test_sums_in_other_units_than_the_clip_norm_are_no_audit(name, words, tmp_path, monkeypatch):
    """They were scored in units of the clip norm: too little noise was reported of a sound algorithm."""
    (tmp_path / "own_sums.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_sums", raising=False)
    few = {"data": {**SETTINGS["data"], "clients": [40]}, "rounds": 2, "audit": {"canaries": 30}}
    with pytest.raises(dpcfl_net.RunFailed, match=f"^round 1: central step 'noisy_sum' cannot be audited: {words}"):
        recorded(tmp_path, **few, algorithm={"name": f"own_sums:{name}", "sampling_rate": 0.2})


def test_more_clients_than_parameters_have_no_directions(tmp_path):
    with pytest.raises(ConfigError, match="at most the 650 parameters of linear"):
        recorded(tmp_path, model={"name": "linear"}, data={**SETTINGS["data"], "clients": [651]}, audit={"canaries": 651})


# scores and directions


def test_the_vector_of_a_canary_is_its_direction():
    canaries = Canaries(7, 30, KEY)
    rows = canaries.gradients(torch.arange(1, 8), 2.0, torch.float64).numpy()
    assert np.array_equal(np.stack([canaries.vector(i, 2.0) for i in range(7)]), rows)


@pytest.mark.parametrize("opposite", [False, True])
def test_scores_are_the_log_likelihood_ratio(opposite):
    """Against the densities, with the deviation that the observations give."""
    rate, rng = 0.3, np.random.default_rng(0)
    weights = np.array([0.2, 0.8])[:, None].repeat(500, axis=1)
    observed = rng.normal(size=(2, 500)) * 0.6
    deviation = np.sqrt(np.mean(observed**2) - rate * (1 if opposite else 0.5) / 2)

    def density(sign: float) -> np.ndarray:
        def normal(x):
            return np.exp(-(x**2) / (2 * deviation**2))

        alone = normal(observed[0]) * normal(observed[1])
        first, second = (normal(observed[b] - sign) * normal(observed[1 - b]) for b in (0, 1))
        return (1 - rate) * alone + rate * (0.2 * first + 0.8 * second)

    alone = np.exp(-(observed**2).sum(0) / (2 * deviation**2))
    out = density(-1.0) if opposite else alone
    found = scores.of_clients(observed, weights, rate, opposite=opposite)
    assert found == pytest.approx(np.log(density(1.0) / out))
