"""Deep path: which networks it takes, exact gradients, and clip norms that hold for the sums really computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from real_models import CLASSES, TAKEN, Forward, resnet
from records import Images
from torch import nn
from torch.func import functional_call, grad, vmap

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy import clipping
from dpcfl_net.privacy.gram_clipping import PlaceSums
from dpcfl_net.training import models
from dpcfl_net.training.deep_layers import supported
from dpcfl_net.training.deep_path import DeepPath
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.training.models import flatten
from dpcfl_net.training.physical_batches import LARGEST
from dpcfl_net.training.sequences import CausalAttention, Codes

torch.set_num_threads(1)


def strided() -> nn.Module:
    """Strides, two groups, dilation, uneven padding, biases, kernels that see only padding, and few places."""
    return nn.Sequential(
        nn.Conv2d(3, 8, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), nn.ReLU(inplace=True), nn.GroupNorm(4, 8, eps=0.1),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2), nn.SiLU(), nn.Conv2d(16, 32, 3, padding=2, dilation=2),
        nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.GroupNorm(8, 64), nn.Tanh(),
        nn.Conv2d(64, 64, 5, padding=2), nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, CLASSES, bias=False),
    )  # fmt: skip


def features() -> nn.Module:
    """Sequences of features: layers with Gram norms, layers with rows, LayerNorm on sequences and vectors, attention."""
    wide = (
        nn.Linear(30, 240),
        nn.GELU(),
        nn.LayerNorm(240, eps=0.1),
        nn.Linear(240, 240, bias=False),
        CausalAttention(4),
        nn.Linear(80, 6),
    )
    return nn.Sequential(*wide, nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, CLASSES))


def parallel() -> nn.Module:
    """Two layers with Gram norms that read one input, and whose outputs have one gradient."""
    layers = nn.Linear(30, 240), nn.Linear(30, 240), nn.Linear(240, CLASSES)
    return Forward(lambda own, x: own.layers[2]((own.layers[0](x) + own.layers[1](x)).mean(1)), *layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "strided": (strided, (3, 10, 9)),
    "in place": (TAKEN["ResNet block, in place"].build, (3, 8, 8)),
    "torchvision ResNet-10": (lambda: resnet(1, 1, 1, 1), (3, 32, 32)),
    "resnet18": (lambda: models.build("resnet18", (3, 32, 32), CLASSES), (3, 32, 32)),
    "resnet18-cifar": (lambda: models.build("resnet18-cifar", (3, 8, 8), CLASSES), (3, 8, 8)),
    "features": (features, (12, 30)),
    "parallel": (parallel, (12, 30)),
    "char-transformer": (lambda: models.build("char-transformer", (20,), CLASSES), (20,)),
}
SLOW = [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("resnet18")) for name in CASES]


def case(name: str) -> tuple[nn.Module, Images, np.ndarray]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    module = make()
    data = Images(7, shape, CLASSES)
    if name == "char-transformer":
        # Whole numbers, of which many collide within a record, and some are no codes.
        data.x = torch.floor(data.x * 8) - 1
    return module, data, flatten(module)


def trainer(module: nn.Module, clip: float, batch_size: int = 2, path: str = "deep", data: Images | None = None) -> Trainer:
    shape = None if data is None else tuple(data.x.shape[1:])
    return Trainer(module, clip=clip, learning_rate=0.1, batch_size=batch_size, path=path, input_shape=shape)


def per_record(module: nn.Module, theta: np.ndarray, data: Images) -> torch.Tensor:
    """Reference: (n, p) float64 gradients by torch.func."""
    values, at = {}, 0
    for name, p in module.named_parameters():
        values[name] = torch.from_numpy(theta[at : at + p.numel()]).view_as(p).double()
        at += p.numel()

    def loss(q: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(module, q, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(values, data.x.double(), data.y)
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


def off(found: np.ndarray, expected: torch.Tensor) -> float:
    return float(np.linalg.norm(found - expected.numpy()) / expected.norm())


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_clipped_sums_equal_vmap_of_grad(name: str) -> None:
    module, data, theta = case(name)
    assert trainer(module, 1.0, path="auto", data=data).path == "deep"
    gradients = per_record(module, theta, data)
    rows, norms = np.arange(len(data)), gradients.norm(dim=1)
    clip = float(norms.median())
    for dtype, exact, inflated in ((np.float64, 1e-12, 5e-11), (np.float32, 1e-5, 1e-4)):
        free, ours = trainer(module, 1e9, data=data), trainer(module, clip, data=data)
        assert len(data) % ours.slots
        error = off(free.clipped_sum(theta.astype(dtype), data, rows), gradients.sum(0))
        expected = (effective(ours, theta.astype(dtype), data) / norms).clamp(max=1) @ gradients
        clipped = off(ours.clipped_sum(theta.astype(dtype), data, rows), expected)
        print(f"{name:22} {np.dtype(dtype).name}  sum {error:.1e}  clipped {clipped:.1e}")
        # Where clipping acts, norms are rounded up by the bound on their rounding.
        assert error < exact
        assert clipped < inflated


def effective(ours: Trainer, theta: np.ndarray, data: Images) -> float:
    """Norm to which `ours` clips."""
    _, parts = ours._engine.gradients(torch.from_numpy(theta), data.x, data.y)
    dtype = torch.from_numpy(theta).dtype
    shared = any(part.squared_rounding(ours.slots) is not None for part in parts)
    return clipping.reserved_clip(ours.clip, ours.slots, dtype) * (1 - clipping.rounding_share(dtype) * shared)


def mean_over_batch(self: Forward, x: torch.Tensor) -> torch.Tensor:
    return self.layers[0]((x - x.mean(0)).flatten(1))


def sharing() -> nn.Module:
    """Two layers with one weight, each called once."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[5].weight = module[3].weight
    return module


REFUSED = {
    "layers share a weight": sharing(),
    "a layer twice": Forward(lambda own, x: own.layers[1](torch.tanh(own.layers[0](torch.tanh(own.layers[0](x)))).flatten(1)),
                             nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, CLASSES)),
    "tied": Forward(lambda own, x: own.layers[0](x.flatten(1)) + F.linear(x.flatten(1), own.layers[0].weight), nn.Linear(192, 5)),
    "mean over the batch": Forward(mean_over_batch, nn.Linear(192, CLASSES)),
    "own parameter": Forward(lambda own, x: own.layers[0](x.flatten(1) * own.own[0]), nn.Linear(192, 5), nn.Parameter(torch.ones(1))),
    "unused layer": Forward(lambda own, x: own.layers[0](x.flatten(1)), nn.Linear(192, CLASSES), nn.Linear(2, 2)),
    "rows": nn.Sequential(nn.Linear(8, 4), nn.Flatten(), nn.Linear(96, CLASSES)),
    "images folded": Forward(lambda own, x: own.layers[0](x.flatten(0, 1)).unflatten(0, (-1, 3)).sum(1), nn.Linear(8, CLASSES)),
    "a branch": Forward(lambda own, x: own.layers[0](x.flatten(1) if x.sum() > 0 else -x.flatten(1)), nn.Linear(192, CLASSES)),
    "padded codes": nn.Sequential(Codes(5), nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(32, CLASSES)),
    "positions as records": Forward(lambda own, x: own.layers[0](x.mean(2).transpose(0, 1))[0], nn.Linear(8, CLASSES)),
    "norm of images": nn.Sequential(nn.LayerNorm(8), nn.Flatten(), nn.Linear(192, CLASSES)),
    "circular": nn.Sequential(nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(128, CLASSES)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_left_to_other_engines(name: str) -> None:
    with pytest.raises(ConfigError, match="the deep path takes Conv2d"):
        trainer(REFUSED[name], 1.0)
    assert Trainer(REFUSED[name], clip=1.0, learning_rate=0.1, batch_size=2).path != "deep"


def between(middle: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Sequences (n, 4, 6) through a layer, what is tested, and a layer that reads vectors."""
    return Forward(lambda own, x: own.layers[1](middle(own.layers[0](x))), nn.Linear(6, 6), nn.Linear(6, CLASSES))


def coded(**how: Any) -> nn.Module:
    return nn.Sequential(Codes(5), nn.Embedding(5, 6, **how), nn.Flatten(), nn.Linear(24, CLASSES))


APART: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mean of places": (between(lambda h: h.mean(1)), (4, 6)),
    "mean of places, function": (between(lambda h: torch.mean(F.gelu(h), 1)), (4, 6)),
    "first place": (between(lambda h: (h + h.relu())[:, 0]), (4, 6)),
    "product": (between(lambda h: (h * h)[:, -1]), (4, 6)),
    "codes": (coded(), (4,)),
    "convolution": (nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(128, CLASSES)), (3, 8, 8)),
}
NOT_APART: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "mean of records": (between(lambda h: h.mean(0)), (4, 6)),
    "mean of records and places": (between(lambda h: torch.mean(h, (0, 1))), (4, 6)),
    "mean of all": (between(lambda h: h.mean()), (4, 6)),
    "mean, other shape": (between(lambda h: h.mean(1, keepdim=True)), (4, 6)),
    "first record": (between(lambda h: h[0]), (4, 6)),
    "first record, all places": (between(lambda h: h[0, :]), (4, 6)),
    "records from the second on": (between(lambda h: h[1:, 0]), (4, 6)),
    "place by record": (between(lambda h: h[:, h]), (4, 6)),
    "places as batch": (between(lambda h: h[:, 1:].flatten(0, 1)), (4, 6)),
    "softmax over records": (between(lambda h: torch.softmax(h, 0)[:, 0]), (4, 6)),
    "cumulative sum over records": (between(lambda h: h.cumsum(0)[:, 0]), (4, 6)),
    "folded": (between(lambda h: h.flatten(0, 1)), (4, 6)),
    "folded, function": (between(lambda h: torch.flatten(h, 0, 1)), (4, 6)),
    "flat, with a name": (between(lambda h: torch.flatten(h, start_dim=0, end_dim=1)), (4, 6)),
    "each place with a record": (between(lambda h: (h + h[:, 0]).mean(1)), (4, 6)),  # if there are four of both
    "an output that is not used": (between(lambda h: (h[:, 0], torch.tanh(h))[0]), (4, 6)),
    "norm of several places": (nn.Sequential(nn.LayerNorm((4, 6)), nn.Flatten(), nn.Linear(24, CLASSES)), (4, 6)),
    "norm without bias": (nn.Sequential(nn.LayerNorm(6, bias=False), nn.Flatten(), nn.Linear(24, CLASSES)), (4, 6)),
    "codes weighed by the batch": (coded(scale_grad_by_freq=True), (4,)),
    "codes that change their table": (coded(max_norm=1.0), (4,)),
    "codes with sparse gradients": (coded(sparse=True), (4,)),
    "padding by name": (nn.Sequential(nn.Conv2d(3, 2, 3, padding="same"), nn.Flatten(), nn.Linear(128, CLASSES)), (3, 8, 8)),
    "input by name": (Forward(lambda own, x: own.layers[0](input=x), nn.Linear(6, CLASSES)), (6,)),
    "a tuple": (Forward(lambda own, x: (own.layers[0](x),), nn.Linear(6, CLASSES)), (6,)),
    "nothing to train": (nn.Sequential(nn.Flatten()), (4, 6)),
}


@pytest.mark.parametrize("name", APART | NOT_APART)
def test_only_operations_that_leave_records_apart_are_supported(name: str) -> None:
    """The check of a model would refuse one that mixes records, too, by trying it."""
    module, shape = (APART | NOT_APART)[name]
    assert supported(module, shape) == (name in APART)


def test_an_input_that_is_changed_after_a_layer_has_read_it_is_an_error() -> None:
    in_place = [True]
    module = Forward(lambda own, x: own.layers[1]((own.layers[0](x) + F.relu(x, inplace=in_place[0])).flatten(1)),
                     nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, CLASSES))  # fmt: skip
    theta, data, rows, ours = flatten(module), Images(2, (3, 8, 8), CLASSES), np.arange(2), trainer(module, 1.0)
    with pytest.raises(ConfigError, match="changed in place"):
        ours.clipped_sum(theta, data, rows)
    in_place[0] = False
    # Nothing is left of the gradients that were computed before the error.
    assert np.array_equal(ours.clipped_sum(theta, data, rows), trainer(module, 1.0).clipped_sum(theta, data, rows))


def test_a_batch_of_planes_is_not_read_as_the_channels_of_one_image() -> None:
    module = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, CLASSES))
    theta, x, y = torch.from_numpy(flatten(module)), torch.zeros(4, 8, 8), torch.zeros(4, dtype=torch.int64)
    assert module(x).shape == (4, CLASSES)
    with pytest.raises(ConfigError, match=r"takes a batch of records, but its input has the shape \(4, 8, 8\)"):
        DeepPath(module).gradients(theta, x, y)


@pytest.mark.parametrize("name", ["strided", "in place", "torchvision ResNet-10", "features"])
def test_padding_and_removed_records_count_for_nothing(name: str) -> None:
    module, data, theta = case(name)
    ours = trainer(module, 0.5, batch_size=5, data=data)
    assert not ours.clipped_sum(theta, data, np.array([], int)).any()
    control, fixed = (ours.clipped_sum(theta, data, np.array([0, 1, 2, 3]), room) for room in (None, 8))
    for bad in (torch.nan, torch.inf, 3e38):
        data.x[5] = bad
        assert np.array_equal(ours.clipped_sum(theta, data, np.array([0, 1, 2, 3, 5]), 8), fixed)
        # Sums over batches of other sizes may be added in another order, as on processors of Intel.
        for rows in ([0, 1, 2, 3, 5], [0, 1, 5, 2, 3]):
            found = ours.clipped_sum(theta, data, np.array(rows))
            assert np.linalg.norm(found - control) < 1e-5 * np.linalg.norm(control)


@pytest.mark.parametrize("scale", [1.0, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (1e3, 1e8)), 1e20])
@pytest.mark.parametrize("name", ["strided", "torchvision ResNet-10", "features"])
def test_no_record_counts_for_more_than_clip(name: str, scale: float) -> None:
    module, data, theta = case(name)
    ours, clip = trainer(module, 0.3, batch_size=5, data=data), 0.3
    theta[-sum(p.numel() for p in list(module.parameters())[-2:]) :] *= scale
    rows = np.arange(len(data))
    whole = ours.clipped_sum(theta, data, rows[:5])
    for row in rows[:5]:
        alone = np.linalg.norm(ours.clipped_sum(theta, data, np.array([row])))
        assert alone <= clip
        assert scale > 1e3 or alone == 0 or alone > 0.98 * clip
        without = Images(7, tuple(data.x.shape[1:]), CLASSES)
        without.x[row] = torch.nan
        assert np.linalg.norm(whole - ours.clipped_sum(theta, without, rows[:5])) <= clip


def sums(slots: int, places: int, cancel: float, seed: int = 0) -> PlaceSums:
    """Random factors; with `cancel`, huge inputs whose products nearly cancel."""
    draw = torch.Generator().manual_seed(seed)
    signals, inputs = (torch.randn(slots, places, wide, generator=draw) for wide in (24, 40))
    if cancel and places > 1:
        signals -= signals.mean(1, keepdim=True)
        inputs = cancel + inputs
    return PlaceSums(signals.contiguous(), inputs.contiguous(), 0, (24, 40), (slice(None),))


@pytest.mark.parametrize("cancel", [0.0, 1e3, 1e6, 1e10])
@pytest.mark.parametrize(("slots", "places"), [(1, 1), (5, 4), (38, 16), (42, 32)])
def test_norms_bound_those_of_what_is_summed(slots: int, places: int, cancel: float) -> None:
    part = sums(slots, places, cancel)
    each = torch.bmm(part.signals.double().transpose(1, 2), part.inputs.double())
    exact, bound = each.square().sum((1, 2)), part.squared_norms()
    assert (bound >= exact).all()
    if cancel <= 1e3:
        assert (bound <= exact * (1 + 1e-5)).all()
    # The clipped sum differs from the exact one by less than the part of clip that `squared_rounding` is charged for.
    clip, usable = 1.0, torch.ones(slots, dtype=torch.bool)
    found = clipping.clipped_sum([part], usable, clip, torch.empty(24 * 40)).double()
    target = clipping.reserved_clip(clip, slots, torch.float32)
    share = clipping.rounding_share(torch.float32)
    norms = torch.maximum(bound.sqrt() / (1 - share), sums(slots, places, cancel).squared_rounding(slots).sqrt() / share)
    factors = (target / norms).clamp(max=1).float().double()
    assert torch.linalg.vector_norm(found - (factors @ each.flatten(1))) <= share * clip / 2
    assert (factors * exact.sqrt() <= (1 - share) * clip).all()


@pytest.mark.parametrize("cancel", [0.0, 1e4, 1e10])
def test_crafted_cancellation_does_not_pass_the_clip(cancel: float) -> None:
    for seed in range(20):
        found = []
        for drop in (False, True):
            usable = torch.ones(8, dtype=torch.bool)
            usable[3] = not drop
            found.append(clipping.clipped_sum([sums(8, 16, cancel, seed)], usable, 1.0, torch.empty(960)).double())
        assert torch.linalg.vector_norm(found[0] - found[1]) <= 1.0
        assert cancel or torch.linalg.vector_norm(found[0] - found[1]) > 0.98


def test_rounding_takes_no_more_than_its_share_of_a_full_batch() -> None:
    make, shape = CASES["torchvision ResNet-10"]
    torch.manual_seed(0)
    module = make()
    ours, data = trainer(module, 1.0, batch_size=67), Images(80, shape, CLASSES)
    assert ours.slots == LARGEST
    _, parts = ours._engine.gradients(torch.from_numpy(flatten(module)), data.x, data.y)
    norms = torch.stack([part.squared_norms() for part in parts]).sum(0).sqrt()
    rounding = torch.stack([more for part in parts if (more := part.squared_rounding(ours.slots)) is not None]).sum(0).sqrt()
    assert (rounding < clipping.rounding_share(torch.float32) * norms / 2).all()


def test_factors_too_large_for_the_proof_are_removed() -> None:
    part = sums(4, 4, 0.0)
    part = PlaceSums(
        part.signals, part.inputs * torch.tensor([1.0, 1e30, 1.0, 1.0])[:, None, None], 0, (24, 40), (slice(None),)
    )
    assert torch.isinf(part.squared_norms()).tolist() == [False, True, False, False]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    module, data, theta = case("torchvision ResNet-10")
    ours = trainer(module, 1.0, batch_size=3)
    x, y = data.batch(np.arange(len(data)), ours.slots)
    other = torch.full_like(x, torch.inf)
    other[2] = x[2]
    (logits, parts), (others, mixed) = (ours._engine.gradients(torch.from_numpy(theta), each, y) for each in (x, other))
    assert torch.equal(logits[2], others[2])
    for a, b in zip(parts, mixed, strict=True):
        assert torch.equal(a.squared_norms()[2], b.squared_norms()[2])
        assert torch.equal(a.gradient(2)[1], b.gradient(2)[1])
