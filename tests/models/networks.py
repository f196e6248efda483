"""Sixty stock networks and more, small: of MONAI, of transformers, and our own, with weights as of a trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.models import UNet, amoebanetd, resnet20_v1, resnet_v2
from tests import zoo
from tests.stock import AS_WRITTEN, MORE, STOCK, Stock

Build = Callable[[], nn.Module]
Network = tuple[Build, tuple[int, int]]
"""A function that makes a network, and the height and width of its images."""


def _make_stock_network(stock: Stock) -> Network:
    flags = ["--model", stock.model, "--model-args", json.dumps(stock.narrow), "--image-size", stock.small]

    def build() -> nn.Module:
        pytest.importorskip(stock.package)
        return options.build_model(options.make_parser("").parse_args(flags))

    return build, options.parse_image_size(stock.small)


def _make_monai_network(name: str, size: tuple[int, int] = (32, 32), **arguments: Any) -> Network:
    return lambda: getattr(pytest.importorskip("monai.networks.nets"), name)(**arguments), size


def _make_segmenter(name: str, size: tuple[int, int] = (32, 32), **arguments: Any) -> Network:
    return _make_monai_network(name, size, **{"spatial_dims": 2, "in_channels": 3, "out_channels": 3} | arguments)


def _make_transformer(
    config: str, size: tuple[int, int] = (32, 32), task: str = "ImageClassification", **arguments: Any
) -> Network:
    def build() -> nn.Module:
        library = pytest.importorskip("transformers")
        chosen = getattr(library, f"{config}Config")(num_labels=5, **arguments)
        return getattr(library, f"{config}For{task}")(chosen)  # type: ignore[no-any-return]

    return build, size


_PLAIN = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_VIT = _PLAIN | {"image_size": 32, "patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_ONE = (1, 1, 1, 1)
_UNET = {"channels": (8, 16, 32), "strides": (2, 2)}
_HEAD = {"in_shape": (3, 32, 32), "channels": (8, 8), "strides": (2, 2)}

NETWORKS: dict[str, Network] = {
    **{
        name: _make_stock_network(stock)
        for name, stock in (STOCK | AS_WRITTEN | MORE).items()
        if name != "MONAI DenseNet121"
    },
    "our ResNet-20 v1": (partial(resnet20_v1, num_classes=5), (32, 32)),
    "our ResNet-20 v2": (partial(resnet_v2, 20, num_classes=5), (32, 32)),
    "our U-Net": (partial(UNet, num_classes=4, width=8), (32, 32)),
    "our AmoebaNet-D": (partial(amoebanetd, 3, 16, num_classes=5), (64, 64)),
    "skips": (zoo.Skips, (24, 32)),
    "a segmenter": (zoo.Segmenter, (24, 32)),
    "a chain": (zoo.Chain, (24, 32)),
    "MONAI UNet, group norm": _make_segmenter(
        "UNet", **_UNET, out_channels=4, num_res_units=1, norm=("group", {"num_groups": 4})
    ),
    "MONAI UNet, batch norm": _make_segmenter("UNet", **_UNET, num_res_units=1, norm="batch"),
    "MONAI UNet, PReLU": _make_segmenter("UNet", **_UNET, act="prelu"),
    "MONAI BasicUNet, batch norm": _make_segmenter("BasicUNet", features=(8, 8, 16, 24, 32, 8), norm="batch"),
    "MONAI SegResNet, batch norm": _make_segmenter("SegResNet", norm="batch", init_filters=8),
    "MONAI DynUNet, batch norm": _make_segmenter(
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[8, 8, 16],
        norm_name="batch",
    ),
    "MONAI AutoEncoder": _make_segmenter("AutoEncoder", channels=(8, 16), strides=(2, 2)),
    "MONAI MedNeXt": _make_segmenter("MedNeXt", init_filters=4, blocks_down=_ONE, blocks_bottleneck=1, blocks_up=_ONE),
    "MONAI DenseNet": _make_monai_network(
        "DenseNet", spatial_dims=2, in_channels=3, out_channels=5, init_features=8, growth_rate=4, block_config=(2, 2)
    ),
    "MONAI Classifier": _make_monai_network("Classifier", classes=5, **_HEAD),
    "MONAI Regressor": _make_monai_network("Regressor", out_shape=(3,), **_HEAD),
    "MONAI Critic": _make_monai_network("Critic", **_HEAD),
    "MONAI EfficientNet": _make_monai_network(
        "EfficientNet",
        blocks_args_str=["r1_k3_s11_e1_i32_o16_se0.25", "r1_k5_s22_e6_i16_o24_se0.25"],
        width_coefficient=0.25,
        image_size=32,
        num_classes=5,
    ),
    "transformers ViT": _make_transformer("ViT", **_VIT),
    "transformers DeiT": _make_transformer("DeiT", **_VIT),
    "transformers ViT-MSN": _make_transformer("ViTMSN", **_VIT),
    "transformers DINOv2": _make_transformer("Dinov2", **_VIT),
    "transformers Data2Vec": _make_transformer("Data2VecVision", **_VIT),
    "transformers BEiT": _make_transformer("Beit", **_VIT),
    "transformers Swin": _make_transformer(
        "Swin", image_size=32, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4
    ),
    "transformers Swin V2": _make_transformer(
        "Swinv2", image_size=32, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[1, 2], window_size=4
    ),
    "transformers MobileViT": _make_transformer(
        "MobileViT", (64, 64), image_size=64, hidden_sizes=[16, 16, 24], neck_hidden_sizes=[8, 8, 8, 8, 16, 16, 16]
    ),
    "transformers MobileViT V2": _make_transformer(
        "MobileViTV2", (64, 64), image_size=64, width_multiplier=0.25, n_attn_blocks=[1, 1, 1]
    ),
    "transformers EfficientNet": _make_transformer(
        "EfficientNet",
        width_coefficient=0.25,
        depth_coefficient=1.0,
        kernel_sizes=[3, 5],
        in_channels=[32, 16],
        out_channels=[16, 24],
        strides=[1, 2],
        num_block_repeats=[1, 1],
        expand_ratios=[1, 6],
        hidden_dim=320,
    ),
    "transformers LeViT": _make_transformer(
        "Levit",
        (64, 64),
        image_size=64,
        hidden_sizes=[16, 32, 48],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    "transformers PVT": _make_transformer("Pvt", image_size=32, num_attention_heads=[1, 2, 2, 4], **_STAGES),
    "transformers PVT V2": _make_transformer("PvtV2", image_size=32, num_attention_heads=[1, 2, 2, 4], **_STAGES),
    "transformers FocalNet": _make_transformer("FocalNet", image_size=32, embed_dim=8, depths=[1, 1, 1, 1]),
    "transformers SegFormer": _make_transformer("Segformer", **_STAGES),
    "transformers SegFormer, segmenting": _make_transformer(
        "Segformer", (64, 64), "SemanticSegmentation", decoder_hidden_size=16, **_STAGES
    ),
    "transformers HGNetV2": _make_transformer(
        "HGNetV2",
        embedding_size=8,
        hidden_sizes=[16, 16, 24, 32],
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 16, 16, 24],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[16, 16, 24, 32],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[2, 2, 2, 2],
    ),
    "transformers SwiftFormer": _make_transformer(
        "SwiftFormer", (64, 64), image_size=64, depths=[1, 1, 1, 1], embed_dims=[8, 8, 16, 16]
    ),
    "transformers TextNet": _make_transformer(
        "TextNet",
        stem_out_channels=8,
        hidden_sizes=[8, 8, 16, 16, 24],
        conv_layer_kernel_sizes=[[[3, 3]], [[1, 3]], [[3, 1]], [[3, 3]]],
        conv_layer_strides=[[1], [2], [2], [2]],
    ),
    "transformers Hiera": _make_transformer(
        "Hiera", (32, 32), image_size=[32, 32], embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1]
    ),
}


def train_a_little(model: nn.Module, seed: int) -> None:
    """Change the weights that are constants, as ones and zeros of norms, to what a training would have made of them."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            first = weight.flatten()[:1]
            if weight.numel() and bool((weight == first).all()):
                change = torch.rand(weight.shape, generator=random)
                weight.copy_((change - 0.5) * 0.1 if float(first) == 0 else weight * (0.8 + 0.4 * change))


def make_images(size: tuple[int, int], seed: int) -> Tensor:
    """Return two images (2, 3, height, width) of other brightness and contrast, as of a camera."""
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 3, *size, generator=random)
    return images * torch.tensor([1.0, 0.4]).view(2, 1, 1, 1) + torch.tensor([0.0, 0.3]).view(2, 1, 1, 1)
