"""EM-FDRO: the exponential mechanism over clients and its bounds, exactly; what each mode releases, charges and says of itself."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
import yaml
from conftest import ROOT, SMALL, charged_by_round, dpcfl, only_run, write_config
from hypothesis import given
from hypothesis import strategies as st
from run_results import job_of, last_state
from scipy import stats
from simulate import simulate

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config, job_files
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.base import Results
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.claim import plan_events, protected, verify_claim
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.engine import Engine
from dpcfl_net.federation.gate import Charge
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.client_selection import paper_events, selection_epsilon, unconditional_epsilon
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.loss_weighting import draw, near_mass, printed_bounds, probabilities, sharp_bounds, top_mass
from dpcfl_net.privacy.slots import GaussianSlot, UnprotectedSlot
from dpcfl_net.reproduce.base import Earlier, find, packaged
from dpcfl_net.reproduce.claims import Exact
from dpcfl_net.results.result import Result
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.transport.keys import make_keys

NEVER = 1e-7  # the chance of a false alarm that a statistical test may have
ROUNDS = 4
DATA = {
    "dataset": "digits", "clients": [4], "shift": "none", "partition": "dirichlet", "alpha": 0.5,
    "train_per_client": 200, "validation": 0.1, "test_per_client": 40,
}  # fmt: skip
PRIVACY = {"epsilon": 5, "delta": 1e-4}
SEEDED = {"noise": "seeded", "noise_seed": "5eed" * 16}
WHOLE_CLIENTS = {"unit": "client", "adjacency": "replace-one", "delta": 1e-2}


def document(algorithm, privacy=None, **changes):
    return {
        **SMALL, "data": DATA, "rounds": ROUNDS, "local": {"batch_size": 20, "lr": 0.5},
        "algorithm": {"name": "em-fdro", "clients_per_round": 2, **algorithm}, "privacy": {**PRIVACY, **(privacy or {})}, **changes,
    }  # fmt: skip


def job_for(folder, algorithm, privacy=None, **changes):
    make_keys(folder, 4)
    return make_job(config.resolve(document(algorithm, privacy, **changes)), folder)


# ---- the exponential mechanism over clients

weights = st.lists(st.fractions(min_value=Fraction(1, 1000), max_value=1), min_size=1, max_size=8).map(
    lambda w: [Fraction(1), *w]
)
thresholds = st.fractions(min_value=Fraction(1, 1000), max_value=1)


def test_probabilities_to_fifty_digits():
    losses, eps, tau = [2.3, 0.1, 2.25, 1.0], 4.0, 0.75
    with mpmath.workdps(50):
        each = [mpmath.exp(mpmath.mpf(eps) * loss / (2 * mpmath.mpf(tau))) for loss in losses]
        exact = [float(w / sum(each)) for w in each]
    np.testing.assert_allclose(probabilities(losses, eps, tau), exact, rtol=1e-14)
    np.testing.assert_allclose(probabilities([700.0, -700.0], 50.0, 1.0), [1.0, 0.0], atol=1e-300)
    assert top_mass(np.array([0.1, 0.5, 0.4]), 2) == pytest.approx(0.9)


@given(weights, thresholds)
def test_proposition_4_1_holds_and_better_bounds_do(w, least):
    """The printed lower bound never beats the share N / n of the clients; the printed upper one may exceed 1."""
    mass, (low, high), (lower, upper) = near_mass(w, least), printed_bounds(w, least), sharp_bounds(w, least)
    share = Fraction(sum(x >= least for x in w), len(w))
    assert low <= share <= lower <= mass <= upper <= min(high, Fraction(1))


def test_the_better_bounds_are_reached_and_the_printed_upper_one_can_be_empty():
    least = Fraction(1, 2)
    low = [Fraction(1), least, least, least - Fraction(1, 10**9), least - Fraction(1, 10**9)]
    assert 0 < near_mass(low, least) - sharp_bounds(low, least)[0] < Fraction(1, 10**8)
    high = [Fraction(1), Fraction(1), Fraction(1, 5), Fraction(1, 5)]
    assert near_mass(high, least) == sharp_bounds(high, least)[1]
    assert printed_bounds(high, least)[1] > 1


@given(weights.filter(lambda w: max(w[1:]) < 1), st.integers(min_value=1, max_value=5))
def test_corollary_4_2_from_uniform_to_the_worst_client(w, k):
    """At epsilon, 2 epsilon, ... the weights are powers of each other, so that monotony and limits are rational too."""

    def worst(power):
        return near_mass([x**power for x in w], Fraction(1))

    assert worst(0) == 1  # all losses are equal: uniform
    assert worst(k) < worst(k + 1) < 1
    gap = max(w[1:])
    far = (
        next(power for power in itertools.count(1) if gap**power * len(w) < Fraction(1, 10**6))
        if gap < Fraction(1, 2)
        else None
    )
    if far is not None:
        assert worst(far) > 1 - Fraction(1, 10**6)


@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_limits_of_the_tilt(tau):
    losses = [1.0, 1.5, 1.4, 0.2]
    np.testing.assert_allclose(probabilities(losses, 1e-12, tau), 0.25, rtol=1e-11)
    np.testing.assert_allclose(probabilities(losses, 1e4, tau), [0, 1, 0, 0], atol=1e-200)


@given(weights, st.data())
def test_lemma_4_5_needs_twice_its_gamma(w, data):
    """With factors between 1/g and g on the weights (g = e^gamma) a probability moves by at most g^2, and not by g alone."""
    g = data.draw(st.fractions(min_value=1, max_value=4))
    factors = [data.draw(st.fractions(min_value=1 / g, max_value=g)) for _ in w]
    moved = [x * f for x, f in zip(w, factors, strict=True)]
    for x, y in zip(w, moved, strict=True):
        assert 1 / g**2 <= (y / sum(moved)) / (x / sum(w)) <= g**2


def test_a_counterexample_to_lemma_4_5_as_printed():
    g = Fraction(2)  # losses off by gamma 2 tau / epsilon, up for one client and down for the others
    before, after = [Fraction(1), Fraction(10)], [Fraction(1) * g, Fraction(10) / g]
    ratio = (after[0] / sum(after)) / (before[0] / sum(before))
    assert ratio == Fraction(22, 7) > g
    assert ratio < g**2


def chance(order, p):
    """Of drawing `order`, one after the other, each among those that are left."""
    left, found = 1.0, 1.0
    for k in order:
        found *= p[k] / left
        left -= p[k]
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_draws_follow_the_exponential_mechanism_without_replacement(count):
    losses, eps, tau, trials = [1.0, 2.0, 0.3, 1.7], 3.0, 1.2, 6000
    rng = np.random.default_rng(5)
    seen = Counter(tuple(draw(losses, eps, tau, count, rng)) for _ in range(trials))
    orders = list(itertools.permutations(range(4), count))

    def rarity(p):
        return stats.chisquare([seen[order] for order in orders], [trials * chance(order, p) for order in orders]).pvalue

    assert rarity(probabilities(losses, eps, tau)) > NEVER
    assert rarity(probabilities(losses, 1.3 * eps, tau)) < NEVER  # it would be noticed


def test_draws_at_their_limits():
    rng = np.random.default_rng(0)
    assert sorted(draw([1.0, 5.0, 2.0], 2.0, 1.0, 3, rng)) == [0, 1, 2]
    assert all(draw([1.0, 5.0, 2.0], 1e6, 1.0, 2, rng) == [1, 2] for _ in range(20))
    with pytest.raises(ValueError, match="count must lie between 0 and 3"):
        draw([1.0, 5.0, 2.0], 2.0, 1.0, 4, rng)


# ---- what each mode pays for


def plan_of(job):
    entry = job.protocol.roster[0]
    return entry, job.algorithm.plan(entry)


def full_events(loss_noise, update_noise, steps, rate):
    """A client that is drawn in every round; the draws are post-processing of the noisy losses."""
    return [SampledGaussian(loss_noise, 1.0, ROUNDS + 1), SampledGaussian(update_noise, rate, ROUNDS * steps)]


def test_full_mode_charges_losses_and_dp_sgd_together(tmp_path):
    job = job_for(tmp_path, {})
    entry, plan = plan_of(job)
    z, privacy = entry.noise_multiplier, job.protocol.privacy
    events = full_events(10 * z, z, steps=9, rate=20 / 180)
    assert plan_events(plan, z, privacy.adjacency) == events
    assert 4.9 < epsilon(events, privacy.delta) <= privacy.epsilon
    assert job.protocol.unprotected == []


def test_a_loss_moves_no_further_when_a_record_is_exchanged_than_when_it_is_taken_out(tmp_path):
    entry, plan = plan_of(job_for(tmp_path, {}, {"adjacency": "replace-one"}))
    z = entry.noise_multiplier
    assert plan_events(plan, z, "replace-one") == full_events(2 * 10 * z, z, steps=9, rate=20 / 180)


def test_full_mode_for_whole_clients(tmp_path):
    """Noise of z tau on a loss from 0 to tau is 2 z times half its range, which replace-one doubles."""
    job = job_for(tmp_path, {}, WHOLE_CLIENTS)
    entry, plan = plan_of(job)
    z, privacy = entry.noise_multiplier, job.protocol.privacy
    events = plan_events(plan, z, privacy.adjacency)
    assert events == full_events(2 * 10 * z, z, steps=1, rate=1.0)
    # One Gaussian release of sensitivity 1 and deviation s costs mu = 1 / s: losses 1 / (10 z), updates 2 / z.
    mu = math.sqrt((ROUNDS + 1) / (10 * z) ** 2 + ROUNDS * (2 / z) ** 2)
    assert epsilon([SampledGaussian(1 / mu, 1.0, 1)], privacy.delta) == pytest.approx(5, rel=5e-3)
    assert epsilon(events, privacy.delta, "replace-one") <= 5


def test_a_worker_refuses_to_hide_the_absence_of_a_client_whoever_signed_it(tmp_path):
    """Noise for the replacement of a client is more than epsilon of its absence needs, which no noise hides."""
    job = job_for(tmp_path / "keys", {}, WHOLE_CLIENTS)
    privacy = job.protocol.privacy.model_copy(update={"adjacency": "zero-out"})
    forged = job_files.Job(job.protocol.model_copy(update={"privacy": privacy}), job.experiment)
    with pytest.raises(
        Refused, match=r"claim: privacy\.adjacency is 'zero-out': must be replace-one with privacy\.unit client"
    ):
        verify_claim(forged.algorithm, 0, tmp_path / "claims")
    assert verify_claim(job.algorithm, 0, tmp_path / "claims") <= 5


@pytest.mark.parametrize("mode", ["paper", "selection"])
def test_raw_modes_have_no_finite_epsilon(mode, tmp_path):
    job = job_for(tmp_path, {"mode": mode})
    entry, plan = plan_of(job)
    assert (entry.noise_multiplier, protected(plan)) == (None, [])
    assert Counter(slot.name for slot in plan) == {"loss": ROUNDS + 1, "update": ROUNDS}
    assert epsilon(plan_events(plan, None, "zero-out"), 1e-4) == math.inf
    if mode == "paper":
        assert job.protocol.unprotected == [event.reason for event in paper_events()]


def test_what_the_statement_says(tmp_path):
    def said(name, algorithm, privacy=None):
        (tmp_path / name).mkdir()
        return privacy_statement(job_for(tmp_path / name, algorithm, privacy).protocol, None)

    full = said("full", {})
    assert (full["unit"], full["epsilon"]) == ("sample", 5)
    assert any("validation losses" in text for text in full["covered"])
    assert "epsilon 8 for the draws of 4 rounds" in full["claim_of_paper"]
    assert said("client", {}, WHOLE_CLIENTS)["unit"] == "client"

    selection = said("selection", {"mode": "selection", "tilt": 4.0})
    assert (selection["epsilon"], selection["covered"], selection["noise_multiplier"]) == (None, [], None)
    assert "without noise" in selection["not_covered"][0]
    (draws,) = [text for text in selection["not_covered"] if text.startswith("the draws alone")]
    assert f"epsilon {math.ceil(1e3 * selection_epsilon(4.0, 4, 2, ROUNDS)) / 1e3:g} if one client's" in draws
    assert f"{unconditional_epsilon(4.0, 4, 2, ROUNDS):g} if it moves" in draws

    paper = said("paper", {"mode": "paper"})
    assert paper["epsilon"] is None
    assert "losses and updates leave the client without noise" in paper["not_covered"][0]
    assert not any("the draws alone" in text for text in paper["not_covered"])


@pytest.mark.parametrize(
    ("algorithm", "changes", "said"),
    [
        ({"clients_per_round": 5}, {}, r"algorithm\.clients_per_round is 5: must be at most the number of clients, 4"),
        ({}, {"data": {**DATA, "validation": 0.0}}, r"data\.validation is 0: must be above 0"),
        (
            {},
            {"privacy": {"epsilon": 5, "delta": 1e-2, "unit": "client"}},
            r"adjacency is 'zero-out': must be replace-one.*absence",
        ),
        ({}, {"local": {"batch_size": 20, "momentum": 0.9}}, r"local\.momentum is 0\.9: must be 0"),
        ({"tilt": -1.0}, {}, r"algorithm\.tilt"),
        *[
            (
                {"mode": mode, "loss_noise_ratio": 5.0},
                {},
                rf"loss_noise_ratio is 5\.0: must be 10\.0 \(the default\) with mode {mode}",
            )
            for mode in ("paper", "selection")
        ],
        (
            {"mode": "paper"},
            {"privacy": {"epsilon": 5, "delta": 1e-2, "trust": "trusted-server"}},
            r"em-fdro works with unit sample",
        ),
    ],
)
def test_what_cannot_be_is_said(algorithm, changes, said):
    with pytest.raises(ConfigError, match=said):
        config.resolve({**document(algorithm), **changes})


@pytest.mark.parametrize(("algorithm", "privacy"), [({"mode": "paper"}, {}), ({"mode": "selection"}, {}), ({}, WHOLE_CLIENTS)])
def test_plain_sgd_takes_momentum_and_batches_beyond_a_clients_records(algorithm, privacy):
    config.resolve(document(algorithm, privacy, local={"batch_size": 500, "momentum": 0.9, "weight_decay": 5e-4}))


# ---- the mechanisms at the client


class Noted:
    """A client step's `me` with a chosen noise multiplier and key."""

    def __init__(self, job, root=None):
        from dpcfl_net.data.partition import open_client
        from dpcfl_net.experiment.job_files import client_slice

        self.job, self.engine = job, Engine.of(job.protocol)
        settings, piece = client_slice(job, 0, root)
        self.train, self.validation = (open_client(settings, piece, root, part) for part in ("train", "validation"))
        self.slots = {slot.name: slot for slot in job.algorithm.plan(job.protocol.client(0))}

    def me(self, z, key=0):
        charge = Charge(bytes([key // 256, key % 256]) * 16, self.slots, z, self.job.protocol.privacy.adjacency)
        return Client(self.job.protocol, {}, self.engine, self.train, lambda: self.validation, charge)

    def release(self, kind, z, model, key=0):
        me = self.me(z, key)
        return getattr(self.job.algorithm, kind)(me, model).tensors, me.ran


def as_expected(values, deviation):
    """Whether the second moment of so many values is that of N(0, deviation^2)."""
    low, high = stats.chi2.interval(1 - NEVER, len(values))
    return low < float((np.asarray(values) ** 2).sum()) / deviation**2 < high


@pytest.mark.parametrize(("privacy", "reach"), [({}, 2.0 / 20), (WHOLE_CLIENTS, 2.0)])
def test_noise_on_a_loss(privacy, reach, tmp_path):
    """Sample: every record counts at most tau, of N_val = 20. Client: the mean may be anything up to tau."""
    client = Noted(job_for(tmp_path, {"tau": 2.0}, privacy))
    model = 3 * client.me(1.0).initial_model()
    each, _ = client.engine.evaluator.each(model, client.validation)
    assert each.min() < 2.0 < each.max()
    exact = np.clip(each, 0, 2.0).mean()
    quiet, _ = client.release("evaluate", 1e-9, model)
    assert float(quiet["loss"]) == pytest.approx(exact, rel=1e-6)
    noise = [float(client.release("evaluate", 0.15, model, key)[0]["loss"]) - exact for key in range(300)]
    assert as_expected(noise, 0.15 * 10 * reach)
    assert not as_expected(noise, 0.7 * 0.15 * 10 * reach)  # noise cut to .7 would be noticed
    assert client.release("evaluate", 0.15, model)[1] == [
        client.slots["loss"].event(0.15, client.job.protocol.privacy.adjacency)
    ]


def test_noise_on_a_whole_clients_update(tmp_path):
    client = Noted(job_for(tmp_path, {}, WHOLE_CLIENTS, local={"batch_size": 20, "lr": 0.1, "momentum": 0.9, "clip": 0.5}))
    model = client.me(1.0).initial_model()
    quiet = client.release("train", 1e-9, model)[0]["update"].astype(np.float64)
    assert np.linalg.norm(quiet) == pytest.approx(0.5, rel=1e-5)  # plain SGD moves much farther
    noisy, ran = client.release("train", 3.0, model)
    assert as_expected(noisy["update"] - quiet, 3.0 * 0.5)
    assert Counter(ran) == Counter(slot.event(3.0, "replace-one") for slot in client.slots.values())
    assert client.slots["update"] == GaussianSlot("update")
    faint, _ = client.release("train", 0.01, model)
    for z, update, most in ((3.0, noisy["update"], 1.3), (0.01, faint["update"], 1.6)):
        entry = client.job.protocol.client(0).model_copy(update={"noise_multiplier": z})
        bound = client_steps(client.job.algorithm)["train"].gives["update"].max_norm(client.job.algorithm, entry)
        assert np.linalg.norm(update) < bound < most * np.linalg.norm(update)


def test_an_update_that_is_not_finite_is_noise_alone(tmp_path):
    job = job_for(tmp_path, {}, WHOLE_CLIENTS, local={"batch_size": 20})
    local = job.protocol.local.model_copy(update={"lr": 1e30})  # which no configuration allows
    client = Noted(replace(job, protocol=job.protocol.model_copy(update={"local": local})))
    update = client.release("train", 1.0, client.me(1.0).initial_model())[0]["update"]
    assert as_expected(update, 1.0)


@pytest.mark.parametrize(("mode", "clipped"), [("paper", False), ("selection", True)])
def test_raw_modes_send_losses_and_updates_as_they_are(mode, clipped, tmp_path):
    client = Noted(job_for(tmp_path, {"mode": mode, "tau": 0.8}))
    model = client.me(None).initial_model()
    each, _ = client.engine.evaluator.each(model, client.validation)
    told, ran = client.release("train", None, model)
    assert float(told["loss"]) == pytest.approx(np.minimum(each, 0.8).mean() if clipped else each.mean(), rel=1e-6)
    assert len(ran) == 2
    assert all(isinstance(slot, UnprotectedSlot) for slot in client.slots.values())
    assert np.linalg.norm(told["update"]) > 0


def test_a_client_on_whose_records_the_model_diverges_has_the_largest_loss(tmp_path):
    """Values that are not finite are sent as zeros, which would make the worst client the least likely one."""
    job = job_for(tmp_path, {"mode": "paper"})
    host = make_host(job, 0, tmp_path / "ledgers")
    answer = host.answer(Task(1, "evaluate", {"model": np.full(job.protocol.model.parameters, 1e38, "<f4")}))
    host.close()
    assert unpack(answer.release)["loss"] == np.finfo(np.float32).max
    losses = job.algorithm.released_losses(Results([0], {0: unpack(answer.release)}))
    chances = probabilities([losses[0], 2.3, 2.4, 2.5], 2.0, 1.0)
    assert chances.argmax() == 0
    assert np.isfinite(chances).all()


# ---- the server


class Scripted:
    """A federation whose clients tell what is written here; `gone` do not answer."""

    clients = [0, 1, 2, 3]

    def __init__(self, parameters, losses):
        self.parameters, self.losses, self.gone, self.asked, self.round = parameters, losses, set(), [], 1

    def call(self, method, common, each=None):
        kind = method.client_step.kind
        asked = sorted(self.clients if each is None else each)
        self.asked.append((kind, asked))
        update = {"update": None} if kind == "train" else {}
        answers = {
            i: {"loss": np.float32(self.losses[i]), **dict.fromkeys(update, np.full(self.parameters, i + 1.0, np.float32))}
            for i in asked
            if i not in self.gone
        }
        return Results(asked, answers)

    def stream(self, method, take, *, common=None, each=None):
        results = self.call(method, common, each)
        for client, release in results.items():
            take(client, release)
        return list(results)

    def rng(self, purpose):
        return np.random.default_rng([self.round, 1])

    def initial_model(self, number=0):
        return np.zeros(self.parameters, np.float32)


def test_losses_go_stale_and_the_worst_are_drawn(tmp_path):
    job = job_for(tmp_path, {"mode": "paper", "tilt": 1e5})
    fed = Scripted(job.protocol.model.parameters, [1.0, 4.0, 2.0, 3.0])
    algorithm = job.algorithm
    first = algorithm.round(algorithm.start(fed), 1, fed)
    assert fed.asked == [("evaluate", [0, 1, 2, 3]), ("train", [1, 3])]
    np.testing.assert_allclose(first.models[0], 3.0)  # clients 1 and 3 with equal records: (2 + 4) / 2
    fed.round, fed.losses = 2, [9.0, 0.5, 9.0, 2.5]
    second = algorithm.round(first, 2, fed)
    assert fed.asked[2:] == [("train", [1, 3])]  # 0 and 2 were not asked again, theirs are still 1 and 2
    assert second.memory["losses"] == [1.0, 0.5, 2.0, 2.5]
    fed.round, fed.gone = 3, {2}
    third = algorithm.round(second, 3, fed)
    assert fed.asked[3:] == [("train", [2, 3])]
    assert third.memory["losses"] == [1.0, 0.5, 2.0, 2.5]  # client 2 did not answer and keeps its own
    np.testing.assert_allclose(third.models[0] - second.models[0], 4.0)
    assert third.diagnostics == {"p_max": 1.0, "top_mass": 1.0, "drawn": [0, 0, 1, 1]}


def test_updates_weigh_as_much_as_their_clients_have_records(tmp_path):
    job = job_for(tmp_path, {"mode": "paper", "clients_per_round": 4, "tilt": 3.0, "tau": 2.0})
    roster = [e.model_copy(update={"records": n}) for e, n in zip(job.protocol.roster, (1, 2, 3, 4), strict=True)]
    algorithm = job_files.Job(job.protocol.model_copy(update={"roster": roster}), job.experiment).algorithm
    fed = Scripted(job.protocol.model.parameters, [1.0, 2.0, 3.0, 4.0])
    state = algorithm.round(algorithm.start(fed), 1, fed)
    np.testing.assert_allclose(state.models[0], (1 + 4 + 9 + 16) / 10)
    assert state.diagnostics["p_max"] == pytest.approx(1 / sum(math.exp(-3 * gap / (2 * 2)) for gap in range(4)))


def test_who_never_answered_counts_as_the_average(tmp_path):
    job = job_for(tmp_path, {"mode": "paper", "tilt": 1e5, "clients_per_round": 2})
    fed = Scripted(job.protocol.model.parameters, [1.0, 4.0, 2.0, 3.5])
    fed.gone = {0}
    state = job.algorithm.round(job.algorithm.start(fed), 1, fed)
    assert state.memory["losses"] == [None, 4.0, 2.0, 3.5]
    fed.losses = [9.0, 0.0, 0.0, 0.0]
    state = job.algorithm.round(state, 2, fed)  # 1 and 3 once more
    state = job.algorithm.round(state, 3, fed)  # left: 2 with 2, and 0 with (0 + 2 + 0) / 3
    assert fed.asked[-1] == ("train", [0, 2])


def test_draws_without_some_losses_cost_what_the_statement_says(tmp_path):
    """Client 3 never answers. The loss of client 0 is 0 or tau, and moves the chance of each pair by the stated epsilon at most."""
    job = job_for(tmp_path, {"mode": "selection", "tilt": 2.0, "tau": 2.0, "clients_per_round": 2})
    fed, chances = Scripted(job.protocol.model.parameters, []), []
    fed.gone = {3}
    for loss, *others in itertools.product((0.0, 2.0), repeat=3):
        fed.losses = [loss, *others, 0.0]
        weights = [math.exp(2.0 / (2 * 2.0) * score) for score in scores_of(job.algorithm, fed)]
        chances.append([pair_chance(weights, pair) for pair in itertools.combinations(range(4), 2)])
    costs = np.abs(np.log(np.divide(chances[:4], chances[4:])))
    assert costs.max() <= selection_epsilon(2.0, 4, 2, 1) + 1e-9


def scores_of(algorithm, fed):
    """Scores by which clients are drawn in round 1, as the round passes them on."""
    with pytest.MonkeyPatch.context() as patch:
        found = []
        patch.setattr("dpcfl_net.algorithms.em_fdro.draw", lambda scores, *how: found.append([*scores]) or draw(scores, *how))
        algorithm.round(algorithm.start(fed), 1, fed)
    return found[0]


def pair_chance(weights, pair):
    total = sum(weights)
    (a, b) = (weights[k] / total for k in pair)
    return a * b / (1 - a) + b * a / (1 - b)


def test_draws_that_are_too_steep_for_their_bits_are_said_to_have_no_epsilon(tmp_path):
    """At tilt 100 the client of the smaller loss is never drawn, in place of once in e^50 draws."""

    class Extreme:
        def random(self, count):
            return np.array([0.0, 1 - 2.0**-53])  # the smallest and the largest number that a generator draws

    assert draw([1.0, 0.0], 30.0, 1.0, 1, Extreme()) == [1]
    assert draw([1.0, 0.0], 100.0, 1.0, 1, Extreme()) == [0]
    for tilt, claimed in ((30.0, True), (100.0, False)):
        folder = tmp_path / str(tilt)
        folder.mkdir()
        lines = privacy_statement(job_for(folder, {"mode": "selection", "tilt": tilt}).protocol, None)["not_covered"]
        (said,) = [line for line in lines if line.startswith("the draws")]
        assert ("if one client's clipped losses may change" in said) == claimed


def test_a_loss_beyond_what_an_honest_one_can_be_weighs_no_more(tmp_path):
    job = job_for(tmp_path, {"mode": "full", "tau": 1.5})
    fed = Scripted(job.protocol.model.parameters, [1e9, -7.0, 0.5, 1.0])
    fed.gone = set()
    told = job.algorithm.released_losses(fed.call(job.algorithm.evaluate, {}))
    assert told == {0: 1.5, 1: 0.0, 2: 0.5, 3: 1.0}


# ---- whole runs


@pytest.mark.slow
def test_a_run_with_part_of_the_clients(tmp_path):
    """Processes and one process agree; the server's line lists the drawn clients; ledgers charge these, and the first loss of all clients."""
    changes = {k: v for k, v in document({"mode": "selection"}, SEEDED).items() if k not in ("name", "output", "model")}
    done = dpcfl("run", write_config(tmp_path / "c", **changes), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "runs")
    job = job_of(folder)
    state = simulate(job, tmp_path / "one")
    _, found = last_state(folder)
    assert found.models.tobytes() == state.models.tobytes()
    assert found.memory == state.memory
    assert found.diagnostics == state.diagnostics

    lines = [line["diagnostics"] for line in runlog.read(folder / "clusters.jsonl") if line["view"] == "server"]
    assert len(lines) == ROUNDS
    assert all(0.25 <= line["p_max"] < 1 and line["top_mass"] == pytest.approx(1) for line in lines)
    drawn = Counter(client for line in lines for client, in_round in enumerate(line["drawn"]) if in_round)
    assert sum(drawn.values()) == 2 * ROUNDS
    for client in range(4):
        charged = [event for _, events in charged_by_round(folder, job, client) for event in events]
        assert len(charged) == 1 + 2 * drawn[client]
    assert not [check for check in verify_run(folder, None) if check.holds is False]

    privacy = json.loads((folder / "run.json").read_text())["privacy"]
    assert (privacy["epsilon"], privacy["epsilon_spent"]) == (None, None)
    assert any("the draws alone" in text for text in privacy["not_covered"])
    assert "inf" in done.stdout


def test_a_crash_in_mid_round_changes_no_draw(tmp_path, monkeypatch):
    from dpcfl_net.federation.client_host import ClientHost

    job = job_for(tmp_path, {}, SEEDED)
    whole = simulate(job, tmp_path / "whole")
    compute, due = ClientHost._compute, [(1, "evaluate"), (1, "train"), (3, "train")]

    def crashing(self, task, charge, state):
        release = compute(self, task, charge, state)
        if due and (task.round, task.kind) == due[0]:
            due.pop(0)
            raise KeyboardInterrupt
        return release

    with monkeypatch.context() as patch:
        patch.setattr(ClientHost, "_compute", crashing)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                simulate(job, tmp_path / "crashed")
        again = simulate(job, tmp_path / "crashed")
    assert (again.models.tobytes(), again.memory) == (whole.models.tobytes(), whole.memory)


def test_what_a_run_is_expected_to_cost(tmp_path):
    job = job_for(tmp_path, {"clients_per_round": 2})
    expected = estimate(job.protocol)
    assert expected["steps"] == 2 * ROUNDS * 9  # of the 4 * ROUNDS * 9 that are paid for
    model, clients = 4 * job.protocol.model.parameters, len(job.protocol.roster)
    assert expected["bytes_up"] == 2 * ROUNDS * model + 4 * clients  # and the first losses of all clients,
    assert expected["bytes_down"] == (2 * ROUNDS + clients) * model  # which need a model each


# ---- reproductions


def test_the_theory_checked_in_fractions():
    outcome = find("em-fdro/prop41")().compute(None)
    held = {claim.text.split(":")[0]: claim.evidence for claim in outcome.claims if not claim.text.startswith("(ours)")}
    yes, no = Exact(True), Exact(False)
    assert held == {"Proposition 4.1": yes, "Corollary 4.2": yes, "Lemma 4.5": no, "Proposition 4.4": no}
    assert [claim.evidence for claim in outcome.claims if claim.text.startswith("(ours)")] == [yes, no, no, yes]
    assert all(one.claim.cause.shown_by for one in outcome.judged() if one.verdict == "does not hold")
    assert len(outcome.rows) == len(outcome.tables[0].rows) == 24


@dataclass
class MadeUp:
    """Runs of three rounds whose accuracies are those of `reached[measure][tilt]`, higher in later rounds."""

    reached: dict
    folder: Path
    scale: str = "laptop"
    asked: list = field(default_factory=list)
    asked_seeds: int | None = None

    def seeds(self, usual):
        return usual if self.asked_seeds is None else range(self.asked_seeds)

    @property
    def earlier(self):
        return Earlier()

    def finished(self, grids):
        return [self.results(*grid) for grid in grids]

    def results(self, path, axes):
        assert (ROOT / path).exists()
        found = []
        for drawn, tilt, seed in itertools.product(*axes.values()):
            folder = self.folder / f"{drawn}-{tilt}-{seed}"
            folder.mkdir()
            for t in (1, 2, 3):
                accuracy = {
                    measure: values[tilt] + (t - 2) * 0.05 + 1e-4 * seed * (1 + tilt)
                    for measure, values in self.reached.items()
                }
                with closing(runlog.Lines(folder / "metrics.jsonl")) as lines:
                    lines.write({"view": "observer", "round": t, **accuracy})
                draws = {"p_max": 0.04 * (1 + tilt) + 1e-4 * seed * tilt, "top_mass": 0.2 + 0.01 * tilt}
                with closing(runlog.Lines(folder / "clusters.jsonl")) as lines:
                    lines.write({"view": "server", "round": t, "diagnostics": draws})
            settings = {"algorithm": {"name": "em-fdro", "clients_per_round": drawn, "tilt": tilt}}
            found.append(Result(folder, "x", "em-fdro", seed, settings, {}, {}))
        self.asked.append((str(path), axes))
        return found


def reached(central, worst, tail):
    values = {"accuracy_central": central, "accuracy_mean": (0.6, 0.6, 0.6), "accuracy_worst": worst, "accuracy_p10": tail}
    return {measure: dict(zip((0.0, 2.0, 4.0), own, strict=True)) for measure, own in values.items()}


def test_figure_3_averages_rounds_then_seeds_and_says_what_holds(tmp_path):
    (tmp_path / "as").mkdir()
    as_printed = MadeUp(reached((0.5, 0.5, 0.49), (0.2, 0.25, 0.22), (0.3, 0.29, 0.25)), tmp_path / "as")
    outcome = find("em-fdro/fig3")().compute(as_printed)
    assert {one.verdict for one in outcome.judged()} == {"holds"}
    assert {claim.seeds for claim in outcome.claims} == {3}
    assert len(outcome.claims) == 2 * 5
    assert len(outcome.figures) == len({figure.key for figure in outcome.figures}) == 2 * (5 + 4)
    assert len(outcome.rows) == 2 * 3 * 3 * 3  # rounds of each run
    first = outcome.rows[0]
    assert (first["clients_per_round"], first["tilt"], first["seed"], first["round"]) == (20, 0.0, 0, 1)
    assert first["accuracy_worst"] == pytest.approx(0.15)
    assert outcome.tables[0].rows[1][1:4] == ["50.0 +- 0.0", "60.0 +- 0.0", "25.0 +- 0.0"]
    assert outcome.claims[3].measured.startswith("50.0 % at 0, 50.0 % at 2, 49.0 % at 4 (mean over clients: 60.0 % at 0")
    assert as_printed.asked[0][0] == str(packaged("em_fdro/cifar10_laptop"))


def test_figure_2_is_one_run_by_round(tmp_path):
    outcome = find("em-fdro/fig3")().compute(MadeUp(reached((0.5, 0.52, 0.49), (0.2, 0.25, 0.22), (0.3, 0.29, 0.25)), tmp_path))
    curve = next(figure for figure in outcome.figures if figure.key == "one-run-accuracy_central-20").spec["data"][1]
    own = [row for row in outcome.rows if (row["clients_per_round"], row["tilt"], row["seed"]) == (20, 2.0, 0)]
    assert curve["name"] == "epsilon 2"
    assert curve["x"] == [row["round"] for row in own] == [1, 2, 3]
    assert curve["y"] == pytest.approx([47.0, 49.5, 52.0])  # 47, 52 and 57 %, averaged over the last five rounds
    assert outcome.tables[1].rows[0] == ["0", "2 (by 2.0 points)", "2 (by 3.0 points)", "0 (by 1.0 points)"]

    (tmp_path / "other").mkdir()
    outcome = find("em-fdro/fig3")().compute(
        MadeUp(reached((0.5, 0.48, 0.5), (0.3, 0.2, 0.2), (0.2, 0.3, 0.2)), tmp_path / "other", asked_seeds=6)
    )
    missed = [one for one in outcome.judged() if one.verdict == "does not hold"]
    assert len(missed) == 2 * 4
    assert [one.name for one in missed[0].claim.comparisons] == ["epsilon 2 - 0", "epsilon 2 - 4"]


@pytest.mark.parametrize("name", ["cifar10_paper", "cifar10_laptop"])
def test_configurations_are_those_of_the_paper(name):
    document = yaml.safe_load((ROOT / "configs" / "em_fdro" / f"{name}.yaml").read_text())
    small = {
        **document,
        "data": {**document["data"], "dataset": "digits", "train_per_client": 50, "test_per_client": 50, "central_test": 100},
        "model": {"name": "digits-cnn"},
    }
    read = config.resolve(small)
    assert (read.options.mode, read.options.clients_per_round, read.rounds, read.local.epochs) == ("paper", 20, 30, 2)
    assert (read.data.alpha, read.data.validation, read.local.momentum, read.local.lr) == (0.3, 0.1, 0.9, 0.05)
