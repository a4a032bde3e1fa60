"""Malicious clients in secure sums: their answers count as missing or abort the sum, and the server goes on."""

from __future__ import annotations

import numpy as np
import pytest
from sum_play import added, hosts_closed, hosts_of, sum_job, sums_of, truth  # noqa: F401 - a fixture

from dpcfl_net.adversaries.malicious_sums import SumPlayed
from dpcfl_net.adversaries.reactions import Heard

CLIENTS, HOSTILE = 4, 2
FIELDS = {
    "secure_keys": "keys",
    "secure_shares": "boxes",
    "masked_update": "masked",
    "secure_survivors": "signature",
    "secure_unmask": "shares",
}
UNFIT = {
    "nothing": lambda array: None,
    "longer": lambda array: np.concatenate((array, array)),
    "another type": lambda array: array.astype(np.float32),
    "a scalar": lambda array: array.reshape(-1)[0],
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    return sum_job(folder, CLIENTS), folder


def play(job, name: str, stage: str, change, hostile=(HOSTILE,)) -> SumPlayed:
    """One round in which some clients' answers to a stage are replaced."""
    made, folder = job
    sums = sums_of(made, hosts_of(made, folder, f"{name} {stage}"))
    ask = sums.ask

    def asked(t, kind, tasks):
        heard = ask(t, kind, tasks)
        for client in set(hostile) & set(heard) if kind == stage else ():
            array = change(heard[client].tensors[FIELDS[stage]].copy())
            heard[client] = Heard("release", tensors={} if array is None else {FIELDS[stage]: array})
        return heard

    sums.ask = asked
    return sums.play(1)


def garbage(array: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, array.shape).astype(array.dtype)


@pytest.mark.parametrize("stage", FIELDS)
@pytest.mark.parametrize("name", UNFIT)
def test_an_answer_of_another_form_counts_as_none(job, monkeypatch, name, stage):
    words = truth(monkeypatch)
    played = play(job, name, stage, UNFIT[name])
    late = stage in ("secure_survivors", "secure_unmask")  # the vector is in the sum by then
    expected = tuple(client for client in range(CLIENTS) if late or client != HOSTILE)
    assert (played.aborted, played.server.survivors) == ("", expected)
    assert np.array_equal(played.total, added(words[1, client] for client in expected))


@pytest.mark.parametrize("stage", ["secure_keys", "secure_survivors"])
def test_garbage_in_place_of_a_signature_counts_as_none(job, monkeypatch, stage):
    words = truth(monkeypatch)
    played = play(job, "garbage", stage, garbage)
    assert played.aborted == ""
    assert np.array_equal(played.total, added(words[1, client] for client in played.server.survivors))
    two = play(job, "two", stage, garbage, hostile=(1, HOSTILE))
    assert "needs 3" in two.aborted
    assert two.total is None


def test_garbage_boxes_and_shares_of_one_client_spoil_at_most_the_sum(job, monkeypatch):
    """A wrong share of a self mask gives a wrong sum: integrity against malicious clients is not claimed."""
    words = truth(monkeypatch)
    boxes = play(job, "garbage", "secure_shares", garbage)
    assert "self mask of client 2" in boxes.aborted
    wrong = play(job, "wrong", "secure_unmask", lambda array: np.where(np.arange(33) == 0, 0, garbage(array)).astype(np.uint8))
    assert wrong.aborted == ""
    assert not np.array_equal(wrong.total, added(words.values()))
    for name, change in (("zeros", np.zeros_like), ("too large", lambda array: np.full_like(array, 255))):
        invalid = play(job, name, "secure_unmask", change)  # no shares at all: those of the others are enough
        assert np.array_equal(invalid.total, added(words.values()))


def test_an_answer_twice_or_unasked_counts_as_none(job, monkeypatch):
    words = truth(monkeypatch)
    made, folder = job
    played = sums_of(made, hosts_of(made, folder, "twice")).play(1)
    takes = dict(zip(FIELDS, ("add_keys", "add_boxes", "add_masked", "add_signature", "add_shares"), strict=True))
    for stage, take in takes.items():
        for client, heard in played.answers[stage].items():
            assert not getattr(played.server, take)(client, heard.tensors)
            assert not getattr(played.server, take)(99, heard.tensors)
    assert np.array_equal(played.total, added(words.values()))
