"""Label skew, speaking roles, lines and validation shares: who holds what, and that nothing is held twice."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from conftest import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from simulate import simulate

from dpcfl_net.core.errors import ConfigError, DataMissing
from dpcfl_net.data import regression, roles, skew
from dpcfl_net.data.datasets import load
from dpcfl_net.data.partition import open_client, open_rows, open_set, plan_slices
from dpcfl_net.data.records import ClientData
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import client_slice
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.transport.keys import make_keys

SKEWED = {"dataset": "digits", "shift": "none", "partition": "dirichlet", "alpha": 0.3}
PLAYED = {"dataset": "shakespeare", "shift": "none", "partition": "roles"}
LINED = {"dataset": "regression", "shift": "line"}
PARTS = ("train", "validation", "test")


def play(root, name="the_play", lengths=(3000, 2000, 1200), seed=0):
    """A play whose roles speak random letters, in speeches of many sizes, taking turns; their texts by name."""
    rng = np.random.default_rng(seed)
    texts = {f"ROLE {k}": "" for k in range(len(lengths))}
    speeches = []
    while open_roles := [k for k, size in enumerate(lengths) if len(texts[f"ROLE {k}"]) < size]:
        k = rng.choice(open_roles)
        line = "".join(rng.choice(list("abcdefghijklm nopqrst'uvwxyz,."), rng.integers(1, 60)))
        texts[f"ROLE {k}"] += line + "\n"
        speeches.append(f"ROLE {k}:\n{line}\n")
    folder = root / "Shakespeare" / "plays"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(speeches))
    return texts


def decode(codes):
    return "".join((roles.ALPHABET + "~")[int(code)] for code in codes)


def spoken(data):
    """The windows of a client with the character that follows, as text."""
    x, y = data.batch(np.arange(len(data)), len(data))
    return [decode(row) + decode([label]) for row, label in zip(x, y, strict=True)]


# Settings


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"partition": "dirichlet", "shift": "none"}, "alpha"),
        ({"alpha": 0.3}, "alpha"),
        ({**SKEWED, "alpha": 0.0}, "greater than or equal to 0.001"),
        ({**SKEWED, "alpha": math.inf}, "finite"),
        ({**SKEWED, "shift": "rotation"}, "true clusters"),
        ({**SKEWED, "clients": [2, 2]}, r"clusters would share records.*\[4\]"),
        ({"validation": 1.0}, "less than 1"),
        ({"validation": -0.1}, "greater than or equal"),
        ({"noise": 0.5}, "regression"),
        ({"shift": "line"}, "'line'"),
        ({**LINED, "shift": "rotation"}, "'line'"),
        ({**LINED, "clients": [1] * 5}, "at most 4"),
        ({**LINED, "partition": "dirichlet", "alpha": 1.0}, "no labels"),
        ({**PLAYED, "partition": "equal"}, "'roles'"),
        ({"partition": "roles", "shift": "none"}, "'shakespeare'"),
        ({**PLAYED, "clients": [2, 2]}, r"\[4\]"),
        ({**PLAYED, "clients": [4], "shift": "label-flip"}, "no known clusters"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, word):
    with pytest.raises(ValidationError, match=word):
        DataSettings(**changes)


# Equal shares


@given(
    clients=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    train=st.integers(10, 280),
    validation=st.sampled_from([0.0, 0.1, 0.25, 0.5]),
    seed=st.integers(0, 2**62),
)
@settings(max_examples=30)
def test_validation_is_taken_from_the_end_of_the_very_same_share(clients, train, validation, seed):
    images = load("digits")
    asked = {"clients": clients, "train_per_client": train, "test_per_client": 7}
    whole = plan_slices(DataSettings(**asked), images, seed)
    split = plan_slices(DataSettings(**asked, validation=validation), images, seed)
    for old, new in zip(whole, split, strict=True):
        assert len(new.validation_rows) == round(validation * train)
        assert np.array_equal(np.concatenate([new.train_rows, new.validation_rows]), old.train_rows)
        assert np.array_equal(new.test_rows, old.test_rows)
        assert len(old.validation_rows) == 0


def test_the_same_seed_gives_the_slices_that_it_always_gave():
    pieces = plan_slices(DataSettings(clients=[2, 3], train_per_client=200, test_per_client=150), load("digits"), 5)
    for piece, j in zip(pieces, [0, 1, 0, 1, 2], strict=True):
        rng = np.random.Generator(np.random.PCG64([5, piece.cluster]))
        train, test = rng.permutation(1437), rng.permutation(360)
        assert np.array_equal(piece.train_rows, train[j * 200 : (j + 1) * 200])
        assert np.array_equal(piece.test_rows, test[(j * 150 + np.arange(150)) % 360])


@pytest.mark.parametrize("validation", [0.01, 0.999])
def test_a_fraction_that_takes_nothing_or_all_is_refused(validation):
    with pytest.raises(ConfigError, match=r"data\.validation is"):
        plan_slices(DataSettings(train_per_client=20, validation=validation), load("digits"), 0)


def test_a_client_opens_its_validation_records():
    asked = DataSettings(clients=[1, 1], train_per_client=100, validation=0.3)
    images, piece = load("digits"), plan_slices(asked, load("digits"), 0)[1]
    data = open_client(asked, piece, part="validation")
    assert len(data) == 30
    assert np.array_equal(data.labels(), images.train_y[piece.validation_rows])
    turned = ClientData(images, "train", piece.validation_rows, quarter_turns=1)
    assert torch.equal(data.batch(np.arange(30), 30)[0], turned.batch(np.arange(30), 30)[0])


def test_a_plan_is_made_once_and_again_when_the_files_change(tmp_path):
    play(tmp_path)
    asked = DataSettings(**PLAYED, clients=[2])
    first = plan_slices(asked, open_set(asked, tmp_path), 0)
    again = plan_slices(asked, open_set(asked, tmp_path), 0)
    assert again is first
    assert not first[0].train_rows.flags.writeable
    play(tmp_path, lengths=(5000, 4000), seed=1)
    changed = plan_slices(asked, open_set(asked, tmp_path), 0)
    assert len(changed[0].train_rows) > len(first[0].train_rows)


# Label skew


@given(data=st.data())
@settings(max_examples=200)
def test_a_total_is_shared_out_in_whole_numbers_as_the_weights_say(data):
    rows, labels = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    most = np.array([[data.draw(st.integers(0, 30)) for _ in range(labels)] for _ in range(rows)])
    weight = st.one_of(st.just(0.0), st.floats(1e-320, 1.0))
    weights = np.array([[data.draw(weight) for _ in range(labels)] for _ in range(rows)])
    total = data.draw(st.integers(0, int(most.sum(1).min())))
    given_out = skew.apportion(weights, total, most)
    assert (given_out.sum(1) == total).all()
    assert ((given_out >= 0) & (given_out <= most)).all()
    for row, share, limit in zip(given_out, weights, most, strict=True):
        if share.sum() > 0 and (limit >= total).all():
            assert (np.abs(row - total * share / share.sum()) < 1 + 1e-9).all()


def test_more_than_there_is_cannot_be_shared_out():
    with pytest.raises(ValueError, match="do not fit"):
        skew.apportion(np.ones((2, 3)), 7, np.array([[9, 9, 9], [2, 2, 2]]))


@given(
    labels=st.lists(st.integers(0, 4), min_size=60, max_size=120),
    count=st.integers(1, 6),
    alpha=st.sampled_from([0.01, 0.3, 1.0, 100.0]),
    full=st.booleans(),
    seed=st.integers(0, 2**62),
)
@settings(max_examples=60)
def test_skewed_shares_are_equal_in_size_and_disjoint(labels, count, alpha, full, seed):
    train_y, test_y = np.array(labels, np.uint8), np.array([0, 0, 1, 2, 3, 3, 3, 4] * 4, np.uint8)
    train = len(labels) // count if full else 8
    sizes = skew.Sizes(train, held=2, test=10)
    found = skew.shares(train_y, test_y, 5, count, sizes, alpha, np.random.default_rng(seed))
    assert [tuple(map(len, share)) for share in found] == [(train - 2, 2, 10)] * count
    held = np.concatenate([np.concatenate(share[:2]) for share in found])
    assert len(np.unique(held)) == len(held)
    assert all(len(np.unique(share[2])) == 10 for share in found)


def test_validation_and_test_records_have_the_proportions_of_training():
    rng = np.random.default_rng(0)
    train_y, test_y = rng.integers(0, 10, 20_000), rng.integers(0, 10, 4_000)
    for train, held, test in skew.shares(train_y, test_y, 10, 10, skew.Sizes(400, 40, 100), 0.5, rng):
        share = np.bincount(train_y[np.concatenate([train, held])], minlength=10) / 400
        assert np.abs(np.bincount(train_y[held], minlength=10) - 40 * share).max() < 1
        assert np.abs(np.bincount(test_y[test], minlength=10) - 100 * share).max() < 1


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0, 30.0])
def test_label_skew_follows_alpha(alpha):
    # E sum_k p_k^2 = (alpha + 1) / (K alpha + 1) under Dirichlet(alpha); each sum lies in [0, 1], so by Hoeffding's inequality
    # the mean of n is further off than t with probability below 2 exp(-2 n t^2) = 5e-7. Rounding moves it by less than .01.
    n, classes, each = 4000, 10, 100
    labels = np.arange(classes * n * each) % classes
    found = skew.shares(labels, labels[:100], classes, n, skew.Sizes(each, 0, 1), alpha, np.random.default_rng(1))
    proportions = np.stack([np.bincount(labels[train], minlength=classes) for train, _, _ in found]) / each
    bound = math.sqrt(math.log(2 / 5e-7) / (2 * n)) + 0.01
    assert abs((proportions**2).sum(1).mean() - (alpha + 1) / (classes * alpha + 1)) < bound
    assert np.abs(proportions.mean(0) - 1 / classes).max() < bound


def test_a_skewed_partition_of_digits():
    asked = DataSettings(**SKEWED, clients=[5], validation=0.1)
    images = load("digits")
    pieces = plan_slices(asked, images, 3)
    assert {len(piece.train_rows) for piece in pieces} == {287 - 29}
    assert {len(piece.validation_rows) for piece in pieces} == {29}
    held = np.concatenate([np.concatenate([piece.train_rows, piece.validation_rows]) for piece in pieces])
    assert len(np.unique(held)) == 5 * 287
    even = plan_slices(DataSettings(**{**SKEWED, "alpha": 1e6}, clients=[5], train_per_client=100), images, 3)
    most = [max(np.bincount(images.train_y[piece.train_rows], minlength=10)) for piece in even]
    assert max(most) <= 11
    assert not np.array_equal(pieces[0].train_rows, plan_slices(asked, images, 4)[0].train_rows)


# Speaking roles


def test_roles_are_clients_the_longest_first_in_one_order_and_cut_by_time(tmp_path):
    texts = play(tmp_path)
    asked = DataSettings(**PLAYED, clients=[3], train_per_client=40, validation=0.25, test_per_client=6)
    pieces = plan_slices(asked, open_set(asked, tmp_path), 0)
    order = sorted(texts.values(), key=len, reverse=True)
    for text, piece in zip(order, pieces, strict=True):
        assert [len(piece.rows(part)) for part in PARTS] == [30, 10, 6]
        # Random letters: a window is found in its role's text at one place only.
        spans = {}
        for part in PARTS:
            windows = spoken(open_client(asked, piece, tmp_path, part))
            places = [text.index(window) for window in windows]
            assert places == sorted(set(places))
            spans[part] = places[0], places[-1] + roles.WINDOW + 1
        assert spans["train"][1] <= spans["validation"][0] < spans["validation"][1] <= spans["test"][0]
        cut = len(text) - round(0.2 * len(text))
        assert spans["train"][0] == 0
        assert spans["validation"][1] == cut == spans["test"][0]
        assert spans["test"][1] == len(text)


def test_without_a_number_no_two_windows_share_a_character(tmp_path):
    texts = play(tmp_path)
    asked = DataSettings(**PLAYED, clients=[3])
    for text, piece in zip(
        sorted(texts.values(), key=len, reverse=True), plan_slices(asked, open_set(asked, tmp_path), 0), strict=True
    ):
        cut = len(text) - round(0.2 * len(text))
        said = spoken(open_client(asked, piece, tmp_path))
        assert "".join(said) == text[: len(said) * 81]
        assert len(said) == cut // 81
        assert len(piece.test_rows) == (len(text) - cut) // 81


def test_a_batch_of_text_holds_the_whole_codes(tmp_path):
    everything = roles.ALPHABET.replace("\n", "") + "\u00e9\u20ac"
    folder = tmp_path / "Shakespeare" / "plays"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text(f"X:\n{everything * 20}\n", encoding="utf-8")
    asked = DataSettings(**PLAYED, clients=[1], train_per_client=200)
    x, y = open_client(asked, plan_slices(asked, open_set(asked, tmp_path), 0)[0], tmp_path).batch(np.arange(200), 256)
    assert (x.shape, x.dtype, y.dtype) == ((256, 80), torch.float32, torch.int64)
    expected = [roles.ALPHABET.find(character) % 97 for character in everything * 20]
    starts = [k * (round(0.8 * len(everything) * 20) - 1 + 1 - 81) // 199 for k in range(200)]
    assert expected.count(96) == 40
    assert set(x[:200].unique().tolist()) == {float(code) for code in expected}
    for row, label, start in zip(x, y, starts, strict=False):
        at = next(at for at in (start, start + 1) if row.tolist() == expected[at : at + 80])
        assert label == expected[at + 80]
    assert not x[200:].any()


def test_what_the_plays_do_not_have_is_refused(tmp_path):
    with pytest.raises(DataMissing, match=r"Shakespeare/plays/\*\.txt"):
        load("shakespeare", tmp_path)
    play(tmp_path)
    images = load("shakespeare", tmp_path)
    for changes, word in (
        ({"clients": [4]}, r"data\.clients: 4 roles .* have 3"),
        ({"clients": [3], "train_per_client": 2000}, r"data\.train_per_client: role 2 of 3.*allowed are 1 to \d+"),
        ({"clients": [3], "test_per_client": 300}, r"data\.test_per_client: role 3"),
        ({"clients": [3], "validation": 0.02}, r"data\.validation: role 1"),
        ({"clients": [3], "train_per_client": 20, "validation": 0.01}, r"data\.validation: role 1.*for 0 windows"),
    ):
        with pytest.raises(ConfigError, match=word):
            plan_slices(DataSettings(**PLAYED, **changes), images, 0)
    path = tmp_path / "Shakespeare" / "plays" / "the_play.txt"
    for bad in (path.read_text().replace(":\n", "\n", 1), ""):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="damaged"):
            load("shakespeare", tmp_path)


@pytest.mark.data
def test_the_real_plays():
    try:
        images = load("shakespeare")
    except DataMissing as missing:
        pytest.skip(str(missing))
    asked = DataSettings(**PLAYED, clients=[300], train_per_client=100, test_per_client=20)
    pieces = plan_slices(asked, images, 0)
    assert [len(pieces), len(np.unique(np.concatenate([piece.train_rows for piece in pieces])))] == [300, 30_000]
    assert not (images.train_y == roles.UNKNOWN).any()
    assert re.search("[a-z ]{20}", decode(images.train_x[0]))


# Lines


@pytest.mark.parametrize("noise", [None, 0.5])
def test_each_cluster_has_the_line_of_the_paper(noise):
    asked = DataSettings(**LINED, clients=[2, 2, 2, 2], train_per_client=4000, noise=noise)
    images = open_set(asked)
    pieces = plan_slices(asked, images, 0)
    for cluster, (slope, intercept) in enumerate([(-3, 2), (-1, 0), (1, -2), (3, 1)]):
        own = [piece for piece in pieces if piece.cluster == cluster]
        data, splits = open_rows(images, own)
        x, y = data.batch(np.arange(8000), 8000)
        assert (x.shape, x.dtype, y.dtype, splits.tolist()) == ((8000, 1), torch.float32, torch.float32, [4000])
        assert x.abs().max() <= 2
        (found_slope, found_intercept), rest, *_ = np.linalg.lstsq(
            np.column_stack([x[:, 0], np.ones(8000)]), y.numpy(), rcond=None
        )
        expected = 0.1 if noise is None else noise
        # Six standard errors: sd / sqrt(8000) of the intercept, and over 1.15, the deviation of x, of the slope.
        assert abs(found_slope - slope) < 6 * expected / math.sqrt(8000)
        assert abs(found_intercept - intercept) < 6 * expected / math.sqrt(8000)
        assert math.sqrt(rest[0] / 8000) == pytest.approx(expected, rel=0.1)
        assert np.array_equal(data.labels(), y.numpy())


def test_regression_is_always_there_with_fifty_points_a_client(tmp_path):
    asked = DataSettings(**LINED, clients=[20, 10, 10])
    pieces = plan_slices(asked, open_set(asked, tmp_path / "nowhere"), 0)
    assert {(len(piece.train_rows), len(piece.test_rows)) for piece in pieces} == {(50, 50)}
    assert {piece.line for piece in pieces} == {regression.LinearTask(*line, 0.1) for line in regression.LINES[:3]}
    with pytest.raises(ValueError, match="line"):
        ClientData(open_set(asked), "train", pieces[0].train_rows)
    with pytest.raises(ValueError, match="line"):
        ClientData(load("digits"), "train", pieces[0].train_rows, line=pieces[0].line)


# Many clients in one go


def test_many_clients_are_opened_in_one_go():
    asked = DataSettings(clients=[3, 2], train_per_client=50, test_per_client=20, validation=0.2)
    images = load("digits")
    pieces = plan_slices(asked, images, 0)
    for part in PARTS:
        data, splits = open_rows(images, pieces[3:], part)
        x, y = data.batch(np.arange(len(data)), len(data))
        for piece, own_x, own_y in zip(pieces[3:], np.split(x, splits), np.split(y, splits), strict=True):
            alone = open_client(asked, piece, part=part)
            expected = alone.batch(np.arange(len(alone)), len(alone))
            assert torch.equal(own_x, expected[0])
            assert torch.equal(own_y, expected[1])
    for wrong in (pieces[2:4], []):
        with pytest.raises(ValueError, match="one transformation"):
            open_rows(images, wrong)


# Models on these sets


def lstm():
    return models.build("char-lstm", (80,), roles.CODES), models.initial("char-lstm", (80,), roles.CODES, 1)


def test_an_lstm_is_evaluated_alike_one_by_one_and_in_a_padded_batch(tmp_path):
    play(tmp_path)
    asked = DataSettings(**PLAYED, clients=[3], train_per_client=150)
    data = open_client(asked, plan_slices(asked, open_set(asked, tmp_path), 0)[0], tmp_path)
    module, theta = lstm()
    evaluator = Evaluator(module)
    losses, right = evaluator.each(theta, data)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta), module.parameters())
    x, y = data.batch(np.arange(150), 150)
    with torch.no_grad():
        alone = torch.cat([module(row[None]) for row in x])
    assert evaluator.path == "plain"
    np.testing.assert_allclose(losses, torch.nn.functional.cross_entropy(alone.double(), y, reduction="none"), rtol=1e-5)
    assert right.tolist() == (alone.argmax(1) == y).tolist()
    assert evaluator.count_correct(theta[None], data) == [right.sum()]


def test_dp_sgd_refuses_an_lstm_and_regression_by_name():
    with pytest.raises(ConfigError, match=r"'lstm' \(LSTM\)"):
        Trainer(lstm()[0], clip=1.0, learning_rate=0.1, batch_size=8)
    with pytest.raises(ConfigError, match="regression"):
        Trainer(models.build("linear", (1,), 1), clip=1.0, learning_rate=0.1, batch_size=8, task="regression")


def client_level(**changes):
    """A document of DP-FedAvg, which trains with plain SGD behind a trusted server."""
    return {
        **SMALL, "rounds": 12, "local": {"batch_size": 10, "lr": 0.1, "clip": 10.0, "epochs": 2},
        "privacy": {"epsilon": 1000, "delta": 1e-3, "unit": "client", "trust": "trusted-server", "noise": "seeded", "noise_seed": "5eed" * 16},
        "algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0}, **changes,
    }  # fmt: skip


def test_a_run_on_regression_finds_the_line(tmp_path):
    document = client_level(data={**LINED, "clients": [8]}, model={"name": "linear"})
    make_keys(tmp_path / "keys", 8)
    job = make_job(config.resolve(document), tmp_path / "keys")
    assert (job.protocol.model.task, job.protocol.model.parameters) == ("regression", 2)
    state = simulate(job, tmp_path)
    found = next(np.asarray(value).reshape(-1) for value in vars(state).values() if np.size(value) == 2)
    assert np.allclose(found, [-3, 2], atol=0.2)
    accuracy, loss = Evaluator(models.build("linear", (1,), 1), "regression").accuracy_and_loss(
        found.astype(np.float32), open_client(*client_slice(job, 0, None), part="test")
    )
    assert accuracy > 0.9
    assert loss < 0.1


def test_the_roster_has_each_clients_own_numbers(tmp_path):
    play(tmp_path)
    document = client_level(
        data={**PLAYED, "clients": [3], "validation": 0.2, "root": str(tmp_path)}, model={"name": "char-lstm"}, rounds=2
    )
    make_keys(tmp_path / "keys", 3)
    job = make_job(config.resolve(document), tmp_path / "keys")
    assert job.protocol.model.parameters == 26_025
    for entry in job.protocol.roster:
        piece = client_slice(job, entry.id, str(tmp_path))[1]
        assert (entry.records, entry.validation_records) == (len(piece.train_rows), len(piece.validation_rows))
    assert len({entry.records for entry in job.protocol.roster}) == 3
    simulate(job, tmp_path / "run", data_root=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"data": {**LINED, "clients": [8]}, "model": {"name": "cnn"}}, "model.name is 'cnn': cannot do regression"),
        ({"data": {**SKEWED, "clients": [8], "alpha": None}}, "alpha"),
    ],
)
def test_configurations_that_cannot_be(changes, word):
    with pytest.raises(ConfigError, match=word):
        config.resolve(client_level(**changes))


def test_sample_level_privacy_refuses_what_dp_sgd_cannot_train(tmp_path):
    linear = {**SMALL, "data": {**LINED, "clients": [4, 4]}, "model": {"name": "linear"}}
    with pytest.raises(ConfigError, match=r"privacy\.unit"):
        config.resolve(linear)
    play(tmp_path)
    text = {
        **SMALL,
        "algorithm": {"name": "global"},
        "data": {**PLAYED, "clients": [2], "root": str(tmp_path)},
        "model": {"name": "char-lstm"},
    }
    text["local"] = {"batch_size": 4, "lr": 0.1}
    make_keys(tmp_path / "keys", 2)
    with pytest.raises(ConfigError, match="LSTM"):
        make_job(config.resolve(text), tmp_path / "keys")


def test_a_slice_of_a_large_plan_is_made_when_it_is_asked_for():
    asked = DataSettings(clients=[2, 3], train_per_client=200, test_per_client=150, shift="rotation", validation=0.1)
    pieces = plan_slices(asked, load("digits"), 5)
    every = list(pieces)
    assert [piece.cluster for piece in every] == [0, 0, 1, 1, 1]
    for k in (0, 2, 4, -1):
        assert np.array_equal(pieces[k].train_rows, every[k].train_rows)
        assert np.array_equal(pieces[k].validation_rows, every[k].validation_rows)
        assert pieces[k].quarter_turns == every[k].quarter_turns
        assert not any(rows.flags.writeable for rows in (pieces[k].train_rows, pieces[k].validation_rows, pieces[k].test_rows))
    assert [piece.cluster for piece in pieces[1:3]] == [0, 1]
    with pytest.raises(IndexError):
        pieces[5]
