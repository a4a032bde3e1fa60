"""Labels by randomised response and Gaussian releases over the same sample of fixed size; replace-one adjacency only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric
from dpcfl_net.privacy.events import gaussian
from dpcfl_net.privacy.events.base import Composable, Event, LossSpread, Mechanism, check_number
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian, check_replace_one
from dpcfl_net.privacy.events.randomised_response import MOST, RandomisedResponse


@dataclass(frozen=True)
class LabelledFixedSizeGaussian(Mechanism):
    """Rounds over a fresh sample of exactly `sample_size` of `population`: a label of each member, then a Gaussian release.

    The labels are released in random order by randomised response. The Gaussian release may depend on them.

    Args:
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity of the Gaussian release when a member of the
            sample is replaced by another, for any released labels (2 * clip for sums of clipped vectors in released clusters).
        label_epsilon: E, pure epsilon of one label, 0 to 500.
        categories: Number of labels k, 2 or more.
        sample_size: Members of each sample, 1 to `population`.
        population: Number of members.
        steps: Number of rounds.

    Raises:
        ValueError: If an argument is out of range.

    Proof: `labelled_losses`.
    """

    noise_multiplier: float
    label_epsilon: float
    categories: int
    sample_size: int
    population: int
    steps: int

    rank: ClassVar[int] = 5
    runs_field: ClassVar[str | None] = "steps"
    maxima: ClassVar[dict[str, float]] = {
        **FixedSizeGaussian.maxima, "label_epsilon": MOST, "categories": RandomisedResponse.maxima["categories"],
    }  # fmt: skip

    def __post_init__(self) -> None:
        # The fields of both parts have the ranges that they have alone.
        FixedSizeGaussian(self.noise_multiplier, self.sample_size, self.population, self.steps)
        if not 0 <= check_number("label_epsilon", self.label_epsilon) <= MOST:
            raise ValueError(f"label_epsilon must lie between 0 and {MOST:g}, got {self.label_epsilon!r}")
        RandomisedResponse(self.label_epsilon, self.categories, 1)

    @property
    def sampling_rate(self) -> float:
        """Probability that a given member is in a sample."""
        return self.sample_size / self.population

    @property
    def unprotected(self) -> str:
        """See `Event`."""
        return gaussian.unprotected(self.noise_multiplier)

    @property
    def weight(self) -> float:
        """See `Event`."""
        inverse, rate, label = self.noise_multiplier**-2, self.sampling_rate, self._label
        if rate == 1:
            return self.steps * (inverse + label.weight)
        return self.steps * rate**2 * (math.exp(min(inverse + label.log_chi_square, 700.0)) - 1)

    def counted(self) -> Self | None:
        """See `Event`."""
        return replace(self, noise_multiplier=min(self.noise_multiplier, gaussian.MAX_NOISE)) if self.steps else None

    def search_start(self) -> Event:
        """The rounds without labels."""
        return FixedSizeGaussian(self.noise_multiplier, self.sample_size, self.population, self.steps).search_start()

    def floor(self) -> Composable | None:
        """See `Composable`: the labels."""
        return replace(self, noise_multiplier=gaussian.MAX_NOISE) if self.label_epsilon else None

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """See `Composable`."""
        check_replace_one("LabelledFixedSizeGaussian", adjacency)
        if accountant == "rdp":
            raise ValueError('accountant "rdp" has no bound for LabelledFixedSizeGaussian: use accountant "pld"')

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`."""
        found = labelled_losses(self.noise_multiplier, self.label_epsilon, self.categories, self.sampling_rate, interval)
        return [((found,), self.steps)]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`; that of rounds with every member, which convexity gives. No accountant reads it (`check`)."""
        return self.steps * (orders / (2 * self.noise_multiplier**2) + self._label.renyi(orders))

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""
        of_round = _joint_divergence(np.zeros(1), self.noise_multiplier, self.label_epsilon, self.categories)[0]
        return self.steps * self.sampling_rate * float(of_round)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        inverse, rate, label = self.noise_multiplier**-2, self.sampling_rate, self._label
        chi_square = math.expm1(min(inverse + label.log_chi_square, 700.0))
        mean, variance = inverse / 2 + label.mean_loss, inverse + label.weight
        extent = 2 * gaussian.amplified(_highest_loss(self.noise_multiplier, self.label_epsilon), rate)
        total = self.steps * min(rate**2 * chi_square, rate * (variance + mean**2))
        return LossSpread(total, self.steps, extent, gaussian.MIN_INTERVAL)

    @property
    def _label(self) -> RandomisedResponse:
        """One label, of a member that is in the sample."""
        return RandomisedResponse(self.label_epsilon, self.categories, 1)


@lru_cache(maxsize=8)
def labelled_losses(noise: float, label_epsilon: float, categories: int, rate: float, interval: float) -> Losses:
    """Compute the loss distribution of one round: labels by randomised response, then a Gaussian release on the same sample.

    Without sampling: one slot of the sample has another member. Its label is released by randomised response; P and Q have the
    other label as the true one, so that the loss is E, 0 or -E. Given all released labels the Gaussian release moves by the
    sensitivity at most, so its divergence is at most that of N(1, z^2) and N(0, z^2) after each of them. So the pair
    (label of P, N(1, z^2)), (label of Q, N(0, z^2)) dominates both releases together, and with G_a the Gaussians' divergence
    H_a(P, Q) = sum over labels j of P_j G_{a Q_j / P_j}. A slot without an answer has a label at random, the mean of the
    releases of all labels, which is no farther from any of them by convexity. Exchanging labels and reflecting the
    Gaussians exchanges P and Q.

    With sampling: a sample without the member is a sample with it in which another member has its slot. The proof in
    `fixed_size_losses` uses nothing else, neither that the release is Gaussian nor that it is one release. So the divergence is at most
    q H_{1 + (a - 1) / q}(P, Q) for a >= 1, its mirror image below 1, and rounds compose as there.

    Args:
        noise: Noise multiplier z of the Gaussian release over its replace-one sensitivity.
        label_epsilon: E.
        categories: k.
        rate: Sample size over population, q.
        interval: Grid interval of the losses.

    Returns:
        One symmetric distribution.

    Source: Balle, Barthe, Gaboardi 2018, Theorem 2; Zhu, Dong, Wang 2022, Theorems 10 and 11.
    """
    top = gaussian.amplified(_highest_loss(noise, label_epsilon), rate)
    losses = interval * np.arange(math.ceil(top / interval) + 1)
    # log(1 + (e^y - 1) / q) without overflow: the loss of the pair whose divergence a loss y after sampling has.
    before = losses + np.log1p((1 - rate) / rate * -np.expm1(-losses))
    return symmetric(rate * _joint_divergence(before, noise, label_epsilon, categories), interval)


def _joint_divergence(losses: np.ndarray, noise: float, label_epsilon: float, categories: int) -> np.ndarray:
    """Divergence of (P, Q) at each loss: the sum over the true label, the others and the label of the other input."""
    kept = RandomisedResponse(label_epsilon, categories, 1).kept
    other = math.exp(-label_epsilon) * kept
    parts = ((kept, label_epsilon), ((categories - 2) * other, 0.0), (other, -label_epsilon))
    return np.asarray(sum(share * gaussian.plain_divergence(1 / noise, losses - shift) for share, shift in parts))


def _highest_loss(noise: float, label_epsilon: float) -> float:
    """Loss of one round with the member in the sample, at ten standard deviations of the noise."""
    return label_epsilon + 0.5 / noise**2 + 10 / noise
