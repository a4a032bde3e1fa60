"""The CNN of 28,938 parameters in plain torch, and an epoch of SGD on random records."""

from __future__ import annotations

import torch
from torch import nn

RATE, BATCH, RECORDS = 0.01, 32, 200


def cnn() -> nn.Module:
    """Build the network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 10),
    )  # fmt: skip


def records() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the records of one client."""
    return torch.rand(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))


def train(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Run one epoch of SGD."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for begin in range(0, len(y), BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[begin : begin + BATCH]), y[begin : begin + BATCH]).backward()
        optimizer.step()
