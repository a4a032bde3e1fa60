"""A run with random allocation, from the configuration to the ledger; the settings that it refuses."""

from __future__ import annotations

import re

import pytest
from api_runs import TINY

import dpcfl_net as dpcfl
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.experiment import config
from dpcfl_net.privacy.accounting.accountant import epsilon

SETTINGS = {
    **TINY,
    "algorithm": {"name": "global"},
    "local": {"batch_size": 32, "lr": 0.5, "epochs": 2, "sampling": "allocation"},
    "privacy": {"epsilon": 5, "delta": 1e-4},
    "output": {},
}


def test_plan_ledger_and_statement_of_a_run_agree_on_the_epochs(tmp_path):
    run = dpcfl.run(SETTINGS, tmp_path, "in-process", progress=False)
    privacy = run.privacy
    noise = privacy.document["noise_multiplier"]["max"]
    for client in (0, 1):
        charged = [event for entry in run.ledger(client) for event in entry.events]
        assert charged == [dpcfl.AllocatedGaussian(noise, 7, 2)] * 3  # 7 batches of 200 records, 2 epochs a round
    spent = dpcfl.account([dpcfl.AllocatedGaussian(noise, 7, 6)], 1e-4)["epsilon"]
    assert privacy.epsilon_spent == spent
    assert 4.99 < spent <= 5
    replaced = epsilon([dpcfl.AllocatedGaussian(noise, 7, 6)], 1e-4, "replace-one")
    assert privacy.document["epsilon_replace_one"] == pytest.approx(replaced, rel=1e-6)
    assert 1.5 * spent < replaced < 2 * spent
    assert all(check.holds is not False for check in run.verify())
    printed = [re.match("charged ([0-9.]+), whole plan ([0-9.]+), target 5 at", check.detail) for check in run.verify()]
    ((charged, planned),) = [match.groups() for match in printed if match]
    assert spent <= float(charged) == float(planned) <= 5  # rounded up: a promise holds as it is printed


def test_a_job_without_the_setting_has_the_bytes_it_had():
    usual = {"epochs", "batch_size", "lr", "clip", "momentum", "weight_decay", "pace", "deadline_s"}
    assert set(LocalTraining().model_dump()) == usual
    assert LocalTraining(sampling="allocation").model_dump()["sampling"] == "allocation"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"privacy": {"accountant": "rdp"}}, "privacy.accountant must be 'pld'"),
        ({"privacy": {"trust": "secure-aggregation"}}, "must be 'poisson' with privacy.trust 'secure-aggregation'"),
        (
            {
                "privacy": {"unit": "client", "trust": "trusted-server"},
                "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
            },
            "belongs to DP-SGD",
        ),
    ],
)
def test_settings_that_it_does_not_work_with_are_named(changes, sentence):
    document = SETTINGS | changes | {"privacy": SETTINGS["privacy"] | changes["privacy"]}
    with pytest.raises(ConfigError, match=r"local\.sampling is 'allocation'") as caught:
        config.resolve(document)
    assert sentence in str(caught.value)
