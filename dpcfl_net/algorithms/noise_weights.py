"""Weights of clients in a mean, by the known noise of their updates."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from dpcfl_net.algorithms.asynchronous_options import MayBeAsynchronous
from dpcfl_net.algorithms.base import full_epochs
from dpcfl_net.algorithms.buffered import Buffered
from dpcfl_net.core.frozen import once
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.federation.capabilities import Setting
from dpcfl_net.privacy.slots import given


class MayWeighByNoise(MayBeAsynchronous):
    """Options of an algorithm that can weigh clients by their noise."""

    added: ClassVar[tuple[str, ...]] = ("asynchronous", "weights")
    weights: Literal["noise"] | None = Field(
        default=None,
        description="noise: in a mean of updates each client has the inverse of its noise's variance as weight, for clients with "
        "unequal epsilon or records; null: all alike",
    )


class WeighedByNoise(Buffered):
    """Algorithm whose means may weigh clients by the known noise of their updates.

    The weights have the least noise in a mean, and follow the data of clients with more records or a larger epsilon.

    Source: Malekmohammadi, Yu, Cao, ICML 2024, for known variances; here they follow from the signed job.
    """

    Options = MayWeighByNoise

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems = super().problems(options, setting)
        if getattr(options, "weights", None) is None:
            return problems
        if options.asynchronous is not None:
            problems.append("algorithm.weights is 'noise': must be null with algorithm.asynchronous")
        if setting.privacy.secure:
            problems.append("algorithm.weights is 'noise': must be null with secure sums, in which all clients count alike")
        return problems

    @property
    def weights(self) -> dict[int, float] | None:
        """Weights of clients in a mean; None weighs all alike."""
        if getattr(self.options, "weights", None) is None:
            return None
        return once(self.protocol, "noise weights", self._noise_weights)

    def _noise_weights(self) -> dict[int, float]:
        variances = {entry.id: self.update_noise_variance(entry) for entry in self.protocol.roster}
        least = min(variances.values())
        return {client: least / variance for client, variance in variances.items()}

    def update_noise_variance(self, client: ClientEntry) -> float:
        """Compute the variance of the noise in a coordinate of a round's update, S (lr z c / b)^2 for S steps.

        Args:
            client: The client's roster entry.
        """
        local = self.protocol.local
        rate, steps, _ = full_epochs(local, client)
        return float(steps * (local.lr * given(client.noise_multiplier) * local.clip / (rate * client.records)) ** 2)
