"""Map of the ranks: every copy of the model as a row of stages, each drawn as its grid of tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import shorten

from matplotlib.axes import Axes
from torch import nn

from mpi4dl_nb.draw.figure import INK, BarStyle, Box, Drawing, Style, draw_boxes, write_first_fit
from mpi4dl_nb.draw.memory import trace_model
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.formatting import format_bytes, format_count, format_number, format_ranks, format_seconds
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout, Pipeline, StageRanks
from mpi4dl_nb.engines.predict.forecast import Forecast, RankLoad, count_load, forecast, with_time
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import resolve_machine
from mpi4dl_nb.engines.train.optimiser_trial import count_optimiser_states
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import sgd

# The forecast of a training step as one line of text.


def describe_forecast(found: Forecast, machine: Machine) -> str:
    """Return `Predicted on Summit: 12.3 ms a step, 325 images/s; the fullest rank holds 459.2 MB of 16.0 GB.`"""
    limit = machine.get_rank_bytes(found.ranks)
    room = f" of {format_bytes(limit)}" if limit else ""
    room += ": it does not fit" if limit and limit < found.peak_bytes else ""
    return (
        f"Predicted on {machine.name}: {format_seconds(found.seconds)} a step{found.time_note}, "
        f"{format_number(found.images_per_s)} images/s; the fullest rank holds {format_bytes(found.peak_bytes)}{room}."
    )


# The loads of the ranks as rows of bars: weights, activations kept for backward, and bytes sent.


RanksByLoad = Mapping[RankLoad, tuple[int, ...]]
"""Ranks grouped by equal load."""

ROW_IN, BAR_SHARE = 0.27, 0.67  # height of a row, and of its bar as a fraction of that
MOST_ROWS, MOST_LETTERS = 16, 22
COUNTING, NOT_COUNTED = "counting ...", "not counted"
LOOKS = (
    BarStyle("weights and buffers", "#56b4e9", ""),
    BarStyle("activations kept for backward", "#e69f00", "//"),
    BarStyle("sent in a training step", "#009e73", "xx"),
    BarStyle("own work in a step, predicted", "#bfbfbf", "\\\\"),
)
PLACES = {3: ((1.75, 1.1), (4.2, 1.1), (7.6, 1.2)), 4: ((1.6, 0.6), (3.25, 0.6), (5.9, 0.6), (8.45, 0.6))}
"""By number of columns: the left edge of each column's bars, and the length of its longest bar, in inches."""


def group_loads(loads: Sequence[RankLoad]) -> RanksByLoad:
    """Group ranks of equal load. `loads` holds the load of each rank, in rank order."""
    groups: dict[RankLoad, tuple[int, ...]] = {}
    for rank, load in enumerate(loads):
        groups[load] = (*groups.get(load, ()), rank)
    return groups


def draw_loads(figure: Drawing, loads: RanksByLoad, top_in: float, missing: str) -> None:
    """Draw a row per group of equal load: three bars, or four with times, each with its number or `missing`."""
    #             weights and buffers   activations kept     sent in a training step
    #    rank 0   [====] 486.6 KB       [//] 3.2 MB          [xxx] 182 messages, 1.1 MB
    #    ranks 1, 2 ...
    # Each column has a scale of its own: its longest bar is the largest number in it.
    groups, shown = list(loads.values()), min(len(loads), MOST_ROWS)
    names = [shorten(format_ranks(ranks), MOST_LETTERS, placeholder=" ...") for ranks in groups[:shown]]
    if rest := sum(map(len, groups[shown:])):
        names.append(f"... and {rest} more ranks")
    by_column = list(zip(*(list_values(load, missing) for load in loads), strict=True))
    wide_in, high_in = figure.get_size_inches()
    rows_in = ROW_IN * len(names)
    for values, look, (left, longest) in zip(by_column, LOOKS, PLACES.get(len(by_column), ()), strict=False):
        bottom = 1 - (top_in + ROW_IN / 2 + rows_in) / high_in
        axes = figure.add_axes((left / wide_in, bottom, longest / wide_in, rows_in / high_in))
        sizes, texts = zip(*values, strict=True)
        bars = axes.barh(range(shown), sizes[:shown], BAR_SHARE, **look.patch | {"linewidth": 0})
        axes.bar_label(bars, texts[:shown], padding=5, fontsize=9)
        axes.set(xlim=(0, max(sizes) or 1), ylim=(len(names) - 0.5, -0.5))
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(look.name, loc="left", fontsize=9, weight="bold", pad=2)
        if values is by_column[0]:
            axes.set_yticks(range(len(names)), names, fontsize=9)
            axes.tick_params(length=0)


def describe_loads(loads: RanksByLoad, missing: str) -> Iterable[str]:
    """Yield a description of each row."""
    for load, ranks in loads.items():
        parts = zip(LOOKS, list_values(load, missing), strict=False)
        yield f"{format_ranks(ranks)}: {', '.join(f'{look.name} {description}' for look, (_, description) in parts)}"


def list_values(load: RankLoad, missing: str) -> list[tuple[float, str]]:
    """Return a rank's weights, kept activations, messages and, if known, time: each as a number, and as a text."""
    kept = missing
    if load.kept_bytes is not None and load.peak_bytes is not None:
        kept = f"{format_bytes(load.kept_bytes)} ({format_bytes(load.peak_bytes)} in all)"
    sent = f"{format_count(load.sent.messages, 'message')}, {format_bytes(load.sent.bytes)}"
    values: list[tuple[float, str]] = [(load.weight_bytes, format_bytes(load.weight_bytes))]
    values += [(load.kept_bytes or 0, kept), (load.sent.bytes, sent if load.sent.messages else "nothing")]
    if load.busy_s is not None and load.wait_s is not None:
        values.append((load.busy_s, f"{format_seconds(load.busy_s, 2)}, waits {format_seconds(load.wait_s, 2)}"))
    return values


WIDTH_IN, MARGIN_IN, GAP_IN = 11.0, 0.15, 0.28
TOP_IN = 0.92  # above the stages
LEFT_IN, BETWEEN_IN = 1.05, 0.18  # left of and between copies, if there are several
CELL_IN, LOW_IN, HIGH_IN = 0.34, 0.62, 2.4  # height of a row of tiles; of a copy: minimum, maximum
WIDEST_IN = 1.6  # maximum width of a tile
MOST_COPIES, MOST_CELLS = 12, 300
StageColumn = tuple[float, float]
"""Left edge and width of a stage, in inches."""
FACES = {0: ("#dbe9f6", ""), 1: ("#fde3c8", "//")}  # by direction
WORDS: Style = {"fontsize": 9, "va": "center", "color": INK}
ARROW = {"arrowstyle": "-|>", "mutation_scale": 16, "linewidth": 1, "color": INK, "shrinkA": 0, "shrinkB": 0}


def show_ranks(
    plan: Plan,
    model: nn.Module | ModelGraph | None = None,
    image_shape: Sequence[int] | None = None,
    loss: Loss | None = None,
    machine: Machine | str | None = None,
    optimiser: Optimiser = sgd,
) -> Drawing:
    """Draw the replica, direction, stage and tile of every rank; with a model, also the load of each rank.

    `image_shape` is (N, C, H, W) of a batch. A model is traced at that size, which takes seconds; its graph
    (`training.recipe.graph`) is not. With a `machine` (such as `cluster.calibrate()`, or a name), the time of each
    rank is predicted too. The other numbers are counted from the ranks' programs, and memory with the state of the
    `optimiser`, which is as for `Training`. Raises PlanError, TraceError or ImageError.

    >>> from mpi4dl_nb import Plan, resnet20_v1, show_ranks
    >>> figure = show_ranks(Plan(split_size=2, num_spatial_parts=4), resnet20_v1(), (2, 3, 64, 64))
    """
    if model is None:
        return draw_ranks(plan)
    states = count_optimiser_states(optimiser, model, loss)
    graph, plan = trace_model("show_ranks", model, plan, image_shape, loss)
    loads = [count_load(program, graph, plan, states) for program in compile_plan(graph, plan)]
    if machine is None:
        return draw_ranks(plan, loads)
    machine = resolve_machine(machine)
    foreseen = forecast(graph, plan, machine, states)
    return draw_ranks(plan, with_time(loads, foreseen), foreseen=describe_forecast(foreseen, machine))


def draw_ranks(plan: Plan, loads: Sequence[RankLoad] = (), missing: str = NOT_COUNTED, foreseen: str = "") -> Drawing:
    """Draw the figure of `show_ranks` from loads in rank order, with `missing` in place of unknown memory.

    `foreseen` is the forecast of a step, a line below the figure.
    """
    # Many copies are drawn as their first ones and a line about the rest: copies differ in the ranks' numbers only.
    layout, groups = Layout.of(plan), group_loads(loads)
    sheet = _SheetLayout.of(layout)
    more = layout.pipes[len(sheet.pipes) :]
    below = sheet.compute_top(len(sheet.pipes)) + (0.35 if more else 0.1)
    rows = min(len(groups), MOST_ROWS) + (len(groups) > MOST_ROWS)
    bottom = below + (ROW_IN * (rows + 1) if rows else 0.0)
    high = bottom + (0.32 if foreseen else 0) + MARGIN_IN
    figure = Drawing(figsize=(WIDTH_IN, high))
    # A sheet of paper with inches from its upper left corner as units.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH_IN), ylim=(high, 0))
    axes.axis("off")
    forms = [plan.summary, f"{plan.split_size} stages; {plan.ranks} ranks"]
    room_px = (WIDTH_IN - 2 * MARGIN_IN) * figure.dpi
    write_first_fit(axes, MARGIN_IN, 0.26, forms, room_px, fontsize=11, ha="left", weight="bold")
    for index, pipe in enumerate(sheet.pipes):
        _draw_copy(axes, sheet, pipe, sheet.compute_top(index))
    crowded = min(width for _, width in sheet.columns) < 0.75
    for stage_index, (stage, (left, width)) in enumerate(zip(layout.stages, sheet.columns, strict=True)):
        tiles = f"{stage.grid} tiles" if stage.grid.tiles > 1 else f"{stage.shares} shares" if stage.shares > 1 else ""
        forms = [f"stage {stage_index}\n{tiles}".strip(), f"stage {stage_index}"]
        middle = left + width / 2, TOP_IN - 0.06
        forms = [str(stage_index)] if crowded else forms
        write_first_fit(axes, *middle, forms, (width + 0.1) * figure.dpi, fontsize=9, va="bottom")
    if more:
        ranks = sorted({rank for pipe in more for stage in pipe.stages for rank in stage.ranks})
        axes.text(MARGIN_IN, below - 0.2, f"... and {len(more)} more copies, on {format_ranks(ranks)}", **WORDS)
    draw_loads(figure, groups, below + 0.1, missing)
    if foreseen:
        axes.text(MARGIN_IN, bottom + 0.22, foreseen, weight="bold", **WORDS)
    descriptions = []
    for pipe in layout.pipes:
        stages = []
        for stage_index, stage in enumerate(pipe.stages):
            cut = f" of {stage.grid} tiles" if stage.grid.tiles > 1 else ""
            stages.append(f"stage {stage_index}{cut} on {format_ranks(stage.ranks)}")
        descriptions.append(f"replica {pipe.replica}{', mirrored' * pipe.direction}: {', '.join(stages)}")
    figure.alt = f"{plan.summary}. {'; '.join([*descriptions, *describe_loads(groups, missing)])}."
    figure.alt += f" {foreseen}" * bool(foreseen)
    return figure


@dataclass(frozen=True)
class _SheetLayout:
    """Positions of the copies of the model and of their stages, in inches.

             columns[0]          columns[1]
    replica 0  [rank 0 | rank 1] -> [rank 4]   ^
               [rank 2 | rank 3]               | copy_in
                                               v BETWEEN_IN
    replica 1  [rank 5 | rank 6] -> [rank 9]
    """

    pipes: tuple[Pipeline, ...]
    several: bool
    copy_in: float
    columns: tuple[StageColumn, ...]

    @classmethod
    def of(cls, layout: Layout) -> _SheetLayout:
        stages, several = layout.stages, len(layout.pipes) > 1
        copies = min(MOST_COPIES, max(1, MOST_CELLS // sum(len(stage.ranks) for stage in stages)))
        copy_in = min(HIGH_IN, max(LOW_IN, CELL_IN * max(stage.grid.rows for stage in stages)))
        # A stage is wider for more columns of tiles, or more ranks that share images.
        left, gap = MARGIN_IN + LEFT_IN * several, min(GAP_IN, 2.0 / len(stages))
        shares = [_count_columns(stage) + 0.6 for stage in stages]
        unit = min(WIDEST_IN, (WIDTH_IN - MARGIN_IN - left - gap * (len(stages) - 1)) / sum(shares))
        columns = []
        for share in shares:
            columns.append((left, share * unit))
            left += share * unit + gap
        return cls(layout.pipes[:copies], several, copy_in, tuple(columns))

    def compute_top(self, index: int) -> float:
        """Return the upper edge of a copy of the model."""
        return TOP_IN + index * (self.copy_in + BETWEEN_IN)


def _count_columns(stage: StageRanks) -> int:
    return max(stage.grid.cols, stage.shares)


def _draw_copy(axes: Axes, sheet: _SheetLayout, pipe: Pipeline, top: float) -> None:
    """Draw the stages of one copy of the model in a row, from the images on the left to the loss."""
    if sheet.several:
        words = [f"replica {pipe.replica}", *["mirrored"] * pipe.direction]
        axes.text(MARGIN_IN, top + sheet.copy_in / 2, "\n".join(words), **WORDS)
    cells: list[tuple[int, Box]] = []
    frames: list[Box] = []
    for stage, (left, width) in zip(pipe.stages, sheet.columns, strict=True):
        cols = _count_columns(stage)  # ranks that share images are side by side
        wide, high = width / cols, sheet.copy_in / stage.grid.rows
        for index, rank in enumerate(stage.ranks):
            cells.append((rank, (left + index % cols * wide, top + index // cols * high, wide, high)))
        if stage.grid.tiles > 1:
            frames.append((left, top, width, sheet.copy_in))
    # A hatch has the colour of the edge: first the faces with a white hatch, then the outlines in ink.
    face, hatch = FACES[pipe.direction]
    draw_boxes(axes, [box for _, box in cells], facecolor=face, edgecolor="white", hatch=hatch)
    draw_boxes(axes, [box for _, box in cells], fill=False, edgecolor=INK, linewidth=0.8)
    draw_boxes(axes, frames, fill=False, edgecolor=INK, linewidth=2.2)
    for rank, (left, upper, width, height) in cells:
        middle, size = (left + width / 2, upper + height / 2), 9 if height > 0.2 else 7
        write_first_fit(axes, *middle, [f"rank {rank}", str(rank)], width * axes.figure.dpi, fontsize=size)
    for (left, width), (right, _) in pairwise(sheet.columns):
        ends = (right, top + sheet.copy_in / 2), (left + width, top + sheet.copy_in / 2)
        axes.annotate("", *ends, arrowprops=ARROW)
