"""ResNet-18 with GroupNorm in torchvision's layout and parameter names, without importing torchvision."""

from __future__ import annotations

import torch
from torch import nn

GROUPS = 32


class Block(nn.Module):
    """The basic residual block (He et al. 2016); `relu` appears twice and not in place, so that hooks see each output."""

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wide, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, wide)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(GROUPS, wide)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != wide:
            self.downsample = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.GroupNorm(GROUPS, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, channels, h, w) to (n, wide, h / stride, w / stride)."""
        residual = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + residual)


class ResNet18(nn.Module):
    """(n, channels, h, w) to (n, classes); 11,181,642 parameters at 3 channels and 10 classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, 64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))
