"""The flags of a training, with the predecessor's names, defaults and meanings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from engines import options
from engines.errors import PlanError
from engines.images.cifar import cifar_images
from engines.images.folder import FolderImages
from engines.images.labelled import LabelledImages
from engines.images.synthetic import SyntheticImages

__all__ = ["application", "train_parser", "without_effect"]

_SYNTHETIC_STEPS = 10  # of an epoch

Size = tuple[int, int]


def train_parser() -> argparse.ArgumentParser:
    """The flags of `train`."""
    flags = options.parser("Train a model on the ranks, and say how fast, with which loss and accuracy.")
    flags.set_defaults(model="resnet", batch_size=32, image_size="32")
    flags.add_argument("--num-epochs", type=options.positive, default=1)
    flags.add_argument("--max-steps", type=options.positive, help="end an epoch after so many steps")
    flags.add_argument("--app", default="3", help="1 or medical, 2 or cifar, 3 or synthetic: which images to train on")
    flags.add_argument("--datapath", type=Path, default=Path("train"), help="the folder of medical or cifar images")
    flags.add_argument("--num-workers", type=int, default=0, help="accepted, without effect")
    flags.add_argument("--enable-master-comm-opt", action="store_true", help="accepted, without effect")
    flags.add_argument("-v", "--verbose", action="store_true", help="tell loss and accuracy of every step")
    return flags


def without_effect(chosen: argparse.Namespace) -> Iterator[str]:
    """What is to be said of each flag that was given and changes nothing here."""
    if chosen.num_workers:
        yield "--num-workers has no effect: each rank reads its own part of the images by itself."
    if chosen.enable_master_comm_opt:
        yield (
            "--enable-master-comm-opt has no effect: in the predecessor it updated the two copies of GEMS in turn, to "
            "hide their messages. Here both are updated together, at the end of a step, from the whole sum."
        )


def application(chosen: argparse.Namespace, images_per_step: int) -> LabelledImages:
    """The images that the flags ask for. Raises PlanError where there is no such application, or ImageError."""
    make = _APPLICATIONS.get(chosen.app)
    if make is None:
        raise PlanError(f"--app {chosen.app!r} is unknown. Choose one of {', '.join(_APPLICATIONS)}.")
    images = make(chosen, options.image_size(chosen.image_size), images_per_step)
    if images.classes > chosen.num_classes:
        raise PlanError(
            f"The images have {images.classes} classes, but --num-classes is {chosen.num_classes}. "
            f"Use --num-classes {images.classes}."
        )
    return images


def _synthetic(chosen: argparse.Namespace, size: Size, images_per_step: int) -> LabelledImages:
    return SyntheticImages(_SYNTHETIC_STEPS * images_per_step, size, chosen.num_classes, chosen.seed)


def _medical(chosen: argparse.Namespace, size: Size, images_per_step: int) -> LabelledImages:
    return FolderImages(chosen.datapath, size)


def _cifar(chosen: argparse.Namespace, size: Size, images_per_step: int) -> LabelledImages:
    return cifar_images(chosen.datapath, size)


_APPLICATIONS: dict[str, Callable[[argparse.Namespace, Size, int], LabelledImages]] = {
    "1": _medical,
    "medical": _medical,
    "2": _cifar,
    "cifar": _cifar,
    "3": _synthetic,
    "synthetic": _synthetic,
}
