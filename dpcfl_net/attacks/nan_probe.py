"""Algorithms whose server sends weights crafted for one record: with usual clients, and with clients that clip like Opacus."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.base import MODEL, UPDATE, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import DPSGDSlot, Slot, UnprotectedSlot

if TYPE_CHECKING:
    import torch

KNOWN = 256  # public records that the server also has: the first of the test set
AS_OPACUS = (
    "clipping as Opacus 1.6 does it: under crafted weights an update is not finite exactly if a chosen record is in the batch"
)


class NanProbe(Global):
    """As Global, but in every round all clients get weights under which the loss of one record is NaN.

    Client step and plan are those of Global. Run as `algorithm.name: dpcfl_net.attacks.nan_probe:NanProbe`.
    """

    name = "nan-probe"
    paper = "an attack, not an algorithm: docs/how-to/attacks.md, the NaN oracle"

    class Options(base.Options):
        """The record that the server knows."""

        dataset: str = Field(default="digits", description="data set of the record; the server has its test part")
        row: int = Field(default=0, ge=0, description="the record's row in the training part")

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
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
    """NanProbe with clients that train by Opacus: same batches and noise multiplier, Opacus' clipping and noise.

    No guarantee holds. Every client's plan declares this, and so do the signed job, the statement and the report.
    """

    name = "nan-probe-on-opacus"

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [*super().plan(client), *[UnprotectedSlot("clipping", AS_OPACUS)] * self.protocol.rounds]

    @on_client(charges=["train", "clipping"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """One round by Opacus; uses private members of `me`, whose public methods all defend the records."""
        slot = me._charge.slots["train"]
        assert isinstance(slot, DPSGDSlot)
        me._without_guarantee("clipping")
        me.ran.append(slot.event(me._charge.noise_multiplier))
        key, local = derive(me._charge.key, "slot", "train"), self.protocol.local
        trained = train_by_opacus(me._engine.module(), model, me._data, slot, me._charge.z, key, clip=local.clip, lr=local.lr)
        return Release(update=trained - model)


def known(dataset: str, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the known record and the public records.

    Args:
        dataset: Name of the data set.
        row: Row of the record in the training part.

    Returns:
        Model inputs: the record, (1, *input shape), and at most KNOWN test records, (n, *input shape).

    Raises:
        ConfigError: If the row does not exist.
        DataMissing: If the data set is not available.
    """
    from dpcfl_net.data import datasets
    from dpcfl_net.data.records import ClientData

    images = datasets.load(dataset)
    others = np.arange(min(KNOWN, images.sizes[1]))
    record, _ = ClientData(images, "train", np.array([row])).batch(np.array([0]), 1)
    return record, ClientData(images, "test", others).batch(others, len(others))[0]


def train_by_opacus(
    module: Any, theta: np.ndarray, data: Any, slot: DPSGDSlot, noise_multiplier: float, key: bytes, *, clip: float, lr: float
) -> np.ndarray:
    """Train like `Trainer.train`, on the same batches, with Opacus' GradSampleModule and DPOptimizer.

    Args:
        module: Model; copied.
        theta: Initial parameters, (p,).
        data: The client's records.
        slot: Sampling rate and number of steps.
        noise_multiplier: Noise over the clip norm.
        key: Key of the task, from which batches and noise are drawn.
        clip: Clip norm.
        lr: Learning rate.

    Returns:
        Trained parameters, (p,) float32.
    """
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    from dpcfl_net.training.batches import drawn_rows
    from dpcfl_net.training.models import flatten
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
    for rows in drawn_rows(len(data), slot, batches):
        x, y = data.batch(rows, len(rows))
        optimizer.zero_grad()
        with warnings.catch_warnings():
            # torch warns at every batch that the first layer's input needs no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            torch.nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return flatten(module)
