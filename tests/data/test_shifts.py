"""Shifts between clusters, alone and together, and mixtures of data sets."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data import datasets, shifts
from dpcfl_net.data.datasets import Images, load
from dpcfl_net.data.partition import open_rows, open_set, plan_slices, shift_problems
from dpcfl_net.data.settings import DataSettings
from dpcfl_net.experiment import config


def colours(classes=10):
    """200 + 50 colour images of random pixels, fed to a model as v / 255."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (250, 3, 8, 8), np.uint8), rng.integers(0, classes, 250).astype(np.uint8)
    return Images(x[:200], y[:200], x[200:], y[200:], classes, 0.0, 1.0, None, "random colours")


def seen(images, part="train", **settings):
    """The source rows of each client, and the images (as bytes) and labels that it sees."""
    asked = DataSettings.model_validate({"dataset": "cifar10", "train_per_client": 40, "test_per_client": 20, **settings})
    assert shift_problems(asked, images) == []
    for piece in plan_slices(asked, images, 5):
        data, _ = open_rows(images, [piece], part)
        x, y = data.batch(np.arange(len(data)), len(data))
        yield piece, piece.rows(part), np.rint(x.numpy() * 255).astype(np.uint8), y.numpy()


def test_inversion_and_channels_are_exact():
    images = colours()
    for piece, rows, x, _ in seen(images, clients=[1] * 2, shift="inversion"):
        assert np.array_equal(x, 255 - images.train_x[rows] if piece.cluster else images.train_x[rows])
    orders = set()
    for _, rows, x, _ in seen(images, clients=[1] * 6, shift="channels"):
        source = images.train_x[rows]
        order = tuple(next(c for c in range(3) if np.array_equal(x[:, k], source[:, c])) for k in range(3))
        orders.add(order)
    assert len(orders) == 6


def test_blur_keeps_the_mean_and_lessens_the_variance_with_the_cluster():
    images = colours()
    found = [(x.mean() - images.train_x[rows].mean(), x.std()) for _, rows, x, _ in seen(images, clients=[1] * 4, shift="blur")]
    assert all(abs(moved) < 3 for moved, _ in found)
    deviations = [deviation for _, deviation in found]
    assert deviations == sorted(deviations, reverse=True)
    assert deviations[3] < deviations[0] / 2


def test_noise_has_its_deviation_and_is_the_same_at_every_look_and_other_in_the_test_set():
    grey = np.full((250, 3, 8, 8), 128, np.uint8)
    images = Images(grey[:200], np.zeros(200, np.uint8), grey[200:], np.zeros(50, np.uint8), 2, 0.0, 1.0, None, "grey")
    first = [x for *_, x, _ in seen(images, clients=[1] * 3, shift="noise")]
    again = [x for *_, x, _ in seen(images, clients=[1] * 3, shift="noise")]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert (first[0] == 128).all()
    # 7,680 values: the deviation's standard error is 0.8 %, and clipping takes 0.6 % of what reaches beyond 2.5 deviations.
    assert first[1].std() == pytest.approx(25.5, rel=0.05)
    assert first[2].std() == pytest.approx(51, rel=0.06)
    assert len(np.unique(first[1].reshape(40, -1), axis=0)) == 40
    tests = [x for *_, x, _ in seen(images, "test", clients=[1] * 3, shift="noise")]
    assert not {image.tobytes() for image in tests[1]} & {image.tobytes() for image in first[1]}


def test_a_shift_that_grows_with_the_cluster_ends_where_its_grades_end():
    """Clusters beyond differ by another shift, such as label-flip."""
    blurred = [shifts.feature_shift(["label-flip", "blur"], k, 0).blur for k in range(1, 10)]
    assert blurred == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0]
    noisy = [shifts.feature_shift(["label-flip", "noise"], k, 0).noise for k in (1, 10, 11, 40)]
    assert noisy == pytest.approx([0.1, 1.0, 1.0, 1.0])


def test_permuted_labels_differ_between_clusters_and_clients_of_one_share_them():
    images = colours()
    orders = []
    for piece, rows, _, y in seen(images, clients=[2, 2, 2], shift="label-permutation"):
        assert np.array_equal(y, np.array(piece.label_order)[images.train_y[rows]])
        orders.append(piece.label_order)
    assert orders[0] == orders[1] == tuple(range(10))
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(shifts.label_orders(24, 4, seed=0))) == 24  # every one of them before one comes again


def test_shifts_of_a_list_act_together():
    images = colours()
    for piece, rows, x, y in seen(images, clients=[1] * 4, shift=["rotation", "label-flip", "inversion"]):
        k = piece.cluster
        turned = np.rot90(images.train_x[rows], k, axes=(2, 3))
        assert np.array_equal(x, 255 - turned if k % 2 else turned)
        assert np.array_equal(y, (images.train_y[rows] + k) % 10)


@pytest.mark.parametrize(
    ("names", "most"),
    [
        (["rotation"], 4), (["inversion"], 2), (["rotation", "inversion"], 4), (["rotation", "channels"], 12),
        (["rotation", "label-flip"], 20), (["label-permutation", "inversion"], None), (["noise"], 11), ([], None),
        (["rotation", "blur"], 10), (["blur", "noise"], 11), (["channels", "inversion", "noise"], 16),
    ],
)  # fmt: skip
def test_so_many_clusters_can_differ(names, most):
    assert shifts.most_clusters(names, classes=10) == most
    if most is not None:
        made = {
            (k % 4 if "rotation" in names else 0, k % 10 if "label-flip" in names else 0, shifts.feature_shift(names, k, 0))
            for k in range(most + 1)
        }
        assert len(made) == most  # one cluster more is the same as an earlier one


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shift": ["rotation", "none"]}, "a list must name different shifts of rotation, label-flip"),
        ({"shift": ["blur", "blur"]}, "a list must name different shifts"),
        ({"shift": []}, "a list must name different shifts"),
        ({"shift": "inversion", "clients": [1] * 3}, "at most 2 different clusters"),
        ({"shift": ["rotation", "inversion"], "clients": [1] * 5}, "at most 4 different clusters"),
        ({"shift": ["blur"], "partition": "dirichlet", "alpha": 1.0}, "true clusters"),
    ],
)
def test_impossible_shifts_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        DataSettings.model_validate(changes)


def test_the_classes_of_the_records_limit_the_clusters_of_label_flip():
    many = DataSettings(dataset="emnist-balanced", clients=[1] * 12, shift="label-flip")
    assert shift_problems(many, colours(classes=47)) == []
    (problem,) = shift_problems(many, colours())
    assert "12 clusters of 10 classes cannot all differ" in problem


def test_shifts_that_the_records_do_not_allow_are_named():
    two = DataSettings(dataset="digits", clients=[1, 1], shift="channels")
    assert "needs images of 3 channels, records are (1, 8, 8)" in shift_problems(two, load("digits"))[0]
    flat = Images(np.zeros((9, 4), np.float32), np.zeros(9, np.uint8), np.zeros((9, 4), np.float32), np.zeros(9, np.uint8),
                  2, 0.0, 1.0, None, "flat")  # fmt: skip
    for name in ("inversion", "blur", "noise"):
        (problem,) = shift_problems(DataSettings(clients=[1, 1], shift=name), flat)
        assert problem == f"data.shift is {name!r}: needs images, records are (4,)"
    (problem,) = shift_problems(DataSettings(clients=[1] * 3, shift="label-permutation"), flat)
    assert "3 clusters of 2 classes cannot all differ" in problem
    with pytest.raises(ConfigError, match=r"data\.shift is 'rotate': must be 'rotation'") as caught:
        config.resolve({"name": "x", "data": {"shift": "rotate"}})
    (problem,) = [text for text in caught.value.problems if "shift" in text]
    assert problem.endswith("'line' or 'none', or a list of these")


# Mixtures


@pytest.fixture
def two_sets(monkeypatch):
    """Two small data sets under names of public ones."""
    first, second = colours(), Images(*(np.zeros_like(a) for a in (colours().train_x, colours().train_y)),
                                      colours().test_x, colours().test_y, 10, 0.0, 1.0, None, "black")  # fmt: skip
    known = {"mnist": first, "fashion-mnist": second, "cifar10": Images(*[first.train_x] * 4, 9, 0.0, 1.0, None, "nine")}
    monkeypatch.setattr(datasets, "load", lambda name, root=None: known[name])
    return first, second


def test_each_cluster_of_a_mixture_has_its_own_data_set(two_sets):
    asked = DataSettings(dataset="mnist+fashion-mnist", clients=[2, 3], shift="none", train_per_client=40, test_per_client=10)
    images = open_set(asked)
    pieces = plan_slices(asked, images, 1)
    assert [piece.cluster for piece in pieces] == [piece.source for piece in pieces] == [0, 0, 1, 1, 1]
    for piece in pieces:
        data, _ = open_rows(images, [piece])
        x, y = data.batch(np.arange(40), 40)
        assert np.array_equal(np.rint(x.numpy() * 255), two_sets[piece.source].train_x[piece.train_rows])
        assert np.array_equal(y, two_sets[piece.source].train_y[piece.train_rows])
    with pytest.raises(ValueError, match="one transformation"):
        open_rows(images, [pieces[0], pieces[2]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients": [2]}, "has 2 data sets, one for each true cluster; clients has 1"),
        ({"dataset": "mnist+mnist"}, "names a data set twice"),
        ({"dataset": "mnist+regression"}, "'regression' cannot be joined"),
        ({"dataset": "mnist+own:load"}, "'own:load' cannot be joined"),
        ({"partition": "dirichlet", "alpha": 1.0}, "must be 'equal' with several data sets"),
    ],
)
def test_impossible_mixtures_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        DataSettings.model_validate({"dataset": "mnist+fashion-mnist", "clients": [2, 2], "shift": "none", **changes})


def test_data_sets_that_differ_are_not_mixed(two_sets):
    asked = DataSettings(dataset="mnist+cifar10", clients=[1, 1], shift="none")
    with pytest.raises(ConfigError, match=r"all must be alike, but mnist has .* 10 classes.* and cifar10 has .* 9 classes"):
        open_set(asked)


def test_an_unknown_part_of_a_mixture_is_named():
    with pytest.raises(ConfigError, match=r"data\.dataset is 'mnits': must be one of"):
        config.resolve({
            "name": "x", "data": {"dataset": "digits+mnits", "clients": [1, 1], "shift": "none"}, "rounds": 2,
            "privacy": {"epsilon": 1, "delta": 1e-4}, "algorithm": {"name": "global"},
        })  # fmt: skip
