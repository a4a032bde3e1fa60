"""The audit of whole clients in secure sums: the sums that the server opened, with sound and with broken clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_audit import NEVER, bounds_of, record
from test_secure_audit import third_of_the_noise

from dpcfl_net.attacks.audit.audit import audit_run
from dpcfl_net.attacks.audit.gather import LIKELIHOOD, SERVER, TWO_ROUNDS
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import Answer
from dpcfl_net.experiment import config as configuration
from dpcfl_net.federation import clipped_sums
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.results import summary

CLIENTS = 40
COUNTED = 27  # shares of the noise that the claim counts: more than two thirds
SETTINGS = {
    "name": "audited-secure-clients",
    "data": {"dataset": "digits", "clients": [CLIENTS], "shift": "none", "train_per_client": 1, "test_per_client": 1},
    "model": {"name": "linear"},
    "rounds": 6,
    "local": {"deadline_s": 0.02},
    "privacy": {
        "epsilon": 8, "delta": 1e-3, "unit": "client", "trust": "secure-aggregation", "secure_aggregation": {"stage_deadline_s": 0.02},
    },
    "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
    "output": {"transcript": "full", "evaluate_every": 6},
    "audit": {"canaries": CLIENTS},
}  # fmt: skip
CLUSTERED = {
    "algorithm": {"name": "rr-cluster", "guarantee": "expected", "clusters": 2, "sampling_rate": 0.5},
    "audit": {"canaries": CLIENTS - 4},
}
EVERYONE = {"algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0}}  # in each sum, without coins: a longer update stands out


def audited(**changes) -> configuration.Config:
    return configuration.resolve({**SETTINGS, **changes})


def no_clipping() -> None:
    """The sums clip an update, and the code clips it again: neither does."""
    clipped_sums.shortened = lambda vectors, clip: [vector.astype(np.float64) for vector in vectors]
    SumCode.encode = lambda self, vector: self._whole(vector, self.scale / self.clip, np.trunc)


def lost_vector() -> None:
    """The first client computes its masked vector of round 2, is charged for it, and does not send it."""
    whole = ClientHost.answer

    def answer(self, task):
        answered = whole(self, task)
        lost = (self.client, task.round, task.kind) == (0, 2, "masked_update")
        return Answer("refused", code="gone") if lost else answered

    ClientHost.answer = answer


def noise_of(result) -> float:
    return bounds_of(result, SERVER, LIKELIHOOD)["noise"]


def test_sound_clients_are_not_accused_and_lost_vectors_are_counted(tmp_path):
    folder = record(tmp_path / "run", audited(runtime={"quorum": 0.5}), lost_vector, grouped=True)
    result = audit_run(folder, false_alarm=NEVER)
    assert result.facts["broken"] == []
    assert {(b["view"], b["kind"]) for b in result.facts["bounds"]} == {(SERVER, LIKELIHOOD), (SERVER, TWO_ROUNDS)}
    assert noise_of(result) == pytest.approx(math.sqrt(CLIENTS / COUNTED), abs=0.4)  # about 120 squares: a deviation of .08
    assert any(
        sentence.startswith("1 secure sums were charged to client 0 and not opened with its vector")
        for sentence in result.sentences
    )
    document = summary.run_document(
        folder, summary.read_run_job(folder), state="finished", wall_s=1.0, processes=2, replace_one=None, devices={}
    )
    assert document["privacy"]["audited"].startswith(f"{CLIENTS} of {CLIENTS} clients were canaries and none held data")


@pytest.mark.slow
def test_clusters_and_clients_that_are_no_canaries_are_in_the_sums_too(tmp_path):
    result = audit_run(record(tmp_path / "run", audited(**CLUSTERED), grouped=True), false_alarm=NEVER)
    assert result.facts["broken"] == []
    assert noise_of(result) == pytest.approx(math.sqrt(CLIENTS / COUNTED), abs=0.4)
    assert "those that are out send zeros; the other 4 clients sent zeros" in result.sentences[0]


@pytest.mark.parametrize(
    ("breaking", "test"),
    [pytest.param(third_of_the_noise, "noise", marks=pytest.mark.slow), (no_clipping, "tail")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_clients_are_caught(breaking, test, tmp_path):
    result = audit_run(record(tmp_path / "run", audited(**EVERYONE), breaking, grouped=True))
    assert test in bounds_of(result, SERVER, LIKELIHOOD)["broken"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"output": {"transcript": "headers"}}, "output.transcript must be 'full', got 'headers'"),
        ({"runtime": {"federation": "in-process"}}, "runtime.federation must be 'network'"),
        ({"algorithm": {**SETTINGS["algorithm"], "sampling": "visible"}}, "algorithm.sampling must not be 'visible'"),
    ],
)
def test_what_cannot_be_audited_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        audited(**changes)
