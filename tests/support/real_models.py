"""Realistic models for `test_real_models.py`: supported ones with their engine, refused ones with the advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.core.vision import torchvision

CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A model and the expected result: its engine, or words of the refusal."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    path: str | None = None
    words: tuple[str, ...] = ()
    slow: bool = False


class Forward(nn.Module):
    """A network whose forward is the given function of its layers and the batch."""

    def __init__(self, forward: Callable, *layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))
        self.own = nn.ParameterList(layer for layer in layers if isinstance(layer, nn.Parameter))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, channels), channels)


def without_batch_norm(module: nn.Module) -> nn.Module:
    """The module with GroupNorm where torchvision offers no `norm_layer`."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, group_norm(child.num_features))
        else:
            without_batch_norm(child)
    return module


def zoo() -> object:
    return torchvision().models


def resnet(*blocks: int) -> nn.Module:
    models = zoo()
    return models.ResNet(models.resnet.BasicBlock, list(blocks), num_classes=CLASSES, norm_layer=group_norm)


def vit(dropout: float = 0.0) -> nn.Module:
    return zoo().VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES, dropout=dropout
    )


def convnext(depth: float = 0.0) -> nn.Module:
    models = zoo()
    blocks = [models.convnext.CNBlockConfig(16, 32, 2), models.convnext.CNBlockConfig(32, None, 2)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=depth, num_classes=CLASSES)


class Residual(nn.Module):
    """A block as torchvision writes them: rectifiers in place, the sum in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), group_norm(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), group_norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


def images(*middle: nn.Module, channels: int = 8) -> nn.Module:
    """Images (3, 8, 8) through a convolution, the tested layers, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), *middle, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, CLASSES)
    )


def recurrent(layer: nn.Module) -> nn.Module:
    return Forward(lambda self, x: self.layers[1](self.layers[0](x)[0][:, -1]), layer, nn.Linear(12, CLASSES))


def dp(name: str) -> nn.Module:
    from opacus import layers

    return recurrent(getattr(layers, name)(6, 12, batch_first=True))


def attention(layer: nn.Module) -> nn.Module:
    return Forward(lambda self, x: self.layers[1](self.layers[0](x, x, x)[0].mean(1)), layer, nn.Linear(8, CLASSES))


def dp_attention() -> nn.Module:
    from opacus.layers import DPMultiheadAttention

    return attention(DPMultiheadAttention(8, 2, batch_first=True))


def encoder(batch_first: bool, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        x = x if batch_first else x.transpose(0, 1)
        return self.layers[1](self.layers[0](x).mean(1 if batch_first else 0))

    return Forward(forward, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, CLASSES))


def keeping() -> nn.Module:
    """Handwritten attention that stores its weights as an attribute."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        query, key, head = self.layers
        self.seen = (query(x) @ key(x).transpose(1, 2)).softmax(2)
        return head((self.seen @ x).mean(1))

    return Forward(forward, nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, CLASSES))


def tied() -> nn.Module:
    """An autoencoder's code as features; the decoder is the encoder transposed."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        code = torch.tanh(self.layers[0](x))
        return self.layers[1](torch.cat([code, F.linear(code, self.layers[0].weight.t()) - x], 1))

    return Forward(forward, nn.Linear(12, 4), nn.Linear(16, CLASSES))


def text_cnn() -> nn.Module:
    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](torch.relu(self.layers[1](self.layers[0](x.long()).transpose(1, 2))).amax(2))

    return Forward(forward, nn.Embedding(50, 8, padding_idx=0), nn.Conv1d(8, 16, 3), nn.Linear(16, CLASSES))


def bag() -> nn.Module:
    bag = nn.EmbeddingBag(50, 8, mode="mean")
    return Forward(lambda self, x: self.layers[1](self.layers[0](x.long())), bag, nn.Linear(8, CLASSES))


def by_frame() -> nn.Module:
    """Frames (t, channels, height, width) folded into the batch, one convolution for all."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        frames = torch.relu(self.layers[0](x.flatten(0, 1)))
        return self.layers[1](frames.mean((2, 3)).unflatten(0, x.shape[:2]).mean(1))

    return Forward(forward, nn.Conv2d(1, 8, 3), nn.Linear(8, CLASSES))


def functional_dropout() -> nn.Module:
    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](F.dropout(torch.relu(self.layers[0](x)), 0.5, self.training))

    return Forward(forward, nn.Linear(12, 8), nn.Linear(8, CLASSES))


def mixer() -> nn.Module:
    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[1](self.layers[0](x).transpose(1, 2)).transpose(1, 2)
        return self.layers[3]((x + F.gelu(self.layers[2](x)) * self.own[0]).mean(1))

    layers = nn.LayerNorm(8), nn.Linear(6, 6), nn.Linear(8, 8), nn.Linear(8, CLASSES)
    return Forward(forward, *layers, nn.Parameter(torch.full((8,), 1e-6)))


def zeroed(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


# Models in which a record moves the gradient of another as soon as parameters that start at zero have moved


def gained() -> nn.Module:
    """head(x + gain(relu(a(x)) - its batch mean)), gain and head from zero."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        a, gain, head = self.layers
        h = torch.relu(a(x))
        return head(x + gain(h - h.mean(0)))

    return Forward(forward, nn.Linear(12, 8), zeroed(nn.Linear(8, 12)), zeroed(nn.Linear(12, CLASSES)))


class LayerScale(nn.Module):
    """A factor for each feature, which starts at `start`."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def mixing(mixed: Callable[[torch.Tensor], torch.Tensor], start: float = 0.0, width: int = 12) -> nn.Module:
    """A classifier of x + scale * mixed(hidden); the scale starts at `start`, the last layer at zero."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        hidden, scale, head = self.layers
        return head(x + scale(mixed(torch.tanh(hidden(x)))))

    return Forward(forward, nn.Linear(12, 12), LayerScale(width, start), zeroed(nn.Linear(12, CLASSES)))


class RunningMean(nn.Module):
    """Centres its input by a running mean, stored as a buffer or as a plain attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(12, CLASSES)
        if buffer:
            self.register_buffer("seen", torch.zeros(12))
        else:
            self.seen = torch.zeros(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0).detach()
        return self.linear(x - self.seen)


def cut_to_the_longest() -> nn.Module:
    """The mean over the places of a sequence that is padded with zeros and cut to the batch's longest record."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        longest = max(1, int((x != 0).sum(1).max()))
        return self.layers[1](torch.relu(self.layers[0](x[:, :longest, None])).mean(1))

    return Forward(forward, nn.Linear(1, 8), nn.Linear(8, CLASSES))


def packed() -> nn.Module:
    """An LSTM of Opacus on a packed sequence, whose per-record gradients lie in the order of the lengths."""
    from opacus.layers import DPLSTM
    from torch.nn.utils.rnn import pack_padded_sequence

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        sequence = pack_padded_sequence(x[:, :, None], lengths, batch_first=True, enforce_sorted=False)
        return self.layers[1](self.layers[0](sequence)[1][0][-1])

    return Forward(forward, DPLSTM(1, 6, batch_first=True), nn.Linear(6, CLASSES))


def padded_encoder(nested: bool) -> nn.Module:
    """The mean over all places of a TransformerEncoder. Nested, it gives zeros for padding if no record has padding inside."""

    def forward(self: Forward, x: torch.Tensor) -> torch.Tensor:
        codes = x.nan_to_num().long().clamp(0, 19)
        padding = (codes == 0) & (torch.arange(x.shape[1]) > 0)
        return self.layers[2](self.layers[1](self.layers[0](codes), src_key_padding_mask=padding).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Forward(
        forward, nn.Embedding(20, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested), nn.Linear(8, CLASSES)
    )


MIXED = ("change with the other records of its batch",)
KEY = ("draws from torch's generator",)
ATTACKS = {
    "gain and head from zero": Case(gained, (12,), words=MIXED),
    "batch mean behind LayerScale 0": Case(lambda: mixing(lambda h: h - h.mean(0)), (12,), words=MIXED),
    "batch mean behind LayerScale 1e-6": Case(lambda: mixing(lambda h: h.mean(0), 1e-6), (12,), words=MIXED),
    "batch mean behind one gate": Case(lambda: mixing(lambda h: h.mean(0), 0.0, 1), (12,), words=MIXED),
    "batch mean behind relu(gate)": Case(
        lambda: Forward(
            lambda self, x: self.layers[0](x + torch.relu(self.own[0]) * x.mean(0)),
            nn.Linear(12, CLASSES), nn.Parameter(torch.tensor(0.0)),
        ), (12,), words=MIXED,
    ),
    "x.mean(0)": Case(lambda: Forward(lambda self, x: self.layers[0](x - x.mean(0)), nn.Linear(12, CLASSES)), (12,), words=MIXED),
    "cumulative sum along the batch": Case(lambda: mixing(lambda h: h.cumsum(0)), (12,), words=MIXED),
    "the record before": Case(lambda: mixing(lambda h: h.roll(1, 0)), (12,), words=MIXED),
    "softmax over the batch": Case(lambda: mixing(lambda h: h.softmax(0)), (12,), words=MIXED),
    "mean over large batches only": Case(lambda: mixing(lambda h: h.mean(0) * (len(h) > 20)), (12,), words=MIXED),
    "mean in the gradient alone": Case(
        lambda: mixing(lambda h: h + h.mean(0) - h.mean(0).detach()), (12,), words=("gradient changes with the other records",)
    ),
    "sequences cut to the longest": Case(cut_to_the_longest, (12,), words=MIXED),
    "padding in evaluation": Case(lambda: padded_encoder(True), (9,), words=(*MIXED, "enable_nested_tensor=False")),
    "running mean in a buffer": Case(lambda: RunningMean(True), (12,), words=("keeps buffers", "inside forward")),
    "running mean in an attribute": Case(lambda: RunningMean(False), (12,), words=("a second time",)),
}  # fmt: skip

TAKEN = {
    "MLP on a table": Case(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, CLASSES)), (12,), "fast"),
    "CNN, fast layers": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, CLASSES)), (3, 8, 8), "fast"
    ),
    "MLP on a sequence (rank 3)": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Flatten(), nn.Linear(80, CLASSES)), (10, 6), "deep"
    ),
    "MLP on images (rank 4)": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(192, CLASSES)), (3, 8, 8), "opacus"
    ),
    "Conv1d net": Case(
        lambda: nn.Sequential(nn.Conv1d(6, 8, 3), nn.GELU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(16, CLASSES)),
        (6, 20), "opacus",
    ),
    "Conv3d net": Case(
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
        (1, 6, 6, 6), "opacus",
    ),
    "MLP-Mixer with LayerScale": Case(mixer, (6, 8), "vmap"),
    "text CNN, padding_idx": Case(text_cnn, (15,), "vmap"),
    "DPLSTM": Case(lambda: dp("DPLSTM"), (7, 6), "opacus"),
    "DPGRU": Case(lambda: dp("DPGRU"), (7, 6), "opacus"),
    "DPMultiheadAttention": Case(dp_attention, (7, 8), "opacus"),
    "MultiheadAttention": Case(lambda: attention(nn.MultiheadAttention(8, 2, batch_first=True)), (7, 8), "vmap"),
    "TransformerEncoder": Case(lambda: encoder(True), (7, 8), "vmap"),
    "TransformerEncoder, padding": Case(lambda: padded_encoder(False), (9,), "vmap"),
    "TransformerEncoder, batch second": Case(lambda: encoder(False), (7, 8), "vmap"),
    "EmbeddingBag text": Case(bag, (15,), "vmap"),
    "attention map kept": Case(keeping, (7, 8), "opacus"),
    "tied autoencoder classifier": Case(tied, (12,), "vmap"),
    "frames folded into the batch": Case(by_frame, (4, 1, 6, 6), "vmap"),
    "ResNet block, in place": Case(lambda: images(Residual(8)), (3, 8, 8), "deep"),
    "circular padding": Case(lambda: images(nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")), (3, 8, 8), "vmap"),
    "reflect padding": Case(lambda: images(nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")), (3, 8, 8), "vmap"),
    "LayerNorm, GroupNorm": Case(lambda: images(nn.GroupNorm(2, 8), nn.LayerNorm((8, 8))), (3, 8, 8), "opacus"),
    "InstanceNorm": Case(lambda: images(nn.InstanceNorm2d(8, affine=True)), (3, 8, 8), "opacus"),
    "ConvTranspose2d, PReLU": Case(lambda: images(nn.ConvTranspose2d(8, 8, 2, 2), nn.PReLU(8)), (3, 8, 8), "opacus"),
    "weight norm": Case(lambda: images(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))), (3, 8, 8), "opacus"),
    "torchvision ResNet-10": Case(lambda: resnet(1, 1, 1, 1), (3, 16, 16), "deep", slow=True),
    "torchvision ResNet-18": Case(lambda: resnet(2, 2, 2, 2), (3, 32, 32), "deep", slow=True),
    "torchvision ResNet-34": Case(lambda: resnet(3, 4, 6, 3), (3, 32, 32), "deep", slow=True),
    "torchvision MobileNetV2": Case(lambda: zoo().mobilenet_v2(num_classes=CLASSES, norm_layer=group_norm, dropout=0.0), (3, 32, 32), "deep", slow=True),
    "torchvision MobileNetV3": Case(lambda: zoo().mobilenet_v3_small(num_classes=CLASSES, norm_layer=group_norm, dropout=0.0), (3, 32, 32), "deep", slow=True),
    "torchvision EfficientNet-B0": Case(
        lambda: zoo().efficientnet_b0(num_classes=CLASSES, norm_layer=group_norm, dropout=0.0, stochastic_depth_prob=0.0),
        (3, 32, 32), "vmap", slow=True,
    ),
    "torchvision SqueezeNet": Case(lambda: zoo().squeezenet1_1(num_classes=CLASSES, dropout=0.0), (3, 32, 32), "vmap", slow=True),
    "torchvision DenseNet, GroupNorm": Case(
        lambda: without_batch_norm(zoo().DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES)), (3, 32, 32), "vmap"
    ),
    "torchvision DenseNet-121, GroupNorm": Case(
        lambda: without_batch_norm(zoo().densenet121(num_classes=CLASSES)), (3, 32, 32), "vmap", slow=True
    ),
    "torchvision ShuffleNetV2, GroupNorm": Case(
        lambda: without_batch_norm(zoo().shufflenet_v2_x0_5(num_classes=CLASSES)), (3, 32, 32), "vmap", slow=True
    ),
    "torchvision ViT": Case(vit, (3, 16, 16), "opacus"),
    "torchvision ConvNeXt": Case(convnext, (3, 32, 32), "vmap"),
}  # fmt: skip

REFUSED = {
    "LSTM": Case(lambda: recurrent(nn.LSTM(6, 12, batch_first=True)), (7, 6), words=("'layers.0' (LSTM)", "opacus.layers.DPLSTM")),
    "GRU": Case(lambda: recurrent(nn.GRU(6, 12, batch_first=True)), (7, 6), words=("'layers.0' (GRU)", "opacus.layers.DPGRU")),
    "BatchNorm": Case(lambda: images(nn.BatchNorm2d(8)), (3, 8, 8), words=("'1' (BatchNorm2d) mixes", "nn.GroupNorm(8, 8)")),
    "torchvision ResNet-50": Case(
        lambda: zoo().resnet50(num_classes=CLASSES), (3, 32, 32), words=("'bn1' (BatchNorm2d) mixes", "nn.GroupNorm(32, 64)", "(53 such layers)")
    ),
    "InstanceNorm, running": Case(
        lambda: images(nn.InstanceNorm2d(8, track_running_stats=True)), (3, 8, 8), words=("'1' (InstanceNorm2d)", "track_running_stats=False")
    ),
    "Dropout": Case(lambda: images(nn.Dropout2d(0.1)), (3, 8, 8), words=("'1' (Dropout2d)", *KEY, "probability to 0")),
    "dropout in forward": Case(functional_dropout, (12,), words=("a second time",)),
    "MultiheadAttention, dropout": Case(
        lambda: attention(nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)), (7, 8), words=("'layers.0' (MultiheadAttention)", *KEY, "dropout=0.0")
    ),
    "stochastic depth": Case(lambda: convnext(0.1), (3, 32, 32), words=("(StochasticDepth)", *KEY, "stochastic_depth_prob=0.0")),
    "spectral norm": Case(
        lambda: images(nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3))), (3, 8, 8), words=("(_SpectralNorm) keeps buffers",)
    ),
    "weight norm of old": Case(lambda: images(nn.utils.weight_norm(nn.Conv2d(8, 8, 3))), (3, 8, 8), words=("cannot be copied", "parametrizations")),
    "Linear of the wrong width": Case(
        lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(7, CLASSES)), (12,), words=("layer '2' (Linear) takes 7 features",)
    ),
    "Linear of the wrong width, deeper": Case(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(12, 8), nn.Tanh()), nn.Linear(7, CLASSES)), (12,),
        words=("layer '1' (Linear(in_features=7", "whose input has the shape (3, 8)"),
    ),
    "channels missing": Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, CLASSES)), (8, 8), words=("layer '0' (Conv2d) takes (1, height, width)",)
    ),
}  # fmt: skip
