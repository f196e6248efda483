"""Table of kinds of parallelism against image sizes: which plans fit, and how fast they are."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes

from engines.formatting import format_bytes, format_number, format_percent
from engines.predict.capabilities import Capabilities
from engines.predict.explain import Verdict
from engines.predict.parallelism import describe_plan
from mpi4dl_nb.draw.figure import INK, Drawing
from mpi4dl_nb.draw.sheet import Box, draw_boxes, make_sheet, write, write_fitting

__all__ = ["show_capabilities"]

WIDTH_IN, MARGIN_IN, NAMES_IN = 11.0, 0.15, 1.35
TOP_IN, CELL_IN, LINE_IN = 1.15, 0.62, 0.16
FACES = {
    "fastest": "#56b4e9",
    "fast": "#9fd3f2",
    "half": "#d3ebf9",
    "slow": "#f4fafe",
    "large": "#f6e3c5",
    "none": "#eeeeee",
}
"""Blue for plans that fit, darker for faster ones; ochre, hatched, for plans that do not. Each cell has a text too."""
FAST, HALF = 0.9, 0.5


def show_capabilities(found: Capabilities) -> Drawing:
    """Draw the images/s of the best plan of each kind of parallelism (rows) at each image size (columns).

    If no plan of a kind fits, the cell gives the memory that the smallest one needs. Below are the fastest plans.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import capabilities, show_capabilities
    >>> figure = show_capabilities(capabilities(resnet20_v1(), "Summit", ranks=2, sizes_px=(64,), batch=2))
    """
    sizes = list(found.by_size)
    width = (WIDTH_IN - 2 * MARGIN_IN - NAMES_IN) / len(sizes)
    bests = [_format_best_plan(found, size, width) for size in sizes]
    lines = max(best.count("\n") for best in bests) + 1
    below = TOP_IN + CELL_IN * len(found.kinds)
    figure, axes = make_sheet(WIDTH_IN, below + 0.3 + LINE_IN * lines + 0.1)
    title, legend = _format_title(found), _format_legend(found)
    write_fitting(axes, MARGIN_IN, 0.22, [title], WIDTH_IN - 2 * MARGIN_IN, 10.5, ha="left", weight="bold")
    write(axes, MARGIN_IN, 0.5, legend, 9)
    write(axes, MARGIN_IN, TOP_IN - 0.14, "image, px a side", 9)
    frames: list[Box] = []
    for column, size in enumerate(sizes):
        left = MARGIN_IN + NAMES_IN + column * width
        write(axes, left + width / 2, TOP_IN - 0.14, f"{size:,}", 9, ha="center", weight="bold")
        write(axes, left + width / 2, below + 0.14, bests[column], 8, ha="center", va="top")
        for row, kind in enumerate(found.kinds):
            box = left, TOP_IN + row * CELL_IN, width, CELL_IN
            if _draw_cell(axes, box, found.get_verdict(kind, size)) == "fastest":
                frames.append(box)
    draw_boxes(axes, frames, fill=False, edgecolor=INK, linewidth=2.4)
    for row, kind in enumerate(found.kinds):
        write(axes, MARGIN_IN, TOP_IN + (row + 0.5) * CELL_IN, kind, 9.5)
    write(axes, MARGIN_IN, below + 0.22, "fastest plan", 9)
    figure.alt = f"{title}. {legend} " + " ".join(
        f"Images of {size:,} px: {explained.words}" for size, explained in found.by_size.items()
    )
    return figure


def _format_title(found: Capabilities) -> str:
    ranks = f"{found.ranks:,} rank{'s'[: found.ranks > 1]}"
    return f"What parallelism can do: {found.model} on {ranks} of {found.machine}, batches of {found.batch}, predicted"


def _format_legend(found: Capabilities) -> str:
    limit = f"; hatched: does not fit into the {format_bytes(found.rank_bytes)} of a rank" if found.rank_bytes else ""
    return f"Images per second of the fastest plan of each kind that fits, and its part of the best{limit}."


def _format_best_plan(found: Capabilities, size_px: int, width: float) -> str:
    """Return the name of the fastest plan at an image size, wrapped to `width` inches."""
    best = found.by_size[size_px].best
    name = describe_plan(best.best.plan) if best and best.best else "none fits"
    return textwrap.fill(name, max(8, int(width / 0.068)))


def _draw_cell(axes: Axes, box: Box, verdict: Verdict | None) -> str:
    """Draw a cell and return its key in `FACES`."""
    look, forms = _describe_verdict(verdict)
    hatch = {"hatch": "////"} if look == "large" else {}
    draw_boxes(axes, [box], facecolor=FACES[look], edgecolor="white", linewidth=0, **hatch)
    draw_boxes(axes, [box], fill=False, edgecolor=INK, linewidth=0.6)
    middle = box[0] + box[2] / 2, box[1] + box[3] / 2
    weight = "bold" if look == "fastest" else "normal"
    ground = {"bbox": {"facecolor": FACES[look], "edgecolor": "none", "pad": 2}} if hatch else {}
    write_fitting(axes, *middle, forms, box[2], 9, weight=weight, linespacing=1.3, **ground)
    return look


def _describe_verdict(verdict: Verdict | None) -> tuple[str, list[str]]:
    """Return the key in `FACES` of a cell, and its text in several forms, the longest first."""
    if verdict is None or verdict.best is None:
        return "none", ["cannot run", "–"]
    if not verdict.fits:
        need = format_bytes(verdict.best.peak_bytes)
        return "large", [f"needs\n{need}", need]
    rate, share = format_number(verdict.best.images_per_s), format_percent(verdict.share)
    if verdict.share == 1:
        return "fastest", [f"{rate}/s\nfastest", f"{rate}/s"]
    look = "fast" if verdict.share >= FAST else "half" if verdict.share >= HALF else "slow"
    return look, [f"{rate}/s\n{share}", f"{rate}/s"]
