"""Table of kinds of parallelism against image sizes: which plans fit, and how fast they are."""

from __future__ import annotations

import textwrap
from typing import Any

from engines.formatting import format_bytes, format_number, format_percent
from engines.predict.capabilities import Capabilities
from engines.predict.explain import Verdict
from engines.predict.parallelism import describe_plan
from mpi4dl_nb.draw.figure import INK, Drawing, format_rank_count, write_first_fit
from mpi4dl_nb.draw.sheet import Box, draw_boxes

__all__ = ["show_capabilities"]

CELL_IN, LINE_IN = 0.62, 0.16  # heights of a row of cells, and of a line below them
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
CENTRED: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "linespacing": 1.3, "color": INK}


def show_capabilities(found: Capabilities) -> Drawing:
    """Draw the images/s of the best plan of each kind of parallelism (rows) at each image size (columns).

    If no plan of a kind fits, the cell gives the memory that the smallest one needs. Below are the fastest plans.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import capabilities, show_capabilities
    >>> figure = show_capabilities(capabilities(resnet20_v1(), "Summit", ranks=2, sizes_px=(64,), batch=2))
    """
    sizes, kinds = list(found.by_size), found.kinds
    bests = []  # per column: the name of the fastest plan, wrapped to the column's width
    for explained in found.by_size.values():
        best = explained.best
        name = describe_plan(best.best.plan) if best and best.best else "none fits"
        # Matplotlib wraps a text at the edge of the figure only. All columns together hold 140 letters of this size.
        bests.append(textwrap.fill(name, max(8, 140 // len(sizes))))
    lines = max(best.count("\n") for best in bests) + 1
    figure = Drawing(figsize=(11, 1.45 + CELL_IN * len(kinds) + LINE_IN * lines), layout="constrained")
    ranks = format_rank_count(found.ranks)
    title = f"What parallelism can do: {found.model} on {ranks} of {found.machine}, batches of {found.batch}, predicted"
    limit = f"; hatched: does not fit into the {format_bytes(found.rank_bytes)} of a rank" if found.rank_bytes else ""
    legend = f"Images per second of the fastest plan of each kind that fits, and its part of the best{limit}."
    figure.suptitle(textwrap.fill(title, 120), x=0.01, ha="left", fontsize=10.5, weight="bold")
    axes = figure.subplots()
    axes.set_title(legend, loc="left", fontsize=9, pad=10)
    columns = [column + 0.5 for column in range(len(sizes))]
    axes.set(xlim=(0, len(sizes)), ylim=(len(kinds), 0))
    axes.set_xticks(columns, bests, fontsize=8)
    axes.set_xlabel("fastest plan", fontsize=9)
    axes.set_yticks([row + 0.5 for row in range(len(kinds))], kinds, fontsize=9.5)
    above = axes.secondary_xaxis("top")
    above.set_xticks(columns, [f"{size:,}" for size in sizes], fontsize=9, weight="bold")
    above.set_xlabel("image, px a side", fontsize=9)
    for each in (axes, above):  # a table: no ticks, and the cells have outlines of their own
        each.tick_params(length=0)
        each.spines[:].set_visible(False)
    figure.freeze_layout()  # the width of a cell on the screen decides which text fits into it
    frames: list[Box] = []
    for column, size in enumerate(sizes):
        for row, kind in enumerate(kinds):
            look, forms = _describe_verdict(found.get_verdict(kind, size))
            box = (column, row, 1, 1)
            hatch = "////" if look == "large" else None
            draw_boxes(axes, [box], facecolor=FACES[look], edgecolor="white", linewidth=0, hatch=hatch)
            draw_boxes(axes, [box], fill=False, edgecolor=INK, linewidth=0.6, clip_on=False)
            style = CENTRED | {"weight": "bold" if look == "fastest" else "normal"}
            if hatch:  # the text is on plain ground, since it is illegible on the hatch
                style["bbox"] = {"facecolor": FACES[look], "edgecolor": "none", "pad": 2}
            write_first_fit(axes, column + 0.5, row + 0.5, forms, axes.bbox.width / len(sizes), **style)
            frames += [box] * (look == "fastest")
    # Last, so that the lines of the neighbours are below the frames.
    draw_boxes(axes, frames, fill=False, edgecolor=INK, linewidth=2.4, clip_on=False)
    figure.alt = f"{title}. {legend} " + " ".join(
        f"Images of {size:,} px: {explained.words}" for size, explained in found.by_size.items()
    )
    return figure


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
