"""A mechanism of a client step refuses models of another shape, which NumPy and torch would broadcast."""

from types import SimpleNamespace

import numpy as np
import pytest

from dpcfl_net.federation.client import Client
from dpcfl_net.federation.gate import Charge
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot, SelectionSlot, UnprotectedSlot
from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Evaluator
from dpcfl_net.training.sgd import PlainSGD
from tests.support.records import Images, small, start

MODEL = start()
P = len(MODEL)
SLOTS = {
    slot.name: slot
    for slot in (
        DPSGDSlot("train", 0.5, 1),
        SelectionSlot("select", 1.0),
        GaussianSlot("loss", doubles=False),
        UnprotectedSlot("raw", "unprotected"),
    )
}


@pytest.fixture(scope="module")
def engine():
    module = models.build("digits-cnn", (1, 8, 8), 10)
    return SimpleNamespace(
        trainer=small(),
        evaluator=Evaluator(module, input_shape=(1, 8, 8)),
        sgd=PlainSGD(models.build("digits-cnn", (1, 8, 8), 10), epochs=1, batch_size=8, lr=0.1, input_shape=(1, 8, 8)),
    )


@pytest.fixture
def me(engine):
    protocol = SimpleNamespace(
        privacy=SimpleNamespace(unit="sample", adjacency="zero-out"), model=SimpleNamespace(parameters=P)
    )
    data = Images(16)
    return Client(protocol, {}, engine, data, lambda: data, Charge(bytes(32), SLOTS, 1.0, "zero-out"))


ONE = {
    "dpsgd": lambda me, model: me.dpsgd("train", model),
    "dpsgd, centre": lambda me, model: me.dpsgd("train", MODEL, (0.1, model)),
    "noisy_loss": lambda me, model: me.noisy_loss("loss", model, 1.0),
    "validation_loss": lambda me, model: me.validation_loss("raw", model),
    "sgd": lambda me, model: me.sgd("raw", model),
    "sgd, centre": lambda me, model: me.sgd("raw", MODEL, proximal=(0.1, model)),
    "sgd, base": lambda me, model: me.sgd("raw", MODEL, base_model=model),
    "losses, base": lambda me, model: me.losses("raw", MODEL[None], model),
    "distances": lambda me, model: me.distances("raw", model, MODEL[None]),
    "evaluation, base": lambda me, model: me._engine.evaluator.each(MODEL, Images(4), model),
}
SEVERAL = {
    "select": lambda me, models: me.select("select", models),
    "losses": lambda me, models: me.losses("raw", models),
    "lowest_loss": lambda me, models: me.lowest_loss("raw", models),
    "distances": lambda me, models: me.distances("raw", MODEL, models),
}


@pytest.mark.parametrize("call", ONE.values(), ids=ONE)
@pytest.mark.parametrize("shape", [(), (1,), (1, P), (P + 1,), (P - 1,)], ids=str)
def test_one_model_has_a_number_for_each_parameter(me, call, shape):
    """Plain SGD started from one number in every parameter, and a loss ignored what lies behind the last parameter."""
    call(me, MODEL)
    with pytest.raises(ValueError, match=rf"has shape .*: must be \({P},\)"):
        call(me, np.zeros(shape, np.float32))


@pytest.mark.parametrize("call", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("shape", [(P,), (0, P), (2, 1), (2, P + 1), (2, 1, P)], ids=str)
def test_several_models_have_a_row_each(me, call, shape):
    """`lowest_loss` of one model, (p,), took each number for a model; `select` ignored what lies behind the last parameter."""
    call(me, np.stack([MODEL, MODEL]))
    with pytest.raises(ValueError, match=rf"models have shape .*: must be \(M, {P}\)"):
        call(me, np.zeros(shape, np.float32))
