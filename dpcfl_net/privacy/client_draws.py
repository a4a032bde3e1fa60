"""What it costs to draw clients by their losses (EM-FDRO), p_i proportional to exp(epsilon L_i / (2 tau)), in its three modes."""

from __future__ import annotations

import math

from dpcfl_net.core.types import Event, SampledGaussian, Unprotected


def draw_epsilon(epsilon: float, clients: int, drawn: int) -> float:
    """Pure epsilon of one draw of `drawn` of `clients` without replacement (Gumbel top-m), if one client's loss may change.

    Losses lie in [0, tau]; all others and the models are given. The weight of the one client moves between 1 and
    r = e^(epsilon/2). The others' weights are 1 at least, so that with n clients, m drawn:
    - not drawn, each of the m steps had its total multiplied by at most (r + n - j) / (1 + n - j), j = 1..m;
    - drawn, its own weight counts against that: at most log((1 + (n-1) r) / n), when it comes first and all others weigh r.
    The larger of the two, even if the order of the draws is told; all drawn is no choice, and costs 0.
    The paper's epsilon a round (Yan et al., Proposition 4.4) is that of a single client drawn. ValueError names a bad argument.
    """
    _check(epsilon, clients, drawn)
    if drawn == clients:
        return 0.0
    weight = math.exp(epsilon / 2)
    left_out = math.fsum(math.log((weight + clients - j) / (1 + clients - j)) for j in range(1, drawn + 1))
    return max(left_out, math.log((1 + (clients - 1) * weight) / clients))


def selection_epsilon(epsilon: float, clients: int, drawn: int, rounds: int) -> float:
    """Mode `selection`: pure epsilon of all rounds' draws, conditional on the models being public; basic composition."""
    return rounds * draw_epsilon(epsilon, clients, drawn)


def unconditional_epsilon(epsilon: float, clients: int, drawn: int, rounds: int) -> float:
    """Pure epsilon of all rounds' draws when a client's data also moves the models, and with them every client's loss.

    Each single draw costs epsilon then (an exponential mechanism over those who are left), and there are drawn * rounds.
    The models themselves, without noise, are not covered. ValueError names a bad argument.
    """
    _check(epsilon, clients, drawn)
    return epsilon * drawn * rounds


def full_events(loss_noise: float, update_noise: float, rounds: int, steps: int, rate: float) -> list[Event]:
    """Mode `full`: what one client releases if it is drawn in every round; the draws are post-processing of the noisy losses.

    rounds + 1 losses sum clip(L, 0, tau) / N_val with noise of standard deviation loss_noise * tau / N_val, and in each round
    `steps` steps of DP-SGD at sampling rate `rate`. With a client as the unit: steps=1, rate=1, noise on losses of
    loss_noise * tau / 2 and on updates of update_noise * C, under "replace-one", which doubles both sensitivities.
    """
    return [SampledGaussian(loss_noise, 1.0, rounds + 1), SampledGaussian(update_noise, rate, rounds * steps)]


def paper_events() -> list[Unprotected]:
    """Mode `paper`: raw losses and raw updates, for which no finite epsilon holds."""
    return [Unprotected("losses and updates leave the client without noise")]


def _check(epsilon: float, clients: int, drawn: int) -> None:
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be non-negative and finite, got {epsilon!r}")
    if not 1 <= drawn <= clients:
        raise ValueError(f"drawn must lie between 1 and clients {clients}, got {drawn!r}")
