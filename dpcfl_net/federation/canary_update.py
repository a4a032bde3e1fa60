"""A client that is a canary itself: its update is a known vector; gate, ledger, clipping, sampling and noise are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.client_host import ClientHost, Split
from dpcfl_net.federation.engine import Engine
from dpcfl_net.privacy.canaries import CanaryRecords
from dpcfl_net.privacy.ledger.ledger import Ledger


class CanaryUpdateHost(ClientHost):
    """A `ClientHost` that holds empty records, and whose training returns the model plus a known vector.

    Args:
        algorithm: The job's algorithm.
        client: Client id.
        ledger: The client's ledger.
        open_data: Opens the records of a split; used for all splits except "train".
        update: The vector, (p,) float64.
        noise_seed: Seed of the noise; None: noise of the operating system.
        identity: As for `ClientHost`.
    """

    def __init__(
        self, algorithm: ClientSide, client: int, ledger: Ledger, open_data: Callable[[Split], Any], update: np.ndarray,
        noise_seed: bytes | None, identity: bytes | None = None,
    ) -> None:  # fmt: skip
        protocol = algorithm.protocol

        def records(part: Split) -> Any:
            if part != "train":
                return open_data(part)
            return CanaryRecords(protocol.client(client).records, np.zeros(0, bool), tuple(protocol.model.input_shape))

        trained = KnownUpdate(update, client)
        super().__init__(algorithm, client, ledger, records, lambda: KnownUpdateEngine(protocol, trained), noise_seed, identity)


class KnownUpdate:
    """Stands in for `training.sgd.PlainSGD`: adds a known vector to any model, and prefers the same cluster in every round.

    Args:
        update: The vector, (p,) float64.
        client: Client id; the client prefers cluster `client` modulo the number of clusters.
    """

    def __init__(self, update: np.ndarray, client: int) -> None:
        self._update, self._client = update, client

    def train(self, theta: np.ndarray, data: Any, order: np.random.Generator, **how: Any) -> np.ndarray:
        """Return the model plus the vector, (p,) float32."""
        return np.asarray((theta + self._update).astype(np.float32))

    def mean_losses(self, models: np.ndarray, data: Any, base_model: np.ndarray | None = None) -> np.ndarray:
        """Return losses of which that of the client's cluster is the lowest, (M,) float64."""
        losses = np.ones(len(models))
        losses[self._client % len(models)] = 0
        return losses


class KnownUpdateEngine(Engine):
    """An `Engine` whose plain SGD is a `KnownUpdate`."""

    def __init__(self, protocol: Protocol, trained: KnownUpdate) -> None:
        super().__init__(protocol)
        self._trained = trained

    @property
    def sgd(self) -> Any:
        """The known update."""
        return self._trained
