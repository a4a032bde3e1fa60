"""Labels by randomised response and sums over one sample of fixed size: exact, sound and tight against the mechanism itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, special, stats

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.accounting.accountant import calibrate, deltas, epsilon
from dpcfl_net.privacy.accounting.document import account
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.privacy.mechanisms import randomised_response

Z = stats.norm.isf(1e-8)  # false alarms below 1e-7
ROUNDS = LabelledFixedSizeGaussian(1.2, 1.5, 4, 100, 1000, 15)


def spent(*events, delta=1e-3):
    return epsilon(events, delta, "replace-one")


def deltas_of(event, points):
    return deltas([event], points, "replace-one")


# ---- exact


@pytest.mark.parametrize(("noise", "label_epsilon", "k", "rate"), [(0.8, 1.5, 4, 0.1), (2.0, 3.0, 2, 0.5), (1.0, 0.4, 7, 0.02)])
def test_one_round_costs_the_integral_of_its_dominating_pair(noise, label_epsilon, k, rate):
    """Integrates (1-q) Q + q P against Q, and Q against it, over labels and sums."""
    event = LabelledFixedSizeGaussian(noise, label_epsilon, k, round(1000 * rate), 1000, 1)
    kept = math.exp(label_epsilon) / (math.exp(label_epsilon) + k - 1)
    other = (1 - kept) / (k - 1)
    labels = [(kept, other, 1), (other, other, k - 2), (other, kept, 1)]  # chance under P, under Q, and number of such labels

    def divergence(a, exchanged):
        def over(x, p, q):
            theirs = q * stats.norm.pdf(x, 0, noise)
            mixed = (1 - rate) * theirs + rate * p * stats.norm.pdf(x, 1, noise)
            one, two = (theirs, mixed) if exchanged else (mixed, theirs)
            return np.maximum(one - a * two, 0.0)

        x = np.linspace(-12 * noise, 1 + 12 * noise, 40_001)
        return sum(count * float(integrate.trapezoid(over(x, p, q), x)) for p, q, count in labels)

    points = [0.05, 0.2, 0.6]
    both = [max(divergence(math.exp(y), exchanged) for exchanged in (False, True)) for y in points]
    assert deltas_of(event, points) == pytest.approx(both, rel=1e-3)


def test_with_everybody_in_the_sample_it_is_the_composition_of_both_mechanisms():
    whole = LabelledFixedSizeGaussian(2.0, 1.0, 4, 30, 30, 4)
    parts = spent(FixedSizeGaussian(2.0, 30, 30, 4), RandomisedResponse(1.0, 4, 4))
    assert spent(whole) == pytest.approx(parts, rel=1e-4)
    assert spent(replace(whole, sample_size=2_999_999, population=3_000_000)) == pytest.approx(parts, rel=1e-4)


def test_without_information_in_the_labels_it_is_the_sampled_gaussian():
    alone = spent(FixedSizeGaussian(1.2, 100, 1000, 15))
    assert spent(replace(ROUNDS, label_epsilon=0.0)) == pytest.approx(alone, rel=1e-4)
    assert spent(replace(ROUNDS, label_epsilon=0.1)) > alone
    assert spent(replace(ROUNDS, steps=0)) == 0
    assert spent(replace(ROUNDS, noise_multiplier=1e-200)) == math.inf


def test_labels_and_sums_of_one_sample_cost_more_than_with_a_sample_for_each():
    """Counting each with the amplification that it has alone is not sound: the sample is the same."""
    labels, sums = replace(ROUNDS, noise_multiplier=1e9), FixedSizeGaussian(1.2, 100, 1000, 15)
    assert spent(ROUNDS) > 1.05 * spent(labels, sums)
    assert max(spent(labels), spent(sums)) < spent(ROUNDS) < spent(RandomisedResponse(1.5, 4, 15), sums)


# ---- the mechanism itself


def log_likelihoods(labels, sums, case, member):
    """Logarithm of the density of rounds, (n,): `member` is the (label, value) of one client; all others have label 1, value -1."""
    m, k, q, noise, label_epsilon = case
    kept = RandomisedResponse(label_epsilon, k, 1).kept

    def of(label):
        return np.where(labels == label, math.log(kept), math.log((1 - kept) / (k - 1)))

    counts = (labels[:, :, None] == np.arange(k)).sum(axis=1)
    rest, terms = of(1), [math.log1p(-q) + of(1).sum(axis=1) - ((sums + counts) ** 2).sum(axis=1) / (2 * noise**2)]
    for slot in range(m):
        placed = np.eye(k)[labels[:, slot]] * (1 + member[1])
        density = -((sums + counts - placed) ** 2).sum(axis=1) / (2 * noise**2)
        terms.append(math.log(q / m) + rest.sum(axis=1) - rest[:, slot] + of(member[0])[:, slot] + density)
    return special.logsumexp(terms, axis=0)


def rounds_of(rng, count, case, member):
    """Run rounds with the real mechanism for labels: sample, labels of the slots, sum of each released label plus noise."""
    m, k, q, noise, label_epsilon = case
    taken, slot = rng.random(count) < q, rng.integers(0, m, count)
    true, values = np.ones((count, m), int), -np.ones((count, m))
    true[taken, slot[taken]], values[taken, slot[taken]] = member
    labels = randomised_response(true.ravel().tolist(), label_epsilon, k, rng).reshape(count, m)
    sums = (values[:, :, None] * (labels[:, :, None] == np.arange(k))).sum(axis=1) + noise * rng.standard_normal((count, k))
    return labels, sums


@pytest.mark.parametrize(("m", "steps"), [(1, 1), (3, 4)])
def test_no_two_populations_are_farther_apart_than_the_charge(m, steps):
    """Privacy losses of simulated rounds: one client has another label and the opposite update (sensitivity 2), q = .25."""
    rng, count, case = np.random.default_rng(3), 40_000, (m, 3, 0.25, 2.4, 1.2)
    points = np.array([0.1, 0.3, 0.6])
    charged = deltas_of(LabelledFixedSizeGaussian(1.2, 1.2, 3, m, 4 * m, steps), points)
    ours, theirs = (0, 1.0), (1, -1.0)
    measured = []
    for one, two in ((ours, theirs), (theirs, ours)):
        losses = np.zeros(count)
        for _ in range(steps):
            seen = rounds_of(rng, count, case, one)
            losses += log_likelihoods(*seen, case, one) - log_likelihoods(*seen, case, two)
        found = np.maximum(-np.expm1(points - losses[:, None]), 0.0)
        measured.append((found.mean(axis=0), found.std(axis=0) / math.sqrt(count)))
    for mean, error in measured:
        assert (mean <= charged + Z * error).all(), (mean, charged)
    mean, error = measured[0]
    if m == 1:  # the pair of populations that attains the charge
        assert (np.abs(mean - charged) < Z * error).all(), (mean, charged)
        assert (Z * error < 0.2 * charged)[:2].all()


# ---- accountants and documents


def test_noise_is_found_for_the_joint_cost():
    noise = calibrate(lambda z: [replace(ROUNDS, noise_multiplier=z)], 8, 1e-3, "replace-one")
    assert 7.99 < spent(replace(ROUNDS, noise_multiplier=noise)) <= 8
    with pytest.raises(ValueError, match=r"selections and labels alone spend 2\.96"):
        calibrate(lambda z: [replace(ROUNDS, noise_multiplier=z, label_epsilon=2.0)], 2, 1e-3, "replace-one")


def test_a_document_asks_for_it():
    fields = {"label_epsilon": 1.5, "categories": 4, "sample_size": 100, "population": 1000, "steps": 15}
    document = {"events": [{"type": "LabelledFixedSizeGaussian", **fields}], "delta": 1e-3, "adjacency": "replace-one"}
    answer = account({**document, "target_epsilon": 8.0})
    assert spent(replace(ROUNDS, noise_multiplier=answer["noise_multiplier"])) == answer["epsilon"] <= 8
    for change, words in (
        ({"adjacency": "zero-out"}, "LabelledFixedSizeGaussian.*replace-one.*zero-out"),
        ({"accountant": "rdp"}, "rdp.*has no bound for LabelledFixedSizeGaussian"),
    ):
        with pytest.raises(ConfigError, match=words):
            account({**document, "target_epsilon": 8.0, **change})


@pytest.mark.parametrize(
    "values",
    [{"label_epsilon": -1.0}, {"label_epsilon": 501.0}, {"label_epsilon": math.nan}, {"categories": 1}, {"sample_size": 1001}, {"noise_multiplier": 0.0}, {"steps": -1}],
)  # fmt: skip
def test_a_round_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        replace(ROUNDS, **values)
