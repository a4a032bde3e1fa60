"""Graphs of masks: random regular graphs, the same on every machine, and their certificate.

A client masks its vector together with its neighbours, and the neighbours hold shares of its secrets. Where honest survivors fall
into two sets without an edge between them, the server learns both sums. The certificate excludes it for every choice of drop-outs
and of colluders. Let A be the adjacency matrix of a k-regular graph with n vertices, and r its largest absolute eigenvalue but k.

1. A set of x vertices, each with d neighbours in the set, has d <= k x / n + r (1 - x / n), so x >= n (d - r) / (k - r).
2. Two sets of x and y vertices without an edge between them have x y <= (r / k)^2 (n - x) (n - y).

Clients unmask only if each survivor has t surviving holders (it and its neighbours). At most C of them collude: each honest survivor
has d = t - 1 - C honest survivors as neighbours. Masks are bound to the list of present clients, and a majority of the witnesses
signs one such list: the masks of a client that was told another list, and those that its neighbours share with it, stay in every sum.
So a sum that the server can learn is over a set of honest survivors without an edge to the others. Both sides are at least as large
as (1) says, which (2) forbids: the set is all honest survivors.

Source: Bell et al. 2020 (graphs); Alon and Chung 1988, Haemers 1995 (1 and 2).
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=32)
def regular_graph(n: int, degree: int) -> np.ndarray:
    """Draw the random regular graph of secure sums.

    Args:
        n: Number of vertices.
        degree: Neighbours of each; `n * degree` is even, and `degree` is below `n`.

    Returns:
        (n, degree) int64, read-only: the neighbours of each vertex in ascending order, a function of the arguments alone.
    """
    if 2 * degree > n - 1:  # the complement of a sparser graph
        edges, joined = _edges(n, n - 1 - degree), ~np.eye(n, dtype=bool)
        joined[edges[:, 0], edges[:, 1]] = joined[edges[:, 1], edges[:, 0]] = False
        neighbours = np.nonzero(joined)[1].reshape(n, degree)
    else:  # without a matrix, which takes n^2 bytes
        edges = _edges(n, degree)
        both = np.concatenate((edges, edges[:, ::-1]))
        neighbours = both[np.lexsort((both[:, 1], both[:, 0])), 1].reshape(n, degree)
    neighbours.flags.writeable = False
    return neighbours


def eigenvalue(neighbours: np.ndarray) -> float:
    """Compute the largest absolute eigenvalue of a regular graph other than its degree.

    Args:
        neighbours: (n, degree), as `regular_graph` returns.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import LinearOperator, eigsh

    n, degree = neighbours.shape
    adjacency = csr_array((np.ones(n * degree), neighbours.reshape(-1), np.arange(0, n * degree + 1, degree)), (n, n))
    rest = LinearOperator((n, n), matvec=lambda v: adjacency @ v - degree * v.mean(), dtype=np.float64)
    start = np.sin(np.arange(1.0, n + 1))  # any vector; a fixed one, so that the result does not vary
    return float(abs(eigsh(rest, k=1, which="LM", v0=start, return_eigenvectors=False)[0]))


def cannot_split(n: int, degree: int, eigen: float, honest_neighbours: int) -> bool:
    """Return True if no two sets of vertices without an edge between them exist, for the sets that the module describes.

    Args:
        n: Number of vertices.
        degree: Neighbours of each.
        eigen: Largest absolute eigenvalue but the degree.
        honest_neighbours: Neighbours that each vertex of a set has in the set, at least.
    """
    if honest_neighbours < 1 or eigen >= degree:
        return False
    least = max(honest_neighbours + 1, math.ceil(n * (honest_neighbours - eigen) / (degree - eigen)))
    return 2 * least > n or least * degree > eigen * (n - least)


def _edges(n: int, degree: int) -> np.ndarray:
    """(n * degree / 2, 2): random cycles through all vertices, and a perfect matching for an odd degree; then switches."""
    words = _Words(n, degree)
    orders = [np.argsort(words.take(n), kind="stable") for _ in range((degree + 1) // 2)]
    edges = [np.stack((order, np.roll(order, -1)), axis=1) for order in orders[: degree // 2]]
    if degree % 2:
        edges.append(orders[-1].reshape(-1, 2))
    return _simple(np.concatenate(edges), n, words) if edges else np.zeros((0, 2), np.int64)


def _simple(edges: np.ndarray, n: int, words: _Words) -> np.ndarray:
    """Switch repeated edges with random ones until all differ."""
    low, high = edges.min(axis=1), edges.max(axis=1)
    codes = [int(code) for code in low * n + high]
    seen: set[int] = set()
    repeated = [at for at, code in enumerate(codes) if code in seen or seen.add(code)]  # type: ignore[func-returns-value]
    ends, waiting = edges.tolist(), set(repeated)
    for at in repeated:
        while True:
            other, turned = divmod(int(words.take(1)[0]) % (2 * len(ends)), 2)
            (a, b), (c, d) = ends[at], ends[other][::-1] if turned else ends[other]
            first, second = min(a, c) * n + max(a, c), min(b, d) * n + max(b, d)
            if other not in waiting and a != c and b != d and first != second and not {first, second} & seen:
                break
        seen.remove(codes[other])
        seen |= {first, second}
        ends[at], ends[other], codes[at], codes[other] = [a, c], [b, d], first, second
        waiting.remove(at)
    return np.array(ends, np.int64)


class _Words:
    """Random words from SHAKE-256: numpy's generators may change between versions, and all clients need one graph."""

    def __init__(self, n: int, degree: int) -> None:
        self._seed, self._block = f"dpcfl secure aggregation: graph {n} {degree}".encode(), 0
        self._left = np.zeros(0, "<u8")

    def take(self, count: int) -> np.ndarray:
        if len(self._left) < count:
            data = hashlib.shake_256(self._seed + b" %d" % self._block).digest(8 * max(count, 1 << 12))
            self._left, self._block = np.frombuffer(data, "<u8"), self._block + 1
        taken, self._left = self._left[:count], self._left[count:]
        return taken
