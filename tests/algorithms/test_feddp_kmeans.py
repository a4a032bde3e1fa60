"""FedDP-KMeans: clusters of clients from noisy sums over records, the sensitivity of these sums, and their price."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL
from simulate import simulate

from dpcfl_net.algorithms import feddp_kmeans
from dpcfl_net.algorithms.feddp_kmeans import POINTS, STEPS
from dpcfl_net.clustering.metrics import adjusted_rand_index
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.types import State
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import client_slice
from dpcfl_net.federation import client as client_module
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.gate import Charge
from dpcfl_net.federation.release_check import check_release
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot
from dpcfl_net.transport.keys import make_keys

DATA = {"dataset": "digits", "clients": [2, 2, 2, 2], "shift": "rotation", "train_per_client": 300, "test_per_client": 40}
PRIVACY = {**SMALL["privacy"], "epsilon": 5, "accountant": "rdp"}  # calibrates faster
BASE = {
    **SMALL, "data": DATA, "model": {"name": "linear"}, "local": {"batch_size": 50, "lr": 0.5}, "rounds": 5,
    "privacy": PRIVACY, "algorithm": {"name": "feddp-kmeans", "clusters": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 8)
    return make_job(config.resolve(BASE), folder), folder


def test_clusters_of_rotations_are_found_under_noise_and_then_trained(job, tmp_path):
    made, keys = job
    states = {}
    simulate(made, tmp_path, key_folder=keys, on_round=lambda t, state: states.update({t: state}))
    true = made.experiment.true_clusters
    assert [len(states[t].models) for t in range(1, 6)] == [1, 1, 1, 4, 4]
    assert len({model.tobytes() for model in states[4].models}) == 1
    assert states[5].assignment == states[4].assignment
    assert adjusted_rand_index(true, states[5].assignment) > 0.5
    assert len({model.tobytes() for model in states[5].models}) == len(set(states[5].assignment))


def test_the_plan_holds_four_sums_and_costs_the_promise(job):
    made, _ = job
    entry = made.protocol.roster[0]
    plan = made.algorithm.plan(entry)
    assert [slot for slot in plan if isinstance(slot, GaussianSlot)] == [GaussianSlot(name, 4.0) for name in STEPS]
    assert sum(isinstance(slot, DPSGDSlot) for slot in plan) == 1
    events = [slot.event(entry.noise_multiplier) for slot in plan]
    assert epsilon(events, made.protocol.privacy.delta, accountant="rdp") == pytest.approx(5, rel=5e-3)


class Records:
    """Stands for the client's argument: applies a step's statistic to given records, and keeps the bound and the rows."""

    def __init__(self, x):
        self.x, self.calls = x, []

    def noisy_sum(self, slot, statistics, bound):
        rows = statistics(self.x)
        self.calls.append((slot, bound, rows))
        return rows.sum(axis=0).astype(np.float32)


def asked(job, x):
    """What each step of the algorithm asks of the mechanism, for records of any norm."""
    rng, algorithm = np.random.default_rng(0), job.algorithm
    axes = np.linalg.qr(rng.normal(size=(64, 10)))[0].T
    me, centres = Records(x), rng.normal(size=(10, 64))
    algorithm.moments(me)
    algorithm.weights(me, axes, rng.normal(size=(POINTS, 10)))
    algorithm.centres(me, centres, axes)
    algorithm.lloyd(me, centres)
    return me.calls


def test_no_record_moves_a_sum_by_more_than_its_bound(job):
    x = np.random.default_rng(1).normal(size=(50, 64)) * np.geomspace(1e-3, 1e6, 50)[:, None]
    x[0] = 0
    calls = asked(job[0], x)
    assert [(slot, bound) for slot, bound, _ in calls] == [
        ("moments", 1.0), ("weights", 1.0), ("centres", math.sqrt(2)), ("lloyd", math.sqrt(2)),
    ]  # fmt: skip
    for _, bound, rows in calls:
        assert np.linalg.norm(rows, axis=1).max() <= bound + 1e-9
        alone = asked(job[0], x[7:8])
        assert any(np.allclose(rows[7], other[0], atol=1e-9) for _, _, other in alone if other.shape[1:] == rows.shape[1:])


def test_the_moment_is_the_matrix_of_records(job):
    x = np.random.default_rng(2).normal(size=(20, 64))
    _, _, rows = asked(job[0], x)[0]
    scaled = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert feddp_kmeans.symmetric(rows.sum(axis=0), 64) == pytest.approx(scaled.T @ scaled)


def test_the_mechanism_clips_each_record_and_adds_the_noise_of_the_slot(job, monkeypatch):
    """Of 300 records two have a row of norm 5, which counts as 2; noise is scaled to the bound, and its cost recorded.

    Each record is seen alone, so that no statistic of one record can depend on another. One of them raises an error, and others have a
    row of another shape, of complex numbers or without a finite norm: they are left out, since the client would stop, or its sum be
    longer or NaN, only if it has them.
    """
    made, _ = job
    slot, z = GaussianSlot("moments", 4.0), 1.5
    charge = Charge(b"sixteen bytes ok", {"moments": slot}, z, "zero-out")
    data = open_client(*client_slice(made, 0, None))
    me = client_module.Client(made.protocol, {}, None, data, lambda: None, charge)
    seen, sizes = [], []

    def statistics(x):
        rows = np.zeros((len(x), 2))
        rows[:1, 0] = 5.0 * (len(sizes) % 128 == 0)
        sizes.append(x.shape)
        if len(sizes) == 10:
            raise IndexError("a rare code")
        if len(sizes) == 30:
            return rows.astype(complex)
        rows[:1, 1] = {40: math.nan, 50: math.inf, 60: -math.inf, 70: 1e200}.get(len(sizes), 0.0)
        return np.ones((1, 1)) if len(sizes) == 20 else rows

    monkeypatch.setattr(client_module, "gaussian_on_grid", lambda total, deviation, noise: seen.append(deviation) or total)
    with np.errstate(all="ignore"):  # as in a client
        assert me.noisy_sum("moments", statistics, 2.0).tolist() == [4.0, 0.0]
    assert sizes == [(1, 64)] * 301  # the first is an empty record
    assert seen == [4.0 * z * 2.0]
    assert me.ran == [slot.event(z, "zero-out")]


def test_a_statistic_of_labels_counts_the_classes_of_a_client(job, monkeypatch):
    """One record is in one class: the counts have norm 1 in it. Labels come with their record, one at a time."""
    made, _ = job
    data = open_client(*client_slice(made, 0, None))
    charge = Charge(b"sixteen bytes ok", {"moments": GaussianSlot("moments")}, 1.5, "zero-out")
    me, deviations, shapes = client_module.Client(made.protocol, {}, None, data, lambda: None, charge), [], set()

    def one_hot(x, y):
        shapes.add((x.shape, y.shape, y.dtype.str))
        return np.eye(10)[y]

    monkeypatch.setattr(
        client_module, "gaussian_on_grid", lambda total, deviation, noise: deviations.append(deviation) or total
    )
    _, y = data.batch(np.arange(len(data)), len(data))
    assert me.noisy_sum("moments", one_hot, 1.0, labels=True).tolist() == np.bincount(y.numpy(), minlength=10).tolist()
    assert (shapes, deviations) == ({((1, 64), (1,), "<i8")}, [1.5])


@pytest.mark.parametrize(
    ("step", "name", "size", "bound"),
    [
        ("moments", "moment", 64 * 65 // 2, 1.0),
        ("weights", "weight", POINTS, 1.0),
        ("centres", "tally", 10 * 65, math.sqrt(2)),
        ("lloyd", "tally", 10 * 65, math.sqrt(2)),
    ],
)
def test_the_server_accepts_the_longest_honest_sums_and_refuses_longer_ones(job, step, name, size, bound):
    """All records of a client add the same row; a false alarm has a probability below exp(-72) for each sum."""
    algorithm, rng = job[0].algorithm, np.random.default_rng(5)
    client = algorithm.protocol.client(3)
    deviation = 4.0 * client.noise_multiplier * bound
    row = bound * np.eye(1, size)[0]
    for _ in range(200):
        noisy = client.records * row + deviation * rng.normal(size=size)
        check_release(algorithm, client_steps(algorithm)[step], 3, {name: noisy.astype(np.float32)})
    longest = client_steps(algorithm)[step].gives[name].max_norm(algorithm, client) * np.eye(1, size)[0]
    check_release(algorithm, client_steps(algorithm)[step], 3, {name: ((1 - 1e-6) * longest).astype(np.float32)})
    with pytest.raises(Refused, match="is over the bound"):
        check_release(algorithm, client_steps(algorithm)[step], 3, {name: ((1 + 1e-6) * longest).astype(np.float32)})
    for longer in (1.05, 1e6):
        noise = deviation * (math.sqrt(size) + 12)
        hostile = longer * (client.records * bound + noise) / bound * row
        with pytest.raises(Refused, match=f"norm: {name} norm .* is over the bound"):
            check_release(algorithm, client_steps(algorithm)[step], 3, {name: hostile.astype(np.float32)})


def test_a_client_without_counts_is_in_the_largest_cluster(job):
    fed = SimpleNamespace(clients=range(8), seed=lambda purpose: 1)
    shares = [np.array([9.0, 1.0]), np.array([1.0, 9.0]), np.array([0.0, 10.0]), np.array([1.0, 8.0])]
    algorithm = made_with(job[0], clusters=2)
    found = algorithm.assigned({i: 30 * own for i, own in zip((0, 3, 5, 6), shares, strict=True)}, fed)
    assert found[3] == found[5] == found[6] != found[0]
    assert [found[i] for i in (1, 2, 4, 7)] == [found[3]] * 4


def test_with_fewer_answers_than_clusters_each_client_is_alone(job):
    fed = SimpleNamespace(clients=range(8), seed=lambda purpose: 1)
    found = made_with(job[0], clusters=4).assigned({2: np.array([30.0, 0.0]), 5: np.array([0.0, 30.0])}, fed)
    assert found[2] != found[5]
    assert set(found) == {0, 1}


@pytest.mark.parametrize("clear", [0, 9, 10])
def test_there_are_k_centres_whatever_the_noise_hides(job, clear):
    """Points whose weights noise explains are dropped; where fewer than k = 10 are left, the k heaviest points are taken."""
    algorithm = job[0].algorithm
    deviation = 4.0 * math.hypot(*(entry.noise_multiplier for entry in job[0].protocol.roster))
    points = np.random.default_rng(3).normal(size=(POINTS, 10)).astype(np.float32)
    weights = np.linspace(0, 1.9, POINTS) * deviation
    weights[:clear] = np.linspace(2.1, 3, clear) * deviation
    answers = SimpleNamespace(column=lambda name: {i: (weights / 8).astype(np.float32) for i in range(8)})
    fed = SimpleNamespace(call=lambda step, common: answers, seed=lambda purpose: 1)
    state = State(np.zeros((1, 650), np.float32), [0] * 8, {"axes": np.eye(10, 64, dtype=np.float32), "points": points})
    centres = algorithm.round(state, 2, fed).memory["centres"][:, :10]
    heaviest = points[np.argsort(weights)[-10:]]
    np.testing.assert_allclose(np.sort(centres, axis=0), np.sort(heaviest, axis=0), atol=1e-5)


def test_points_lie_where_records_of_norm_1_do(job):
    sides = np.triu_indices(64)
    upper = np.where(np.equal(*sides), 1.0, 0.0) * job[0].protocol.roster[0].records  # each record as long in all 64 directions
    answers = SimpleNamespace(column=lambda name: {0: upper.astype(np.float32)})
    fed = SimpleNamespace(call=lambda step, common: answers, rng=lambda purpose: np.random.default_rng(4))
    points = job[0].algorithm.round(State(np.zeros((1, 650), np.float32), [0] * 8), 1, fed).memory["points"]
    norms = np.linalg.norm(points, axis=1)
    assert norms.max() <= 1 + 1e-6
    assert (norms > 1 - 1e-6).mean() > 0.9


def test_points_have_the_second_moment_of_the_clients_that_answered(job):
    """Half of the clients send half of the sum, over half of the records."""
    algorithm = job[0].algorithm
    variances = np.diag(np.geomspace(0.02, 1e-4, 64))
    upper = variances[np.triu_indices(64)] * np.where(np.equal(*np.triu_indices(64)), 1, math.sqrt(2))
    sent = {entry.id: (entry.records * upper).astype(np.float32) for entry in job[0].protocol.roster}

    def points(*clients):
        answers = SimpleNamespace(column=lambda name: {i: sent[i] for i in clients})
        fed = SimpleNamespace(call=lambda step, common: answers, rng=lambda purpose: np.random.default_rng(4))
        return algorithm.round(State(np.zeros((1, 650), np.float32), [0] * 8), 1, fed).memory["points"]

    assert points(*range(4)) == pytest.approx(points(*range(8)))
    assert (points(*range(8)) ** 2).mean(axis=0) == pytest.approx(np.diag(variances)[:10], rel=0.5)


@pytest.mark.parametrize("t", [3, 4])
def test_a_centre_moves_only_if_its_count_exceeds_two_deviations_of_its_noise(job, t):
    """A record adds itself and a 1, so that counts of centres have sqrt(2) times the noise of counts alone."""
    algorithm = job[0].algorithm
    deviation = 4.0 * math.sqrt(2) * math.hypot(*(entry.noise_multiplier for entry in job[0].protocol.roster))
    tallies = {i: np.zeros((10, 65), np.float32) for i in range(8)}
    tallies[0][:, :-1] = 1.0
    for i, tally in tallies.items():
        tally[2 + i, -1] = 1.9 * deviation
    tallies[0][1, -1] = 2.1 * deviation
    tensors = {i: tally.reshape(-1) for i, tally in tallies.items()}
    fed = SimpleNamespace(
        clients=range(8), seed=lambda purpose: 1, call=lambda step, common: SimpleNamespace(column=lambda name: tensors)
    )
    before = np.random.default_rng(3).normal(size=(10, 64)).astype(np.float32)
    state = State(np.zeros((1, 650), np.float32), [0] * 8, {"centres": before, "axes": np.eye(10, 64, dtype=np.float32)})
    after = algorithm.round(state, t, fed).memory["centres"]
    assert np.flatnonzero((after != before).any(axis=1)).tolist() == [1]
    assert after[1] == pytest.approx(np.full(64, 1 / (2.1 * deviation)))


def made_with(job, **options):
    protocol = job.protocol.model_copy(update={"options": {**job.protocol.options, **options}})
    return feddp_kmeans.FedDPKMeans(protocol)


def test_records_of_too_many_values_are_refused(job):
    wide = job[0].protocol.model.model_copy(update={"input_shape": (3, 32, 32)})
    with pytest.raises(ConfigError, match="a record has 3072 values: must be at most 1024"):
        feddp_kmeans.FedDPKMeans(job[0].protocol.model_copy(update={"model": wide}))


def test_bad_settings_are_refused():
    for changes, words in (
        ({"rounds": 4}, r"rounds is 4: must be at least 5, the first 4 are of k-means"),
        (
            {"algorithm": {"name": "feddp-kmeans", "clusters": 9}},
            r"algorithm\.clusters is 9: must be at most the number of clients, 8",
        ),
        ({"algorithm": {"name": "feddp-kmeans", "clusters": 2, "centres": 1}}, r"algorithm\.centres"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.resolve({**BASE, **changes})
