"""The accountant's kept answers: asked once, never shared between questions, never kept from a broken accountant."""

from __future__ import annotations

import os

import pytest
from conftest import SMALL

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.privacy.accounting import cache as module
from dpcfl_net.privacy.accounting.cache import cached
from dpcfl_net.transport.keys import make_keys


def test_a_question_is_answered_once_and_every_other_question_on_its_own(tmp_path):
    asked = []

    def answer(value):
        return lambda: asked.append(value) or value

    assert cached(tmp_path, {"epsilon": 5}, answer(1.25)) == 1.25
    assert cached(tmp_path, {"epsilon": 5}, answer(9.0)) == 1.25
    assert cached(tmp_path, {"epsilon": 6}, answer(None)) is None
    assert asked == [1.25, None]


def test_an_answer_that_failed_is_not_kept(tmp_path):
    def fail():
        raise ValueError("no noise reaches it")

    with pytest.raises(ValueError, match="no noise"):
        cached(tmp_path, {"epsilon": 5}, fail)
    assert cached(tmp_path, {"epsilon": 5}, lambda: 2.0) == 2.0


def test_another_accountant_does_not_find_the_answers_of_this_one(tmp_path, monkeypatch):
    assert cached(tmp_path, {"epsilon": 5}, lambda: 1.0) == 1.0
    monkeypatch.setattr(module, "accountant", lambda: "corrected")
    assert cached(tmp_path, {"epsilon": 5}, lambda: 2.0) == 2.0


def test_answers_that_another_user_may_have_written_are_not_read(tmp_path, monkeypatch):
    """They stand for an epsilon: a forged one would let a job with too little noise pass."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "dpcfl_net" / "claims"
    make_keys(tmp_path / "keys", 8)
    document = {**SMALL, "privacy": {**SMALL["privacy"], "epsilon": 4.875}}
    assert make_job(config.resolve(document), tmp_path / "keys").protocol.privacy.epsilon == 4.875
    assert kept.stat().st_mode & 0o077 == 0
    for mode in (0o770, 0o702, 0o1777):
        kept.chmod(mode)
        with pytest.raises(ConfigError, match=r"other users can write to .*claims.*XDG_CACHE_HOME"):
            make_job(config.resolve(document), tmp_path / "keys")
    kept.chmod(0o755)
    make_job(config.resolve(document), tmp_path / "keys")
    if os.geteuid() == 0:
        os.chown(kept, 12345, -1)
        with pytest.raises(ConfigError, match="other users can write"):
            make_job(config.resolve(document), tmp_path / "keys")
