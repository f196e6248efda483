"""Networks for benchmarks of attention, and nothing else."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def make_swin_t(*, num_classes: int = 10) -> nn.Module:
    """Make Swin-T as the package transformers writes it: attention in windows of 7 x 7 tokens of 4 x 4 pixels.

    Liu et al., 2021 (arXiv:2103.14030), section 3.3. (N, 3, H, W) of any size -> (N, num_classes). Raises ImportError
    without transformers.
    """
    transformers: Any = importlib.import_module("transformers")
    model: nn.Module = transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=num_classes))
    return model


class _AttentionBlock(nn.Module):
    """Attention of each token to all others, then a change of each token by itself: (N, T, width) to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        layers = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.change = nn.Sequential(*layers)

    def forward(self, tokens: Tensor) -> Tensor:
        triple = self.mix(self.norm(tokens)).unflatten(-1, (3, self.heads, -1))
        query, key, value = triple.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + self.project(mixed)
        return tokens + self.change(tokens)


class PixelTransformer(nn.Module):
    """Blocks of attention of each pixel to all others: (N, 3, H, W) -> (N, num_classes, H, W).

    Dosovitskiy et al., 2021 (arXiv:2010.11929), section 3.1, with pixels for patches, and convolutions for positions.

    >>> import torch
    >>> PixelTransformer(num_classes=2)(torch.randn(1, 3, 8, 6)).shape
    torch.Size([1, 2, 8, 6])
    """

    def __init__(self, *, num_classes: int = 2, width: int = 32, heads: int = 2, blocks: int = 1) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, num_classes, 1)
        self.blocks = nn.Sequential(*(_AttentionBlock(width, heads) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits per pixel."""
        x = self.stem(x)
        tokens = self.blocks(x.flatten(2).transpose(1, 2))
        return self.head(tokens.transpose(1, 2).reshape(x.shape))
