"""Natural partition: the records name the clients that own them, so that clients differ in size and in kind."""

from __future__ import annotations

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.quantity import held_back
from dpcfl_net.data.skew import Share


def encoded(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the clients of two columns from 0 on, in the order of their names.

    Args:
        train: Client of each training record, (N,) whole numbers or text.
        test: Client of each test record, (M,).

    Returns:
        int32 (N,) and (M,); the names are dropped.
    """
    _, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    return numbers[: len(train)].astype(np.int32), numbers[len(train) :].astype(np.int32)


def as_text(client: np.ndarray) -> np.ndarray:
    """Convert Python strings, as pandas keeps a column of text, to an array of text; any other array stays.

    Args:
        client: Client of each record, (N,).
    """
    if client.dtype.kind == "O" and all(isinstance(name, str) for name in client.flat):
        return client.astype(str)
    return client


def names(train: np.ndarray, test: np.ndarray) -> list[str]:
    """List the clients of two columns in the order in which `encoded` numbers them.

    Args:
        train: Client of each training record, (N,) whole numbers or text.
        test: Client of each test record, (M,).
    """
    found = np.unique(np.concatenate([train, test]))
    return [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in found.tolist()]


def unnamed(client: np.ndarray) -> str | None:
    """Say which records have an empty name of their client: a missing value, which would be one large client.

    Args:
        client: Client of each record, (N,) whole numbers or text.
    """
    empty = np.flatnonzero(np.char.str_len(client) == 0) if client.dtype.kind in "US" else client[:0]
    if not len(empty):
        return None
    return f"{len(empty)} of {len(client)} records have an empty name of their client, the first is record {empty[0]}, counted from 0"


def for_test(client: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Choose the test records of records without a test set, at random: of each client this fraction.

    A client with two records or more keeps at least one of each kind; a single record is for training.

    Args:
        client: Client of each record, int32 (N,); all zero without a client column.
        fraction: Fraction of a client's records.
        seed: Seed of the choice.

    Returns:
        bool (N,), True for test records.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    chosen = np.zeros(len(client), bool)
    for rows in _by_client(client, int(client.max(initial=-1)) + 1):
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        chosen[rng.permutation(rows)[:count]] = True
    return chosen


def shares(
    owners: tuple[np.ndarray, np.ndarray],
    count: int,
    least: int | None,
    most: tuple[int | None, int | None],
    validation: float,
    rng: np.random.Generator,
    withheld: np.ndarray | None = None,
) -> list[Share]:
    """Draw clients, and their training, validation and test rows.

    Args:
        owners: Client of each training and test record, int32 (N,) and (M,).
        count: Number of clients.
        least: Clients with fewer training records are left out; None: none.
        most: Most training and test records of a client, drawn at random; None: all.
        validation: Fraction of a client's training records that is set aside.
        rng: Source of all draws.
        withheld: True for test rows that no client gets, bool (M,); None: none.

    Returns:
        Rows of each client, int64: (training, validation, test).

    Raises:
        ConfigError: If there are too few clients with enough records.
    """
    number = 1 + max(int(column.max(initial=-1)) for column in owners)
    train, test = (_by_client(column, number) for column in owners)
    wanted = least or 1
    kept = test if withheld is None else [rows[~withheld[rows]] for rows in test]
    fit = np.array([k for k in range(number) if len(train[k]) >= wanted and len(kept[k])], np.int64)
    if count > len(fit):
        raise ConfigError(
            f"data.clients: {count} clients are requested, the records name {number}, of which {len(fit)} have "
            f"{wanted} training and 1 test record or more"
        )
    found = []
    for client in rng.permutation(fit)[:count]:
        rows, tests = rng.permutation(train[client])[: most[0]], rng.permutation(test[client])
        if withheld is not None:  # after the draw, so that training records do not depend on it
            tests = tests[~withheld[tests]]
        cut = len(rows) - held_back(validation, len(rows))
        found.append((rows[:cut], rows[cut:], tests[: most[1]]))
    return found


def _by_client(client: np.ndarray, number: int) -> list[np.ndarray]:
    """Rows of each client, int64."""
    order = np.argsort(client, kind="stable")
    return np.split(order, np.cumsum(np.bincount(client, minlength=number))[:-1]) if number else []
