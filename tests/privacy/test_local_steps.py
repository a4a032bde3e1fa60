"""Several local steps under one secure sum do not cost what the summed noise says: a counterexample in one dimension.

One client holds a record with gradient 1 at step 1, and N others with loss |theta - a|, whose gradients are +1 or -1. Each of n
clients adds noise of deviation z / sqrt(n) at each of two local steps, and the server sees the sum of both steps over all clients.
If that cost what two Gaussian mechanisms of noise multiplier z do, no test had more true positives than their trade-off allows. But
the local model after step 1 carries the client's own small share of the noise only: it tells whether the record was there, and at
step 2 every other gradient flips with it.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, norm

Z, RECORDS, DRAWS = 1.1, 100, 200_000
ALARM = 1e-7


def released(present: bool, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Sums that the server sees, with or without the record."""
    own = Z / np.sqrt(clients)
    first = float(present) + own * rng.standard_normal(DRAWS)
    second = RECORDS * np.where(first > 0.5, 1.0, -1.0) + own * rng.standard_normal(DRAWS)
    return first + second + Z * np.sqrt(2 * (clients - 1) / clients) * rng.standard_normal(DRAWS)


def proves_a_breach(clients: int) -> bool:
    """True if the test "the sum is above 0" has more true positives than the claim allows, at a false-alarm rate of 2e-7."""
    rng = np.random.default_rng(clients)
    false, true = (int((released(present, clients, rng) > 0).sum()) for present in (False, True))
    most_false = beta.ppf(1 - ALARM, false + 1, DRAWS - false)
    least_true = beta.ppf(ALARM, true, DRAWS - true + 1)
    return bool(least_true > norm.cdf(norm.ppf(most_false) + np.sqrt(2) / Z))


@pytest.mark.parametrize("clients", [3, 6, 100])
def test_two_local_steps_under_one_sum_break_the_claim_of_the_summed_noise(clients):
    assert proves_a_breach(clients)


def test_one_client_that_adds_all_the_noise_keeps_the_claim():
    assert not proves_a_breach(1)
