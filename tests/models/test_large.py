"""Networks of tokens, windows, patches and attention stay in tiles at 1,024 x 1,536 px: no rank holds a large value.

Small ones use the same rules where as few pixels may be gathered in proportion, and are those of one process.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler import joined_attention, local_rules
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.local_rules import WHOLE_PX
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.verify import verify
from tests.models.networks import NETWORKS, train_a_little

SIZE = 1024, 1536
PLAN = Plan(split_size=1, num_spatial_parts=4)


def make_transformer(name: str, kind: str = "ForImageClassification", **settings: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**settings))


def make_monai(name: str, **settings: Any) -> nn.Module:
    return getattr(importlib.import_module("monai.networks.nets"), name)(**settings)


_ALL_PIXELS = {"in_shape": (3, *SIZE), "channels": (4, 8), "strides": (2, 2)}
_SIZED = {"image_size": list(SIZE)}
_ATTENTIVE = {
    "spatial_dims": 2, "channels": (8, 8, 8), "num_res_blocks": 1, "norm_num_groups": 4, "in_channels": 3,
    "out_channels": 3, "attention_levels": (False, True, True),
}  # fmt: skip
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
    "AutoencoderKL": lambda: make_monai("AutoencoderKL", **_ATTENTIVE),
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


class AveragedRuns(nn.Module):
    """The attention of Next-ViT, whose keys are means of runs of tokens (Li et al., 2022, arXiv:2207.05501)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        tokens = x.flatten(2).transpose(1, 2)
        means = self.norm(F.avg_pool1d(tokens.transpose(1, 2), 4, 4)).transpose(1, 2)
        scores = self.query(tokens) @ self.key(means).transpose(1, 2)
        mixed = scores.softmax(-1) @ self.value(means)
        return self.head((tokens + mixed).transpose(1, 2).reshape(x.shape))


def make_small(name: str, kind: str = "ForImageClassification", **settings: Any) -> nn.Module:
    return make_transformer(name, kind, **{"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, **settings})


_HEADS = {"num_attention_heads": [1, 2, 2, 4]}
SMALL = {
    **{
        name: NETWORKS[name]
        for name in (
            *("MONAI Classifier", "MONAI Regressor", "MONAI Critic", "transformers ViT", "transformers DINOv2"),
            *("transformers Swin", "transformers Swin V2", "transformers MobileViT", "transformers MobileViT V2"),
            *("transformers FocalNet", "transformers Hiera", "transformers SegFormer, segmenting"),
            "transformers SwiftFormer",
        )
    },
    "transformers PVT": (lambda: make_small("Pvt", image_size=64, **_HEADS), (64, 64)),
    "transformers PVT V2": (lambda: make_small("PvtV2", **_HEADS), (64, 96)),
    "transformers SegFormer": (lambda: make_small("Segformer"), (64, 96)),
    "transformers GLPN": (lambda: make_small("GLPN", "ForDepthEstimation", decoder_hidden_size=8, **_HEADS), (64, 96)),
    "transformers Swin2SR": (
        lambda: make_transformer(
            "Swin2SR", "ForImageSuperResolution", image_size=32, depths=[2], num_heads=[2], embed_dim=8, window_size=4
        ),
        (32, 32),
    ),
    "transformers DINOv2 with registers": (
        lambda: make_transformer(
            "Dinov2WithRegisters",
            image_size=32,
            patch_size=4,
            hidden_size=12,
            num_attention_heads=3,
            num_hidden_layers=2,
        ),
        (32, 32),
    ),
    "MONAI BasicUNet with shuffled pixels": (
        lambda: make_monai(
            "BasicUNet", spatial_dims=2, upsample="pixelshuffle", in_channels=3, features=(8, 8, 8, 8, 8, 8)
        ),
        (32, 48),
    ),
    "MONAI VarAutoEncoder": (
        lambda: make_monai(
            "VarAutoEncoder",
            spatial_dims=2,
            out_channels=3,
            latent_size=4,
            in_shape=(3, 32, 48),
            channels=(4, 8),
            strides=(2, 2),
        ),
        (32, 48),
    ),
    "MONAI Discriminator": (
        lambda: make_monai("Discriminator", in_shape=(3, 32, 48), channels=(4, 8), strides=(2, 2)),
        (32, 48),
    ),
    "MONAI AutoencoderKL": (lambda: make_monai("AutoencoderKL", **_ATTENTIVE), (24, 32)),
    "attention to averaged runs": (AveragedRuns, (32, 48)),
}  # fmt: skip


def compute_squares(answer: Any, labels: Tensor) -> Tensor:
    tensors = answer if isinstance(answer, list | tuple) else [answer]
    return torch.stack([part.square().mean() for part in tensors]).sum()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_what_a_large_image_needs_is_exact(name: str, monkeypatch: pytest.MonkeyPatch):
    """At 1,024 x 1,536 px, each rank may gather a 96th of the pixels."""
    build, size = SMALL[name]
    few_px = math.prod(size) // 96
    for module in local_rules, joined_attention:
        monkeypatch.setattr(module, "WHOLE_PX", few_px)
    torch.manual_seed(0)
    model, plan = build(), Plan(split_size=1, slice_method="2x2", precision="float64")
    train_a_little(model, seed=1)
    recipe = prepare(model, plan, (2, 3, *size), compute_squares)
    told, *_ = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, compute_squares, 0))
    assert told["ok"], told
