"""Division by the expected batch size (arXiv 2605.15648): why it costs nothing where the number of records is public.

That paper attacks DP-SGD whose noisy sum is divided by q N, under adjacencies that change N: the divisor moves with the record.
Here adjacent data sets have the same N (a record is replaced by nothing, or by another), so that the divisor is a public
constant and the division post-processing.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from dpcfl_net.privacy.clipping import Rows
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Trainer

N, Z, RUNS = 16, 1.0, 3000
STEP = DPSGDSlot("train", 1.0, 1)


class Given:
    """An engine whose records are their own gradients."""

    def logits(self, theta, x):
        return torch.zeros(len(x), 2)

    def gradients(self, theta, x, y):
        return torch.zeros(len(x), 2), [Rows(x.clone(), 0)]


class Vectors:
    """Records along one direction, of length 1: forwards, or backwards for the one that is looked for; an empty slot is zero."""

    def __init__(self, target: float) -> None:
        self.x = torch.zeros(N, 6)
        self.x[:, 0] = 1.0
        self.x[-1, 0] = target

    def __len__(self) -> int:
        return N

    def batch(self, rows, size):
        x = torch.zeros(size, 6)
        x[: len(rows)] = self.x[rows]
        return x, torch.zeros(size, dtype=torch.int64)


@cache
def released(target: float, seed: int) -> np.ndarray:
    """What a server sees of one averaged step along that direction, (RUNS,), in units of lr c / N."""
    trainer = Trainer(models.build("linear", (2,), 2), clip=1.0, learning_rate=1.0, batch_size=N, path=Given())
    theta, data = np.zeros(6, np.float32), Vectors(target)
    keys = (f"{seed} {k}".encode().ljust(32, b"!") for k in range(RUNS))
    return np.array([-trainer.train(theta, data, STEP, Z, key)[0][0] * N for key in keys])


def separation(a: np.ndarray, b: np.ndarray) -> float:
    """How many deviations the means are apart: mu of two Gaussians."""
    return float(abs(a.mean() - b.mean()) / np.sqrt((a.var() + b.var()) / 2))


def test_the_divisor_is_public_and_tells_nothing():
    """A record that pulls backwards, there and taken out: mu is 1 / z, what the accountant charges for one step at rate 1."""
    there, out = released(-1.0, 1), released(0.0, 2)
    error = 6 * np.sqrt(2 / RUNS)  # of the difference of two means, in deviations: false alarms below 1e-8
    assert abs(separation(there, out) - 1 / Z) < error
    # Positive control: had taking the record out changed N, the mean would be over one record less, and mu about twice that.
    attacked = separation(there, out * N / (N - 1))
    assert attacked > 1 / Z + error
    assert abs(attacked - 2 / Z) < 0.2


def test_a_record_without_a_gradient_is_not_seen():
    """Taken out or there, it changes nothing; where the divisor changes with it, it is seen as any other."""
    there, out = released(0.0, 3), released(0.0, 2)
    error = 6 * np.sqrt(2 / RUNS)
    assert separation(there, out) < error
    assert separation(there, out * N / (N - 1)) > error


def test_the_divisor_is_the_expected_batch_of_all_records_whatever_was_drawn():
    """Rate 1/4: however many records a batch has, the sum is divided by the same number."""
    trainer = Trainer(models.build("linear", (2,), 2), clip=1.0, learning_rate=1.0, batch_size=N // 4, path=Given())
    theta, data = np.zeros(6, np.float32), Vectors(1.0)
    slot, tiny = DPSGDSlot("train", 0.25, 1), 1e-6
    moved = {round(-trainer.train(theta, data, slot, tiny, bytes([k]) * 32)[0][0] * N / 4, 2) for k in range(40)}
    assert len(moved) > 4
    assert all(abs(value - round(value)) < 0.02 for value in moved)  # whole records over N / 4, never over what was drawn
