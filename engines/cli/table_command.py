"""The command `table`: make a table of images from other tools' files. It needs no ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.cli import options
from engines.errors import ImageError, PlanError
from engines.images.folder import write_boxes_table, write_masks_table

__all__ = ["run_table"]


def run_table(arguments: Sequence[str]) -> int:
    """Write a table, and print its number of images. The exit code is 0, or 2 if the table cannot be made."""
    try:
        chosen = _make_parser().parse_args(arguments)
        count = chosen.make(chosen)
    except (ImageError, PlanError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"{chosen.table}: {count} images")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    flags = options.FlagParser("table", description="Write a table of images that `train --app medical` takes.")
    kinds = flags.add_subparsers(required=True, metavar="KIND", parser_class=options.FlagParser)
    masks = kinds.add_parser("masks", help="pictures, and masks of the same names in another folder")
    masks.add_argument("images", type=Path)
    masks.add_argument("masks", type=Path)
    masks.add_argument("table", type=Path, help="the .csv file to write")
    masks.set_defaults(make=lambda chosen: write_masks_table(chosen.images, chosen.masks, chosen.table))
    boxes = kinds.add_parser("boxes", help="crops around the boxes of a folder in Pascal VOC's format")
    boxes.add_argument("folder", type=Path, help="with Annotations, ImageSets and JPEGImages in it")
    boxes.add_argument("list", help="which images, such as train")
    boxes.add_argument("table", type=Path, help="the .csv file to write")
    boxes.add_argument("--crop-px", type=options.parse_positive, default=96, help="height and width of a crop")
    boxes.add_argument("--most", type=options.parse_positive, help="boxes of one class that are taken of one image")
    boxes.set_defaults(
        make=lambda chosen: write_boxes_table(chosen.folder, chosen.list, chosen.table, chosen.crop_px, chosen.most)
    )
    return flags
