"""Networks of tokens, windows, patches and attention stay in tiles at 1,024 x 1,536 px: no rank holds a large value.

Their numbers at small sizes are those of one process (`test_verify_networks.py`, `test_stock.py`, `tests/compiler`).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.local_rules import WHOLE_PX
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.train.recipe import prepare

SIZE = 1024, 1536
PLAN = Plan(split_size=1, num_spatial_parts=4)


def make_transformer(name: str, kind: str = "ForImageClassification", **settings: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**settings))


def make_monai(name: str, **settings: Any) -> nn.Module:
    return getattr(importlib.import_module("monai.networks.nets"), name)(**settings)


_ALL_PIXELS = {"in_shape": (3, *SIZE), "channels": (4, 8), "strides": (2, 2)}
_SIZED = {"image_size": list(SIZE)}
LARGE = {
    "SegFormer": lambda: make_transformer("Segformer", "ForSemanticSegmentation"),
    "PVT v2": lambda: make_transformer("PvtV2", **_SIZED),
    "GLPN": lambda: make_transformer("GLPN", "ForDepthEstimation"),
    "Hiera": lambda: make_transformer("Hiera", **_SIZED),
    "Swin": lambda: make_transformer("Swin", **_SIZED),
    "Swin v2": lambda: make_transformer("Swinv2", **_SIZED),
    "Swin2SR": lambda: make_transformer("Swin2SR", "ForImageSuperResolution", depths=[2], num_heads=[2], embed_dim=16),
    "FocalNet": lambda: make_transformer("FocalNet", **_SIZED),
    "SwiftFormer": lambda: make_transformer("SwiftFormer"),
    "MobileViT": lambda: make_transformer("MobileViT"),
    "MobileViT v2": lambda: make_transformer("MobileViTV2"),
    "ViT with patches of 8 px": lambda: make_transformer(
        "ViT", **_SIZED, patch_size=8, hidden_size=48, num_attention_heads=3, intermediate_size=96, num_hidden_layers=2
    ),
    "DINOv2 with registers": lambda: make_transformer(
        "Dinov2WithRegisters", image_size=1024, patch_size=8, hidden_size=48, num_attention_heads=3, num_hidden_layers=2
    ),
    "BasicUNet with shuffled pixels": lambda: make_monai(
        "BasicUNet", spatial_dims=2, upsample="pixelshuffle", in_channels=3, features=(8, 8, 16, 16, 16, 8)
    ),
    "VarAutoEncoder": lambda: make_monai(
        "VarAutoEncoder", spatial_dims=2, out_channels=3, latent_size=4, **_ALL_PIXELS
    ),
    "Classifier": lambda: make_monai("Classifier", classes=5, **_ALL_PIXELS),
    "Critic": lambda: make_monai("Critic", **_ALL_PIXELS),
    "Discriminator": lambda: make_monai("Discriminator", **_ALL_PIXELS),
    "Regressor": lambda: make_monai("Regressor", out_shape=(5,), **_ALL_PIXELS),
}  # fmt: skip


def compute_mean(answer: Any, labels: Tensor) -> Tensor:
    tensors = answer if isinstance(answer, list | tuple) else [answer]
    return torch.stack([part.float().mean() for part in tensors]).sum()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of packages, about their own settings
@pytest.mark.parametrize("name", LARGE)
def test_a_large_image_stays_in_tiles(name: str):
    torch.manual_seed(0)
    (program, *_) = compile_plan(prepare(LARGE[name](), PLAN, (1, 3, *SIZE), compute_mean).graph, PLAN)
    for item in program.forward:
        if isinstance(item, Exchange) and item.window:  # no feature map is gathered but small ones
            assert item.window.pixels <= max(WHOLE_PX, math.prod(item.shape[axis] for axis in item.axes) / 2), item.name
