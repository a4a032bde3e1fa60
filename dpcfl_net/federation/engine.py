"""Training and evaluation of one model template, shared by the clients of a process."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot, RawSlot, SecureSlot, SelectionSlot, UnprotectedSlot

if TYPE_CHECKING:  # torch is imported only where something is computed
    from dpcfl_net.training.dpsgd import Evaluator, Trainer
    from dpcfl_net.training.sgd import PlainSGD

_last_engine: dict[str, Engine] = {}  # by hash of the protocol; that of the last one


class Engine:
    """Trainer, evaluator and plain SGD for one model template, built on first use; the clients of a process share one.

    It keeps nothing of a task but memory to compute in, whose values are written before they are read.

    Args:
        protocol: The signed protocol.

    Raises:
        ConfigError: If the model cannot be built here.
        Refused: "model" if its parameters differ from those of the signed job.
    """

    def __init__(self, protocol: Protocol) -> None:
        from dpcfl_net.training.models import layout

        self._template, self._local = protocol.model, protocol.local
        if layout(self.module()) != [[name, sides] for name, sides in self._template.layout]:
            raise Refused("model", f"the parameters of {self._template.name} here are not those that the signed job lays down")

    @classmethod
    def of(cls, protocol: Protocol) -> Engine:
        """Build the engine of a protocol, or return the last one if it has the same; args and errors as for the class."""
        key = digest(protocol)
        if key not in _last_engine:
            built = cls(protocol)
            _last_engine.clear()
            _last_engine[key] = built
        return _last_engine[key]

    def build(self, algorithm: ClientSide) -> None:
        """Build in advance what an algorithm's tasks use; forked processes share it.

        Args:
            algorithm: The job's algorithm.

        Raises:
            ConfigError: If the model cannot be trained.
        """
        plan = [slot for entry in algorithm.protocol.roster[:1] for slot in algorithm.plan(entry)]
        secure_by_sgd = algorithm.capabilities.plain_sgd
        if any(isinstance(slot, DPSGDSlot if secure_by_sgd else DPSGDSlot | SecureSlot) for slot in plan):
            _ = self.trainer
        raw = UnprotectedSlot | RawSlot | GaussianSlot
        if any(isinstance(slot, raw | SecureSlot if secure_by_sgd else raw) for slot in plan):
            _ = self.sgd
        if algorithm.capabilities.personal or any(isinstance(slot, SelectionSlot) for slot in plan):
            _ = self.evaluator
        if algorithm.capabilities.personal:
            _ = self.initial_model

    @cached_property
    def initial_model(self) -> np.ndarray:
        """The initial parameters of the protocol, theta_init, (p,) float32; not to be changed."""
        from dpcfl_net.training.models import initial_of

        return initial_of(self._template)

    @cached_property
    def trainer(self) -> Trainer:
        """DP-SGD."""
        from dpcfl_net.training.dpsgd import Trainer

        local = self._local
        # Tests cover the gradient engines of the package's models; the one of a plugin model is checked here.
        shape = self._input_shape if is_plugin(self._template.name) else None
        return Trainer(
            self.module(), clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size, task=self._template.task,
            input_shape=shape, precision=local.precision,
        )  # fmt: skip

    @cached_property
    def evaluator(self) -> Evaluator:
        """Accuracy, losses and counts."""
        from dpcfl_net.training.dpsgd import Evaluator

        return Evaluator(self.module(), self._template.task, self._input_shape)

    @cached_property
    def sgd(self) -> PlainSGD:
        """Plain SGD, for releases that a trusted server protects."""
        from dpcfl_net.training.sgd import PlainSGD

        how = self._local.model_dump(include={"epochs", "batch_size", "lr", "momentum", "weight_decay"})
        return PlainSGD(self.module(), **how, task=self._template.task, input_shape=self._input_shape)

    @property
    def _input_shape(self) -> tuple[int, ...]:
        return tuple(self._template.input_shape)

    def module(self, model: np.ndarray | None = None) -> Any:
        """Build the torch module with a copy of parameters, (p,) float32; None: with values that are written before they are read."""
        from dpcfl_net.training.models import module_of

        return module_of(self._template, model)
