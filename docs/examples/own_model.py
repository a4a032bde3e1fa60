"""An example of a user's model: a small perceptron for feature vectors."""

from torch import nn


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logits (n, classes) for a batch (n, d): a Sequential of layers that the fast path knows."""
    (features,) = input_shape
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, classes))
