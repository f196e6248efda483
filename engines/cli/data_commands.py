"""The commands `table` and `published`, which need no ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engines.cli import options
from engines.errors import PlanError
from engines.images.folder import write_boxes_table, write_masks_table
from engines.predict.published import PUBLISHED
from engines.predict.published_replay import PublishedReplay, ReplayOutcome

__all__ = ["format_outcomes", "run_published", "run_table"]


def run_table(arguments: Sequence[str]) -> None:
    """Make a table of images from other tools' files, and print its number of images.

    Raises ImageError or PlanError if the table cannot be made.
    """
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
    chosen = flags.parse_args(arguments)
    print(f"{chosen.table}: {chosen.make(chosen)} images")


def run_published(arguments: Sequence[str]) -> None:
    """Compare published results to the simulator's: print one line of JSON per row, and a table.

    Raises PlanError or TraceError if a row cannot be simulated.
    """
    flags = options.FlagParser(
        "published", description="Simulate published results; machines and assumptions are data."
    )
    flags.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="rows whose names begin so")
    chosen = tuple(flags.parse_args(arguments).only)
    rows = [row for row in PUBLISHED if row.name.startswith(chosen)]
    if not rows:
        raise PlanError(f"No row begins with {' or '.join(chosen)}. There are {', '.join(r.name for r in PUBLISHED)}.")
    found, replay = [], PublishedReplay()
    for row in rows:
        found.append(replay.simulate_result(row))
        print(json.dumps(found[-1].line), flush=True)
    print(format_outcomes(found))


def format_outcomes(outcomes: Sequence[ReplayOutcome]) -> str:
    """Format simulated and published values, and the range over each row's variants that fit the machine."""
    lines = [f"{'row':24}{'published':>12}{'simulated':>12}{'ratio':>8}  {'range':20}{'peak GiB':>9}  unit"]
    for each in outcomes:
        fitting = [value for _, value, fits in each.varied if fits]
        low, high = min([each.simulated, *fitting]), max([each.simulated, *fitting])
        span = f"{low:.4g} to {high:.4g}" if fitting else ""
        peak = f"{each.peak_bytes / 2**30:.1f}{'' if each.peak_bytes <= each.memory_bytes else '!'}"
        lines.append(
            f"{each.row.name:24}{each.row.published:12.5g}{each.simulated:12.5g}{each.ratio:8.2f}  {span:20}{peak:>9}"
            f"  {each.row.measure}"
        )
        if each.row.why or not each.agrees:
            lines.append(f"    {each.row.why or 'Why they disagree is not known.'}")
        if each.peak_bytes > each.memory_bytes:
            lines.append(f"    ! does not fit the {each.memory_bytes / 2**30:.0f} GiB of a rank")
    return "\n".join(lines)
