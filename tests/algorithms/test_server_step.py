"""Client-level rounds: what a model moves by, from given noisy sums, for each way of dividing them; what the steps before compute."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.clustering.rebalance import rebalance
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.transport.keys import make_keys

N, Q, LR = 12, 0.5, 0.25  # of q n = 6 clients in a sample
SAMPLED = {"sampling_rate": Q, "server_lr": LR}
RR = {**SAMPLED, "clusters": 3, "min_cluster_size": 2}
SELDOM = {**RR, "labels": "randomised-response", "labels_every": 2, "labels_epsilon": 1.0}
TRUSTED = {"epsilon": 20, "delta": 1e-2, "unit": "client", "trust": "trusted-server", "accountant": "rdp"}


@pytest.fixture(scope="module")
def protocols(tmp_path_factory):
    """A signed protocol of either adjacency, whose options the tests replace."""
    found = {}
    for adjacency in ("zero-out", "replace-one"):
        folder = tmp_path_factory.mktemp(adjacency)
        make_keys(folder, N)
        document = {
            **SMALL, "data": {"dataset": "digits", "clients": [8, 4], "train_per_client": 20, "test_per_client": 10}, "rounds": 6,
            "local": {"batch_size": 20, "lr": 0.1}, "algorithm": {"name": "dp-fedavg", **SAMPLED},
            "privacy": {**SMALL["privacy"], **TRUSTED, "adjacency": adjacency},
        }  # fmt: skip
        found[adjacency] = make_job(config.resolve(document), folder).protocol
    return found


class Publishing:
    """A federation whose trusted server publishes given tensors by the name of the central step; None: a crash lost them."""

    def __init__(self, protocol, **published):
        self.clients, self.published, self.steps = protocol.clients, published, []

    def initial_model(self, number=0):
        return np.zeros(self.p, np.float32)

    def release(self, method, **tensors):
        self.steps.append((method.__name__, tensors))
        return self.published[method.__name__]


def played(protocol, name, options, t=1, state=None, **published):
    """The algorithm's state after round t, and the federation."""
    changed = protocol.model_copy(update={"algorithm": name, "options": options})
    algorithm, fed = algorithm_of(changed), Publishing(changed, **published)
    fed.p = protocol.model.parameters
    return algorithm.round(algorithm.start(fed) if state is None else state, t, fed), fed


def rows(protocol, *values):
    """Noisy sums, one value for each model."""
    return np.repeat(np.array(values, np.float32)[:, None], protocol.model.parameters, axis=1)


def moves(state):
    assert (state.models == state.models[:, :1]).all()
    return state.models[:, 0].tolist()


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-fedprox"])
def test_a_sum_over_all_clients_is_divided_by_their_expected_number(protocols, name):
    protocol = protocols["zero-out"]
    state, _ = played(protocol, name, SAMPLED, noisy_sum={"sum": rows(protocol, 12.0)[0]})
    assert moves(state) == [LR * 12 / 6]
    state, _ = played(protocol, name, SAMPLED, noisy_sum=None)
    assert moves(state) == [0.0]


@pytest.mark.parametrize(("base", "shared"), [("ifca", []), ("fedcam", [9.0])])
def test_sums_after_labels_are_divided_by_the_published_sizes_and_those_of_all_by_q_n(protocols, base, shared):
    protocol = protocols["replace-one"]
    released = {"slots": np.array([0, 0, 0, 0, 2, 2]), "sums": rows(protocol, *shared, 8.0, 5.0, 6.0)}
    state, _ = played(protocol, "rr-cluster", {**RR, "base": base}, labels_then_sums=released)
    assert moves(state) == [*(LR * value / 6 for value in shared), LR * 8 / 4, 0.0, LR * 6 / 2]  # an empty cluster stays
    assert state.diagnostics["sizes"] == [4.0, 0.0, 2.0]


class Curator:
    """Argument of a central step: raw answers with labels as written here, noise that is only asked for."""

    def __init__(self, labels, p):
        self.labels, self.p, self.asked, self.unprotected = dict(enumerate(labels)), p, [], []

    def sample(self, slot):
        return [*self.labels]

    def call(self, method, each):
        update = np.full(self.p, 0.25 / self.p**0.5, np.float32)
        return {client: {"label": np.int64(self.labels[client]), "update": update} for client in each}

    def noisy_labels(self, slot, part, labels, blocks, length, sensitivity):
        self.asked.append((part, length, sensitivity))
        return length * np.eye(blocks)[labels]

    def rng(self, slot, purpose):
        return np.random.default_rng(0)

    def noisy_total(self, slot, part, sums):
        self.asked.append((part, sums.clip))
        return sums.split(sums.total)

    def without_guarantee(self, slot):
        self.unprotected.append(slot)

    def show_observer(self, **facts):
        self.facts = facts


@pytest.mark.parametrize(("step", "covers", "sizes", "unprotected"), [
    ("labels_then_sums", 2**0.5, [2, 2, 1], []), ("as_published", 1.0, [1, 2, 2], ["claim"]),
])  # fmt: skip
def test_rebalancing_and_label_noise_as_published_are_those_of_algorithm_2(protocols, step, covers, sizes, unprotected):
    """With B = 2 no cluster has a surplus; as printed a cluster of two gives one away, and a label's noise covers C_s only."""
    protocol = protocols["replace-one"]
    algorithm = algorithm_of(protocol.model_copy(update={"algorithm": "rr-cluster", "options": {**RR, "label_clip": 0.3}}))
    me = Curator([0, 0, 1, 1, 2], protocol.model.parameters)
    released = getattr(algorithm, step)(me, np.zeros((3, protocol.model.parameters), np.float32)).tensors
    assert sorted(np.bincount(released["slots"], minlength=3)[:2]) == sizes[:2]
    assert np.bincount(released["slots"], minlength=3)[2] == sizes[2]
    norms = np.linalg.norm(released["sums"], axis=1)
    np.testing.assert_allclose(norms, 0.25 * np.bincount(released["slots"], minlength=3), rtol=1e-5)  # a moved client's too
    assert me.asked == [("labels", 0.3, pytest.approx(covers * 0.3)), ("sums", protocol.local.clip)]
    assert me.unprotected == unprotected


def test_fesem_compares_models_with_the_one_that_the_client_trained_last_and_trains_the_nearest(protocols):
    protocol = protocols["zero-out"]
    options = {**RR, "guarantee": "expected", "base": "fesem"}
    algorithm = algorithm_of(protocol.model_copy(update={"algorithm": "rr-cluster", "options": options}))
    me = SimpleNamespace(
        state={}, initial_model=lambda: rows(protocol, 0.0)[0], sgd=lambda slot, model: (model + 6) / 2,  # half the way to 6
        distances=lambda slot, own, models: ((own - models) ** 2).sum(axis=1),
    )  # fmt: skip
    # First it trains from theta_init, to 3, and is nearest to 2.5, not to 1; then it has 4.25.
    for models, label, moved in (((2.5, 1.0, 9.0), 0, 1.75), ((5.0, 1.0, 4.0), 2, 1.0)):
        release = algorithm.assign_and_train(me, rows(protocol, *models)).tensors
        assert (int(release["label"]), {*release["update"].tolist()}) == (label, {moved})
    assert (me.state["model"] == 5).all()


def test_a_client_of_fedper_trains_the_server_s_body_with_its_own_head(protocols):
    protocol = protocols["zero-out"]
    algorithm = algorithm_of(protocol.model_copy(update={"algorithm": "dp-fedper", "options": SAMPLED}))
    body = algorithm.update_size(protocol.model)
    me = SimpleNamespace(state={}, sgd=lambda slot, model: model + 1)
    for server, head in ((0.0, 1), (5.0, 2)):  # the head starts as the server's, and continues as the client's
        update = algorithm.train(me, rows(protocol, server)[0]).tensors["update"]
        assert update.tolist() == [1.0] * body
        assert (me.state["model"][:body] == server + 1).all()
        assert (me.state["model"][body:] == head).all()


def test_the_proximal_term_pulls_towards_the_model_that_the_client_received(protocols):
    protocol, pulls = protocols["zero-out"], []
    model = np.arange(protocol.model.parameters, dtype=np.float32)
    for name, options in (("dp-fedavg", SAMPLED), ("dp-fedprox", {**SAMPLED, "mu": 0.7})):
        algorithm = algorithm_of(protocol.model_copy(update={"algorithm": name, "options": options}))
        me = SimpleNamespace(sgd=lambda slot, model, **how: pulls.append(how.get("proximal")) or model + 1)
        assert (algorithm.train(me, model).tensors["update"] == 1).all()
    assert pulls[0] is None
    assert (pulls[1][0], pulls[1][1].tolist()) == (0.7, model.tolist())


@pytest.mark.parametrize(("base", "shared"), [("ifca", []), ("fedcam", [9.0])])
def test_sums_of_blocks_are_divided_by_their_noisy_counts_and_small_ones_are_filled_up(protocols, base, shared):
    protocol = protocols["zero-out"]
    released = {"counts": np.array([4.0, -1.0, 1.0], np.float32), "sums": rows(protocol, *shared, 8.0, 5.0, 6.0)}
    state, _ = played(protocol, "rr-cluster", {**RR, "guarantee": "expected", "base": base}, blocks=released)
    common = 8 / 4  # only the first cluster has a surplus above B = 2
    filled = [8 / 4, (5 + 2 * common) / 2, (6 + common) / 2]
    assert moves(state) == pytest.approx([LR * value for value in [*(value / 6 for value in shared), *filled]])


@pytest.mark.parametrize(("base", "shared"), [("ifca", []), ("fedcam", [9.0])])
def test_sums_of_public_clusters_are_divided_by_their_expected_size_in_the_sample(protocols, base, shared):
    protocol, labels = protocols["replace-one"], np.array([0] * 8 + [2] * 4)
    state, fed = played(
        protocol, "rr-cluster", {**SELDOM, "base": base}, all_labels={"labels": labels},
        placed={"sums": rows(protocol, *shared, 8.0, 5.0, 6.0)},
    )  # fmt: skip
    assert moves(state) == [*(LR * value / 6 for value in shared), LR * 8 / 4, 0.0, LR * 6 / 2]  # q times 8, 0 and 4 clients
    assert state.diagnostics["sizes"] == [4.0, 0.0, 2.0]
    assert fed.steps[1][1]["labels"].tolist() == labels.tolist()


def test_public_labels_stay_until_their_next_release_and_through_a_crash(protocols):
    protocol, sums = protocols["replace-one"], rows(protocols["replace-one"], 1.0, 1.0, 1.0)
    first, second = np.array([0, 1, 2] * 4), np.array([1, 2, 0] * 4)
    state, fed = played(protocol, "rr-cluster", SELDOM, all_labels=None, placed={"sums": sums})
    assert [step for step, _ in fed.steps] == ["all_labels"]  # without any labels there is no round
    assert moves(state) == [0.0] * 3
    state, used = None, []
    for t, named in enumerate((first, None, None, None, second, None), start=1):
        released = None if named is None else {"labels": named}
        state, fed = played(protocol, "rr-cluster", SELDOM, t, state, all_labels=released, placed={"sums": sums})
        used.append(([step for step, _ in fed.steps], fed.steps[-1][1]["labels"].tolist()))
    both, one = ["all_labels", "placed"], ["placed"]
    assert used == [(both, [*first]), (one, [*first]), (both, [*first]), (one, [*first]), (both, [*second]), (one, [*second])]


@pytest.mark.parametrize(
    ("rate", "clusters", "least", "members"),
    [(0.5, 3, 2, 4), (0.75, 4, 2, 3), (0.5, 3, 0, 0), (0.25, 1, 3, 12), (0.75, 7, 1, 1)],
)
def test_public_clusters_have_b_clients_in_a_sample_on_average_or_equal_shares(protocols, rate, clusters, least, members):
    """B = 1 of 9 sampled in each of 7 clusters needs 1.33 of the 12 clients, so 2; the last cluster would be left with none."""
    options = {**SELDOM, "sampling_rate": rate, "clusters": clusters, "min_cluster_size": least}
    if clusters == 1:
        options |= {"labels": "exponential"}
    algorithm = algorithm_of(protocols["replace-one"].model_copy(update={"algorithm": "rr-cluster", "options": options}))
    assert algorithm.least_members == members
    placed = rebalance(np.zeros(N, np.int64), clusters, algorithm.least_members, np.random.default_rng(0))
    assert np.bincount(placed, minlength=clusters).min() >= members


@pytest.mark.parametrize(("rounds", "every", "guarantee", "releases"), [
    (6, 2, "labels-first", 3), (5, 2, "labels-first", 3), (6, 6, "labels-first", 1), (6, 2, "expected", 2), (5, 2, "expected", 2), (6, 5, "expected", 1),
])  # fmt: skip
def test_as_many_labels_are_planned_as_rounds_release_them(protocols, rounds, every, guarantee, releases):
    protocol = protocols["zero-out" if guarantee == "expected" else "replace-one"]
    options = {**SELDOM, "labels_every": every, "guarantee": guarantee}
    changed = protocol.model_copy(update={"algorithm": "rr-cluster", "options": options, "rounds": rounds})
    algorithm, fed = algorithm_of(changed), Publishing(changed)
    fed.p = protocol.model.parameters
    published = rows(protocol, 1.0, 1.0, 1.0)
    fed.published = {
        "all_labels": {"labels": np.array([0, 1, 2] * 4)}, "placed": {"sums": published},
        "blocks": {"sums": published, "counts": np.ones(3, np.float32)},
    }  # fmt: skip
    state = algorithm.start(fed)
    for t in range(1, rounds + 1):
        state = algorithm.round(state, t, fed)
    made = [step for step, _ in fed.steps].count("all_labels")
    assert made == releases == [slot.name for slot in algorithm.central_plan()].count("labels")
    assert [slot.name for slot in algorithm.plan(changed.roster[0])].count("label") == releases
