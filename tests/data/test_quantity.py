"""Quantity skew: clients of unequal size."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.datasets import load
from dpcfl_net.data.partition import plan_slices
from dpcfl_net.data.quantity import SizeLaw, drawn_sizes
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.transport.keys import make_keys

TWO = {"dataset": "digits", "clients": [3, 2], "shift": "rotation", "test_per_client": 30}


def slices(**changes):
    return plan_slices(DataSettings.model_validate({**TWO, **changes}), load("digits"), 7)


def counts(**changes):
    return [len(piece.train_rows) + len(piece.validation_rows) for piece in slices(**changes)]


@given(
    law=st.sampled_from(["lognormal", "zipf"]), spread=st.floats(0, 10), clients=st.integers(1, 40),
    smallest=st.integers(1, 5), mean=st.integers(5, 200), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=60)
def test_drawn_sizes_use_every_record_and_keep_the_smallest(law, spread, clients, smallest, mean, seed):
    rng = np.random.Generator(np.random.PCG64(seed))
    found = drawn_sizes(SizeLaw(law=law, spread=spread, smallest=smallest), clients, clients * mean, rng)
    assert (len(found), sum(found)) == (clients, clients * mean)
    assert min(found) >= smallest


def test_sizes_follow_their_law():
    rng = np.random.Generator(np.random.PCG64(1))
    assert drawn_sizes(SizeLaw(law="lognormal", spread=0.0), 4, 40, rng) == [10] * 4
    assert sorted(drawn_sizes(SizeLaw(law="zipf", spread=1.0), 2, 10, rng)) == [4, 6]  # of 5.33 and 2.67 above one each
    zipf = sorted(drawn_sizes(SizeLaw(law="zipf", spread=1.0), 4, 25_000, rng), reverse=True)
    assert zipf == pytest.approx([12_000, 6_000, 4_000, 3_000], abs=4)
    logs = np.log(drawn_sizes(SizeLaw(law="lognormal", spread=1.0), 2_000, 2_000_000, rng))
    assert logs.std() == pytest.approx(1.0, abs=0.1)  # six standard errors


def test_dirichlet_sizes_follow_alpha_and_their_law_needs_it():
    rng = np.random.Generator(np.random.PCG64(1))
    for alpha in (0.5, 1.0, 10.0):
        found = np.array(drawn_sizes(SizeLaw(law="dirichlet", alpha=alpha), 4_000, 40_000_000, rng)) / 10_000
        # Shares are gamma variables over their sum: the square has mean 1 + 1 / alpha and, at alpha 0.5, a standard error below 2.5 %
        assert (found**2).mean() == pytest.approx(1 + 1 / alpha, rel=0.13)
    for law in ({"law": "dirichlet"}, {"law": "dirichlet", "alpha": 1.0, "spread": 1.0}, {"law": "zipf"}):
        with pytest.raises(
            ValidationError, match=r"law '(dirichlet|zipf)' needs (alpha|spread), got .*; (alpha|spread) must be null"
        ):
            SizeLaw.model_validate(law)
    assert set(SizeLaw(law="zipf", spread=1.0).model_dump()) == {"law", "spread", "smallest"}


def test_slices_have_the_sizes_and_share_no_record():
    own = slices(sizes=[10, 200, 30, 50, 400])
    assert [len(piece.train_rows) for piece in own] == [10, 200, 30, 50, 400]
    assert [len(piece.test_rows) for piece in own] == [30] * 5
    for cluster in ([0, 1, 2], [3, 4]):
        rows = np.concatenate([own[k].train_rows for k in cluster])
        assert len(np.unique(rows)) == len(rows)
    law = {"law": "lognormal", "spread": 1.0, "smallest": 20}
    drawn = counts(train_per_client=200, sizes=law)
    assert (sum(drawn[:3]), sum(drawn[3:])) == (600, 400)
    assert min(drawn) >= 20
    assert len(set(drawn)) > 2
    assert drawn == counts(train_per_client=200, sizes=law)
    held = slices(sizes=[10, 200, 30, 50, 400], validation=0.2)
    assert [len(piece.validation_rows) for piece in held] == [2, 40, 6, 10, 80]


def test_equal_sizes_are_those_without_the_setting_and_leave_the_job_as_it_was():
    plain, listed = slices(train_per_client=100), slices(sizes=[100] * 5)
    for a, b in zip(plain, listed, strict=True):
        assert np.array_equal(a.train_rows, b.train_rows)
        assert np.array_equal(a.test_rows, b.test_rows)
    assert "sizes" not in DataSettings.model_validate(TWO).model_dump(mode="json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sizes": [1, 2]}, "must be 5 whole numbers from 1 on, one for each client"),
        ({"sizes": [1, 2, 3, 4, 0]}, "must be 5 whole numbers from 1 on"),
        ({"sizes": [10] * 5, "train_per_client": 20}, "train_per_client must be null with a list of sizes"),
        ({"sizes": {"law": "normal", "spread": 1.0}}, "lognormal"),
        ({"sizes": {"law": "zipf", "spread": -1.0}}, "greater than or equal to 0"),
        ({"sizes": [10] * 5, "shift": "none", "partition": "dirichlet", "alpha": 1.0, "clients": [5]}, "partition 'equal'"),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        DataSettings.model_validate({**TWO, **changes})


def test_sizes_beyond_the_data_set_are_refused():
    with pytest.raises(ConfigError, match="a cluster need 1500 records, digits has 1437"):
        slices(sizes=[500, 500, 500, 10, 10])
    with pytest.raises(ConfigError, match=r"data\.sizes\.smallest is 101: must be at most the mean, 100 records"):
        slices(train_per_client=100, sizes={"law": "zipf", "spread": 1.0, "smallest": 101})
    assert counts(train_per_client=100, sizes={"law": "zipf", "spread": 1.0, "smallest": 100}) == [100] * 5
    whole = [500, 500, 437, 700, 737]
    assert counts(sizes=whole) == whole  # each cluster uses all 1437 records


def test_which_client_is_the_largest_is_drawn():
    """At random, 20 seeds agree with probability 5^-19."""
    zipf = SizeLaw(law="zipf", spread=1.0)
    assert len({int(np.argmax(drawn_sizes(zipf, 5, 1000, np.random.default_rng(seed)))) for seed in range(20)}) > 1


def test_noise_is_calibrated_to_the_records_of_each_client(tmp_path):
    make_keys(tmp_path, 5)
    data = {**TWO, "sizes": [30, 200, 60, 60, 200]}
    document = {**SMALL, "data": data, "local": {"batch_size": 20}, "algorithm": {"name": "global"}}
    job = make_job(config.resolve(document), tmp_path)
    noise = {entry.records: entry.noise_multiplier for entry in job.protocol.roster}
    assert sorted(noise) == [30, 60, 200]
    assert noise[30] > noise[60] > noise[200]
