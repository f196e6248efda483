"""Small models with everything in them that plans may get wrong: for random plans, by name on a command line too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Skips(nn.Module):
    """Skips over several layers, batch norms between sizes, dropout, a global pool."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.third = nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.fourth, self.last = nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6, momentum=0.3)
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.third(torch.cat([self.second(skip), skip], 1)))
        x = torch.relu(self.last(self.fourth(x))) + x
        return self.head(functional.dropout(x, 0.3).mean((2, 3)))


class Segmenter(nn.Module):
    """Down, up again, and a class for each pixel."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.deep, self.groups = nn.Conv2d(6, 6, 3, padding=2, dilation=2), nn.GroupNorm(2, 6)
        self.up, self.merge = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(10, 4, 1)
        self.head = nn.Conv2d(4, num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.norm(self.down(x)))
        x = functional.silu(self.groups(self.deep(functional.max_pool2d(skip, 2))))
        x = functional.interpolate(self.up(x), size=skip.shape[2:], mode="bilinear")
        return self.head(torch.relu(self.merge(torch.cat([x, skip], 1))))


class Chain(nn.Sequential):
    """Layers one after another, and nothing else: pipelines in the books."""

    def __init__(self, num_classes: int = 5) -> None:
        convolutions = [nn.Conv2d(channels, 4, 3, padding=1) for channels in (3, 4, 4, 4, 4)]
        layers = [layer for conv in convolutions for layer in (conv, nn.BatchNorm2d(4), nn.ReLU())]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
