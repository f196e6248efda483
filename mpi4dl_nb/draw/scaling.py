"""Figures of scaling studies: speed against ranks and shares of the time; and of the largest image that fits."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from mpi4dl_nb.draw.figure import (
    BLUE,
    INK,
    ORANGE,
    BarStyle,
    Drawing,
    Style,
    draw_legend,
    draw_stacks,
    write_first_fit,
    write_row_ends,
)
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes, format_count, format_number, format_percent
from mpi4dl_nb.engines.predict.explain import Verdict, describe_plan
from mpi4dl_nb.engines.predict.sizes import Limit
from mpi4dl_nb.engines.predict.studies import Capabilities, Scaling
from mpi4dl_nb.engines.program.timeline import SHARES

LOOKS = {
    "compute": BarStyle("compute", "#56b4e9", ""),
    "messages": BarStyle("messages: packed, unpacked", "#009e73", "xxx"),
    "waiting for messages": BarStyle("waiting for messages", "#ffffff", ".."),
    "sums": BarStyle("sums: adding up", "#f0e442", "|||"),
    "waiting for sums": BarStyle("waiting for sums", "#fdf6c9", "oo"),
}
LINES = ((BLUE, "-", "o"), (ORANGE, "--", "s"), ("#007a5a", "-.", "^"), ("#7b3294", ":", "D"))
MOST = len(LINES)
IDEAL: Style = {"color": "#767676", "linewidth": 1, "zorder": 2}
PIXELS = BarStyle("largest side that fits", "#56b4e9", "")


def show_scaling(studies: Scaling | Mapping[str, Scaling]) -> Drawing:
    """Plot speed against ranks with the ideal, and the shares of a rank's time with the efficiencies.

    `studies` is one study, or up to four by their names in the figure. Raises PlanError for no study or more than four.

    >>> from mpi4dl_nb import Plan, resnet20_v1, scaling, show_scaling
    >>> weak = scaling(resnet20_v1(), "Summit", Plan(split_size=1, slice_method="1x2"), (2, 3, 64, 64), "weak", (2, 64))
    >>> figure = show_scaling({"weak": weak})
    """
    named = {studies.how: studies} if isinstance(studies, Scaling) else dict(studies)
    if not 1 <= len(named) <= MOST:
        raise PlanError(f"{len(named)} studies are to be shown: give one to {MOST}.")
    points = [(name, study, point) for name, study in named.items() for point in study.points]
    figure = Drawing(figsize=(11, max(4.2, 1.9 + 0.36 * len(points) + 0.25 * len(named))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    grows = any(study.images_grow for study in named.values())
    _draw_speeds(left, named, grows)
    # Where the time goes: a stacked bar for each number of ranks, with the efficiency at its end.
    draw_stacks(right, LOOKS, [{kind: 100 * share for kind, share in point.shares.items()} for *_, point in points])
    labels = [f"{f'{name}, ' * (len(named) > 1)}{format_count(point.ranks, 'rank')}" for name, _, point in points]
    right.set(xlim=(0, 100), xlabel="% of a rank's time")
    right.set_yticks(range(len(points)), labels, fontsize=9)
    right.set_title("Where the time goes", loc="left", fontsize=10)
    ends = [format_percent(study.compute_efficiency(point)) for _, study, point in points]
    write_row_ends(right, ends).set_ylabel("efficiency", fontsize=9)
    first = next(iter(named.values()))
    ways = " and ".join(sorted({study.how for study in named.values()}))
    title = f"{first.model} on {first.machine}, predicted: {ways} scaling"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, [LOOKS[kind] for kind in SHARES])
    figure.alt = f"{title}."
    for name, study in named.items():
        descriptions = []
        for point in study.points:
            parts = ", ".join(f"{format_percent(share)} {kind}" for kind, share in point.shares.items() if share)
            size = " × ".join(map(str, point.image_shape[2:]))
            descriptions.append(
                f"{format_count(point.ranks, 'rank')}, {describe_plan(point.forecast.plan)}, images of {size} px: "
                f"{format_number(point.images_per_s)} images/s, "
                f"efficiency {format_percent(study.compute_efficiency(point))} ({parts})"
            )
        figure.alt += f" {name}: {'; '.join(descriptions)}."
    return figure


def _draw_speeds(axes: Axes, named: Mapping[str, Scaling], grows: bool) -> None:
    """Plot speed against ranks. Both axes are logarithmic, so that ideal scaling is a straight line."""
    for (name, study), (colour, dashes, marker) in zip(named.items(), LINES, strict=False):
        ranks = [point.ranks for point in study.points]
        rates = [point.pixels_per_s / 1e6 if grows else point.images_per_s for point in study.points]
        axes.plot(ranks, rates, color=colour, linestyle=dashes, marker=marker, label=name, zorder=3)
        # Ideal: each rank does as much as those of the first point did.
        axes.plot(ranks, [rates[0] * count / ranks[0] for count in ranks], **IDEAL)
    axes.plot([], [], label="ideal: as much of each rank as of the first", **IDEAL)
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_ylabel("megapixels per second" if grows else "images per second")
    shown: list[int] = []
    for count in sorted({point.ranks for study in named.values() for point in study.points}):
        if not shown or count >= 1.5 * shown[-1]:  # else their labels would overlap on the logarithmic axis
            shown.append(count)
    # Counts of ranks are powers of 2, not of 10: with minor ticks, labels such as 2x10^0 stand between them.
    axes.set_xticks(shown, [f"{count:,}" for count in shown])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(loc="lower right", fontsize=9, frameon=False)


def show_limits(limits: Sequence[Limit], machine: str = "") -> Drawing:
    """Draw the largest square image that fits under each plan, as bars. Raises PlanError if `limits` is empty.

    >>> from mpi4dl_nb import Plan, largest_image, resnet20_v1, show_limits
    >>> plan = Plan(split_size=1, slice_method="2x2")
    >>> figure = show_limits([largest_image(resnet20_v1(), plan, "Summit", most_px=256)], "Summit")
    """
    if not limits:
        raise PlanError("There is no limit to show: give what largest_image() has found, of one plan or of several.")
    figure = Drawing(figsize=(11, 1.3 + 0.42 * len(limits)), layout="constrained")
    axes = figure.subplots()
    texts = []
    for largest in limits:
        limit = format_bytes(largest.rank_bytes)
        if largest.size_px or not largest.next_bytes:
            more = "" if largest.next_bytes else ", and no larger one was tried"
            texts.append(f"{largest.size_px:,} px: {format_bytes(largest.bytes)} of {limit}{more}")
        else:
            texts.append(f"none fits: {largest.next_px:,} px need {format_bytes(largest.next_bytes)} of {limit}")
    draw_stacks(axes, {"px": PIXELS}, [{"px": largest.size_px} for largest in limits])
    write_row_ends(axes, texts)
    plans = [largest.plan for largest in limits]
    names = [f"{describe_plan(plan)}, " * (plan.ranks > 1) + format_count(plan.ranks, "rank") for plan in plans]
    axes.set_yticks(range(len(limits)), names, fontsize=9)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)  # long texts leave a narrow axis
    axes.set_xlim(0, 1.05 * max(limits[0].step_px, *(largest.size_px for largest in limits)))
    axes.set_xlabel(f"pixels a side, in steps of {limits[0].step_px}")
    title = f"The largest square image that fits{f' on {machine}' * bool(machine)}, in batches of {limits[0].batch}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.alt = f"{title}. {'; '.join(f'{name}: {text}' for name, text in zip(names, texts, strict=True))}."
    return figure


# Table of kinds of parallelism against image sizes: which plans fit, and how fast they are.


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


def show_capabilities(found: Capabilities) -> Drawing:
    """Draw the images/s of the best plan of each kind of parallelism (rows) at each image size (columns).

    If no plan of a kind fits, the cell gives the memory that the smallest one needs. Below are the best plans. If they
    were sought by memory, the cells give the memory of the fullest rank in place of images/s.

    >>> from mpi4dl_nb import capabilities, resnet20_v1, show_capabilities
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
    ranks = format_count(found.ranks, "rank")
    title = f"What parallelism can do: {found.model} on {ranks} of {found.machine}, batches of {found.batch}, predicted"
    limit = f"; hatched: does not fit into the {format_bytes(found.rank_bytes)} of a rank" if found.rank_bytes else ""
    legend = f"Images per second of the fastest plan of each kind that fits, and its part of the best{limit}."
    if found.by == "memory":
        legend = f"Memory of the fullest rank in the leanest plan of each kind, in multiples of the least{limit}."
    below = "fastest plan" if found.by == "speed" else "plan with the least memory"
    figure.suptitle(textwrap.fill(title, 120), x=0.01, ha="left", fontsize=10.5, weight="bold")
    axes = figure.subplots()
    axes.set_title(legend, loc="left", fontsize=9, pad=10)
    columns = [column + 0.5 for column in range(len(sizes))]
    axes.set(xlim=(0, len(sizes)), ylim=(len(kinds), 0))
    axes.set_xticks(columns, bests, fontsize=8)
    axes.set_xlabel(below, fontsize=9)
    axes.set_yticks([row + 0.5 for row in range(len(kinds))], kinds, fontsize=9.5)
    above = axes.secondary_xaxis("top")
    above.set_xticks(columns, [f"{size:,}" for size in sizes], fontsize=9, weight="bold")
    above.set_xlabel("image, px a side", fontsize=9)
    for axis in (axes, above):  # a table: no ticks, and the cells have outlines of their own
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.freeze_layout()  # the width of a cell on the screen decides which text fits into it
    for column, size in enumerate(sizes):
        for row, kind in enumerate(kinds):
            look, forms = _describe_verdict(found.get_verdict(kind, size), found.by)
            hatch, is_best = "////" if look == "large" else None, look == "fastest"
            # A hatch has the colour of the edge, so that the outline is a patch of its own. Frames are on top.
            face: Style = {"facecolor": FACES[look], "edgecolor": "white", "linewidth": 0, "hatch": hatch}
            line: Style = {"fill": False, "edgecolor": INK, "clip_on": False}
            line |= {"linewidth": 2.4 if is_best else 0.6, "zorder": 2 if is_best else 1.5}
            for patch in (face, line):
                axes.add_patch(Rectangle((column, row), 1, 1, **patch))
            style: Style = {"fontsize": 9, "linespacing": 1.3, "weight": "bold" if is_best else "normal"}
            if hatch:  # the text is on plain ground, since it is illegible on the hatch
                style["bbox"] = {"facecolor": FACES[look], "edgecolor": "none", "pad": 2}
            write_first_fit(axes, column + 0.5, row + 0.5, forms, axes.bbox.width / len(sizes), **style)
    best_words = (f"Images of {size:,} px: {explained.words}" for size, explained in found.by_size.items())
    figure.alt = f"{title}. {legend} {' '.join(best_words)}"
    return figure


def _describe_verdict(verdict: Verdict | None, by: str) -> tuple[str, list[str]]:
    """Return the key in `FACES` of a cell, and its text in several forms, the longest first."""
    if verdict is None or verdict.best is None:
        return "none", ["cannot run", "–"]
    if not verdict.fits:
        need = format_bytes(verdict.best.peak_bytes)
        return "large", [f"needs\n{need}", need]
    value, share, best = f"{format_number(verdict.best.images_per_s)}/s", format_percent(verdict.share), "fastest"
    if by == "memory":
        value, best = format_bytes(verdict.best.peak_bytes), "least"
        share = f"{format_number(1 / verdict.share)} times"
    if verdict.share == 1:
        return "fastest", [f"{value}\n{best}", value]
    look = "fast" if verdict.share >= FAST else "half" if verdict.share >= HALF else "slow"
    return look, [f"{value}\n{share}", value]
