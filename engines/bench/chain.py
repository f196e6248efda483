"""A network of any depth and width, made of equal layers in sequence, to study scaling."""

from __future__ import annotations

from torch import nn

__all__ = ["chain"]


def chain(num_layers: int = 20, num_filters: int = 16, *, num_classes: int = 10) -> nn.Sequential:
    """Return a network of a stem, `num_layers` 3 x 3 convolutions with batch norm and ReLU, and a classifier.

    The stem divides the image's sides by 4. Plain PyTorch: (N, 3, H, W) -> (N, num_classes).

    >>> sum(isinstance(layer, nn.Conv2d) for layer in chain(5))
    6
    """
    layers: list[nn.Module] = [nn.Conv2d(3, num_filters, 4, stride=4)]
    for _ in range(num_layers):
        layers += [nn.Conv2d(num_filters, num_filters, 3, padding=1, bias=False), nn.BatchNorm2d(num_filters)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_filters, num_classes))
