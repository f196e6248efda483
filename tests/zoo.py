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


class Volume(nn.Module):
    """A class for each voxel, of two sizes that are joined by trilinear interpolation."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.down, self.groups = nn.Conv3d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.deep, self.norm = nn.Conv3d(4, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4)
        self.merge, self.head = nn.Conv3d(8, 4, 3, padding=1), nn.Conv3d(4, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.groups(self.down(x)))
        x = torch.relu(self.norm(self.deep(functional.avg_pool3d(skip, 2))))
        x = functional.interpolate(x, size=skip.shape[2:], mode="trilinear", align_corners=True)
        return self.head(functional.silu(self.merge(torch.cat([x, skip], 1))))


class Tokens(nn.Module):
    """Patches with positions as tokens, two layers of attention with dropout of its weights, and a class."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.patches, self.heads = nn.Conv2d(3, 8, 2, stride=2, padding=1), 2
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.mixers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for norm, project, mix in zip(self.norms, self.projections, self.mixers, strict=True):
            parts = project(norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, dropout_p=0.1 if self.training else 0.0)
            x = x + functional.gelu(mix(mixed.transpose(1, 2).flatten(2)))
        return self.head(x.mean(1))


class FrozenBackbone(nn.Module):
    """Features under `torch.no_grad()`, of weights that nobody froze, and a head that learns."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        layers = [layer for c in (3, 6, 6) for layer in (nn.Conv2d(c, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, num_classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(x)


class Constants(nn.Module):
    """Pictures normalised by numbers that are made in forward, and channels in another order."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, num_classes, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = torch.tensor([0.5, 0.4, 0.3], dtype=x.dtype, device=x.device), x.new_tensor([0.25, 0.5, 0.125])
        x = (x - mean[:, None, None]) / std[:, None, None]
        return self.body(x[:, [2, 1, 0]])


class ShiftedWindows(nn.Module):
    """Attention in shifted windows (Liu et al., 2021, arXiv:2103.14030), written as torchvision has it.

    `roll` shifts the windows, and a mask that is assigned slice by slice keeps apart what the shift has joined.
    """

    def __init__(self, num_classes: int = 5, channels: int = 8, window: int = 4) -> None:
        super().__init__()
        self.patches, self.window = nn.Conv2d(3, channels, 2, stride=2), window
        self.norm, self.out = nn.LayerNorm(channels), nn.Linear(channels, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.head = nn.Conv2d(channels, num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        x = x + self.compute_attention(self.norm(x))
        return functional.interpolate(self.head(x.permute(0, 3, 1, 2)), scale_factor=2)

    def compute_attention(self, x: Tensor) -> Tensor:
        """(N, H, W, C) -> the same."""
        window, shift = self.window, self.window // 2
        n, height, width, channels = x.shape
        x = functional.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        rows, cols = x.shape[1:3]
        x = torch.roll(x, (-shift, -shift), (1, 2))
        mask = x.new_zeros((rows, cols))
        spans = ((0, -window), (-window, -shift), (-shift, None))
        for count, (top, left) in enumerate((top, left) for top in spans for left in spans):
            mask[top[0] : top[1], left[0] : left[1]] = count
        region = self.cut(mask[None, :, :, None]).squeeze(-1)
        apart = region[:, None] - region[:, :, None]
        apart = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
        q, k, v = self.qkv(self.cut(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / channels**0.5
        scores = (scores.view(n, -1, *scores.shape[1:]) + apart).view(scores.shape)
        x = self.out(scores.softmax(-1) @ v)
        x = x.view(n, rows // window, cols // window, window, window, channels).permute(0, 1, 3, 2, 4, 5)
        x = torch.roll(x.reshape(n, rows, cols, channels), (shift, shift), (1, 2))
        return x[:, :height, :width]

    def cut(self, x: Tensor) -> Tensor:
        """(N, H, W, C) -> (windows, pixels, C)."""
        n, rows, cols, channels = x.shape
        x = x.view(n, rows // self.window, self.window, cols // self.window, self.window, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, channels)
