"""A plain U-Net for the segmentation of images: one class per pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["UNet"]


class UNet(nn.Module):
    """U-Net: a contracting and an expanding path with skip connections between equal sizes.

    Ronneberger, Fischer and Brox, 2015 (arXiv:1505.04597), figure 1, with padded convolutions and batch norm.
    It has `width` channels at full size, doubled at each of `depth` halvings.

    (N, 3, H, W) -> (N, num_classes, H, W); H and W must be divisible by 2 ** depth.
    """

    def __init__(self, *, num_classes: int = 2, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _make_block(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in widths[-2::-1])
        self.merge = nn.ModuleList(_make_block(2 * wide, wide) for wide in widths[-2::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits per pixel: (N, 3, H, W) -> (N, num_classes, H, W)."""
        # For depth=2:
        #
        #     down[0] ----------------- skip ----------------> merge[1] --> head    full size, `width` channels
        #        `-- pool, down[1] ---- skip ---> merge[0] --up[1]--'               half, 2 * `width`
        #               `-- pool, down[2] --up[0]--'                                quarter, 4 * `width`
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def _make_block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(_make_layer(before, after), _make_layer(after, after))


def _make_layer(before: int, after: int) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True))
