"""Models from packages that people use, as the command line's flags: not a line of theirs is changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Stock:
    """`size` is an image, height x width, of which five columns remain where the model cuts it smallest.

    `small`, `narrow` and `grid` are image, arguments and tiles for the tests: the same layers with fewer
    channels. A model that answers for each pixel is tiled to its loss. With too high a `rate`, the first steps take
    a deep model to where one rounding of the image in one process changes gradients by 1e-10.
    """

    model: str
    arguments: Arguments
    narrow: Arguments
    small: str = "64x72"
    size: str = "100x132"
    rate: float = 0.001
    grid: str = "1x3"
    per_pixel: bool = False

    @property
    def package(self) -> str:
        """What has to be installed."""
        return self.model.partition(".")[0].partition(":")[0]

    def make_flags(self, split: int, grid: str, narrow: bool = False) -> list[str]:
        """Model, image and plan: `split` stages, of which the first is cut by `grid`, or all of them."""
        values = {
            "model": self.model,
            "model-args": json.dumps(self.narrow if narrow else self.arguments),
            "image-size": self.small if narrow else self.size,
            "batch-size": 2,
            "learning-rate": self.rate,
            "split-size": split,
            "spatial-size": split if self.per_pixel else 1,
            "slice-method": grid,
        }
        return [f"--{name}={value}" for name, value in values.items()]


def _make_monai(name: str, arguments: Arguments, narrow: Arguments, **choices: Any) -> Stock:
    wide = {"spatial_dims": 2, **arguments}
    return Stock(f"monai.networks.nets:{name}", wide, {**wide, **narrow}, **choices)


def _make_segmenter(name: str, arguments: Arguments, **choices: Any) -> Stock:
    small = choices.pop("small", "36x44")
    three = {"in_channels": 3, "out_channels": 3}
    return _make_monai(name, {**three, **arguments}, choices.pop("narrow", {}), small=small, per_pixel=True, **choices)


def _make_classifier(name: str, arguments: Arguments, narrow: Arguments, **choices: Any) -> Stock:
    """Of transformers, which take a configuration."""
    configs = ({"num_labels": 5, **arguments}, {"num_labels": 5, **arguments, **narrow})
    given = ({"config": {f"transformers:{name}Config": config}} for config in configs)
    return Stock(f"transformers:{name}ForImageClassification", *given, **choices)


def _make_upernet_arguments(backbone: Arguments) -> Arguments:
    """On a ConvNeXt, all of whose stages it reads."""
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "hidden_sizes": [96, 192, 384, 768]}
    thin = {"hidden_size": 32, "auxiliary_channels": 16} if backbone else {}
    config = {"backbone_config": {"transformers:ConvNextConfig": {**stages, **backbone}}, "num_labels": 3, **thin}
    return {"config": {"transformers:UperNetConfig": config}}


_FIVE = {"in_channels": 3, "out_channels": 5}
_RESNET = {"n_input_channels": 3, "num_classes": 5}
_THIN = {"widen_factor": 0.25}
_UNET = {"channels": [8, 16, 32], "strides": [2, 2]}
_RESNET_18 = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
_FEW = {"depths": [1, 1, 2, 1], "hidden_sizes": [32, 48, 64, 96]}

STOCK: dict[str, Stock] = {
    "MONAI DenseNet121": _make_monai(
        "DenseNet121", _FIVE, {"growth_rate": 8, "init_features": 16}, small="64x100", size="100x164"
    ),
    "MONAI ResNet-18": _make_monai("resnet18", _RESNET, _THIN),
    "MONAI ResNet-50": _make_monai("resnet50", _RESNET, _THIN, rate=0.0001),
    "MONAI UNet": _make_segmenter("UNet", {**_UNET, "num_res_units": 2}),
    "MONAI AttentionUnet": _make_segmenter("AttentionUnet", _UNET),
    "transformers ResNet-18": _make_classifier(
        "ResNet", _RESNET_18, {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 48]}
    ),
}
"""Those of VERIFIED.md's table."""

_WRITTEN = {"size": "100x132", "small": "36x44", "per_pixel": True, "grid": "2x2"}

AS_WRITTEN: dict[str, Stock] = {
    "a frozen backbone under no_grad": Stock("tests.zoo:FrozenBackbone", {}, {}, **_WRITTEN),
    "torch.tensor in forward": Stock("tests.zoo:Constants", {}, {}, **_WRITTEN),
    "shifted windows by roll and slice assignment": Stock("tests.zoo:ShiftedWindows", {}, {}, **_WRITTEN),
}
"""Models of our own, written as people write them (`tests/zoo.py`)."""

_CLASSES = {"to_onehot_y": True, "softmax": True}

LOSSES: dict[str, Arguments] = {
    "DiceLoss": _CLASSES,
    "DiceCELoss": _CLASSES,
    "GeneralizedDiceLoss": _CLASSES,
    "TverskyLoss": _CLASSES,
    "FocalLoss": {"to_onehot_y": True, "use_softmax": True},
}
"""Those of `monai.losses`, of labels (N, 1, H, W), with their arguments. The focal one computes in float32."""

MORE: dict[str, Stock] = {
    "MONAI BasicUNet": _make_segmenter("BasicUNet", {}, narrow={"features": [8, 8, 16, 24, 32, 8]}, small="48x80"),
    "MONAI BasicUNetPlusPlus": _make_segmenter(
        "BasicUNetPlusPlus", {}, narrow={"features": [8, 8, 16, 24, 32, 8]}, small="48x80"
    ),
    "MONAI SegResNet": _make_segmenter("SegResNet", {}, small="40x72"),
    "MONAI SegResNetDS": _make_segmenter("SegResNetDS", {}, narrow={"init_filters": 8}, small="40x72"),
    "MONAI DynUNet": _make_segmenter(
        "DynUNet",
        {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 32]},
    ),
    "MONAI FlexibleUNet": _make_segmenter(
        "FlexibleUNet",
        {"backbone": "resnet18"},
        narrow={"backbone": "resnet10", "decoder_channels": [32, 24, 16, 8, 8]},
        small="64x96",
    ),
    "MONAI HighResNet": _make_segmenter("HighResNet", {}),
    "transformers BiT": _make_classifier("Bit", {}, {**_FEW, "embedding_size": 16, "num_groups": 8}),
    "transformers ConvNeXt": _make_classifier("ConvNext", {}, _FEW, small="64x96"),
    "transformers ConvNeXt V2": _make_classifier("ConvNextV2", {}, _FEW, small="64x96"),
    "transformers MobileNetV1": _make_classifier(
        "MobileNetV1", {"classifier_dropout_prob": 0}, {"depth_multiplier": 0.25}, rate=0.0001
    ),
    "transformers MobileNetV2": _make_classifier("MobileNetV2", {}, {"depth_multiplier": 0.35}, rate=0.00001),
    "transformers PoolFormer": _make_classifier("PoolFormer", {}, _FEW),
    "transformers UperNet": Stock(
        "transformers:UperNetForSemanticSegmentation",
        _make_upernet_arguments({}),
        _make_upernet_arguments(_FEW),
        small="64x100",
        per_pixel=True,
        grid="2x2",
    ),
    "transformers RegNet": _make_classifier("RegNet", {}, {**_FEW, "embedding_size": 16, "groups_width": 16}),
}
"""More of those that work."""


def _make_volumes(name: str, small: str, **arguments: Any) -> Stock:
    three = {"spatial_dims": 3, **arguments}
    return Stock(f"monai.networks.nets:{name}", three, three, small=small, per_pixel=name != "resnet18")


_IN_OUT = {"in_channels": 3, "out_channels": 3}
_LEVELS = {"channels": [4, 8, 16], "strides": [2, 2]}
VOLUMES = {
    "UNet": _make_volumes("UNet", "16x20x24", **_IN_OUT, **_LEVELS, num_res_units=1),
    "UNet, group norm": _make_volumes(
        "UNet", "16x20x24", **_IN_OUT, **_LEVELS, norm=["group", {"num_groups": 1}], num_res_units=1
    ),
    "SegResNet": _make_volumes(
        "SegResNet", "16x12x24", **_IN_OUT, init_filters=8, blocks_down=[1, 1, 1], blocks_up=[1, 1]
    ),
    "DynUNet": _make_volumes(
        "DynUNet",
        "16x20x12",
        **_IN_OUT,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 8],
    ),
    "AttentionUnet": _make_volumes("AttentionUnet", "16x20x12", **_IN_OUT, **_LEVELS),
    "BasicUNet": _make_volumes("BasicUNet", "16x32x48", **_IN_OUT, features=[4, 4, 4, 4, 4, 4]),
    "ResNet-18": _make_volumes("resnet18", "16x18x20", n_input_channels=3, num_classes=3, widen_factor=0.125),
}
"""Networks of volumes, depth x height x width."""
