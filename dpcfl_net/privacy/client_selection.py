"""Privacy cost of selecting clients by their losses (EM-FDRO), with p_i proportional to exp(epsilon L_i / (2 tau))."""

from __future__ import annotations

import math

from dpcfl_net.privacy.events.unprotected import Unprotected

MOST_EPSILON = 1000.0  # its weights are still finite


def draw_epsilon(epsilon: float, clients: int, drawn: int) -> float:
    """Compute pure epsilon of one draw without replacement (Gumbel top-m) if the loss of one client may change.

    All other losses, in [0, tau], and the models are given. The weight of the one client moves between 1 and r = e^(epsilon/2),
    the others' weights are at least 1. With n clients and m drawn:
    - client not drawn: each of the m steps had its total multiplied by at most (r + n - j) / (1 + n - j), j = 1..m;
    - client drawn: its own weight counts against that, at most log((1 + (n-1) r) / n), when it comes first and all others
      weigh r.
    The cost is the larger of the two, even if the order of the draws is published. If all clients are drawn, their set, which is
    all that a run publishes, costs 0.

    Args:
        epsilon: Parameter of the exponential mechanism, 0 to `MOST_EPSILON`.
        clients: Number of clients n.
        drawn: Number of clients drawn m, 1 to n.

    Returns:
        Epsilon of the draw. The paper's epsilon per round (Yan et al., Proposition 4.4) is that of a single client drawn.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check(epsilon, clients, drawn)
    if drawn == clients:
        return 0.0
    weight = math.exp(epsilon / 2)
    left_out = math.fsum(math.log((weight + clients - j) / (1 + clients - j)) for j in range(1, drawn + 1))
    return max(left_out, math.log((1 + (clients - 1) * weight) / clients))


def selection_epsilon(epsilon: float, clients: int, drawn: int, rounds: int) -> float:
    """Compute pure epsilon of the draws of all rounds, conditional on public models (mode `selection`).

    Args:
        epsilon: Parameter of the exponential mechanism, 0 to `MOST_EPSILON`.
        clients: Number of clients.
        drawn: Number of clients drawn in each round.
        rounds: Number of rounds, at least 0.

    Returns:
        `rounds` times `draw_epsilon`, by basic composition.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check(epsilon, clients, drawn, rounds)
    return rounds * draw_epsilon(epsilon, clients, drawn)


def unconditional_epsilon(epsilon: float, clients: int, drawn: int, rounds: int) -> float:
    """Compute pure epsilon of the draws of all rounds when a client's data also moves the models and all losses.

    Each single draw then costs epsilon (an exponential mechanism over the remaining clients), and there are drawn * rounds. The
    models themselves, without noise, are not covered.

    Args:
        epsilon: Parameter of the exponential mechanism, 0 to `MOST_EPSILON`.
        clients: Number of clients.
        drawn: Number of clients drawn in each round.
        rounds: Number of rounds, at least 0.

    Returns:
        epsilon * drawn * rounds.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check(epsilon, clients, drawn, rounds)
    return epsilon * drawn * rounds


def paper_events() -> list[Unprotected]:
    """Events of the published mode: raw losses and raw updates, for which no finite epsilon holds."""
    return [Unprotected("losses and updates leave the client without noise")]


def _check(epsilon: float, clients: int, drawn: int, rounds: int = 1) -> None:
    if not 0 <= epsilon <= MOST_EPSILON:
        raise ValueError(f"epsilon must be from 0 to {MOST_EPSILON:g}, got {epsilon!r}")
    if not rounds >= 0:
        raise ValueError(f"rounds must be non-negative, got {rounds!r}")
    if not 1 <= drawn <= clients:
        raise ValueError(f"drawn must lie between 1 and clients {clients}, got {drawn!r}")
