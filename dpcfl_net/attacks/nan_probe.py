"""A server that sends weights crafted towards one record, as algorithms: to clients as they are, and to clients that clip as Opacus does."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.base import MODEL, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import DPSGDSlot, Slot, UnprotectedSlot

if TYPE_CHECKING:
    import torch

KNOWN = 256  # public records that the server has besides: the first of the test set
AS_OPACUS = (
    "clipping as Opacus 1.6 does it: under crafted weights an update is not finite exactly if a chosen record is in the batch"
)


class NanProbe(Global):
    """Global, but for the server: every round all clients get weights under which the loss of one record is not a number.

    The clients' half and the plan are those of Global. Run as `algorithm.name: dpcfl_net.attacks.nan_probe:NanProbe`.
    """

    name = "nan-probe"
    paper = "an attack, not an algorithm: docs/threat-model.md, the NaN oracle"

    class Options(base.Options):
        """What the server knows."""

        dataset: str = Field(default="digits", description="where the record comes from, of which the server has the test part")
        row: int = Field(default=0, ge=0, description="the record's row in the training part")

    @classmethod
    def problems(cls, options: Any, setting: base.Setting) -> list[str]:
        try:
            known(options.dataset, options.row)
        except ConfigError as error:
            return [f"algorithm.row is {options.row}, of {options.dataset}: {problem}" for problem in error.problems]
        return []

    def start(self, fed: Federation) -> State:
        from dpcfl_net.attacks.crafting import overflowing
        from dpcfl_net.training import models

        template, (record, others) = self.protocol.model, known(self.options.dataset, self.options.row)
        module = models.build(template.name, tuple(template.input_shape), template.classes)
        return State(overflowing(module, fed.initial_model(), record, others)[None], [0] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        fed.call(self.train, common={"model": state.models[0]})
        return state


class NanProbeOnOpacus(NanProbe):
    """The same server with clients that train by Opacus: same batches, same noise multiplier, its clipping, its noise.

    No guarantee holds: every client's plan says so, so that the signed job, the statement and the report do.
    """

    name = "nan-probe-on-opacus"

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [*super().plan(client), *[UnprotectedSlot("clipping", AS_OPACUS)] * self.protocol.rounds]

    @on_client(bundle=["train", "clipping"], takes={"model": MODEL}, gives={"update": MODEL})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """One round by Opacus. It reaches around `me`, which has no way to the records without the defence."""
        slot = me._charge.slots["train"]
        assert isinstance(slot, DPSGDSlot)
        me._without_guarantee("clipping")
        me.ran.append(slot.event(me._charge.noise_multiplier))
        key, local = derive(me._charge.key, "slot", "train"), self.protocol.local
        trained = train_by_opacus(me._engine._module(), model, me._data, slot, me._charge.z, key, clip=local.clip, lr=local.lr)
        return Release(update=trained - model)


def known(dataset: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The record (1, ...) and KNOWN public ones (n, ...), as models are fed; ConfigError for a row that is not there."""
    from dpcfl_net.data import datasets
    from dpcfl_net.data.records import ClientData

    images = datasets.load(dataset)
    others = np.arange(min(KNOWN, images.sizes[1]))
    record, _ = ClientData(images, "train", np.array([row])).batch(np.array([0]), 1)
    return record, ClientData(images, "test", others).batch(others, len(others))[0]


def train_by_opacus(
    module: Any, theta: np.ndarray, data: Any, slot: DPSGDSlot, noise_multiplier: float, key: bytes, *, clip: float, lr: float
) -> np.ndarray:
    """What `Trainer.train` does, by Opacus' GradSampleModule and DPOptimizer: (p,) float32; the batches are the same ones."""
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    from dpcfl_net.training.dpsgd import flatten, poisson_rows
    from dpcfl_net.training.plain_path import fill

    module = copy.deepcopy(module).train()
    fill(list(module.parameters()), torch.from_numpy(theta.copy()))
    wrapped = GradSampleModule(module)
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr), noise_multiplier=noise_multiplier, max_grad_norm=clip,
        expected_batch_size=slot.rate * len(data),
        generator=torch.Generator().manual_seed(int.from_bytes(derive(key, "opacus")[:7], "big")),
    )  # fmt: skip
    batches = stream(key, "batches")
    for _ in range(slot.steps):
        rows = poisson_rows(len(data), slot.rate, batches)
        x, y = data.batch(rows, len(rows))
        optimizer.zero_grad()
        with warnings.catch_warnings():
            # The first layer's input needs no gradient, which torch remarks on at every batch.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return flatten(module)
