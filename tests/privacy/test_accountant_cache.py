"""The accountant's kept answers: asked once, never shared between questions, never kept from a broken accountant."""

from __future__ import annotations

import pytest

from dpcfl_net.privacy.accounting import cache as module
from dpcfl_net.privacy.accounting.cache import cached


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
