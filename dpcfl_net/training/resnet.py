"""ResNet-18 with GroupNorm: names, order and initial values of torchvision's, without the import of torchvision (1.5 s)."""

from __future__ import annotations

import torch
from torch import nn

GROUPS = 32


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; without in-place operations, which Opacus' backward hooks refuse.

    Args:
        channels: Channels of the input.
        wide: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.
        downsample: The shortcut; None: the input.
    """

    def __init__(self, channels: int, wide: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, wide)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(GROUPS, wide)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for images, (n, channels, height, width)."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        shortcut: torch.Tensor = x if self.downsample is None else self.downsample(x)
        result: torch.Tensor = self.relu(out + shortcut)
        return result


class ResNet18(nn.Module):
    """ResNet-18 with GroupNorm.

    Args:
        channels: Channels of the images.
        classes: Number of logits.
        small_images: True: the first convolution is 3x3 with stride 1, without pooling after it, as He et al. have it for CIFAR-10.

    Source: He et al. 2016; Wu and He 2018.
    """

    def __init__(self, channels: int, classes: int, *, small_images: bool = False) -> None:
        super().__init__()
        # torchvision builds three channels first, and other inputs replace the layer: the order of random draws is kept.
        self.conv1 = _first(3, small_images)
        self.bn1 = nn.GroupNorm(GROUPS, 64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        self.layer1 = _stage(64, 64, 1)
        self.layer2 = _stage(64, 128, 2)
        self.layer3 = _stage(128, 256, 2)
        self.layer4 = _stage(256, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                _initialise(module)
        if channels != 3:
            self.conv1 = _first(channels, small_images)
            _initialise(self.conv1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes), for images, (n, channels, height, width)."""
        h = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(h), 1))
        return logits


def _first(channels: int, small_images: bool) -> nn.Conv2d:
    return nn.Conv2d(channels, 64, 3, 1, 1, bias=False) if small_images else nn.Conv2d(channels, 64, 7, 2, 3, bias=False)


def _stage(channels: int, wide: int, stride: int) -> nn.Sequential:
    """Two blocks; a shortcut that changes the shape is built before them."""
    downsample = None
    if stride != 1 or channels != wide:
        downsample = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.GroupNorm(GROUPS, wide))
    return nn.Sequential(Block(channels, wide, stride, downsample), Block(wide, wide))


def _initialise(layer: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
