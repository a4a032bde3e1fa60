"""The central test set: no client holds its records, training records do not depend on it, and impossible sizes are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data import natural
from dpcfl_net.data.central import central_rows, central_slice, withheld
from dpcfl_net.data.datasets import load
from dpcfl_net.data.partition import open_rows, open_set, plan_slices
from dpcfl_net.data.settings import DataSettings

EQUAL = {"clients": [3, 2], "train_per_client": 100, "test_per_client": 80}
SKEWED = {
    "clients": [4],
    "shift": "none",
    "partition": "dirichlet",
    "alpha": 0.3,
    "train_per_client": 100,
    "test_per_client": 20,
}


@pytest.mark.parametrize("asked", [EQUAL, SKEWED], ids=["equal", "dirichlet"])
def test_no_client_holds_a_central_record_and_training_records_stay(asked):
    images = load("digits")
    pieces = plan_slices(DataSettings(**asked, validation=0.1, central_test=120), images, 3)
    central = central_rows(images, 120, 3)
    assert len(np.unique(central)) == 120
    assert 0 <= central.min() <= central.max() < 360
    held = np.concatenate([piece.test_rows for piece in pieces])
    assert not set(central) & set(held)
    assert {len(piece.test_rows) for piece in pieces} == {asked["test_per_client"]}
    for piece, without in zip(pieces, plan_slices(DataSettings(**asked, validation=0.1), images, 3), strict=True):
        assert np.array_equal(piece.train_rows, without.train_rows)
        assert np.array_equal(piece.validation_rows, without.validation_rows)
    assert not np.array_equal(central, central_rows(images, 120, 4))


def test_equal_slices_and_the_central_set_share_out_the_whole_test_split():
    images = load("digits")
    pieces = plan_slices(DataSettings(**{**EQUAL, "test_per_client": None}, central_test=120), images, 0)
    first = np.concatenate([piece.test_rows for piece in pieces[:3]])  # a third of the other 240 records each
    assert sorted([*first, *central_rows(images, 120, 0)]) == list(range(360))


def test_clients_that_the_records_name_keep_their_other_test_records(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names, x = np.arange(200) % 4, np.zeros((200, 6, 6), np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=names % 3, client=names, classes=3)
    own = {"dataset": "npz", "files": {"path": "own.npz"}, "clients": [4], "shift": "none", "partition": "natural"}
    asked = DataSettings.model_validate({**own, "train_per_client": 30, "central_test": 15})
    images = open_set(asked, tmp_path)
    pieces, central = plan_slices(asked, images, 0), central_rows(images, 15, 0)
    held = np.concatenate([piece.test_rows for piece in pieces])
    assert sorted([*held, *central]) == list(range(images.sizes[1]))
    without = plan_slices(asked.model_copy(update={"central_test": None}), images, 0)
    assert [piece.train_rows.tolist() for piece in pieces] == [piece.train_rows.tolist() for piece in without]


def test_a_client_whose_test_records_are_all_central_is_left_out():
    owners = np.array([0, 0, 1, 1], np.int32), np.array([0, 0, 1], np.int32)
    for seed in range(5):
        asked = None, (None, None), 0.0, np.random.default_rng(seed), np.array([True, False, True])
        ((train, _, test),) = natural.shares(owners, 1, *asked)
        assert (sorted(train), test.tolist()) == ([0, 1], [1])
        with pytest.raises(ConfigError, match="the records name 2, of which 1 have"):
            natural.shares(owners, 2, *asked)


def test_the_central_set_of_a_shifted_cluster_has_its_transformation():
    images = load("digits")
    settings = DataSettings(**EQUAL, shift="label-flip", central_test=50)
    pieces, rows = plan_slices(settings, images, 1), central_rows(images, 50, 1)
    data, _ = open_rows(images, [central_slice(images, pieces[-1], 50, 1)], "test")
    assert data.labels().tolist() == ((images.test_y[rows] + 1) % 10).tolist()


def test_a_mixture_has_a_central_set_of_each_data_set():
    digits = load("digits")
    images = replace(digits, sources=(digits, replace(digits, test_x=digits.test_x[:200], test_y=digits.test_y[:200])))
    for source, records in ((0, 360), (1, 200)):
        rows = central_rows(images, 150, 1, source)
        assert len(np.unique(rows)) == 150
        assert rows.max() < records
        assert withheld(images, 150, 1, source).nonzero()[0].tolist() == rows.tolist()
    assert set(central_rows(images, 150, 1, 0)) != set(central_rows(images, 150, 1, 1))
    asked = DataSettings(
        dataset="mnist+fashion-mnist", clients=[2, 2], shift="none", train_per_client=50, test_per_client=25, central_test=150
    )
    for piece in plan_slices(asked, images, 1):
        assert not set(piece.test_rows) & set(central_rows(images, 150, 1, piece.source))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {**EQUAL, "central_test": 281},
            r"data\.central_test is 281: must be at most 280, or null: digits has 360 test records",
        ),
        ({"clients": [2], "central_test": 360}, r"data\.central_test is 360: must be at most 359, or null: .* tests on 1 of"),
        ({**SKEWED, "central_test": 341}, r"data\.central_test is 341: must be at most 340, or null: .* tests on 20 of"),
    ],
)
def test_more_records_than_are_left_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan_slices(DataSettings(**changes), load("digits"), 0)


def test_speaking_roles_have_no_central_set():
    roles = {"dataset": "shakespeare", "clients": [3], "shift": "none", "partition": "roles"}
    with pytest.raises(ValueError, match="central_test is 9: must be null with partition 'roles'"):
        DataSettings(**roles, central_test=9)


def test_a_job_without_it_does_not_name_it():
    assert "central_test" not in DataSettings().model_dump(mode="json")
    assert DataSettings(central_test=9).model_dump(mode="json")["central_test"] == 9
