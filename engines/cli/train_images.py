"""The images that the flags of `train` choose: those that are trained on, and those that are held out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from mpi4dl_nb.engines.images.augmented import Augmented
from mpi4dl_nb.engines.images.dataset import LabelledImages, SyntheticImages
from mpi4dl_nb.engines.images.folder import folder_images
from mpi4dl_nb.engines.images.sample_data import load_cifar_images
from mpi4dl_nb.engines.images.tables import has_masks, table_images

CROP = "crop"
"""The augmentation that takes random parts of images."""

Size = tuple[int, int]


def check_image_flags(chosen: argparse.Namespace, given: Collection[str]) -> None:
    """Raise PlanError if a flag was `given` that the chosen application does not read."""
    make = _APPLICATIONS.get(chosen.app)
    medical = make is _make_medical
    table = medical and (_is_table(chosen.datapath) or _is_table(chosen.validate_path))
    reads = {
        # The predecessor's commands name a --datapath beside --app 3, too.
        "datapath": ("app" in given or make is not _make_synthetic, "--app medical or --app cifar"),
        "fit": (medical, "--app medical"),
        **dict.fromkeys(
            ("mask_threshold", "mask_ignore", "within"), (table, "--app medical and a --datapath TABLE.csv")
        ),
    }
    for name, (has_effect, partner) in reads.items():
        if name in given and not has_effect:
            raise PlanError(f"--{name.replace('_', '-')} has no effect without {partner}. Give that as well.")


def make_datasets(chosen: argparse.Namespace, images_per_step: int) -> tuple[LabelledImages, LabelledImages | None]:
    """Make the training images, augmented, and the held-out images, if any. Raises PlanError or ImageError."""
    if chosen.validate_path and chosen.held_out is not None:
        raise PlanError("--validate-path and --held-out both select the held-out images. Give one of them.")
    if chosen.validate_path and _APPLICATIONS.get(chosen.app) is _make_synthetic:
        raise PlanError(
            f"--validate-path {chosen.validate_path} names images, but --app {chosen.app} makes random ones. Give "
            "--held-out 0.2 to judge by some of these, or --app medical or cifar."
        )
    images, others = make_dataset(chosen, images_per_step), None
    crops = CROP in chosen.augment
    # Held-out images are not augmented; where training takes random crops, they are cropped as well.
    judged = {**vars(chosen), "augment": (), "fit": "crop" if crops else chosen.fit}
    if chosen.validate_path:
        judged |= {"datapath": chosen.validate_path, "names": getattr(images, "names", None), "test": True}
        others = make_dataset(argparse.Namespace(**judged), images_per_step)
    elif chosen.held_out is not None:
        _, others = make_dataset(argparse.Namespace(**judged), images_per_step).split(chosen.held_out, chosen.seed)
        images, _ = images.split(chosen.held_out, chosen.seed)
    kinds = [kind for kind in chosen.augment if kind != CROP]
    if not chosen.augment:
        return images, others
    augmented = Augmented(images, kinds, options.parse_image_size(chosen.image_size) if crops else None)
    if chosen.on_bad_image == "raise":
        augmented.check()
    return augmented, others


def make_dataset(chosen: argparse.Namespace, images_per_step: int) -> LabelledImages:
    """Make the images that the flags choose. Raises PlanError if the application is unknown, or ImageError."""
    make = _APPLICATIONS.get(chosen.app)
    if make is None:
        raise PlanError(describe_unknown(f"--app {chosen.app!r} is unknown", chosen.app, _APPLICATIONS))
    if CROP in chosen.augment and make is not _make_medical:
        raise PlanError("--augment crop takes parts of images larger than --image-size: only --app medical has them.")
    images = make(chosen, options.parse_image_size(chosen.image_size), images_per_step)
    # The classes of a mask are two: a model of more would be scored by the mean over classes that no image has.
    if images.classes > chosen.num_classes or (
        chosen.mask_threshold is not None and images.classes != chosen.num_classes
    ):
        raise PlanError(
            f"The images have {images.classes} classes, but --num-classes is {chosen.num_classes}. "
            f"Use --num-classes {images.classes}."
        )
    return images


def _make_medical(chosen: argparse.Namespace, size: Size, images_per_step: int) -> LabelledImages:
    wanted = None if CROP in chosen.augment else size
    check = chosen.on_bad_image == "raise"
    if _is_table(chosen.datapath):
        numbered = chosen.mask_threshold is None and has_masks(chosen.datapath)
        classes = chosen.num_classes if numbered else None
        threshold, within = chosen.mask_threshold, chosen.within
        return table_images(
            chosen.datapath, wanted, chosen.fit, chosen.names, classes, threshold, check, within, chosen.mask_ignore
        )
    images = folder_images(chosen.datapath, wanted, chosen.fit, chosen.names)
    if check:
        images.check()
    return images


def _is_table(path: Path | None) -> bool:
    return path is not None and path.suffix.lower() == ".csv"


def _make_synthetic(chosen: argparse.Namespace, size: Size, images_per_step: int) -> LabelledImages:
    return SyntheticImages(10 * images_per_step, size, chosen.num_classes, chosen.seed)


_APPLICATIONS: dict[str, Callable[[argparse.Namespace, Size, int], LabelledImages]] = {
    **dict.fromkeys(("1", "medical"), _make_medical),
    **dict.fromkeys(
        ("2", "cifar"), lambda chosen, size, _: load_cifar_images(chosen.datapath, size, chosen.test, chosen.names)
    ),
    **dict.fromkeys(("3", "synthetic"), _make_synthetic),
}
