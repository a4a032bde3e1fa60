"""The audit of secure sums: the sum that the server opened, with sound shares of the noise and with too small ones."""

from __future__ import annotations

import numpy as np
import pytest
from test_audit import NEVER, bounds_of, record

from dpcfl_net.attacks.audit.audit import audit_run
from dpcfl_net.attacks.audit.gather import EVERY_STEP, LIKELIHOOD, SEED, SERVER
from dpcfl_net.attacks.audit.record import Record, audited_job
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import Answer
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.results import summary

SETTINGS = {
    "name": "audited-sums",
    "data": {"dataset": "digits", "clients": [3], "train_per_client": 470, "test_per_client": 20, "shift": "none"},
    "model": {"name": "linear"},
    "rounds": 6,
    "local": {"batch_size": 235, "lr": 0.5},
    "privacy": {"epsilon": 5, "delta": 1e-3, "trust": "secure-aggregation"},
    "algorithm": {"name": "global"},
    "output": {"transcript": "full", "evaluate_every": 6},
    "audit": {"canaries": 470, "client": 1},
}


def audited(**changes) -> Config:
    return configuration.resolve({**SETTINGS, **changes})


def third_of_the_noise() -> None:
    stated = SumCode.share_deviation.fget
    SumCode.share_deviation = property(lambda self: stated(self) / 3)


def drop_outs() -> None:
    """Client 3 does not send its vector in round 2, the audited client 1 in round 3, clients 2 and 3 in round 4."""
    whole = ClientHost.answer

    def answer(self, task):
        gone = task.kind == "masked_step" and self.client in {2: (3,), 3: (1,), 4: (2, 3)}.get(task.round, ())
        return Answer("refused", code="gone") if gone else whole(self, task)

    ClientHost.answer = answer


def test_a_sound_secure_sum_is_not_accused_and_much_of_its_epsilon_is_found(tmp_path):
    folder = record(tmp_path / "run", audited())
    result = audit_run(folder, false_alarm=NEVER)
    assert result.facts["broken"] == []
    assert {b["view"] for b in result.facts["bounds"]} == {SERVER}
    found = bounds_of(result, SERVER, LIKELIHOOD)
    assert 0.2 < found["gdp"] < 5  # 2.4 expected, with a deviation of 0.44
    assert found["noise"] == pytest.approx(1, abs=0.11)
    assert any("the sum of the client's cluster" in sentence for sentence in result.sentences)
    document = summary.run_document(
        folder, summary.read_run_job(folder), state="finished", wall_s=1.0, processes=5, replace_one=None, devices={}
    )
    assert "released sums of its cluster" in document["privacy"]["audited"]


def test_shares_of_a_third_of_the_noise_are_caught(tmp_path):
    result = audit_run(record(tmp_path / "run", audited(), third_of_the_noise))
    found = bounds_of(result, SERVER, LIKELIHOOD)
    assert found["gdp"] > 5  # 11.2 expected, with a deviation of 1.0
    assert found["noise"] == pytest.approx(1 / 3, abs=0.04)
    assert {"noise", "trade-off"} <= set(found["broken"])


def test_the_opened_sums_are_the_canaries_in_the_batches_and_all_shares_of_the_noise(tmp_path):
    """Seeded noise can be subtracted: whole numbers are left, of the audited client's canaries alone."""
    config = audited(
        data={**SETTINGS["data"], "clients": [4], "train_per_client": 350}, audit={"canaries": 300, "client": 1},
        runtime={"quorum": 0.25}, privacy={**SETTINGS["privacy"], "noise": "seeded", "noise_seed": "77" * 32},
    )  # fmt: skip
    folder = record(tmp_path / "run", config, drop_outs)
    run = Record(folder, audited_job(folder))
    bits, trainings = run.bits(1), {training.round: training for training in run.trainings(1)}
    assert [*trainings] == [1, 2, 4, 5, 6]
    assert run.rounds(trainings.pop(4)) is None  # charged and aborted
    assert len(run.sums[2].survivors) == 3
    for training in trainings.values():
        drawn = run.rounds(training) - run.noise(training, run.job.experiment.noise)[0]
        assert np.abs(drawn - np.rint(drawn)).max() < 1e-3
        assert set(np.rint(drawn)[bits]) == {0.0, 1.0}
        assert not np.rint(drawn)[~bits].any()
    result = audit_run(folder, false_alarm=NEVER)
    assert "trade-off" in bounds_of(result, SERVER, SEED)["broken"]
    assert any(sentence.startswith("1 secure sums were charged and not opened") for sentence in result.sentences)
    # Three or four shares are in each sum, three are counted: sqrt((1 + 4/3 * 3) / 4), with a deviation of 0.03.
    assert bounds_of(result, SERVER, LIKELIHOOD)["noise"] == pytest.approx(1.118, abs=0.16)


def test_steps_before_the_first_secure_sum_are_audited_too(tmp_path):
    folder = record(tmp_path / "run", audited(algorithm={"name": "r-dpcfl", "clusters": 1, "secure_from": 3}))
    result = audit_run(folder, false_alarm=NEVER)
    assert result.facts["broken"] == []
    trainings = Record(folder, audited_job(folder)).trainings(1)
    assert [(training.kind, training.secure) for training in trainings] == [
        ("first_round_update", False), ("train", False), *[("masked_step", True)] * 4
    ]  # fmt: skip
    for view in (EVERY_STEP, SERVER):
        assert bounds_of(result, view, LIKELIHOOD)["gdp"] > 0.2  # 3.1 expected, with a deviation of 0.5
    assert result.facts["discrepancy"] < 1e-3


def test_canaries_of_several_clients_in_one_sum_are_refused():
    with pytest.raises(ConfigError, match="must be the number of one client, got 'all'"):
        audited(audit={"canaries": 5})
